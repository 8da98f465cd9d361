"""What is to be written to a device so that it is set up as wanted, and what leads it back.

The kernel takes most attributes only while the device, or its queue, is disabled, and then forgets them when it is
disabled again. So a device goes through rounds: what stands in the way is disabled; what differs is written; the
device is enabled; its queues are. A device that is as wanted is not touched, and a queue that alone differs is
disabled alone. Facts: drivers/dma/idxd of the kernel, and its Documentation/ABI/stable/sysfs-driver-dma-idxd.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from accelplane.host import Host
from accelplane.provision.idxd.attributes import (
    DEVICE,
    DRIVERS,
    NEVER_FIXED,
    READ_BUFFERS,
    RULES,
    Part,
    needs_device_disabled,
    same,
)
from accelplane.provision.idxd.device import Observed, driver_path
from accelplane.provision.idxd.status import explained
from accelplane.provision.idxd.template import Setup
from accelplane.provision.steps import Plan, Step

_LONGEST = 80  # of what is told of a text
_OLDEST_WITH_TRAFFIC_CLASSES = 0x200
_QUEUE_ORDER = {name: place for place, name in enumerate(RULES["wq"])}


class _Difference(NamedTuple):
    part: Part
    attribute: str
    wanted: str
    found: str


def towards(host: Host, setup: Setup, found: Observed, *, force: bool = False) -> Plan:
    """What brings the device nearer to the setup; with `force` also where somebody uses its queues."""
    plan = Plan(device=found.place.name)
    fixed, differences = _differences(setup, found)
    if fixed:
        plan = msgspec.structs.replace(plan, notes=[f"its configuration is fixed: {_told(found, fixed, 'stays')}"])
    down = _to_disable(host, setup, found, differences)
    if down:
        if refusal := _locked(found):
            return msgspec.structs.replace(plan, skip_reason=refusal)
        if not force and (told := users(found)):
            return msgspec.structs.replace(plan, skip_reason=f"in use: {', '.join(told)}")
        changes = [_what(found, difference) for difference in _in_order(setup, found, differences)]
        later = [*changes, *_to_come(setup, found, down)]
        return msgspec.structs.replace(plan, steps=[_disabling(found, part) for part in down], later=later)
    differences += _in_the_way(setup, found)
    if differences:
        steps = list(_writing(setup, found, differences))
        return _unless_locked(plan, found, steps, list(_to_come(setup, found, ())))
    if setup.enabled and not found.enabled:
        return _unless_locked(plan, found, [_enabling(host, found, DEVICE, "idxd")], _queues_to_come(setup, found, ()))
    disabled = [part for part in sorted(setup.queues) if found.states.get(part) not in (None, "enabled")]
    return _unless_locked(plan, found, [_enabling(host, found, part, setup.queues[part]) for part in disabled], ())


def as_it_is(found: Observed) -> Setup:
    """The setup that the device has, as far as it can be written again."""
    attributes = {
        part: {
            name: text
            for name, text in values.items()
            # Junk is not the same as itself.
            if same(part, name, text, text) and not (name.startswith("traffic_class") and "-" in text)
        }
        for part, values in found.attributes.items()
    }
    queues = {part: _driver(found, part) for part in found.enabled_queues()}
    return Setup(attributes, queues, found.enabled)


def described(setup: Setup | None, found: Observed) -> dict[str, str]:
    """The device for people."""
    place = found.place
    lines = {"state": found.states[DEVICE][:_LONGEST]}
    idle: list[str] = []
    for group in found.parts("group"):
        members = [
            place.told(part)
            for part, values in found.attributes.items()
            if part.kind in ("wq", "engine") and values.get("group_id") == str(group.number)
        ]
        if members:
            lines[place.told(group)] = ", ".join(members)
        else:
            idle.append(place.told(group))
    for queue in found.parts("wq"):
        values = found.attributes[queue]
        if found.states[queue] == "disabled" and values.get("size") == "0" and found.clients[queue] == 0:
            idle.append(place.told(queue))
            continue
        words = [found.states[queue], *(values[name] for name in ("type", "mode") if values.get(name))]
        words += [f"{name} {values[name]}" for name in ("size", "name") if values.get(name)]
        words = [word[:_LONGEST] for word in words]
        clients = found.clients[queue]
        words.append("clients unknown" if clients is None else f"clients {clients}")
        if setup is not None and queue not in setup.attributes:
            words.append("not in the template, so not to be enabled")
        lines[place.told(queue)] = ", ".join(words)
    if idle:
        lines["not set up"] = ", ".join(idle)
    unsupported = [
        f"{place.told(part)} {name}"
        for part, values in (() if setup is None else setup.attributes.items())
        for name in values
        if part in found.files and name not in found.files[part] and name not in READ_BUFFERS | {"driver_name"}
    ]
    if unsupported:
        lines["not supported"] = ", ".join(unsupported)
    return lines


def users(found: Observed) -> list[str]:
    """Who uses the device's queues, or may do so."""
    return [
        f"{found.place.told(part)} does not say by how many"
        if clients is None
        else f"{clients} client{'s' * (clients > 1)} of {found.place.told(part)}"
        for part, clients in found.clients.items()
        if clients is None or clients > 0
    ]


