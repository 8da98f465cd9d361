"""The subset of the FUSE protocol for an attribute tree: numbers, structures, replies.

Facts: the kernel's include/uapi/linux/fuse.h, version 7.31, which every kernel since 5.4 supports.
"""

import stat
import struct
from enum import IntEnum
from typing import NamedTuple

from accelplane.simulate.kernel.model import Attribute, DeviceNode, Directory, Entry, Link

PAGE = 4096
MAX_WRITE = 128 * 1024
REQUEST_SIZE = MAX_WRITE + PAGE
DIRECT_IO = 1 << 0  # flag of an open file: reads are not cached
ATOMIC_TRUNCATE = 1 << 3  # flag of the connection: O_TRUNC is passed to OPEN

_IN_HEADER = struct.Struct("<IIQQIIIHH")
_OUT_HEADER = struct.Struct("<IiQ")
_INIT = struct.Struct("<IIIIHHIIHHI7I")
_ATTRIBUTES = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_VALIDITY = struct.Struct("<QII")
_OPEN = struct.Struct("<QII")
_STATFS = struct.Struct("<5Q4I6I")
_DIRENT = struct.Struct("<QQII")

HANDLE_OFFSET_SIZE = struct.Struct("<QQI")  # the start of READ, READDIR and WRITE
HANDLE = struct.Struct("<Q")
FORGOTTEN = struct.Struct("<QQ")
COUNT = struct.Struct("<II")
OPEN_FLAGS = struct.Struct("<I")
WRITE_SIZE = 40


class Op(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    RENAME2 = 45


class Request(NamedTuple):
    """One request. `node` is its inode."""

    op: int
    unique: int
    node: int
    body: bytes


def parse(data: bytes) -> Request:
    """Parses a request that was read from the device."""
    length, op, unique, node, _uid, _gid, _pid, _extra, _padding = _IN_HEADER.unpack_from(data)
    return Request(op, unique, node, data[_IN_HEADER.size : length])


def answer(unique: int, body: bytes = b"", error: int = 0) -> bytes:
    """Returns the reply to write to the device."""
    body = b"" if error else body
    return _OUT_HEADER.pack(_OUT_HEADER.size + len(body), -error, unique) + body


def init(body: bytes) -> bytes:
    """The reply to INIT with version, flags and sizes."""
    _major, minor, readahead = struct.unpack_from("<III", body)
    flags = struct.unpack_from("<I", body, 12)[0] & ATOMIC_TRUNCATE
    return _INIT.pack(7, min(minor, 31), readahead, flags, 0, 0, MAX_WRITE, 1, 0, 0, 0, *[0] * 7)


def attributes(entry: Entry, text: str = "") -> bytes:
    """The result of stat(2); `text` is that of a link. The size of an attribute is one page, as in sysfs."""
    size = PAGE if isinstance(entry, Attribute) else len(text.encode())
    links = 2 if isinstance(entry, Directory) else 1
    device = entry.numbers.minor & 0xFF | entry.numbers.major << 8 if isinstance(entry, DeviceNode) else 0
    return _ATTRIBUTES.pack(entry.inode, size, 0, 0, 0, 0, 0, 0, 0, _mode(entry), links, 0, 0, device, PAGE, 0)


def lookup_reply(entry: Entry, text: str) -> bytes:
    """The reply to LOOKUP, which must not be cached."""
    return _ENTRY.pack(entry.inode, 0, 0, 0, 0, 0) + attributes(entry, text)


def attributes_reply(entry: Entry, text: str) -> bytes:
    """The reply to GETATTR and SETATTR, which must not be cached."""
    return _VALIDITY.pack(0, 0, 0) + attributes(entry, text)


def open_reply(handle: int, flags: int = 0) -> bytes:
    """The reply to OPEN and OPENDIR."""
    return _OPEN.pack(handle, flags, 0)


def write_reply(size: int) -> bytes:
    return COUNT.pack(size, 0)


def file_system() -> bytes:
    """The reply to STATFS: an empty file system, as in sysfs."""
    return _STATFS.pack(0, 0, 0, 0, 0, PAGE, 255, PAGE, 0, *[0] * 6)


def directory_entries(entries: list[tuple[str, int, int]], offset: int, size: int) -> bytes:
    """The reply to READDIR: names, inodes and types from `offset`, limited to `size` bytes."""
    data = bytearray()
    for place, (name, inode, kind) in enumerate(entries[offset:], offset + 1):
        encoded = name.encode()
        record = _DIRENT.pack(inode, place, len(encoded), kind) + encoded
        record += b"\0" * (-len(record) % 8)
        if len(data) + len(record) > size:
            break
        data += record
    return bytes(data)


def kind(entry: Entry) -> int:
    """The type of an entry in a directory's list."""
    return _mode(entry) >> 12


def _mode(entry: Entry) -> int:
    match entry:
        case Directory():
            return stat.S_IFDIR | 0o755
        case Attribute():
            return stat.S_IFREG | entry.mode
        case DeviceNode():
            return stat.S_IFCHR | 0o600
        case Link():
            return stat.S_IFLNK | 0o777
