"""DLB: physical and virtual functions, their nodes `/dev/dlbN`, and the resources of virtual functions.

Facts: Intel's out-of-tree dlb2 driver and its guide to SR-IOV: the total resources of a function; resources of a
virtual function cannot be changed while it is bound (EPERM), nor exceed the available ones (EINVAL); virtual functions
in use are not disabled (EINVAL).
"""

import errno
from collections.abc import Sequence
from functools import partial

from accelplane.simulate.journal import Numbers
from accelplane.simulate.kernel.model import Attribute, oserror
from accelplane.simulate.kernel.numbers import lowest_free, number
from accelplane.simulate.kernel.pci import PciBus, PciDriver, PciFunction

TOTAL = {
    "num_sched_domains": 32,
    "num_ldb_queues": 32,
    "num_ldb_ports": 64,
    "num_dir_ports": 64,
    "num_ldb_credits": 8192,
    "num_dir_credits": 2048,
    "num_atomic_inflights": 2048,
    "num_hist_list_entries": 2048,
    "num_sn0_slots": 16,
    "num_sn1_slots": 16,
}
_MAJOR = 236  # assigned dynamically by the kernel


class DlbDriver(PciDriver):
    """`dlb2`, for functions of both kinds."""

    name = "dlb2"
    module = "dlb2"
    ids: Sequence[str] = ("2710", "2711")
    directories: Sequence[str] = ("/sys/class/dlb2",)

    def __init__(self, bus: PciBus) -> None:
        super().__init__(bus)
        self._vf_resources: dict[str, list[dict[str, int]]] = {}

    def node(self, function: PciFunction) -> str | None:
        """The name of the function's node, such as dlb0, while it is bound."""
        found = self._numbers.get(function.name)
        return None if found is None else f"dlb{found}"

    def probe(self, device: PciFunction) -> None:
        index = self._numbers[device.name] = lowest_free(self._numbers.values())
        path = f"{device.path}/dlb2/dlb{index}"
        self.core.add_class_device(path, "dlb2", Numbers(_MAJOR, index), f"dlb{index}", parent=device.path)
        if device.physfn is None:
            self.core.tree.directory(f"{device.path}/total_resources", dict(TOTAL))
            self.core.tree.directory(
                f"{device.path}/avail_resources",
                {name: Attribute(read=partial(self._available, device, name)) for name in TOTAL},
            )

    def busy(self, device: PciFunction) -> bool:
        return super().busy(device) or self.core.users[self.node(device) or ""] > 0

    def release(self, device: PciFunction) -> None:
        if device.physfn is None:
            self.configure_vfs(device, 0)
            self.core.tree.remove(f"{device.path}/total_resources")
            self.core.tree.remove(f"{device.path}/avail_resources")
        self.core.remove_class_device(f"{device.path}/dlb2/dlb{self._numbers.pop(device.name)}")
        self.core.tree.remove(f"{device.path}/dlb2")

    def configure_vfs(self, function: PciFunction, count: int) -> None:
        if count == 0:
            if any(map(self.bus.busy, function.virtual)):
                raise oserror(errno.EINVAL, function.path)
            for place in range(len(function.virtual)):
                self.core.tree.remove(f"{function.path}/vf{place}_resources")
            self._vf_resources.pop(function.name, None)
            self.bus.disable_vfs(function)
            return
        self._vf_resources[function.name] = [dict.fromkeys(TOTAL, 0) for _ in range(count)]
        self.bus.enable_vfs(function, count)
        for place in range(count):
            given = self._vf_resources[function.name][place]
            files = {
                name: Attribute(
                    read=partial(given.__getitem__, name), write=partial(self._set_resource, function, place, name)
                )
                for name in TOTAL
            }
            self.core.tree.directory(f"{function.path}/vf{place}_resources", files)

    def set_resources(self, function: PciFunction, place: int, resources: dict[str, int]) -> None:
        """Sets the resources of a virtual function, whether or not it is bound."""
        self._vf_resources[function.name][place] |= resources

    def _available(self, function: PciFunction, name: str) -> int:
        return TOTAL[name] - sum(given[name] for given in self._vf_resources.get(function.name, ()))

    def _set_resource(self, function: PciFunction, place: int, name: str, text: str) -> None:
        value = number(text)
        if function.virtual[place].bound_to:
            raise oserror(errno.EPERM, function.path)
        resources = self._vf_resources[function.name][place]
        if value > self._available(function, name) + resources[name]:
            raise oserror(errno.EINVAL, function.path)
        resources[name] = value
