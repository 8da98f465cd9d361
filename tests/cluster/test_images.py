"""The images as `make images` writes them: reproducible, complete, and for another architecture.

These tests need root, Debian packages and the Python package index, but no cluster. Downloads are those of the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import accelplane

from .machine import REPOSITORY
from .product_image import debian_package

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs Debian's dpkg and apt"),
]

IMAGES = "accelplane,intel-fpga-initcontainer"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelplane/images"


def build(out: Path, *options: str | Path, sources: Path = REPOSITORY, **environment: str) -> Path:
    """Runs what `make images` runs."""
    command = [sys.executable, sources / "deploy/images/images.py", out, "--images", IMAGES, *options]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return out


def blob(layout: Path, digest: str) -> bytes:
    data = (layout / "blobs" / digest.replace(":", "/")).read_bytes()
    assert f"sha256:{hashlib.sha256(data).hexdigest()}" == digest
    return data


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("images") / "out")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A clone of the sources with uncommon modes, as another user's checkout has them."""
    clone = tmp_path / "another place"
    clone.mkdir()
    before = os.umask(0o077)
    try:
        for name in ("src", "deploy/images"):
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(REPOSITORY / name, clone / name, ignore=ignored, copy_function=shutil.copyfile)
        for name in ("LICENSE", "README.md", "constraints.txt", "pyproject.toml"):
            shutil.copyfile(REPOSITORY / name, clone / name)
        yield clone
    finally:
        os.umask(before)


