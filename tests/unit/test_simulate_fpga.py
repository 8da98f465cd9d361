"""The emulated FPGA cards: files of both drivers, and ioctls with valid and invalid arguments."""

import asyncio
import errno
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from kernels import dangling, refusal
from waiting import until

from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.control import execute
from accelplane.simulate.offload import FpgaSpec
from accelplane.simulate.specs import NodeSpec

INTERFACE = "69528db6eb31577a8c3668f9faa081f6"
NLB0 = "d8424dc4a4a3c413f89e433683f9040b"
NLB3 = "f7df405cbd7acf7222f144b0b93acd18"
CARD = "0000:63:00.0"
PF = f"/sys/bus/pci/devices/{CARD}"

MAGIC = {"dfl": 0xB600, "opae": 0xB500}
PREFIX = {"dfl": "dfl-", "opae": "intel-fpga-"}
RELEASE = {"dfl": 0x4004B681, "opae": 0xB581}
ASSIGN = {"dfl": 0x4004B682, "opae": 0xB582}
AT = 64  # the address of the bitstream in the memory below


class Memory:
    """A caller's memory, a structure at address 0."""

    def __init__(self, structure: bytes = b"", bitstream: bytes = b"") -> None:
        self.content = bytearray(structure.ljust(AT, b"\0") + bitstream)

    def read(self, address: int, length: int) -> bytes:
        if address + length > len(self.content):
            raise OSError(errno.EFAULT, "Bad address")
        return bytes(self.content[address : address + length])

    def write(self, address: int, data: bytes) -> None:
        self.content[address : address + len(data)] = data


def card(driver: Any = "dfl", afus: Sequence[str] = (NLB0, NLB0), **more: Any) -> Kernel:
    return Kernel(NodeSpec(fpgas=[FpgaSpec(driver=driver, afus=afus, **more)]))


def programming(
    driver: str, port: int = 0, *, size: int = 0, flags: int = 0, afu: str = NLB3, length: int = 32
) -> Memory:
    least = 24 if driver == "dfl" else 32
    structure = struct.pack("<IIIIQQ", size or least, flags, port, length, AT, 0)
    return Memory(structure, bytes.fromhex(afu) + b"payload of 16 by")


def call(kernel: Kernel, node: str, request: int, memory: Memory) -> int:
    """The errno of the ioctl, 0 for success."""
    try:
        kernel.ioctl(node, request, 0, memory)
    except OSError as error:
        return error.errno or -1
    return 0


def port_at(kernel: Kernel, name: str) -> str:
    """The `afu_id` of a port, found by its device number as by programs."""
    minor = name.rpartition(".")[2]
    return kernel.read(f"/sys/dev/char/240:{minor}/afu_id").strip()


@pytest.mark.parametrize(
    ("driver", "interface"),
    [
        ("dfl", f"{PF}/fpga_region/region0/dfl-fme.0/dfl-fme-region.1/fpga_region/region2/compat_id"),
        ("opae", f"{PF}/fpga/intel-fpga-dev.0/intel-fpga-fme.0/pr/interface_id"),
    ],
)
def test_attributes_of_a_card_are_those_of_its_driver(driver: str, interface: str) -> None:
    kernel = card(driver, vfs=1)
    assert kernel.read(interface) == f"{INTERFACE}\n"
    assert kernel.read(f"{PF}/class") == "0x120000\n"
    assert kernel.read(f"{PF}/sriov_numvfs") == "1\n"
    assert kernel.readlink("/dev/char/240:128") == f"../{PREFIX[driver]}fme.0"
    assert "/0000:63:00.0/" in kernel.resolve("/sys/dev/char/240:0")
    assert "/0000:63:00.1/" in kernel.resolve("/sys/dev/char/240:1")
    assert kernel.read("/sys/dev/char/240:1/id") == "1\n"
    assert dangling(kernel) == []
    kernel.unplug(CARD)
    assert dangling(kernel) == []
    assert kernel.list(f"/sys/class/{'fpga_region' if driver == 'dfl' else 'fpga'}") == []
    assert [name for name in kernel.list("/dev") if "fpga" in name or "dfl" in name] == []


@pytest.mark.parametrize("driver", ["dfl", "opae"])
def test_a_right_bitstream_makes_the_port_another_function(driver: str) -> None:
    kernel = card(driver)
    node = f"{PREFIX[driver]}fme.0"
    assert call(kernel, node, MAGIC[driver], Memory()) == 0
    assert call(kernel, node, MAGIC[driver] | 0x80, programming(driver, 1)) == 0
    assert (port_at(kernel, "port.0"), port_at(kernel, "port.1")) == (NLB0, NLB3)


