"""`intel_gpu_levelzero`: serves health, temperatures, memory and indices of GPUs to the GPU plugin on a Unix socket.

All native code runs in a worker process. The command ends with 255 if it cannot listen, or if Level-Zero cannot be
initialized at the start.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence

from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Flag, parse_or_exit
from accelplane.cli.untilsignal import until_signal
from accelplane.gpuservices.levelzero_service import LevelZeroService
from accelplane.gpuservices.zeprocess import InitError, Limits, ZeProcess
from accelplane.kubelet import sockets
from accelplane.logs import v
from accelplane.rpc import RpcServer

log = logging.getLogger(__name__)

PROGRAM = "intel_gpu_levelzero"
FATAL = 255
FLAGS = (
    Flag("socket", "/var/lib/levelzero/server.sock", "Unix socket to listen on"),
    Flag("wsl", False, "initialize the core API, for Windows Subsystem for Linux (WSL)"),
    Flag("call-timeout", 1.2, "seconds that the driver has for a request; the GPU plugin waits for 2"),
    *logflags.FLAGS,
)
_MARGIN = 0.3  # seconds of a request that are not the driver's


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 255 for fatal errors, 2 for invalid flags."""
    signals.end_at_once()
    given = parse_or_exit(PROGRAM, FLAGS, arguments, lenient=True)
    values = {flag.name: flag.default for flag in FLAGS} | given
    try:
        logflags.start(given, PROGRAM)
        timeout = float(values["call-timeout"])
        if not timeout > 0:
            raise ValueError(f"-call-timeout: found {timeout:g}, expected more than 0")
        limits = Limits(call=timeout, request=timeout + _MARGIN)
        process = ZeProcess("core" if values["wsl"] else "sysman", int(values["v"]), limits)
        asyncio.run(run(str(values["socket"]), process))
    except (InitError, ValueError) as error:
        log.critical("%s", error)
        return FATAL
    except OSError as error:
        log.critical("%s: cannot listen: %s", values["socket"], error.strerror or error)
        return FATAL
    return 0


async def run(socket: str, process: ZeProcess) -> None:
    """Serves until SIGTERM or SIGINT, and removes the socket. Raises `InitError`, or `OSError` if it cannot listen."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(socket)
    server = RpcServer(LevelZeroService(process).methods())
    await server.start(socket)
    own = sockets.identity(socket)
    log.log(v(1), "listening on %s", socket)
    try:
        await until_signal(process.run())
    finally:
        if sockets.identity(socket) == own:
            os.unlink(socket)
        await server.stop()
