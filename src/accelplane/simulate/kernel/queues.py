"""An idxd device and its parts: work queues, engines and groups, each a device of the bus `dsa`.

Facts: the kernel's drivers/dma/idxd/sysfs.c (every rule and errno of an attribute) and device.c (what disabling
forgets), Documentation/ABI/stable/sysfs-driver-dma-idxd.
"""

import errno
from functools import partial

from accelplane.simulate.kernel.core import Core, Device
from accelplane.simulate.kernel.model import Attribute, oserror
from accelplane.simulate.kernel.numbers import boolean, number
from accelplane.simulate.kernel.pci import PciFunction
from accelplane.simulate.offload import DsaSpec, IaaSpec

NO_SHARED_SUPPORT, NONE_CONFIGURED = 0x800C0000, 0x800D0000  # in `cmd_status`
VERSIONS = {"0b25": 0x100, "11fb": 0x200, "1212": 0x300, "0cfe": 0x100, "1216": 0x200}
MAJORS = {"dsa": 234, "iax": 235}  # the kernel assigns these dynamically

_MAX_NAME, _MAX_DRIVER_NAME = 1024, 128
_DEFAULT_TRANSFER, _DEFAULT_BATCH = 2 * 1024**2, 32
_ALL_OPERATIONS = ",".join(["00000000"] * 6 + ["00000001", "003f03ff"])


class IdxdDevice(Device):
    """One DSA (`dsaN`) or IAA (`iaxN`)."""

    def __init__(self, core: Core, function: PciFunction, spec: DsaSpec | IaaSpec, index: int, *, sva: bool) -> None:
        self.kind = "dsa" if isinstance(spec, DsaSpec) else "iax"
        super().__init__(core, f"{self.kind}{index}", f"{function.path}/{self.kind}{index}")
        self.function = function
        self.spec = spec
        self.index = index
        self.sva = sva
        self.version = VERSIONS[spec.model]
        self.configurable = True
        self.enabled = False
        self.status = 0
        self.buffer_limit = 0
        self.event_log_size = 64
        self.max_size = 128
        self.max_transfer = 2**31
        self.max_batch = 1024
        self.max_buffers = 96
        self.groups = [Group(core, self, number) for number in range(spec.max_groups)]
        self.queues = [WorkQueue(core, self, number) for number in range(spec.max_queues)]
        self.engines = [Engine(core, self, number) for number in range(spec.max_engines)]

    def fields(self) -> dict[str, str]:
        return {"DEVTYPE": self.kind}

    def add_files(self) -> None:
        files: dict[str, Attribute | str | int] = {
            "version": f"{self.version:#x}",
            "max_groups": len(self.groups),
            "max_work_queues": len(self.queues),
            "max_work_queues_size": self.max_size,
            "max_engines": len(self.engines),
            "numa_node": self.function.numa_node,
            "max_transfer_size": self.max_transfer,
            "op_cap": self.queues[0].operations,
            "gen_cap": "0x71f10901f0105",
            "configurable": Attribute(read=lambda: int(self.configurable)),
            "clients": Attribute(read=lambda: sum(self.core.holds.users(queue.name) for queue in self.queues)),
            "pasid_enabled": int(self.sva),
            "state": Attribute(read=lambda: "enabled" if self.enabled else "disabled"),
            "errors": ",".join(["00000000"] * 8),
            "cdev_major": MAJORS[self.kind],
            "cmd_status": Attribute(read=lambda: f"{self.status:#x}" if self.status else "0", write=self._clear_status),
        }
        if self.kind == "dsa":
            files["max_batch_size"] = self.max_batch
            files |= dict.fromkeys(("max_read_buffers", "max_tokens"), self.max_buffers)
            for name in ("read_buffer_limit", "token_limit"):
                files[name] = Attribute(read=lambda: self.buffer_limit, write=self._set_buffer_limit)
        elif self.version > 0x100:
            files["iaa_cap"] = "0x3"
        if self.version > 0x100:
            files["event_log_size"] = Attribute(read=lambda: self.event_log_size, write=self._set_event_log_size)
        self.core.tree.directory(self.path, files)
        for part in (*self.queues, *self.engines, *self.groups):
            part.add_files()

    def group_number(self, written: int) -> int | None:
        """The group of a written number, None for -1. Raises `OSError` EINVAL."""
        if not -1 <= written < len(self.groups):
            raise oserror(errno.EINVAL, self.path)
        return None if written == -1 else written

    def check_configuration(self) -> None:
        """Checks the configuration, as the driver does before enabling. Raises `OSError` EINVAL, and sets `status`."""
        grouped = [queue for queue in self.queues if queue.group is not None]
        if any(not queue.dedicated for queue in grouped) and not self.sva:
            self.status = NO_SHARED_SUPPORT
            raise oserror(errno.EINVAL, self.path)
        if not grouped:
            self.status = NONE_CONFIGURED
            raise oserror(errno.EINVAL, self.path)
        if all(engine.group is None for engine in self.engines):
            raise oserror(errno.EINVAL, self.path)

    def reset_configuration(self) -> None:
        """Resets the configuration, as disabling the device does."""
        for queue in self.queues:
            queue.reset_configuration()
            queue.size, queue.group = 0, None
        for engine in self.engines:
            engine.group = None
        for group in self.groups:
            group.reset_configuration()

    def _clear_status(self, _text: str) -> None:
        self.status = 0

    def _set_buffer_limit(self, text: str) -> None:
        value = number(text, base=10)
        self._check()
        if value > self.max_buffers:
            raise oserror(errno.EINVAL)
        self.buffer_limit = value

    def _set_event_log_size(self, text: str) -> None:
        value = number(text, base=10)
        self._check()
        if not 0x40 <= value <= 0xFFFF:
            raise oserror(errno.EINVAL)
        self.event_log_size = value

    def _check(self) -> None:
        if self.enabled or not self.configurable:
            raise oserror(errno.EPERM, self.path)


