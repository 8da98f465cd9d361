"""The PCI bus: functions, their attributes, drivers' ids, and virtual functions.

Facts: drivers/pci/pci-driver.c (IDs, `driver_override`, matching), pci-sysfs.c and iov.c (errnos
of writes), Documentation/ABI/testing/sysfs-bus-pci.
"""

import errno
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accelplane.simulate.functions import pci_attributes, pci_uevent, virtual_address
from accelplane.simulate.journal import TreeError
from accelplane.simulate.kernel.core import Bus, Core, Device, Driver
from accelplane.simulate.kernel.iommu import Iommu
from accelplane.simulate.kernel.model import Attribute, command, oserror, variable
from accelplane.simulate.kernel.numbers import boolean, number
from accelplane.simulate.specs import Model

_ROOT_PORT = Model("0x352a", "0x060400")
_PAGE = 4096


@dataclass(eq=False)
class PciFunction(Device):
    """One function. `total_vfs` is 0 without SR-IOV; `physfn` is the physical function of a virtual one."""

    model: Model
    numa_node: int
    vf_model: Model | None = None
    total_vfs: int = 0
    physfn: "PciFunction | None" = None
    override: str = field(default="", init=False)
    vf_autoprobe: bool = field(default=True, init=False)
    virtual: "list[PciFunction]" = field(default_factory=list["PciFunction"], init=False)

    def fields(self) -> dict[str, str]:
        return pci_uevent(self.name, self.model)


class PciDriver(Driver[PciFunction]):
    """A driver with a table of ids and `new_id`. `directories` of sysfs exist while its module is loaded."""

    vendor = "0x8086"
    ids: Sequence[str] = ()
    directories: Sequence[str] = ()
    parameters: Mapping[str, str] = {}

    def __init__(self, bus: "PciBus") -> None:
        self.bus = bus
        self.core = bus.core
        self._dynamic_ids: list[tuple[str, str]] = []
        self._numbers: dict[str, int] = {}  # of the nodes of bound functions, for drivers that make nodes

    @property
    def loaded(self) -> bool:
        return self.name in self.bus.drivers

    def load(self) -> None:
        """Loads the module. Raises `OSError` EEXIST if it is loaded."""
        if self.loaded:
            raise oserror(errno.EEXIST, self.module)
        self.core.add_module(self.module, self.parameters)
        for path in self.directories:
            self.core.tree.directory(path)
        self.bus.register(self)

    def unload(self) -> None:
        """Unloads the module. Raises `OSError` EBUSY if a device is in use."""
        self.bus.unregister(self)
        for path in self.directories:
            self.core.tree.remove(path)
        self.core.remove_module(self.module)

    def attributes(self) -> Mapping[str, Attribute]:
        return {"new_id": command(self._new_id), "remove_id": command(self._remove_id)}

    def matches(self, device: PciFunction) -> bool:
        if device.override:
            # The named driver is probed, whether or not its table has the ID.
            return device.override == self.name
        return self._supports(device.model.vendor, device.model.device_id)

    def _supports(self, vendor: str, device_id: str) -> bool:
        """Whether the ID is in the driver's table or was added by `new_id`."""
        in_table = vendor == self.vendor and device_id.removeprefix("0x") in self.ids
        return in_table or (vendor, device_id) in self._dynamic_ids

    def busy(self, device: PciFunction) -> bool:
        return self.core.users[device.name] > 0 or any(map(self.bus.busy, device.virtual))

    def configure_vfs(self, function: PciFunction, count: int) -> None:
        """Enables `count` virtual functions, or disables them. Raises `OSError`, ENOENT for drivers that cannot."""
        raise oserror(errno.ENOENT, function.path)

    def _new_id(self, text: str) -> None:
        pair = _ids(text)
        if self._supports(*pair):
            raise oserror(errno.EEXIST)
        self._dynamic_ids.append(pair)
        self.bus.attach_all(self)

    def _remove_id(self, text: str) -> None:
        pair = _ids(text)
        if pair not in self._dynamic_ids:
            raise oserror(errno.ENODEV)
        self._dynamic_ids.remove(pair)


