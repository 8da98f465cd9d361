"""buildah makes the same image from the Containerfile as `make images`: files, modes, owners and configuration.

Needs root, buildah and debootstrap. The base of the build stage is a Debian that debootstrap installs, because no
registry can be assumed; no file of it gets into the image.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .machine import REPOSITORY

REQUIRED = os.environ.get("ACCELPLANE_BUILDAH") == "required"
MISSING = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(bool(MISSING) and not REQUIRED, reason=f"needs {' and '.join(MISSING)} of Debian"),
]

# An additional layer and a user of its own.
IMAGE = "onload-operator"
PLATFORM = "linux/amd64"
# The configuration of this machine for Debian's mirrors and the package index.
SETTINGS = ("etc/apt/sources.list.d", "etc/apt/apt.conf.d", "etc/ssl/certs", "etc/pip.conf", "etc/resolv.conf")


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        command, env=os.environ | environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


class Buildah:
    """buildah with storage of its own, which needs no user namespace and no kernel driver."""

    def __init__(self, directory: Path) -> None:
        self._options = ("--storage-driver", "vfs", "--root", directory / "storage", "--runroot", directory / "run")
        self._policy = directory / "policy.json"
        self._policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')

    def __call__(self, command: str, *words: str | Path) -> str:
        policy = () if command == "copy" else ("--signature-policy", self._policy)
        return run("buildah", *self._options, command, *policy, *words).strip()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root file system of a Debian 12 that reaches mirrors and index as this machine does."""
    root = tmp_path_factory.mktemp("base") / "root"
    listed = run("apt-get", "indextargets", "--format", "$(ORIGIN) $(CODENAME) $(REPO_URI)").splitlines()
    mirrors = [line.split()[2] for line in listed if line.startswith("Debian bookworm ")]
    assert mirrors, "apt has no list of Debian bookworm; run apt-get update"
    packages = "ca-certificates,python3,python3-pip"
    run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root, mirrors[0])
    copy_settings(root)
    return root


def copy_settings(root: Path) -> None:
    (root / "etc/apt/sources.list").unlink(missing_ok=True)
    for name in SETTINGS:
        source, target = Path("/", name), root / name
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore_dangling_symlinks=True)
        elif source.is_file():
            target.unlink(missing_ok=True)
            shutil.copy(source, target)
    # The build stage installs ca-certificates, which makes the list anew: it keeps authorities that are here only.
    own = root / "usr/local/share/ca-certificates"
    own.mkdir(parents=True, exist_ok=True)
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", own / "machine.crt")


@pytest.fixture(scope="module")
def built(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image of buildah as an OCI image layout."""
    return build(base, tmp_path_factory.mktemp("buildah"))


def build(base: Path, directory: Path) -> Path:
    buildah = Buildah(directory)
    container = buildah("from", "scratch")
    buildah("copy", container, base, "/")
    buildah("commit", container, "localhost/debian:base")
    buildah(
        *("bud", "--isolation", "chroot", "--format", "oci", "--layers=false", "--identity-label=false", "--no-cache"),
        *("--pull=never", "--network", "host", "--file", "deploy/images/Containerfile", "--target", IMAGE),
        *("--build-arg", "BASE=localhost/debian:base", "--build-arg", f"TAG={_version()}", "--tag", "localhost/made"),
        ".",
    )
    buildah("push", "localhost/made", f"oci:{directory / 'layout'}")
    return directory / "layout"


@pytest.fixture(scope="module")
def own_image_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ours")
    run(sys.executable, "deploy/images/images.py", out, "--images", IMAGE, "--platforms", PLATFORM)
    return out / IMAGE


def _version() -> str:
    return run(sys.executable, "-m", "release.version").strip()


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _manifest(layout: Path) -> dict[str, Any]:
    found = json.loads((layout / "index.json").read_text())
    while "manifests" in found:
        (entry,) = found["manifests"]
        found = json.loads(_blob(layout, entry["digest"]).read_text())
    return found


def files(layout: Path) -> dict[str, tuple[object, ...]]:
    """Kind, mode, owner and content of each path in all layers over each other."""
    found: dict[str, tuple[object, ...]] = {}
    for layer in _manifest(layout)["layers"]:
        with tarfile.open(_blob(layout, layer["digest"])) as tar:
            found.update(_entries(tar))
    return found


def _entries(tar: tarfile.TarFile) -> Iterator[tuple[str, tuple[object, ...]]]:
    for member in tar:
        name = member.name.strip("/").removeprefix("./")
        if name in {"", "."}:
            continue
        # The archives of buildah have the type of the file in the mode.
        mode = oct(member.mode & 0o7777)
        if member.issym():
            yield name, ("link", member.linkname, member.uid, member.gid)
        elif member.isdir():
            yield name, ("directory", mode, member.uid, member.gid)
        else:
            # extractfile follows hard links inside of the layer.
            stream = tar.extractfile(member)
            assert stream, name
            yield name, ("file", mode, member.uid, member.gid, hashlib.sha256(stream.read()).hexdigest())


def test_both_images_have_the_same_files_modes_and_owners(built: Path, own_image_directory: Path) -> None:
    expected, found = files(own_image_directory), files(built)
    assert sorted(expected.keys() ^ found.keys()) == []
    assert {name: (found[name], each) for name, each in expected.items() if found[name] != each} == {}
    assert len(expected) > 1000


def test_both_images_have_the_same_configuration(built: Path, own_image_directory: Path) -> None:
    def configuration(layout: Path) -> dict[str, Any]:
        config = json.loads(_blob(layout, _manifest(layout)["config"]["digest"]).read_text())
        # Engines leave out the default.
        return {"WorkingDir": "/", **config["config"], **{key: config[key] for key in ("os", "architecture")}}

    assert configuration(built) == configuration(own_image_directory)
