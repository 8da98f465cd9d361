"""What `accelplane provision` and the init containers' programs have in common: read everything, look, act, tell.

All of the configuration is read before anything is written. What is told is for whoever reads `kubectl logs`: a line
for each device with its state and what it is now, and below that what was, or would be, done, and why not.
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

from accelplane.host import Host, HostError
from accelplane.provision import dlb, idxd, qat
from accelplane.provision.config import ConfigError
from accelplane.provision.idxd.config import IDXD
from accelplane.provision.steps import Outcome, Planner, State, apply, planned

Mode = Literal["plan", "apply", "status"]

OK, FAILED = 0, 1

_STATES: Sequence[State] = ("as wanted", "changed", "to do", "left alone", "put back", "failed")
_AS_FOUND = {"to do": "not as wanted"}
_WIDTH = 116
_PAUSE = 0.1
_HARD = "\N{NO-BREAK SPACE}"


class Part(msgspec.Struct, frozen=True):
    """The devices of one kind, by name, and what is wanted of them, in words."""

    name: str
    wanted: str
    planners: Callable[[Host], Iterable[Planner]]
    notes: Sequence[str] = ()


class Row(Outcome, frozen=True, kw_only=True):
    """What became of one device of one kind."""

    kind: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    devices: Sequence[Row]
    notes: Sequence[str]
    problems: Sequence[str]


def parts(
    families: Iterable[str], config_dir: str, variables: Mapping[str, str], *, force: bool = False, dlb_pfs: str = "all"
) -> tuple[list[Part], list[str]]:
    """What is wanted, and what is wrong with the files and variables that say so. No `config_dir`: no files."""
    found: list[Part] = []
    problems: list[str] = []
    for make in _makers(families, config_dir or os.devnull, variables, force, dlb_pfs):
        try:
            found.append(make())
        except ConfigError as error:
            problems.append(str(error))
    return found, list(dict.fromkeys(problems))  # DSA and IAA have variables in common


def run(mode: Mode, wanted: Sequence[Part], root: str, form: str) -> int:
    """Plans, applies or shows, prints what there is to tell, and returns the exit code.

    SIGTERM and SIGINT wait until the device at hand is finished, or put back. Whoever applies waits until nobody else
    does.
    """
    rows: list[Row] = []
    notes: list[str] = []
    problems: list[str] = []
    with _signals() as arrived, _alone(root, arrived) if mode == "apply" else nullcontext():
        for part in wanted:
            if arrived:
                break
            shown = form == "table"
            if shown:
                _print(f"{part.name}: {part.wanted}")
            told = list(part.notes)
            for row in _rows(mode, part, root, told, problems):
                rows.append(row)
                if shown:
                    _print_row(row, mode)
                if arrived:
                    problems.append(f"stopped by {arrived[0].name}: nothing was done after {row.device}")
                    break
            if shown:
                if not problems and not any(row.kind == part.name for row in rows):
                    _print("  no devices")
                _print_list("note", told)
            notes += told
    if arrived and not rows:
        problems.append(f"stopped by {arrived[0].name}: nothing was done")
    if form == "json":
        report = Report(devices=rows, notes=notes, problems=problems)
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print_list("failed", problems)
        _print(_summary(rows, mode))
    if problems or any(row.failed for row in rows):
        return FAILED
    return FAILED if mode == "status" and any(row.state != "as wanted" for row in rows) else OK


def _rows(mode: Mode, part: Part, root: str, notes: list[str], problems: list[str]) -> Iterator[Row]:
    """One device after the other; notes and problems are those of looking for them."""
    host = Host(root)
    try:
        planners = part.planners(host)
        for outcome in apply(root, planners) if mode == "apply" else planned(root, planners):
            yield Row(kind=part.name, **msgspec.structs.asdict(outcome))
    except HostError as error:
        problems.append(f"{part.name}: {error}")
    notes += host.notes


@contextmanager
def _signals() -> Generator[list[signal.Signals], None, None]:
    """Those that arrived; they end nothing by themselves."""
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
def _alone(root: str, arrived: Sequence[signal.Signals]) -> Generator[None, None, None]:
    """Keeps others from applying to the same devices, which would take each other's halves for failures.

    The lock is on a directory of the kernel's that all init containers have, and ends with the process. Where there is
    no such directory there is nothing to apply to, and where files cannot be locked it goes without.
    """
    try:
        descriptor = os.open(Host(root).local("/sys/devices"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, HostError):
        yield
        return
    told = False
    try:
        while not arrived:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    print("waiting for another one that provisions this node", file=sys.stderr, flush=True)
                    told = True
                time.sleep(_PAUSE)
            except OSError:
                break
            else:
                break
        yield
    finally:
        os.close(descriptor)


def _makers(
    families: Iterable[str], config_dir: str, variables: Mapping[str, str], force: bool, dlb_pfs: str
) -> Iterator[Callable[[], Part]]:
    for family in families:
        if family == "qat":
            yield partial(_qat, config_dir, variables, force)
        elif family == "dlb":
            yield partial(_dlb, config_dir, variables, force, dlb_pfs)
        else:
            for device_type in [variables["DEVICE_TYPE"]] if variables.get("DEVICE_TYPE") else ["dsa", "iaa"]:
                yield partial(_idxd, config_dir, {**variables, "DEVICE_TYPE": device_type}, force)


def _qat(config_dir: str, variables: Mapping[str, str], force: bool) -> Part:
    config = qat.read_config(config_dir, variables, force=force)
    wanted = [
        f"services {config.services or 'as they are'}",
        f"auto-reset {config.auto_reset or 'as it is'}",
        f"all VFs on {config.vf_driver or 'the driver that they have'}",
    ]
    return Part("qat", _wanted(wanted, config.file), partial(qat.planners, config=config))


def _idxd(config_dir: str, variables: Mapping[str, str], force: bool) -> Part:
    config = idxd.read_config(config_dir, variables, force=force)
    wanted = f"driver {config.driver}" if config.driver != IDXD else "groups, queues and engines"
    file = "" if config.driver != IDXD else config.template.file
    return Part(config.device_type, _wanted([wanted], file), partial(idxd.planners, config=config), config.notes)


def _dlb(config_dir: str, variables: Mapping[str, str], force: bool, pfs: str) -> Part:
    config = dlb.read_config(config_dir, variables, pfs=pfs, force=force)
    wanted = f"{config.vfs} VF{'s' * (config.vfs > 1)} on {'every PF' if config.pfs == 'all' else 'the first PF'}"
    return Part("dlb", _wanted([wanted], config.file), partial(dlb.planners, config=config))


def _wanted(words: Sequence[str], file: str) -> str:
    return f"wanted: {', '.join(words)}{f' ({file})' if file else ''}"


def _print_row(row: Row, mode: Mode) -> None:
    now = [f"{name} {value}" for name, value in row.now.items()]
    if mode == "status":
        _print(f"  {row.device}  {_AS_FOUND.get(row.state, row.state)}")
        for line in now:
            _print(f"      {line}")
    else:
        _print(f"  {row.device}  {row.state}")
        _print_list("now", now)
        _print_list({"to do": "to do", "put back": "tried"}.get(row.state, "did"), row.steps)
    _print_list("why", [row.reason] if row.reason else [])
    _print_list("note", row.notes)


def _print_list(label: str, items: Sequence[str]) -> None:
    """A paragraph of one or more lines, no wider than people read; nothing for no items.

    Short items stay on one line.
    """
    if items:
        whole = [item.replace(" ", _HARD) if len(item) < _WIDTH // 2 else item for item in items]
        for line in textwrap.wrap(
            f"{label}: {'; '.join(whole)}",
            _WIDTH,
            initial_indent=" " * 6,
            subsequent_indent=" " * 10,
            break_long_words=False,
            break_on_hyphens=False,
        ):
            _print(line.replace(_HARD, " "))


def _summary(rows: Sequence[Row], mode: Mode) -> str:
    counts = {state: sum(row.state == state for row in rows) for state in _STATES}
    words = _AS_FOUND if mode == "status" else {}
    told = ", ".join(f"{count} {words.get(state, state)}" for state, count in counts.items() if count)
    return f"{len(rows)} device{'s' * (len(rows) != 1)}{f': {told}' if told else ''}"


def _print(line: str) -> None:
    """A line that is there at once, also in a log, and cannot steer a terminal."""
    print(line if line.isprintable() else ascii(line)[1:-1], flush=True)