@pytest.mark.parametrize("driver", ["dfl", "opae"])
@pytest.mark.parametrize(
    ("wrong", "number"),
    [
        ({"size": 16}, errno.EINVAL),
        ({"flags": 1}, errno.EINVAL),
        ({"port": 2}, errno.EINVAL),
        ({"length": 64}, errno.EFAULT),
        ({"afu": "0" * 32}, errno.EIO),
        ({"length": 8}, errno.EIO),
    ],
    ids=["size", "flags", "port", "address", "content", "short"],
)
def test_wrong_structures_and_bitstreams_change_nothing(driver: str, wrong: dict[str, Any], number: int) -> None:
    kernel = card(driver)
    assert call(kernel, f"{PREFIX[driver]}fme.0", MAGIC[driver] | 0x80, programming(driver, **wrong)) == number
    assert port_at(kernel, "port.0") == NLB0


def test_the_out_of_tree_driver_returns_the_hardware_error() -> None:
    kernel = card("opae")
    memory = programming("opae", afu="0" * 32)
    assert call(kernel, "intel-fpga-fme.0", 0xB580, memory) == errno.EIO
    assert struct.unpack_from("<Q", memory.content, 24) == (0x10,)


@pytest.mark.parametrize(
    ("driver", "node", "ioctl_request", "number"),
    [
        ("dfl", "dfl-port.0", 0xB680, errno.EINVAL),
        ("dfl", "dfl-fme.0", 0xB640, errno.EINVAL),
        ("dfl", "dfl-fme.0", 0xB681, errno.EINVAL),
        ("dfl", "dfl-fme.0", 0xB580, errno.ENOTTY),
        ("dfl", "dfl-port.0", 0x4004B681, errno.EINVAL),
        ("dfl", "dfl-port.7", 0xB600, errno.ENOTTY),
        ("opae", "intel-fpga-fme.0", 0x4004B581, errno.EINVAL),
    ],
)
def test_requests_for_unknown_resources_are_rejected(driver: str, node: str, ioctl_request: int, number: int) -> None:
    assert call(card(driver), node, ioctl_request, Memory(struct.pack("<I", 64))) == number


@pytest.mark.parametrize(
    ("driver", "data", "expected"),
    [
        ("dfl", struct.pack("<IIII", 16, 9, 9, 9), struct.pack("<IIII", 16, 0, 2, 0)),
        ("opae", struct.pack("<IIIIII", 24, 9, 9, 9, 9, 9), struct.pack("<IIIIII", 24, 0, 0, 2, 0, 0)),
    ],
)
def test_port_region_info_returns_the_regions(driver: str, data: bytes, expected: bytes) -> None:
    kernel, node = card(driver), f"{PREFIX[driver]}port.0"
    memory = Memory(data)
    assert call(kernel, node, MAGIC[driver] | 0x41, memory) == 0
    assert memory.content[: len(expected)] == expected
    region = Memory(struct.pack("<IIIIQQ", 32, 0, 1, 0, 0, 0))
    assert call(kernel, node, MAGIC[driver] | 0x42, region) == 0
    assert struct.unpack_from("<IIIIQQ", region.content) == (32, 7, 1, 0, 0x40000, 0x40000)
    assert call(kernel, node, MAGIC[driver] | 0x41, Memory(struct.pack("<I", 8))) == errno.EINVAL
    assert call(kernel, node, MAGIC[driver] | 0x42, Memory(struct.pack("<IIII", 32, 0, 2, 0))) == errno.EINVAL


