"""Supervises a subprocess, for work whose imports the agent does not need: starts, restarts and ends it.

The subprocess reads a pipe from the agent as standard input. The pipe is closed when the agent ends.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from accelplane.processes import end_process

log = logging.getLogger(__name__)

_FIRST_RETRY, _LAST_RETRY = 1.0, 300.0
_STABLE_AFTER = 60.0
_TERMINATE_TIMEOUT = 5.0


async def supervise(name: str, command: Sequence[str]) -> None:
    """Runs `command`, and again when it ends, until cancelled; then ends it."""
    retry = _FIRST_RETRY
    while True:
        start = time.monotonic()
        try:
            end = f"exited with status {await _run(command)}"
        except OSError as error:
            end = f"cannot start {error.filename or command[0]}: {error.strerror}"
        if time.monotonic() - start > _STABLE_AFTER:
            retry = _FIRST_RETRY
        log.error("%s: %s; retrying in %g s", name, end, retry)
        await asyncio.sleep(retry)
        retry = min(2 * retry, _LAST_RETRY)


async def _run(command: Sequence[str]) -> int:
    """Returns the exit status. Ends the process when cancelled. Raises `OSError`."""
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    try:
        return await process.wait()
    finally:
        if await end_process(process, _TERMINATE_TIMEOUT):
            log.warning("%s did not end within %g s after SIGTERM and was killed", command[0], _TERMINATE_TIMEOUT)
