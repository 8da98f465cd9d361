"""Programming ports, and the ioctls around it, against a driver that reads every structure."""

import errno
import fcntl
import os
import signal
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bitstreams import INTERFACE, NLB0, NLB3, aocx, gbs, metadata
from fpgadriver import Driver
from fpgatrees import Card, one_port, with_vf
from trees import link, write

from accelplane.fpga import FpgaError
from accelplane.fpga.bitstream import Bitstream, open_bitstream
from accelplane.fpga.ids import IdError
from accelplane.fpga.ioctl import IoctlError, PortRegion
from accelplane.fpga.program import (
    RetryPolicy,
    TimedOut,
    api_version,
    move,
    port_regions,
    program,
    region_count,
    time_limit,
)
from accelplane.fpga.statedir import STATE_DIRECTORY, StateDirectoryError
from accelplane.fpga.sysfs import read_fme, read_port
from accelplane.host import Host

pytestmark = pytest.mark.memory

QUICK = RetryPolicy(timeout=30, attempts=4, interval=0.001)
families = pytest.mark.parametrize("family", ["dfl", "opae"])


@contextmanager
def bitstream_of(root: Path, content: bytes | None = None, name: str = "nlb3.gbs") -> Iterator[Bitstream]:
    with open_bitstream(str(write(root / name, gbs(metadata(afu=NLB3)) if content is None else content))) as bitstream:
        yield bitstream


def run(
    card: Card, driver: Driver, content: bytes | None = None, *, retry: RetryPolicy = QUICK, unless: str = ""
) -> bool:
    host = Host(card.root)
    with bitstream_of(card.root, content) as bitstream:
        port = read_port(host, card.name("port", 0))
        return program(host, port, bitstream, call=driver, retry=retry, unless=unless)


@families
def test_the_fme_gets_the_bitstream_and_the_port_number(tmp_path: Path, family: str) -> None:
    card = with_vf(tmp_path, family)
    driver = Driver(card, NLB3)
    host = Host(tmp_path)
    with bitstream_of(tmp_path) as bitstream:
        assert program(host, read_port(host, card.name("port", 1)), bitstream, call=driver, retry=QUICK)
    assert driver.programmed == [(card.name("fme", 0), 1, b"the bitstream")]
    assert driver.calls == [(card.name("fme", 0), 0xB680 if family == "dfl" else 0xB580)]


def test_an_opencl_design_is_decompressed(tmp_path: Path) -> None:
    card = one_port(tmp_path)
    driver = Driver(card, NLB3)
    host = Host(tmp_path)
    with bitstream_of(tmp_path, aocx(gbs(metadata(afu=NLB3), b"packed before")), "x.aocx") as bitstream:
        assert program(host, read_port(host, "dfl-port.0"), bitstream, call=driver, retry=QUICK)
    assert driver.programmed == [("dfl-fme.0", 0, b"packed before")]


def test_a_port_that_has_the_afu_is_unchanged(tmp_path: Path) -> None:
    driver = Driver(one_port(tmp_path), NLB3)
    assert not run(driver.card, driver, unless=NLB0)
    assert run(driver.card, driver, unless=NLB3)
    assert not run(driver.card, driver, unless=NLB3)
    assert len(driver.programmed) == 1


def test_a_dry_run_checks_and_does_not_program(tmp_path: Path) -> None:
    driver = Driver(one_port(tmp_path), NLB3)
    host = Host(tmp_path)
    port = read_port(host, "dfl-port.0")
    with bitstream_of(tmp_path) as bitstream:
        assert not program(host, port, bitstream, call=driver, dry_run=True)
    with bitstream_of(tmp_path, gbs(metadata("0" * 32, NLB3))) as bitstream, pytest.raises(FpgaError):
        program(host, port, bitstream, call=driver, dry_run=True)
    assert driver.calls == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EAGAIN, errno.EINTR])
def test_a_busy_driver_is_retried(tmp_path: Path, code: int) -> None:
    driver = Driver(one_port(tmp_path), NLB3, [code] * 3)
    assert run(driver.card, driver)
    assert len(driver.calls) == 4


@pytest.mark.parametrize(
    ("answers", "attempts", "problem"),
    [
        ([errno.EBUSY] * 9, 4, r"dfl-fme\.0: programming failed: .*\(EBUSY\)"),
        ([errno.EIO], 1, r"\(EIO\); the bitstream is for another card"),
        ([errno.EINVAL], 1, r"\(EINVAL\); the FME has no such port"),
        ([errno.ENODEV], 1, r"\(ENODEV\)"),
        ([errno.EBUSY, errno.EIO], 2, r"\(EIO\)"),
    ],
)
def test_errors_of_the_driver_are_reported(tmp_path: Path, answers: list[int], attempts: int, problem: str) -> None:
    driver = Driver(one_port(tmp_path), NLB3, answers)
    with pytest.raises(IoctlError, match=problem):
        run(driver.card, driver)
    assert len(driver.calls) == attempts


