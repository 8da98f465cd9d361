"""The writes that bring a device to a setup, the desired one or, for a rollback, the previous one.

The kernel accepts most attributes only while the device, or its queue, is disabled, and resets them when it is disabled
again. So a device is set up in rounds: disable what differs; write the differences; enable the device; enable its
queues. A device in its desired state is not written to, and if only a queue differs, only that queue is disabled.
Facts: drivers/dma/idxd of the kernel, and its Documentation/ABI/stable/sysfs-driver-dma-idxd.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from accelplane.host import Host
from accelplane.provision.idxd.attributes import DEVICE, DRIVERS, NEVER_FIXED, READ_BUFFERS, RULES, Part, is_equal
from accelplane.provision.idxd.device import IdxdState, driver_path
from accelplane.provision.idxd.status import command_error
from accelplane.provision.idxd.template import Setup
from accelplane.provision.steps import Plan, Step

_MAX_SHOWN = 80  # characters of a text in messages
_OLDEST_WITH_TRAFFIC_CLASSES = 0x200
_QUEUE_ORDER = {name: place for place, name in enumerate(RULES["wq"])}


class _Difference(NamedTuple):
    part: Part
    attribute: str
    desired: str
    found: str


def plan_changes(host: Host, setup: Setup, found: IdxdState, *, force: bool = False) -> Plan:
    """The next round of writes towards the setup; with `force` also if queues have clients."""
    plan = Plan(device=found.place.name)
    fixed, differences = _differences(setup, found)
    if fixed:
        values = (
            f"{found.place.part_name(part)} {attribute} stays {now[:_MAX_SHOWN]} (not {desired})"
            for part, attribute, desired, now in fixed
        )
        plan = replace(plan, notes=[f"its configuration is fixed: {', '.join(values)}"])
    if down := _to_disable(host, setup, found, differences):
        if refusal := _lock_reason(found):
            return replace(plan, skip_reason=refusal)
        if not force and (used := users(found)):
            return replace(plan, skip_reason=f"in use: {', '.join(used)}")
        changes = [_describe(found, difference) for difference in _in_order(setup, found, differences)]
        later = [*changes, *_later_steps(setup, found, down)]
        return replace(plan, steps=[_disable(found, part) for part in down], later=later)
    differences += _sizes_to_release(setup, found)
    if differences:
        steps = list(_write_steps(setup, found, differences))
        return _skip_if_locked(plan, found, steps, list(_later_steps(setup, found, ())))
    if setup.enabled and not found.enabled:
        return _skip_if_locked(plan, found, [_enable(host, found, DEVICE, "idxd")], _later_queues(setup, found, ()))
    disabled = [part for part in sorted(setup.queues) if found.states.get(part) not in (None, "enabled")]
    return _skip_if_locked(plan, found, [_enable(host, found, part, setup.queues[part]) for part in disabled], ())


def current_setup(found: IdxdState) -> Setup:
    """The setup of the device, as far as it can be written again."""
    attributes = {
        part: {
            name: text
            for name, text in values.items()
            # An invalid value is not equal to itself.
            if is_equal(part, name, text, text) and not (name.startswith("traffic_class") and "-" in text)
        }
        for part, values in found.attributes.items()
    }
    queues = {part: _driver(found, part) for part in found.enabled_queues()}
    return Setup(attributes, queues, found.enabled)


def describe(setup: Setup | None, found: IdxdState) -> dict[str, str]:
    """The device, for `Plan.now`."""
    place = found.place
    lines = {"state": found.states[DEVICE][:_MAX_SHOWN]}
    idle: list[str] = []
    for group in found.parts("group"):
        members = [
            place.part_name(part)
            for part, values in found.attributes.items()
            if part.kind in ("wq", "engine") and values.get("group_id") == str(group.number)
        ]
        if members:
            lines[place.part_name(group)] = ", ".join(members)
        else:
            idle.append(place.part_name(group))
    for queue in found.parts("wq"):
        values = found.attributes[queue]
        if found.states[queue] == "disabled" and values.get("size") == "0" and found.clients[queue] == 0:
            idle.append(place.part_name(queue))
            continue
        words = [found.states[queue], *(values[name] for name in ("type", "mode") if values.get(name))]
        words += [f"{name} {values[name]}" for name in ("size", "name") if values.get(name)]
        words = [word[:_MAX_SHOWN] for word in words]
        clients = found.clients[queue]
        words.append("clients unknown" if clients is None else f"clients {clients}")
        if setup is not None and queue not in setup.attributes:
            words.append("not in the template")
        lines[place.part_name(queue)] = ", ".join(words)
    if idle:
        lines["not set up"] = ", ".join(idle)
    unsupported = [
        f"{place.part_name(part)} {name}"
        for part, values in (() if setup is None else setup.attributes.items())
        for name in values
        if part in found.files and name not in found.files[part] and name not in READ_BUFFERS | {"driver_name"}
    ]
    if unsupported:
        lines["not supported"] = ", ".join(unsupported)
    return lines


def users(found: IdxdState) -> list[str]:
    """The queues with clients, or with an unknown number of them."""
    return [
        f"{found.place.part_name(part)} does not report its clients"
        if clients is None
        else f"{clients} client{'s' * (clients > 1)} of {found.place.part_name(part)}"
        for part, clients in found.clients.items()
        if clients is None or clients > 0
    ]


def _differences(setup: Setup, found: IdxdState) -> tuple[list[_Difference], list[_Difference]]:
    """The differences from the setup: those that cannot be changed, and the others."""
    fixed: list[_Difference] = []
    remaining: list[_Difference] = []
    for part, values in setup.attributes.items():
        current = found.attributes.get(part, {})
        for name, desired in values.items():
            if name not in current or is_equal(part, name, desired, current[name]):
                continue
            if _has_effect(setup, found, part, name, desired):
                difference = _Difference(part, name, desired, current[name])
                (remaining if found.configurable or name in NEVER_FIXED else fixed).append(difference)
    for part in [part for part, name, *_ in remaining if name == "type"]:
        name = setup.attributes[part].get("name")
        if name and not any(difference[:2] == (part, "name") for difference in remaining):
            remaining.append(_Difference(part, "name", name, ""))  # the kernel drops it with the type
    return fixed, remaining


def _has_effect(setup: Setup, found: IdxdState, part: Part, name: str, desired: str) -> bool:
    """Whether the attribute has an effect on this device."""
    if name in READ_BUFFERS and found.place.family == "iax":
        return False
    if name.startswith("traffic_class"):
        return found.limits.get("version", 0) >= _OLDEST_WITH_TRAFFIC_CLASSES
    if name == "use_read_buffer_limit":
        now = found.attributes[DEVICE].get("read_buffer_limit", "0")
        then = setup.attributes.get(DEVICE, {}).get("read_buffer_limit", now)
        return then != "0" or (desired == "0" and now != "0")
    if name == "threshold":
        return setup.attributes[part].get("mode", found.attributes[part].get("mode")) != "dedicated"
    return True


def _sizes_to_release(setup: Setup, found: IdxdState) -> list[_Difference]:
    """Sizes that queues outside the setup must release, if all would be more than the device has."""
    most = found.limits.get("max_work_queues_size")
    desired = sum(int(values.get("size", "0")) for part, values in setup.attributes.items() if part.kind == "wq")
    others = [part for part in found.parts("wq") if part not in setup.attributes]
    sizes = {part: text for part in others if (text := found.attributes[part].get("size", "")).isdecimal()}
    if found.enabled or not found.configurable or most is None:
        return []
    if desired + sum(int(size) for size in sizes.values()) <= most:
        return []
    differences = [_Difference(part, "size", "0", size) for part, size in sizes.items() if size != "0"]
    return differences + [
        _Difference(part, "group_id", "-1", group)
        for part in sizes
        if (group := found.attributes[part].get("group_id", "-1")) != "-1"
    ]


def _to_disable(host: Host, setup: Setup, found: IdxdState, differences: Sequence[_Difference]) -> list[Part]:
    """The queues to disable, the last one first, and then the device if it must be disabled."""
    device = found.enabled and (
        not setup.enabled
        or any(difference.part.needs_device_disabled(difference.attribute) for difference in differences)
    )
    differing = {difference.part for difference in differences}
    queues = [
        part
        for part in found.enabled_queues()
        if device or part in differing or part not in setup.queues or not _has_driver(host, setup, found, part)
    ]
    return [*reversed(queues), *([DEVICE] if device else [])]


def _has_driver(host: Host, setup: Setup, found: IdxdState, queue: Part) -> bool:
    desired = driver_path(host, found.place.bus, setup.queues[queue]).rpartition("/")[2]
    return found.drivers.get(queue, desired) == desired


def _driver(found: IdxdState, queue: Part) -> str:
    """The driver of an enabled queue."""
    values = found.attributes[queue]
    return found.drivers.get(queue) or values.get("driver_name") or DRIVERS.get(values.get("type", ""), "user")


def _lock_reason(found: IdxdState) -> str:
    states = {part: state for part, state in found.states.items() if state not in ("enabled", "disabled")}
    return "; ".join(f"{found.place.part_name(part)} is {state[:_MAX_SHOWN]}" for part, state in states.items())


def _skip_if_locked(plan: Plan, found: IdxdState, steps: Sequence[Step], later: Iterable[str]) -> Plan:
    if steps and (refusal := _lock_reason(found)):
        return replace(plan, skip_reason=refusal)
    return replace(plan, steps=steps, later=list(later))


def _write_steps(setup: Setup, found: IdxdState, differences: Sequence[_Difference]) -> Iterator[Step]:
    """The writes, in an order that the kernel accepts."""
    crowded = _crowding_engines(found, differences)
    moves = [_Difference(part, "group_id", "-1", found.attributes[part]["group_id"]) for part in crowded]
    back = [
        _Difference(part, "group_id", desired, "-1")
        for part, now in ((move.part, move.found) for move in moves)
        if (desired := setup.attributes.get(part, {}).get("group_id", now)) != "-1"
    ]
    rest = [difference for difference in differences if difference.part not in crowded]
    for difference in (*moves, *_in_order(setup, found, rest), *back):
        if difference.attribute == "threshold" and difference.desired == "0":
            # Zero is rejected; a queue that becomes dedicated loses its threshold.
            for mode in ("dedicated", "shared"):
                yield _write(found, _Difference(difference.part, "mode", mode, ""))
        else:
            yield _write(found, difference)


def _crowding_engines(found: IdxdState, differences: Sequence[_Difference]) -> list[Part]:
    """Engines to remove from their groups while a number of read buffers is written that is too small for them.

    The kernel requires four for each engine, but only at the time of the write.
    """
    crowding: list[Part] = []
    for part, attribute, desired, _found in differences:
        if attribute == "read_buffers_allowed":
            group = str(part.number)
            engines = [one for one in found.parts("engine") if found.attributes[one].get("group_id") == group]
            if int(desired) < 4 * len(engines):
                crowding += engines
    return crowding


def _in_order(setup: Setup, found: IdxdState, differences: Iterable[_Difference]) -> list[_Difference]:
    limit = found.attributes[DEVICE].get("read_buffer_limit", "0")
    return sorted(differences, key=partial(_rank, setup, limit))


def _rank(setup: Setup, limit: str, difference: _Difference) -> tuple[int, int, int]:
    """The sort key of a write; writes that release something precede those that take it."""
    part, attribute, desired, found = difference
    if part.kind == "device":
        return 1, 0, 0
    if part.kind == "group":
        if attribute == "use_read_buffer_limit":
            return (0 if desired == "0" and limit != "0" else 4), part.number, 0
        if attribute == "read_buffers_reserved":
            return (2 if _less(desired, found) else 3), part.number, 0
        return 4, part.number, 0
    if part.kind == "wq":
        if part not in setup.attributes:
            return 5, part.number, 0
        if attribute == "size":
            return (6 if _less(desired, found) else 7), part.number, 0
        return 8, part.number, _QUEUE_ORDER[attribute]
    return 9, part.number, 0


def _less(one: str, other: str) -> bool:
    return other.isdecimal() and int(one) < int(other)


def _write(found: IdxdState, difference: _Difference) -> Step:
    path = found.files[difference.part][difference.attribute]
    return _step(found, _describe(found, difference), path, difference.desired or "\n")  # an empty write is ignored


def _disable(found: IdxdState, part: Part) -> Step:
    name = found.place.part_name(part)
    return _step(found, f"disable {name}", f"{found.place.part(part)}/driver/unbind", name)


def _enable(host: Host, found: IdxdState, part: Part, driver: str) -> Step:
    name = found.place.part_name(part)
    return _step(found, f"enable {name}", f"{driver_path(host, found.place.bus, driver)}/bind", name)


def _step(found: IdxdState, what: str, path: str, text: str) -> Step:
    return Step(what=what, path=path, text=text, explain=partial(command_error, found.place.path))


def _describe(found: IdxdState, difference: _Difference) -> str:
    part, attribute, desired, now = difference
    return f"{found.place.part_name(part)} {attribute} {now[:_MAX_SHOWN] or 'none'} -> {desired or 'none'}"


def _later_steps(setup: Setup, found: IdxdState, down: Sequence[Part]) -> Iterator[str]:
    """The parts to enable after the attributes are written."""
    if setup.enabled and (DEVICE in down or not found.enabled):
        yield f"enable {found.place.name}"
    yield from _later_queues(setup, found, down)


def _later_queues(setup: Setup, found: IdxdState, down: Sequence[Part]) -> Iterator[str]:
    for part in sorted(setup.queues):
        if part in down or found.states.get(part) != "enabled":
            yield f"enable {found.place.part_name(part)}"
