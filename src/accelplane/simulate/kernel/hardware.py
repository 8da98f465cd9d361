"""The devices of a node's description, added to the buses in the state after boot.

At boot, devices are added in the order of their PCI addresses, which numbers DSAs and IAAs together.
"""

import errno
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

from accelplane.simulate import offload
from accelplane.simulate.journal import TreeError
from accelplane.simulate.kernel.core import Core
from accelplane.simulate.kernel.dlb import TOTAL, DlbDriver
from accelplane.simulate.kernel.fpga import Card, FpgaDriver, Memory
from accelplane.simulate.kernel.idxd import IdxdDriver
from accelplane.simulate.kernel.iommu import Iommu
from accelplane.simulate.kernel.model import oserror
from accelplane.simulate.kernel.onload import VENDOR, Onload, SfcDriver
from accelplane.simulate.kernel.pci import PciBus, PciDriver, PciFunction
from accelplane.simulate.kernel.qat import QatDevice, QatDriver, QatVfDriver
from accelplane.simulate.kernel.sgx import Sgx
from accelplane.simulate.kernel.usermode import Call, Usermode
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
_CO_PROCESSOR, _SYSTEM_PERIPHERAL, _ACCELERATOR, _ETHERNET = "0x0b4000", "0x088000", "0x120000", "0x020000"
_DLB, _DLB_VF = Model("0x2710", _CO_PROCESSOR), Model("0x2711", _CO_PROCESSOR)
_FPGA, _FPGA_VF = Model("0x09c4", _ACCELERATOR), Model("0x09c5", _ACCELERATOR)
_MAX_PLACES = 1024


