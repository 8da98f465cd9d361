"""Sources of Intel GPUs behind i915 and xe: sensors, GTs, health.

Nearly all of them wake the card up. Frequencies and idle time are per GT: i915 has them below the card, xe below the
tiles of the PCI device, older kernels directly at the card.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial

from accelplane.host import Host
from accelplane.readings import families, hwmon, pci
from accelplane.readings.plan import Source
from accelplane.readings.values import InvalidText, Parse, Value, labels, number, scalar

_GT = re.compile(r"gt[0-9]{1,2}", re.ASCII)
_TILE = re.compile(r"tile[0-9]{1,2}", re.ASCII)
_REASON = re.compile(r"[a-z0-9_]{1,24}", re.ASCII)
_MAX_REASONS = 64
_HEALTH = ("ok", "warning", "critical")
_MAX_HERTZ = 100e9

_KINDS = {"act": "actual", "cur": "requested", "max": "max", "RP0": "hardware-max", "rp0": "hardware-max"}


def sources(host: Host, card: str, device: str) -> Iterator[Source]:
    """The sources of a card. `card` is its directory in the class, `device` that of its PCI function."""
    yield from pci.sources(host, device)
    yield from hwmon.sources(host, device, waking=True)
    gts = sorted(filter(_GT.fullmatch, host.entries(f"{card}/gt")))
    for gt in gts:
        yield from _i915(host, f"{card}/gt/{gt}", gt)
    if not gts:
        yield from pci.existing(host, card, _frequencies("gt_{}_freq_mhz", "gt0"), waking=True)
    for tile in sorted(filter(_TILE.fullmatch, host.entries(device))):
        for gt in sorted(filter(_GT.fullmatch, host.entries(f"{device}/{tile}"))):
            yield from _xe(host, f"{device}/{tile}/{gt}", gt)
    yield from pci.existing(host, device, [("gpu_health", _health), ("lmem_total_bytes", scalar(families.GPU_MEMORY))])
    if device != card:
        yield from pci.existing(host, card, [("lmem_total_bytes", scalar(families.GPU_MEMORY))])


def _frequencies(pattern: str, gt: str) -> Sequence[tuple[str, Parse]]:
    parser = partial(scalar, families.GPU_FREQUENCY, scale=1e6, highest=_MAX_HERTZ)
    return [(pattern.format(short), parser(extra=labels(gt=gt, kind=kind))) for short, kind in _KINDS.items()]


def _i915(host: Host, path: str, gt: str) -> Iterator[Source]:
    idle = scalar(families.GPU_IDLE, scale=1e-3, extra=labels(gt=gt))
    parsers = [*_frequencies("rps_{}_freq_mhz", gt), ("rc6_residency_ms", idle)]
    yield from pci.existing(host, path, parsers, waking=True)
    yield from _throttle(host, path, "throttle_reason_", gt)


def _xe(host: Host, path: str, gt: str) -> Iterator[Source]:
    yield from pci.existing(host, f"{path}/freq0", _frequencies("{}_freq", gt), waking=True)
    idle = scalar(families.GPU_IDLE, scale=1e-3, extra=labels(gt=gt))
    yield from pci.existing(host, f"{path}/gtidle", [("idle_residency_ms", idle)], waking=True)
    throttle = f"{path}/freq0/throttle"
    if "reasons" in host.entries(throttle):
        yield Source(path=f"{throttle}/reasons", parse=partial(_reasons, gt), waking=True)
    else:
        yield from _throttle(host, throttle, "reason_", gt, status="status")


def _throttle(host: Host, path: str, prefix: str, gt: str, status: str = "") -> Iterator[Source]:
    """The file of the overall state; the files of the reasons follow only while it is 1."""
    status = status or f"{prefix}status"
    names = host.entries(path)
    if status not in names:
        return
    found = sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix) and name != status)
    reasons = tuple(
        Source(path=f"{path}/{prefix}{reason}", parse=partial(_flag, gt, reason, always=False), waking=True)
        for reason in found[:_MAX_REASONS]
        if _REASON.fullmatch(reason)
    )
    yield Source(
        path=f"{path}/{status}",
        parse=partial(_flag, gt, "any", always=True),
        waking=True,
        follow=lambda text: reasons if text.strip() == "1" else (),
    )


def _flag(gt: str, reason: str, text: str, *, always: bool) -> Sequence[Value]:
    value = number(text)
    if value not in (0, 1):
        raise InvalidText(text)
    return (Value(families.GPU_THROTTLED, labels(gt=gt, reason=reason), value),) if value or always else ()


def _reasons(gt: str, text: str) -> Sequence[Value]:
    """Words separated by blanks, or `none`."""
    words = text.split()
    if not words or len(words) > _MAX_REASONS or not all(map(_REASON.fullmatch, words)):
        raise InvalidText(text)
    reasons = [] if words == ["none"] else [*dict.fromkeys(words)]
    any_reason = Value(families.GPU_THROTTLED, labels(gt=gt, reason="any"), float(bool(reasons)))
    return [any_reason, *(Value(families.GPU_THROTTLED, labels(gt=gt, reason=reason), 1.0) for reason in reasons)]


def _health(text: str) -> Sequence[Value]:
    word = text.strip()
    if word not in _HEALTH:
        raise InvalidText(text)
    return [Value(families.GPU_HEALTH, labels(state=state), float(state == word)) for state in _HEALTH]
