"""Runs a command whose opens and ioctls of emulated device nodes are handled by the emulated kernel.

The command gets a seccomp filter with user notification of every `open` and of the ioctls of the FPGA drivers; other
system calls are not affected. An emulated node is opened as a memfd with its name, which identifies copies of the
descriptor, also in children. The command can be any program.

Facts: seccomp_unotify(2), seccomp(2); linux/seccomp.h, linux/audit.h.
"""

import ctypes
import errno
import fcntl
import os
import platform
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from accelplane.descriptors import closing
from accelplane.simulate.kernel.fpga import LAYOUTS
from accelplane.simulate.kernel.ioctls import Call, HasNode, ProcessMemory, call, connect


class SeccompUnavailable(Exception):
    """Not supported by the machine or the kernel; the message has the reason."""


class _Machine(NamedTuple):
    """Numbers of system calls. `open` is None on machines with only `openat`."""

    audit: int
    seccomp: int
    ioctl: int
    openat: int
    open: int | None


_MACHINES: Mapping[str, _Machine] = {
    "x86_64": _Machine(0xC000003E, 317, 16, 257, 2),
    "aarch64": _Machine(0xC00000B7, 277, 29, 56, None),
}

_OPENAT2 = 437  # on every machine
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _VALID, _ADD = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103
_CONTINUE = 1
_ADD_AND_SEND = 2
_NOTICE = struct.Struct("<QIIiIQ6Q")
_ANSWER = struct.Struct("<QqiI")
_ADDITION = struct.Struct("<QIIII")

_NODE = re.compile(r"(?:.*/)?dev/((?:dfl|intel-fpga)-(?:fme|port)\.[0-9]{1,6})")
_NAMED = re.compile(r"/memfd:emulated:([a-z.0-9-]+) \(deleted\)")
_LONGEST_PATH = 4096
_AT_FDCWD = -100


