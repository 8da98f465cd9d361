"""Hook and tool as processes, with emulated FPGA cards."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from bitstreams import INTERFACE, NLB0, NLB3, gbs, metadata
from forkserver import ForkedProcess, ForkServer
from mountpoints import mounted_for_test
from waiting import until

from accelplane.fpga.allocation import HOOK as INSTALLED_HOOK
from accelplane.fpga.allocation import hook_arguments
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.fpga import Outcome
from accelplane.simulate.kernel.ioctls import serve_ioctls
from accelplane.simulate.offload import FpgaSpec
from accelplane.simulate.specs import NodeSpec

pytestmark = pytest.mark.memory

HOOK, TOOL = "intel-fpga-crihook", "fpga_tool"
CARD = "0000:63:00.0"
OTHER = "ce48969398f05f33946d560708be108a"
SUPERVISOR = "import sys; from accelplane.simulate.seccomp import run; sys.exit(run(sys.argv[2:], sys.argv[1]))"
STORE = f"srv/intel.com/fpga/{INTERFACE}"


class Command(NamedTuple):
    """A process and its files."""

    process: "subprocess.Popen[bytes] | ForkedProcess"
    output: IO[bytes]
    errors: IO[bytes]


class Node(NamedTuple):
    """A machine with a card: its kernel and its mount point. `server` forks commands that have a supervisor."""

    kernel: Kernel
    root: Path
    ioctls: str
    server: ForkServer

    def start(self, command: str, *words: str, state: str = "", interpreter: bool = False) -> Command:
        """Runs a command under a supervisor. `interpreter`: both start Python, as with coverage."""
        files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115
        files[0].write(state.encode())
        files[0].seek(0)
        arguments = [f"--root={self.root}", *words]
        if interpreter or "COVERAGE_PROCESS_START" in os.environ:
            program = os.path.join(os.path.dirname(sys.executable), command)
            process: subprocess.Popen[bytes] | ForkedProcess = subprocess.Popen(
                [*supervisor(self.ioctls), program, *arguments], stdin=files[0], stdout=files[1], stderr=files[2]
            )
        else:
            streams = files[0].fileno(), files[1].fileno(), files[2].fileno()
            process = self.server.start(command, arguments, os.environ, streams)
        files[0].close()
        return Command(process, *files[1:])

    def tool(self, *words: str, interpreter: bool = False) -> tuple[int, str, str]:
        """Runs `fpga_tool`; returns its exit status and output."""
        return ended(self.start(TOOL, *words, interpreter=interpreter))

    def container(self, *afus: str, ports: int = 1, name: str = "bundle") -> str:
        """The OCI state of a container that requests these AFUs."""
        bundle = self.root / name
        bundle.mkdir(exist_ok=True)
        env = [f"FPGA_REGIONS={len(afus)}"] + [
            text
            for number, afu in enumerate(afus, 1)
            for text in (f"FPGA_REGION_{number}={INTERFACE}", f"FPGA_AFU_{number}={afu}")
        ]
        names = [f"dfl-port.{number}" for number in range(ports)]
        devices = [self.device(name) for name in names]
        hooks = {"createRuntime": [{"path": INSTALLED_HOOK, "args": hook_arguments(names)}]}
        config = {"process": {"env": env}, "linux": {"devices": devices}, "hooks": hooks}
        (bundle / "config.json").write_text(json.dumps(config))
        return json.dumps({"ociVersion": "1.0.2", "bundle": str(bundle), "annotations": {}})

    def device(self, name: str) -> dict[str, object]:
        """The device node of a port in the configuration of a container."""
        (numbers,) = self.root.glob(f"sys/class/fpga_region/*/{name}/dev")
        major, minor = map(int, numbers.read_text().split(":"))
        return {"path": f"/dev/{name}", "type": "c", "major": major, "minor": minor}

    def hook(
        self, *afus: str, words: tuple[str, ...] = (), ports: int = 1, interpreter: bool = False
    ) -> tuple[int, str, str]:
        """Runs the hook for such a container; returns its exit status and output."""
        return ended(self.start(HOOK, *words, state=self.container(*afus, ports=ports), interpreter=interpreter))

    def store(self, afu: str, content: bytes = b"") -> Path:
        """Writes a bitstream of the card's region to the store."""
        path = self.root / STORE / f"{afu}.gbs"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content or bitstream(afu))
        return path

    def afus(self) -> list[str]:
        """The AFU IDs of the card's ports."""
        return [port.afu for port in self.kernel.fpga(CARD).ports]


def bitstream(afu: str, interface: str = INTERFACE) -> bytes:
    """A bitstream for an emulated card starts with its AFU ID."""
    return gbs(metadata(interface, afu), bytes.fromhex(afu) + b"the rest")


