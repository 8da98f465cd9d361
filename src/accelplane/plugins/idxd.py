"""Intel Data Streaming (DSA) and In-Memory Analytics (IAA) accelerators: `dsa.intel.com/…` and `iaa.intel.com/…`.

The devices are work queues that are configured and enabled. The resource has their type and mode, as in
`dsa.intel.com/wq-user-shared`. With `driver: vfio-pci` the devices are complete DSA functions. Kernel documents:
Documentation/ABI/stable/sysfs-driver-dma-idxd, Documentation/arch/x86/iax.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from accelplane.devices import Allocation, Device, DeviceNode, Skipped, natural
from accelplane.host import Host, HostError, Missing, Unreadable, drivers
from accelplane.plugins import vfio
from accelplane.plugins.base import Config, DevicePlans, Plugin, Watch
from accelplane.plugins.options import check_choice
from accelplane.plugins.policies import preferred_ids

# PCI device ids of DSA.
DSA_PCI_IDS = ("0x0b25", "0x11fb", "0x1212")

_BUS = "/sys/bus/dsa/devices"
_QUEUE = re.compile(r"wq[0-9]+\.[0-9]+")
_UNCONFIGURED = ("", "none")  # types of queues
# A processor has four devices of each family at most, and a device has eight queues.
_MAX_DEVICES, _MAX_QUEUES = 128, 64
_WORD = re.compile(r"[a-z]{1,20}")


class IaaConfig(Config, frozen=True, kw_only=True):
    shared_dev_num: Annotated[int, Meta(description="number of containers that may share one shared work queue")] = 1
    user_queues_only: Annotated[
        bool, Meta(description="do not publish work queues of other types than user: containers cannot open them")
    ] = False

    def __post_init__(self) -> None:
        if self.shared_dev_num < 1:
            raise ValueError(f"shared-dev-num is {self.shared_dev_num}, expected 1 or more")


class DsaConfig(IaaConfig, frozen=True, kw_only=True):
    driver: Annotated[
        str,
        Meta(description="what is published: idxd (work queues) or vfio-pci (functions that are bound to that driver)"),
    ] = "idxd"
    iommufd: Annotated[bool, Meta(description="with vfio-pci: give the device nodes of IOMMUFD too")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("driver", self.driver, ("idxd", drivers.VFIO_PCI))


ConfigT = TypeVar("ConfigT", bound=IaaConfig)


class _QueuePlugin(Plugin[ConfigT]):
    """Base class of both families. `device` is the kernel's name of their devices, `nodes` their directory in /dev."""

    exclusive_namespace = True
    device: str
    nodes: str

    def scan(self, host: Host) -> Iterator[Device | Skipped]:
        # The digit excludes entries like dsa!wq0.0, which the bus has for the nodes of queues.
        for path in host.glob(f"{_BUS}/{self.device}[0-9]*/wq*/state"):
            queue = path.split("/")[-2]
            try:
                yield from self._queue(host, path.rpartition("/")[0], queue)
            except HostError as error:
                yield Skipped(queue, str(error), warning=True)

    async def preferred_allocation(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int, in_use: Mapping[str, int]
    ) -> Sequence[str]:
        # `wq0` stands for the device of the queue `wq0.1`.
        return preferred_ids("none", available, must_include, size, in_use, group=lambda unit: unit.partition(".")[0])

    def readings(self, host: Host, devices: Iterable[Device]) -> DevicePlans:
        """All devices of the driver and their configured queues, also disabled ones, which are not published."""
        from accelplane.readings import offload, pci  # noqa: PLC0415 - memory of agents without pages

        published = {device.unit for device in devices}
        names = filter(re.compile(f"{self.device}[0-9]+").fullmatch, host.entries(_BUS))
        for name in sorted(names, key=natural)[:_MAX_DEVICES]:
            queues = [
                queue
                for queue in sorted(filter(_QUEUE.fullmatch, host.entries(f"{_BUS}/{name}")), key=natural)[:_MAX_QUEUES]
                if queue in published or host.text_or_empty(f"{_BUS}/{name}/{queue}/type") not in _UNCONFIGURED
            ]
            try:
                function = host.resolve(f"{_BUS}/{name}").rpartition("/")[0]
            except HostError:
                continue  # removed in the meantime
            found = (*pci.sources(host, function), *offload.idxd(host, _BUS, name, queues))
            plan = pci.plan(host, name, function, found)
            yield replace(plan, units=tuple(queue for queue in queues if queue in published))

    def _queue(self, host: Host, path: str, queue: str) -> Iterator[Device | Skipped]:
        """Yields the IDs of one work queue. Raises `HostError`."""
        if not _QUEUE.fullmatch(queue) or host.text(f"{path}/state") != "enabled":
            return
        kind, mode = host.text(f"{path}/type"), host.text(f"{path}/mode")
        if not (_WORD.fullmatch(kind) and _WORD.fullmatch(mode)):
            yield Skipped(
                queue, f"type is {kind[:20]!a} and mode is {mode[:20]!a}, expected lower-case words", warning=True
            )
            return
        if kind != "user" and self.config.user_queues_only:
            yield Skipped(queue, f"type is {kind}, user-queues-only excludes it")
            return
        name = f"wq-{kind}-{mode}"
        device = Device(
            resource=name,
            id=f"{name}-{queue}",
            unit=queue,
            nodes=_queue_nodes(host, f"{self.nodes}/{queue}") if kind == "user" else (),
            topology=host.topology_of(path.rpartition("/")[0]),  # of the device, the parent directory
            attributes={"type": kind, "mode": mode},
            path=path,
            part=f"wq{queue.partition('.')[2]}",
        )
        yield from device.shared(self.config.shared_dev_num if mode == "shared" else 1)


