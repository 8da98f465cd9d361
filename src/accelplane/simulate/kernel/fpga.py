"""FPGA cards: the class and platform devices of both drivers, and their ioctls.

Facts: the kernel's drivers/fpga/dfl*.c, include/uapi/linux/fpga-dfl.h and Documentation/fpga/dfl.rst; for the
out-of-tree driver, `intel-fpga`, its own documents. A port is disabled while it is programmed, and reading its
`afu_id` fails with EBUSY. Virtual functions have exactly the released ports. The reset at the last close of a port is
not emulated.

A bitstream for these cards begins with the 16 bytes of its AFU ID; others fail with EIO.
"""

import errno
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from accelplane.simulate.journal import Numbers
from accelplane.simulate.kernel.model import Attribute, oserror
from accelplane.simulate.kernel.pci import PciBus, PciDriver, PciFunction
from accelplane.simulate.offload import FpgaSpec

CRASHED = "f" * 32

_MAJOR = 240  # assigned dynamically by the kernel
_FME_MINORS = 128  # ports are counted from 0, management engines from here
_LONGEST_BITSTREAM = 1 << 28
_AFU_ID = 16
_HARDWARE_ERROR = 1 << 4  # returned by the out-of-tree driver with EIO: the bit of an incompatible bitstream

_API_VERSION, _CHECK_EXTENSION = 0x00, 0x01
_RESET, _PORT_INFO, _REGION_INFO = 0x40, 0x41, 0x42
_PROGRAM, _RELEASE, _ASSIGN = 0x80, 0x81, 0x82

# The result of a programming operation: an errno; the card hangs until a test continues it; the operation ends half
# way; the firmware crashes; another function than requested is programmed.
Outcome = Literal["EIO", "EBUSY", "EAGAIN", "EINVAL", "ENODEV", "hang", "half", "crash", "other"]


class Memory(Protocol):
    """The memory of the calling process. Both methods raise `OSError` EFAULT."""

    def read(self, address: int, length: int) -> bytes: ...

    def write(self, address: int, data: bytes) -> None: ...


class Layout(NamedTuple):
    """The differences between the two drivers."""

    driver: str
    module: str
    subsystem: str
    container: str
    fme: str
    port: str
    magic: int
    releases: tuple[int, int]


LAYOUTS: Mapping[str, Layout] = {
    "dfl": Layout(
        "dfl-pci", "dfl_pci", "fpga_region", "region", "dfl-fme.", "dfl-port.", 0xB6, (0x4004B681, 0x4004B682)
    ),
    "opae": Layout(
        "intel-fpga-pci", "intel_fpga_pci", "fpga", "intel-fpga-dev.", "intel-fpga-fme.", "intel-fpga-port.", 0xB5,
        (0xB581, 0xB582),
    ),
}  # fmt: skip


@dataclass(eq=False)
class Port:
    """One port of a card. `path` is its sysfs directory, empty while no function has it."""

    index: int
    afu: str
    disabled: bool = False
    released: bool = False
    name: str = ""
    path: str = ""

    def afu_id(self) -> str:
        """The content of `afu_id`. Raises `OSError` EBUSY."""
        if self.disabled:
            raise oserror(errno.EBUSY, self.path)
        return self.afu


class Card:
    """One card. `outcomes` are the results of the next programming operations; later ones succeed."""

    def __init__(self, spec: FpgaSpec) -> None:
        self.spec = spec
        self.interface = spec.interface
        self.ports = [Port(index, afu) for index, afu in enumerate(spec.afus)]
        self.outcomes: list[Outcome] = []
        self.attempts = 0
        self.resume = threading.Event()
        self.fme = ""
        self.fme_path = ""
        self.regions: list[str] = []

    def crash(self) -> None:
        """The firmware crashes: all IDs read as ones."""
        self.interface = CRASHED
        for port in self.ports:
            port.afu = CRASHED


class Programming:
    """A running programming operation of a port: call `wait` without the kernel's lock, then `finish` with it."""

    def __init__(self, card: Card, port: Port, afu: str, on_result: Callable[[int], None]) -> None:
        self._card = card
        self._port = port
        self._afu = afu
        self._on_result = on_result
        self._outcome = card.outcomes.pop(0) if card.outcomes else None
        card.attempts += 1
        card.resume.clear()
        port.disabled = True

    def wait(self) -> None:
        """Waits for the duration of the operation."""
        if self._outcome == "hang":
            self._card.resume.wait()
        elif self._card.spec.seconds:
            self._card.resume.wait(self._card.spec.seconds)

    def finish(self) -> int:
        """Enables the port again and sets its AFU. Raises `OSError`."""
        self._port.disabled = False
        match self._outcome:
            case None | "hang":
                afu, error = self._afu, "" if self._afu else "EIO"
            case "other":
                afu, error = f"{int(self._afu, 16) ^ 1:032x}", ""
            case "half":
                afu, error = "0" * 32, "EIO"
            case "crash":
                self._card.crash()
                afu, error = CRASHED, "EIO"
            case error:
                afu = self._port.afu
        self._port.afu = afu or self._port.afu
        if error == "EIO":
            self._on_result(_HARDWARE_ERROR)
        if error:
            raise oserror(getattr(errno, error), self._port.path)
        return 0