class Part(Device):
    """A numbered part of a device."""

    def __init__(self, core: Core, device: IdxdDevice, kind: str, index: int) -> None:
        name = f"{kind}{device.index}.{index}"
        super().__init__(core, name, f"{device.path}/{name}")
        self.device = device
        self.kind = kind
        self.index = index

    def fields(self) -> dict[str, str]:
        return {"DEVTYPE": self.kind}

    def check_configurable(self) -> None:
        """Raises `OSError` EPERM if the configuration is read-only."""
        if not self.device.configurable:
            raise oserror(errno.EPERM, self.path)

    def check_device_disabled(self) -> None:
        """Raises `OSError` EPERM if the device is enabled."""
        if self.device.enabled:
            raise oserror(errno.EPERM, self.path)


class WorkQueue(Part):
    """One work queue. Disabling it resets everything except size and group; disabling the device resets these too."""

    def __init__(self, core: Core, device: IdxdDevice, index: int) -> None:
        super().__init__(core, device, "wq", index)
        self.enabled = False
        self.minor = -1
        self.size = 0
        self.group: int | None = None
        self.driver_name = ""
        self.reset_configuration()

    def reset_configuration(self) -> None:
        """Resets the queue, as the driver does when disabling it."""
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

    def add_files(self) -> None:
        files = {
            "clients": Attribute(read=lambda: self.core.holds.users(self.name)),
            "state": Attribute(read=lambda: "enabled" if self.enabled else "disabled"),
            "group_id": Attribute(read=lambda: -1 if self.group is None else self.group, write=self._set_group),
            "mode": Attribute(read=lambda: "dedicated" if self.dedicated else "shared", write=self._set_mode),
            "size": Attribute(read=lambda: self.size, write=self._set_size),
            "priority": Attribute(read=lambda: self.priority, write=self._set_priority),
            "block_on_fault": Attribute(read=lambda: int(self.block_on_fault), write=self._set_block_on_fault),
            "threshold": Attribute(read=lambda: self.threshold, write=self._set_threshold),
            "type": Attribute(read=lambda: self.type, write=self._set_type),
            "name": Attribute(read=lambda: self.name_text, write=self._set_name),
            "cdev_minor": Attribute(read=self._cdev_minor),
            "max_transfer_size": Attribute(read=lambda: self.max_transfer, write=self._set_max_transfer),
            "ats_disable": Attribute(read=lambda: int(self.ats_disable), write=self._set_ats_disable),
            "occupancy": Attribute(read=lambda: 0),
            "enqcmds_retries": Attribute(read=self._retries, write=self._set_retries),
            "op_config": Attribute(read=lambda: self.operations, write=self._set_operations),
        }
        if self.device.kind == "dsa":
            files["max_batch_size"] = Attribute(read=lambda: self.max_batch, write=self._set_max_batch)
        if self.device.version > 0x100:
            files["prs_disable"] = Attribute(read=lambda: int(self.prs_disable), write=self._set_prs_disable)
        if self.device.spec.driver_name_file:
            files["driver_name"] = Attribute(read=lambda: self.driver_name, write=self._set_driver_name)
        self.core.tree.directory(self.path, files)

    def _check(self, busy: int = errno.EPERM) -> None:
        self.check_configurable()
        self._check_disabled(busy)

    def _check_disabled(self, busy: int = errno.EPERM) -> None:
        if self.enabled:
            raise oserror(busy, self.path)

    def _set_group(self, text: str) -> None:
        group = number(text, base=10, least=-(2**63), most=2**63 - 1)
        self._check()
        self.group = self.device.group_number(group)

    def _set_mode(self, text: str) -> None:
        self._check()
        word = text.removesuffix("\n")
        if word not in ("dedicated", "shared"):
            raise oserror(errno.EINVAL)
        self.dedicated = word == "dedicated"
        if self.dedicated:
            self.threshold = 0

    def _set_size(self, text: str) -> None:
        size = number(text, base=10)
        self.check_configurable()
        self.check_device_disabled()
        if size + sum(queue.size for queue in self.device.queues if queue is not self) > self.device.max_size:
            raise oserror(errno.EINVAL)
        self.size = size

    def _set_priority(self, text: str) -> None:
        priority = number(text, base=10)
        self._check()
        if priority > 15:
            raise oserror(errno.EINVAL)
        self.priority = priority

    def _set_block_on_fault(self, text: str) -> None:
        self._check(errno.ENXIO)
        block = boolean(text)
        if block and self.prs_disable:
            raise oserror(errno.EOPNOTSUPP)
        self.block_on_fault = block

    def _set_threshold(self, text: str) -> None:
        threshold = number(text)
        if not 0 < threshold <= self.size:
            raise oserror(errno.EINVAL)
        self._check(errno.ENXIO)
        if self.dedicated:
            raise oserror(errno.EINVAL)
        self.threshold = threshold

    def _set_type(self, text: str) -> None:
        self._check_disabled()
        word = text.removesuffix("\n")
        if word not in ("none", "kernel", "user"):
            raise oserror(errno.EINVAL)
        if word != self.type:
            self.name_text = ""
        self.type = word

    def _set_name(self, text: str) -> None:
        self._check_disabled()
        self.name_text = _short(text, _MAX_NAME)

    def _set_driver_name(self, text: str) -> None:
        self._check_disabled()
        self.driver_name = _short(text, _MAX_DRIVER_NAME)

    def _set_max_transfer(self, text: str) -> None:
        self._check()
        self.max_transfer = _power_of_two(text, self.device.max_transfer)

    def _set_max_batch(self, text: str) -> None:
        self._check()
        self.max_batch = _power_of_two(text, self.device.max_batch)

    def _set_ats_disable(self, text: str) -> None:
        self._check()
        self.ats_disable = boolean(text)

    def _set_prs_disable(self, text: str) -> None:
        self._check_disabled()
        self.prs_disable = boolean(text)
        if self.prs_disable:
            self.block_on_fault = False

    def _set_operations(self, text: str) -> None:
        self._check_disabled()
        words = text.strip().split(",")
        try:
            mask = [int(word, 16) for word in words]
        except ValueError:
            raise oserror(errno.EINVAL) from None
        known = [int(word, 16) for word in _ALL_OPERATIONS.split(",")]
        padded = [0] * (len(known) - len(mask)) + mask
        if len(padded) > len(known) or any(one & ~other for one, other in zip(padded, known, strict=True)):
            raise oserror(errno.EINVAL)
        self.operations = ",".join(f"{word:08x}" for word in padded)

    def _retries(self) -> int:
        if self.dedicated:
            raise oserror(errno.EOPNOTSUPP)
        return self.retries

    def _set_retries(self, text: str) -> None:
        self._retries()
        self.retries = min(number(text, base=10), 64)

    def _cdev_minor(self) -> int:
        if self.minor < 0:
            raise oserror(errno.ENXIO)
        return self.minor


class Engine(Part):
    """One engine."""

    def __init__(self, core: Core, device: IdxdDevice, index: int) -> None:
        super().__init__(core, device, "engine", index)
        self.group: int | None = None

    def add_files(self) -> None:
        read = Attribute(read=lambda: -1 if self.group is None else self.group, write=self._set_group)
        self.core.tree.directory(self.path, {"group_id": read})

    def _set_group(self, text: str) -> None:
        group = number(text, base=10, least=-(2**63), most=2**63 - 1)
        self.check_configurable()
        self.group = self.device.group_number(group)


class Group(Part):
    """One group. The read buffers of a device are shared by its groups; an IAA has none."""

    def __init__(self, core: Core, device: IdxdDevice, index: int) -> None:
        super().__init__(core, device, "group", index)
        self.reset_configuration()

    def reset_configuration(self) -> None:
        """Resets the group, as the driver does when disabling the device."""
        self.reserved = 0
        self.allowed = 0
        self.limited = False
        # The first versions of the hardware have traffic class 1; later ones have -1 until it is set.
        self.traffic = {"a": 1, "b": 1} if self.device.version <= 0x200 else {"a": -1, "b": -1}
        self.progress = {"desc": 0, "batch": 0}

    def add_files(self) -> None:
        device = self.device
        files = {
            "work_queues": Attribute(read=lambda: _members(self, device.queues), raw=True),
            "engines": Attribute(read=lambda: _members(self, device.engines), raw=True),
        }
        for letter in ("a", "b"):
            write = partial(self._set_traffic, letter)
            files[f"traffic_class_{letter}"] = Attribute(read=lambda letter=letter: self.traffic[letter], write=write)
        if device.kind == "dsa":
            for name in ("use_read_buffer_limit", "use_token_limit"):
                files[name] = Attribute(read=lambda: int(self.limited), write=self._set_limited)
            for name in ("read_buffers_allowed", "tokens_allowed"):
                files[name] = Attribute(read=lambda: self.allowed, write=self._set_allowed)
            for name in ("read_buffers_reserved", "tokens_reserved"):
                files[name] = Attribute(read=lambda: self.reserved, write=self._set_reserved)
        if device.version > 0x100:
            for kind in ("desc", "batch"):
                write = partial(self._set_progress, kind)
                files[f"{kind}_progress_limit"] = Attribute(read=lambda kind=kind: self.progress[kind], write=write)
        self.core.tree.directory(self.path, files)

    def _free(self) -> int:
        return self.device.max_buffers - sum(group.reserved for group in self.device.groups)

    def _check(self) -> None:
        self.check_configurable()
        self.check_device_disabled()

    def _set_reserved(self, text: str) -> None:
        value = number(text, base=10)
        self._check()
        if value > self._free() + self.reserved:
            raise oserror(errno.EINVAL)
        self.reserved = value

    def _set_allowed(self, text: str) -> None:
        value = number(text, base=10)
        self._check()
        engines = sum(engine.group == self.index for engine in self.device.engines)
        if not 4 * engines <= value <= self.reserved + self._free():
            raise oserror(errno.EINVAL)
        self.allowed = value

    def _set_limited(self, text: str) -> None:
        value = number(text, base=10)
        self._check()
        if not self.device.buffer_limit:
            raise oserror(errno.EPERM)
        self.limited = bool(value)

    def _set_traffic(self, letter: str, text: str) -> None:
        value = number(text, base=10, least=-(2**63), most=2**63 - 1)
        self._check()
        if self.device.version <= 0x200:
            raise oserror(errno.EPERM)
        if not 0 <= value <= 7:
            raise oserror(errno.EINVAL)
        self.traffic[letter] = value

    def _set_progress(self, kind: str, text: str) -> None:
        value = number(text, base=10, least=-(2**31), most=2**31 - 1)
        if not 0 <= value <= 3:
            raise oserror(errno.EINVAL)
        self.progress[kind] = value


def _members(group: Group, parts: list[WorkQueue] | list[Engine]) -> str:
    names = [part.name for part in parts if part.group == group.index]
    return " ".join(names) + "\n" if names else ""


def _short(text: str, most: int) -> str:
    if not 0 < len(text) <= most:
        raise oserror(errno.EINVAL)
    return text.strip()


def _power_of_two(text: str, most: int) -> int:
    value = number(text)
    if value == 0:
        raise oserror(errno.EINVAL)
    rounded = 1 << (value - 1).bit_length()
    if rounded > most:
        raise oserror(errno.EINVAL)
    return rounded
