"""Programs that the kernel starts: with an empty environment, in the namespaces of the emulated kernel.

Facts: the kernel's kernel/umh.c; an environment without any variable is what Onload passes.
"""

import subprocess
from collections.abc import Sequence

import msgspec

_MAX_CALLS = 1000


class Call(msgspec.Struct):
    """One call. `status` is the exit status, negative for a signal; None while it runs or if it was not executed."""

    argv: Sequence[str]
    status: int | None = None
    error: str = ""


class Usermode:
    """Records the calls; with `execute` also starts the programs, whose output is that of this process."""

    def __init__(self, *, execute: bool = False) -> None:
        self._execute = execute
        self._calls: list[Call] = []
        self._running: list[tuple[Call, subprocess.Popen[bytes]]] = []

    def start(self, argv: Sequence[str]) -> None:
        """Starts a program without waiting for its end."""
        call = Call(tuple(argv))
        if len(self._calls) < _MAX_CALLS:
            self._calls.append(call)
        if not self._execute:
            return
        try:
            process = subprocess.Popen(argv, env={}, cwd="/", stdin=subprocess.DEVNULL, start_new_session=True)
        except (OSError, ValueError) as error:
            call.error = str(error)
        else:
            self._running.append((call, process))

    def calls(self) -> Sequence[Call]:
        """All calls so far, with the exit statuses of those that have ended."""
        for call, process in self._running:
            call.status = process.poll()
        self._running = [(call, process) for call, process in self._running if call.status is None]
        return tuple(self._calls)

    def close(self) -> None:
        for _call, process in self._running:
            process.kill()
            process.wait()
        self._running.clear()
