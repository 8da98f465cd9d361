"""Sensors of the hwmon class below a device.

The names of sensors depend on the driver: i915 has the whole card or one GT in a hwmon device, xe has the card and the
package, which are numbered. Other drivers name their sensors in `*_label` files. Sensors of one kind with equal names
get numbers: their values must not be added.
"""

import re
from collections import Counter
from collections.abc import Iterator

from accelplane.host import Host
from accelplane.readings import families
from accelplane.readings.plan import Source
from accelplane.readings.values import Family, InvalidText, Parse, Value, escape, labels, number, scalar

_ATTRIBUTE = re.compile(r"(energy|power|temp|in|curr|fan)([0-9]{1,2})_([a-z_]{1,20})", re.ASCII)
_TILE = re.compile(r"i915_(gt[0-9]{1,2})", re.ASCII)
_UNNAMED = re.compile(r"[^a-z0-9_]+")
_NAME_LENGTH = 32
_GPU_DRIVERS = ("i915", "xe")
_PACKAGE = "package"
_XE_PACKAGE = "pkg"  # the label of xe
_NUMBERED = {1: "card", 2: _PACKAGE}
_XE_TEMPERATURES = {2: _PACKAGE, 3: "vram"}

_MAX_WATTS, _MAX_RPM, _CELSIUS = 10_000.0, 100_000.0, (-60.0, 250.0)
_POWER_LIMITS = {"max": "sustained", "cap": "burst", "crit": "critical", "rated_max": "rated"}
_LIMIT_NAMES = {"crit": "critical"}
# An alarm has no family of its own kind: these words tell it from that of a temperature.
_ALARM_WORDS = {"power": "power", "in": "voltage", "curr": "current", "fan": "fan", "energy": "energy"}
# A 32-bit register of microjoules wraps after 4.36 minutes at 1,000 W, and the driver notices only when it is read.
_ENERGY_WRAPS = 240.0


def sources(host: Host, path: str, *, waking: bool = False, default: str = "") -> Iterator[Source]:
    """The sources of all hwmon devices below `path`. `default` names first sensors that the driver does not name."""
    names = _Names()
    for name in sorted(host.entries(f"{path}/hwmon")):
        if name.startswith("hwmon"):
            yield from _sensors(host, f"{path}/hwmon/{name}", names, waking=waking, default=default)


class _Names:
    """Distinct names of the sensors of each kind."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str, int], str] = {}
        self._used: set[tuple[str, str]] = set()
        self._numbers: Counter[tuple[str, str]] = Counter()

    def distinct(self, path: str, kind: str, index: int, name: str) -> str:
        """The name of a sensor in the directory `path`: `name`, with a number if another one has it."""
        sensor = path, kind, index
        if sensor not in self._names:
            found = name
            while (kind, found) in self._used:
                self._numbers[kind, name] += 1
                number = f"_{self._numbers[kind, name] + 1}"
                found = f"{name[: _NAME_LENGTH - len(number)]}{number}"
            self._used.add((kind, found))
            self._names[sensor] = found
        return self._names[sensor]


def _sensors(host: Host, path: str, names: _Names, *, waking: bool, default: str) -> Iterator[Source]:
    driver = host.text_or_empty(f"{path}/name")
    for name in sorted(host.entries(path)):
        match = _ATTRIBUTE.fullmatch(name)
        if match is None:
            continue
        kind, index, attribute = match[1], int(match[2]), match[3]
        sensor = _sensor(host, f"{path}/{kind}{index}_label", driver, kind, index) or (
            default if index == 1 and default else f"{kind}{index}"
        )
        parse = _parser(kind, attribute, names.distinct(path, kind, index, sensor))
        if parse is not None:
            yield Source(
                path=f"{path}/{name}",
                parse=parse,
                waking=waking,
                constant=attribute == "rated_max",
                wraps_after=_ENERGY_WRAPS if kind == "energy" else 0.0,
            )


def _sensor(host: Host, label_path: str, driver: str, kind: str, index: int) -> str:
    """The name of a sensor, empty if neither the driver nor its label names it."""
    if tile := _TILE.fullmatch(driver):
        return tile[1]
    if driver in _GPU_DRIVERS and kind in ("energy", "power"):
        return _NUMBERED.get(index, "")
    if label := _UNNAMED.sub("_", host.text_or_empty(label_path).lower()).strip("_")[:_NAME_LENGTH]:
        return _PACKAGE if driver in _GPU_DRIVERS and label == _XE_PACKAGE else label
    if kind == "temp" and driver in _GPU_DRIVERS:
        return _XE_TEMPERATURES.get(index, "") if driver == "xe" else _PACKAGE
    return ""


def _parser(kind: str, attribute: str, sensor: str) -> Parse | None:
    """The parser of an attribute, None if no metric shows it."""
    extra = labels(sensor=sensor)
    lowest, highest = _CELSIUS
    match kind, attribute:
        case "energy", "input":
            return scalar(families.ENERGY, scale=1e-6, extra=extra)
        case "power", "input":
            return scalar(families.POWER, scale=1e-6, extra=extra, highest=_MAX_WATTS)
        case "power", ("max" | "cap" | "crit" | "rated_max"):
            return _limit(families.POWER_LIMIT, labels(sensor=sensor, limit=_POWER_LIMITS[attribute]))
        case "temp", "input":
            return scalar(families.TEMPERATURE, scale=1e-3, extra=extra, lowest=lowest, highest=highest)
        case "temp", ("max" | "crit" | "emergency"):
            limit = labels(sensor=sensor, limit=_LIMIT_NAMES.get(attribute, attribute))
            return scalar(families.TEMPERATURE_LIMIT, scale=1e-3, extra=limit, lowest=lowest, highest=highest)
        case "in", "input":
            return scalar(families.VOLTAGE, scale=1e-3, extra=extra)
        case "curr", "input":
            return scalar(families.CURRENT, scale=1e-3, extra=extra)
        case "fan", "input":
            return scalar(families.FAN, extra=extra, highest=_MAX_RPM)
        case _:
            if attribute == "alarm" or attribute.endswith("_alarm"):
                word = "" if sensor.startswith(kind) else _ALARM_WORDS.get(kind, "")
                parts = (sensor, word, attribute.removesuffix("alarm").rstrip("_"))
                name = "_".join(part for part in parts if part)
                return scalar(families.ALARM, extra=f'sensor="{escape(name)}"', highest=1)
            return None


def _limit(family: Family, extra: str) -> Parse:
    """A limit in microwatts. 0 is a limit that is off: it has no sample."""

    def parse(text: str) -> tuple[Value, ...]:
        watts = number(text) / 1_000_000
        if not 0 <= watts <= _MAX_WATTS:
            raise InvalidText(text)
        return (Value(family, extra, watts),) if watts else ()

    return parse
