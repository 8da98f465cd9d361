"""An idxd device and its parts: work queues, engines and groups, each a device of the bus `dsa`.

Facts: the kernel's drivers/dma/idxd/sysfs.c (every rule and errno of an attribute) and device.c (what disabling
forgets), Documentation/ABI/stable/sysfs-driver-dma-idxd.
"""

import errno
from collections.abc import Callable
from functools import partial

from accelplane.simulate.kernel.core import Core, Device
from accelplane.simulate.kernel.model import Attribute, oserror, variable
from accelplane.simulate.kernel.numbers import boolean, check_range, check_word, decimal, number, signed, signed_int
from accelplane.simulate.kernel.pci import PciFunction
from accelplane.simulate.offload import DsaSpec, IaaSpec

NO_SHARED_SUPPORT, NONE_CONFIGURED = 0x800C0000, 0x800D0000  # in `cmd_status`
VERSIONS = {"0b25": 0x100, "11fb": 0x200, "1212": 0x300, "0cfe": 0x100, "1216": 0x200}
MAJORS = {"dsa": 234, "iax": 235}  # the kernel assigns these dynamically

_MAX_SIZE, _MAX_BUFFERS = 128, 96  # shared by the queues and by the groups of a device
_MAX_TRANSFER, _MAX_BATCH = 2**31, 1024
_DEFAULT_TRANSFER, _DEFAULT_BATCH = 2 * 1024**2, 32
_MAX_NAME, _MAX_DRIVER_NAME = 1024, 128
_NO_GROUP = -1
_ALL_OPERATIONS = ",".join(["00000000"] * 6 + ["00000001", "003f03ff"])


class _DsaBusDevice(Device):
    """A device of the bus `dsa`."""

    kind: str

    def fields(self) -> dict[str, str]:
        return {"DEVTYPE": self.kind}


class IdxdDevice(_DsaBusDevice):
    """One DSA (`dsaN`) or IAA (`iaxN`)."""

    def __init__(self, core: Core, function: PciFunction, spec: DsaSpec | IaaSpec, index: int, *, sva: bool) -> None:
        self.kind = "dsa" if isinstance(spec, DsaSpec) else "iax"
        super().__init__(core, f"{self.kind}{index}", f"{function.path}/{self.kind}{index}")
        self.function = function
        self.spec = spec
        self.index = index
        self.sva = sva
        self.version = VERSIONS[spec.model]
        self.enabled = False
        self.status = 0
        self.buffer_limit = 0
        self.event_log_size = 64
        self.groups = [Group(core, self, number) for number in range(spec.max_groups)]
        self.queues = [WorkQueue(core, self, number) for number in range(spec.max_queues)]
        self.engines = [Engine(core, self, number) for number in range(spec.max_engines)]

    @property
    def parts(self) -> "tuple[Part, ...]":
        return (*self.queues, *self.engines, *self.groups)

    def add_files(self) -> None:
        files: dict[str, Attribute | str | int] = {
            "version": f"{self.version:#x}",
            "max_groups": len(self.groups),
            "max_work_queues": len(self.queues),
            "max_work_queues_size": _MAX_SIZE,
            "max_engines": len(self.engines),
            "numa_node": self.function.numa_node,
            "max_transfer_size": _MAX_TRANSFER,
            "op_cap": _ALL_OPERATIONS,
            "gen_cap": "0x71f10901f0105",
            "configurable": 1,
            "clients": Attribute(read=lambda: sum(self.core.users[queue.name] for queue in self.queues)),
            "pasid_enabled": int(self.sva),
            "state": Attribute(read=lambda: "enabled" if self.enabled else "disabled"),
            "errors": ",".join(["00000000"] * 8),
            "cdev_major": MAJORS[self.kind],
            # Any text clears it.
            "cmd_status": variable(
                self, "status", lambda _text: 0, show=lambda status: f"{status:#x}" if status else 0
            ),
        }
        if self.kind == "dsa":
            files["max_batch_size"] = _MAX_BATCH
            files |= dict.fromkeys(("max_read_buffers", "max_tokens"), _MAX_BUFFERS)
            for name in ("read_buffer_limit", "token_limit"):
                files[name] = variable(
                    self,
                    "buffer_limit",
                    decimal,
                    check=self.check_disabled,
                    convert=partial(check_range, 0, _MAX_BUFFERS),
                )
        elif self.version > 0x100:
            files["iaa_cap"] = "0x3"
        if self.version > 0x100:
            files["event_log_size"] = variable(
                self, "event_log_size", decimal, check=self.check_disabled, convert=partial(check_range, 0x40, 0xFFFF)
            )
        self.core.tree.directory(self.path, files)
        for part in self.parts:
            part.add_files()

    def check_disabled(self) -> None:
        """Raises `OSError` EPERM if the device is enabled."""
        if self.enabled:
            raise oserror(errno.EPERM, self.path)

    def check_configuration(self) -> None:
        """Checks the configuration, as the driver does before enabling. Raises `OSError` EINVAL, and sets `status`."""
        grouped = [queue for queue in self.queues if queue.has_group]
        if any(not queue.dedicated for queue in grouped) and not self.sva:
            self.status = NO_SHARED_SUPPORT
            raise oserror(errno.EINVAL, self.path)
        if not grouped:
            self.status = NONE_CONFIGURED
            raise oserror(errno.EINVAL, self.path)
        if all(engine.group == _NO_GROUP for engine in self.engines):
            raise oserror(errno.EINVAL, self.path)

    def reset_configuration(self) -> None:
        """Resets the configuration, as disabling the device does."""
        for part in self.parts:
            part.reset_configuration()
            part.group = _NO_GROUP
        for queue in self.queues:
            queue.size = 0


