"""Sources that every PCI function has: errors, link, runtime power management."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from accelplane.host import Host, HostError, pci_address
from accelplane.readings import families
from accelplane.readings.plan import DevicePlan, Source
from accelplane.readings.values import Family, InvalidText, Parse, Value, labels, number, parse_parts, scalar

_DIRECTORY = "/sys/bus/pci/devices"
_AER = {"correctable": "COR", "nonfatal": "NONFATAL", "fatal": "FATAL"}
_SPEED = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,2})?) GT/s(?: PCIe)?", re.ASCII)
_MAX_LANES = 32
# The switch on cards with DG2 and Battlemage GPUs. Ports inside the card always have one lane with 2.5 GT/s.
_INTEL = "0x8086"
_CARD_SWITCH = frozenset(("0x4fa0", "0x4fa1", "0x4fa4", "0xe2f0", "0xe2f1", "0xe2ff"))
_CONSTANT = frozenset((
    "max_link_speed", "max_link_width", "lmem_total_bytes", "rps_RP0_freq_mhz", "gt_RP0_freq_mhz", "rp0_freq",
))  # fmt: skip
_MAX_LINES = 256


def directory(bdf: str) -> str:
    """The directory of the function at a PCI address."""
    return f"{_DIRECTORY}/{bdf}"


def canonical(host: Host, path: str) -> str:
    """The path without links, which is cheaper to read; the path itself if it cannot be resolved."""
    try:
        return host.resolve(path)
    except HostError:
        return path


def plan(
    host: Host,
    device: str,
    path: str,
    found: Iterable[Source],
    facts: Mapping[str, str] | None = None,
    *,
    units: Sequence[str] = (),
) -> DevicePlan:
    """The plan of the PCI function in `path`. `units` are by default the device."""
    path = host.resolve(path)
    address = path.rpartition("/")[2]
    power = f"{path}/power" if "runtime_status" in host.entries(f"{path}/power") else ""
    return DevicePlan(
        device=device,
        units=tuple(units) or (device,),
        path=path if pci_address(address) else "",
        bdf=address if pci_address(address) else "",
        power=power,
        never_sleeps=not power or never_sleeps(host, path),
        sources=tuple(found),
        facts=facts or {},
    )


def sources(host: Host, path: str) -> Iterator[Source]:
    """The sources of the function whose directory is `path`; none if it cannot be listed."""
    names = host.entries(path)
    for severity, total in _AER.items():
        name = f"aer_dev_{severity}"
        if name in names:
            yield Source(path=f"{path}/{name}", parse=_errors(severity, f"TOTAL_ERR_{total}"), by_lines=True)
    # Kernels from about 6.18 power the function up to read the link.
    lanes = partial(scalar, lowest=1, highest=_MAX_LANES)
    link: Sequence[tuple[str, Parse]] = (
        ("current_link_speed", partial(_speed, families.LINK_SPEED)),
        ("max_link_speed", partial(_speed, families.LINK_MAX_SPEED)),
        ("current_link_width", lanes(families.LINK_LANES)),
        ("max_link_width", lanes(families.LINK_MAX_LANES)),
    )
    yield from existing(host, _slot_port(host, path), link, waking=True)
    if "power" in names:
        power = host.entries(f"{path}/power")
        for state in ("active", "suspended"):
            name = f"runtime_{state}_time"
            if name in power:
                parse = scalar(families.RUNTIME, scale=1e-3, extra=labels(state=state))
                yield Source(path=f"{path}/power/{name}", parse=parse)


def _slot_port(host: Host, path: str) -> str:
    """The function whose link leads to the slot: the upstream port of the switch on the card, if it has one."""
    found, above = path, canonical(host, path).rpartition("/")[0]
    while _is_card_switch(host, above):
        found, above = above, above.rpartition("/")[0]
    return found


def _is_card_switch(host: Host, path: str) -> bool:
    if pci_address(path.rpartition("/")[2]) is None or host.text_or_empty(f"{path}/vendor") != _INTEL:
        return False
    return host.text_or_empty(f"{path}/device") in _CARD_SWITCH


def existing(host: Host, path: str, parsers: Sequence[tuple[str, Parse]], *, waking: bool = False) -> Iterator[Source]:
    """A source for each of the named files that exists in the directory."""
    names = host.entries(path)
    for name, parse in parsers:
        if name in names:
            yield Source(path=f"{path}/{name}", parse=parse, waking=waking, constant=name in _CONSTANT)


def never_sleeps(host: Host, path: str) -> bool:
    """Whether runtime power management does not suspend the function: virtual functions, or switched off."""
    return host.is_vf(path) or host.text_or_empty(f"{path}/power/control") == "on"


def _errors(severity: str, total_name: str) -> Callable[[str], Sequence[Value]]:
    extra = labels(severity=severity)

    def line(text: str) -> Sequence[Value]:
        name, _, count = text.rpartition(" ")
        value = number(count)
        if value < 0 or not name:
            raise InvalidText(text)
        family = families.PCI_ERROR_MESSAGES if name == total_name else families.PCI_ERRORS
        return (Value(family, extra, value),)

    def parse(text: str) -> Sequence[Value]:
        lines = [part for part in text.split("\n") if part]
        found = parse_parts(text, (partial(line, part) for part in lines[:_MAX_LINES]))
        if not lines or len(lines) > _MAX_LINES:
            raise InvalidText(text, found)
        return found

    return parse


def _speed(family: Family, text: str) -> Sequence[Value]:
    """`16.0 GT/s PCIe`, of older kernels `16 GT/s`; `Unknown` has no value."""
    match = _SPEED.fullmatch(text.strip())
    if match is None:
        raise InvalidText(text)
    return (Value(family, "", float(match[1]) * 1e9),)
