"""Reads the sources of one device in a thread, and stores the state for the next reading."""

import errno
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct

from accelplane.host import Host, HostError
from accelplane.readings import DevicePlan, Family, InvalidText, Source, Value
from accelplane.readings.families import ACTIVITY, AWAKE, ENERGY_GAPS, INFO, STUCK
from accelplane.readings.plan import is_awake, waking_reads
from accelplane.readings.values import NOT_FINITE, labels

# The file or device was removed, or the hardware lacks the value: not read again before the next scan.
_GONE = {errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTDIR, errno.EOPNOTSUPP}
_DENIED = {errno.EACCES, errno.EPERM}
# A file that another one or a directory led to may exist again under the same name.
_ABSENT = {errno.ENOENT, errno.ENOTDIR}
_MAX_FOLLOWING = 64
_STATUS_LIMIT = 64

Lines = Mapping[Family, Sequence[str]]


class DeviceReading(Struct, frozen=True):
    """The rendered samples of one device by family, the number of reads by outcome, and the values of its activity.

    Outcomes: ok, missing, denied, asleep, invalid, error, timeout. `fresh` is false if files that wake the device were
    not read: their values are those of an earlier reading, or missing.
    """

    lines: Lines
    outcomes: Mapping[str, int]
    denied: Sequence[str] = ()
    plugin: str = ""
    device: str = ""
    bdf: str = ""
    units: Sequence[str] = ()
    activity: Sequence[Value] = ()
    fresh: bool = True


