"""Ioctl numbers and structures, byte by byte, and names of drivers."""

import errno
import os
from pathlib import Path

import pytest
from trees import link, write

from accelplane.fpga import ioctl
from accelplane.fpga.drivers import DFL, OPAE, Driver, detect, kind_of, parse_name
from accelplane.fpga.ioctl import IoctlError, Operation, PortRegion
from accelplane.host import Host


@pytest.mark.parametrize(
    ("operation", "dfl", "opae"),
    [
        ("api-version", 0xB600, 0xB500),
        ("reset", 0xB640, 0xB540),
        ("port-info", 0xB641, 0xB541),
        ("port-region", 0xB642, 0xB542),
        ("program", 0xB680, 0xB580),
        ("release", 0x4004B681, 0xB581),
        ("assign", 0x4004B682, 0xB582),
    ],
)
def test_request_numbers_are_those_of_the_drivers(operation: Operation, dfl: int, opae: int) -> None:
    assert ioctl.request(DFL, operation) == dfl
    assert ioctl.request(OPAE, operation) == opae


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (ioctl.pack_port_info(DFL), "10000000 00000000 00000000 00000000"),
        (ioctl.pack_port_info(OPAE), "18000000 00000000 00000000 00000000 00000000 00000000"),
        (ioctl.pack_port_region(1), "20000000 00000000 01000000 00000000 0000000000000000 0000000000000000"),
        (
            ioctl.pack_program(DFL, 3, 0x11223344, 0x7F0102030405),
            "18000000 00000000 03000000 44332211 05040302017f0000",
        ),
        (
            ioctl.pack_program(OPAE, 3, 0x11223344, 0x7F0102030405),
            "20000000 00000000 03000000 44332211 05040302017f0000 0000000000000000",
        ),
        (ioctl.pack_port(DFL, 2), "02000000"),
        (ioctl.pack_port(OPAE, 2), "0c000000 00000000 02000000"),
    ],
)
def test_structures_are_packed_as_in_the_headers(buffer: bytearray, words: str) -> None:
    assert buffer == bytes.fromhex(words)


def test_results_of_ioctls_are_unpacked() -> None:
    dfl = bytearray.fromhex("10000000010000000200000003000000")
    opae = bytearray.fromhex("180000000100000004000000020000000300000005000000")
    region = bytearray.fromhex("2000000007000000010000000000000000000400000000000010000000000000")
    refused = ioctl.pack_program(OPAE, 0, 1, 1)
    refused[24:] = bytes.fromhex("2200000000000000")
    assert ioctl.unpack_region_count(DFL, dfl) == ioctl.unpack_region_count(OPAE, opae) == 2
    assert ioctl.unpack_port_region(region) == PortRegion(flags=7, number=1, size=0x40000, offset=0x1000)
    assert ioctl.unpack_program_status(OPAE, refused) == 0x22
    assert ioctl.unpack_program_status(DFL, ioctl.pack_program(DFL, 0, 1, 1)) == 0


@pytest.mark.parametrize(
    ("driver", "operation", "number", "message"),
    [
        (
            OPAE,
            "program",
            errno.EIO,
            r"failed: .*\(EIO\), hardware errors 0x22 \(CRC, timeout\); the bits",
        ),
        (
            DFL,
            "program",
            errno.EIO,
            r"/dev/fme: programming failed: Input/output error \(EIO\); the bitstream",
        ),
        (DFL, "program", errno.EINVAL, r"\(EINVAL\); the FME has no such port"),
        (DFL, "release", errno.EBUSY, r"/dev/fme: releasing the port failed: .*\(EBUSY\); it is in use"),
        (DFL, "assign", errno.ENODEV, r"assigning the port failed: .*\(ENODEV\)$"),
        (OPAE, "api-version", errno.EACCES, r"\(EACCES\); run as root"),
        (OPAE, "port-info", errno.ENOENT, r"\(ENOENT\); load the FPGA driver"),
    ],
)
def test_errors_have_the_operation_and_a_hint(driver: Driver, operation: Operation, number: int, message: str) -> None:
    def refuse(_node: str, _request: int, argument: bytearray | int) -> int:
        if operation == "program" and driver is OPAE and isinstance(argument, bytearray):
            argument[24] = 0x22
        raise OSError(number, os.strerror(number))

    argument = ioctl.pack_program(driver, 0, 1, 1) if operation == "program" else 0
    with pytest.raises(IoctlError, match=message) as caught:
        ioctl.perform(refuse, driver, "/dev/fme", operation, argument)
    assert caught.value.errno == number


def test_a_real_call_opens_the_node_and_fills_the_structure(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"seven..")
    waiting = bytearray(4)
    fionread = 0x541B
    assert ioctl.system_call(f"/proc/self/fd/{read_end}", fionread, waiting) == 0
    assert waiting == b"\x07\0\0\0"
    plain = write(tmp_path / "dfl-port.0", "")
    with pytest.raises(OSError, match="Inappropriate ioctl") as caught:
        ioctl.system_call(str(plain), ioctl.request(DFL, "api-version"), 0)
    assert caught.value.errno == errno.ENOTTY
    with pytest.raises(FileNotFoundError):
        ioctl.system_call(str(tmp_path / "none"), ioctl.request(DFL, "api-version"), 0)
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("dfl-port.0", (DFL, "port")),
        ("/dev/dfl-fme.12", (DFL, "fme")),
        ("intel-fpga-port.3", (OPAE, "port")),
        ("/dev/intel-fpga-fme.0", (OPAE, "fme")),
        ("intel-fpga-portx0", None),
        ("dfl-port.", None),
        ("dfl-port.0x", None),
        ("dfl-port.0\n", None),
        ("null", None),
        ("", None),
    ],
)
def test_the_name_of_a_node_includes_its_kind(text: str, found: tuple[Driver, str] | None) -> None:
    assert parse_name(text) == found


def test_links_are_resolved(tmp_path: Path) -> None:
    write(tmp_path / "dev/dfl-port.0", "")
    link(tmp_path / "dev/card", "dfl-port.0")
    link(tmp_path / "dev/loop", "loop")
    host = Host(tmp_path)
    assert kind_of(host, "card") == kind_of(host, "/dev/card") == (DFL, "port")
    assert kind_of(host, "loop") is None


def test_the_out_of_tree_driver_has_priority(tmp_path: Path) -> None:
    assert detect(Host(tmp_path)) is None
    (tmp_path / "sys/class/fpga_region").mkdir(parents=True)
    assert detect(Host(tmp_path)) is DFL
    (tmp_path / "sys/class/fpga").mkdir()
    assert detect(Host(tmp_path)) is OPAE
