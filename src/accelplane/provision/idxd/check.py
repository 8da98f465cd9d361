"""Validation of a template against a device, before anything is written."""

from collections.abc import Iterator

from accelplane.host import Host
from accelplane.provision.idxd.attributes import DEVICE, OPTIONAL, READ_BUFFERS, Part, stored_number
from accelplane.provision.idxd.device import IdxdState, driver_path
from accelplane.provision.idxd.template import Setup

_COUNTS = {"group": "max_groups", "wq": "max_work_queues", "engine": "max_engines"}
_EVENT_LOG = range(64, 65536)


def problems(host: Host, setup: Setup, found: IdxdState) -> Iterator[str]:
    """Why the device cannot have the setup."""
    for part, state in found.states.items():
        if part == DEVICE and state not in ("enabled", "disabled"):
            yield f"its state reads {state[:80]!a}, expected enabled or disabled"
    for part, values in setup.attributes.items():
        limit = found.limits.get(_COUNTS.get(part.kind, ""))
        if part not in found.files or (limit is not None and part.number >= limit):
            count = "" if limit is None else f" ({_COUNTS[part.kind]} is {limit})"
            yield f"it has no {found.place.part_name(part)}{count}"
            continue
        for name in values:
            if name in found.errors[part]:
                yield found.errors[part][name]
            elif name not in found.files[part] and name not in OPTIONAL | READ_BUFFERS:
                yield f"{found.place.part_name(part)} has no attribute {name}"
        group = values.get("group_id")
        if group is not None and Part("group", int(group)) not in found.files:
            yield f"{found.place.part_name(part)} has group_id {group}, but the device has no such group"
    for driver in sorted({*setup.queues.values()}):
        path = driver_path(host, found.place.bus, driver)
        if not host.exists(path):
            yield f"the driver {driver} of the queues is not loaded, expected {path}"
    if found.configurable:
        yield from _beyond_limits(setup, found)


def _beyond_limits(setup: Setup, found: IdxdState) -> Iterator[str]:
    total = sum(int(values["size"]) for part, values in setup.attributes.items() if part.kind == "wq")
    yield from _beyond(found, "max_work_queues_size", total, "the queues' sizes add up to")
    for part, values in setup.attributes.items():
        for name in ("max_batch_size", "max_transfer_size"):
            if name in values and name in found.files.get(part, {}):
                value = stored_number(part, name, values[name])
                yield from _beyond(found, name, value, f"{found.place.part_name(part)} {name} is")
    values = setup.attributes.get(DEVICE, {})
    if "event_log_size" in values and "event_log_size" in found.files[DEVICE]:
        size = int(values["event_log_size"])
        if size not in _EVENT_LOG:
            yield f"event_log_size is {size}, expected {_EVENT_LOG.start} to {_EVENT_LOG.stop - 1}"
    if found.place.family == "dsa":
        yield from _beyond(found, "max_read_buffers", int(values.get("read_buffer_limit", 0)), "read_buffer_limit is")
        yield from _beyond_read_buffers(setup, found)


def _beyond_read_buffers(setup: Setup, found: IdxdState) -> Iterator[str]:
    groups = {part: values for part, values in setup.attributes.items() if part.kind == "group"}
    reserved = {part: int(values.get("read_buffers_reserved", 0)) for part, values in groups.items()}
    total = sum(reserved.values())
    yield from _beyond(found, "max_read_buffers", total, "read_buffers_reserved of the groups add up to")
    for part, values in groups.items():
        others = total - reserved[part]
        allowed = int(values.get("read_buffers_allowed", 0))
        what = f"{found.place.part_name(part)} read_buffers_allowed, with {others} reserved for other groups, is"
        yield from _beyond(found, "max_read_buffers", allowed + others, what)


def _beyond(found: IdxdState, limit: str, value: int, what: str) -> Iterator[str]:
    most = found.limits.get(limit)
    if most is not None and value > most:
        yield f"{what} {value}, expected at most {most} ({limit})"
