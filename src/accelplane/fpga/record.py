"""What became of programming the cards: one small JSON file for each FME, which the device plugin makes metrics of.

Hook and tool live for a moment only, so they leave their counts below `/run`, where a restart of the node begins anew.
Whoever programs an FME holds its lock (`program`), and so is alone with its file, which is replaced by a rename: who
reads has the old one or the new one. It is bookkeeping: what cannot be read is begun anew, what cannot be written is
lost, and both are noted without failing anything.
"""

import contextlib
import errno
import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

from accelplane.fpga import FpgaError, shown
from accelplane.fpga.drivers import DRIVERS
from accelplane.fpga.statedir import STATE_DIRECTORY, StateDirectoryError, open_state_directory
from accelplane.host import Host, HostError, Missing

LIMIT = 16 * 1024

Outcome: TypeAlias = Literal["programmed", "failed", "timed-out"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

T = TypeVar("T", bound=str)

Json: TypeAlias = "Mapping[str, Json] | list[Json] | str | float | bool | None"

_SUFFIX = ".json"
_FILES_LIMIT = 64
_TEXT_LIMIT = 64
_MOST = 1 << 53  # up to which metrics are exact
_ERRORS = frozenset(errno.errorcode.values())


class RecordError(FpgaError):
    """A record that cannot be read or written, or is none."""


class Last(NamedTuple):
    """The programming that ended last, `time` seconds after 1970; `error` is the driver's errno, if it was that."""

    time: float
    port: str
    interface: str
    afu: str
    outcome: Outcome
    error: str = ""


class Record(NamedTuple):
    """Programmings of an FME: how many by outcome, how many that the driver refused by errno, their time in all."""

    outcomes: Mapping[Outcome, int] = {}
    errors: Mapping[str, int] = {}
    seconds: float = 0.0
    last: Last | None = None


def counted(record: Record, last: Last, seconds: float) -> Record:
    """The record with one programming more, which took so many seconds."""
    errors = _one_more(record.errors, last.error) if last.error else record.errors
    return Record(_one_more(record.outcomes, last.outcome), errors, min(record.seconds + seconds, _MOST), last)


def add(host: Host, fme: str, last: Last, seconds: float) -> None:
    """Counts one programming more, for whoever holds the FME's lock. What goes wrong is a note of `host`."""
    try:
        record = read(host, fme)
    except RecordError as error:
        host.note(f"{error}; it is begun anew")
        record = None
    try:
        _write(host, fme, counted(record or Record(), last, seconds))
    except RecordError as error:
        host.note(str(error))


def read(host: Host, fme: str) -> Record | None:
    """The FME's record, None where there is none. Raises `RecordError`."""
    path = f"{STATE_DIRECTORY}/{fme}{_SUFFIX}"
    # O_NONBLOCK: a FIFO must not hold anybody.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY
    try:
        descriptor = os.open(f"{host.local(STATE_DIRECTORY)}/{fme}{_SUFFIX}", flags)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RecordError(f"{path}: not a regular file, expected a record of programmings")
            data = os.read(descriptor, LIMIT + 1)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    except HostError as error:
        raise RecordError(str(error)) from None
    return parse(data, path)


def read_all(host: Host) -> Iterator[tuple[str, Record | RecordError]]:
    """The host's records by the FMEs' names, or why one is none. Raises `RecordError` when they cannot be listed."""
    try:
        names = host.names(STATE_DIRECTORY)
    except Missing:
        return
    except HostError as error:
        raise RecordError(str(error)) from None
    fmes = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    for fme in itertools.islice(filter(_is_fme, fmes), _FILES_LIMIT):
        try:
            record = read(host, fme)
        except RecordError as error:
            yield fme, error
        else:
            if record is not None:
                yield fme, record


def parse(data: bytes, name: str) -> Record:
    """The record in a file of that name; what is not known is passed over. Raises `RecordError`."""
    if len(data) > LIMIT:
        raise RecordError(f"{name}: more than {LIMIT} bytes, expected a record of programmings")
    try:
        document: Json = json.loads(data)
    except (ValueError, RecursionError):
        raise RecordError(f"{name}: not JSON, expected a record of programmings") from None
    fields = _object(document, name)
    outcomes = _counts(fields.get("outcomes"), f"{name}: outcomes")
    errors = _counts(fields.get("errors"), f"{name}: errors")
    last = fields.get("last")
    return Record(
        {outcome: outcomes[outcome] for outcome in OUTCOMES if outcome in outcomes},
        {error: number for error, number in errors.items() if error in _ERRORS},
        _number(fields.get("seconds", 0.0), f"{name}: seconds"),
        None if last is None else _last(_object(last, f"{name}: last"), f"{name}: last"),
    )


def as_json(record: Record) -> Json:
    """The record as it stands in its file."""
    return {
        "outcomes": {**record.outcomes},
        "errors": {**record.errors},
        "seconds": round(record.seconds, 3),
        "last": None if record.last is None else record.last._asdict(),
    }


def _write(host: Host, fme: str, record: Record) -> None:
    """Raises `RecordError`."""
    path = f"{STATE_DIRECTORY}/{fme}{_SUFFIX}"
    name, temporary = f"{fme}{_SUFFIX}", f".{fme}{_SUFFIX}.new"
    try:
        directory = open_state_directory(host)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)  # of a killed process
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o600, dir_fd=directory), "wb") as file:
                file.write(f"{json.dumps(as_json(record), indent=1)}\n".encode())
                os.fchmod(file.fileno(), 0o644)
            os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written, a programming is not counted: {error.strerror}") from None
    except (HostError, StateDirectoryError) as error:
        raise RecordError(f"{error}; a programming is not counted") from None


def _is_fme(name: str) -> bool:
    return any(driver.fme.fullmatch(name) for driver in DRIVERS)


def _one_more(counts: Mapping[T, int], key: T) -> Mapping[T, int]:
    return {**counts, key: min(counts.get(key, 0) + 1, _MOST)}


def _object(value: Json, where: str) -> Mapping[str, Json]:
    if not isinstance(value, dict):
        raise RecordError(f"{where}: expected an object")
    return value


def _counts(value: Json, where: str) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for key, number in _object({} if value is None else value, where).items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MOST:
            raise RecordError(f"{where}: {shown(key, 16)} is no count")
        counts[key] = number
    return counts


def _number(value: Json, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise RecordError(f"{where}: expected a number from 0 to {_MOST}")
    return float(value)


def _last(fields: Mapping[str, Json], where: str) -> Last:
    texts: dict[str, str] = {}
    for key in ("port", "interface", "afu", "outcome", "error"):
        value = fields.get(key, "")
        if not isinstance(value, str) or len(value) > _TEXT_LIMIT or not (value.isascii() and value.isprintable()):
            raise RecordError(f"{where}: {key}: expected a text of up to {_TEXT_LIMIT} plain characters")
        texts[key] = value
    outcome: Outcome | None = next((each for each in OUTCOMES if texts["outcome"] == each), None)
    if outcome is None:
        raise RecordError(f"{where}: outcome {shown(texts['outcome'])}: expected one of {', '.join(OUTCOMES)}")
    error = texts["error"] if texts["error"] in _ERRORS else ""
    when = _number(fields.get("time"), f"{where}: time")
    return Last(when, texts["port"], texts["interface"], texts["afu"], outcome, error)
