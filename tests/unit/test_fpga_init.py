"""The FPGA init container: hook and tool on the host, and the mechanism that runs the hook."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accelplane.cli.fpgainit import DEFINITION, HOME, HOOK, main


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host's directories, and the image's programs, three names of one file."""
    for name in ("image", "fpga-sw", "hooks.d"):
        (tmp_path / name).mkdir()
    put(tmp_path / "image", b"new")
    return tmp_path


def put(image: Path, content: bytes) -> None:
    for file in image.iterdir():
        file.unlink()
    (image / "fpga_tool").write_bytes(content)
    for name in ("fpgatool", "intel-fpga-crihook"):
        os.link(image / "fpga_tool", image / name)


def init(host: Path, *words: str) -> int:
    return main([f"-source={host / 'image'}", f"-target={host / 'fpga-sw'}", f"-hooks-dir={host / 'hooks.d'}", *words])


def content(directory: Path) -> dict[str, str]:
    return {
        path.name: f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in sorted(directory.iterdir())
    }


PROGRAMS = {"fpga_tool": "new", "fpgatool": "new", "intel-fpga-crihook": "new"}
HOOK_DEFINITION = {"hook": HOOK, "stage": ["prestart"], "annotation": ["fpga.intel.com/region"]}


def test_programs_are_installed_as_one_file(host: Path) -> None:
    assert init(host) == 0
    assert content(host / "fpga-sw") == PROGRAMS
    status = (host / "fpga-sw/intel-fpga-crihook").stat()
    assert (status.st_nlink, status.st_mode & 0o777) == (3, 0o755)


def test_older_programs_are_replaced_and_other_files_stay(host: Path) -> None:
    old = host / "fpga-sw"
    (old / "fpgatool").write_text("old")
    (old / "intel-fpga-crihook").symlink_to("/nowhere")
    (old / "theirs").write_text("theirs")
    # An earlier start was killed here.
    (old / ".fpgatool.accelplane-new").write_text("half")
    running = (old / "fpgatool").open()
    assert init(host) == 0
    assert content(old) == {**PROGRAMS, "theirs": "theirs"}
    assert running.read() == "old"
    running.close()


def test_a_second_run_changes_nothing(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(host) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (host / "fpga-sw").iterdir()}
    capsys.readouterr()
    put(host / "image", b"new")
    assert init(host) == 0
    assert capsys.readouterr().out == ""
    assert {path.name: path.stat().st_mtime_ns for path in (host / "fpga-sw").iterdir()} == before


def test_a_program_without_execute_permission_is_replaced(host: Path) -> None:
    init(host)
    (host / "fpga-sw/fpgatool").chmod(0o644)
    assert init(host) == 0
    assert {path.stat().st_mode & 0o777 for path in (host / "fpga-sw").iterdir()} == {0o755}


def test_hooks_d_gets_the_definition_for_crio_without_cdi(host: Path) -> None:
    assert init(host, "-enable=hooks.d") == 0
    assert json.loads((host / "fpga-sw" / DEFINITION).read_text()) == HOOK_DEFINITION
    assert content(host / "hooks.d") == {DEFINITION: f"-> {HOME}/{DEFINITION}"}
    assert init(host, "-enable=hooks.d") == 0


def test_with_cdi_older_definitions_are_removed(host: Path) -> None:
    init(host, "-enable=hooks.d")
    (host / "hooks.d/theirs.json").write_text("{}")
    assert init(host) == 0
    assert content(host / "fpga-sw") == PROGRAMS
    assert content(host / "hooks.d") == {"theirs.json": "{}"}


def test_the_hooks_directory_need_not_be_mounted(host: Path) -> None:
    init(host, "-enable=hooks.d")
    for file in (host / "hooks.d").iterdir():
        file.unlink()
    (host / "hooks.d").rmdir()
    assert init(host) == 0
    # CRI-O ignores a dangling link.
    assert content(host / "fpga-sw") == PROGRAMS


@pytest.mark.parametrize(
    "other",
    ['{"hook": "/usr/bin/theirs"}', "no JSON", "[]", '{"a":' + "[" * 9000 + "]" * 9000 + "}"],
    ids=["theirs", "no JSON", "a list", "deep"],
)
def test_definitions_of_other_hooks_stay(host: Path, other: str) -> None:
    (host / "hooks.d" / DEFINITION).write_text(other)
    assert init(host) == 0
    assert content(host / "hooks.d") == {DEFINITION: other}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-enable=podman"], "-enable: found 'podman', expected one of cdi, hooks.d"),
        (["-source=/nowhere"], "-source: /nowhere: not a directory; mount it"),
        (["-target=/nowhere"], "-target: /nowhere: not a directory; mount it"),
        (["-enable=hooks.d", "-hooks-dir=/nowhere"], "-hooks-dir: /nowhere: not a directory; mount it"),
    ],
)
def test_missing_directories_are_reported(
    host: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    assert init(host, *words) == 1
    assert capsys.readouterr().err == f"accelplane-fpga-init: {problem}\n"
    assert content(host / "fpga-sw") == {}


def test_a_file_that_cannot_be_replaced_is_reported(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (host / "fpga-sw/fpga_tool").mkdir()
    assert init(host) == 1
    err = capsys.readouterr().err
    assert "fpga-sw/fpga_tool" in err
    assert "Is a directory" in err


@pytest.mark.parametrize("make_entry", [Path.mkdir, os.mkfifo])
def test_entries_that_are_not_files_are_kept(host: Path, make_entry: Callable[[Path], None]) -> None:
    make_entry(host / "hooks.d" / DEFINITION)
    assert init(host) == 0
    assert (host / "hooks.d" / DEFINITION).exists()


def test_a_full_disk_leaves_no_temporary_file(host: Path) -> None:
    put(host / "image", bytes(1 << 22))
    words = [f"-source={host / 'image'}", f"-target={host / 'fpga-sw'}", f"-hooks-dir={host / 'hooks.d'}"]
    # Coverage data must also fit.
    code = (
        "import resource, sys; from accelplane.cli.fpgainit import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); sys.exit(main())"
    )
    result = subprocess.run([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.endswith("fpga-sw/.fpga_tool.accelplane-new: File too large\n")
    assert content(host / "fpga-sw") == {}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_an_unwritable_standard_output_is_an_error(host: Path) -> None:
    words = [f"-source={host / 'image'}", f"-target={host / 'fpga-sw'}", f"-hooks-dir={host / 'hooks.d'}"]
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "accelplane.cli.fpgainit", *words]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "accelplane-fpga-init: standard output: No space left on device\n")