def test_errors_of_the_hardware_are_reported(tmp_path: Path) -> None:
    driver = Driver(one_port(tmp_path, "opae"), NLB3, [errno.EIO], bitmap=0x4)
    with pytest.raises(IoctlError, match=r"\(EIO\), hardware errors 0x4 \(incompatible bitstream\)"):
        run(driver.card, driver)


def test_no_attempt_starts_after_the_timeout(tmp_path: Path) -> None:
    driver = Driver(one_port(tmp_path), NLB3, [errno.EBUSY] * 9)
    with pytest.raises(IoctlError, match="EBUSY"):
        run(driver.card, driver, retry=RetryPolicy(timeout=0, attempts=9))
    assert len(driver.calls) == 1


def test_the_afu_id_is_verified_after_programming(tmp_path: Path) -> None:
    driver = Driver(one_port(tmp_path), NLB0)
    with pytest.raises(FpgaError, match=rf"dfl-port\.0: AFU id is {NLB0} after .*nlb3\.gbs, expected {NLB3}"):
        run(driver.card, driver)


@pytest.mark.parametrize(
    ("content", "error", "problem"),
    [
        (
            gbs(metadata("0" * 32, NLB3)),
            FpgaError,
            rf"made for regions with interface id 0{{32}}, .* is {INTERFACE}",
        ),
        (gbs(metadata("", NLB3)), FpgaError, "made for regions with interface id unknown"),
        (gbs(metadata(afu="")), IdError, "accelerator type id '': expected 32"),
    ],
)
def test_a_bitstream_for_another_region_is_rejected(
    tmp_path: Path, content: bytes, error: type[Exception], problem: str
) -> None:
    driver = Driver(one_port(tmp_path), NLB3)
    with pytest.raises(error, match=problem):
        run(driver.card, driver, content)
    assert driver.calls == []


def test_an_unreadable_bitstream_is_not_sent_to_a_driver(tmp_path: Path) -> None:
    driver = Driver(one_port(tmp_path), NLB3)
    host = Host(tmp_path)
    with bitstream_of(tmp_path) as bitstream:
        os.truncate(bitstream.path, 300)
        os.truncate(bitstream.path, 30)
        with pytest.raises(FpgaError, match="was truncated"):
            program(host, read_port(host, "dfl-port.0"), bitstream, call=driver)
    assert driver.calls == []


class TestLock:
    def test_programming_holds_the_lock_of_the_fme(self, tmp_path: Path) -> None:
        card = one_port(tmp_path)
        lock = tmp_path / STATE_DIRECTORY[1:] / "dfl-fme.0.lock"

        class ScanningHost(Driver):
            def program(self, name: str, argument: bytearray) -> None:
                with lock.open("rb") as file, pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                super().program(name, argument)

        driver = ScanningHost(card, NLB3)
        assert run(card, driver)
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_a_timeout_of_the_lock_is_reported(self, tmp_path: Path) -> None:
        driver = Driver(one_port(tmp_path), NLB3)
        lock = write(tmp_path / STATE_DIRECTORY[1:] / "dfl-fme.0.lock", "")
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(TimedOut, match=r"dfl-fme\.0: locked by another process for 0\.01 s"):
                run(driver.card, driver, retry=RetryPolicy(0.01, 9, 0.001))
        assert driver.calls == []

    @pytest.mark.parametrize("file_type", ["a link", "a directory"])
    def test_the_lock_is_a_regular_file(self, tmp_path: Path, file_type: str) -> None:
        driver = Driver(one_port(tmp_path), NLB3)
        lock = tmp_path / STATE_DIRECTORY[1:] / "dfl-fme.0.lock"
        if file_type == "a link":
            link(lock, write(tmp_path / "precious", ""))
        else:
            lock.mkdir(parents=True)
        with pytest.raises(FpgaError, match=r"^/run/accelplane-fpga/dfl-fme\.0\.lock: cannot be locked: "):
            run(driver.card, driver)
        assert driver.calls == []

    def test_the_state_directory_is_not_in_a_world_writable_directory(self, tmp_path: Path) -> None:
        shared = tmp_path / "run/lock"
        shared.mkdir(parents=True)
        shared.chmod(0o1777)
        driver = Driver(one_port(tmp_path), NLB3)
        before = os.umask(0)
        try:
            assert run(driver.card, driver)
        finally:
            os.umask(before)
        assert list(shared.iterdir()) == []
        (directory,) = (path for path in (tmp_path / "run").iterdir() if path != shared)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "dfl-fme.0.lock").stat().st_mode) == 0o600

    def test_a_directory_that_others_can_write_is_rejected(self, tmp_path: Path) -> None:
        driver = Driver(one_port(tmp_path), NLB3)
        directory = tmp_path / STATE_DIRECTORY[1:]
        directory.mkdir(parents=True)
        directory.chmod(0o777)
        with pytest.raises(
            StateDirectoryError,
            match=r"^/run/accelplane-fpga: found a directory of user \d+ with mode 777, expected one that only root",
        ):
            run(driver.card, driver)
        assert driver.calls == []
        assert list(directory.iterdir()) == []

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory away")
    def test_a_directory_of_another_user_is_rejected(self, tmp_path: Path) -> None:
        driver = Driver(one_port(tmp_path), NLB3)
        directory = tmp_path / STATE_DIRECTORY[1:]
        directory.mkdir(parents=True, mode=0o700)
        os.chown(directory, 65534, 65534)
        with pytest.raises(StateDirectoryError, match=r"found a directory of user 65534 with mode 700"):
            run(driver.card, driver)
        assert driver.calls == []

    def test_a_link_to_a_directory_is_rejected(self, tmp_path: Path) -> None:
        driver = Driver(one_port(tmp_path), NLB3)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        link(tmp_path / STATE_DIRECTORY[1:], elsewhere)
        with pytest.raises(FpgaError, match="cannot be locked: Not a directory"):
            run(driver.card, driver)
        assert driver.calls == []
        assert list(elsewhere.iterdir()) == []