class Part(_DsaBusDevice):
    """A numbered part of a device. `group` is the number of the group of a queue or engine, -1 without one."""

    def __init__(self, core: Core, device: IdxdDevice, index: int) -> None:
        name = f"{self.kind}{device.index}.{index}"
        super().__init__(core, name, f"{device.path}/{name}")
        self.device = device
        self.index = index
        self.group = _NO_GROUP
        self.reset_configuration()

    def add_files(self) -> None:
        raise NotImplementedError

    def reset_configuration(self) -> None:
        """Resets the part, as the driver does when disabling it or its device."""

    def group_id(self, check: Callable[[], None] = lambda: None) -> Attribute:
        return variable(
            self,
            "group",
            signed,
            check=check,
            convert=partial(check_range, _NO_GROUP, self.device.spec.max_groups - 1),
        )


class WorkQueue(Part):
    """One work queue. Disabling it resets everything except size and group; disabling the device resets these too."""

    kind = "wq"
    minor = -1
    size = 0
    driver_name = ""

    def reset_configuration(self) -> None:
        self.enabled = False
        self.type = "none"
        self.name_text = ""
        self.dedicated = False
        self.threshold = 0
        self.priority = 0
        self.block_on_fault = False
        self.ats_disable = False
        self.prs_disable = False
        self.retries = 64
        self.max_transfer = _DEFAULT_TRANSFER
        self.max_batch = _DEFAULT_BATCH
        self.operations = _ALL_OPERATIONS

    @property
    def has_group(self) -> bool:
        return self.group != _NO_GROUP

    def add_files(self) -> None:
        check = self._check_disabled
        files = {
            "clients": Attribute(read=lambda: self.core.users[self.name]),
            "state": Attribute(read=lambda: "enabled" if self.enabled else "disabled"),
            "group_id": self.group_id(check),
            "mode": Attribute(read=lambda: "dedicated" if self.dedicated else "shared", write=self._set_mode),
            "size": variable(self, "size", decimal, check=self.device.check_disabled, convert=self._check_size),
            "priority": variable(self, "priority", decimal, check=check, convert=partial(check_range, 0, 15)),
            "block_on_fault": Attribute(read=lambda: self.block_on_fault, write=self._set_block_on_fault),
            "threshold": Attribute(read=lambda: self.threshold, write=self._set_threshold),
            "type": Attribute(read=lambda: self.type, write=self._set_type),
            "name": variable(self, "name_text", check=check, convert=partial(_check_length, _MAX_NAME)),
            "cdev_minor": Attribute(read=self._cdev_minor),
            "max_transfer_size": variable(self, "max_transfer", check=check, convert=partial(_round_up, _MAX_TRANSFER)),
            "ats_disable": variable(self, "ats_disable", check=check, convert=boolean),
            "occupancy": 0,
            "enqcmds_retries": Attribute(read=self._retries, write=self._set_retries),
            "op_config": variable(self, "operations", check=check, convert=_parse_operations),
        }
        if self.device.kind == "dsa":
            files["max_batch_size"] = variable(self, "max_batch", check=check, convert=partial(_round_up, _MAX_BATCH))
        if self.device.version > 0x100:
            files["prs_disable"] = Attribute(read=lambda: self.prs_disable, write=self._set_prs_disable)
        if self.device.spec.driver_name_file:
            files["driver_name"] = variable(
                self, "driver_name", check=check, convert=partial(_check_length, _MAX_DRIVER_NAME)
            )
        self.core.tree.directory(self.path, files)

    def _check_disabled(self, busy: int = errno.EPERM) -> None:
        if self.enabled:
            raise oserror(busy, self.path)

    def _set_mode(self, text: str) -> None:
        self._check_disabled()
        self.dedicated = check_word(("dedicated", "shared"), text) == "dedicated"
        if self.dedicated:
            self.threshold = 0

    def _check_size(self, size: int) -> int:
        if size + sum(queue.size for queue in self.device.queues if queue is not self) > _MAX_SIZE:
            raise oserror(errno.EINVAL)
        return size

    def _set_block_on_fault(self, text: str) -> None:
        self._check_disabled(errno.ENXIO)
        block = boolean(text)
        if block and self.prs_disable:
            raise oserror(errno.EOPNOTSUPP)
        self.block_on_fault = block

    def _set_threshold(self, text: str) -> None:
        threshold = check_range(1, self.size, number(text))
        self._check_disabled(errno.ENXIO)
        if self.dedicated:
            raise oserror(errno.EINVAL)
        self.threshold = threshold

    def _set_type(self, text: str) -> None:
        self._check_disabled()
        word = check_word(("none", "kernel", "user"), text)
        if word != self.type:
            self.name_text = ""
        self.type = word

    def _set_prs_disable(self, text: str) -> None:
        self._check_disabled()
        self.prs_disable = boolean(text)
        if self.prs_disable:
            self.block_on_fault = False

    def _retries(self) -> int:
        if self.dedicated:
            raise oserror(errno.EOPNOTSUPP)
        return self.retries

    def _set_retries(self, text: str) -> None:
        self._retries()
        self.retries = min(decimal(text), 64)

    def _cdev_minor(self) -> int:
        if self.minor < 0:
            raise oserror(errno.ENXIO)
        return self.minor


