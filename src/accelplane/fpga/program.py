"""Programming of ports, and other operations on device nodes. The only module that changes FPGA hardware.

The FME's node programs the port with a given number. A lock file per FME in `statedir` serializes processes, and the
AFU id is read again under the lock. Drivers return EBUSY or EAGAIN while another process has the node open, and the AFU
id is unavailable while the port is disabled; both are retried until a timeout.
"""

import contextlib
import errno
import os
import signal
import time
from array import array
from collections.abc import Generator
from typing import Literal, NamedTuple

from accelplane.descriptors import closing
from accelplane.fpga import FpgaError, ioctl
from accelplane.fpga.bitstream import Bitstream
from accelplane.fpga.ids import hardware_id
from accelplane.fpga.ioctl import Call, IoctlError, PortRegion, system_call
from accelplane.fpga.statedir import STATE_DIRECTORY, state_directory
from accelplane.fpga.sysfs import Fme, Port, afu_id, interface_of, port_number
from accelplane.host import Host, HostError

_TRANSIENT = (errno.EBUSY, errno.EAGAIN, errno.EINTR)
_REGIONS_LIMIT = 64
_PORTS_LIMIT = 1 << 31


class TimedOut(FpgaError):
    """A timeout expired."""


class RetryPolicy(NamedTuple):
    """The timeout of an operation, and number and interval of attempts while the driver is busy."""

    timeout: float = 60.0
    attempts: int = 40
    interval: float = 0.25


DEFAULT_RETRY = RetryPolicy()


def program(
    host: Host,
    port: Port,
    bitstream: Bitstream,
    *,
    call: Call = system_call,
    unless: str = "",
    dry_run: bool = False,
    retry: RetryPolicy = DEFAULT_RETRY,
) -> bool:
    """Programs the port and verifies its AFU id. Returns whether it programmed it.

    Does nothing if the AFU id is `unless`. A dry run performs all checks only. Programming is counted in `record`;
    a failure to count is a note of `host`.
    Raises `FpgaError` or `HostError`.
    """
    interface = interface_of(port)
    if bitstream.interface != interface:
        raise FpgaError(
            f"{bitstream.path}: made for regions with interface id {bitstream.interface or 'unknown'}, "
            f"that of {port.name} is {interface}"
        )
    expected = hardware_id(bitstream.accelerator, f"{bitstream.path}: accelerator type id")
    port_number(port)
    deadline = time.monotonic() + retry.timeout
    if dry_run:
        bitstream.read()
        return False
    with _lock(host, port.fme, deadline, retry):
        if unless and afu_id(host, port) == unless:
            return False
        node, data = host.local(port.fme.node), bitstream.read()
        with _count_programming(host, port, interface, expected):
            _program(call, port, node, data, deadline=deadline, retry=retry)
            problem = f"{port.name}: port is still disabled {retry.timeout:.3g} s after programming started"
            with _timeout_message(problem):
                while (found := afu_id(host, port)) is None:
                    _wait(deadline, retry)
            if found != expected:
                raise FpgaError(
                    f"{port.name}: AFU id is {found} after programming {bitstream.path}, expected {expected}"
                )
    return True


def move(
    host: Host, fme: Fme, operation: Literal["release", "assign"], number: int, *, call: Call = system_call
) -> None:
    """Releases the port from the physical function, for use by a virtual function, or assigns it to that again.

    Raises `FpgaError`.
    """
    if not 0 <= number < _PORTS_LIMIT:
        raise FpgaError(f"port {number} of {fme.name}: expected a number from 0")
    with _lock(host, fme, time.monotonic() + DEFAULT_RETRY.timeout, DEFAULT_RETRY):
        ioctl.perform(call, fme.driver, host.local(fme.node), operation, ioctl.pack_port(fme.driver, number))


def reset(host: Host, port: Port, *, call: Call = system_call) -> None:
    """Resets the function in the port. Raises `IoctlError`."""
    ioctl.perform(call, port.driver, host.local(port.node), "reset")


