"""What the OCI hook does: every port that a container was given for a region gets the AFU that it asks for.

The runtime runs it before the container's own program, in the host's namespaces; when it fails, the container does not
start, and its message is what `kubectl describe pod` shows. A container with several regions has the hook run as often
as it has regions, each time for all of them: what is in place already is left alone.
"""

import os
import stat
import time
from typing import NamedTuple

from accelplane.fpga import FpgaError, shown
from accelplane.fpga.ids import AFU_VARIABLE, CRASHED, MODE_ANNOTATION, REGION_MODE, REGION_VARIABLE
from accelplane.fpga.ioctl import Call, system_call
from accelplane.fpga.program import PATIENCE, Patience, TimedOut, limited, program
from accelplane.fpga.request import CONFIG_LIMIT, Pair, Request, parse_config, parse_state
from accelplane.fpga.store import STORE, opened_for
from accelplane.fpga.sysfs import Port, afu_id, interface_of, read_port
from accelplane.host import Host, HostError

# A bundle's path is long, and who looks for its fault has to find it.
_LONGEST_PATH = 4096


class HookError(FpgaError):
    """The container cannot have what it asks for; the message names the variables, the port and the reason."""


class Outcome(NamedTuple):
    """What became of a pair: which port it was given, and whether that had to be programmed."""

    pair: Pair
    port: str
    programmed: bool


def read_request(state: bytes, *, require_mode: bool = False) -> Request:
    """What the container of that state asks for; its bundle is read. Raises `HookError`, `RequestError` or `IdError`.

    With `require_mode` the container must have been given its ports by the plugin's region mode.
    """
    found = parse_state(state)
    if require_mode and found.mode != REGION_MODE:
        raise HookError(f"annotation {MODE_ANNOTATION} is {shown(found.mode)}, expected {REGION_MODE}")
    if not os.path.isdir(found.bundle):
        raise HookError(f"bundle {shown(found.bundle, _LONGEST_PATH)}: no such directory")
    path = os.path.join(found.bundle, "config.json")
    try:
        # O_NONBLOCK: a FIFO must not hold the runtime.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise HookError(f"{shown(path, _LONGEST_PATH)}: not a regular file")
            data = file.read(min(status.st_size, CONFIG_LIMIT) + 1)
    except OSError as error:
        raise HookError(f"{shown(path, _LONGEST_PATH)}: {error.strerror}") from None
    return parse_config(data, path)


def run(
    host: Host,
    request: Request,
    *,
    call: Call = system_call,
    store: str = STORE,
    patience: Patience = PATIENCE,
) -> tuple[Outcome, ...]:
    """Programs what is not in place yet, in the pairs' order. Only in the main thread. Raises `HookError`.

    No port is programmed before every pair has one.
    """
    deadline = time.monotonic() + patience.seconds
    outcomes: list[Outcome] = []
    with limited(patience.seconds, "programming for this container"):
        for pair, port in claims(host, request):
            left = patience._replace(seconds=max(0.0, deadline - time.monotonic()))
            try:
                programmed = _ensure(host, pair, port, call=call, store=store, patience=left)
            except (FpgaError, HostError) as error:
                raise HookError(f"{AFU_VARIABLE}{pair.number} in {port.name}: {error}") from error
            outcomes.append(Outcome(pair, port.name, programmed))
    return tuple(outcomes)


def claims(host: Host, request: Request) -> list[tuple[Pair, Port]]:
    """A port for each pair, none twice: the first of the container's that has the region. Raises `HookError`."""
    left: dict[str, tuple[str, Port]] = {}
    known: list[str] = []
    for name in request.ports:
        try:
            port = read_port(host, f"/dev/{name}")
            interface = interface_of(port)
        except TimedOut:
            raise  # the time for all of it is over, and nothing would end what hangs next
        except (FpgaError, HostError) as error:
            known.append(str(error))
            continue
        left[name] = (interface, port)
        crashed = " (what a crashed card says)" if interface == CRASHED else ""
        known.append(f"{name} is of region {interface}{crashed}")
    claimed: list[tuple[Pair, Port]] = []
    for pair in request.pairs:
        name = next((name for name, (interface, _port) in left.items() if interface == pair.region), None)
        if name is None:
            taken = "".join(f"; {port.name} is for {REGION_VARIABLE}{other.number}" for other, port in claimed)
            raise HookError(
                f"{REGION_VARIABLE}{pair.number}: the container has no port of region {pair.region} for it: "
                f"{'; '.join(known)}{taken}"
            )
        claimed.append((pair, left.pop(name)[1]))
    return claimed


def _ensure(host: Host, pair: Pair, port: Port, *, call: Call, store: str, patience: Patience) -> bool:
    """Whether the port had to be programmed."""
    if afu_id(host, port) == pair.afu:
        return False
    with opened_for(host, pair.region, pair.afu, store) as bitstream:
        if bitstream.unique != pair.afu:
            raise HookError(f"{bitstream.path}: is the bitstream of {bitstream.unique or 'nothing known'} by its "
                            f"content, expected {pair.afu}; was it renamed?")  # fmt: skip
        return program(host, port, bitstream, call=call, unless=pair.afu, patience=patience)
