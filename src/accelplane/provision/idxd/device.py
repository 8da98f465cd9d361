"""The current state of a DSA or IAA device in sysfs.

Facts: the kernel's Documentation/ABI/stable/sysfs-driver-dma-idxd. Very old kernels have IAAs on a bus of their own,
one driver per bus, and tokens where others have read buffers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from accelplane.host import Host, HostError
from accelplane.provision.idxd.attributes import ALIASES, DEVICE, KINDS, RULES, Kind, Part

_BUSES = ("dsa", "iax")
_LIMITS = (
    "max_groups",
    "max_work_queues",
    "max_engines",
    "max_work_queues_size",
    "max_batch_size",
    "max_transfer_size",
    "max_read_buffers",
    "version",
)
_OLD_NAMES = {new: old for old, new in ALIASES.items()} | {"max_read_buffers": "max_tokens"}
_DEVICE = re.compile(r"(dsa|iax)(0|[1-9][0-9]{0,9})", re.ASCII)


class Place(msgspec.Struct, frozen=True):
    """The location of a device: `/sys/bus/<bus>/devices/<family><number>`."""

    bus: str
    family: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.family}{self.number}"

    @property
    def path(self) -> str:
        return f"/sys/bus/{self.bus}/devices/{self.name}"

    def part(self, part: Part) -> str:
        """The directory of the part."""
        return self.path if part == DEVICE else f"{self.path}/{self.part_name(part)}"

    def part_name(self, part: Part) -> str:
        """The kernel's name of the part."""
        return self.name if part == DEVICE else f"{part.kind}{self.number}.{part.number}"


class IdxdState(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a device.

    `files` are the attributes that exist, and `errors` is why some of them cannot be read. `states` and `drivers` are
    those of the device and its queues. `clients` is None for a queue that does not report the number.
    """

    place: Place
    files: Mapping[Part, Mapping[str, str]]
    attributes: Mapping[Part, Mapping[str, str]]
    errors: Mapping[Part, Mapping[str, str]]
    states: Mapping[Part, str]
    drivers: Mapping[Part, str]
    clients: Mapping[Part, int | None]
    limits: Mapping[str, int]
    configurable: bool

    @property
    def enabled(self) -> bool:
        return self.states[DEVICE] == "enabled"

    def parts(self, kind: Kind) -> list[Part]:
        """The device's parts of the kind, by their numbers."""
        return [part for part in self.files if part.kind == kind]

    def enabled_queues(self) -> list[Part]:
        return [part for part in self.parts("wq") if self.states[part] == "enabled"]


def places(host: Host, family: str) -> list[Place]:
    """The devices of the family, `dsa` or `iax`, by number. Raises `Unreadable`."""
    for bus in _BUSES:
        names = [device.name for device in host.class_devices(bus, bus=True)]
        found = [match for name in names if (match := _DEVICE.fullmatch(name)) and match[1] == family]
        if found:
            return [Place(bus, family, number) for number in sorted(int(match[2]) for match in found)]
    return []


def observe(host: Host, place: Place) -> IdxdState:
    """Reads the device. Raises `HostError` if its state, or that of a queue, cannot be read."""
    files: dict[Part, dict[str, str]] = {}
    attributes: dict[Part, dict[str, str]] = {}
    faults: dict[Part, dict[str, str]] = {}
    names = frozenset(host.names(place.path))
    for part in (DEVICE, *_parts(names, place)):
        directory = place.part(part)
        # Much faster than one stat(2) for each name that the attribute may have.
        present = names if part == DEVICE else frozenset(host.entries(directory))
        files[part] = {name: path for name in RULES[part.kind] if (path := _file(present, directory, name))}
        attributes[part], faults[part] = {}, {}
        for name, path in files[part].items():
            try:
                attributes[part][name] = host.text(path)
            except HostError as error:
                faults[part][name] = str(error)
    stateful = [part for part in files if part.kind in ("device", "wq")]
    return IdxdState(
        place=place,
        files=files,
        attributes=attributes,
        errors=faults,
        states={part: host.text(f"{place.part(part)}/state") for part in stateful},
        drivers={part: driver for part in stateful if (driver := host.driver_or_empty(place.part(part)))},
        clients={part: _clients(host, place.part(part)) for part in stateful if part.kind == "wq"},
        limits={name: value for name in _LIMITS if (value := _limit(host, place, names, name)) is not None},
        configurable=_limit(host, place, names, "configurable") != 0,
    )


def driver_path(host: Host, bus: str, driver: str) -> str:
    """The directory of the bus's driver; very old kernels have a single driver per bus."""
    path = f"/sys/bus/{bus}/drivers/{driver}"
    alone = f"/sys/bus/{bus}/drivers/{bus}"
    return alone if not host.exists(path) and host.exists(alone) else path


def _parts(names: Iterable[str], place: Place) -> Iterator[Part]:
    """The parts among the names in the device's directory, by kind and number."""
    form = re.compile(rf"(group|wq|engine){place.number}\.(0|[1-9][0-9]{{0,4}})", re.ASCII)
    found = [match for name in names if (match := form.fullmatch(name))]
    for kind in KINDS:
        yield from (Part(kind, index) for index in sorted(int(match[2]) for match in found if match[1] == kind))


def _file(present: frozenset[str], directory: str, name: str) -> str:
    """The attribute's path, which may have its old name; empty if neither is `present` in the directory."""
    return next((f"{directory}/{file}" for file in (name, _OLD_NAMES.get(name)) if file in present), "")


def _clients(host: Host, path: str) -> int | None:
    try:
        text = host.optional_text(f"{path}/clients")
        return 0 if text is None else int(text)
    except (HostError, ValueError):
        return None


def _limit(host: Host, place: Place, present: frozenset[str], name: str) -> int | None:
    """The limit that the device reports, None if it reports none."""
    if not (path := _file(present, place.path, name)):
        return None
    text = host.text(path)
    try:
        return int(text, 0)
    except ValueError:
        raise HostError(path, f"reads {text[:80]!a}, expected a number") from None
