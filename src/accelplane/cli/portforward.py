"""`kubectl port-forward` as a child process: a port of this machine that leads to a port of a pod.

The right to forward ports to the pod is the authentication.
"""

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncGenerator, Sequence

from accelplane.processes import end_process

_READY = re.compile(rb"Forwarding from 127\.0\.0\.1:([0-9]{1,5}) ->")
_END_TIMEOUT = 5.0
_MAX_MESSAGE = 4096


class PortForwardError(Exception):
    """kubectl cannot be run, or does not forward the port; the text has its message."""


@contextlib.asynccontextmanager
async def forwarded(
    target: str, port: int, *, namespace: str, options: Sequence[str] = (), limit: float = 15.0
) -> AsyncGenerator[int]:
    """The local port that leads to `port` of the target, for example `deployment/name`. Raises `PortForwardError`."""
    program = shutil.which("kubectl")
    if program is None:
        raise PortForwardError("kubectl: not found on PATH; install it")
    command = (
        program, "port-forward", *options, f"--namespace={namespace}", "--address=127.0.0.1", target, f":{port}",
    )  # fmt: skip
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise PortForwardError(f"{program}: {error.strerror or error}") from error
    drains: list[asyncio.Task[None]] = []
    try:
        try:
            async with asyncio.timeout(limit):
                local = await _local_port(process)
        except TimeoutError:
            raise PortForwardError(f"kubectl port-forward {target}: not ready within {limit:g} s") from None
        if local is None:
            raise PortForwardError(f"kubectl port-forward {target}: {await _message(process)}")
        # kubectl writes a line for each connection, and would block on a full pipe.
        drains = [asyncio.create_task(_drain(stream)) for stream in (process.stdout, process.stderr) if stream]
        yield local
    finally:
        for task in drains:
            task.cancel()
        await asyncio.gather(*drains, return_exceptions=True)
        await end_process(process, _END_TIMEOUT)


async def _local_port(process: asyncio.subprocess.Process) -> int | None:
    """The port of the first line, None if kubectl ends without one."""
    while process.stdout and (line := await process.stdout.readline()):
        if match := _READY.match(line):
            return int(match[1])
    return None


async def _message(process: asyncio.subprocess.Process) -> str:
    """The last line that kubectl has written to standard error."""
    content, status = b"", ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT):
            # One read may have a part of the line only.
            while process.stderr and (part := await process.stderr.read(_MAX_MESSAGE - len(content))):
                content += part
            status = f"ended with {await process.wait()}"
    lines = content.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else status or "no message"


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(_MAX_MESSAGE):
        pass
