"""The common part of `accelplane provision` and the init containers' programs.

All of the configuration is read before anything is written. The output is meant for `kubectl logs`: a line for each
device with its state, and below that its properties, the steps, and the reason if there is one.
"""

import fcntl
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Literal

import msgspec

from accelplane import jsontext
from accelplane.descriptors import closing
from accelplane.host import Host, HostError
from accelplane.provision import dlb, idxd, qat
from accelplane.provision.config import ConfigError
from accelplane.provision.idxd.config import IDXD
from accelplane.provision.steps import Outcome, Planner, State, apply, preview

Mode = Literal["plan", "apply", "status"]

OK, FAILED = 0, 1

_STATES: Sequence[State] = ("unchanged", "applied", "pending", "skipped", "rolled back", "failed")
_WIDTH = 116
_LOCK_POLL_INTERVAL = 0.1
_NO_BREAK = "\N{NO-BREAK SPACE}"


class Part(msgspec.Struct, frozen=True):
    """The devices of one kind, and a description of their desired state."""

    name: str
    desired: str
    planners: Callable[[Host], Iterable[Planner]]
    notes: Sequence[str] = ()


class Row(Outcome, frozen=True, kw_only=True):
    """The outcome for one device of one kind."""

    kind: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `-o json`."""

    devices: Sequence[Row]
    notes: Sequence[str]
    problems: Sequence[str]


def parts(
    families: Iterable[str], config_dir: str, variables: Mapping[str, str], *, force: bool = False, dlb_pfs: str = "all"
) -> tuple[list[Part], list[str]]:
    """The desired state, and the errors of the files and variables with it. Without `config_dir` no files are read."""
    directory = config_dir or os.devnull
    device_types = [variables["DEVICE_TYPE"]] if variables.get("DEVICE_TYPE") else ["dsa", "iaa"]
    found: list[Part] = []
    problems: list[str] = []
    for kind in (kind for family in families for kind in (device_types if family == "idxd" else [family])):
        try:
            match kind:
                case "qat":
                    found.append(_qat(directory, variables, force))
                case "dlb":
                    found.append(_dlb(directory, variables, force, dlb_pfs))
                case _:
                    found.append(_idxd(directory, {**variables, "DEVICE_TYPE": kind}, force))
        except ConfigError as error:
            problems.append(str(error))
    return found, list(dict.fromkeys(problems))  # DSA and IAA have variables in common


def run(mode: Mode, desired: Sequence[Part], root: str, form: str) -> int:
    """Plans, applies or shows, prints the outcomes, and returns the exit code.

    SIGTERM and SIGINT take effect after the current device is finished or rolled back. Only one process applies at a
    time; the others wait.
    """
    rows: list[Row] = []
    notes: list[str] = []
    problems: list[str] = []
    with _signals() as arrived, _exclusive_lock(root, arrived) if mode == "apply" else nullcontext():
        for part in desired:
            if arrived:
                break
            shown = form == "table"
            if shown:
                _print(f"{part.name}: {part.desired}")
            part_notes = list(part.notes)
            for row in _rows(mode, part, root, part_notes, problems):
                rows.append(row)
                if shown:
                    _print_row(row, mode)
                if arrived:
                    problems.append(f"stopped by {arrived[0].name} after {row.device}")
                    break
            if shown:
                if not problems and not any(row.kind == part.name for row in rows):
                    _print("  no devices")
                _print_list("note", part_notes)
            notes += part_notes
    if arrived and not rows:
        problems.append(f"stopped by {arrived[0].name}, nothing was written")
    if form == "json":
        report = Report(devices=rows, notes=notes, problems=problems)
        print(jsontext.indented(report))
    else:
        _print_list("failed", problems)
        _print(_summary(rows))
    if problems or any(row.failed for row in rows):
        return FAILED
    return FAILED if mode == "status" and any(row.state != "unchanged" for row in rows) else OK


def _rows(mode: Mode, part: Part, root: str, notes: list[str], problems: list[str]) -> Iterator[Row]:
    """The outcomes, device by device; appends notes and problems of the discovery."""
    host = Host(root)
    try:
        planners = part.planners(host)
        for outcome in apply(root, planners) if mode == "apply" else preview(root, planners):
            yield Row(kind=part.name, **msgspec.structs.asdict(outcome))
    except HostError as error:
        problems.append(f"{part.name}: {error}")
    notes += host.notes


@contextmanager
def _signals() -> Generator[list[signal.Signals], None, None]:
    """Defers SIGTERM and SIGINT: yields the list of those that arrived."""
    arrived: list[signal.Signals] = []
    before = {
        number: signal.signal(number, lambda caught, _frame: arrived.append(signal.Signals(caught)))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _exclusive_lock(root: str, arrived: Sequence[signal.Signals]) -> Generator[None, None, None]:
    """Holds a lock, so that no two processes apply to the same devices.

    The lock is on a directory of sysfs that all init containers have, and ends with the process. Without such a
    directory there are no devices; if it cannot be locked, there is no lock.
    """
    try:
        descriptor = Host(root).open("/sys/devices", os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, HostError):
        yield
        return
    waiting = False
    with closing(descriptor):
        while not arrived:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waiting:
                    print("waiting for another process that provisions this node", file=sys.stderr, flush=True)
                    waiting = True
                time.sleep(_LOCK_POLL_INTERVAL)
            except OSError:
                break
            else:
                break
        yield


def _qat(config_dir: str, variables: Mapping[str, str], force: bool) -> Part:
    config = qat.read_config(config_dir, variables, force=force)
    desired = [
        f"services {config.services or 'any'}",
        f"auto-reset {config.auto_reset or 'any'}",
        f"all VFs on {config.vf_driver or 'any driver'}",
    ]
    return Part("qat", _desired(desired, config.file), partial(qat.planners, config=config))


def _idxd(config_dir: str, variables: Mapping[str, str], force: bool) -> Part:
    config = idxd.read_config(config_dir, variables, force=force)
    desired = f"driver {config.driver}" if config.driver != IDXD else "groups, queues and engines"
    file = "" if config.driver != IDXD else config.template.file
    return Part(config.device_type, _desired([desired], file), partial(idxd.planners, config=config), config.notes)


def _dlb(config_dir: str, variables: Mapping[str, str], force: bool, pfs: str) -> Part:
    config = dlb.read_config(config_dir, variables, pfs=pfs, force=force)
    desired = f"{config.vfs} VF{'s' * (config.vfs > 1)} on {'every PF' if config.pfs == 'all' else 'the first PF'}"
    return Part("dlb", _desired([desired], config.file), partial(dlb.planners, config=config))


def _desired(words: Sequence[str], file: str) -> str:
    return f"desired: {', '.join(words)}{f' ({file})' if file else ''}"


def _print_row(row: Row, mode: Mode) -> None:
    now = [f"{name} {value}" for name, value in row.now.items()]
    _print(f"  {row.device}  {row.state}")
    if mode == "status":
        for line in now:
            _print(f"      {line}")
    else:
        _print_list("now", now)
        _print_list({"pending": "pending", "rolled back": "rolled back"}.get(row.state, "applied"), row.steps)
    _print_list("reason", [row.reason] if row.reason else [])
    _print_list("note", row.notes)


def _print_list(label: str, items: Sequence[str]) -> None:
    """Prints the items as a paragraph, short items without a line break; nothing without items."""
    if items:
        whole = [item.replace(" ", _NO_BREAK) if len(item) < _WIDTH // 2 else item for item in items]
        for line in textwrap.wrap(
            f"{label}: {'; '.join(whole)}",
            _WIDTH,
            initial_indent=" " * 6,
            subsequent_indent=" " * 10,
            break_long_words=False,
            break_on_hyphens=False,
        ):
            _print(line.replace(_NO_BREAK, " "))


def _summary(rows: Sequence[Row]) -> str:
    counts = {state: sum(row.state == state for row in rows) for state in _STATES}
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{len(rows)} device{'s' * (len(rows) != 1)}{f': {states}' if states else ''}"


def _print(line: str) -> None:
    """Prints and flushes a line, without control characters."""
    print(line if line.isprintable() else ascii(line)[1:-1], flush=True)
