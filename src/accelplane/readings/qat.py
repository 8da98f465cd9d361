"""Sources of QAT devices: sysfs of the physical function, and debugfs if it is mounted and readable.

The driver answers some files of debugfs by messages to the firmware, and logs an error if the device cannot answer. So
the firmware counters are read only while the device is up, and the telemetry only while it is switched on.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from accelplane.host import Host
from accelplane.readings import families, pci
from accelplane.readings.plan import TABLE_LIMIT, Source
from accelplane.readings.values import Family, InvalidText, Parse, Value, flag, labels, number, parse_parts, scalar

_SEVERITIES = ("correctable", "nonfatal", "fatal")
_SLICE = re.compile(r"(util|exec)_([a-z0-9_]{1,24})", re.ASCII)
_ENGINE_LINE = re.compile(r"([0-9]{1,3}): +([0-9]{1,20}) +([0-9]{1,20})", re.ASCII)
_MAX_LINES = 256
_BYTES_PER_MEGABIT = 125_000.0
_LATENCIES = {
    "max_rd_lat": "read-max",
    "rd_lat_acc_avg": "read-average",
    "max_gp_lat": "get-to-put-max",
    "gp_lat_acc_avg": "get-to-put-average",
}
_BANDWIDTHS = {"bw_in": "in", "bw_out": "out"}


def sources(host: Host, device: str, debugfs: str) -> Iterator[Source]:
    """`device` is the directory of the physical function, `debugfs` its directory there, empty without a driver."""
    yield from pci.sources(host, device)
    tables = tuple(_debugfs(host, debugfs)) if debugfs else ()
    if "state" in host.entries(f"{device}/qat"):
        yield Source(
            path=f"{device}/qat/state",
            parse=flag(families.QAT_UP, "up"),
            follow=lambda text: tables if text.strip() == "up" else (),
        )
    errors: list[tuple[str, Parse]] = [
        (f"errors_{severity}", scalar(families.QAT_ERRORS, extra=labels(severity=severity))) for severity in _SEVERITIES
    ]
    yield from pci.existing(host, f"{device}/qat_ras", errors)


def _debugfs(host: Host, path: str) -> Iterator[Source]:
    names = host.entries(path)
    if "fw_counters" in names:
        yield Source(path=f"{path}/fw_counters", parse=_counters, limit=TABLE_LIMIT, by_lines=True)
    queries = [
        ("queries_sent", scalar(families.QAT_HEARTBEAT_QUERIES)),
        ("queries_failed", scalar(families.QAT_HEARTBEAT_FAILURES)),
    ]
    yield from pci.existing(host, f"{path}/heartbeat", queries)
    telemetry = f"{path}/telemetry"
    if {"control", "device_data"}.issubset(host.entries(telemetry)):
        data = Source(path=f"{telemetry}/device_data", parse=_telemetry, limit=TABLE_LIMIT, by_lines=True)
        yield Source(path=f"{telemetry}/control", parse=_control, follow=partial(_if_switched_on, data))


def _control(text: str) -> Sequence[Value]:
    """The number of a telemetry rate; it is no metric."""
    if number(text) < 0:
        raise InvalidText(text)
    return ()


def _if_switched_on(data: Source, text: str) -> Sequence[Source]:
    return () if text.strip() == "0" else (data,)


def _counters(text: str) -> Sequence[Value]:
    """A header and one line for each engine: its number, requests and responses. The sums of the valid lines."""
    lines = [line for line in text.split("\n") if ":" in line]
    seen: set[str] = set()

    def engine(line: str) -> Sequence[Value]:
        match = _ENGINE_LINE.fullmatch(line.strip())
        if match is None or match[1] in seen:
            raise InvalidText(line)
        seen.add(match[1])
        return (Value(families.QAT_REQUESTS, "", number(match[2])), Value(families.QAT_RESPONSES, "", number(match[3])))

    found = parse_parts(text, (partial(engine, line) for line in lines[:_MAX_LINES]))
    if not lines or len(lines) > _MAX_LINES:
        raise InvalidText(text, found)
    return found


def _telemetry(text: str) -> Sequence[Value]:
    """Lines of a key and a value, which minimum, maximum and average may follow. Other keys have no metric."""
    rows = [line.split() for line in text.split("\n")[:_MAX_LINES]]
    parts = [partial(_row, row[0], row[1]) for row in rows if len(row) >= 2]
    if not parts:
        raise InvalidText(text)
    return parse_parts(text, parts)


def _row(key: str, text: str) -> Sequence[Value]:
    known = _KEYS.get(key)
    if known is not None:
        return known(text)
    match = _SLICE.fullmatch(key)
    if match is None:
        return ()
    extra = labels(slice=match[2])
    if match[1] == "util":
        return scalar(families.QAT_SLICE_UTILIZATION, scale=0.01, extra=extra, highest=1)(text)
    return scalar(families.QAT_SLICE_EXECUTIONS, extra=extra)(text)


def _keys(
    family: Family, scale: float, label: str, names: Mapping[str, str]
) -> dict[str, Callable[[str], Sequence[Value]]]:
    return {key: scalar(family, scale=scale, extra=labels(**{label: name})) for key, name in names.items()}


_KEYS = {
    **_keys(families.QAT_LATENCY, 1e-9, "kind", _LATENCIES),
    **_keys(families.QAT_BANDWIDTH, _BYTES_PER_MEGABIT, "direction", _BANDWIDTHS),
}