def _differences(setup: Setup, found: Observed) -> tuple[list[_Difference], list[_Difference]]:
    """What is not as in the setup: what cannot be changed, and the rest."""
    fixed: list[_Difference] = []
    open_: list[_Difference] = []
    for part, values in setup.attributes.items():
        there = found.attributes.get(part, {})
        for name, wanted in values.items():
            if name not in there or not _counts(setup, found, part, name, wanted):
                continue
            if same(part, name, wanted, there[name]):
                continue
            difference = _Difference(part, name, wanted, there[name])
            (open_ if found.configurable or name in NEVER_FIXED else fixed).append(difference)
    for part in [part for part, name, *_ in open_ if name == "type"]:
        name = setup.attributes[part].get("name")
        if name and not any(difference[:2] == (part, "name") for difference in open_):
            open_.append(_Difference(part, "name", name, ""))  # the kernel drops it with the type
    return fixed, open_


def _counts(setup: Setup, found: Observed, part: Part, name: str, wanted: str) -> bool:
    """Whether the attribute means anything here."""
    if name in READ_BUFFERS and found.place.family == "iax":
        return False
    if name.startswith("traffic_class"):
        return found.limits.get("version", 0) >= _OLDEST_WITH_TRAFFIC_CLASSES
    if name == "use_read_buffer_limit":
        now = found.attributes[DEVICE].get("read_buffer_limit", "0")
        then = setup.attributes.get(DEVICE, {}).get("read_buffer_limit", now)
        return then != "0" or (wanted == "0" and now != "0")
    if name == "threshold":
        return setup.attributes[part].get("mode", found.attributes[part].get("mode")) != "dedicated"
    return True


def _in_the_way(setup: Setup, found: Observed) -> list[_Difference]:
    """What other queues must give up, where the sizes of all would be more than the device has."""
    most = found.limits.get("max_work_queues_size")
    wanted = sum(int(values.get("size", "0")) for part, values in setup.attributes.items() if part.kind == "wq")
    others = [part for part in found.parts("wq") if part not in setup.attributes]
    sizes = {part: text for part in others if (text := found.attributes[part].get("size", "")).isdecimal()}
    if found.enabled or not found.configurable or most is None:
        return []
    if wanted + sum(int(size) for size in sizes.values()) <= most:
        return []
    differences = [_Difference(part, "size", "0", size) for part, size in sizes.items() if size != "0"]
    return differences + [
        _Difference(part, "group_id", "-1", group)
        for part in sizes
        if (group := found.attributes[part].get("group_id", "-1")) != "-1"
    ]


def _to_disable(host: Host, setup: Setup, found: Observed, differences: Sequence[_Difference]) -> list[Part]:
    """The queues that have to be disabled, the last one first, and then the device if that has to be."""
    device = found.enabled and (
        not setup.enabled
        or any(needs_device_disabled(difference.part, difference.attribute) for difference in differences)
    )
    differing = {difference.part for difference in differences}
    queues = [
        part
        for part in found.enabled_queues()
        if device or part in differing or part not in setup.queues or not _has_driver(host, setup, found, part)
    ]
    return [*reversed(queues), *([DEVICE] if device else [])]


def _has_driver(host: Host, setup: Setup, found: Observed, queue: Part) -> bool:
    wanted = driver_path(host, found.place.bus, setup.queues[queue]).rpartition("/")[2]
    return found.drivers.get(queue, wanted) == wanted


def _driver(found: Observed, queue: Part) -> str:
    """The driver that an enabled queue has."""
    values = found.attributes[queue]
    return found.drivers.get(queue) or values.get("driver_name") or DRIVERS.get(values.get("type", ""), "user")


def _locked(found: Observed) -> str:
    states = {part: state for part, state in found.states.items() if state not in ("enabled", "disabled")}
    return "; ".join(f"{found.place.told(part)} is {state[:_LONGEST]}" for part, state in states.items())


def _unless_locked(plan: Plan, found: Observed, steps: Sequence[Step], later: Iterable[str]) -> Plan:
    refusal = _locked(found) if steps else ""
    return (
        msgspec.structs.replace(plan, skip_reason=refusal)
        if refusal
        else msgspec.structs.replace(plan, steps=steps, later=list(later))
    )


