"""Numbers and structures of the drivers' ioctls, and the only place that opens device nodes.

A number is `direction << 30 | size << 16 | magic << 8 | number` (asm-generic/ioctl.h). Nearly all are `_IO` (without
direction and size) in both families; DFL's release and assign are `_IOW` of an int. Structures are little-endian with
natural alignment; `argsz` is the full size of a structure and `flags` are 0 (include/uapi/linux/
fpga-dfl.h; OPAE's intel-fpga.h).

    buffer = pack_port_info(DFL)
    call("/dev/dfl-port.0", request(DFL, "port-info"), buffer)
    unpack_region_count(DFL, buffer)

Opening a port has a side effect: DFL resets the port when its last descriptor is closed.
"""

import errno
import os
import struct
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from accelplane.descriptors import closing
from accelplane.fpga import FpgaError
from accelplane.fpga.drivers import DFL, OPAE, Driver

# Opens the node for reading and writing, performs one ioctl, and closes it. The argument is a number or a structure,
# which the driver may modify. Returns the driver's result. Raises `OSError`.
Call: TypeAlias = Callable[[str, int, bytearray | int], int]

Operation: TypeAlias = Literal["api-version", "reset", "port-info", "port-region", "program", "release", "assign"]
_OPERATIONS: dict[Operation, tuple[int, str]] = {
    "api-version": (0x00, "reading the API version"),
    "reset": (0x40, "resetting the port"),
    "port-info": (0x41, "reading the port's properties"),
    "port-region": (0x42, "reading a region of the port"),
    "program": (0x80, "programming"),
    "release": (0x81, "releasing the port"),
    "assign": (0x82, "assigning the port"),
}
_IOW = 1 << 30

_INFO_DFL = struct.Struct("<4I")  # argsz, flags, regions, user messages
_INFO_OPAE = struct.Struct("<6I")  # argsz, flags, capability, regions, user messages, user interrupts
_REGION = struct.Struct("<4I2Q")
_PROGRAM_DFL = struct.Struct("<4IQ")
_PROGRAM_OPAE = struct.Struct("<4I2Q")
_PORT_DFL = struct.Struct("<i")
_PORT_OPAE = struct.Struct("<3I")

# Bits of the status that OPAE's driver returns if the hardware rejects a bitstream (EIO).
_PROGRAM_ERRORS = (
    "operation", "CRC", "incompatible bitstream", "IP protocol", "FIFO overflow", "timeout", "secure load",
)  # fmt: skip


class PortRegion(NamedTuple):
    """A region of a port's memory; flags are 1 read, 2 write, 4 mmap."""

    flags: int
    number: int
    size: int
    offset: int


class IoctlError(FpgaError):
    """An ioctl failed with `errno`."""

    def __init__(self, node: str, operation: Operation, number: int, bitmap: int = 0) -> None:
        """`bitmap` is OPAE's status of a bitstream that the hardware rejected."""
        reason = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
        if bitmap:
            bits = [word for place, word in enumerate(_PROGRAM_ERRORS) if bitmap >> place & 1] or ["unknown"]
            reason += f", hardware errors {bitmap:#x} ({', '.join(bits)})"
        super().__init__(f"{node}: {_OPERATIONS[operation][1]} failed: {reason}{_advice(operation, number)}")
        self.errno = number


def system_call(node: str, request: int, argument: bytearray | int) -> int:
    """The `Call` of the operating system."""
    import fcntl  # noqa: PLC0415 - not needed to read bitstreams

    with closing(os.open(node, os.O_RDWR | os.O_CLOEXEC)) as descriptor:
        return fcntl.ioctl(descriptor, request, argument)


def request(driver: Driver, operation: Operation) -> int:
    number = driver.magic << 8 | _OPERATIONS[operation][0]
    if driver is DFL and operation in ("release", "assign"):
        number |= _IOW | _PORT_DFL.size << 16
    return number


def perform(call: Call, driver: Driver, node: str, operation: Operation, argument: bytearray | int = 0) -> int:
    """Performs an ioctl and returns the driver's result. Raises `IoctlError`."""
    try:
        return call(node, request(driver, operation), argument)
    except OSError as error:
        bitmap = 0
        if operation == "program" and error.errno == errno.EIO and isinstance(argument, bytearray):
            bitmap = unpack_program_status(driver, argument)
        raise IoctlError(node, operation, error.errno or 0, bitmap) from None


def pack_port_info(driver: Driver) -> bytearray:
    """Returns the structure that the driver fills for `port-info`."""
    layout = _INFO_OPAE if driver is OPAE else _INFO_DFL
    return bytearray(layout.pack(layout.size, *[0] * (layout.size // 4 - 1)))


def unpack_region_count(driver: Driver, buffer: bytearray) -> int:
    return int(_INFO_OPAE.unpack(buffer)[3] if driver is OPAE else _INFO_DFL.unpack(buffer)[2])


def pack_port_region(number: int) -> bytearray:
    """Returns the structure that the driver fills for `port-region`."""
    return bytearray(_REGION.pack(_REGION.size, 0, number, 0, 0, 0))


def unpack_port_region(buffer: bytearray) -> PortRegion:
    _argsz, flags, number, _padding, size, offset = _REGION.unpack(buffer)
    return PortRegion(flags, number, size, offset)


def pack_program(driver: Driver, port: int, size: int, address: int) -> bytearray:
    """Returns the structure for `program`: the port's number, size and address of the bitstream."""
    if driver is OPAE:
        return bytearray(_PROGRAM_OPAE.pack(_PROGRAM_OPAE.size, 0, port, size, address, 0))
    return bytearray(_PROGRAM_DFL.pack(_PROGRAM_DFL.size, 0, port, size, address))


def unpack_program_status(driver: Driver, buffer: bytearray) -> int:
    """Returns the error bitmap, which is 0 with DFL."""
    return int(_PROGRAM_OPAE.unpack(buffer)[-1]) if driver is OPAE else 0


def pack_port(driver: Driver, port: int) -> bytearray:
    """Returns the structure for `release` and `assign`."""
    return bytearray(_PORT_OPAE.pack(_PORT_OPAE.size, 0, port) if driver is OPAE else _PORT_DFL.pack(port))


def _advice(operation: Operation, number: int) -> str:
    if number in (errno.EACCES, errno.EPERM):
        return "; run as root"
    if number in (errno.ENOENT, errno.ENXIO):
        return "; load the FPGA driver"
    if operation == "program" and number == errno.EIO:
        return "; the bitstream is for another card, or the card failed: see the kernel log (dmesg)"
    if operation == "program" and number == errno.EINVAL:
        return "; the FME has no such port"
    if number == errno.EBUSY:
        return "; it is in use, or already in that state"
    return ""
