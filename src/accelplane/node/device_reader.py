"""Reads the sources of one device in a thread, and stores the state for the next reading."""

import errno
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from accelplane.host import Host, HostError
from accelplane.host.errors import host_error
from accelplane.readings import DevicePlan, Family, InvalidText, Source, Value
from accelplane.readings.families import AWAKE, ENERGY_GAPS, INFO, STUCK, UNIT_INFO
from accelplane.readings.plan import PowerState, is_awake, waking_reads
from accelplane.readings.values import labels

# The file or device was removed, or the hardware lacks the value: not read again before the next scan.
_GONE = {errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTDIR, errno.EOPNOTSUPP}
_DENIED = {errno.EACCES, errno.EPERM}
_MAX_FOLLOWING = 64

Lines = Mapping[Family, Sequence[str]]


class DeviceReading(Struct, frozen=True):
    """The rendered samples of one device by family, and the number of reads by outcome.

    Outcomes: ok, missing, denied, asleep, invalid, error, timeout.
    """

    lines: Lines
    outcomes: Mapping[str, int]
    denied: Sequence[str] = ()
    plugin: str = ""
    device: str = ""
    bdf: str = ""
    units: Sequence[str] = ()
    values: Sequence[Value] = ()


class DeviceReader:
    """The readings of one device. One thread at a time may call `read`."""

    def __init__(self, plugin: str, plan: DevicePlan) -> None:
        self.plan = plan
        self.labels = labels(plugin=plugin, device=plan.device, **({"bdf": plan.bdf} if plan.bdf else {}))
        self._plugin = plugin
        self._sources = list(plan.sources)
        self._values: dict[str, Sequence[Value]] = {}
        # By path the last text with its meaning: most files seldom change.
        self._parsed: dict[str, _Parsed] = {}
        self._prefixes: dict[tuple[Family, str], str] = {}
        # The lines of the last reading: most values seldom change.
        self._rendered_lines: dict[tuple[Family, str], tuple[float, str]] = {}
        self._identity_lines = self._identity()
        self._last_waking = float("-inf")
        self._last_energy: float | None = None
        self._gaps = 0
        self._increases = _Increases()

    def adopt(self, earlier: "DeviceReader") -> None:
        """Takes over the readings of an earlier plan of the same device, so that counters do not decrease."""
        self._values = earlier._values
        self._last_waking = earlier._last_waking
        self._last_energy = earlier._last_energy
        self._gaps = earlier._gaps
        self._increases = earlier._increases

    def read(self, host: Host, mode: str, now: float, *, held: bool) -> DeviceReading:
        """Reads the sources that are due at `now`, the monotonic time. Raises exceptions of a plugin's parser."""
        outcomes: Counter[str] = Counter()
        denied: list[str] = []
        status = _power_status(host, self.plan)
        decision = "read" if self.plan.never_sleeps else self._decide(host, mode, status, now, held=held)
        values: list[Value] = []
        for source in list(self._sources):
            if source.waking and decision != "read":
                outcomes["asleep"] += 1
                values += self._earlier(source, repeat=decision == "repeat")
                continue
            values += self._read_source(host, source, outcomes, denied)
        values += self._increases.totals()
        if decision == "read" and any(source.waking for source in self._sources):
            self._last_waking = now
            self._count_gap(now)
        if status:
            values.append(Value(AWAKE, "", float(is_awake(status))))
        if any(source.wraps_after for source in self._sources):
            values.append(Value(ENERGY_GAPS, "", self._gaps))
        lines = {**self._identity_lines, **self._rendered(values)}
        plan = self.plan
        return DeviceReading(lines, outcomes, denied, self._plugin, plan.device, plan.bdf, plan.units, values)

    def stuck(self) -> DeviceReading:
        """The reading while the device is not read because a read blocks."""
        lines = {**self._identity_lines, **self._rendered([Value(STUCK, "", 1.0)])}
        plan = self.plan
        return DeviceReading(lines, {"timeout": 1}, (), self._plugin, plan.device, plan.bdf, plan.units)

    def _decide(self, host: Host, mode: str, status: str, now: float, *, held: bool) -> str:
        if not self.plan.power:
            return "skip" if mode == "never" else "read"
        state = PowerState(
            status=status,
            autosuspend=_autosuspend(host, self.plan),
            held=held,
            since_waking=now - self._last_waking,
        )
        return waking_reads(mode, state)

    def _earlier(self, source: Source, *, repeat: bool) -> Sequence[Value]:
        """The values of an unread source: counters keep their values, gauges only if the last reading is repeated."""
        known = self._values.get(source.path, ())
        return known if repeat else [value for value in known if value.family.kind == "counter"]

    def _read_source(self, host: Host, source: Source, outcomes: Counter[str], denied: list[str]) -> Sequence[Value]:
        values: list[Value] = []
        pending = [source]
        while pending:
            now = pending.pop(0)
            if now.members is not None:
                names = _names(host, now.path)
                if names is None:
                    self._increases.keep(f"{now.path}/")
                else:
                    pending += now.members(names)[:_MAX_FOLLOWING]
                continue
            text = self._text(host, now, outcomes, denied)
            if text is None:
                self._increases.keep(now.path)
                continue
            known = self._parsed.get(now.path)
            if known is None or known.text != text:
                known = self._parsed[now.path] = _parsed(now, text)
            if now.accumulates and known.valid:
                self._increases.add(now.path, known.values)
            elif now.accumulates:
                self._increases.keep(now.path)
            else:
                values += known.values
            outcomes["ok" if known.valid else "invalid"] += 1
            pending += known.following
        self._values[source.path] = values
        return values

    def _text(self, host: Host, source: Source, outcomes: Counter[str], denied: list[str]) -> bytes | None:
        """The ASCII text of a file, None if it has none."""
        try:
            data = _content(host, source)
        except HostError as error:
            outcome = "missing" if error.errno in _GONE else "denied" if error.errno in _DENIED else "error"
            outcomes[outcome] += 1
            if outcome == "denied":
                denied.append(source.path)
            if outcome in ("missing", "denied") and source in self._sources:
                self._sources.remove(source)
            return None
        if len(data) > source.limit or not data.isascii():
            outcomes["invalid"] += 1
            return None
        return data

    def _count_gap(self, now: float) -> None:
        wraps_after = min((source.wraps_after for source in self._sources if source.wraps_after), default=0.0)
        if not wraps_after:
            return
        if self._last_energy is not None and now - self._last_energy > wraps_after:
            self._gaps += 1
        self._last_energy = now

    def _rendered(self, values: Iterable[Value]) -> Lines:
        """The lines of the samples by family. Samples with equal labels are added."""
        sums: dict[tuple[Family, str], float] = {}
        for family, extra, value in values:
            key = (family, extra)
            sums[key] = sums.get(key, 0.0) + value
        lines: dict[Family, list[str]] = {}
        for key, value in sums.items():
            known = self._rendered_lines.get(key)
            if known is not None and known[0] == value:
                lines.setdefault(key[0], []).append(known[1])
                continue
            prefix = self._prefixes.get(key)
            if prefix is None:
                family, extra = key
                comma = "," if extra else ""
                prefix = self._prefixes[key] = f"{family.name}{{{self.labels}{comma}{extra}}} "
            line = prefix + number_text(value)
            self._rendered_lines[key] = value, line
            lines.setdefault(key[0], []).append(line)
        return lines

    def _identity(self) -> Lines:
        facts = labels(**self.plan.facts)
        info = f"{INFO.name}{{{self.labels}{',' if facts else ''}{facts}}} 1"
        units = [
            f"{UNIT_INFO.name}{{{labels(plugin=self._plugin, unit=unit)},{self.labels.partition(',')[2]}}} 1"
            for unit in self.plan.units
        ]
        return {INFO: [info], UNIT_INFO: units}


