"""The IOMMU: a group for every function, and the units in `/sys/class/iommu`.

Facts: drivers/iommu/iommu.c (groups have the lowest free number), Documentation/ABI/testing/sysfs-kernel-iommu_groups.
"""

from typing import Literal

from accelplane.simulate.kernel.core import Core, Device
from accelplane.simulate.kernel.numbers import lowest_free

_UNIT = "/sys/devices/virtual/iommu/dmar0"


class Iommu:
    """`mode` is that of the description: user queues need `scalable`; `off` disables translation."""

    def __init__(self, core: Core, mode: Literal["scalable", "legacy", "off"]) -> None:
        self.core = core
        self.mode = mode
        self._groups: dict[str, int] = {}
        core.tree.directory("/sys/kernel/iommu_groups")
        core.tree.directory("/sys/class/iommu")
        if mode != "off":
            core.tree.directory(f"{_UNIT}/devices")
            core.tree.directory(f"{_UNIT}/intel-iommu", {"version": "6:0", "cap": "19ed008c40780c66"})
            core.tree.link(f"{_UNIT}/subsystem", "/sys/class/iommu")
            core.tree.link("/sys/class/iommu/dmar0", _UNIT)

    def add(self, function: Device) -> None:
        """Adds a function, unless the IOMMU is off."""
        if self.mode != "off":
            self.core.tree.link(f"{_UNIT}/devices/{function.name}", function.path)
            self.core.tree.link(f"{function.path}/iommu", _UNIT)
            self.join_new_group(function, {"type": "DMA-FQ", "reserved_regions": "0xfee00000 0xfeefffff msi"})

    def remove(self, function: Device) -> None:
        self.core.tree.remove(f"{_UNIT}/devices/{function.name}")
        self.leave_group(function)

    def translates(self, function: Device) -> bool:
        """Whether the function's addresses are translated."""
        return self.mode != "off" and function.name in self._groups

    def group(self, function: Device) -> int | None:
        """The number of the function's group, None without one."""
        return self._groups.get(function.name)

    def join_new_group(self, function: Device, attributes: dict[str, str]) -> int:
        """Adds the function to a new group with these files."""
        group = self._groups[function.name] = lowest_free(self._groups.values())
        path = f"/sys/kernel/iommu_groups/{group}"
        self.core.tree.directory(path, dict(attributes))
        self.core.tree.link(f"{path}/devices/{function.name}", function.path)
        self.core.tree.link(f"{function.path}/iommu_group", path)
        return group

    def leave_group(self, function: Device) -> None:
        """Removes the function and its group."""
        group = self._groups.pop(function.name, None)
        if group is not None:
            self.core.tree.remove(f"/sys/kernel/iommu_groups/{group}")
            self.core.tree.remove(f"{function.path}/iommu_group")
