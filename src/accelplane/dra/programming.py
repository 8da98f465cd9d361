"""Programming of FPGA ports as part of preparing a claim, in place of the hook of the container runtime."""

import contextlib
from collections.abc import Generator, Sequence

from accelplane.devices import Unit
from accelplane.dra.journal import ResetPort
from accelplane.dra.model import ClaimError
from accelplane.fpga import FpgaError, program
from accelplane.fpga.bitstream import EXTENSIONS, Bitstream, open_bitstream
from accelplane.fpga.drivers import parse_name
from accelplane.fpga.ids import IdError, canonical, requested_id
from accelplane.fpga.ioctl import system_call
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
        if afu_id(host, port) != canonical(afu):
            with _bitstream(host, port, afu) as bitstream:
                program.program(host, port, bitstream, call=CALL, dry_run=True)


def program_ports(host: Host, ports: Sequence[str], afu: str) -> str:
    """Programs the ports that have another function, and reads it back. Returns the function's ID.

    Raises `FpgaError` or `HostError`.
    """
    found = ""
    for node in ports:
        port = read_port(host, node)
        if afu_id(host, port) == canonical(afu):
            found = canonical(afu)
            continue
        with _bitstream(host, port, afu) as bitstream:
            # OpenCL designs of one board have the same function ID, so their ports are always programmed.
            program.program(host, port, bitstream, call=CALL, unless=bitstream.unique)
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
        program.reset(host, port, call=CALL)


def _mismatch(host: Host, port: Port, expected: str) -> str:
    found = afu_id(host, port)
    if found == expected:
        return ""
    return f"{port.name}: AFU id is {found or 'not readable while it is programmed'}, expected {expected}"


@contextlib.contextmanager
def _bitstream(host: Host, port: Port, afu: str) -> Generator[Bitstream]:
    """Opens the bitstream with an ID, or the file with a name in the port's region. Raises `FpgaError`."""
    region = interface_of(port)
    try:
        requested = requested_id(afu)
    except IdError:
        with open_bitstream(_named(host, region, afu), host.open) as bitstream:
            yield bitstream
        return
    with open_installed(host, region, requested, STORE) as bitstream:
        if bitstream.unique != requested:
            raise FpgaError(
                f"{bitstream.path}: found id {bitstream.unique or 'none'} in the file, expected {requested}"
            )
        yield bitstream


def _named(host: Host, region: str, name: str) -> str:
    """The path of the file with a name in the directory of the region. Raises `FpgaError`."""
    for extension in EXTENSIONS:
        path = f"{STORE}/{region}/{name}{extension}"
        if host.exists(path):
            home, found = host.resolve(STORE), host.resolve(path)
            if not found.startswith(f"{home}/"):
                raise FpgaError(f"{path}: resolves to {found}, expected a file within the store")
            return path
    raise FpgaError(f"{STORE}/{region}/{name}{EXTENSIONS[0]}: no such file; install it, or use the ID of its function")
