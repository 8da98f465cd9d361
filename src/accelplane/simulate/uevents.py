"""Sends uevents through the kernel, in a separate network namespace.

Since Linux 4.18 a privileged process can request the kernel to broadcast a uevent to the listeners of its network
namespace. The kernel appends SEQNUM, and the sender's port is 0 as for other uevents (kernel source:
lib/kobject_uevent.c, uevent_net_rcv_skb). In the initial network namespace udev would act on devices that do not exist,
so the functions raise an error there.
"""

import ctypes
import errno
import glob
import os
import socket
import struct
from contextlib import suppress

from accelplane.descriptors import closing

_NETLINK_KOBJECT_UEVENT = 15
_MESSAGE = 0x10  # the first message type that is not netlink's own
_ERROR = 0x2
_REQUEST_AND_ACK = 0x1 | 0x4
_HEADER = struct.Struct("=IHHII")
_MAX_MESSAGE = 2048  # the kernel's UEVENT_BUFFER_SIZE
_SEQNUM_ROOM = 32
# Exists only in the initial network namespace (kernel source: net/core/sysctl_net_core.c).
_INITIAL_NAMESPACE_ONLY = "/proc/sys/net/core/netdev_max_backlog"
_TIMEOUT = 5.0
_NAMESPACES = "/run/netns"
_CLONE_NEWNET = 0x40000000


class UeventError(Exception):
    """The uevent cannot be sent. The message says what is missing."""


def uevent(action: str, devpath: str, subsystem: str, **fields: str) -> None:
    """Sends a uevent to every listener in this network namespace. Raises `UeventError`.

    `devpath` is below `/sys` (`/devices/pci0000:00/…/drm/card0`); `fields` are additional KEY=value pairs.
    """
    entries = {"ACTION": action, "DEVPATH": devpath, "SUBSYSTEM": subsystem, **fields}
    payload = _payload(action, devpath, entries)
    if os.path.exists(_INITIAL_NAMESPACE_ONLY):
        raise UeventError(
            "this is the initial network namespace, where udev would handle the uevent; "
            "run in another one (unshare --net)"
        )
    length = _HEADER.size + len(payload)
    message = _HEADER.pack(length, _MESSAGE, _REQUEST_AND_ACK, 1, 0) + payload
    try:
        with socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_KOBJECT_UEVENT
        ) as kernel:
            kernel.settimeout(_TIMEOUT)
            kernel.bind((0, 0))
            kernel.sendto(message, (0, 0))
            answer = kernel.recv(_MAX_MESSAGE)
    except OSError as error:
        raise UeventError(f"{action}@{devpath}: {error.strerror or error}") from None
    _check(answer, f"{action}@{devpath}")


def uevent_everywhere(action: str, devpath: str, subsystem: str, **fields: str) -> None:
    """Like `uevent`, but also in the network namespaces of pods, as the kernel does. Raises `UeventError`.

    These are the namespaces in `/run/netns` (ip-netns(8)), where container runtimes store them.
    """
    uevent(action, devpath, subsystem, **fields)
    with closing(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)) as own:
        for place in sorted(glob.glob(f"{_NAMESPACES}/*")):
            try:
                # The pod may have ended, and the file exists before the namespace is mounted.
                with suppress(OSError), closing(os.open(place, os.O_RDONLY | os.O_CLOEXEC)) as other:
                    _enter(other)
                    uevent(action, devpath, subsystem, **fields)
            finally:
                _enter(own)


def _enter(namespace: int) -> None:
    """Moves this thread into the network namespace. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _payload(action: str, devpath: str, entries: dict[str, str]) -> bytes:
    if not action.isalpha() or not devpath.startswith("/"):
        raise UeventError(f"{action[:40]!a}@{devpath[:120]!a}: expected an action such as add, and a path below /sys")
    for key, value in entries.items():
        if not key.isidentifier() or "\0" in value:
            raise UeventError(f"{key[:40]!a}={value[:40]!a}: expected KEY=value without zero bytes")
    lines = [f"{action}@{devpath}", *(f"{key}={value}" for key, value in entries.items())]
    payload = b"".join(os.fsencode(line) + b"\0" for line in lines)
    if len(payload) > _MAX_MESSAGE - _SEQNUM_ROOM:
        raise UeventError(f"{action}@{devpath[:120]}: found {len(payload)} bytes, expected at most {_MAX_MESSAGE}")
    return payload


def _check(answer: bytes, description: str) -> None:
    kind = _HEADER.unpack_from(answer)[1] if len(answer) >= _HEADER.size + 4 else 0
    code = -struct.unpack_from("=i", answer, _HEADER.size)[0] if kind == _ERROR else errno.EPROTO
    if code in (errno.EPERM, errno.EACCES):
        raise UeventError(
            f"{description}: {os.strerror(code)}; CAP_SYS_ADMIN is required in this network namespace (root)"
        )
    if code:
        raise UeventError(f"{description}: {os.strerror(code)}")