def ended(command: Command) -> tuple[int, str, str]:
    """The exit status of the command and its output."""
    try:
        status = command.process.wait(120)
    finally:
        command.process.kill()
    texts: list[str] = []
    for file in (command.output, command.errors):
        with file:
            file.seek(0)
            texts.append(file.read().decode())
    return status, texts[0], texts[1]


def supervisor(ioctls: str) -> list[str]:
    """The command that runs another one under a supervisor, in a separate process, because pytest's has threads."""
    return [sys.executable, "-c", SUPERVISOR, ioctls]


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ForkServer]]:
    """The socket at which tests serve ioctls, and a server whose processes have a supervisor that sends them there."""
    ioctls = str(tmp_path_factory.mktemp("fpga") / "ioctls")
    with serve_ioctls(Kernel(NodeSpec()), ioctls), open(os.devnull, "r+b") as nothing:
        server = ForkServer(wrapper=supervisor(ioctls))
        assert server.start(TOOL, ["-h"], os.environ, (nothing.fileno(),) * 3).wait(60) == 0
    yield ioctls, server
    server.close()


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path, supervised: tuple[str, ForkServer]) -> Iterator[Node]:
    """A node with one card; parametrized by what is special about it. Skipped where nothing can be mounted."""
    kernel = Kernel(NodeSpec(fpgas=[getattr(request, "param", FpgaSpec())]))
    with mounted_for_test(kernel, tmp_path) as root:
        try:
            with serve_ioctls(kernel, supervised[0]):
                yield Node(kernel, root, *supervised)
        finally:
            kernel.fpga(CARD).resume.set()


TWO_PORTS = pytest.mark.parametrize("node", [FpgaSpec(afus=(NLB0, NLB0))], indirect=True, ids=["two-ports"])