@pytest.mark.parametrize("driver", ["dfl", "opae"])
def test_released_ports_become_virtual_functions_and_are_reassigned(driver: str) -> None:
    kernel, node = card(driver), f"{PREFIX[driver]}fme.0"

    def which(port: int) -> Memory:
        return Memory(struct.pack("<i", port) if driver == "dfl" else struct.pack("<III", 12, 0, port))

    assert refusal(kernel, f"{PF}/sriov_numvfs", "1") == errno.EINVAL
    assert call(kernel, node, ASSIGN[driver], which(1)) == errno.EBUSY
    kernel.hold(f"{PREFIX[driver]}port.1")
    assert call(kernel, node, RELEASE[driver], which(1)) == errno.EBUSY
    kernel.release(f"{PREFIX[driver]}port.1")
    assert call(kernel, node, RELEASE[driver], which(1)) == 0
    assert call(kernel, node, RELEASE[driver], which(1)) == errno.EBUSY
    assert call(kernel, node, RELEASE[driver], which(2)) == errno.ENODEV
    assert not kernel.exists("/sys/dev/char/240:1")
    assert refusal(kernel, f"{PF}/sriov_numvfs", "2") == errno.EINVAL
    assert refusal(kernel, f"{PF}/sriov_numvfs", "1") == 0
    assert "/0000:63:00.1/" in kernel.resolve("/sys/dev/char/240:1")
    assert call(kernel, node, ASSIGN[driver], which(1)) == errno.EBUSY
    assert refusal(kernel, f"{PF}/sriov_numvfs", "0") == 0
    assert call(kernel, node, ASSIGN[driver], which(1)) == 0
    assert "/0000:63:00.0/" in kernel.resolve("/sys/dev/char/240:1")
    assert dangling(kernel) == []


@pytest.mark.parametrize(
    ("outcome", "number", "afu"),
    [
        ("EIO", errno.EIO, NLB0),
        ("EBUSY", errno.EBUSY, NLB0),
        ("ENODEV", errno.ENODEV, NLB0),
        ("half", errno.EIO, "0" * 32),
        ("crash", errno.EIO, "f" * 32),
        ("other", 0, f"{int(NLB3, 16) ^ 1:032x}"),
    ],
)
def test_programming_has_the_injected_result_once(outcome: str, number: int, afu: str) -> None:
    kernel = card()
    assert execute(kernel, f'{{"do": "fpga", "bdf": "{CARD}", "outcomes": ["{outcome}"]}}') == "done"
    assert call(kernel, "dfl-fme.0", 0xB680, programming("dfl")) == number
    assert port_at(kernel, "port.0") == afu
    assert call(kernel, "dfl-fme.0", 0xB680, programming("dfl")) == 0
    assert port_at(kernel, "port.0") == NLB3
    assert kernel.fpga(CARD).attempts == 2


async def test_programming_blocks_only_the_function_of_its_port() -> None:
    kernel = card()
    execute(kernel, f'{{"do": "fpga", "bdf": "{CARD}", "outcomes": ["hang"]}}')
    worker = asyncio.create_task(asyncio.to_thread(call, kernel, "dfl-fme.0", 0xB680, programming("dfl")))
    await until(lambda: kernel.fpga(CARD).ports[0].disabled)
    with pytest.raises(OSError, match="busy"):
        kernel.read("/sys/dev/char/240:0/afu_id")
    assert port_at(kernel, "port.1") == NLB0
    assert call(kernel, "dfl-fme.0", 0xB680, programming("dfl")) == errno.EBUSY
    execute(kernel, f'{{"do": "fpga", "bdf": "{CARD}", "resume": true}}')
    assert await worker == 0
    assert port_at(kernel, "port.0") == NLB3


def test_ids_of_a_crashed_card_are_all_ones() -> None:
    kernel = card(afus=[NLB0])
    execute(kernel, f'{{"do": "fpga", "bdf": "{CARD}", "crash": true}}')
    assert port_at(kernel, "port.0") == "f" * 32
    assert kernel.read("/sys/class/fpga_region/region1/compat_id") == "f" * 32 + "\n"


def test_cards_of_both_drivers_are_beside_each_other() -> None:
    kernel = Kernel(NodeSpec(fpgas=[FpgaSpec(driver="opae", afus=(NLB0, NLB3)), FpgaSpec(driver="dfl", afus=(NLB3,))]))
    nodes = {f"intel-fpga-{name}" for name in ("fme.0", "port.0", "port.1")} | {"dfl-fme.0", "dfl-port.0"}
    for node in nodes:
        assert kernel.resolve(f"/dev/{node}") == f"/dev/{node}"
        assert kernel.exists(f"/sys/bus/platform/devices/{node}/dev")
    numbers = {kernel.read(f"/sys/bus/platform/devices/{node}/dev") for node in nodes}
    assert len(numbers) == len(nodes)
    assert kernel.read("/sys/class/fpga_region/region0/dfl-port.0/afu_id") == f"{NLB3}\n"


@pytest.mark.parametrize("seconds", [-1, 3601, float("inf"), float("nan")])
def test_programming_takes_the_configured_time(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"seconds is .*, expected 0 to 3600"):
        card(seconds=seconds)
