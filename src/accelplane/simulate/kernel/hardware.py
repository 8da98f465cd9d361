"""The devices of a node's description, added to the buses in the state after boot.

At boot, devices are added in the order of their PCI addresses, which numbers DSAs and IAAs together.
"""

import errno
from collections.abc import Mapping, Sequence
from typing import Literal

from accelplane.simulate import offload
from accelplane.simulate.journal import TreeError
from accelplane.simulate.kernel.core import Core
from accelplane.simulate.kernel.dlb import TOTAL, DlbDriver
from accelplane.simulate.kernel.fpga import FpgaDriver
from accelplane.simulate.kernel.idxd import IdxdDriver
from accelplane.simulate.kernel.iommu import Iommu
from accelplane.simulate.kernel.model import oserror
from accelplane.simulate.kernel.onload import VENDOR, Onload, SfcDriver
from accelplane.simulate.kernel.pci import PciBus, PciFunction
from accelplane.simulate.kernel.qat import QatDriver, QatVfDriver
from accelplane.simulate.kernel.sgx import Sgx
from accelplane.simulate.kernel.usermode import Usermode
from accelplane.simulate.kernel.vfio import IgbUio, VfioPci
from accelplane.simulate.offload import DlbSpec, DsaSpec, FpgaSpec, IaaSpec, NicSpec, QatSpec
from accelplane.simulate.specs import Model, NodeSpec

Spec = QatSpec | DsaSpec | IaaSpec | DlbSpec | FpgaSpec | NicSpec
Loadable = Literal["vfio-pci", "igb_uio", "sgx", "sfc", "onload"]
SPECS: Mapping[offload.Family, type[Spec]] = {
    "qat": QatSpec,
    "dsa": DsaSpec,
    "iaa": IaaSpec,
    "dlb": DlbSpec,
    "fpga": FpgaSpec,
    "nic": NicSpec,
}
_CO_PROCESSOR, _SYSTEM_PERIPHERAL, _ACCELERATOR = "0x0b4000", "0x088000", "0x120000"
_ETHERNET = "0x020000"
_MAX_PLACES = 1024


