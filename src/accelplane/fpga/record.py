"""Records of programmings: a JSON file for each FME, which the device plugin exports as metrics.

Hook and tool are short-lived processes, so they keep their counts below `/run`, where a reboot resets them. The lock of
the FME (`program`) serializes writers; a rename replaces the file atomically. An unreadable record is reset, an
unwritable one is not updated; both are notes and do not fail the programming.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

from accelplane.descriptors import closing
from accelplane.fpga import FpgaError, Json, quote
from accelplane.fpga.drivers import DRIVERS
from accelplane.fpga.statedir import STATE_DIRECTORY, StateDirectoryError, state_directory
from accelplane.host import Host, HostError

LIMIT = 16 * 1024

Outcome: TypeAlias = Literal["programmed", "failed", "timed-out"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

T = TypeVar("T", bound=str)

_SUFFIX = ".json"
_FILES_LIMIT = 64
_TEXT_LIMIT = 64
_MOST = 1 << 53  # the highest exact integer in a metric
_ERRORS = frozenset(errno.errorcode.values())


class RecordError(FpgaError):
    """A record that is invalid, or cannot be read or written."""


class Last(NamedTuple):
    """The last programming, at `time` seconds after the epoch; `error` is the name of the driver's errno, if any."""

    time: float
    port: str
    interface: str
    afu: str
    outcome: Outcome
    error: str = ""


class Record(NamedTuple):
    """Programmings of an FME: counts by outcome, errors of the driver by errno, total duration."""

    outcomes: Mapping[Outcome, int] = {}
    errors: Mapping[str, int] = {}
    seconds: float = 0.0
    last: Last | None = None


def count_programming(record: Record, last: Last, seconds: float) -> Record:
    """Returns the record with one more programming of that duration."""
    errors = _one_more(record.errors, last.error) if last.error else record.errors
    return Record(_one_more(record.outcomes, last.outcome), errors, min(record.seconds + seconds, _MOST), last)


def add(host: Host, fme: str, last: Last, seconds: float) -> None:
    """Counts one more programming. The caller holds the lock of the FME. Errors are notes of `host`."""
    try:
        record = read(host, fme)
    except RecordError as error:
        host.note(f"{error}; the record is reset")
        record = None
    try:
        _write(host, fme, count_programming(record or Record(), last, seconds))
    except RecordError as error:
        host.note(str(error))


def read(host: Host, fme: str) -> Record | None:
    """Returns the record of the FME, None if there is none. Raises `RecordError`."""
    path = f"{STATE_DIRECTORY}/{fme}{_SUFFIX}"
    try:
        with closing(host.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as descriptor:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RecordError(f"{path}: not a regular file, expected a record of programmings")
            data = os.read(descriptor, LIMIT + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    except HostError as error:
        raise RecordError(str(error)) from None
    return parse(data, path)


def read_all(host: Host) -> Iterator[tuple[str, Record | RecordError]]:
    """Yields names of FMEs with their record or its error. Raises `RecordError` if the directory cannot be listed."""
    try:
        names = host.optional_names(STATE_DIRECTORY)
    except HostError as error:
        raise RecordError(str(error)) from None
    fmes = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
    fmes = [fme for fme in fmes if any(driver.fme.fullmatch(fme) for driver in DRIVERS)]
    for fme in fmes[:_FILES_LIMIT]:
        try:
            record = read(host, fme)
        except RecordError as error:
            yield fme, error
        else:
            if record is not None:
                yield fme, record


def parse(data: bytes, name: str) -> Record:
    """Parses the file of that name; unknown fields are ignored. Raises `RecordError`."""
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
    """Returns the content of the record's file."""
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
        with state_directory(host) as directory:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)  # of a killed process
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o600, dir_fd=directory), "wb") as file:
                file.write(f"{json.dumps(as_json(record), indent=1)}\n".encode())
                os.fchmod(file.fileno(), 0o644)
            os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        raise RecordError(f"{path}: cannot write, the programming is not counted: {error.strerror}") from None
    except (HostError, StateDirectoryError) as error:
        raise RecordError(f"{error}; the programming is not counted") from None


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
            raise RecordError(f"{where}: {quote(key, 16)}: expected a count")
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
            raise RecordError(f"{where}: {key}: expected at most {_TEXT_LIMIT} printable ASCII characters")
        texts[key] = value
    outcome: Outcome | None = next((each for each in OUTCOMES if texts["outcome"] == each), None)
    if outcome is None:
        raise RecordError(f"{where}: outcome {quote(texts['outcome'])}: expected one of {', '.join(OUTCOMES)}")
    error = texts["error"] if texts["error"] in _ERRORS else ""
    when = _number(fields.get("time"), f"{where}: time")
    return Last(when, texts["port"], texts["interface"], texts["afu"], outcome, error)
