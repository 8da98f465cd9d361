"""vfio-pci, which gives user space access to functions: groups, their nodes, and rejected functions.

Facts: drivers/vfio/pci/vfio_pci.c (the denylist, EINVAL) and vfio_pci_core.c (EBUSY for a function with virtual
functions), drivers/vfio/group.c (no IOMMU: EINVAL, or a separate `noiommu-` group if the module parameter allows it).

A real unbind waits, uninterruptibly, until the group is closed. Here it fails immediately with EBUSY, because a
test that blocks in the kernel cannot be ended.
"""

import errno
from collections.abc import Sequence

from accelplane.simulate.journal import Numbers
from accelplane.simulate.kernel.model import oserror
from accelplane.simulate.kernel.numbers import lowest_free
from accelplane.simulate.kernel.pci import PciBus, PciDriver, PciFunction

# Older QAT generations, and the DSA and IAA of the first processors with them.
DENYLIST = frozenset({"0x19e2", "0x19e3", "0x37c8", "0x37c9", "0x0435", "0x0443", "0x0b25", "0x0cfe"})
_CONTAINER = Numbers(10, 196)
_GROUPS, _DEVICES = 238, 239  # assigned dynamically by the kernel


class VfioPci(PciDriver):
    """The driver and its module. Functions in `described` are bound also if they are on the denylist."""

    name = "vfio-pci"
    module = "vfio_pci"
    directories: Sequence[str] = ("/sys/class/vfio", "/sys/class/vfio-dev")

    def __init__(self, bus: PciBus, *, disable_denylist: bool, noiommu: bool) -> None:
        super().__init__(bus)
        self.disable_denylist = disable_denylist
        self.parameters = {"disable_denylist": "NY"[disable_denylist], "ids": "", "enable_sriov": "N"}
        self.noiommu = noiommu
        self._without_iommu: set[str] = set()
        self.described: set[str] = set()

    def load(self) -> None:
        """Loads the modules and adds the container node."""
        self.core.add_module("vfio", {"enable_unsafe_noiommu_mode": "NY"[self.noiommu]})
        self.core.add_class_device("/sys/devices/virtual/misc/vfio", "misc", _CONTAINER, "vfio/vfio")
        super().load()

    def unload(self) -> None:
        super().unload()
        self.core.remove_class_device("/sys/devices/virtual/misc/vfio")
        self.core.remove_module("vfio")

    def probe(self, device: PciFunction) -> None:
        allowed = self.disable_denylist or device.name in self.described
        if device.model.device_id in DENYLIST and not allowed:
            raise oserror(errno.EINVAL, device.path)
        if device.virtual:
            raise oserror(errno.EBUSY, device.path)
        group = self.bus.iommu.group(device)
        if group is None:
            if not self.noiommu:
                raise oserror(errno.EINVAL, device.path)
            group = self.bus.iommu.join_new_group(device, {"name": "vfio-noiommu"})
            self._without_iommu.add(device.name)
        number = self._numbers[device.name] = lowest_free(self._numbers.values())
        name = self._group_name(device)
        self.core.add_class_device(f"/sys/devices/virtual/vfio/{name}", "vfio", Numbers(_GROUPS, group), f"vfio/{name}")
        path, numbers = f"{device.path}/vfio-dev/vfio{number}", Numbers(_DEVICES, number)
        self.core.add_class_device(path, "vfio-dev", numbers, f"vfio/devices/vfio{number}", parent=device.path)

    def busy(self, device: PciFunction) -> bool:
        return super().busy(device) or self.core.users[f"vfio/{self._group_name(device)}"] > 0

    def release(self, device: PciFunction) -> None:
        number = self._numbers.pop(device.name)
        self.core.remove_class_device(f"{device.path}/vfio-dev/vfio{number}")
        self.core.tree.remove(f"{device.path}/vfio-dev")
        self.core.remove_class_device(f"/sys/devices/virtual/vfio/{self._group_name(device)}")
        if device.name in self._without_iommu:
            self._without_iommu.remove(device.name)
            self.bus.iommu.leave_group(device)

    def _group_name(self, device: PciFunction) -> str:
        prefix = "noiommu-" if device.name in self._without_iommu else ""
        return f"{prefix}{self.bus.iommu.group(device)}"


class IgbUio(PciDriver):
    """igb_uio of DPDK: binds functions by `new_id` and creates a node `/dev/uioN` for each."""

    name = "igb_uio"
    module = "igb_uio"
    directories: Sequence[str] = ("/sys/class/uio",)

    def probe(self, device: PciFunction) -> None:
        number = self._numbers[device.name] = lowest_free(self._numbers.values())
        path = f"{device.path}/uio/uio{number}"
        self.core.add_class_device(path, "uio", Numbers(243, number), f"uio{number}", parent=device.path)
        self.core.tree.directory(path, {"name": "igb_uio", "version": "0.1"})

    def release(self, device: PciFunction) -> None:
        self.core.remove_class_device(f"{device.path}/uio/uio{self._numbers.pop(device.name)}")
        self.core.tree.remove(f"{device.path}/uio")
