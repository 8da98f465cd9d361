"""`Host`: the files of a node, with its PCI functions and NUMA nodes."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

from accelplane.host import topology
from accelplane.host.errors import HostError, Missing
from accelplane.host.files import HostFiles
from accelplane.host.paths import HostPaths
from accelplane.host.pci import PciDevice, pci_address

if TYPE_CHECKING:
    from accelplane.host.isolation import HostThread

T = TypeVar("T")


class Host(HostFiles):
    """The node below `root`. Every path given or returned is the host's own, without the root."""

    # Runs the functions of `run`, one at a time. The agent sets it and waits for its end.
    thread: "HostThread | None" = None

    def fresh(self) -> Self:
        made = super().fresh()
        made.thread = self.thread
        return made

    def _begin(self, paths: HostPaths) -> None:
        super()._begin(paths)
        self._hints: topology.Cache = {}
        self._numa_nodes: dict[tuple[str, ...], tuple[int, ...] | None] = {}

    def pci_devices(self, vendor: str | None = None) -> list[PciDevice]:
        """The PCI functions, those of one vendor (`0x8086`) if given; unreadable ones are noted and left out."""
        found: list[PciDevice] = []
        for name, path in self.class_devices("pci", bus=True):
            if pci_address(name) is None:
                continue
            try:
                made_by = self.text(f"{path}/vendor")
                if vendor in (None, made_by):
                    ids = made_by, self.text(f"{path}/device"), self.text(f"{path}/class")
                    found.append(PciDevice(name, path, *ids))
            except HostError as error:
                self.note(f"PCI function {name} skipped: {error}")
        return found

    def optional_names(self, path: str) -> list[str]:
        """As `names`, but empty if the directory does not exist. Raises `Unreadable`."""
        try:
            return self.names(path)
        except Missing:
            return []

    def driver(self, device: str) -> str:
        """The name of the driver bound to the sysfs device directory. Raises `Missing` or `Unreadable`."""
        return self.link(f"{device}/driver").rstrip("/").rpartition("/")[2]

    def driver_or_empty(self, device: str) -> str:
        """As `driver`, but empty without a driver or if the link cannot be read."""
        try:
            return self.driver(device)
        except HostError:
            return ""

    def vf_count(self, device: str) -> str:
        """The text of `sriov_numvfs` of the sysfs device directory; `-1` without one, or with a note after an error."""
        try:
            count = self.optional_text(f"{device}/sriov_numvfs")
        except HostError as error:
            self.note(f"virtual functions unknown: {error}")
            count = None
        return "-1" if count is None else count

    def is_vf(self, device: str) -> bool:
        """Whether the PCI function is a virtual one. The physical function may be invisible."""
        try:
            self.link(f"{device}/physfn")
        except Missing:
            return False
        except HostError:
            pass  # not a link
        return True

    def topology_of(self, *devices: str) -> tuple[int, ...] | None:
        """The NUMA nodes of the sysfs devices (directories or class links), ascending; None if they have none.

        Devices that cannot be read are noted; the result contains the others.
        """
        if devices not in self._numa_nodes:
            self._numa_nodes[devices] = topology.of_sysfs(self, devices, self._hints)
        return self._numa_nodes[devices]

    def topology_of_nodes(self, nodes: Sequence[str]) -> tuple[int, ...] | None:
        """As `topology_of`, for files under `/dev` (of any other file: for its disk)."""
        devices: list[str] = []
        for node in nodes:
            try:
                devices.append(topology.sysfs_device(self, node))
            except HostError as error:
                self.note(f"NUMA node of {node} unknown: {error}")
        return topology.of_sysfs(self, devices, self._hints)

    def device_of_node(self, path: str) -> str:
        """The sysfs directory of the device behind a file in `/dev`. Raises `HostError`."""
        return topology.sysfs_device(self, path)

    def function_of(self, device: str) -> str:
        """The directory of the PCI function that has the sysfs device, empty if none has. Raises `HostError`."""
        path = self.resolve(device)
        while path and pci_address(path.rpartition("/")[2]) is None:
            path = path.rpartition("/")[0]
        return path

    async def run(self, work: Callable[["Host"], T]) -> T:
        """Runs a function that reads files, in a thread of the agent, and returns its result.

        If a file of a device blocks, the function is run again with a host that omits the device.
        """
        from accelplane.host.isolation import HostThread  # noqa: PLC0415 - the FPGA hook has no asyncio

        thread = self.thread or HostThread()
        return (await thread.run(self, work))[0]

    def _forget(self) -> None:
        super()._forget()
        self._hints.clear()
        self._numa_nodes.clear()
