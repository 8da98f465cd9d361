"""The container runtimes that a node can have: containerd of the cluster, an older one, or CRI-O.

CRI-O is compiled by `make tools TOOLS=cri-o`. CRI has no call that imports an image, so each runtime has its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import settings
from .build import Assets, ClusterError, tool
from .machine import Machine

CRIO = "cri-o"
_ARCHIVE = "/var/tmp/image.tar"
_POLICY = "/etc/containers/policy.json"


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """`programs` are directories at the start of the PATH, `files` are made below /etc.

    `check` is a command that succeeds as soon as the runtime answers.
    """

    name: str
    command: Sequence[str]
    check: Sequence[str]
    socket: str
    files: Callable[[Assets], Mapping[str, bytes]]
    import_image: Callable[[Machine, Assets, Path], None]
    programs: Sequence[Path] = ()


def containerd_1(programs: Path) -> Runtime:
    """A containerd 1.6 or 1.7, whose programs are in this directory."""
    return replace(CONTAINERD, programs=[programs], files=lambda assets: _containerd(assets, settings.containerd_1))


def crio() -> Runtime:
    """CRI-O. Raises `ClusterError` if a program is missing."""
    programs = tool(CRIO, "crio").parent
    monitor = Path(settings.CONMON)
    if missing := [path for path in (programs / "crio", programs / "pinns", monitor) if not os.access(path, os.X_OK)]:
        raise ClusterError(f"CRI-O: not found: {', '.join(map(str, missing))}; run make tools TOOLS={CRIO}")
    return Runtime(
        name=CRIO,
        # conmon needs a working directory that it can name; the one of nsenter is outside the machine's root.
        command=["sh", "-c", "cd / && exec crio --config=/etc/crio/crio.conf --config-dir="],
        check=["crio", "status", f"--socket={settings.CRIO_SOCKET}", "info"],
        socket=settings.CRIO_SOCKET,
        files=lambda assets: _crio(assets, programs),
        import_image=_import_into_storage,
        programs=[programs],
    )


def _containerd(assets: Assets, configuration: Callable[[str], str]) -> dict[str, bytes]:
    command = [assets.program("ctr"), "oci", "spec"]
    spec = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "containerd/config.toml": configuration(_cni_directory(assets)).encode(),
        "containerd/base-spec.json": settings.base_runtime_spec(spec).encode(),
        "containerd/runc": settings.runc().encode(),
    }


def _crio(assets: Assets, programs: Path) -> dict[str, bytes]:
    return {
        "crio/crio.conf": settings.crio(_cni_directory(assets), str(programs)).encode(),
        "crio/runc": settings.crio_runc().encode(),
        "containers/policy.json": json.dumps({"default": [{"type": "insecureAcceptAnything"}]}).encode(),
        # Manifests have names of images without a registry.
        "containers/registries.conf": b'unqualified-search-registries = ["docker.io"]\n',
    }


def _cni_directory(assets: Assets) -> str:
    return str(assets.program("ptp").parent)


def _import_by_ctr(machine: Machine, assets: Assets, archive: Path) -> None:
    # This one supports --local; an older containerd accepts any.
    command = [assets.program("ctr"), "--namespace=k8s.io", "images", "import", "--local", "-"]
    with archive.open("rb") as content:
        result = subprocess.run(
            machine.enter(command),
            stdin=content,
            capture_output=True,
            text=True,
            check=False,
            env=machine.environment(),
        )
    if result.returncode:
        raise ClusterError(f"{machine.name}: cannot import {archive}\n{result.stdout}{result.stderr}")


def _import_into_storage(machine: Machine, _assets: Assets, archive: Path) -> None:
    """Writes all images of a docker archive into the storage that CRI-O reads."""
    with tarfile.open(archive) as tar:
        manifest = tar.extractfile("manifest.json")
        if manifest is None:
            raise ClusterError(f"{archive}: found no manifest.json, expected a docker archive")
        images: list[dict[str, list[str]]] = json.load(manifest)
    copy = machine.path(_ARCHIVE)
    shutil.copyfile(archive, copy)
    storage = [f"--root={settings.CRIO_STORAGE}", f"--runroot={settings.CRIO_STATE}", "--storage-driver=overlay"]
    for number, image in enumerate(images):
        for name in image["RepoTags"]:
            words = [*storage, f"--signature-policy={_POLICY}", f"--image-name={name}"]
            machine.run("copyimg", *words, f"--import-from=docker-archive:{_ARCHIVE}:@{number}")
    copy.unlink()


CONTAINERD = Runtime(
    name="containerd",
    command=["containerd", "--config=/etc/containerd/config.toml"],
    check=["ctr", "version"],
    socket=settings.CONTAINERD_SOCKET,
    files=lambda assets: _containerd(assets, settings.containerd),
    import_image=_import_by_ctr,
)