class TestHook:
    def test_a_region_is_programmed_once(self, node: Node) -> None:
        node.store(NLB3)
        assert node.hook(NLB3, interpreter=True) == (0, "", "")
        assert node.afus() == [NLB3]
        # The runtime runs it once more for each further region device.
        assert node.hook(NLB3) == (0, "", "")
        assert node.kernel.fpga(CARD).attempts == 1

    @TWO_PORTS
    def test_each_of_two_regions_is_programmed_with_its_afu(self, node: Node) -> None:
        node.store(NLB3)
        assert node.hook(NLB0, NLB3, ports=2) == (0, "", "")
        assert node.afus() == [NLB0, NLB3]

    @pytest.mark.parametrize(
        ("outcome", "problem"),
        [
            ("EIO", "dfl-fme.0: programming failed: Input/output error (EIO); the bitstream is for another card"),
            ("half", "dfl-fme.0: programming failed: Input/output error (EIO)"),
            ("ENODEV", "dfl-fme.0: programming failed: No such device (ENODEV)"),
            ("other", f"expected {NLB3}"),
        ],
    )
    @pytest.mark.untraced
    def test_errors_of_the_card_are_reported_in_one_line(self, node: Node, outcome: Outcome, problem: str) -> None:
        node.store(NLB3)
        node.kernel.fpga(CARD).outcomes.append(outcome)
        status, out, err = node.hook(NLB3)
        assert (status, out) == (1, "")
        assert err.startswith("intel-fpga-crihook: FPGA_AFU_1 in dfl-port.0: ")
        assert problem in err
        assert err.count("\n") == 1
        # A failed attempt does not affect the next one.
        assert node.hook(NLB3) == (0, "", "")

    @pytest.mark.untraced
    def test_a_missing_or_wrong_bitstream_is_reported(self, node: Node) -> None:
        assert f"no bitstream for AFU {NLB3} in region {INTERFACE}" in node.hook(NLB3)[2]
        node.store(NLB3, bitstream(NLB0))
        assert f"{NLB3}.gbs: found id {NLB0} in the file" in node.hook(NLB3)[2]
        node.store(NLB3, bitstream(NLB3, OTHER))
        assert f"made for regions with interface id {OTHER}" in node.hook(NLB3)[2]
        assert node.kernel.fpga(CARD).attempts == 0

    def test_a_busy_driver_is_retried(self, node: Node) -> None:
        node.store(NLB3)
        node.kernel.fpga(CARD).outcomes.extend(["EBUSY", "EAGAIN"])
        assert node.hook(NLB3) == (0, "", "")
        assert node.kernel.fpga(CARD).attempts == 3

    def test_a_card_that_hangs_does_not_block_the_runtime(self, node: Node) -> None:
        node.store(NLB3)
        node.kernel.fpga(CARD).outcomes.append("hang")
        status, _out, err = ended(node.start(HOOK, "-timeout=2", state=node.container(NLB3)))
        assert status == 1
        assert "took more than 2 s; check the kernel log (dmesg) for the FPGA driver" in err

    @pytest.mark.parametrize("node", [FpgaSpec(seconds=0.5)], indirect=True, ids=["slow"])
    def test_two_hooks_for_one_region_program_it_once(self, node: Node) -> None:
        node.store(NLB3)
        both = [node.start(HOOK, state=node.container(NLB3, name=name)) for name in ("one", "two")]
        assert [ended(command) for command in both] == [(0, "", "")] * 2
        assert (node.afus(), node.kernel.fpga(CARD).attempts) == ([NLB3], 1)

    async def test_a_killed_hook_leaves_no_lock(self, node: Node) -> None:
        node.store(NLB3)
        card = node.kernel.fpga(CARD)
        card.outcomes.append("hang")
        command = node.start(HOOK, state=node.container(NLB3))
        await until(lambda: card.attempts == 1, 60)
        command.process.terminate()
        assert ended(command)[0] != 0
        card.resume.set()
        await until(lambda: not card.ports[0].disabled, 60)
        assert node.hook(NLB3) == (0, "", "")
        assert node.afus() == [NLB3]

    def test_an_endless_oci_state_is_not_read_completely(self, node: Node) -> None:
        status, _out, err = ended(node.start(HOOK, state="[" * 1_048_577))
        assert (status, err) == (1, "intel-fpga-crihook: the container's state: more than 1048576 bytes\n")

    @pytest.mark.parametrize("blocking", [True, False])
    def test_a_silent_runtime_causes_a_timeout(self, blocking: bool) -> None:
        command = [sys.executable, "-m", "accelplane.cli.fpgahook", "-timeout=0.5"]
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, blocking)
        try:
            result = subprocess.run(command, stdin=read_end, capture_output=True, text=True, timeout=60, check=False)
        finally:
            os.close(read_end)
            os.close(write_end)
        assert result.returncode == 1
        assert "reading the container's state from standard input took more than 0.5 s" in result.stderr

    @pytest.mark.parametrize(
        ("redirected", "problem"),
        [
            ("<&-", "the container's state: standard input: Bad file descriptor\n"),
            ("</dev/null", "the container's state: not JSON: Expecting value: line 1 column 1 (char 0)\n"),
        ],
    )
    def test_a_missing_oci_state_is_reported(self, redirected: str, problem: str) -> None:
        command = ["sh", "-c", f'"$0" -m accelplane.cli.fpgahook {redirected}', sys.executable]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout, result.stderr) == (1, "", f"intel-fpga-crihook: {problem}")

    def test_the_annotation_can_be_required(self, node: Node) -> None:
        assert node.hook(NLB0, words=("-require-annotation",)) == (
            1,
            "",
            "intel-fpga-crihook: annotation com.intel.fpga.mode is '', expected fpga.intel.com/region\n",
        )
        state = json.loads(node.container(NLB0)) | {"annotations": {"com.intel.fpga.mode": "fpga.intel.com/region"}}
        assert ended(node.start(HOOK, "-require-annotation", state=json.dumps(state))) == (0, "", "")


