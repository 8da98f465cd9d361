"""Real processes that open and program FPGA cards which only the emulated kernel has."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.ioctls import serve_ioctls
from accelplane.simulate.offload import FpgaSpec
from accelplane.simulate.specs import NodeSpec

pytestmark = pytest.mark.memory

NLB3 = "f7df405cbd7acf7222f144b0b93acd18"
CARD = "0000:63:00.0"

# A program without code of this project: opens a device node and calls an ioctl.
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
    with serve_ioctls(kernel, str(tmp_path / "ioctls")):
        yield kernel


def supervised(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs the command under a supervisor in a separate process, because the pytest process has threads."""
    return subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "ioctls"), *command],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def tool(tmp_path: Path, afu: str = NLB3, size: int = 3_000_000) -> subprocess.CompletedProcess[str]:
    (tmp_path / "dev").mkdir(exist_ok=True)
    return supervised(tmp_path, sys.executable, "-c", TOOL, afu, str(size), str(tmp_path))


def test_a_process_programs_an_emulated_card(kernel: Kernel, tmp_path: Path) -> None:
    ended = tool(tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert kernel.fpga(CARD).ports[0].afu == NLB3


def test_the_process_gets_the_errors_of_the_card(kernel: Kernel, tmp_path: Path) -> None:
    kernel.fpga(CARD).outcomes.extend(["EIO", "ENODEV"])
    assert [tool(tmp_path).returncode for _ in range(2)] == [5, 19]


def test_other_files_are_opened_unchanged(kernel: Kernel, tmp_path: Path) -> None:
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


def test_a_node_can_be_opened_by_any_system_call(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    how = "struct.pack('QQQ', os.O_RDWR, 0, 0)"
    node = f"b'{tmp_path}/dev/dfl-fme.0'"
    program = f"""
import ctypes, fcntl, os, struct
fme = ctypes.CDLL(None, use_errno=True).syscall(437, -100, {node}, {how}, ctypes.c_size_t(24))
print(fcntl.ioctl(fme, 0xB600, 0), os.get_inheritable(fme))
"""
    ended = supervised(tmp_path, sys.executable, "-c", program)
    assert (ended.stdout, ended.stderr) == ("0 True\n", "")


def test_too_many_open_files_return_emfile(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    program = f"""
import errno, os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
try:
    while True:
        os.open({str(tmp_path / "dev/dfl-fme.0")!r}, os.O_RDWR)
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    assert supervised(tmp_path, sys.executable, "-c", program).stdout == "EMFILE\n"


def test_a_command_does_not_outlive_a_supervisor_that_is_killed(kernel: Kernel, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path / "ioctls"), "sh", "-c", "echo here; read x"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"here\n"
        process.kill()
        assert process.stdout.read() == b""  # ends with the last one who could write


def test_nested_supervisors_are_rejected(kernel: Kernel, tmp_path: Path) -> None:
    ended = supervised(tmp_path, sys.executable, "-c", RUN, str(tmp_path / "ioctls"), "true")
    assert ended.returncode == 1
    assert "SeccompUnavailable: seccomp: Device or resource busy; this process already has a supervisor" in ended.stderr


def test_an_interrupt_from_the_terminal_is_delivered_once(kernel: Kernel, tmp_path: Path) -> None:
    program = """
import signal
received = []
signal.signal(signal.SIGINT, lambda *_: (received.append("int"), print("got", flush=True)))
signal.signal(signal.SIGTERM, lambda *_: received.append("term"))
print("ready", flush=True)
while "term" not in received:
    signal.pause()
print(received.count("int"), "in all", flush=True)
"""
    controller_end, terminal = pty.openpty()
    begin = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); " + RUN
    words = [sys.executable, "-c", begin, str(tmp_path / "ioctls"), sys.executable, "-c", program]
    with (
        open(controller_end, "rb+", buffering=0) as screen,
        subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True) as supervisor,
    ):
        os.close(terminal)
        read_until(screen, b"ready")
        screen.write(b"\x03")
        read_until(screen, b"got")
        supervisor.terminate()  # passed on after what came before it
        assert read_until(screen, b"in all").split()[-3:] == [b"1", b"in", b"all"]
        assert supervisor.wait(60) == 0


def read_until(screen: IO[bytes], word: bytes) -> bytes:
    """The output of the terminal up to the word."""
    output = b""
    while word not in output:
        piece = screen.read(4096)
        assert piece, output
        output += piece
    return output


def test_unknown_flags_are_not_a_command() -> None:
    words = [sys.executable, "-m", "accelplane", "simulate", "fpga", "--bogus", "--", "true"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "No such option" in ended.stderr


def test_a_missing_emulated_kernel_is_reported(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "true")
    assert ended.returncode == 1
    assert "FileNotFoundError" in ended.stderr


@pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="no root or no /dev/fuse")
def test_the_command_runs_programs_with_emulated_cards(tmp_path: Path) -> None:
    def simulated(*command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "accelplane", "simulate", "fpga", *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)

    (tmp_path / "node.yaml").write_text("fpgas: [{driver: opae, afus: [d8424dc4a4a3c413f89e433683f9040b], seconds: 0}]")
    look = "cat /sys/dev/char/240:0/afu_id; ls /sys/class; stat -c %t:%T /dev/intel-fpga-fme.0; echo x >/dev/null"
    output = simulated(f"--description={tmp_path / 'node.yaml'}", "--", "sh", "-c", look)
    assert (output.returncode, output.stderr) == (0, "")
    assert {"d8424dc4a4a3c413f89e433683f9040b", "fpga", "f0:80"} <= set(output.stdout.split())
    program = ("--", sys.executable, "-c", TOOL, NLB3, "64", "/")
    assert [simulated(*outcome, *program).returncode for outcome in ((), ("--outcome=EIO",))] == [0, 5]
    (tmp_path / "wrong.yaml").write_text("fpgas: [{afus: [x]}]")
    wrong = simulated(f"--description={tmp_path / 'wrong.yaml'}", "--", "true")
    assert wrong.returncode == 1
    assert "wrong.yaml: afus" in wrong.stderr
    assert "Traceback" not in wrong.stderr