class PciBus(Bus[PciFunction]):
    """The bus with its IOMMU."""

    def __init__(self, core: Core, iommu: Iommu) -> None:
        super().__init__(core, "pci")
        self.iommu = iommu

    def place(self, bdf: str, *, bridge: bool, numa_node: int) -> str:
        """The parent directory of a function. Creates its root port if missing."""
        domain, bus, _place = bdf.split(":")
        if not bridge or int(bus, 16) == 0:
            return f"/sys/devices/pci{domain}:{bus}"
        above = f"{domain}:{int(bus, 16) - 1:02x}"
        name = f"{above}:1f.0"
        port = PciFunction(self.core, name, f"/sys/devices/pci{above}/{name}", _ROOT_PORT, numa_node)
        if port.name not in self.devices:
            self.core.tree.directory(port.path, pci_attributes(port.model, numa_node))
            self.add(port)
        return port.path

    def plug(self, function: PciFunction) -> None:
        """Adds a function. Raises `OSError` EEXIST if its address is in use."""
        if function.name in self.devices:
            raise oserror(errno.EEXIST, function.path)
        self.core.tree.directory(
            function.path,
            {
                **pci_attributes(function.model, function.numa_node),
                "driver_override": variable(function, "override", _parse_override, show=lambda name: name or "(null)"),
                "remove": command(lambda text: self._remove_one(function, text)),
            },
        )
        if function.total_vfs:
            self.core.tree.directory(
                function.path,
                {
                    "sriov_totalvfs": function.total_vfs,
                    "sriov_numvfs": Attribute(
                        read=lambda: len(function.virtual), write=lambda text: self._set_vfs(function, text)
                    ),
                    "sriov_drivers_autoprobe": variable(function, "vf_autoprobe", boolean),
                    "sriov_vf_device": function.vf_model.device_id[2:] if function.vf_model else "0",
                },
            )
        self.iommu.add(function)
        self.add(function)

    def unplug(self, function: PciFunction) -> None:
        """Removes a function and its virtual functions. Raises `OSError` EBUSY if one of them is in use."""
        self.disable_vfs(function)
        self.remove(function)
        self.iommu.remove(function)

    def probe(self, driver: Driver[PciFunction], device: PciFunction) -> None:
        if device.physfn and not device.physfn.vf_autoprobe and not device.override:
            raise oserror(errno.ENODEV, device.path)
        super().probe(driver, device)

    def busy(self, function: PciFunction) -> bool:
        """Whether a process uses the function."""
        driver = self.drivers.get(function.bound_to)
        return driver is not None and driver.busy(function)

    def enable_vfs(self, function: PciFunction, count: int) -> None:
        """Adds virtual functions, as pci_enable_sriov() does, and probes their drivers."""
        if function.vf_model is None:
            raise oserror(errno.ENODEV, function.path)
        for place in range(count):
            try:
                bdf = virtual_address(function.name, place)
            except TreeError:
                raise oserror(errno.ENOMEM, function.path) from None
            path = f"{posixpath.dirname(function.path)}/{bdf}"
            virtual = PciFunction(self.core, bdf, path, function.vf_model, function.numa_node, physfn=function)
            self.core.tree.link(f"{virtual.path}/physfn", function.path)
            self.core.tree.link(f"{function.path}/virtfn{place}", virtual.path)
            function.virtual.append(virtual)
            self.plug(virtual)
        self.core.send_uevent("change", function.path, "pci", **function.fields())

    def disable_vfs(self, function: PciFunction) -> None:
        """Removes all virtual functions, as pci_disable_sriov() does. Raises `OSError` EBUSY if one is in use."""
        if any(map(self.busy, function.virtual)):
            raise oserror(errno.EBUSY, function.path)
        while function.virtual:
            if self.devices.get(function.virtual[-1].name) is function.virtual[-1]:
                self.unplug(function.virtual[-1])
            function.virtual.pop()
            self.core.tree.remove(f"{function.path}/virtfn{len(function.virtual)}")

    def _set_vfs(self, function: PciFunction, text: str) -> None:
        count = number(text, most=0xFFFF)
        if count > function.total_vfs:
            raise oserror(errno.ERANGE)
        if count == len(function.virtual):
            return
        driver = self.drivers.get(function.bound_to)
        if not isinstance(driver, PciDriver):
            raise oserror(errno.ENOENT)
        if count and function.virtual:
            raise oserror(errno.EBUSY)
        driver.configure_vfs(function, count)

    def _remove_one(self, function: PciFunction, text: str) -> None:
        if number(text):
            self.unplug(function)
            if function.physfn:
                # Linux leaves the dangling link until the functions are disabled.
                place = function.physfn.virtual.index(function)
                self.core.tree.remove(f"{function.physfn.path}/virtfn{place}")


def _ids(text: str) -> tuple[str, str]:
    """The vendor and the device ID in the text, as in `Model`."""
    words = text.split()
    try:
        return f"0x{int(words[0], 16):04x}", f"0x{int(words[1], 16):04x}"
    except (IndexError, ValueError):
        raise oserror(errno.EINVAL) from None


def _parse_override(text: str) -> str:
    if len(text) >= _PAGE - 1:
        raise oserror(errno.EINVAL)
    return text.partition("\n")[0]