def run(command: Sequence[str], sockets: str, environment: Mapping[str, str] | None = None) -> int:
    """Runs the command to its end, with the emulated kernel at the socket `sockets`; returns its exit status.

    After a signal it is 128 and the signal's number. SIGTERM and SIGINT are forwarded. Remaining child processes cannot
    open files any more. Raises `SeccompUnavailable`, and `OSError` if the socket or the command does not exist.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise SeccompUnavailable(f"machine {platform.machine()}: expected one of {', '.join(_MACHINES)}")
    connect(sockets).close()
    parent_end, child_end = socket.socketpair()
    with parent_end:
        with child_end:
            install = _installer(machine, child_end)
            try:
                # Closing descriptors opens a directory, which would block before the supervisor responds.
                process = subprocess.Popen(command, env=environment, close_fds=False, preexec_fn=install)  # noqa: PLW1509
            except subprocess.SubprocessError:
                raise SeccompUnavailable(parent_end.recv(256).decode(errors="replace")) from None
            except OSError as error:
                print(f"{command[0]}: {error.strerror}", file=sys.stderr)
                return 127 if error.errno == errno.ENOENT else 126
        handler = _signal_handler(process.pid)
        before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            _data, listeners, _flags, _address = socket.recv_fds(parent_end, 256, 1)
            for listener in listeners:  # none if the child has been killed
                _Supervisor(machine, listener, sockets).respond_until_exit(process.pid)
            code = process.wait()
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)
    return 128 - code if code < 0 else code


def _signal_handler(child: int) -> Callable[[int, object], None]:
    def forward_signal(number: int, _frame: object) -> None:
        if number == signal.SIGINT and _is_in_foreground():
            return  # the terminal has sent it to the child as well
        with suppress(ProcessLookupError):
            os.kill(child, number)

    return forward_signal


def _is_in_foreground() -> bool:
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


# In the child, before exec.


def _installer(machine: _Machine, connection: socket.socket) -> Callable[[], None]:
    """Returns a function that installs the filter in its process and sends the listener, or the text of an error."""
    library = ctypes.CDLL(None, use_errno=True)
    program = _filter(machine)
    instructions = ctypes.create_string_buffer(program, len(program))
    parent = os.getpid()

    def install() -> None:
        # Without the supervisor, its system calls would block.
        library.prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(126)
        described = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
        pointer = ctypes.create_string_buffer(described, len(described))
        if os.getuid():
            library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        listener: int = library.syscall(machine.seccomp, _SET_MODE_FILTER, _NEW_LISTENER, pointer)
        if listener < 0:
            hint = "; this process already has a supervisor" if ctypes.get_errno() == errno.EBUSY else ""
            connection.send(f"seccomp: {os.strerror(ctypes.get_errno())}{hint}".encode())
            raise OSError
        socket.send_fds(connection, [b"ok"], [listener])
        os.close(listener)

    return install


def _filter(machine: _Machine) -> bytes:
    """The program in classic BPF: notify for opens, and for ioctls with the magic of one of the drivers."""
    load, equal, give, shift, mask = 0x20, 0x15, 0x06, 0x74, 0x54
    opens = [number for number in (machine.openat, _OPENAT2, machine.open) if number is not None]
    magics = [layout.magic for layout in LAYOUTS.values()]
    body: list[tuple[int, int | str, int | str, int]] = [
        (load, 0, 0, 4),
        (equal, 0, "allow", machine.audit),
        (load, 0, 0, 0),
        *((equal, "notify", 0, number) for number in opens),
        (equal, 0, "allow", machine.ioctl),
        (load, 0, 0, 24),
        (shift, 0, 0, 8),
        (mask, 0, 0, 0xFF),
        *((equal, "notify", 0, magic) for magic in magics),
        (give, 0, 0, _ALLOW),
        (give, 0, 0, _NOTIFY),
    ]
    ends = {"allow": len(body) - 2, "notify": len(body) - 1}
    code = bytearray()
    for place, (operation, if_true, if_false, value) in enumerate(body):
        jumps = (ends[jump] - place - 1 if isinstance(jump, str) else jump for jump in (if_true, if_false))
        code += struct.pack("<HBBI", operation, *jumps, value)
    return bytes(code)


# In the parent.


class _Notification(NamedTuple):
    """A notification: a system call that waits for a response."""

    id: int
    pid: int
    number: int
    arguments: Sequence[int]


class _Supervisor:
    def __init__(self, machine: _Machine, listener: int, sockets: str) -> None:
        self._machine = machine
        self._listener = listener
        self._sockets = sockets

    def respond_until_exit(self, child: int) -> None:
        """Responds to the child and its children until it has exited."""
        with closing(self._listener), closing(os.pidfd_open(child)) as ended:
            poll = select.poll()
            poll.register(self._listener, select.POLLIN)
            poll.register(ended, select.POLLIN)
            while True:
                events = dict(poll.poll())
                if events.get(self._listener, 0) & select.POLLIN:
                    self._handle_notification()
                elif ended in events:
                    return
                elif self._listener in events:  # no process with the filter is left
                    poll.unregister(self._listener)

    def _handle_notification(self) -> None:
        buffer = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, buffer)
        except OSError:  # the process was killed
            return
        found = _NOTICE.unpack(buffer)
        notification = _Notification(found[0], found[1], found[3], found[6:])
        if notification.number == self._machine.ioctl:
            # A long ioctl must not delay other calls.
            threading.Thread(target=self._ioctl, args=(notification,), daemon=True).start()
        else:
            self._open(notification)

    def _open(self, notification: _Notification) -> None:
        at, path, flags = notification.arguments[:3]
        if notification.number == self._machine.open:
            at, path, flags = _AT_FDCWD, *notification.arguments[:2]
        try:
            with self._memory(notification) as memory:
                if notification.number == _OPENAT2:  # a structure, and the flags are its first field
                    flags = int.from_bytes(memory.read(flags, 8), "little")
                node = self._node(notification, memory, at, path)
        except OSError:
            node = None
        if node is None:
            self._respond(notification, resume=True)
            return
        with closing(os.memfd_create(f"emulated:{node}", os.MFD_CLOEXEC)) as descriptor:
            addition = _ADDITION.pack(notification.id, _ADD_AND_SEND, descriptor, 0, flags & os.O_CLOEXEC)
            try:
                fcntl.ioctl(self._listener, _ADD, addition)
            except OSError as error:  # too many open files, or the process was killed
                self._respond(notification, number=error.errno or errno.EMFILE)

    def _node(self, notification: _Notification, memory: ProcessMemory, at: int, address: int) -> str | None:
        """The emulated node that the call opens, if it is one. Raises `OSError`."""
        path = _text(memory, address)
        if not path.startswith("/"):
            at = at & 0xFFFFFFFF
            where = "cwd" if at == _AT_FDCWD & 0xFFFFFFFF else f"fd/{at}"
            path = f"{os.readlink(f'/proc/{notification.pid}/{where}')}/{path}"
        found = _NODE.fullmatch(os.path.normpath(path))
        return found[1] if found and call(self._sockets, HasNode(found[1]), memory) else None

    def _ioctl(self, notification: _Notification) -> None:
        descriptor, request, argument = notification.arguments[:3]
        try:
            link = os.readlink(f"/proc/{notification.pid}/fd/{descriptor & 0xFFFFFFFF}")
        except OSError:
            link = ""
        found = _NAMED.fullmatch(link)
        if found is None:
            self._respond(notification, resume=True)
            return
        try:
            with self._memory(notification) as memory:
                value = call(self._sockets, Call(found[1], request & 0xFFFFFFFF, argument), memory)
        except OSError as error:
            self._respond(notification, number=error.errno or errno.EIO)
        else:
            self._respond(notification, value)

    @contextmanager
    def _memory(self, notification: _Notification) -> Generator[ProcessMemory]:
        """The memory of the waiting process. Checks the notification, as the PID of a killed process can be reused."""
        with closing(os.open(f"/proc/{notification.pid}/mem", os.O_RDWR | os.O_CLOEXEC)) as descriptor:
            fcntl.ioctl(self._listener, _VALID, struct.pack("<Q", notification.id))
            yield ProcessMemory(descriptor)

    def _respond(self, notification: _Notification, value: int = 0, number: int = 0, *, resume: bool = False) -> None:
        answer = _ANSWER.pack(notification.id, value, -number, _CONTINUE if resume else 0)
        with suppress(OSError):  # the process was killed
            fcntl.ioctl(self._listener, _SEND, answer)


def _text(memory: ProcessMemory, address: int) -> str:
    """The text up to its zero byte, limited to the length of a path. Raises `OSError` EFAULT."""
    found = b""
    while len(found) < _LONGEST_PATH:
        # One page at a time: the next one may not be mapped.
        before, zero, _ = memory.read(address + len(found), 4096 - (address + len(found)) % 4096).partition(b"\0")
        found += before
        if zero:
            break
    return os.fsdecode(found)
