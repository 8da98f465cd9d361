"""`fpga_tool`: output for files and trees, and rejected operations."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bitstreams import HASH, INTERFACE, NLB0, NLB3, aocx, gbs, metadata
from fpgatrees import Card, class_device, fme, function, one_port, with_vf
from trees import link, write

from accelplane.cli.fpgatool import COMMANDS, main
from accelplane.fpga import FpgaError
from accelplane.fpga.program import RetryPolicy
from accelplane.fpga.sriov import State, Step, apply, plan
from accelplane.fpga.sysfs import read_fme
from accelplane.host import Host

pytestmark = pytest.mark.memory

STORE = f"/srv/intel.com/fpga/{INTERFACE}"

OPAE = "fpga/intel-fpga-dev.0/intel-fpga-fme.0"
PORT_LINES = f"""//****** PORT ******//
Name                             : dfl-port.1
Device Node                      : /dev/dfl-port.1
SysFS Path                       : /sys/devices/pci0000:80/0000:80:01.0/0000:81:00.1/fpga_region/region12/dfl-port.1
PCIe s:b:d:f                     : 0000:81:00.1
Device Id                        : 0x8086:0x09c4
FME Name                         : dfl-fme.0
Port Id                          : 1
Interface UUID                   : {INTERFACE}
Accelerator UUID                 : {NLB3}
"""
FME_LINES = f"""//****** FME ******//
Name                             : intel-fpga-fme.0
Device Node                      : /dev/intel-fpga-fme.0
SysFS Path                       : /sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/{OPAE}
PCIe s:b:d:f                     : 0000:81:00.0
Device Id                        : 0x8086:0x09c4
Interface UUID                   : {INTERFACE}
"""


def tool(capsys: pytest.CaptureFixture[str], root: Path, *words: str) -> tuple[int, str, str]:
    """The exit status, stdout and stderr."""
    status = main([f"-root={root}", *words])
    out, err = capsys.readouterr()
    return status, out, err


def put(root: Path, name: str, content: bytes) -> str:
    (root / name).write_bytes(content)
    return str(root / name)


class TestBitstreams:
    def test_a_gbs_file_is_described(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = put(tmp_path, "nlb0.gbs", gbs(raw=b"seven b"))
        lines = (
            f'Bitstream file        : "{path}"\n'
            f'Interface UUID        : "{INTERFACE}"\n'
            f'Accelerator Type UUID : "{NLB0}"\n'
            f'Unique UUID           : "{NLB0}"\n'
            f'Installation Path     : "{STORE}/{NLB0}.gbs"\n'
        )
        assert tool(capsys, tmp_path, "-b", path, "info") == (0, f'{lines}Extra:\n\tSize : "7"\n', "")
        assert tool(capsys, tmp_path, "-b", path, "-q", "info") == (0, lines, "")

    def test_an_opencl_design_has_more_details(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = put(tmp_path, "x.aocx", aocx(gbs(raw=b"opencl")))
        status, out, _err = tool(capsys, tmp_path, "-b", path, "-json", "info")
        assert (status, json.loads(out)) == (
            0,
            {
                "file": path,
                "interfaceId": INTERFACE,
                "acceleratorTypeId": NLB0,
                "uniqueId": HASH,
                "installationPath": f"{STORE}/{HASH}.aocx",
                "extra": {"Board": "pac_a10", "Target": "fpga", "Hash": HASH, "Version": "19.4", "Size": "6"},
            },
        )

    def test_texts_of_files_are_escaped_for_terminals(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = put(tmp_path, "x.aocx", aocx(board='a"\x1b[2J\u202eb'))
        assert '\tBoard : "a\\"\\u001b[2J\\u202eb"\n' in tool(capsys, tmp_path, "-b", path, "info")[1]

    def test_a_file_is_installed_once(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = put(tmp_path, "nlb0.gbs", gbs())
        installed = tmp_path / STORE[1:] / f"{NLB0}.gbs"
        expected = f'"{path}" as "{STORE}/{NLB0}.gbs"\n'
        # Also with quiet output: the original's dry run was a real one then.
        assert tool(capsys, tmp_path, "-b", path, "-q", "-dry-run", "install") == (0, "", "")
        assert tool(capsys, tmp_path, "-b", path, "-dry-run", "install") == (0, f"Would install {expected}", "")
        assert not installed.exists()
        assert tool(capsys, tmp_path, "-b", path, "install") == (0, f"Installed {expected}", "")
        assert installed.read_bytes() == gbs()
        assert (installed.stat().st_mode & 0o777, installed.parent.stat().st_mode & 0o777) == (0o644, 0o755)
        status, out, err = tool(capsys, tmp_path, "-b", path, "install")
        assert (status, out) == (1, "")
        assert err == f"fpga_tool: {STORE}/{NLB0}.gbs: file exists; use -force to overwrite it\n"
        assert tool(capsys, tmp_path, "install", "-b", path, "-force")[0] == 0
        assert [file.name for file in installed.parent.iterdir()] == [installed.name]


class TestDevices:
    def test_a_port_is_described(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        with_vf(tmp_path)
        for command in ("fpgainfo", "portinfo", "fmeinfo"):
            assert tool(capsys, tmp_path, "-q", "-d", "dfl-port.1", command) == (0, PORT_LINES, "")

    def test_an_fme_is_described(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        one_port(tmp_path, "opae")
        assert tool(capsys, tmp_path, "-q", "-d", "/dev/intel-fpga-fme.0", "fpgainfo") == (0, FME_LINES, "")

    def test_properties_that_need_the_driver_are_omitted(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        one_port(tmp_path)
        status, out, err = tool(capsys, tmp_path, "-d", "dfl-port.0", "portinfo")
        assert (status, out) == (1, "")
        assert err.startswith("fpga_tool: ")
        assert "reading the API version failed" in err

    def test_devices_are_listed(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        for name in ("dfl-fme.0", "dfl-port.0", "dfl-port.1", "serial8250"):
            write(tmp_path / "sys/devices/platform" / name / "uevent", "")
            link(tmp_path / "sys/bus/platform/devices" / name, tmp_path / "sys/devices/platform" / name)
        fmes, ports = "Detected FPGA FMEs: 1\ndfl-fme.0\n", "Detected FPGA Ports: 2\ndfl-port.0\ndfl-port.1\n"
        assert tool(capsys, tmp_path, "list") == (0, fmes + ports, "")
        assert tool(capsys, tmp_path, "list-fme") == (0, fmes, "")
        assert tool(capsys, tmp_path, "list-port") == (0, ports, "")
        assert tool(capsys, tmp_path, "-q", "list") == (0, "dfl-fme.0\ndfl-port.0\ndfl-port.1\n", "")
        assert json.loads(tool(capsys, tmp_path, "list", "-json")[1]) == {
            "fmes": ["dfl-fme.0"],
            "ports": ["dfl-port.0", "dfl-port.1"],
        }

    def test_without_devices_nothing_is_listed(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert tool(capsys, tmp_path, "list")[1] == "Detected FPGA FMEs: 0\nDetected FPGA Ports: 0\n"


class TestDryRuns:
    def test_nothing_is_programmed(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        one_port(tmp_path)
        path = put(tmp_path, "nlb3.gbs", gbs(metadata(afu=NLB3)))
        ids = f'Interface ID: "{INTERFACE}" AFU ID: "{NLB0}"'
        outcome = "OK (dry run, nothing was programmed)"
        assert tool(capsys, tmp_path, "-dry-run", "-b", path, "-d", "dfl-port.0", "pr") == (
            0,
            f'Before: {ids}\nProgramming "{path}" to port "dfl-port.0": {outcome}\nAfter : {ids}\n',
            "",
        )

    def test_a_wrong_bitstream_is_reported(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        one_port(tmp_path)
        path = put(tmp_path, "other.gbs", gbs(metadata("c" * 32)))
        status, out, err = tool(capsys, tmp_path, "-dry-run", "-b", path, "-d", "dfl-port.0", "pr")
        assert status == 1
        assert '": FAILED\n' in out
        assert f"made for regions with interface id {'c' * 32}, that of dfl-port.0 is {INTERFACE}" in err

    @pytest.mark.parametrize("word", ["release", "assign"])
    def test_no_port_is_moved(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, word: str) -> None:
        one_port(tmp_path)
        expected = f"Would {word} port 0 of dfl-fme.0\n"
        assert tool(capsys, tmp_path, "-dry-run", "-d", "dfl-fme.0", word) == (0, expected, "")
        status, _out, err = tool(capsys, tmp_path, "-dry-run", "-d", "dfl-fme.0", "-p", "1", word)
        assert (status, err) == (1, "fpga_tool: -p 1: dfl-fme.0 has 1 ports, numbered from 0\n")

    def test_no_virtual_function_is_created(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        one_port(tmp_path)
        expected = "Would release port 0\nWould write 1 to sriov_numvfs (was 0)\n"
        assert tool(capsys, tmp_path, "-dry-run", "-d", "dfl-fme.0", "-n", "1", "sriov") == (0, expected, "")
        assert (
            tool(capsys, tmp_path, "-d", "dfl-fme.0", "-n", "0", "sriov")[1]
            == "dfl-fme.0: 0 virtual functions already\n"
        )


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (
            [],
            1,
            "found no command, expected one of info, install, fpgainfo, fmeinfo, portinfo, list, list-fme",
        ),
        (["flash"], 1, "found command 'flash', expected one of info, install"),
        (["info"], 1, "-b: found nothing, expected a bitstream file"),
        (["fpgainfo"], 1, "-d: found nothing, expected the device node"),
        (["pr", "-b", "x"], 1, "-d: found nothing"),
        (["sriov", "-d", "dfl-fme.0"], 1, "-n: found nothing"),
        (["fpgainfo", "-d", "null"], 1, "-d: found 'null', expected the name of an FME or a port"),
        (["release", "-d", "dfl-port.0"], 1, "not an FPGA FME"),
        (["pr", "-b", "x", "-d", "dfl-fme.0"], 1, "not an FPGA port"),
        (["portinfo", "-d", "dfl-port.7"], 1, "no such device node; load the FPGA driver"),
        (["info", "-b", "/nowhere/x.gbs"], 1, "/nowhere/x.gbs: No such file or directory"),
        (["info", "-b", "x.bin"], 1, "extension '.bin', expected .gbs or .aocx"),
        (["-flash", "info"], 2, "flag provided but not defined: -flash"),
        (["-p", "-1", "release"], 2, "invalid value"),
        (["-h"], 0, "Usage of fpga_tool:"),
        (["list", "and", "more"], 0, "fpga_tool: ignored: 'and' 'more'"),
    ],
    ids=lambda value: "-".join(value) or "nothing" if isinstance(value, list) else None,
)
def test_invalid_arguments_are_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], status: int, problem: str
) -> None:
    one_port(tmp_path)
    found, _out, err = tool(capsys, tmp_path, *words)
    assert found == status
    assert problem in err


def test_the_usage_names_every_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert tool(capsys, tmp_path, "-h")[2].endswith(f"\nCommands: {', '.join(COMMANDS)}\n")


def test_an_unwritable_standard_output_is_an_error(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "accelplane.cli.fpgatool", f"-root={tmp_path}", "list"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "fpga_tool: standard output: No space left on device\n")


RELEASE, ASSIGN, VFS = "release", "assign", "vfs"


@pytest.mark.parametrize(
    ("state", "count", "steps"),
    [
        (State(2, (0, 1), 0, 2), 0, []),
        (State(2, (0, 1), 0, 2), 1, [(RELEASE, 1, 0), (VFS, 1, 0)]),
        (State(2, (0, 1), 0, 2), 2, [(RELEASE, 0, 0), (RELEASE, 1, 0), (VFS, 2, 0)]),
        (State(2, (0,), 1, 2), 1, []),
        (State(2, (0,), 1, 2), 0, [(VFS, 0, 1), (ASSIGN, 1, 0)]),
        (State(2, (0,), 1, 2), 2, [(VFS, 0, 1), (RELEASE, 0, 0), (VFS, 2, 0)]),
        (State(3, (0,), 2, 3), 1, [(VFS, 0, 2), (ASSIGN, 1, 0), (VFS, 1, 0)]),
        # Another process was stopped half way.
        (State(2, (0,), 0, 2), 1, [(VFS, 1, 0)]),
        (State(2, (0,), 0, 2), 0, [(ASSIGN, 1, 0)]),
    ],
)
def test_one_port_is_released_per_virtual_function(state: State, count: int, steps: list[tuple[str, int, int]]) -> None:
    assert [tuple(step) for step in plan(state, count)] == steps


@pytest.mark.parametrize(("ports", "limit", "count"), [(1, 1, 2), (2, 1, 2), (1, 4, 2)])
def test_the_number_of_virtual_functions_is_limited(ports: int, limit: int, count: int) -> None:
    with pytest.raises(FpgaError, match=f"2 virtual functions: expected 0 to {min(ports, limit)}, the card has"):
        plan(State(ports, tuple(range(ports)), 0, limit), count)


@pytest.mark.parametrize("steps", [(Step("vfs", 0, 2), Step("assign", 1), Step("vfs", 1))])
def test_every_step_is_rolled_back(steps: tuple[Step, ...]) -> None:
    assert [step.inverse().inverse() for step in steps] == list(steps)
    assert [tuple(step.inverse()) for step in steps] == [("vfs", 2, 0), ("release", 1, 0), ("vfs", 0, 1)]


def test_a_card_without_virtual_functions_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    card = Card(tmp_path)
    function(card)
    class_device(card, 0)
    fme(card)
    (card.pci / "sriov_totalvfs").unlink()
    status, _out, err = tool(capsys, tmp_path, "-d", "dfl-fme.0", "-n", "1", "sriov")
    assert status == 1
    assert "sriov_totalvfs: No such file or directory" in err


def test_a_card_that_hangs_during_the_rollback_ends_with_a_timeout(tmp_path: Path) -> None:
    fme = read_fme(Host(tmp_path), one_port(tmp_path).name("fme", 0))
    requests: list[int] = []

    def call(_node: str, request: int, _argument: bytearray | int) -> int:
        requests.append(request)
        if len(requests) > 1:
            signal.pause()
        return 0

    with pytest.raises(
        FpgaError,
        match=r"^creating virtual functions took more than 0\.1 s; .*; not rolled back: release port 0 \(rollback ",
    ):
        apply(Host(tmp_path), fme, [Step("release", 0), Step("release", 1)], call=call, retry=RetryPolicy(0.1))
    assert [request & 0xFF for request in requests] == [0x81, 0x81, 0x82]
