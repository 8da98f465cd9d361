"""Programming of FPGA ports as part of preparing a claim, in place of the hook of the container runtime."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

from accelplane.devices import Unit
from accelplane.dra.journal import ResetPort
from accelplane.dra.model import ClaimError
from accelplane.fpga import FpgaError
from accelplane.fpga.bitstream import EXTENSIONS, Bitstream, open_bitstream
from accelplane.fpga.drivers import parse_name
from accelplane.fpga.ids import IdError, requested_id
from accelplane.fpga.ioctl import system_call
from accelplane.fpga.program import program, region_count
from accelplane.fpga.store import STORE, open_installed
from accelplane.fpga.sysfs import Port, afu_id, interface_of, read_port
from accelplane.host import Host, HostError

# How ports are programmed; tests replace it.
CALL = system_call


def ports_of(unit: Unit) -> Sequence[str]:
    """The device nodes of the unit's ports. Raises `ClaimError` if it has none."""
    found = [node.path for node in unit.nodes if (parse_name(node.path) or ("", ""))[1] == "port"]
    if not found:
        raise ClaimError(f"{unit.id} has no FPGA port, expected one to program")
    return found


def check(host: Host, ports: Sequence[str], afu: str) -> None:
    """Raises `FpgaError` or `HostError` if a port could not be programmed, before anything is changed."""
    for node in ports:
        port = read_port(host, node)
        with _bitstream(host, port, afu) as bitstream:
            program(host, port, bitstream, call=CALL, dry_run=True)


def program_ports(host: Host, ports: Sequence[str], afu: str) -> str:
    """Programs the ports that have another function, and verifies them. Returns the function's ID.

    Raises `FpgaError` or `HostError`.
    """
    found = ""
    for node in ports:
        port = read_port(host, node)
        with _bitstream(host, port, afu) as bitstream:
            program(host, port, bitstream, call=CALL, unless=bitstream.unique)
            found = bitstream.accelerator
        if problem := _mismatch(host, port, found):
            raise FpgaError(problem)
    return found


def mismatch(host: Host, ports: Sequence[str], afu: str) -> str:
    """Why the ports do not have the function, empty if they have it."""
    try:
        return next(filter(None, (_mismatch(host, read_port(host, node), afu) for node in ports)), "")
    except (FpgaError, HostError) as error:
        return str(error)


def reset(host: Host, step: ResetPort) -> None:
    """Resets the port, if it still exists. Raises `FpgaError` or `HostError`."""
    if not host.exists(step.node):
        return
    port = read_port(host, step.node)
    if step.address in ("", port.pci.address):
        # Both drivers reset a port when its last descriptor is closed.
        region_count(host, port, call=CALL)


def _mismatch(host: Host, port: Port, expected: str) -> str:
    found = afu_id(host, port)
    if found == expected:
        return ""
    return f"{port.name}: AFU id is {found or 'not readable while it is programmed'}, expected {expected}"


def _bitstream(host: Host, port: Port, afu: str) -> AbstractContextManager[Bitstream]:
    """Opens the bitstream with an ID, or the file with a name in the port's region. Raises `FpgaError`."""
    region = interface_of(port)
    try:
        return open_installed(host, region, requested_id(afu), STORE)
    except IdError:
        pass
    directory = f"{STORE}/{region}"
    for extension in EXTENSIONS:
        path = f"{directory}/{afu}{extension}"
        if host.exists(path):
            home, found = host.resolve(STORE), host.resolve(path)
            if not found.startswith(f"{home}/") or os.path.splitext(found)[1] != extension:
                raise FpgaError(f"{path}: resolves to {found}, expected a file {extension} within the store")
            return open_bitstream(path, host.open)
    raise FpgaError(f"no bitstream {afu} in {directory}, expected {afu}{EXTENSIONS[0]}; use fpga_tool install")
