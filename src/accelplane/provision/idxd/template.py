"""Templates of `accel-config load-config`: JSON that configures DSA and IAA devices, groups, queues and engines.

A capital X stands for the complete number of the device: in the value of `dev`, and in the `name` of a queue, where
only an X that touches no other capital letter counts (`appX0`, `dpdk_X0`; not `MAX` or `XTS`). A template
describes any device (`dsaX`) or those that it names (`dsa0`, `dsa1`), and is checked completely before it is applied.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from accelplane.provision.config import ConfigError, ConfigFile, quote
from accelplane.provision.idxd.attributes import ALIASES, DEVICE, DRIVERS, RULES, TYPES, Kind, Part
from accelplane.provision.idxd.jsonc import Value, parse

# The kernel's names of the devices of each type, without the number.
FAMILIES = {"dsa": "dsa", "iaa": "iax"}
MAX_DEVICES = 256
MAX_PARTS = 128  # groups, queues or engines of one device
_MAX_NOTES = 20

_DEVICE = re.compile(r"(dsa|iax)(X|0|[1-9][0-9]{0,3})", re.ASCII)
_NUMBER_IN_NAME = re.compile(r"(?<![A-WYZ])X(?![A-WYZ])")
_NEEDED = ("type", "size", "name")


class Setup(msgspec.Struct, frozen=True):
    """The desired or current state of one device: its attributes, and its enabled queues with their drivers.

    Parts and attributes that are not in `attributes` may have any value. No queues but `queues` may be enabled; with
    `enabled` the device is enabled, also without queues.
    """

    attributes: Mapping[Part, Mapping[str, str]]
    queues: Mapping[Part, str]
    enabled: bool = True


class Template(msgspec.Struct, frozen=True):
    """One file. `setups` are those of devices by number, or of any device by `X`; `notes` are about ignored keys."""

    file: str
    setups: Mapping[str, Setup]
    notes: Sequence[str] = ()

    def setup(self, number: int) -> Setup | None:
        """The desired state of the device with that number, None if the template has none."""
        setup = self.setups.get("X") or self.setups.get(str(number))
        if setup is None:
            return None
        attributes = {
            part: {
                name: _NUMBER_IN_NAME.sub(str(number), text) if name == "name" else text
                for name, text in values.items()
            }
            for part, values in setup.attributes.items()
        }
        return msgspec.structs.replace(setup, attributes=attributes)


def read_template(file: ConfigFile, device_type: str) -> Template:
    """The configuration of devices of the type, `dsa` or `iaa`. Raises `ConfigError`."""
    reader = _TemplateReader(file.path, FAMILIES[device_type])
    setups = dict(reader.setups(parse(file.text, file.path)))
    unknown = list(dict.fromkeys(reader.ignored))
    if len(unknown) > _MAX_NOTES:
        unknown[_MAX_NOTES:] = [f"and {len(unknown) - _MAX_NOTES} more ignored"]
    return Template(file.path, setups, [f"{file.path}: {note}" for note in unknown])


class _TemplateReader:
    def __init__(self, file: str, family: str) -> None:
        self._file = file
        self._family = family
        self._number = ""  # of the device that is read: X or digits
        self._parts: dict[Part, dict[str, str]] = {}  # attributes of that device
        self.ignored: list[str] = []

    def setups(self, top: Value) -> Iterator[tuple[str, Setup]]:
        devices = self._list(top, "a list of devices")
        if len(devices) > MAX_DEVICES:
            raise self._error(top, f"{len(devices)} devices", f"at most {MAX_DEVICES}")
        lines: dict[str, int] = {}
        for device in devices:
            members = self._object(device, "a device")
            name = self._text(members, "dev", device)
            found = _DEVICE.fullmatch(name)
            if found is None:
                raise self._error(members["dev"], quote(name), f"{self._family}X, or {self._family} and a number")
            if found[1] != self._family:
                self.ignored.append(f"{name} ignored, the devices here are {self._family}*")
                continue
            number = found[2]
            for other in (number, "X") if number != "X" else lines:
                if other in lines:
                    found_twice = f"{quote(name)}, which is already in line {lines[other]}"
                    raise self._error(device, found_twice, "one description of each device")
            lines[number] = device.line
            self._number = number
            yield number, self._device(members, device)

    def _device(self, members: Mapping[str, Value], device: Value) -> Setup:
        attributes = self._parts = {DEVICE: self._attributes(members, DEVICE, ("groups",))}
        for group in self._list(members.get("groups", Value([], device.line)), "a list of groups"):
            self._group(group)
        queues = {
            part: values.get("driver_name", DRIVERS[values["type"]])
            for part, values in attributes.items()
            if part.kind == "wq"
        }
        for kind, what in (("wq", "work queue"), ("engine", "engine")):
            if not any(part.kind == kind for part in attributes):
                raise self._error(device, f"a device without {what}", f"at least one {what} in a group")
        for part, driver in queues.items():
            attributes[part].setdefault("driver_name", driver)
        return Setup(attributes, queues)

    def _group(self, group: Value) -> None:
        members = self._object(group, "a group")
        part = self._add(group, "group", ("grouped_workqueues", "grouped_engines"))
        for queue in self._list(members.get("grouped_workqueues", Value([], group.line)), "a list of work queues"):
            self._check_queue(queue, self._member(queue, "wq", part))
        for engine in self._list(members.get("grouped_engines", Value([], group.line)), "a list of engines"):
            self._member(engine, "engine", part)

    def _member(self, value: Value, kind: Kind, group: Part) -> Mapping[str, str]:
        """Adds a queue or an engine; it belongs to the group that contains it unless it names another."""
        values = self._parts[self._add(value, kind)]
        values.setdefault("group_id", str(group.number))
        return values

    def _check_queue(self, queue: Value, values: Mapping[str, str]) -> None:
        if missing := [name for name in _NEEDED if name not in values]:
            raise self._error(queue, f"a queue without {' and '.join(missing)}", "a queue with type, size and name")
        driver = values.get("driver_name", "")
        if (expected := TYPES.get(driver, values["type"])) != values["type"]:
            line = self._object(queue, "").get("driver_name", queue)
            found = f"driver_name {driver} of a queue of type {values['type']}"
            raise self._error(line, found, f"type {expected}, or driver_name {DRIVERS[values['type']]}")
        if values.get("mode") == "shared" and "threshold" not in values:
            raise self._error(queue, "a shared queue without threshold", f"a threshold from 1 to {values['size']}")
        threshold = values.get("threshold")
        if threshold and values.get("mode") != "dedicated" and not 1 <= int(threshold) <= int(values["size"]):
            line = self._object(queue, "").get("threshold", queue)
            raise self._error(line, f"threshold {threshold}", f"1 to {values['size']}, the queue's size")
        if values.get("prs_disable") == values.get("block_on_fault") == "1":
            raise self._error(queue, "prs_disable and block_on_fault", "not both, faults cannot be waited for then")

    def _add(self, value: Value, kind: Kind, children: Sequence[str] = ()) -> Part:
        """Reads a part of the device."""
        number = self._number
        members = self._object(value, f"a description of {kind}{number}.0 or the like")
        name = self._text(members, "dev", value)
        found = re.fullmatch(rf"{kind}{number}\.(0|[1-9][0-9]{{0,3}})", name, re.ASCII)
        if found is None:
            raise self._error(members["dev"], quote(name), f"{kind}{number}. and a number, as in {kind}{number}.0")
        part = Part(kind, int(found[1]))
        if part in self._parts:
            raise self._error(members["dev"], f"{quote(name)} for the second time", "one description of each")
        if part.number >= MAX_PARTS:
            raise self._error(members["dev"], quote(name), f"a number below {MAX_PARTS}")
        self._parts[part] = self._attributes(members, part, children)
        return part

    def _attributes(self, members: Mapping[str, Value], part: Part, children: Sequence[str]) -> dict[str, str]:
        """The members that are attributes, as they are written."""
        attributes: dict[str, str] = {}
        for key, value in members.items():
            name = ALIASES.get(key, key)
            rule = RULES[part.kind].get(name)
            if rule is None:
                if key != "dev" and key not in children:
                    self.ignored.append(f"{quote(key)} of a {part.kind} is unknown and ignored")
                continue
            text = rule.text(value.plain)
            if text is None:
                raise self._error(value, f"{key} {value}", str(rule))
            if attributes.get(name, text) != text:
                raise self._error(value, f"{key} {value} after {name} {attributes[name]}", "one of the two names")
            attributes[name] = text
        return attributes

    def _text(self, members: Mapping[str, Value], name: str, whole: Value) -> str:
        value = members.get(name)
        if value is None:
            raise self._error(whole, f"an object without {quote(name)}", f"{quote(name)} in each")
        if not isinstance(value.plain, str):
            raise self._error(value, f"{name} {value}", "a text")
        return value.plain

    def _object(self, value: Value, expected: str) -> Mapping[str, Value]:
        if not isinstance(value.plain, dict):
            raise self._error(value, str(value), expected)
        return value.plain

    def _list(self, value: Value, expected: str) -> Sequence[Value]:
        if not isinstance(value.plain, list):
            raise self._error(value, str(value), expected)
        return value.plain

    def _error(self, value: Value, found: str, expected: str) -> ConfigError:
        return ConfigError(self._file, value.line, found, expected)