class FpgaDriver(PciDriver):
    """`dfl-pci`, or the out-of-tree `intel-fpga-pci`, for functions of both kinds."""

    ids: Sequence[str] = ("09c4", "09c5", "0b2b", "0b2c")

    def __init__(self, bus: PciBus, kind: Literal["dfl", "opae"], specs: Mapping[str, FpgaSpec]) -> None:
        super().__init__(bus)
        self.layout = LAYOUTS[kind]
        self.name = self.layout.driver
        self.module = self.layout.module
        self.directories = (f"/sys/class/{self.layout.subsystem}",)
        self.cards: dict[str, Card] = {}
        self._kind = kind
        self._specs = specs
        self._containers: dict[str, str] = {}

    def matches(self, device: PciFunction) -> bool:
        spec = self._specs.get((device.physfn or device).name)
        return spec is not None and spec.driver == self._kind and super().matches(device)

    def probe(self, device: PciFunction) -> None:
        name = self.core.unused_name(self.layout.container)
        container = f"{device.path}/{self.layout.subsystem}/{name}"
        self.core.add_class_device(container, self.layout.subsystem)
        self._containers[device.name] = container
        if device.physfn is not None:
            card = self.cards[device.physfn.name]
            port = next(port for port in card.ports if port.released and not port.path)
            self._show_port(card, port, container)
            return
        card = self.cards[device.name] = Card(self._specs[device.name])
        self._show_fme(card, container)
        for port in card.ports:
            self._show_port(card, port, container)

    def busy(self, device: PciFunction) -> bool:
        card = self.cards[(device.physfn or device).name]
        names = [port.name for port in card.ports if port.path.startswith(f"{self._containers[device.name]}/")]
        if device.physfn is None:
            names.append(card.fme)
        return super().busy(device) or any(self.core.users[name] for name in names)

    def release(self, device: PciFunction) -> None:
        card = self.cards[(device.physfn or device).name]
        container = self._containers[device.name]
        if device.physfn is None:
            self.configure_vfs(device, 0)
        for port in card.ports:
            if port.path.startswith(f"{container}/"):
                self._hide_port(port)
        if device.physfn is None:
            self._hide_fme(card)
            del self.cards[device.name]
        self.core.remove_class_device(container)
        self.core.tree.remove(f"{device.path}/{self.layout.subsystem}")
        del self._containers[device.name]

    def configure_vfs(self, function: PciFunction, count: int) -> None:
        released = sum(port.released for port in self.cards[function.name].ports)
        if count == 0:
            self.bus.disable_vfs(function)
        elif count != released:
            raise oserror(errno.EINVAL, function.path)
        else:
            self.bus.enable_vfs(function, count)

    def enable_vfs(self, function: PciFunction, count: int) -> None:
        """Releases the last `count` ports and enables as many virtual functions."""
        card = self.cards[function.name]
        for port in card.ports[len(card.ports) - count :]:
            self._hide_port(port)
            port.released = True
        self.configure_vfs(function, count)

    # Ioctls

    def ioctl(self, node: str, request: int, argument: int, memory: Memory) -> int | Programming:
        """Performs an ioctl on the node. Raises `OSError`."""
        card, port = self._find_node(node)
        if request >> 8 & 0xFF != self.layout.magic:
            raise oserror(errno.ENOTTY, node)
        number = request & 0xFF
        if request in self.layout.releases and port is None:
            self._move_port(card, number, argument, memory)
            return 0
        # Everything else is encoded as if it had no argument.
        if request >> 16:
            raise oserror(errno.EINVAL, node)
        if number in (_API_VERSION, _CHECK_EXTENSION):
            return 0
        if port is None and number == _PROGRAM:
            return self._program(card, argument, memory)
        if port is not None and number == _RESET and argument == 0:
            return 0
        if port is not None and number == _PORT_INFO:
            return self._port_info(argument, memory)
        if port is not None and number == _REGION_INFO:
            return _region_info(argument, memory)
        raise oserror(errno.EINVAL, node)

    def has(self, node: str) -> bool:
        try:
            self._find_node(node)
        except OSError:
            return False
        return True

    def _find_node(self, node: str) -> tuple[Card, Port | None]:
        for card in self.cards.values():
            if card.fme == node:
                return card, None
            for port in card.ports:
                if port.path and port.name == node:
                    return card, port
        raise oserror(errno.ENXIO, node)

    def _program(self, card: Card, argument: int, memory: Memory) -> Programming:
        size, flags, index, length, address = struct.unpack("<IIIIQ", memory.read(argument, 24))
        least = 24 if self._kind == "dfl" else 32
        if size < least or flags or index >= len(card.ports):
            raise oserror(errno.EINVAL)
        if not 0 < length <= _LONGEST_BITSTREAM:
            raise oserror(errno.EINVAL)
        port = card.ports[index]
        if port.disabled:
            raise oserror(errno.EBUSY)
        bitstream = memory.read(address, length)
        afu = bitstream[:_AFU_ID].hex() if len(bitstream) >= _AFU_ID and any(bitstream[:_AFU_ID]) else ""

        def on_result(errors: int) -> None:
            if self._kind == "opae":
                memory.write(argument + 24, struct.pack("<Q", errors))

        return Programming(card, port, afu, on_result)

    def _move_port(self, card: Card, number: int, argument: int, memory: Memory) -> None:
        if self._kind == "dfl":
            (index,) = struct.unpack("<i", memory.read(argument, 4))
        else:
            size, flags, index = struct.unpack("<III", memory.read(argument, 12))
            if size < 12 or flags:
                raise oserror(errno.EINVAL)
        if not 0 <= index < len(card.ports):
            raise oserror(errno.ENODEV)
        port = card.ports[index]
        function = next(self.bus.devices[name] for name, one in self.cards.items() if one is card)
        if number == _RELEASE:
            if port.released or self.core.users[port.name]:
                raise oserror(errno.EBUSY)
            self._hide_port(port)
            port.released = True
        else:
            if not port.released or function.virtual:
                raise oserror(errno.EBUSY)
            port.released = False
            self._show_port(card, port, self._containers[function.name])

    def _port_info(self, argument: int, memory: Memory) -> int:
        size = 16 if self._kind == "dfl" else 24
        given, _flags = struct.unpack("<II", memory.read(argument, 8))
        if given < size:
            raise oserror(errno.EINVAL)
        counts = (2, 0) if self._kind == "dfl" else (0, 2, 0, 0)
        memory.write(argument + 4, struct.pack(f"<I{len(counts)}I", 0, *counts))
        return 0

    # Sysfs entries

    def _show_fme(self, card: Card, container: str) -> None:
        card.fme = self.core.unused_name(self.layout.fme)
        card.fme_path = f"{container}/{card.fme}"
        self.core.add_class_device(card.fme_path, "platform", self._free(_FME_MINORS), card.fme, bus=True)
        self.core.tree.directory(
            card.fme_path,
            {
                "bitstream_id": "0x23000410010310",
                "bitstream_metadata": "0x1907090",
                "ports_num": len(card.ports),
                "socket_id": 0,
            },
        )
        if self._kind == "opae":
            self.core.tree.directory(f"{card.fme_path}/pr", {"interface_id": Attribute(read=lambda: card.interface)})
            return
        for _port in card.ports:
            parent, name = self.core.unused_name("dfl-fme-region."), self.core.unused_name("region")
            region = f"{card.fme_path}/{parent}/fpga_region/{name}"
            card.regions.append(region)
            self.core.add_class_device(region, self.layout.subsystem)
            self.core.tree.directory(region, {"compat_id": Attribute(read=lambda: card.interface)})

    def _hide_fme(self, card: Card) -> None:
        for region in card.regions:
            self.core.remove_class_device(region)
        self.core.remove_class_device(card.fme_path)

    def _show_port(self, card: Card, port: Port, container: str) -> None:
        port.name = self.core.unused_name(self.layout.port)
        port.path = f"{container}/{port.name}"
        self.core.add_class_device(port.path, "platform", self._free(0), port.name, bus=True)
        self.core.tree.directory(port.path, {"id": port.index, "afu_id": Attribute(read=port.afu_id)})

    def _hide_port(self, port: Port) -> None:
        self.core.remove_class_device(port.path)
        port.name = port.path = ""

    def _free(self, least: int) -> Numbers:
        """Returns the first unused device number from `least`, for cards of both drivers."""
        minors = range(least, least + len(self.core.tree.names("/sys/dev/char")) + 1)
        numbers = (Numbers(_MAJOR, minor) for minor in minors)
        return next(number for number in numbers if not self.core.tree.has(f"/sys/dev/char/{number}"))


def _region_info(argument: int, memory: Memory) -> int:
    size, flags, index, padding = struct.unpack("<IIII", memory.read(argument, 16))
    if size < 32 or flags or padding or index > 1:
        raise oserror(errno.EINVAL)
    # Readable, writable and mappable; the signal tap is behind the AFU's registers.
    memory.write(argument + 4, struct.pack("<IIIQQ", 7, index, 0, 0x40000, index * 0x40000))
    return 0
