"""The limit of open files of this process, and the end of child processes of asyncio."""

import asyncio
import contextlib
import os
import resource
import signal

_KILL_TIMEOUT = 5.0


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard one.

    A container runtime may leave containers the default of systemd, 1,024 and 524,288. The low soft limit is for
    programs that use select(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a filter of system calls may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def end_process(process: asyncio.subprocess.Process, term_timeout: float = 0.0) -> bool:
    """Ends a process by SIGTERM, and `term_timeout` seconds later by SIGKILL; if that is 0 by SIGKILL at once.

    Returns whether it got SIGKILL. Output that nobody has read is discarded. A process that does not end within 5 s
    after SIGKILL is in an uninterruptible system call, and is left.
    """
    sent = 0
    end = asyncio.create_task(_wait_for_end(process))
    try:
        for number, limit in ((signal.SIGTERM, term_timeout), (signal.SIGKILL, _KILL_TIMEOUT)):
            if limit and process.returncode is None:
                sent = number
                # `Process.send_signal` would take the exit status of a process that has just ended from asyncio, which
                # then writes a warning and reports status 255.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
                await asyncio.wait((end,), timeout=limit)
    finally:
        end.cancel()
        await asyncio.gather(end, return_exceptions=True)
    return sent == signal.SIGKILL


async def _wait_for_end(process: asyncio.subprocess.Process) -> None:
    """Waits for the end. asyncio reports it only after the output has been read to its end."""
    streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
    await asyncio.gather(process.wait(), *map(_discard, streams))


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass
