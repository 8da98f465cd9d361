"""Attributes of an FPGA port that return errors while the port is programmed."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from bitstreams import INTERFACE, NLB0, NLB3, gbs, metadata
from fpgatrees import one_port
from mountpoints import mounted_for_test

from accelplane.fpga.bitstream import open_bitstream
from accelplane.fpga.drivers import DFL
from accelplane.fpga.program import RetryPolicy, TimedOut, program
from accelplane.fpga.sysfs import afu_id, read_port, scan
from accelplane.host import Host, HostError
from accelplane.simulate import NodeSpec
from accelplane.simulate.kernel import Kernel

AFU = "/sys/class/fpga_region/region0/dfl-port.0/afu_id"


def copy_sysfs(tree: Path, kernel: Kernel) -> None:
    """Copies the sysfs of the tree to the kernel."""
    for directory, directories, files in os.walk(tree / "sys"):
        place = Path(directory)
        name = f"/{place.relative_to(tree)}"
        links = [entry for entry in (*directories, *files) if (place / entry).is_symlink()]
        kernel.tree.directory(name, {file: (place / file).read_text() for file in files if file not in links})
        for entry in links:
            kernel.tree.link(f"{name}/{entry}", f"/{(place / entry).resolve().relative_to(tree)}")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    instance = Kernel(NodeSpec())
    one_port(tmp_path / "plain")
    copy_sysfs(tmp_path / "plain", instance)
    return instance


@pytest.fixture
def root(kernel: Kernel, tmp_path: Path) -> Iterator[Path]:
    with mounted_for_test(kernel, tmp_path) as where:
        for node in ("dfl-port.0", "dfl-fme.0"):
            (tmp_path / "dev" / node).touch()
        yield where


def test_the_afu_of_a_port_is_unknown_while_it_is_programmed(kernel: Kernel, root: Path) -> None:
    host = Host(root)
    port = read_port(host, "dfl-port.0")
    assert afu_id(host, port) == NLB0
    kernel.fail(AFU, errno.EBUSY, on="read", times=1)
    assert afu_id(host, port) is None
    assert afu_id(host, port) == NLB0


def test_a_scan_does_not_read_the_program(kernel: Kernel, root: Path) -> None:
    kernel.fail(AFU, errno.EBUSY, on="read")
    found = scan(Host(root), DFL)
    assert found.faults == ()
    assert [interface for _port, interface in found.ports] == [INTERFACE]


def test_other_errors_are_errors_of_that_device(kernel: Kernel, root: Path) -> None:
    host = Host(root)
    port = read_port(host, "dfl-port.0")
    kernel.fail(AFU, errno.EIO, on="read")
    with pytest.raises(HostError, match="afu_id: Input/output error"):
        afu_id(host, port)
    kernel.fail("/sys/class/fpga_region/region0/dfl-port.0/id", errno.EIO, on="read")
    found = scan(host, DFL)
    assert [(fault.name, fault.problem.partition(": ")[2]) for fault in found.faults] == [
        ("dfl-port.0", "Input/output error")
    ]


def programming(kernel: Kernel, root: Path, busy: int | None, retry: RetryPolicy) -> list[int]:
    """Programs the port with NLB3; it says nothing of its AFU for so many looks, None is forever. What was asked."""
    calls: list[int] = []

    def call(_node: str, request: int, _argument: bytearray | int) -> int:
        calls.append(request)
        kernel.tree.attribute(kernel.resolve(AFU)).text = NLB3
        kernel.fail(AFU, errno.EBUSY, on="read", times=busy)
        return 0

    host = Host(root)
    (root / "nlb3.gbs").write_bytes(gbs(metadata(afu=NLB3)))
    with open_bitstream(str(root / "nlb3.gbs")) as bitstream:
        assert program(host, read_port(host, "dfl-port.0"), bitstream, call=call, unless=NLB3, retry=retry)
    return calls


def test_the_reader_waits_for_a_temporarily_disabled_port(kernel: Kernel, root: Path) -> None:
    assert programming(kernel, root, 3, RetryPolicy(timeout=60, interval=0.001)) == [0xB680]
    host = Host(root)
    assert afu_id(host, read_port(host, "dfl-port.0")) == NLB3


def test_the_wait_for_a_disabled_port_is_limited(kernel: Kernel, root: Path) -> None:
    with pytest.raises(TimedOut, match=r"dfl-port\.0: port is still disabled 0\.05 s after programming started"):
        programming(kernel, root, None, RetryPolicy(timeout=0.05, interval=0.001))
