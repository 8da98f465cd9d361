"""`accelplane clients`: serves the use of GPUs by containers to the agent on a Unix socket.

It needs the host's PID namespace and the capability SYS_PTRACE, which the agent does not have.
"""

import asyncio
import os
import sys
from collections.abc import Sequence

from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Flag, parse_or_exit
from accelplane.cli.untilsignal import until_signal
from accelplane.gpuclients.service import ClientsService, serving

PROGRAM = "accelplane clients"
FLAGS = (
    Flag("socket", "/run/accelplane-clients/clients.sock", "Unix socket to listen on; the directory must exist"),
    Flag("proc", "/proc", "procfs of the host's PID namespace"),
    *logflags.FLAGS,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if it cannot listen, 2 for flags."""
    signals.end_at_once()
    given = parse_or_exit(PROGRAM, FLAGS, arguments)
    values = {flag.name: flag.default for flag in FLAGS} | given
    socket, proc = os.path.abspath(str(values["socket"])), os.path.abspath(str(values["proc"]))
    try:
        logflags.start(given, PROGRAM.replace(" ", "-"))
        if not os.path.isdir(proc):
            raise ValueError(f"-proc: {proc}: not a directory, expected the host's procfs")
        asyncio.run(run(socket, ClientsService(proc)))
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{PROGRAM}: {_problem(error, socket)}", file=sys.stderr)
        return 1
    return 0


def _problem(error: OSError, socket: str) -> str:
    directory = os.path.dirname(socket)
    if not os.path.isdir(directory):
        found = "a file" if os.path.lexists(directory) else "no such directory"
        return f"-socket: {directory}: found {found}, expected a directory that the agent can see, too; create it"
    return f"-socket: {error.filename or socket}: {error.strerror or error}"


async def run(socket: str, service: ClientsService) -> None:
    """Serves until SIGTERM or SIGINT, and removes the socket. Raises `OSError` or `ValueError` if it cannot listen."""
    async with serving(socket, service):
        await until_signal()