class DeviceReader:
    """The readings of one device. One thread at a time may call `read`."""

    def __init__(self, plugin: str, plan: DevicePlan) -> None:
        self.plan = plan
        self.labels = labels(plugin=plugin, device=plan.device, **({"bdf": plan.bdf} if plan.bdf else {}))
        self._plugin = plugin
        self._use([_SourceState(source) for source in plan.sources])
        # Paths of further sources that are not read again.
        self._unreadable: set[str] = set()
        # By path the last text with its meaning: most files seldom change.
        self._parsed: dict[str, _Part] = {}
        self._own = _Part()
        self._merged = _Merged()
        self._identity_lines = self._identity()
        self._last_waking = float("-inf")
        self._last_energy: float | None = None
        self._gaps = 0
        self._increases = _Increases()

    def _use(self, states: "Sequence[_SourceState]") -> None:
        sources = [state.source for state in states]
        self._states = states
        self._wakes = any(source.waking for source in sources)
        self._wraps_after = min((source.wraps_after for source in sources if source.wraps_after), default=0.0)

    def adopt(self, earlier: "DeviceReader") -> None:
        """Takes over the readings of an earlier plan of the same device, so that counters do not decrease."""
        known = {state.source.path: state.parts for state in earlier._states}
        for state in self._states:
            if state.source.waking:
                state.parts = [self._part(part.values) for part in known.get(state.source.path, ())]
        self._last_waking = earlier._last_waking
        self._last_energy = earlier._last_energy
        self._gaps = earlier._gaps
        self._increases = earlier._increases

    def read(self, host: Host, mode: str, now: float, *, held: bool) -> DeviceReading:
        """Reads the sources that are due at `now`, the monotonic time. Raises exceptions of a plugin's parser."""
        reads = _Reads(host)
        status = _power_status(host, self.plan)
        decision = "read" if self.plan.never_sleeps else self._decide(host, mode, status, now, held=held)
        changed = False
        for state in self._states:
            if state.source.waking and decision != "read":
                if decision == "skip":
                    reads.outcomes["asleep"] += 1
            elif not state.complete and self._update(reads, state):
                changed = True
        if decision == "read" and self._wakes:
            self._last_waking = now
            if self._wraps_after:
                self._gaps += self._last_energy is not None and now - self._last_energy > self._wraps_after
                self._last_energy = now
        own = self._own_part(status)
        if changed or decision != self._merged.decision or own is not self._merged.own:
            self._merged = self._merge(decision, own)
        plan = self.plan
        return DeviceReading(
            self._merged.lines,
            reads.outcomes,
            reads.denied,
            self._plugin,
            plan.device,
            plan.bdf,
            plan.units,
            self._merged.activity,
            fresh=decision == "read" or not self._wakes,
        )

    def stuck(self) -> DeviceReading:
        """The reading while the device is not read because a read blocks."""
        lines = {**self._identity_lines, **_by_family([self._part([Value(STUCK, "", 1.0)])])}
        plan = self.plan
        return DeviceReading(lines, {"timeout": 1}, (), self._plugin, plan.device, plan.bdf, plan.units)

    def _decide(self, host: Host, mode: str, status: str, now: float, *, held: bool) -> str:
        if not self.plan.power:
            return "skip" if mode == "never" else "read"
        autosuspend = 0.0 if held else _autosuspend(host, self.plan)
        since = now - self._last_waking
        return waking_reads(mode, status=status, autosuspend=autosuspend, held=held, since_waking=since)

    def _shown(self, state: "_SourceState", decision: str) -> "Sequence[_Part]":
        """The parts of a source. Unread counters keep their values, gauges only if the last reading is repeated."""
        if decision != "skip" or not state.source.waking:
            return state.parts
        found: list[_Part] = []
        for part in state.parts:
            counters = [value for value in part.values if value.family.kind == "counter"]
            if len(counters) == len(part.values):
                found.append(part)
            elif counters:
                found.append(self._part(counters))
        return found

    def _update(self, reads: "_Reads", state: "_SourceState") -> bool:
        """Reads a source and those that follow it. Returns whether that changes the reading."""
        source = state.source
        text = None if source.members is not None else self._read_text(reads, source)
        if text is not None and text == state.text:
            reads.outcomes["ok"] += 1
            return False
        parts = self._parts(reads, source, text)
        valid = bool(parts) and parts[0].valid
        state.complete = source.constant and valid
        # The next reading with the same text has the same part, unless further sources follow it.
        state.text = text if valid and not source.accumulates and not parts[0].following else None
        last, state.parts = state.parts, parts
        return len(parts) != len(last) or any(map(operator.is_not, parts, last))

    def _parts(self, reads: "_Reads", source: Source, text: bytes | None) -> "Sequence[_Part]":
        """The parts of a source with this text and of those that follow it; without those that accumulate."""
        parts: list[_Part] = []
        pending = [*self._add(reads, source, text, parts)]
        while pending:
            now = pending.pop(0)
            known = now.members is not None or now.path in self._unreadable
            pending += self._add(reads, now, None if known else self._read_text(reads, now), parts)
        return parts

    def _add(self, reads: "_Reads", source: Source, text: bytes | None, parts: "list[_Part]") -> Sequence[Source]:
        """Adds the part of one source, or its increase, unless it cannot be read. Returns the sources that follow."""
        if source.members is not None:
            names = _names(reads.host, source.path)
            if names is None:
                self._increases.keep(f"{source.path}/")
            return () if names is None else source.members(names)[:_MAX_FOLLOWING]
        part = None if text is None else self._interpret(reads, source, text)
        if part is None or (source.accumulates and not part.valid):
            self._increases.keep(source.path)
        elif source.accumulates:
            self._increases.add(source.path, part.values)
        else:
            parts.append(part)
        return () if part is None else part.following

    def _read_text(self, reads: "_Reads", source: Source) -> bytes | None:
        """What the file contains now, with one byte more than allowed if it is too long; None if it is unreadable."""
        try:
            return reads.host.read_once(source.path, source.limit + 1)
        except HostError as error:
            outcome = "missing" if error.errno in _GONE else "denied" if error.errno in _DENIED else "error"
            reads.outcomes[outcome] += 1
            if outcome == "denied":
                reads.denied.append(source.path)
            if outcome != "error":
                self._drop(source, error)
            return None

    def _drop(self, source: Source, error: HostError) -> None:
        """Does not read the source again, unless it is a further one that may exist again."""
        states = [state for state in self._states if state.source is not source]
        if len(states) < len(self._states):
            self._use(states)
        elif error.errno not in _ABSENT:
            self._unreadable.add(source.path)

    def _interpret(self, reads: "_Reads", source: Source, text: bytes) -> "_Part | None":
        """The meaning of the text, None if it is no ASCII text, or too long and not read by lines."""
        part = self._parsed.get(source.path)
        if part is None or part.text != text:
            too_long = len(text) > source.limit
            if (too_long and not source.by_lines) or not text.isascii():
                reads.outcomes["invalid"] += 1
                return None
            found = self._parse_lines(source, text, part) if too_long else self._parse(source, text, part)
            part = self._parsed[source.path] = found
        reads.outcomes["ok" if part.valid else "invalid"] += 1
        return part

    def _parse_lines(self, source: Source, text: bytes, earlier: "_Part | None") -> "_Part":
        """The values of the complete lines of a text that is too long."""
        try:
            values = source.parse(text.rpartition(b"\n")[0].decode("ascii"))
        except InvalidText as error:
            values = error.values
        return self._part(values, text, valid=False, earlier=earlier)

    def _parse(self, source: Source, text: bytes, earlier: "_Part | None") -> "_Part":
        content = text.decode("ascii")
        try:
            values = source.parse(content)
        except InvalidText as error:
            return self._part(error.values, text, valid=False, earlier=earlier)
        following = source.follow(content)[:_MAX_FOLLOWING] if source.follow is not None else ()
        return self._part(values, text, following=following, earlier=earlier)

    def _part(
        self,
        values: Sequence[Value],
        text: bytes = b"",
        *,
        valid: bool = True,
        following: Sequence[Source] = (),
        earlier: "_Part | None" = None,
    ) -> "_Part":
        keys: Sequence[tuple[Family, str]] = tuple([value[:2] for value in values])
        if len(set(keys)) < len(keys):
            values = _added(values)
            keys = tuple([value[:2] for value in values])
        keys = earlier.keys if earlier is not None and keys == earlier.keys else _shared(keys)
        lines = tuple([self._line(*value) for value in values])
        return _Part(text=text, values=values, valid=valid, following=following, keys=keys, lines=lines)

    def _line(self, family: Family, extra: str, value: float) -> str:
        return f"{family.name}{{{self.labels}{',' if extra else ''}{extra}}} {number_text(value)}"

    def _own_part(self, status: str) -> "_Part":
        """The values that are not in one file."""
        values = [*self._increases.totals()]
        if status:
            values.append(Value(AWAKE, "", float(self.plan.never_sleeps or is_awake(status))))
        if self._wraps_after:
            values.append(Value(ENERGY_GAPS, "", self._gaps))
        if values != self._own.values:
            self._own = self._part(values, earlier=self._own)
        return self._own

    def _merge(self, decision: str, own: "_Part") -> "_Merged":
        """The lines of all parts by family, and the values of activity. Samples with equal labels are added."""
        last = self._merged
        parts = [*(part for state in self._states for part in self._shown(state, decision)), own]
        keys = [part.keys for part in parts]
        distinct = last.distinct
        if keys != last.keys:
            distinct = len({key for each in keys for key in each}) == sum(map(len, keys))
        values = [value for part in parts for value in part.values]
        shown = parts if distinct else [self._part(_added(values))]
        lines = {**self._identity_lines, **_by_family(shown)}
        activity = tuple([value for value in values if value.family in ACTIVITY])
        return _Merged(decision, own, keys, lines, activity, distinct)

    def _identity(self) -> Lines:
        facts = labels(**self.plan.facts)
        info = f"{INFO.name}{{{self.labels}{',' if facts else ''}{facts}}} 1"
        return {INFO: (info,)}


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