def _writing(setup: Setup, found: Observed, differences: Sequence[_Difference]) -> Iterator[Step]:
    """The writes, in an order that the kernel takes."""
    crowded = _crowding_engines(found, differences)
    moves = [_Difference(part, "group_id", "-1", found.attributes[part]["group_id"]) for part in crowded]
    back = [
        _Difference(part, "group_id", wanted, "-1")
        for part, now in ((move.part, move.found) for move in moves)
        if (wanted := setup.attributes.get(part, {}).get("group_id", now)) != "-1"
    ]
    rest = [difference for difference in differences if difference.part not in crowded]
    for difference in (*moves, *_in_order(setup, found, rest), *back):
        if difference.attribute == "threshold" and difference.wanted == "0":
            # Zero is refused; a queue that becomes dedicated loses its threshold.
            for mode in ("dedicated", "shared"):
                yield _write(found, _Difference(difference.part, "mode", mode, ""))
        else:
            yield _write(found, difference)


def _crowding_engines(found: Observed, differences: Sequence[_Difference]) -> list[Part]:
    """Engines to be out of their groups while these are told a number of read buffers that is too small for them.

    The kernel wants four for each engine, but only at the moment of writing.
    """
    crowding: list[Part] = []
    for part, attribute, wanted, _found in differences:
        if attribute == "read_buffers_allowed":
            group = str(part.number)
            engines = [one for one in found.parts("engine") if found.attributes[one].get("group_id") == group]
            if int(wanted) < 4 * len(engines):
                crowding += engines
    return crowding


def _in_order(setup: Setup, found: Observed, differences: Iterable[_Difference]) -> list[_Difference]:
    limit = found.attributes[DEVICE].get("read_buffer_limit", "0")
    return sorted(differences, key=partial(_rank, setup, limit))


def _rank(setup: Setup, limit: str, difference: _Difference) -> tuple[int, int, int]:
    """Where in the order of all writes this one belongs; what makes room comes before what takes it."""
    part, attribute, wanted, found = difference
    if part.kind == "device":
        return 1, 0, 0
    if part.kind == "group":
        if attribute == "use_read_buffer_limit":
            return (0 if wanted == "0" and limit != "0" else 4), part.number, 0
        if attribute == "read_buffers_reserved":
            return (2 if _less(wanted, found) else 3), part.number, 0
        return 4, part.number, 0
    if part.kind == "wq":
        if part not in setup.attributes:
            return 5, part.number, 0
        if attribute == "size":
            return (6 if _less(wanted, found) else 7), part.number, 0
        return 8, part.number, _QUEUE_ORDER[attribute]
    return 9, part.number, 0


def _less(one: str, other: str) -> bool:
    return other.isdecimal() and int(one) < int(other)


def _write(found: Observed, difference: _Difference) -> Step:
    return Step(
        what=_what(found, difference),
        path=found.files[difference.part][difference.attribute],
        text=difference.wanted or "\n",  # nothing at all is no write
        explain=partial(explained, found.place.path),
    )


def _disabling(found: Observed, part: Part) -> Step:
    return Step(
        what=f"disable {found.place.told(part)}",
        path=f"{found.place.part(part)}/driver/unbind",
        text=found.place.told(part),
        explain=partial(explained, found.place.path),
    )


def _enabling(host: Host, found: Observed, part: Part, driver: str) -> Step:
    return Step(
        what=f"enable {found.place.told(part)}",
        path=f"{driver_path(host, found.place.bus, driver)}/bind",
        text=found.place.told(part),
        explain=partial(explained, found.place.path),
    )


def _what(found: Observed, difference: _Difference) -> str:
    part, attribute, wanted, now = difference
    return f"{found.place.told(part)} {attribute} {now[:_LONGEST] or 'none'} -> {wanted or 'none'}"


def _told(found: Observed, differences: Sequence[_Difference], verb: str) -> str:
    return ", ".join(
        f"{found.place.told(part)} {attribute} {verb} {now[:_LONGEST]} (not {wanted})"
        for part, attribute, wanted, now in differences
    )


def _to_come(setup: Setup, found: Observed, down: Sequence[Part]) -> Iterator[str]:
    """What is enabled once the attributes are written."""
    if setup.enabled and (DEVICE in down or not found.enabled):
        yield f"enable {found.place.name}"
    yield from _queues_to_come(setup, found, down)


def _queues_to_come(setup: Setup, found: Observed, down: Sequence[Part]) -> Iterator[str]:
    for part in sorted(setup.queues):
        if part in down or found.states.get(part) != "enabled":
            yield f"enable {found.place.told(part)}"
