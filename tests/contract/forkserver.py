"""Processes of installed commands that are forked from one which has imported their packages.

Starting Python and importing the packages takes 0.2 s of processor time for each command, a fork 0.02 s. The processes
have their own arguments, environment, standard streams and signal handlers, and end as Python does. One server is
started for each process of the tests that needs it, and ends with it.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import io
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

_MAX_REQUEST = 200_000
_PRELOADED = (
    *("accelplane.cli.commands", "accelplane.cli.node", "accelplane.cli.dropin", "accelplane.cli.top"),
    *("accelplane.cli.clusterview", "accelplane.cli.fleetview", "accelplane.node.agent"),
    *(
        f"accelplane.plugins.{name}"
        for name in ("dlb", "fpga", "generic", "gpu", "idxd", "npu", "onload", "qat", "sgx")
    ),
    *("accelplane.readings.dfl", "accelplane.readings.gpu", "accelplane.readings.nic", "accelplane.readings.npu"),
    *("accelplane.readings.offload", "accelplane.readings.opae", "accelplane.readings.qat"),
    *("rich.console", "rich.table"),
)


class ForkedProcess:
    """A process whose parent is the server. Its methods are those of `subprocess.Popen`."""

    def __init__(self, pid: int, handle: int, status: socket.socket) -> None:
        """`handle` is a file descriptor of the process, or -1 if the process has ended."""
        self.pid = pid
        self.returncode: int | None = None
        self._handle = handle
        self._status = status
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._read_status(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._read_status(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with self._lock, contextlib.suppress(ProcessLookupError):
                if self.returncode is None and self._handle >= 0:
                    signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read_status(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ValueError):  # another thread has read the status
                poll = select.poll()
                poll.register(self._status, select.POLLIN)
                if not poll.poll(None if timeout is None else timeout * 1000):
                    return None
            with self._lock:
                if self.returncode is None:
                    content = self._status.recv(64)
                    assert content, "the fork server ended"
                    self.returncode = int(content)
                    self._status.close()
                    if self._handle >= 0:
                        os.close(self._handle)
        return self.returncode


class ForkServer:
    """The server, which is started at once. The owner calls `close`."""

    def __init__(self, modules: Sequence[str] = (), wrapper: Sequence[str] = ()) -> None:
        """The server imports the modules, and those of each command. `wrapper` is a command that runs the server."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [*wrapper, sys.executable, os.path.abspath(__file__), str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def start(
        self, program: str, arguments: Sequence[str], environment: Mapping[str, str], streams: tuple[int, int, int]
    ) -> ForkedProcess:
        """Starts an installed command with these files as standard streams."""
        request = json.dumps([program, list(arguments), dict(environment)]).encode()
        assert len(request) <= _MAX_REQUEST
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._requests, [request], [*streams, theirs.fileno()])
        content = status.recv(64)
        assert content, "the fork server ended"
        pid = int(content)
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            handle = -1
        return ForkedProcess(pid, handle, status)

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """The server of this process."""
    server = ForkServer(_PRELOADED)
    atexit.register(server.close)
    return server


def _serve(requests: socket.socket) -> Callable[[], object] | None:
    """Starts processes until the client closes its end. Returns the command in each of them, and None in the server."""
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _events in selector.select():
            if key.fileobj is not requests:
                pid, status = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with status, contextlib.suppress(BrokenPipeError):
                    status.send(str(code).encode())
                continue
            content, descriptors, _flags, _address = socket.recv_fds(requests, _MAX_REQUEST, 4)
            if not content:
                return None
            program, arguments, environment = json.loads(content)
            _entry_point(program).load()
            pid = os.fork()
            if pid == 0:
                for handle, (_pid, status) in running.items():
                    os.close(handle)
                    status.close()
                selector.close()
                requests.close()
                return _command(program, arguments, environment, descriptors)
            for descriptor in descriptors[:3]:
                os.close(descriptor)
            status = socket.socket(fileno=descriptors[3])
            handle = os.pidfd_open(pid)
            running[handle] = pid, status
            selector.register(handle, selectors.EVENT_READ)
            status.send(str(pid).encode())


def _command(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
) -> Callable[[], object]:
    """Makes this process that of the command, and returns its function."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.stdin = sys.__stdin__ = _stream(0, "r", sys.stdin)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", sys.stderr)  # type: ignore[misc]
    sys.argv = [os.path.join(os.path.dirname(sys.executable), program), *arguments]
    return _entry_point(program).load()


@functools.cache
def _entry_point(program: str) -> importlib.metadata.EntryPoint:
    (point,) = importlib.metadata.entry_points(group="console_scripts", name=program)
    return point


def _stream(number: int, mode: str, before: io.TextIOWrapper) -> io.TextIOWrapper:
    """A new object for a standard stream, as of a new process. `before` is the object of the server."""
    immediate = number == 2 or os.isatty(number) or bool(os.environ.get("PYTHONUNBUFFERED"))
    stream = open(number, mode, encoding=before.encoding, errors=before.errors, closefd=False)  # noqa: SIM115
    assert isinstance(stream, io.TextIOWrapper)
    stream.reconfigure(line_buffering=immediate)
    return stream


def _run(command: Callable[[], object]) -> NoReturn:
    """Runs the command and exits as Python does, but without freeing all objects, which takes 0.1 s."""
    try:
        sys.exit(command())
    except SystemExit as exit_:
        if not isinstance(exit_.code, int | None):
            raise
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit((exit_.code or 0) & 0xFF)


def _main() -> NoReturn:
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        sys.path.pop(0)  # the directory of this file
        for name in sys.argv[2:]:
            importlib.import_module(name)
        gc.freeze()
        command = _serve(requests)
    if command:
        _run(command)
    sys.exit()


if __name__ == "__main__":
    _main()