class Hardware:
    """The buses, drivers and devices of one node."""

    def __init__(self, core: Core, spec: NodeSpec, usermode: Usermode) -> None:
        self.core = core
        self.numa_nodes = spec.numa_nodes
        self.iommu = Iommu(core, spec.iommu)
        self.pci = PciBus(core, self.iommu)
        self._qats: dict[str, QatSpec] = {}
        self._idxds: dict[str, DsaSpec | IaaSpec] = {}
        self._fpgas: dict[str, FpgaSpec] = {}
        self.vfio = VfioPci(self.pci, disable_denylist=spec.disable_denylist, noiommu=spec.noiommu)
        self.uio = IgbUio(self.pci)
        self.idxd = IdxdDriver(self.pci, self._idxds)
        self.dlb = DlbDriver(self.pci)
        self.fpga = {"dfl": FpgaDriver(self.pci, "dfl", self._fpgas), "opae": FpgaDriver(self.pci, "opae", self._fpgas)}
        self._nics: dict[str, NicSpec] = {}
        self.sfc = SfcDriver(self.pci, self._nics)
        self.onload = Onload(core, self.sfc, usermode)
        self.load_faults: dict[str, list[int]] = {}
        self.sgx = Sgx(core, spec.sgx or offload.SgxSpec(), spec.numa_nodes)
        devices = _specs_by_address(spec)
        for one, _numa_node in devices.values():
            self._load_for(one)
        for module in spec.loaded:
            self.load(module)
        if spec.sgx and spec.sgx.loaded:
            self.load("sgx")
        for bdf in sorted(devices):
            self._plug(bdf, *devices[bdf])
        if spec.onload:
            for directory in ("/sys/class/net", "/sys/class/misc", "/sys/devices/virtual/misc", "/sys/module"):
                core.tree.directory(directory)
            if spec.onload.loaded:
                for module in ("sfc", "onload"):
                    self.load(module)

    def plug(self, spec: Spec) -> str:
        family: offload.Family = next(family for family, described in SPECS.items() if isinstance(spec, described))
        places = (offload.offload_address(family, index, self.numa_nodes) for index in range(_MAX_PLACES))
        bdf = spec.bdf or next((place for place in places if place not in self.pci.devices), None)
        if bdf is None or bdf in self.pci.devices:
            raise TreeError(f"{bdf or 'every address'}: already in use")
        self._load_for(spec)
        self._plug(bdf, spec, 0 if self.numa_nodes else -1)
        return bdf

    def unplug(self, bdf: str) -> None:
        """Removes a function, also one in use. Raises `TreeError` if there is none."""
        function = self.pci.devices.get(bdf)
        if function is None:
            raise TreeError(f"{bdf[:80]!a}: no PCI function")
        for one in (*function.virtual, function):
            group = self.iommu.group(one)
            for name in (one.name, f"vfio/{group}", f"vfio/noiommu-{group}", self.dlb.node(one) or ""):
                self.core.holds.drop(name)
        self.pci.unplug(function)

    def exists(self, name: str) -> bool:
        """Whether a function, a queue, or a node below `/dev` has this name."""
        return name in self.pci.devices or name in self.idxd.parts.devices or self.core.tree.has(f"/dev/{name}")

    def load(self, module: Loadable, *, first_time: bool = False) -> None:
        """Loads a module. A loaded module is an error only with `first_time`. Raises `OSError`."""
        if self.load_faults.get(module):
            raise oserror(self.load_faults[module].pop(), module)
        if module == "sgx":
            self.sgx.load()
        elif module in ("sfc", "onload"):
            which = self.sfc if module == "sfc" else self.onload
            if first_time or not which.loaded:
                which.load()
        elif module not in self.pci.drivers:
            (self.vfio if module == "vfio-pci" else self.uio).load()

    def unload(self, module: Loadable) -> None:
        """Unloads a module. Raises `OSError`: EBUSY if a device is in use, EWOULDBLOCK if another module uses it."""
        if module == "sgx":
            self.sgx.unload()
        elif module == "onload":
            self.onload.unload()
        elif module == "sfc":
            if self.onload.loaded:
                raise oserror(errno.EWOULDBLOCK, module)
            self.sfc.unload()
        elif module in self.pci.drivers:
            (self.vfio if module == "vfio-pci" else self.uio).unload()

    def _load_for(self, spec: Spec) -> None:
        """Loads the drivers that udev would load for the device."""
        loaded = self.pci.drivers
        if isinstance(spec, DlbSpec):
            if self.dlb.name not in loaded:
                self.dlb.load()
        elif isinstance(spec, NicSpec):
            if not self.sfc.loaded:
                self.sfc.load()
        elif isinstance(spec, FpgaSpec):
            if self.fpga[spec.driver].name not in loaded:
                self.fpga[spec.driver].load()
        elif not isinstance(spec, QatSpec):
            if self.idxd.name not in loaded:
                self.idxd.load()
        elif spec.product.driver not in loaded:
            if not any(isinstance(driver, QatDriver) for driver in loaded.values()):
                self.core.add_module("intel_qat")
            for driver in (
                QatDriver(self.pci, spec.product.driver, self._qats),
                QatVfDriver(self.pci, spec.product.vf_driver),
            ):
                self.core.add_module(driver.module)
                self.pci.register(driver)

    def _plug(self, bdf: str, spec: Spec, numa_node: int) -> None:
        try:
            if isinstance(spec, QatSpec):
                self._plug_qat(bdf, spec, numa_node)
            elif isinstance(spec, DlbSpec):
                self._plug_dlb(bdf, spec, numa_node)
            elif isinstance(spec, FpgaSpec):
                self._plug_fpga(bdf, spec, numa_node)
            elif isinstance(spec, NicSpec):
                self._nics[bdf] = spec
                self._function(bdf, spec.model, numa_node, pci_class=_ETHERNET, vendor=VENDOR)
            else:
                self._plug_idxd(bdf, spec, numa_node)
        except OSError as error:
            raise TreeError(f"{bdf}: cannot be set up as described: {error}") from None

    def _plug_qat(self, bdf: str, spec: QatSpec, numa_node: int) -> None:
        product = spec.product
        self._qats[bdf] = spec
        function = self._function(
            bdf,
            product.device_id,
            numa_node,
            bridge=product.generation < 4 if spec.bridge is None else spec.bridge,
            vf_device_id=product.vf_device_id,
            total_vfs=spec.could_have,
        )
        if spec.vfs:
            self.pci.enable_vfs(function, spec.vfs)
        for virtual in function.virtual:
            self._bind_driver(virtual, spec.vf_driver)

    def _plug_idxd(self, bdf: str, spec: DsaSpec | IaaSpec, numa_node: int) -> None:
        self._idxds[bdf] = spec
        self.idxd.configured.discard(bdf)
        self.idxd.reset(bdf)
        function = self._function(bdf, spec.model, numa_node, pci_class=_SYSTEM_PERIPHERAL)
        self._bind_driver(function, "kernel" if spec.driver == "idxd" else spec.driver)

    def _plug_dlb(self, bdf: str, spec: DlbSpec, numa_node: int) -> None:
        function = self._function(bdf, "2710", numa_node, vf_device_id="2711", total_vfs=spec.total_vfs)
        if spec.vfs:
            self.dlb.configure_vfs(function, spec.vfs)
        if spec.provisioned:
            for place in range(spec.vfs):
                self.dlb.set_resources(function, place, {name: total // spec.vfs for name, total in TOTAL.items()})

    def _plug_fpga(self, bdf: str, spec: FpgaSpec, numa_node: int) -> None:
        self._fpgas[bdf] = spec
        function = self._function(
            bdf, "09c4", numa_node, pci_class=_ACCELERATOR, vf_device_id="09c5", total_vfs=len(spec.afus)
        )
        if spec.vfs:
            self.fpga[spec.driver].enable_vfs(function, spec.vfs)

    def _function(
        self,
        bdf: str,
        device_id: str,
        numa_node: int,
        *,
        pci_class: str = _CO_PROCESSOR,
        vendor: str = "0x8086",
        bridge: bool = False,
        vf_device_id: str = "",
        total_vfs: int = 0,
    ) -> PciFunction:
        function = PciFunction(
            self.core,
            bdf,
            self.pci.place(bdf, bridge=bridge, numa_node=numa_node),
            Model(f"0x{device_id}", pci_class, vendor),
            numa_node,
            vf_model=Model(f"0x{vf_device_id}", pci_class) if vf_device_id else None,
            total_vfs=total_vfs,
        )
        self.pci.plug(function)
        return function

    def _bind_driver(self, function: PciFunction, driver: offload.VfDriver) -> None:
        """Binds the function to the driver in the description."""
        if driver == "kernel":
            return
        self.pci.detach(function)
        if driver == "none":
            return
        self.load(driver)
        function.override = driver
        self.vfio.described.add(function.name)
        self.pci.probe(self.pci.drivers[driver], function)
        self.vfio.described.clear()


def _specs_by_address(spec: NodeSpec) -> Mapping[str, tuple[Spec, int]]:
    """Address, description and NUMA node of every device."""
    devices: dict[str, tuple[Spec, int]] = {}
    for family in SPECS:
        specs: Sequence[Spec] = getattr(spec, f"{family}s")
        for index, one in enumerate(specs):
            bdf = one.bdf or offload.offload_address(family, index, spec.numa_nodes)
            if bdf in devices:
                raise TreeError(f"{bdf}: two devices of the description have this address")
            default_numa_node = index % spec.numa_nodes if spec.numa_nodes else -1
            devices[bdf] = one, default_numa_node if one.numa_node is None else one.numa_node
    return devices