class _Part(Struct, frozen=True):
    """The content of a source's text: values, the family and labels of each sample, and the lines."""

    text: bytes = b""
    values: Sequence[Value] = ()
    valid: bool = True
    following: Sequence[Source] = ()
    keys: Sequence[tuple[Family, str]] = ()
    lines: Sequence[str] = ()


class _SourceState(Struct, eq=False):
    """A source of the plan with its last parts.

    `text` is the last text if its repetition changes nothing. A `complete` source is not read again.
    """

    source: Source
    parts: Sequence[_Part] = ()
    text: bytes | None = None
    complete: bool = False


class _Reads:
    """The reads of one reading: their number by outcome, and the paths without permission."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.outcomes: Counter[str] = Counter()
        self.denied: list[str] = []


class _Merged(Struct, frozen=True):
    """A reading: the decision on waking reads, the part that is in no file, and what all parts are together.

    `distinct`: no two values have the same labels.
    """

    decision: str = ""
    own: _Part = _Part()
    keys: Sequence[Sequence[tuple[Family, str]]] = ()
    lines: Lines = {}
    activity: Sequence[Value] = ()
    distinct: bool = True


def _by_family(parts: Iterable[_Part]) -> Lines:
    found: dict[Family, list[str]] = {}
    for part in parts:
        for (family, _labels), line in zip(part.keys, part.lines, strict=True):
            found.setdefault(family, []).append(line)
    return {family: tuple(lines) for family, lines in found.items()}


@lru_cache(maxsize=1024)
def _shared(keys: tuple[tuple[Family, str], ...]) -> Sequence[tuple[Family, str]]:
    """The same object for equal keys: those of other devices, and of earlier readings, are often equal."""
    return keys


def _added(values: Iterable[Value]) -> Sequence[Value]:
    """The values with different labels. Those with equal ones are added."""
    sums: dict[tuple[Family, str], float] = {}
    for family, extra, value in values:
        sums[family, extra] = sums.get((family, extra), 0.0) + value
    return [Value(*key, total) for key, total in sums.items()]


def _names(host: Host, path: str) -> Sequence[str] | None:
    """None if the directory cannot be listed."""
    try:
        return host.names_again(path)
    except HostError:
        return None


def _power_status(host: Host, plan: DevicePlan) -> str:
    """The text of `runtime_status`, which never wakes the device; empty if there is none."""
    if not plan.power:
        return ""
    try:
        return host.read_once(f"{plan.power}/runtime_status", _STATUS_LIMIT).decode("ascii", "replace").strip()
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
    value = float(value)  # parsers may return integers
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    text = repr(value)
    return NOT_FINITE.get(text, text)
