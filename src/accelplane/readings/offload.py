"""Sources of DSA, IAA and DLB devices."""

import re
from collections.abc import Iterator, Sequence
from functools import partial

from accelplane.host import Host
from accelplane.readings import families, pci
from accelplane.readings.plan import Source
from accelplane.readings.values import InvalidText, Value, flag, labels, number, scalar

_WORD = re.compile(r"[a-z]{1,20}", re.ASCII)
_RESOURCE = re.compile(r"num_([a-z0-9_]{1,32})", re.ASCII)
_ENGINE = re.compile(r"engine[0-9]{1,3}\.[0-9]{1,3}", re.ASCII)
_ERROR_WORDS = 4
_UNREADABLE_WORD = 0xFFFF_FFFF_FFFF_FFFF  # the register of a device that does not answer
_FILE = re.compile(r"file[0-9]{1,10}", re.ASCII)
_FAULTS = {"cr_faults": "resolved", "cr_fault_failures": "failed"}
_HEXADECIMAL = re.compile(r"(?:0x)?[0-9a-f]{1,16}", re.ASCII)


def idxd(host: Host, bus: str, device: str, queues: Sequence[str]) -> Iterator[Source]:
    """The sources of a DSA or IAA device and its work queues. `bus` is the directory of all devices."""
    path = f"{bus}/{device}"
    yield from pci.existing(
        host,
        path,
        [
            ("state", flag(families.IDXD_ENABLED, "enabled")),
            ("clients", scalar(families.IDXD_CLIENTS)),
            ("cmd_status", scalar(families.IDXD_COMMAND_STATUS)),
            ("errors", _error),
        ],
    )
    for engine in sorted(filter(_ENGINE.fullmatch, host.entries(path))):
        yield from pci.existing(host, f"{path}/{engine}", [("group_id", _engine)])
    for queue in queues:
        yield from _queue(host, f"{path}/{queue}", queue)


def dlb(host: Host, device: str) -> Iterator[Source]:
    """`device` is the directory of the PCI function. The driver is out of tree: what exists is read."""
    yield from pci.sources(host, device)
    for directory, family in (("total_resources", families.DLB_RESOURCES), ("avail_resources", families.DLB_AVAILABLE)):
        for name in sorted(host.entries(f"{device}/{directory}")):
            if match := _RESOURCE.fullmatch(name):
                yield Source(path=f"{device}/{directory}/{name}", parse=scalar(family, extra=labels(resource=match[1])))


def _queue(host: Host, path: str, queue: str) -> Iterator[Source]:
    extra = labels(unit=queue, mode=_word(host, f"{path}/mode"), type=_word(host, f"{path}/type"))
    yield from pci.existing(
        host,
        path,
        [
            ("occupancy", scalar(families.IDXD_QUEUE_ENTRIES, extra=extra)),
            ("size", scalar(families.IDXD_QUEUE_SIZE, extra=extra)),
            ("clients", scalar(families.IDXD_QUEUE_CLIENTS, extra=extra)),
            ("state", flag(families.IDXD_QUEUE_ENABLED, "enabled", extra)),
        ],
    )

    # The character device of a user queue, with a directory for each open file (Linux 6.4).
    if cdev := next((name for name in sorted(host.entries(path)) if name.endswith(f"!{queue}")), ""):
        directory = f"{path}/{cdev}"
        yield Source(path=directory, parse=_nothing, members=partial(_open_files, directory, queue))


def _open_files(directory: str, queue: str, names: Sequence[str]) -> Sequence[Source]:
    return [
        Source(
            path=f"{directory}/{name}/{attribute}",
            parse=scalar(families.IDXD_FAULTS, extra=labels(unit=queue, outcome=outcome)),
            accumulates=True,
        )
        for name in sorted(filter(_FILE.fullmatch, names))
        for attribute, outcome in _FAULTS.items()
    ]


def _nothing(_text: str) -> Sequence[Value]:
    return ()


def _word(host: Host, path: str) -> str:
    text = host.text_or_empty(path)
    return text if _WORD.fullmatch(text) else ""


def _error(text: str) -> Sequence[Value]:
    """The software error register. The first of its four 64-bit words is not 0 if there is an error.

    Linux prints it as a bitmap: groups of 32 bits in hexadecimal, separated by commas, the first word in the last two.
    """
    bitmap = "," in text
    groups = text.strip().split(",") if bitmap else text.split()
    expected = 2 * _ERROR_WORDS if bitmap else _ERROR_WORDS
    if len(groups) != expected or not all(map(_HEXADECIMAL.fullmatch, groups)):
        raise InvalidText(text)
    first = groups[-2:] if bitmap else groups[:1]
    word = int("".join(group.removeprefix("0x").rjust(8, "0") for group in first), 16)
    if word == _UNREADABLE_WORD:
        raise InvalidText(text)
    return (Value(families.IDXD_ERROR, "", float(word != 0)),)


def _engine(text: str) -> Sequence[Value]:
    """The group of an engine, -1 without one. The samples of all engines are added."""
    word = text.strip()
    if word != "-1" and number(word) < 0:
        raise InvalidText(text)
    return (Value(families.IDXD_ENGINES, "", float(word != "-1")),)
