"""The OCI hook: programs the requested AFUs into the FPGA ports of a container.

The runtime runs it in the host's namespaces before it starts the container. If it fails, the container does not start,
and `kubectl describe pod` shows its message. It runs once per region device, each time for all of them, so ports with
the requested AFU are skipped.
"""

import os
import time

from accelplane.descriptors import read_limited
from accelplane.fpga import FpgaError, quote
from accelplane.fpga.ids import AFU_VARIABLE, CRASHED, MODE_ANNOTATION, REGION_MODE, REGION_VARIABLE
from accelplane.fpga.ioctl import Call, system_call
from accelplane.fpga.program import DEFAULT_RETRY, RetryPolicy, TimedOut, program, time_limit
from accelplane.fpga.request import CONFIG_LIMIT, Pair, Request, parse_config, parse_state
from accelplane.fpga.store import STORE, open_installed
from accelplane.fpga.sysfs import Port, afu_id, interface_of, read_port
from accelplane.host import Host, HostError

# Paths of bundles are long, and messages need all of them.
_LONGEST_PATH = 4096


def read_request(state: bytes, *, require_mode: bool = False) -> Request:
    """Returns the request in the container's bundle. Raises `FpgaError`.

    With `require_mode` the annotation of the plugin's region mode is required.
    """
    found = parse_state(state)
    if require_mode and found.mode != REGION_MODE:
        raise FpgaError(f"annotation {MODE_ANNOTATION} is {quote(found.mode)}, expected {REGION_MODE}")
    if not os.path.isdir(found.bundle):
        raise FpgaError(f"bundle {quote(found.bundle, _LONGEST_PATH)}: no such directory")
    path = os.path.join(found.bundle, "config.json")
    try:
        return parse_config(read_limited(path, CONFIG_LIMIT), path)
    except OSError as error:
        raise FpgaError(f"{quote(path, _LONGEST_PATH)}: {error.strerror}") from None


def run(
    host: Host, request: Request, *, call: Call = system_call, store: str = STORE, retry: RetryPolicy = DEFAULT_RETRY
) -> None:
    """Programs the pairs in their order. Only in the main thread. Raises `FpgaError`.

    Every pair gets a port before the first one is programmed.
    """
    deadline = time.monotonic() + retry.timeout
    with time_limit(retry.timeout, "programming for this container"):
        for pair, port in assign_ports(host, request):
            remaining = retry._replace(timeout=max(0.0, deadline - time.monotonic()))
            try:
                if afu_id(host, port) == pair.afu:
                    continue
                with open_installed(host, pair.region, pair.afu, store) as bitstream:
                    if bitstream.unique != pair.afu:
                        raise FpgaError(
                            f"{bitstream.path}: found id {bitstream.unique or 'none'} in the file, expected "
                            f"{pair.afu}; the file was renamed or replaced"
                        )
                    program(host, port, bitstream, call=call, unless=pair.afu, retry=remaining)
            except (FpgaError, HostError) as error:
                raise FpgaError(f"{AFU_VARIABLE}{pair.number} in {port.name}: {error}") from error


def assign_ports(host: Host, request: Request) -> list[tuple[Pair, Port]]:
    """Assigns each pair the first unassigned port of its region. Raises `FpgaError`.

    A device of the container is a port only if it has the number that the port has on the host.
    """
    available: dict[str, tuple[str, Port]] = {}
    found: list[str] = []
    for name, number in request.ports:
        try:
            port = read_port(host, f"/dev/{name}")
            if (port.name, port.dev) != (name, number):
                raise FpgaError(
                    f"/dev/{name}: found device number {number} in the container, on the host {quote(port.dev)} of "
                    f"{port.name}; expected the same"
                )
            interface = interface_of(port)
        except TimedOut:
            raise  # the alarm has fired: the next blocked call would not end
        except (FpgaError, HostError) as error:
            found.append(str(error))
            continue
        available[name] = (interface, port)
        crashed = " (the card has crashed)" if interface == CRASHED else ""
        found.append(f"{name} has region {interface}{crashed}")
    assigned: list[tuple[Pair, Port]] = []
    for pair in request.pairs:
        name = next((name for name, (interface, _port) in available.items() if interface == pair.region), None)
        if name is None:
            used = "".join(f"; {port.name} is assigned to {REGION_VARIABLE}{other.number}" for other, port in assigned)
            raise FpgaError(
                f"{REGION_VARIABLE}{pair.number}: found no port of region {pair.region} in the container: "
                f"{'; '.join(found)}{used}"
            )
        assigned.append((pair, available.pop(name)[1]))
    return assigned
