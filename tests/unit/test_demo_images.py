"""Images of demo workloads: the programs that report by their exit status whether a device worked, and the recipes."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from debian import RecipeError, read_lock
from demo_recipes import DEMOS, DIRECTORY, Demo
from demo_sources import (
    GivenSource,
    copy_image,
    describe_missing,
    missing_sources,
    parse_sources,
    unpack_archived,
    verify,
)
from demo_wheels import install_libraries
from hypothesis import given
from hypothesis import strategies as st

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


def recipe(name: str) -> Demo:
    return next(demo for demo in DEMOS if demo.name == name)


def test_every_image_of_the_manifests_has_a_recipe() -> None:
    assert {f"intel/{demo.name}:{demo.tag}" for demo in DEMOS} == images_of_manifests()


def test_the_documentation_has_a_row_for_every_demo_image() -> None:
    text = (REPOSITORY / "docs/demos.md").read_text().partition("### Build the images")[2]
    rows = [row for row in text.splitlines() if row.startswith("| `intel/")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(f"intel/{demo.name}" for demo in DEMOS)
    for demo in DEMOS:
        (row,) = (row for row in rows if f"`intel/{demo.name}`" in row)
        assert [f"`{source.name}=`" in row for source in demo.sources] == [True] * len(demo.sources)


def test_the_packages_of_every_demo_are_locked() -> None:
    for demo in DEMOS:
        if demo.whole:
            continue
        lock = read_lock(DIRECTORY / f"{demo.name}.lock")
        assert {release for release, _, _ in lock} == {demo.release, demo.newer[0]} - {""}
        assert {*demo.packages, *demo.newer[1], *(name for name, _ in demo.files)} <= {name for _, _, name in lock}
        if demo.compilers:
            compilers = read_lock(DIRECTORY / f"{demo.name}.build.lock")
            assert {release for release, _, _ in compilers} == {demo.release}
            assert set(demo.compilers) <= {name for _, _, name in compilers}
            assert (DIRECTORY / f"{demo.name}.build").exists()
        for requirement in demo.wheels:
            name = re.split(r"[\[=]", requirement)[0].replace("-", "[-_]")
            wheels = (DIRECTORY / f"{demo.name}.wheels").read_text()
            assert re.search(rf"^{name}==\S+ --hash=sha256:[0-9a-f]{{64}}$", wheels, re.MULTILINE)


def given_source(file: Path) -> GivenSource:
    return GivenSource(file, hashlib.sha256(file.read_bytes()).hexdigest())


def test_a_source_is_a_name_a_file_and_a_digest() -> None:
    sources = recipe("dlb-dpdk-demo").sources
    digest = "0a" * 32
    assert parse_sources([f"dlb=a=b,c.txz,sha256:{digest}"], sources) == {"dlb": GivenSource(Path("a=b,c.txz"), digest)}


@pytest.mark.parametrize(
    "given",
    [
        ["dlb=file"],
        ["dlb=file,sha256:00"],
        ["dlb=,sha256:" + "0" * 64],
        ["sgx=file,sha256:" + "0" * 64],
        ["dlb=file,sha256:" + "0" * 64] * 2,
    ],
)
def test_other_sources_are_errors(given: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"--source: found .*, expected"):
        parse_sources(given, recipe("dlb-dpdk-demo").sources)


@given(st.text(max_size=200))
def test_any_text_is_a_source_or_an_error(text: str) -> None:
    try:
        (source,) = parse_sources([text], recipe("dlb-dpdk-demo").sources).values()
    except RecipeError:
        return
    assert text.endswith(f"={source.file},sha256:{source.sha256}")


def test_an_image_without_its_files_is_skipped_with_one_line() -> None:
    demo = recipe("dlb-dpdk-demo")
    missing = missing_sources(demo, {"dlb": GivenSource(Path("file"), "0" * 64)})
    assert [source.name for source in missing] == ["dpdk"]
    line = describe_missing(demo, missing)
    assert line.startswith("dlb-dpdk-demo: skipped: found no dpdk, expected --source dpdk=FILE,sha256:HEX with dpdk-")
    assert "\n" not in line
    assert "https://core.dpdk.org/download/" in line


def test_a_file_with_another_digest_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"altered")
    with pytest.raises(RecipeError, match=r"found SHA-256 .*, expected 00"):
        verify(GivenSource(tmp_path / "file", "0" * 64))
    with pytest.raises(RecipeError, match="No such file"):
        verify(GivenSource(tmp_path / "missing", "0" * 64))


def debian_archive(directory: Path, packages: tuple[str, ...]) -> GivenSource:
    """An archive like that of a vendor, with Debian packages that have one file each."""
    for number, name in enumerate(packages):
        content = directory / f"{number}"
        (content / "DEBIAN").mkdir(parents=True)
        control = f"Package: {name}\nVersion: 1\nArchitecture: amd64\nMaintainer: test\nDescription: test\n"
        (content / "DEBIAN/control").write_text(control)
        (content / "opt").mkdir()
        (content / "opt" / name).write_text(name)
        (folder := directory / "repository/pool" / str(number)).mkdir(parents=True)
        command = ["dpkg-deb", "--build", content, folder / f"{name}_1_amd64.deb"]
        subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["tar", "-czf", directory / "archive.tgz", "-C", directory, "repository"], check=True)
    return given_source(directory / "archive.tgz")


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs Debian's dpkg")
def test_only_the_packages_of_the_recipe_are_unpacked_from_an_archive(tmp_path: Path) -> None:
    demo = recipe("intel-npu-demo")
    source = debian_archive(tmp_path / "made", (*demo.archived, "intel-fw-npu"))
    (root := tmp_path / "root").mkdir()
    unpack_archived(demo, source, root)
    assert sorted(file.name for file in (root / "opt").iterdir()) == sorted(demo.archived)


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs Debian's dpkg")
@pytest.mark.parametrize("number", [0, 2])
def test_an_archive_must_have_each_package_once(tmp_path: Path, number: int) -> None:
    demo = recipe("intel-npu-demo")
    source = debian_archive(tmp_path / "made", (*demo.archived[1:], *demo.archived[:1] * number))
    (root := tmp_path / "root").mkdir()
    with pytest.raises(RecipeError, match=f"found {number} packages {demo.archived[0]}, expected one"):
        unpack_archived(demo, source, root)


def image_archive(directory: Path, *, altered: str = "") -> GivenSource:
    """An OCI archive of an image with one layer, one of whose blobs may be altered."""
    blobs = directory / "archive/blobs/sha256"
    blobs.mkdir(parents=True)

    def put(kind: str, data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data + (b" " if kind == altered else b""))
        return {"mediaType": f"application/vnd.oci.image.{media_type}", "digest": f"sha256:{digest}", "size": len(data)}

    layer = put("layer", b"layer", "layer.v1.tar+gzip")
    config = put("config", b"{}", "config.v1+json")
    document = json.dumps({"config": config, "layers": [layer]}).encode()
    manifest = put("manifest", document, "manifest.v1+json")
    index = put("index", json.dumps({"manifests": [manifest]}).encode(), "index.v1+json")
    (directory / "archive/index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [index]}))
    (directory / "archive/oci-layout").write_text("{}")
    subprocess.run(["tar", "-cf", directory / "image.tar", "-C", directory / "archive", "."], check=True)
    return given_source(directory / "image.tar")


def test_an_image_of_a_vendor_gets_the_name_of_the_manifests(tmp_path: Path) -> None:
    source = image_archive(tmp_path / "made")
    (tmp_path / "out/name").mkdir(parents=True)
    digest = copy_image(source, tmp_path / "out/name", "docker.io/intel/name", "1.0")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["name"]
    (manifest,) = json.loads((tmp_path / "out/name/index.json").read_text())["manifests"]
    assert manifest["digest"] == digest
    assert manifest["annotations"]["io.containerd.image.name"] == "docker.io/intel/name:1.0"
    assert (tmp_path / "out/name/blobs/sha256" / digest.removeprefix("sha256:")).exists()


@pytest.mark.parametrize("altered", ["layer", "config", "manifest", "index"])
def test_an_image_with_an_altered_blob_is_an_error(tmp_path: Path, altered: str) -> None:
    source = image_archive(tmp_path / "made", altered=altered)
    (tmp_path / "out").mkdir()
    with pytest.raises(RecipeError, match="found SHA-256"):
        copy_image(source, tmp_path / "out/name", "name", "1.0")
    assert not list((tmp_path / "out").iterdir())


def test_an_archive_without_an_image_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"manifests": [1, 2]}')
    subprocess.run(["tar", "-cf", tmp_path / "image.tar", "-C", tmp_path, "index.json"], check=True)
    with pytest.raises(RecipeError, match="expected one; export one image"):
        copy_image(given_source(tmp_path / "image.tar"), tmp_path / "name", "name", "1.0")


def test_libraries_of_wheels_do_not_replace_those_of_debian(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "mkl.whl", "w") as wheel:
        for name in (
            "mkl-1.data/data/lib/libnew.so.2", "mkl-1.data/data/lib/libold.so", "mkl-1.data/data/lib/libnew.so-gdb.py",
            "mkl-1.data/data/lib/../../../../libescape.so", "mkl-1.data/data/bin/program", "mkl/libmodule.so",
        ):  # fmt: skip
            wheel.writestr(name, "of the wheel")
    (root := tmp_path / "lib").mkdir()
    (root / "libold.so").write_text("of Debian")
    install_libraries(tmp_path / "mkl.whl", root)
    assert {file.name: file.read_text() for file in root.iterdir()} == {
        "libnew.so.2": "of the wheel",
        "libold.so": "of Debian",
    }
    assert not list(tmp_path.rglob("libescape.so"))
