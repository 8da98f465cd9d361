"""DSA and IAA: the idxd driver of the PCI bus, its bus `dsa`, and the drivers on that bus.

Facts: the kernel's drivers/dma/idxd: device.c and cdev.c (the checks of enabling, their order, and the code in
`cmd_status`), dma.c, init.c (one count of DSAs and IAAs), include/uapi/linux/idxd.h (the codes).

A queue with clients can be disabled, so programs have to check `clients` first. A disabled device loses its
configuration.
"""

import errno
from collections.abc import Sequence

from accelplane.simulate.journal import Numbers
from accelplane.simulate.kernel.core import Bus, Core, Device, Driver
from accelplane.simulate.kernel.model import oserror
from accelplane.simulate.kernel.numbers import lowest_free
from accelplane.simulate.kernel.pci import PciBus, PciDriver, PciFunction
from accelplane.simulate.kernel.queues import MAJORS, VERSIONS, IdxdDevice, WorkQueue
from accelplane.simulate.offload import DsaSpec, IaaSpec

DEV_ENABLED, DEV_NOT_ENABLED, WQ_ENABLED = 0x80000010, 0x80000020, 0x80000021
WQ_NO_GROUP, WQ_NO_NAME, WQ_NO_SVM, WQ_NO_THRESHOLD = 0x80030000, 0x80040000, 0x80050000, 0x80060000
USER_NO_IOMMU, NO_DRIVER_NAME = 0x80110000, 0x80200000

_DEFAULT_SIZE = 16


class DeviceDriver(Driver[Device]):
    """`idxd` of the bus: enables devices."""

    name = "idxd"
    module = "idxd"

    def matches(self, device: Device) -> bool:
        return isinstance(device, IdxdDevice)

    def __init__(self, bus: Bus[Device]) -> None:
        self.bus = bus

    def probe(self, device: Device) -> None:
        if not isinstance(device, IdxdDevice):
            raise oserror(errno.ENODEV, device.path)
        if device.enabled:
            device.status = DEV_ENABLED
            raise oserror(errno.ENXIO, device.path)
        try:
            device.check_configuration()
        except OSError:
            raise oserror(errno.ENXIO, device.path) from None
        device.enabled = True
        device.status = 0

    def release(self, device: Device) -> None:
        if isinstance(device, IdxdDevice):
            for queue in device.queues:
                self.bus.detach(queue)
            device.enabled = False
            device.reset_configuration()


class QueueDriver(Driver[Device]):
    """`user` and `dmaengine`: enable queues, for user space and for the kernel."""

    module = "idxd"

    def __init__(self, core: Core, name: str, kind: str) -> None:
        self.core = core
        self.name = name
        self.kind = kind
        self._minors: dict[str, set[int]] = {"dsa": set(), "iax": set()}

    def matches(self, device: Device) -> bool:
        return isinstance(device, WorkQueue)

    def probe(self, device: Device) -> None:
        if not isinstance(device, WorkQueue):
            raise oserror(errno.ENODEV, device.path)
        queue, parent = device, device.device
        if not parent.enabled:
            raise oserror(errno.ENXIO, queue.path)
        if self.kind == "user" and not parent.sva:
            parent.status = USER_NO_IOMMU
            raise oserror(errno.EOPNOTSUPP, queue.path)
        if parent.spec.driver_name_file and not queue.driver_name.startswith(self.name):
            parent.status = NO_DRIVER_NAME
            raise oserror(errno.ENODEV, queue.path)
        before, queue.type = queue.type, self.kind
        try:
            self._check(queue)
        except OSError:
            queue.type = "none" if self.kind == "user" else before
            raise
        queue.enabled = True
        queue.size = queue.size or _DEFAULT_SIZE
        parent.status = 0
        if self.kind == "user":
            self._add_node(queue)

    def release(self, device: Device) -> None:
        if not isinstance(device, WorkQueue):
            return
        if device.minor >= 0:
            self.core.remove_class_device(_node_path(device))
            self._minors[device.device.kind].discard(device.minor)
            device.minor = -1
        del self.core.users[device.name]
        device.reset_configuration()

    def _check(self, queue: WorkQueue) -> None:
        parent = queue.device
        problems = (
            (queue.enabled, WQ_ENABLED, errno.EBUSY),
            (not queue.has_group, WQ_NO_GROUP, errno.ENXIO),
            (not queue.name_text, WQ_NO_NAME, errno.ENXIO),
            (not queue.dedicated and not parent.sva, WQ_NO_SVM, errno.ENXIO),
            (not queue.dedicated and queue.threshold == 0, WQ_NO_THRESHOLD, errno.ENXIO),
        )
        for found, status, code in problems:
            if found:
                parent.status = status
                raise oserror(code, queue.path)
        parent.check_configuration()

    def _add_node(self, queue: WorkQueue) -> None:
        kind = queue.device.kind
        queue.minor = lowest_free(self._minors[kind])
        self._minors[kind].add(queue.minor)
        numbers = Numbers(MAJORS[kind], queue.minor)
        self.core.add_class_device(_node_path(queue), "dsa", numbers, f"{kind}/{queue.name}", bus=True)