def test_timeouts_work_if_the_parent_process_has_blocked_sigalrm() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        with pytest.raises(TimedOut), time_limit(0.1, "waiting"):
            signal.pause()
        assert signal.SIGALRM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_hanging_driver_ends_with_a_timeout(tmp_path: Path) -> None:
    one_port(tmp_path)
    read_end, write_end = os.pipe()
    calls: list[int] = []

    def hang(_node: str, request: int, _argument: bytearray | int) -> int:
        calls.append(request)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return len(os.read(read_end, 1))

    host = Host(tmp_path)
    try:
        with (
            bitstream_of(tmp_path) as bitstream,
            pytest.raises(TimedOut, match=r"programming took more than 600 s; check the kernel log"),
            time_limit(600, "programming"),
        ):
            program(host, read_port(host, "dfl-port.0"), bitstream, call=hang)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert calls == [0xB680]
    with (tmp_path / STATE_DIRECTORY[1:] / "dfl-fme.0.lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@families
def test_ports_are_released_and_assigned_by_number(tmp_path: Path, family: str) -> None:
    card = one_port(tmp_path, family)
    host = Host(tmp_path)
    fme = read_fme(host, card.name("fme", 0))
    calls: list[tuple[str, int, bytes]] = []

    def call(node: str, request: int, argument: bytearray | int) -> int:
        assert isinstance(argument, bytearray)
        calls.append((node, request, bytes(argument)))
        return 0

    move(host, fme, "release", 1, call=call)
    move(host, fme, "assign", 1, call=call)
    node = f"{tmp_path}/dev/{fme.name}"
    if family == "dfl":
        assert calls == [(node, 0x4004B681, b"\1\0\0\0"), (node, 0x4004B682, b"\1\0\0\0")]
    else:
        argument = b"\x0c\0\0\0" + bytes(4) + b"\1\0\0\0"
        assert calls == [(node, 0xB581, argument), (node, 0xB582, argument)]
    for number in (-1, 2**31):
        with pytest.raises(FpgaError, match=r"fme\.0: expected a number from 0"):
            move(host, fme, "release", number, call=call)
    with pytest.raises(IoctlError, match=r"assigning the port failed: .*\(ENODEV\)"):
        move(host, fme, "assign", 7, call=Driver(card, NLB3, [errno.ENODEV]))


@families
def test_properties_of_a_port_are_read(tmp_path: Path, family: str) -> None:
    card = one_port(tmp_path, family)
    host = Host(tmp_path)
    port = read_port(host, card.name("port", 0))
    magic = 0xB600 if family == "dfl" else 0xB500
    calls: list[int] = []

    def call(_node: str, request: int, argument: bytearray | int) -> int:
        calls.append(request - magic)
        if isinstance(argument, bytearray):
            if request - magic == 0x41:
                struct.pack_into("<I", argument, 8 if family == "dfl" else 12, 2)
            else:
                (number,) = struct.unpack_from("<I", argument, 8)
                struct.pack_into("<I", argument, 4, 7)
                struct.pack_into("<QQ", argument, 16, 0x40000, 0x1000 * number)
        return 0

    count = region_count(host, port, call=call)
    assert count == 2
    assert port_regions(host, port, count, call=call) == [
        PortRegion(7, 0, 0x40000, 0),
        PortRegion(7, 1, 0x40000, 0x1000),
    ]
    assert api_version(host, port, call=call) == api_version(host, port.fme, call=call) == 0
    assert calls == [0x41, 0x42, 0x42, 0, 0]


def test_an_invalid_number_of_regions_is_limited(tmp_path: Path) -> None:
    card = one_port(tmp_path)
    host = Host(tmp_path)
    driver = Driver(card, NLB3)
    found = port_regions(host, read_port(host, "dfl-port.0"), 2**32 - 1, call=driver)
    assert len(found) == 64


def test_plain_files_are_rejected_by_ioctl(tmp_path: Path) -> None:
    host = Host(one_port(tmp_path).root)
    with pytest.raises(IoctlError, match=r"dev/dfl-port\.0: reading the API version .*\(ENOTTY\)"):
        api_version(host, read_port(host, "dfl-port.0"))
