"""Programming a port, and what else is done through the device nodes. Here hardware changes; nothing else here decides.

Programming goes through the FME's node, with the port's number. Two that do so at once would each find the other's
function in the port, so whoever programs holds a lock, a file for each FME in `statedir`; whoever waits for it
looks again what is in the port before doing anything. Drivers refuse for a moment while the node is open elsewhere
(EBUSY, EAGAIN), and the port says nothing of its AFU id while it is disabled; both are waited for, but not forever.
"""

import contextlib
import errno
import os
import signal
import time
from array import array
from collections.abc import Generator
from typing import NamedTuple

from accelplane.fpga import FpgaError, ioctl
from accelplane.fpga.bitstream import Bitstream
from accelplane.fpga.ids import hardware_id
from accelplane.fpga.ioctl import Call, IoctlError, PortInfo, PortRegion, system_call
from accelplane.fpga.statedir import STATE_DIRECTORY, open_state_directory
from accelplane.fpga.sysfs import Fme, Port, afu_id, interface_of, port_number
from accelplane.host import Host, HostError

_TRANSIENT = (errno.EBUSY, errno.EAGAIN, errno.EINTR)
_REGIONS_LIMIT = 64
_PORTS_LIMIT = 1 << 31


class ProgramError(FpgaError):
    """A port was not programmed, or holds something else than it should."""


class TimedOut(ProgramError):
    """It took too long."""


class Patience(NamedTuple):
    """How long to wait for all of it, how often to try while the driver is busy, and how long to pause in between."""

    seconds: float = 60.0
    attempts: int = 40
    pause: float = 0.25


PATIENCE = Patience()


def program(
    host: Host,
    port: Port,
    bitstream: Bitstream,
    *,
    call: Call = system_call,
    unless: str = "",
    dry_run: bool = False,
    patience: Patience = PATIENCE,
) -> bool:
    """Programs the port and makes sure of what is in it then. Whether it was done.

    It is not where the port's AFU id is `unless` already, nor in a dry run, which tries everything short of it.
    It is counted (`record`); what keeps it from being counted is a note of `host`.
    Raises `ProgramError`, `TimedOut`, `IoctlError` (the driver refused), `BitstreamError`, `IdError`, `SysfsError` or
    `HostError`.
    """
    interface = interface_of(port)
    if bitstream.interface != interface:
        raise ProgramError(
            f"{bitstream.path}: made for regions with interface id {bitstream.interface or 'unknown'}, "
            f"that of {port.name} is {interface}"
        )
    expected = hardware_id(bitstream.accelerator, f"{bitstream.path}: accelerator type id")
    port_number(port)
    deadline = time.monotonic() + patience.seconds
    if dry_run:
        bitstream.read()
        return False
    with _locked(host, port.fme, deadline, patience):
        if unless and afu_id(host, port) == unless:
            return False
        node, data = host.local(port.fme.node), bitstream.read()
        with _recorded(host, port, interface, expected):
            _program(call, port, node, data, deadline=deadline, patience=patience)
            found = _settled(host, port, deadline, patience)
            if found != expected:
                raise ProgramError(
                    f"{port.name}: its AFU id is {found} after programming {bitstream.path}, expected {expected}"
                )
    return True


def release(host: Host, fme: Fme, number: int, *, call: Call = system_call, patience: Patience = PATIENCE) -> None:
    """Takes the port of that number from the physical function, so that a virtual one can have it.

    Raises `ProgramError`, `TimedOut` or `IoctlError`.
    """
    _move(host, fme, "release", number, call=call, patience=patience)


def assign(host: Host, fme: Fme, number: int, *, call: Call = system_call, patience: Patience = PATIENCE) -> None:
    """Gives the port back to the physical function. Raises as `release`."""
    _move(host, fme, "assign", number, call=call, patience=patience)


def reset(host: Host, port: Port, *, call: Call = system_call) -> None:
    """Resets what runs in the port. Raises `IoctlError`."""
    ioctl.perform(call, port.driver, host.local(port.node), "port-reset")


def api_version(host: Host, device: Port | Fme, *, call: Call = system_call) -> int:
    """The version of the driver's interface. Raises `IoctlError`."""
    return ioctl.perform(call, device.driver, host.local(device.node), "api-version")


def port_info(host: Host, port: Port, *, call: Call = system_call) -> PortInfo:
    """How many regions of memory the port has, and more. Raises `IoctlError`."""
    buffer = ioctl.pack_port_info(port.driver)
    ioctl.perform(call, port.driver, host.local(port.node), "port-info", buffer)
    return ioctl.unpack_port_info(port.driver, buffer)