def test_another_path_umask_locale_and_time_zone_give_the_same_digests(
    images: Path, elsewhere: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    # Only downloads are shared, so that everything is made again.
    for name in ("packages", "wheels"):
        (cache / name).symlink_to(CACHE / name)
    created = subprocess.run(
        ["git", "-C", REPOSITORY, "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False
    ).stdout.strip()
    environment = {"LANG": "tr_TR.UTF-8", "LC_ALL": "C", "TZ": "Pacific/Chatham", "HOME": str(tmp_path)}
    environment |= {"SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or created or "315532800"}
    options = ("--cache", cache, "--platforms", "linux/amd64")
    again = build(tmp_path / "again", *options, sources=elsewhere, **environment)
    assert {name: manifests(again / name)["amd64"] for name in IMAGES.split(",")} == {
        name: manifests(images / name)["amd64"] for name in IMAGES.split(",")
    }


def test_every_image_has_a_layout_whose_one_entry_is_an_index_of_both_platforms(images: Path) -> None:
    listed = json.loads((images / "images.json").read_text())
    assert listed["version"] == accelplane.__version__
    assert [image["name"] for image in listed["images"]] == IMAGES.split(",")
    for image in listed["images"]:
        layout = images / image["name"]
        assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
        (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
        assert entry["digest"] == image["digest"]
        index = json.loads(blob(layout, entry["digest"]))
        assert image["platforms"] == ["linux/amd64", "linux/arm64"]
        sizes = {}
        for described in index["manifests"]:
            manifest = json.loads(blob(layout, described["digest"]))
            config = json.loads(blob(layout, manifest["config"]["digest"]))
            assert config["architecture"] == described["platform"]["architecture"]
            unpacked = [gzip.decompress(blob(layout, layer["digest"])) for layer in manifest["layers"]]
            assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in unpacked]
            assert config["config"]["Labels"]["version"] == accelplane.__version__
            sizes[config["architecture"]] = sum(layer["size"] for layer in manifest["layers"])
        assert image["bytes"] == sizes["amd64"]


def test_no_path_of_this_machine_is_in_a_layer(images: Path) -> None:
    layout = images / "accelplane"
    excluded = [str(path).encode() for path in (REPOSITORY, CACHE)]
    # Files below /tmp are no secret, and programs of Debian name it.
    excluded += [each.encode() for each in {tempfile.gettempdir()} - {"/tmp"}]
    for tar in layers(layout, "amd64"):
        assert not [text for text in excluded if text in tar]


def test_no_double_of_a_kernel_or_an_api_server_is_in_a_layer(images: Path) -> None:
    for tar in layers(images / "accelplane", "amd64"):
        assert not [
            each
            for each in (b"accelplane/simulate/kernel/", b"accelplane/kube/testing/", b"accelplane/testing/")
            if each in tar
        ]


def manifests(layout: Path) -> dict[str, str]:
    """The digest of the manifest of each architecture."""
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    index = json.loads(blob(layout, entry["digest"]))
    return {each["platform"]["architecture"]: each["digest"] for each in index["manifests"]}


def layers(layout: Path, architecture: str) -> list[bytes]:
    manifest = json.loads(blob(layout, manifests(layout)[architecture]))
    return [gzip.decompress(blob(layout, layer["digest"])) for layer in manifest["layers"]]


def test_images_for_arm64_start(images: Path, tmp_path: Path) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the emulator of the lock file runs on amd64 only")
    root = tmp_path / "root"
    root.mkdir()
    for tar in layers(images / "intel-fpga-initcontainer", "arm64"):
        with tarfile.open(fileobj=io.BytesIO(tar)) as layer:
            layer.extractall(root, filter="tar")
    subprocess.run(["dpkg-deb", "-x", debian_package("bookworm/amd64/qemu-user-static"), tmp_path / "qemu"], check=True)
    shutil.copy(tmp_path / "qemu/usr/bin/qemu-aarch64-static", root / "qemu")
    python = ("/usr/bin/python3.11", "-I")
    for command, status, expected in (
        ((*python, "-c", "import os; print(os.uname().machine)"), 0, "aarch64"),
        ((*python, "/usr/local/bin/accelplane", "--version"), 0, accelplane.__version__),
        ((*python, "/usr/local/bin/intel_gpu_device_plugin", "-h"), 2, "Usage of intel_gpu_device_plugin"),
        # Modules in C of three distributions.
        ((*python, "-c", "import msgspec, yaml, google._upb._message as upb; print(yaml.__with_libyaml__)"), 0, "True"),
        (("/usr/local/fpga-sw/fpga_tool", "list"), 0, "Detected FPGA FMEs:"),
    ):
        words = ["/usr/sbin/chroot", root, "/qemu", *command]
        result = subprocess.run(words, env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        output = result.stdout + result.stderr
        assert expected in output
        assert result.returncode in (status, 0), output


def test_a_demo_without_its_device_fails(tmp_path: Path) -> None:
    script = REPOSITORY / "deploy/images/demo_images.py"
    command = [sys.executable, script, "build", tmp_path / "out", "--images", "accel-config-demo"]
    subprocess.run(command, check=True, capture_output=True)
    (tar,) = layers(tmp_path / "out/accel-config-demo", "amd64")
    with tarfile.open(fileobj=io.BytesIO(tar)) as layer:
        layer.extractall(tmp_path / "root", filter="tar")
    test = "cd /usr/libexec/accel-config/test && ./dsa_user_test_runner.sh --skip-config"
    words = ["/usr/sbin/chroot", tmp_path / "root", "/bin/bash", "-c", test]
    result = subprocess.run(words, env={"PATH": "/usr/bin"}, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (77, "No SVM support")
    assert "command not found" not in result.stderr


LIBDLB = {
    "Makefile": "lib:\n\t$(CC) -shared -fPIC dlb.c -o libdlb.so\n",
    "dlb.c": "int dlb_status(void) { return 5; }\n",
    "examples/Makefile": "all:\n\tfor e in dir ldb; do $(CC) e.c -L.. -ldlb -o $${e}_traffic; done\n",
    "examples/e.c": "int dlb_status(void);\nint main(void) { return dlb_status(); }\n",
}


def test_a_demo_is_compiled_from_the_archive_of_a_vendor(tmp_path: Path) -> None:
    archive = tmp_path / "dlb.txz"
    with tarfile.open(archive, "w:xz") as tar:
        for name, text in LIBDLB.items():
            entry = tarfile.TarInfo(f"dlb/libdlb/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    source = f"dlb={archive},sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"
    script = REPOSITORY / "deploy/images/demo_images.py"
    command = [sys.executable, script, "build", tmp_path / "out", "--images", "dlb-libdlb-demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("dlb-libdlb-demo: skipped: found no dlb, expected --source dlb=")
    subprocess.run([*command, "--source", source], check=True, capture_output=True)
    (content,) = layers(tmp_path / "out/dlb-libdlb-demo", "amd64")
    with tarfile.open(fileobj=io.BytesIO(content)) as layer:
        layer.extractall(tmp_path / "root", filter="tar")
    words = ["/usr/sbin/chroot", tmp_path / "root", "test.sh"]
    path = {"PATH": "/usr/local/bin:/usr/bin"}
    without = subprocess.run(words, env=path, capture_output=True, text=True, check=False)
    assert (without.returncode, "found 0 devices" in without.stderr) == (1, True)
    (tmp_path / "root/dev/dlb0").touch()
    # The status of the first example.
    assert subprocess.run(words, env=path, check=False).returncode == 5