class _Increases:
    """The increase of counters whose files come and go."""

    def __init__(self) -> None:
        self._totals: dict[tuple[Family, str], float] = {}
        self._last: dict[str, Mapping[tuple[Family, str], float]] = {}
        self._seen: dict[str, Mapping[tuple[Family, str], float]] = {}

    def add(self, path: str, values: Iterable[Value]) -> None:
        """Adds the value of one file. A lower value than before is that of a new file of the same name."""
        now = {(value.family, value.labels): value.value for value in values}
        before = self._last.get(path, {})
        for key, value in now.items():
            known = before.get(key, 0.0)
            self._totals[key] = self._totals.get(key, 0.0) + (value - known if value >= known else value)
        self._seen[path] = now

    def keep(self, prefix: str) -> None:
        """Keeps the values of files that exist and cannot be read now: they are not counted again."""
        self._seen.update({path: known for path, known in self._last.items() if path.startswith(prefix)})

    def totals(self) -> Sequence[Value]:
        """The increases since the first reading. Ends a reading: files that it had not are forgotten."""
        self._last, self._seen = self._seen, {}
        return [Value(*key, total) for key, total in self._totals.items()]


class _Parsed(NamedTuple):
    """The values in the text of a source."""

    text: bytes
    values: Sequence[Value]
    valid: bool
    following: Sequence[Source]


def _parsed(source: Source, text: bytes) -> _Parsed:
    content = text.decode("ascii")
    try:
        values = source.parse(content)
    except InvalidText as error:
        return _Parsed(text, error.values, valid=False, following=())
    following = source.follow(content)[:_MAX_FOLLOWING] if source.follow is not None else ()
    return _Parsed(text, values, valid=True, following=following)


def _content(host: Host, source: Source) -> bytes:
    """At most one byte more than the limit. Raises `HostError`."""
    try:
        descriptor = host.open(source.path, os.O_RDONLY)
        try:
            return os.read(descriptor, source.limit + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise host_error(source.path, error) from None


def _names(host: Host, path: str) -> Sequence[str] | None:
    """None if the directory cannot be listed."""
    try:
        return host.names(path)
    except HostError:
        return None


def _power_status(host: Host, plan: DevicePlan) -> str:
    """The text of `runtime_status`, which never wakes the device; empty if there is none."""
    if not plan.power:
        return ""
    try:
        return host.text(f"{plan.power}/runtime_status")
    except HostError:
        return ""


def _autosuspend(host: Host, plan: DevicePlan) -> float:
    """Seconds, 0 if unknown. A negative delay prevents suspending."""
    try:
        milliseconds = int(host.text(f"{plan.power}/autosuspend_delay_ms"))
    except (HostError, ValueError):
        return 0.0
    return max(0.0, milliseconds / 1000)


def number_text(value: float) -> str:
    """The shortest text of a number that reads back as the same number."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