class Hardware:
    """The buses, drivers and devices of one node: hot-plug, modules, and state that tests set. Calls are serialized."""

    def __init__(self, spec: NodeSpec, usermode: Usermode) -> None:
        self.lock = threading.RLock()
        self.core = core = Core()
        self.tree = core.tree
        # Directories with changing entries, which cannot be mounted separately.
        self.mounted_directories: Sequence[str] = ("/sys/module",) if spec.onload else ()
        self.numa_nodes = spec.numa_nodes
        self.iommu = Iommu(core, spec.iommu)
        self.pci = PciBus(core, self.iommu)
        self._qats: dict[str, QatSpec] = {}
        self._fpgas: dict[str, FpgaSpec] = {}
        self.vfio = VfioPci(self.pci, disable_denylist=spec.disable_denylist, noiommu=spec.noiommu)
        self.idxd = IdxdDriver(self.pci)
        self.dlb = DlbDriver(self.pci)
        self._fpga_drivers = {
            "dfl": FpgaDriver(self.pci, "dfl", self._fpgas),
            "opae": FpgaDriver(self.pci, "opae", self._fpgas),
        }
        self.sfc = SfcDriver(self.pci)
        self.onload = Onload(core, self.sfc, usermode)
        self._modules: Mapping[Loadable, PciDriver | Onload | Sgx] = {
            "vfio-pci": self.vfio,
            "igb_uio": IgbUio(self.pci),
            "sgx": Sgx(core, spec.sgx or offload.SgxSpec(), spec.numa_nodes),
            "sfc": self.sfc,
            "onload": self.onload,
        }
        self._load_faults: dict[str, list[int]] = {}
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
        """Adds a device at its address, by default the first free one; returns the address. Raises `TreeError`."""
        family: offload.Family = next(family for family, described in SPECS.items() if isinstance(spec, described))
        places = (offload.offload_address(family, index, self.numa_nodes) for index in range(_MAX_PLACES))
        with self.lock:
            bdf = spec.bdf or next((place for place in places if place not in self.pci.devices), None)
            if bdf is None or bdf in self.pci.devices:
                raise TreeError(f"{bdf or 'every address'}: already in use")
            self._load_for(spec)
            self._plug(bdf, spec, 0 if self.numa_nodes else -1)
        return bdf

    def unplug(self, bdf: str) -> None:
        """Removes a function, also one in use. Raises `TreeError` if there is none."""
        with self.lock:
            function = self.pci.devices.get(bdf)
            if function is None:
                raise TreeError(f"{bdf[:80]!a}: no PCI function")
            for one in (*function.virtual, function):
                group = self.iommu.group(one)
                for name in (one.name, f"vfio/{group}", f"vfio/noiommu-{group}", self.dlb.node(one) or ""):
                    del self.core.users[name]
            self.pci.unplug(function)

    def has_device(self, name: str) -> bool:
        """Whether a function, a queue, or a node below `/dev` has this name."""
        return name in self.pci.devices or name in self.idxd.parts.devices or self.core.tree.has(f"/dev/{name}")

    def load(self, module: Loadable, *, first_time: bool = False) -> None:
        """Loads a module. A loaded module is an error only with `first_time`, as in modprobe(8).

        Raises `OSError`, EEXIST for a loaded module.
        """
        with self.lock:
            if self._load_faults.get(module):
                raise oserror(self._load_faults[module].pop(), module)
            if first_time or not self._modules[module].loaded:
                self._modules[module].load()

    def fail_load(self, module: Loadable, number: int, *, times: int = 1) -> None:
        """Makes the next `times` attempts to load the module fail with this errno."""
        with self.lock:
            self._load_faults[module] = [number] * times

    def unload(self, module: Loadable) -> None:
        """Unloads a module. Raises `OSError`: EBUSY if a device is in use, EWOULDBLOCK if another module uses it.

        A module that is not loaded is an error, ENOENT, only for those of Onload.
        """
        with self.lock:
            if module == "sfc" and self.onload.loaded:
                raise oserror(errno.EWOULDBLOCK, module)
            if self._modules[module].loaded:
                self._modules[module].unload()
            elif module in ("sfc", "onload"):
                raise oserror(errno.ENOENT, module)

    def create_stack(self, network_namespace: str = "") -> None:
        """Creates a stack of an application. `network_namespace` is the file, empty for the host's namespace.

        Raises `OSError` ENODEV if the module is not loaded.
        """
        with self.lock:
            self.onload.create_stack(network_namespace)

    def usermode_calls(self) -> Sequence[Call]:
        """The programs that the kernel has started."""
        with self.lock:
            return self.onload.usermode.calls()

    def qat(self, bdf: str) -> QatDevice:
        """The QAT device, whose `healthy` and `refuses_to_start` may be set. Raises `TreeError`."""
        for driver in self.pci.drivers.values():
            if isinstance(driver, QatDriver) and bdf in driver.devices:
                return driver.devices[bdf]
        raise TreeError(f"{bdf[:80]!a}: not a QAT function bound to its driver")

    def fpga(self, bdf: str) -> Card:
        """The FPGA card, whose result of programming can be set. Raises `TreeError`."""
        for driver in self._fpga_drivers.values():
            if bdf in driver.cards:
                return driver.cards[bdf]
        raise TreeError(f"{bdf[:80]!a}: not an FPGA card bound to its driver")

    def fpgas(self) -> Sequence[Card]:
        return [card for driver in self._fpga_drivers.values() for card in driver.cards.values()]

    def has_node(self, node: str) -> bool:
        """Whether a node below `/dev` has this name and supports ioctls."""
        with self.lock:
            return any(driver.has(node) for driver in self._fpga_drivers.values())

    def ioctl(self, node: str, request: int, argument: int, memory: Memory) -> int:
        """An ioctl on the node below `/dev` of that name; `argument` is a number, or an address in `memory`.

        Other calls continue meanwhile. Raises `OSError`.
        """
        with self.lock:
            driver = next((driver for driver in self._fpga_drivers.values() if driver.has(node)), None)
            if driver is None:
                raise oserror(errno.ENOTTY, node)
            answer = driver.ioctl(node, request, argument, memory)
        if isinstance(answer, int):
            return answer
        answer.wait()
        with self.lock:
            return answer.finish()

    def _load_for(self, spec: Spec) -> None:
        """Loads the drivers that udev would load for the device."""
        for driver in self._drivers_for(spec):
            if not driver.loaded:
                driver.load()

    def _drivers_for(self, spec: Spec) -> Sequence[PciDriver]:
        match spec:
            case QatSpec(product=product):
                return QatDriver(self.pci, product.driver, self._qats), QatVfDriver(self.pci, product.vf_driver)
            case DlbSpec():
                return (self.dlb,)
            case FpgaSpec(driver=driver):
                return (self._fpga_drivers[driver],)
            case NicSpec():
                return (self.sfc,)
            case _:
                return (self.idxd,)

    def _plug(self, bdf: str, spec: Spec, numa_node: int) -> None:
        try:
            if isinstance(spec, QatSpec):
                self._plug_qat(bdf, spec, numa_node)
            elif isinstance(spec, DlbSpec):
                self._plug_dlb(bdf, spec, numa_node)
            elif isinstance(spec, FpgaSpec):
                self._plug_fpga(bdf, spec, numa_node)
            elif isinstance(spec, NicSpec):
                self.sfc.specs[bdf] = spec
                self._function(bdf, Model(f"0x{spec.model}", _ETHERNET, VENDOR), numa_node)
            else:
                self._plug_idxd(bdf, spec, numa_node)
        except OSError as error:
            raise TreeError(f"{bdf}: cannot be set up as described: {error}") from None

    def _plug_qat(self, bdf: str, spec: QatSpec, numa_node: int) -> None:
        product = spec.product
        self._qats[bdf] = spec
        function = self._function(
            bdf,
            Model(f"0x{product.device_id}", _CO_PROCESSOR),
            numa_node,
            bridge=product.generation < 4 if spec.bridge is None else spec.bridge,
            vf_model=Model(f"0x{product.vf_device_id}", _CO_PROCESSOR),
            total_vfs=spec.could_have,
        )
        if spec.vfs:
            self.pci.enable_vfs(function, spec.vfs)
        for virtual in function.virtual:
            self._bind_driver(virtual, spec.vf_driver)

    def _plug_idxd(self, bdf: str, spec: DsaSpec | IaaSpec, numa_node: int) -> None:
        self.idxd.specs[bdf] = spec
        self.idxd.configured.discard(bdf)
        function = self._function(bdf, Model(f"0x{spec.model}", _SYSTEM_PERIPHERAL), numa_node)
        self._bind_driver(function, "kernel" if spec.driver == "idxd" else spec.driver)

    def _plug_dlb(self, bdf: str, spec: DlbSpec, numa_node: int) -> None:
        function = self._function(bdf, _DLB, numa_node, vf_model=_DLB_VF, total_vfs=spec.total_vfs)
        if spec.vfs:
            self.dlb.configure_vfs(function, spec.vfs)
        if spec.provisioned:
            for place in range(spec.vfs):
                self.dlb.set_resources(function, place, {name: total // spec.vfs for name, total in TOTAL.items()})

    def _plug_fpga(self, bdf: str, spec: FpgaSpec, numa_node: int) -> None:
        self._fpgas[bdf] = spec
        function = self._function(bdf, _FPGA, numa_node, vf_model=_FPGA_VF, total_vfs=len(spec.afus))
        if spec.vfs:
            self._fpga_drivers[spec.driver].enable_vfs(function, spec.vfs)

    def _function(
        self,
        bdf: str,
        model: Model,
        numa_node: int,
        *,
        bridge: bool = False,
        vf_model: Model | None = None,
        total_vfs: int = 0,
    ) -> PciFunction:
        path = f"{self.pci.place(bdf, bridge=bridge, numa_node=numa_node)}/{bdf}"
        function = PciFunction(self.core, bdf, path, model, numa_node, vf_model=vf_model, total_vfs=total_vfs)
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
