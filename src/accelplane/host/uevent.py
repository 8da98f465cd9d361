"""Uevents, the kernel's events of devices that are added or removed, on a netlink socket.

Format: `ACTION@DEVPATH` and then `KEY=value` texts, each ended by a zero byte (kernel source: lib/kobject_uevent.c).
Privileged processes may send to the group as well; messages of the kernel have the sender port 0.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1
_MAX_MESSAGE = 16 * 1024  # the kernel's own buffer has 2048 (UEVENT_BUFFER_SIZE)
_RECEIVE_BUFFER = 1024 * 1024


class Uevent(NamedTuple):
    """One event; `devpath` is below `/sys`. The action `overflow` stands for lost events (the buffer overflowed)."""

    action: str
    devpath: str
    subsystem: str
    fields: Mapping[str, str]


OVERFLOW = Uevent("overflow", "", "", {})


def parse_uevent(message: bytes) -> Uevent | None:
    """The event in `message`, None if it is not one (truncated, from another sender, binary data)."""
    header, *entries = message.decode("utf-8", "replace").split("\0")
    action, at, devpath = header.partition("@")
    if not at or not action.isalpha() or not devpath.startswith("/"):
        return None
    fields = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return Uevent(action, devpath, fields.get("SUBSYSTEM", ""), fields)


class UeventSocket:
    """A subscription to all uevents. Raises `OSError` if this process may not subscribe."""

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, _NETLINK_KOBJECT_UEVENT
        )
        try:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            self._socket.bind((0, _KERNEL_GROUP))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self, limit: int = 256) -> Iterator[Uevent]:
        """The pending events, at most `limit`; call again for more."""
        for _ in range(limit):
            try:
                message, (sender, _groups) = self._socket.recvfrom(_MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    yield OVERFLOW
                    continue
                raise
            if sender == 0 and (event := parse_uevent(message)) is not None:
                yield event

    def close(self) -> None:
        self._socket.close()
