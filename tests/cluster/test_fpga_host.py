"""The programs of the FPGA init container on a read-only host without Python and libraries."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from bitstreams import INTERFACE, NLB0, NLB3, aocx, gbs, metadata
from fpgatrees import one_port
from manifests import own_image
from trees import write

from accelplane.fpga.allocation import HOOK, hook_arguments

from .images import needs_a_loader
from .product_image import product_image

pytestmark = pytest.mark.cluster

IMAGE = own_image("intel-fpga-initcontainer")
PROGRAMS = ("fpga_tool", "fpgatool", "intel-fpga-crihook")
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec chroot "$0" "$@"'


@pytest.fixture(scope="module")
def programs(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of /usr/local/fpga-sw in the image."""
    directory = tmp_path_factory.mktemp("image")
    with tarfile.open(product_image()) as archive:
        manifest = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        layers = next(image["Layers"] for image in manifest if image["RepoTags"] == [IMAGE])
        with tarfile.open(fileobj=archive.extractfile(layers[-1])) as layer:
            layer.extractall(directory, filter="tar")
    return directory / "usr/local/fpga-sw"


@pytest.fixture
def host(programs: Path, tmp_path: Path) -> Path:
    """A root file system with only the programs and a card."""
    subprocess.run(["cp", "-a", programs, tmp_path / "sw"], check=True)
    one_port(tmp_path / "tree")
    write(tmp_path / "nlb0.gbs", gbs())
    write(tmp_path / "design.aocx", aocx())
    return tmp_path


def run_in_root(host: Path, *command: str, state: str = "") -> tuple[int, str, str]:
    """Runs it in that root file system, read-only, without an environment."""
    words = ["unshare", "--mount", "/bin/sh", "-c", READ_ONLY, str(host), *command]
    result = subprocess.run(words, input=state, env={}, capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stdout, result.stderr


def test_the_three_names_are_one_static_program(programs: Path) -> None:
    assert sorted(path.name for path in programs.iterdir()) == sorted(PROGRAMS)
    assert {(path.stat().st_nlink, path.stat().st_mode & 0o777) for path in programs.iterdir()} == {(3, 0o755)}
    assert not needs_a_loader(programs / "fpga_tool")


def test_the_tool_needs_no_files_of_the_host(host: Path) -> None:
    status, out, err = run_in_root(host, "/sw/fpgatool", "info", "-b", "/nlb0.gbs", "-json")
    assert (status, json.loads(out)["uniqueId"], err) == (0, NLB0, "")
    assert '\tBoard : "pac_a10"\n' in run_in_root(host, "/sw/fpga_tool", "-b", "/design.aocx", "info")[1]
    assert run_in_root(host, "/sw/fpga_tool", "-q", "list") == (0, "", "")
    status, out, err = run_in_root(host, "/sw/fpga_tool", "-root=/tree", "-d", "dfl-port.0", "-q", "portinfo")
    assert (status, err) == (0, "")
    assert f"Accelerator UUID                 : {NLB0}\n" in out
    # Unsupported operations are reported there, too.
    status, _out, err = run_in_root(host, "/sw/fpga_tool", "-b", "/nlb0.gbs", "install")
    assert (status, err.count("\n")) == (1, 1)
    assert "cannot install: Read-only file system" in err


def test_the_hook_needs_no_files_of_the_host(host: Path) -> None:
    def request_for(afu: str) -> tuple[int, str, str]:
        env = ["FPGA_REGIONS=1", f"FPGA_REGION_1={INTERFACE}", f"FPGA_AFU_1={afu}"]
        devices = [{"path": "/dev/dfl-port.0", "type": "c", "major": 244, "minor": 0}]
        hooks = {"createRuntime": [{"path": HOOK, "args": hook_arguments(["dfl-port.0"])}]}
        config = {"process": {"env": env}, "linux": {"devices": devices}, "hooks": hooks}
        write(host / "bundle/config.json", json.dumps(config))
        return run_in_root(host, "/sw/intel-fpga-crihook", "-root=/tree", state='{"bundle": "/bundle"}')

    assert request_for(NLB0) == (0, "", "")
    status, out, err = request_for(NLB3)
    assert (status, out) == (1, "")
    assert err.startswith(f"intel-fpga-crihook: FPGA_AFU_1 in dfl-port.0: no bitstream for AFU {NLB3} in region")


def test_the_program_name_selects_the_command(programs: Path) -> None:
    hook = programs / "intel-fpga-crihook"
    result = subprocess.run(
        ["fpga_tool"], executable=hook, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr.partition(":")[0]) == (1, "intel-fpga-crihook")


def test_the_tools_program_cards(programs: Path, tmp_path: Path) -> None:
    path = tmp_path / "nlb3.gbs"
    path.write_bytes(gbs(metadata(afu=NLB3), bytes.fromhex(NLB3) + b"x" * 3_000_000))
    words = [sys.executable, "-m", "accelplane", "simulate", "fpga", "--"]
    tool = [str(programs / "fpga_tool"), "-b", str(path), "-d", "dfl-port.0", "pr"]
    result = subprocess.run([*words, *tool], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith(f'OK\nAfter : Interface ID: "{INTERFACE}" AFU ID: "{NLB3}"\n')