class DsaPlugin(_QueuePlugin[DsaConfig]):
    """Publishes `dsa.intel.com/wq-<type>-<mode>`, or `dsa.intel.com/vfio`."""

    namespace = "dsa.intel.com"
    device, nodes = "dsa", "/dev/dsa"
    watch = Watch(frozenset(("dsa", "pci", "vfio")), ("/dev/dsa", "/dev/char"))

    def scan(self, host: Host) -> Iterator[Device | Skipped]:
        if self.config.driver == "idxd":
            yield from super().scan(host)
            return
        if self.config.shared_dev_num > 1:
            host.note(f"shared-dev-num {self.config.shared_dev_num} has no effect with driver vfio-pci")
        for function in host.pci_devices("0x8086"):
            if function.device in DSA_PCI_IDS:
                try:
                    yield self._function(host, function.address)
                except HostError as error:
                    yield Skipped(function.address, str(error), warning=True)

    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Allocation:
        return vfio.number_variables("VFIO_BDF", devices, allocation) if self.config.driver != "idxd" else allocation

    def _function(self, host: Host, address: str) -> Device | Skipped:
        """Returns the device of a complete function. Raises `HostError`."""
        driver = drivers.driver_of(host, address)
        if driver != drivers.VFIO_PCI:
            return Skipped(address, f"bound to {driver or 'no driver'}, expected {drivers.VFIO_PCI}")
        nodes, path = vfio.group_nodes(host, address), f"/sys/bus/pci/devices/{address}"
        return Device(
            resource="vfio",
            id=address,
            nodes=(*nodes, *vfio.iommufd_nodes(host, address)) if self.config.iommufd else nodes,
            topology=host.topology_of(path),
            path=path,
        )


class IaaPlugin(_QueuePlugin[IaaConfig]):
    """Publishes `iaa.intel.com/wq-<type>-<mode>`."""

    namespace = "iaa.intel.com"
    device, nodes = "iax", "/dev/iax"
    watch = Watch(frozenset(("dsa", "pci")), ("/dev/iax", "/dev/char"))


def _queue_nodes(host: Host, path: str) -> tuple[DeviceNode, ...]:
    """Returns the node of the queue and the link by which libaccel-config finds it. Raises `HostError`."""
    status = host.status(path)
    if status is None:
        raise Missing(path, "no such device node")
    if host.is_plain_stand_in(status):
        return (DeviceNode(path),)  # it has no device number, so there is no link
    if not stat.S_ISCHR(status.st_mode):
        raise Unreadable(path, "not a character device")
    link = f"/dev/char/{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    host.link(link)
    if (target := host.resolve(link)) != host.resolve(path):
        raise Unreadable(link, f"target is {target}, expected {path}")
    return DeviceNode(path), DeviceNode(link)