def port_regions(host: Host, port: Port, info: PortInfo, *, call: Call = system_call) -> list[PortRegion]:
    """Its regions of memory. Raises `IoctlError`."""
    regions: list[PortRegion] = []
    for number in range(min(info.regions, _REGIONS_LIMIT)):
        buffer = ioctl.pack_port_region(number)
        ioctl.perform(call, port.driver, host.local(port.node), "port-region", buffer)
        regions.append(ioctl.unpack_port_region(buffer))
    return regions


@contextlib.contextmanager
def limited(seconds: float, what: str) -> Generator[None]:
    """Ends whatever is done within with `TimedOut`, also a call into a driver that does not return by itself.

    Only in the main thread. A call that the kernel does not let interrupt is waited for.
    """

    def ring(_signal: int, _frame: object) -> None:
        raise TimedOut(f"{what} took more than {seconds:g} s; see the kernel's log (dmesg) for the FPGA's driver")

    handler = signal.signal(signal.SIGALRM, ring)
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])  # it may be, by whoever started us
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def _recorded(host: Host, port: Port, interface: str, afu: str) -> Generator[None]:
    """Counts what is programmed within, however it ends."""
    from accelplane.fpga import record  # noqa: PLC0415 - not on the way of a hook that has nothing to do

    begun = time.monotonic()

    def add(outcome: record.Outcome, error: str = "") -> None:
        last = record.Last(round(time.time(), 3), port.name, interface, afu, outcome, error)
        record.add(host, port.fme.name, last, time.monotonic() - begun)

    try:
        yield
    except TimedOut:
        add("timed-out")
        raise
    except IoctlError as error:
        add("failed", errno.errorcode.get(error.errno, ""))
        raise
    except (FpgaError, HostError):
        add("failed")
        raise
    add("programmed")


def _program(call: Call, port: Port, node: str, data: "array[int]", *, deadline: float, patience: Patience) -> None:
    number, driver = port_number(port), port.driver
    address, size = data.buffer_info()
    attempts, refusal = 0, ""
    try:
        while True:
            argument = ioctl.pack_program(driver, number, size, address)
            try:
                ioctl.perform(call, driver, node, "program", argument)
                return
            except IoctlError as error:
                attempts, refusal = attempts + 1, str(error)
                if error.errno not in _TRANSIENT or attempts >= patience.attempts or time.monotonic() >= deadline:
                    raise
            _pause(deadline, patience)
    except TimedOut as error:
        raise TimedOut(f"{error}; before that {refusal}" if refusal else str(error)) from None


def _settled(host: Host, port: Port, deadline: float, patience: Patience) -> str:
    with _in_vain(f"{port.name}: still disabled {patience.seconds:.3g} s after its programming was begun"):
        while (found := afu_id(host, port)) is None:
            _wait(deadline, patience)
        return found


def _move(host: Host, fme: Fme, operation: ioctl.Operation, number: int, *, call: Call, patience: Patience) -> None:
    if not 0 <= number < _PORTS_LIMIT:
        raise ProgramError(f"port {number} of {fme.name}: expected a number from 0")
    with _locked(host, fme, time.monotonic() + patience.seconds, patience):
        ioctl.perform(call, fme.driver, host.local(fme.node), operation, ioctl.pack_port(fme.driver, number))


@contextlib.contextmanager
def _locked(host: Host, fme: Fme, deadline: float, patience: Patience) -> Generator[None]:
    path = f"{STATE_DIRECTORY}/{fme.name}.lock"
    try:
        directory = open_state_directory(host)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(f"{fme.name}.lock", flags, 0o600, dir_fd=directory)
        finally:
            os.close(directory)
    except OSError as error:
        advice = "; expected to run as root" if error.errno in (errno.EACCES, errno.EPERM) else ""
        raise ProgramError(f"{path}: cannot be locked: {error.strerror}{advice}") from None
    try:
        with _in_vain(f"{fme.name}: somebody else has been programming it for {patience.seconds:.3g} s ({path})"):
            while not _taken(descriptor, path):
                _wait(deadline, patience)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int, path: str) -> bool:
    import fcntl  # noqa: PLC0415 - not on the way of a hook that has nothing to do

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        raise ProgramError(f"{path}: cannot be locked: {error.strerror}") from None


@contextlib.contextmanager
def _in_vain(problem: str) -> Generator[None]:
    """Says what was waited for, whichever comes first, our own deadline or the alarm of `limited`."""
    try:
        yield
    except TimedOut:
        raise TimedOut(problem) from None


def _wait(deadline: float, patience: Patience) -> None:
    """Pauses. Raises `TimedOut`."""
    if time.monotonic() >= deadline:
        raise TimedOut("the time is over")
    _pause(deadline, patience)


def _pause(deadline: float, patience: Patience) -> None:
    time.sleep(max(0.0, min(patience.pause, deadline - time.monotonic())))