class TestTool:
    def test_port_info_includes_the_results_of_ioctls(self, node: Node) -> None:
        status, out, err = node.tool("-d", "dfl-port.0", "portinfo")
        assert (status, err) == (0, "")
        assert out.endswith(
            f"Interface UUID                   : {INTERFACE}\n"
            f"Accelerator UUID                 : {NLB0}\n"
            "Kernet API Version               : 0\n"
            "Port Regions                     : 2\n"
            "Port Region (Index/Size/Offset)  : 0 / 262144 / 0\n"
            "Port Region (Index/Size/Offset)  : 1 / 262144 / 262144\n"
        )
        found = json.loads(node.tool("portinfo", "-d", "dfl-port.0", "-json")[1])
        assert (found["acceleratorId"], found["regions"][1]) == (NLB0, {"index": 1, "size": 262144, "offset": 262144})

    def test_a_port_is_programmed(self, node: Node) -> None:
        path = node.store(NLB3)
        message = (
            f'Before: Interface ID: "{INTERFACE}" AFU ID: "{NLB0}"\n'
            f'Programming "{path}" to port "dfl-port.0": OK\n'
            f'After : Interface ID: "{INTERFACE}" AFU ID: "{NLB3}"\n'
        )
        assert node.tool("-b", str(path), "-d", "dfl-port.0", "pr") == (0, message, "")

    def test_a_failed_command_exits_with_an_error(self, node: Node) -> None:
        path = node.store(NLB3)
        node.kernel.fpga(CARD).outcomes.append("other")
        status, out, err = node.tool("-b", str(path), "-d", "dfl-port.0", "pr", interpreter=True)
        assert status == 1
        assert '": FAILED\nAfter : ' in out
        assert err.startswith("fpga_tool: dfl-port.0: AFU id is f7df405cbd7acf7222f144b0b93acd19 after programming")

    @pytest.mark.untraced
    def test_results_of_programming_are_counted_and_shown_only_in_json(self, node: Node) -> None:
        before = node.tool("-d", "dfl-fme.0", "fmeinfo")
        path = node.store(NLB3)
        node.kernel.fpga(CARD).outcomes.append("EIO")
        assert node.hook(NLB3)[0] == 1
        assert node.hook(NLB3) == (0, "", "")
        record = node.root / "run/accelplane-fpga/dfl-fme.0.json"
        assert node.tool("-d", "dfl-fme.0", "fmeinfo") == before
        counts = json.loads(node.tool("-d", "dfl-fme.0", "-json", "fmeinfo")[1])["programmings"]
        assert counts["outcomes"] == {"programmed": 1, "failed": 1}
        assert counts["errors"] == {"EIO": 1}
        assert counts["last"]["afu"] == NLB3
        # An invalid record is reset.
        record.write_text("junk")
        message = (
            "/run/accelplane-fpga/dfl-fme.0.json: not JSON, expected a record of programmings; the record is reset\n"
        )
        status, _out, err = node.tool("-b", str(path), "-d", "dfl-port.0", "pr")
        assert (status, err) == (0, f"fpga_tool: {message}")
        record.write_text("junk")
        node.store(NLB0)
        assert node.hook(NLB0) == (0, "", f"intel-fpga-crihook: {message}")

    @TWO_PORTS
    @pytest.mark.untraced
    def test_ports_are_assigned_to_virtual_functions_and_released(self, node: Node) -> None:
        assert node.tool("-d", "dfl-fme.0", "-n", "2", "sriov") == (
            0,
            "Release port 0\nRelease port 1\nWrite 2 to sriov_numvfs (was 0)\n",
            "",
        )
        assert len(list((node.root / "sys/class/fpga_region").glob("region*/dfl-port.*"))) == 2
        assert (
            node.tool("-q", "-d", "dfl-port.1", "portinfo")[1].splitlines()[4] == f"PCIe s:b:d:f{'':21}: 0000:63:00.2"
        )
        assert node.tool("-d", "dfl-fme.0", "-n", "0", "sriov") == (
            0,
            "Write 0 to sriov_numvfs (was 2)\nAssign port 0\nAssign port 1\n",
            "",
        )
        assert node.tool("-d", "dfl-fme.0", "-n", "0", "-json", "sriov")[0] == 0

    @TWO_PORTS
    def test_an_incomplete_change_is_rolled_back(self, node: Node) -> None:
        node.kernel.fail(f"/sys/bus/pci/devices/{CARD}/sriov_numvfs", 28, on="write")
        status, out, err = node.tool("-d", "dfl-fme.0", "-n", "1", "sriov")
        assert (status, out) == (1, "Release port 1\nWrite 1 to sriov_numvfs (was 0)\n")
        assert "No space left on device (writing '1\\n'); rolled back" in err
        assert sorted(path.name for path in (node.root / "sys/class/fpga_region/region0").glob("dfl-port.*")) == [
            "dfl-port.0",
            "dfl-port.1",
        ]

    @TWO_PORTS
    def test_a_port_is_released_and_assigned_by_its_number(self, node: Node) -> None:
        port = node.root / "sys/class/fpga_region/region0/dfl-port.1"
        assert node.tool("-d", "dfl-fme.0", "-p", "1", "release") == (0, "", "")
        assert not port.exists()
        assert "it is in use, or already in that state" in node.tool("-d", "dfl-fme.0", "-p", "1", "release")[2]
        assert node.tool("-d", "dfl-fme.0", "-p", "1", "assign") == (0, "", "")
        assert port.exists()


@pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="no root or no /dev/fuse")
def test_the_fpga_tool_works_with_emulated_cards() -> None:
    words = [sys.executable, "-m", "accelplane", "simulate", "fpga", "--"]
    listed = subprocess.run(
        [*words, sys.executable, "-m", "accelplane", "fpga", "list"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (listed.returncode, listed.stdout, listed.stderr) == (
        0,
        "Detected FPGA FMEs: 1\ndfl-fme.0\nDetected FPGA Ports: 1\ndfl-port.0\n",
        "",
    )