def api_version(host: Host, device: Port | Fme, *, call: Call = system_call) -> int:
    """Returns the API version of the driver. Raises `IoctlError`."""
    return ioctl.perform(call, device.driver, host.local(device.node), "api-version")


def region_count(host: Host, port: Port, *, call: Call = system_call) -> int:
    """Returns the number of the port's memory regions. Raises `IoctlError`."""
    buffer = ioctl.pack_port_info(port.driver)
    ioctl.perform(call, port.driver, host.local(port.node), "port-info", buffer)
    return ioctl.unpack_region_count(port.driver, buffer)


def port_regions(host: Host, port: Port, count: int, *, call: Call = system_call) -> list[PortRegion]:
    """Returns the first `count` memory regions of the port. Raises `IoctlError`."""
    regions: list[PortRegion] = []
    for number in range(min(count, _REGIONS_LIMIT)):
        buffer = ioctl.pack_port_region(number)
        ioctl.perform(call, port.driver, host.local(port.node), "port-region", buffer)
        regions.append(ioctl.unpack_port_region(buffer))
    return regions


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Generator[None]:
    """Raises `TimedOut` in the block after some seconds, also in a blocked system call, by SIGALRM.

    Only in the main thread. Does not end an uninterruptible system call.
    """

    def on_alarm(_signal: int, _frame: object) -> None:
        raise TimedOut(f"{what} took more than {seconds:g} s; check the kernel log (dmesg) for the FPGA driver")

    handler = signal.signal(signal.SIGALRM, on_alarm)
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])  # the parent process may have blocked it
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def _count_programming(host: Host, port: Port, interface: str, afu: str) -> Generator[None]:
    """Counts the programming in the block, with its outcome."""
    from accelplane.fpga import record  # noqa: PLC0415 - not needed if all ports have their AFU

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


def _program(call: Call, port: Port, node: str, data: "array[int]", *, deadline: float, retry: RetryPolicy) -> None:
    number, driver = port_number(port), port.driver
    address, size = data.buffer_info()
    attempts, last_error = 0, ""
    try:
        while True:
            argument = ioctl.pack_program(driver, number, size, address)
            try:
                ioctl.perform(call, driver, node, "program", argument)
                return
            except IoctlError as error:
                attempts, last_error = attempts + 1, str(error)
                if error.errno not in _TRANSIENT or attempts >= retry.attempts or time.monotonic() >= deadline:
                    raise
            _pause(deadline, retry)
    except TimedOut as error:
        raise TimedOut(f"{error}; last error: {last_error}" if last_error else str(error)) from None


@contextlib.contextmanager
def _lock(host: Host, fme: Fme, deadline: float, retry: RetryPolicy) -> Generator[None]:
    path = f"{STATE_DIRECTORY}/{fme.name}.lock"
    try:
        with state_directory(host) as directory:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(f"{fme.name}.lock", flags, 0o600, dir_fd=directory)
    except OSError as error:
        advice = "; run as root" if error.errno in (errno.EACCES, errno.EPERM) else ""
        raise FpgaError(f"{path}: cannot be locked: {error.strerror}{advice}") from None
    with closing(descriptor):
        with _timeout_message(f"{fme.name}: locked by another process for {retry.timeout:.3g} s ({path})"):
            while not _try_lock(descriptor, path):
                _wait(deadline, retry)
        yield


def _try_lock(descriptor: int, path: str) -> bool:
    import fcntl  # noqa: PLC0415 - not needed if all ports have their AFU

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        raise FpgaError(f"{path}: cannot be locked: {error.strerror}") from None


@contextlib.contextmanager
def _timeout_message(problem: str) -> Generator[None]:
    """Sets the message of `TimedOut`, raised by the deadline or by `time_limit`."""
    try:
        yield
    except TimedOut:
        raise TimedOut(problem) from None


def _wait(deadline: float, retry: RetryPolicy) -> None:
    """Waits for the next attempt. Raises `TimedOut`."""
    if time.monotonic() >= deadline:
        raise TimedOut("timed out")
    _pause(deadline, retry)


def _pause(deadline: float, retry: RetryPolicy) -> None:
    time.sleep(max(0.0, min(retry.interval, deadline - time.monotonic())))
