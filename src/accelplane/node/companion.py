"""A process beside the agent, for work whose imports the agent does not want: started, started again, ended with it.

Its standard input is a pipe from the agent, whose end tells it that the agent is no more, however that came.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

log = logging.getLogger(__name__)

_FIRST_RETRY, _LAST_RETRY = 1.0, 300.0
_STEADY = 60.0
_FAREWELL = 5.0


async def accompanied(name: str, command: Sequence[str]) -> None:
    """Keeps `command` running until cancelled; it has ended then."""
    retry = _FIRST_RETRY
    while True:
        start = time.monotonic()
        try:
            end = f"ended with {await _run(command)}"
        except OSError as error:
            end = f"cannot be started: {error}"
        if time.monotonic() - start > _STEADY:
            retry = _FIRST_RETRY
        log.error("%s: %s, starting it again in %g s", name, end, retry)
        await asyncio.sleep(retry)
        retry = min(2 * retry, _LAST_RETRY)


async def _run(command: Sequence[str]) -> int:
    """Its exit status. Cancelled, it ends the process. Raises `OSError`."""
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(_FAREWELL):
                    await process.wait()
            except TimeoutError:
                log.warning("%s does not end when told to, killing it", command[0])
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