class Engine(Part):
    kind = "engine"

    def add_files(self) -> None:
        self.core.tree.directory(self.path, {"group_id": self.group_id()})


class Group(Part):
    """One group. The read buffers of a device are shared by its groups; an IAA has none."""

    kind = "group"

    def reset_configuration(self) -> None:
        self.reserved = 0
        self.allowed = 0
        self.limited = False
        # The first versions of the hardware have traffic class 1; later ones have -1 until it is set.
        self.traffic_class_a = self.traffic_class_b = 1 if self.device.version <= 0x200 else -1
        self.desc_progress_limit = self.batch_progress_limit = 0

    def add_files(self) -> None:
        device, check = self.device, self.device.check_disabled
        files = {
            "work_queues": Attribute(read=lambda: self._members(device.queues), raw=True),
            "engines": Attribute(read=lambda: self._members(device.engines), raw=True),
        }
        for name in ("traffic_class_a", "traffic_class_b"):
            files[name] = variable(self, name, signed, check=check, convert=self._check_traffic_class)
        if device.kind == "dsa":
            for name in ("use_read_buffer_limit", "use_token_limit"):
                files[name] = variable(self, "limited", decimal, check=check, convert=self._check_limited)
            for name in ("read_buffers_allowed", "tokens_allowed"):
                files[name] = variable(self, "allowed", decimal, check=check, convert=self._check_allowed)
            for name in ("read_buffers_reserved", "tokens_reserved"):
                files[name] = variable(self, "reserved", decimal, check=check, convert=self._check_reserved)
        if device.version > 0x100:
            for name in ("desc_progress_limit", "batch_progress_limit"):
                files[name] = variable(self, name, signed_int, convert=partial(check_range, 0, 3))
        self.core.tree.directory(self.path, files)

    def _free(self) -> int:
        """The read buffers that no other group has reserved."""
        return _MAX_BUFFERS - sum(group.reserved for group in self.device.groups if group is not self)

    def _check_reserved(self, value: int) -> int:
        return check_range(0, self._free(), value)

    def _check_allowed(self, value: int) -> int:
        engines = sum(engine.group == self.index for engine in self.device.engines)
        return check_range(4 * engines, self._free(), value)

    def _check_limited(self, value: int) -> bool:
        if not self.device.buffer_limit:
            raise oserror(errno.EPERM)
        return bool(value)

    def _check_traffic_class(self, value: int) -> int:
        if self.device.version <= 0x200:
            raise oserror(errno.EPERM)
        return check_range(0, 7, value)

    def _members(self, parts: list[WorkQueue] | list[Engine]) -> str:
        names = [part.name for part in parts if part.group == self.index]
        return " ".join(names) + "\n" if names else ""


def _check_length(most: int, text: str) -> str:
    if not 0 < len(text) <= most:
        raise oserror(errno.EINVAL)
    return text.strip()


def _round_up(most: int, text: str) -> int:
    """The next power of two."""
    value = number(text)
    return check_range(1, most, 1 << (value - 1).bit_length() if value else 0)


def _parse_operations(text: str) -> str:
    """The operation mask with all its words. Raises `OSError` EINVAL for unknown operations."""
    known = _ALL_OPERATIONS.split(",")
    try:
        mask = [int(word, 16) for word in text.strip().split(",")]
    except ValueError:
        raise oserror(errno.EINVAL) from None
    padded = [0] * (len(known) - len(mask)) + mask
    if len(padded) > len(known) or any(one & ~int(other, 16) for one, other in zip(padded, known, strict=True)):
        raise oserror(errno.EINVAL)
    return ",".join(f"{word:08x}" for word in padded)