class IdxdDriver(PciDriver):
    """`idxd` of the PCI bus. Its module provides the bus `dsa` and the drivers on it.

    A device is configured as described when it is first bound after being plugged in; `configured` are those devices.
    """

    name = "idxd"
    module = "idxd"
    ids: Sequence[str] = tuple(VERSIONS)

    def __init__(self, bus: PciBus) -> None:
        super().__init__(bus)
        self.specs: dict[str, DsaSpec | IaaSpec] = {}
        self.configured: set[str] = set()
        self.devices: dict[str, IdxdDevice] = {}
        self.parts: Bus[Device] = Bus(self.core, "dsa")
        self.user = QueueDriver(self.core, "user", "user")
        self.dmaengine = QueueDriver(self.core, "dmaengine", "kernel")
        self.enabler = DeviceDriver(self.parts)

    def load(self) -> None:
        self.core.add_module("idxd", {"sva": "Y", "tc_override": "N"})
        for driver in (self.enabler, self.user, self.dmaengine):
            self.parts.register(driver)
        self.bus.register(self)

    def probe(self, device: PciFunction) -> None:
        spec = self.specs.get(device.name) or _guess_spec(device)
        used = {idxd.index for idxd in self.devices.values()}
        index = spec.index
        if index is None or index in used:
            reserved = used | {other.index for other in self.specs.values() if other.index is not None}
            index = lowest_free(reserved)
        idxd = IdxdDevice(self.core, device, spec, index, sva=self.bus.iommu.mode == "scalable")
        self.devices[device.name] = idxd
        idxd.add_files()
        for part in (idxd, *idxd.parts):
            self.parts.add(part)
        if device.name not in self.configured:
            self.configured.add(device.name)
            self._configure(idxd)

    def busy(self, device: PciFunction) -> bool:
        return False

    def release(self, device: PciFunction) -> None:
        idxd = self.devices.pop(device.name)
        for part in idxd.parts:
            self.parts.remove(part)
        self.parts.remove(idxd)

    def _configure(self, idxd: IdxdDevice) -> None:
        for queue, spec in zip(idxd.queues, idxd.spec.queues, strict=False):
            queue.group = queue.index % len(idxd.groups)
            queue.type, queue.dedicated, queue.size = spec.type, spec.mode == "dedicated", spec.size
            queue.threshold = 0 if queue.dedicated else max(spec.size - 1, 1)
            queue.priority, queue.block_on_fault = 10, True
            queue.name_text = spec.name or f"app{idxd.index}{queue.index}"
            queue.driver_name = "user" if spec.type == "user" else "dmaengine"
        for engine in idxd.engines[: len(idxd.spec.queues)]:
            engine.group = engine.index % len(idxd.groups)
        desired = [queue for queue, spec in zip(idxd.queues, idxd.spec.queues, strict=False) if spec.enabled]
        if desired:
            self.parts.probe(self.enabler, idxd)
        for queue in desired:
            self.parts.probe(self.user if queue.type == "user" else self.dmaengine, queue)


def _node_path(queue: WorkQueue) -> str:
    return f"{queue.path}/{queue.device.kind}!{queue.name}"


def _guess_spec(device: PciFunction) -> DsaSpec | IaaSpec:
    """The specification of a device whose address is not in the description, for example after it was moved."""
    return IaaSpec() if device.model.device_id in ("0x0cfe", "0x1216") else DsaSpec()
