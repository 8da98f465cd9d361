"""Images of demo workloads: the programs that report by their exit status whether a device worked, and the recipes."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from debian import read_lock
from demo_images import DEMOS, DIRECTORY

REPOSITORY = Path(__file__).parents[2]
CLINFO = DIRECTORY / "intel-opencl-icd/usr/local/bin/clinfo"
DPDK = DIRECTORY / "crypto-perf/usr/local/bin/run-dpdk-test"


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def run(command: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command], env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True)  # noqa: PLW1510


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("echo 'Number of platforms      1'; echo 'Number of devices                1'", 0),
        ("echo 'Number of devices     1'; echo 'Number of devices     0'", 0),
        ("echo 'Number of platforms      1'; echo 'Number of devices                0'", 1),
        ("echo 'Number of platforms      0'", 1),
        ("echo 'Number of devices     1'; exit 3", 1),
    ],
)
def test_clinfo_succeeds_only_with_a_device(tmp_path: Path, script: str, status: int) -> None:
    result = run(CLINFO, CLINFO=str(program(tmp_path / "clinfo", script)))
    assert result.returncode == status
    assert "Number of" in result.stdout


@pytest.fixture
def benchmark(tmp_path: Path) -> dict[str, str]:
    """An environment in which the benchmarks print their name and options, and fail if an option is `fail`."""
    for name in ("dpdk-test-crypto-perf", "dpdk-test-compress-perf"):
        program(tmp_path / "bin" / name, 'echo "${0##*/} $*"\ncase " $* " in *" fail "*) exit 9 ;; esac')
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "cgroup/cpuset.cpus").write_text("")
    (tmp_path / "cgroup/cpuset.cpus.effective").write_text("2-4\n")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    return {"PATH": path, "CGROUP": str(tmp_path / "cgroup"), "QAT0": "0000:3d:01.0", "QAT1": "0000:3d:01.1"}


@pytest.mark.parametrize("kind", ["crypto", "compress"])
def test_the_benchmark_gets_the_devices_and_cpus_of_the_container(benchmark: dict[str, str], kind: str) -> None:
    result = run(DPDK, **benchmark, TESTCMD=kind, PTEST="--option 1")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == sorted(
        f"dpdk-test-{kind}-perf -l 2-4 -a 0000:3d:01.0 -a 0000:3d:01.1 -- --option 1".split()
    )


def test_the_exit_status_is_that_of_the_benchmark(benchmark: dict[str, str]) -> None:
    assert run(DPDK, **benchmark, TESTCMD="crypto", PTEST="fail").returncode == 9


@pytest.mark.parametrize(
    ("without", "changed", "problem"),
    [
        ((), {"TESTCMD": "sha"}, "TESTCMD: found 'sha', expected crypto or compress"),
        ((), {}, "TESTCMD: found '', expected crypto or compress"),
        (("QAT0", "QAT1"), {"TESTCMD": "crypto"}, "found no variable QAT"),
        (("CGROUP",), {"TESTCMD": "crypto", "CGROUP": "/nowhere"}, "/nowhere: found no list of CPUs"),
    ],
)
def test_missing_conditions_are_errors(
    benchmark: dict[str, str], without: tuple[str, ...], changed: dict[str, str], problem: str
) -> None:
    environment = {name: value for name, value in benchmark.items() if name not in without} | changed
    result = run(DPDK, **environment)
    assert result.returncode == 1
    assert problem in result.stderr


def images_of_manifests() -> set[str]:
    manifests = [file for folder in ("demo", "deploy") for file in (REPOSITORY / folder).rglob("*.yaml")]
    return {name for file in manifests for name in re.findall(r"image: (intel/\S+)", file.read_text())}


def test_demo_images_have_the_names_and_tags_of_the_manifests() -> None:
    assert {f"intel/{demo.name}:{demo.tag}" for demo in DEMOS} <= images_of_manifests()


def test_the_documentation_lists_for_every_demo_image_whether_it_can_be_built() -> None:
    text = (REPOSITORY / "docs/demos.md").read_text()
    built, _, other = text.partition("### Build the images")[2].partition("cannot be built from packages of Debian")
    for image in images_of_manifests():
        name = image.partition(":")[0]
        assert f"`{name}`" in (built if name.removeprefix("intel/") in {demo.name for demo in DEMOS} else other)


def test_the_packages_of_every_demo_are_locked() -> None:
    for demo in DEMOS:
        lock = read_lock(DIRECTORY / f"{demo.name}.lock")
        assert {release for release, _, _ in lock} == {demo.release}
        assert {*demo.packages, *(name for name, _ in demo.files)} <= {name for _, _, name in lock}
