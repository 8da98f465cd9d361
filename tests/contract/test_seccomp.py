"""Real processes that open and program FPGA cards which only the emulated kernel has."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelplane.simulate import Kernel
from accelplane.simulate.kernel.ioctls import answered
from accelplane.simulate.offload import FpgaSpec
from accelplane.simulate.specs import NodeSpec

NLB3 = "f7df405cbd7acf7222f144b0b93acd18"
CARD = "0000:63:00.0"

# What a tool does, without a line of ours: opens a node in a directory called dev, and asks it.
TOOL = """
import ctypes, fcntl, os, struct, sys
afu, size, where = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
bitstream = ctypes.create_string_buffer(afu.ljust(size, b"x"), size)
os.chdir(where)
fme = os.open("dev/../dev/dfl-fme.0", os.O_RDWR)
request = bytearray(struct.pack("<IIIIQ", 24, 0, 0, size, ctypes.addressof(bitstream)))
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    sys.exit(fcntl.ioctl(os.dup(fme), 0xB680, request))
except OSError as error:
    sys.exit(error.errno)
"""
RUN = "import sys; from accelplane.simulate.seccomp import run; sys.exit(run(sys.argv[2:], sys.argv[1]))"


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(NodeSpec(fpgas=[FpgaSpec()]))
    with answered(kernel, str(tmp_path / "ioctls")):
        yield kernel


def supervised(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """The command, run by the supervisor in a process of its own: a process of pytest has threads."""
    return subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "ioctls"), *command],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def tool(tmp_path: Path, afu: str = NLB3, size: int = 3_000_000) -> subprocess.CompletedProcess[str]:
    (tmp_path / "dev").mkdir(exist_ok=True)
    return supervised(tmp_path, sys.executable, "-c", TOOL, afu, str(size), str(tmp_path))


def test_a_process_programs_a_card_that_is_not_there(kernel: Kernel, tmp_path: Path) -> None:
    ended = tool(tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert kernel.fpga(CARD).ports[0].afu == NLB3


def test_it_sees_the_errors_of_the_card(kernel: Kernel, tmp_path: Path) -> None:
    kernel.fpga(CARD).outcomes.extend(["EIO", "ENODEV"])
    assert [tool(tmp_path).returncode for _ in range(2)] == [5, 19]


def test_what_is_no_emulated_node_is_what_it_is(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dfl-port.7").write_text("a plain file")
    assert supervised(tmp_path, "cat", str(tmp_path / "dev/dfl-port.7")).stdout == "a plain file"
    assert "No such file" in supervised(tmp_path, "cat", str(tmp_path / "dev/dfl-port.8")).stderr


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "kill -9 $$"], 128 + signal.SIGKILL),
        (["/nowhere/nothing"], 127),
        (["sh", "-c", "kill -TERM $PPID; read x"], 128 + signal.SIGTERM),
    ],
    ids=["code", "killed", "missing", "passed-on"],
)
def test_the_end_of_a_command_is_its_own(kernel: Kernel, tmp_path: Path, command: list[str], status: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "ioctls"), *command], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.wait(60) == status


def test_without_an_emulated_kernel_it_says_so(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "true")
    assert ended.returncode == 1
    assert "FileNotFoundError" in ended.stderr


@pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="no root or no /dev/fuse")
def test_people_run_commands_where_there_are_cards(tmp_path: Path) -> None:
    def simulated(*command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "accelplane", "simulate", "fpga", *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)

    (tmp_path / "node.yaml").write_text("fpgas: [{driver: opae, afus: [d8424dc4a4a3c413f89e433683f9040b], seconds: 0}]")
    look = "cat /sys/dev/char/240:0/afu_id; ls /sys/class; stat -c %t:%T /dev/intel-fpga-fme.0; echo x >/dev/null"
    seen = simulated(f"--description={tmp_path / 'node.yaml'}", "--", "sh", "-c", look)
    assert (seen.returncode, seen.stderr) == (0, "")
    assert {"d8424dc4a4a3c413f89e433683f9040b", "fpga", "f0:80"} <= set(seen.stdout.split())
    program = ("--", sys.executable, "-c", TOOL, NLB3, "64", "/")
    assert [simulated(*outcome, *program).returncode for outcome in ((), ("--outcome=EIO",))] == [0, 5]
    (tmp_path / "wrong.yaml").write_text("fpgas: [{afus: [x]}]")
    wrong = simulated(f"--description={tmp_path / 'wrong.yaml'}", "--", "true")
    assert wrong.returncode == 1
    assert "wrong.yaml: afus" in wrong.stderr
    assert "Traceback" not in wrong.stderr
