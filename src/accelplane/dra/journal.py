"""The journal of prepared claims: one file for each claim, `claims/<uid>.json`, which another instance may share.

A claim is written as `preparing`, with the steps that undo it, before anything on the node is changed for it. It is
`prepared` when everything is done, and `unpreparing` from the first undo step until the file is removed. After a crash
the file says what is left to do.

Each decision is made under a lock of the directory (flock), which other threads and another instance of the driver
respect. Hardware is changed without it: the entry names its instance as owner meanwhile. An owner holds the lock of a
file of its own, so that it is known to be dead in every PID namespace.

The size of the lock's file, which has no content, counts the changes of all instances: while it and the directory are
the same, nothing is read again. Times of a directory alone are too coarse before Linux 6.13.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from accelplane.descriptors import closing, read_limited
from accelplane.devices import Unit
from accelplane.dra import durable
from accelplane.dra.model import ClaimRef, PreparedDevice

VERSION = "journal.accelplane/v1"
MAX_FILE = 1024 * 1024
MAX_CLAIMS = 4096

_SUFFIX, _BAD = ".json", ".bad"
_LOCK_TIMEOUT = 10.0
_LOCK_INTERVAL = 0.01
_NAME = re.compile(r"[^/\n\0]*")
_UID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,63}")
# Of a file that cannot be read, now or later; others are errors of this process, such as too many open files.
_DAMAGE = (errno.EIO, errno.EFBIG, errno.EINVAL, errno.ELOOP, errno.ENXIO)
_INSTANCE = re.compile(r"instance-([0-9a-f]{16})\.lock")
_SALVAGED_UNIT = re.compile(rb'"unit":"((?:[^"\\]|\\.)*)"')

State: TypeAlias = Literal["preparing", "prepared", "unpreparing"]
Stamp: TypeAlias = tuple[int, int, int]


class JournalError(Exception):
    """The journal cannot be read or written. The text has the file and the reason."""


class Rebind(Struct, frozen=True, kw_only=True, tag_field="action", tag="rebind"):
    """The function at the address was bound to `driver` (empty for none) with that `override`, and then to `bound`.

    Raises `ValueError` for what is not the name of a function or driver: they become parts of paths.
    """

    address: str
    bound: str
    driver: str
    override: str = ""

    def __post_init__(self) -> None:
        _check_names(self.address, self.bound, self.driver, self.override)


class ResetPort(Struct, frozen=True, kw_only=True, tag_field="action", tag="reset-port"):
    """The FPGA port of a device node was programmed, and is reset when its claim ends."""

    address: str
    node: str

    def __post_init__(self) -> None:
        _check_names(self.address, self.node.removeprefix("/dev/"))


class ResetDriver(Struct, frozen=True, kw_only=True, tag_field="action", tag="reset-driver"):
    """The function at the address is bound to a VFIO driver for a claim, and its driver before is not known."""

    address: str

    def __post_init__(self) -> None:
        _check_names(self.address)


UndoStep: TypeAlias = Rebind | ResetPort | ResetDriver


class Holding(Struct, frozen=True, kw_only=True, rename="camel"):
    """A device of a claim, and the unit that it holds. `lock` is the ID of the physical unit.

    `slot` is the part of the unit as in `DeviceName`. `afu` is the function that an FPGA port has to have. `inherited`
    are the CDI names that another driver gave the device (`takeover`); they stay defined.
    """

    request: str
    pool: str
    device: str
    unit: str
    lock: str = ""
    slot: str = ""
    share_id: str = ""
    admin: bool = False
    cdi_ids: Sequence[str] = ()
    inherited: Sequence[str] = ()
    afu: str = ""

    @property
    def prepared(self) -> PreparedDevice:
        names = (*self.inherited, *self.cdi_ids)
        return PreparedDevice((self.request,) if self.request else (), self.pool, self.device, names, self.share_id)


class CdiFile(Struct, frozen=True):
    name: str
    content: Mapping[str, Any]

    def __post_init__(self) -> None:
        _check_names(self.name)


class Entry(Struct, frozen=True, kw_only=True, rename="camel"):
    """A claim in the journal. `boot` identifies the boot in which it was prepared. `error` is of the last undo.

    `bound` are the units that are bound to VFIO, as they were before.
    """

    api_version: str = VERSION
    uid: str
    namespace: str = ""
    name: str = ""
    state: State
    boot: str
    owner: str = ""
    error: str = ""
    devices: Sequence[Holding] = ()
    undo: Sequence[UndoStep] = ()
    bound: Sequence[Unit] = ()
    config: Sequence[Mapping[str, Any]] = ()
    cdi: Sequence[CdiFile] = ()

    @property
    def ref(self) -> ClaimRef:
        return ClaimRef(self.namespace, self.uid, self.name)

    @property
    def claim(self) -> str:
        """The claim in messages. The drivers of Intel do not store names."""
        return f"{self.namespace}/{self.name}" if self.name else self.uid


class Damaged(NamedTuple):
    """A file that cannot be decoded, and what could be read of it. `undo_lost`: the undo steps could not."""

    uid: str
    problem: str
    units: Sequence[str]
    undo: Sequence[UndoStep]
    undo_lost: bool


class _Known(NamedTuple):
    stamp: Stamp
    raw: Mapping[str, Any]
    entry: Entry


class Journal:
    """The files below `directory`. Methods block. All but `lock` are called with the lock held."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._claims = f"{directory}/claims"
        self._locked: int | None = None  # the open file, while it is locked
        self.changes_of_others = 0  # that were found by `entries`, or more
        self._view: tuple[int, ...] = ()  # the state of the lock's file and the directory that the following is of
        self._known: Mapping[str, _Known] = {}
        self._entries: Mapping[str, Entry] = {}
        self._damaged: Mapping[str, Damaged] = {}
        self._owner: int | None = None
        self._mutex = threading.Lock()  # so that one thread at a time polls for the lock of the directory
        self.owner = secrets.token_hex(8)

    def open(self) -> None:
        """Creates the directories and the file that shows that this instance is alive, unless the journal is open.

        Raises `JournalError`.
        """
        if self._owner is not None:
            return
        try:
            os.makedirs(self._claims, mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._owner = os.open(self._instance(self.owner), flags, 0o600)
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _problem(self._directory, error) from None

    def close(self) -> None:
        """Removes the file of this instance. Its unfinished entries then have no live owner."""
        if self._owner is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._instance(self.owner))
            os.close(self._owner)
            self._owner = None

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Excludes other threads and instances. Raises `JournalError` if another one holds it for 10 s."""
        path = f"{self._directory}/journal.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _problem(path, error) from None
        with closing(descriptor), self._mutex:
            end = time.monotonic() + _LOCK_TIMEOUT
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        raise JournalError(
                            f"{path}: locked by another process for {_LOCK_TIMEOUT:g} s, expected a short time"
                        ) from None
                    time.sleep(_LOCK_INTERVAL)
                except OSError as error:
                    raise _problem(path, error) from None
            self._locked = descriptor
            try:
                yield
            finally:
                self._locked = None

    def alive(self, owner: str) -> bool:
        """Whether another instance with this name runs. Raises `JournalError` if it is not known."""
        if owner in ("", self.owner):
            return False
        try:
            with closing(os.open(self._instance(owner), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _problem(self._instance(owner), error) from None
        return False

    def entries(self) -> Mapping[str, Entry]:
        """All entries by UID. Sets files that cannot be decoded aside (`damaged`). Raises `JournalError`.

        The same object while nothing changes.
        """
        view = self._stamp()
        if view != self._view:
            self.changes_of_others += 1
            self._read_all()
            self._view = view if view == self._stamp() else ()  # a file may have been set aside
        return self._entries

    def damaged(self) -> Mapping[str, Damaged]:
        """The files that were set aside, by UID, when `entries` were read last."""
        return self._damaged

    def save(self, entry: Entry) -> None:
        """Writes the entry. Keeps fields of the file that this version does not know. Raises `JournalError`."""
        self.entries()
        before = self._known.get(entry.uid)
        if before is None and len(self._known) >= MAX_CLAIMS:
            raise JournalError(f"{self._claims}: found {len(self._known)} prepared claims, expected less")
        fields: dict[str, Any] = msgspec.to_builtins(entry)
        if before is not None:
            old: dict[str, Any] = msgspec.to_builtins(before.entry)
            fields = {**before.raw, **{key: value for key, value in fields.items() if value != old.get(key)}}
        data, path = msgspec.json.encode(fields), self._path(entry.uid)
        if len(data) > MAX_FILE:
            raise JournalError(f"{path}: {len(data)} bytes, expected at most {MAX_FILE}")
        try:
            self._count_change()
            durable.write(path, data, 0o600)
            known = _Known(_stamp(os.stat(path, follow_symlinks=False)), fields, msgspec.convert(fields, Entry))
        except OSError as error:
            raise _problem(path, error) from None
        self._record({**self._known, entry.uid: known}, self._damaged)

    def remove(self, uid: str) -> None:
        """Removes the files of the claim. Raises `JournalError`."""
        self._remove(uid, _SUFFIX)
        self._remove(uid, _BAD)

    def remove_damaged(self, uid: str) -> None:
        """Removes the damaged file of the claim, if there is one. Raises `JournalError`."""
        self._remove(uid, _BAD)

    def remove_leftovers(self) -> None:
        """Removes temporary files, and the files of dead instances. Raises `JournalError`."""
        try:
            durable.remove_temporary(self._claims)
            for name in os.listdir(self._directory):
                match = _INSTANCE.fullmatch(name)
                if match and match[1] != self.owner and not self.alive(match[1]):
                    os.unlink(f"{self._directory}/{name}")
        except OSError as error:
            raise _problem(self._directory, error) from None

    def _stamp(self) -> tuple[int, ...]:
        """Differs after each change by an instance, and after changes of file names by others. The lock is held."""
        assert self._locked is not None  # noqa: S101 - callers hold the lock
        try:
            lock, directory = os.fstat(self._locked), os.stat(self._claims)
        except OSError as error:
            raise _problem(self._claims, error) from None
        return lock.st_ino, lock.st_size, directory.st_ino, directory.st_mtime_ns

    def _count_change(self) -> None:
        """Called before each change: one that fails is read again. Needs no space on the disk. Raises `OSError`."""
        assert self._locked is not None  # noqa: S101 - callers hold the lock
        os.ftruncate(self._locked, os.fstat(self._locked).st_size + 1)

    def _record(self, known: Mapping[str, _Known], damaged: Mapping[str, Damaged]) -> None:
        """What is known after a change by this instance, which has read the journal under the same lock."""
        self._known, self._damaged = known, damaged
        self._entries = {uid: known[uid].entry for uid in sorted(known)}
        self._view = self._stamp()

    def _remove(self, uid: str, suffix: str) -> None:
        path = self._path(uid, suffix)
        self.entries()
        try:
            if os.path.lexists(path):
                self._count_change()
                durable.remove(path)
        except OSError as error:
            raise _problem(path, error) from None
        known = {each: found for each, found in self._known.items() if (each, suffix) != (uid, _SUFFIX)}
        damaged = {each: found for each, found in self._damaged.items() if (each, suffix) != (uid, _BAD)}
        self._record(known, damaged)

    def _read_all(self) -> None:
        """Reads the files that are not known."""
        try:
            names = sorted(os.listdir(self._claims))
        except OSError as error:
            raise _problem(self._claims, error) from None
        known: dict[str, _Known] = {}
        bad: dict[str, None] = {}
        for name in names:
            uid, suffix = os.path.splitext(name)
            if suffix not in (_SUFFIX, _BAD) or not valid_uid(uid):
                continue
            if suffix == _BAD:
                bad[uid] = None
                continue
            try:
                stamp = _stamp(os.stat(self._path(uid), follow_symlinks=False))
            except OSError:
                continue
            before = self._known.get(uid)
            if before is not None and before.stamp == stamp:
                known[uid] = before
            elif (found := self._read(uid, stamp)) is not None:
                known[uid] = found
            elif os.path.lexists(self._path(uid, _BAD)):
                bad[uid] = None
        self._known = known
        self._entries = {uid: each.entry for uid, each in known.items()}
        self._damaged = {uid: self._salvage(uid) for uid in bad}

    def _read(self, uid: str, stamp: Stamp) -> _Known | None:
        path = self._path(uid)
        try:
            raw = msgspec.json.decode(read_limited(path, MAX_FILE, follow=False), type=dict[str, Any])
            entry = msgspec.convert(raw, Entry)
            if entry.api_version != VERSION or entry.uid != uid:
                raise ValueError(f"apiVersion {entry.api_version[:80]!a} and uid {entry.uid[:80]!a}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            if isinstance(error, OSError) and error.errno not in _DAMAGE:
                raise _problem(path, error) from None
            try:
                self._count_change()
                durable.move(path, self._path(uid, _BAD))
            except OSError as error:
                raise _problem(path, error) from None
            return None
        return _Known(stamp, raw, entry)

    def _salvage(self, uid: str) -> Damaged:
        """What is left of a damaged file: the units, and the undo steps if all of them are there."""
        path = self._path(uid, _BAD)
        try:
            data = read_limited(path, MAX_FILE, follow=False)
        except OSError as error:
            return Damaged(uid, f"{path}: cannot be read: {error.strerror}", (), (), True)
        units: dict[str, None] = {}
        for match in _SALVAGED_UNIT.finditer(data):
            with contextlib.suppress(ValueError):
                units[str(json.loads(b'"' + match[1] + b'"'))] = None
        undo: Sequence[UndoStep] = ()
        lost = True
        _, found, rest = data.decode(errors="replace").partition('"undo":')
        with contextlib.suppress(ValueError, msgspec.MsgspecError, RecursionError):
            if found:
                undo = msgspec.convert(json.JSONDecoder().raw_decode(rest)[0], list[UndoStep])
                lost = False
        return Damaged(uid, f"{path}: not a journal entry of version {VERSION}", tuple(units), undo, lost)

    def _path(self, uid: str, suffix: str = _SUFFIX) -> str:
        return f"{self._claims}/{uid}{suffix}"

    def _instance(self, owner: str) -> str:
        return f"{self._directory}/instance-{owner}.lock"


def _check_names(*names: str) -> None:
    """Raises `ValueError` for a name that leads to another directory."""
    for name in names:
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise ValueError(f"found {name[:80]!a}, expected a name without directories")


def valid_uid(uid: str) -> bool:
    """Whether the UID can be part of a file name and of a CDI device name."""
    return bool(_UID.fullmatch(uid))


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _problem(path: str, error: OSError) -> JournalError:
    return JournalError(f"{path}: {error.strerror or error}")
