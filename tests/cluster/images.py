"""Builds container images as docker archives (a tar of JSON files and layers), without a registry."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import struct
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .build import ClusterError

_PT_INTERP = 3
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """The default command of the image's containers."""

    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    environment: Sequence[str] = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)
    user: str = ""
    working_directory: str = "/"
    labels: Mapping[str, str] = field(default_factory=dict)
    # Which of an archive's file systems are over each other in it, by their numbers.
    layers: Sequence[int] = (0,)

    def document(self, layer_digests: Sequence[str]) -> dict[str, object]:
        return {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {
                "Entrypoint": list(self.entrypoint),
                "Cmd": list(self.command),
                "Env": list(self.environment),
                "User": self.user,
                "WorkingDir": self.working_directory,
                "Labels": dict(self.labels),
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{each}" for each in layer_digests]},
            "history": [{"created_by": "tests.cluster.images"}] * len(layer_digests),
        }


def image_from_directory(archive: Path, name: str, root: Path, config: ImageConfig) -> Path:
    """An image whose file system is the tree below ``root``. All files belong to root."""
    return images_from_directory(archive, {name: config}, root)


def images_from_directory(archive: Path, images: Mapping[str, ImageConfig], root: Path, *over: Path) -> Path:
    """The same file system under several names, each starting something else, in one archive.

    ``over`` is an additional layer for the images that request it.
    """

    def filled_from(directory: Path) -> Callable[[tarfile.TarFile], None]:
        return lambda layer: layer.add(directory, arcname=".", filter=_owned_by_root)

    return _write_archive(archive, images, *(filled_from(directory) for directory in (root, *over)))


def image_from_program(archive: Path, name: str, program: Path, *, links: Sequence[str] = ()) -> Path:
    """An image of one static program in /bin, started by default, with further names in /bin as links to it."""
    if needs_a_loader(program):
        raise ClusterError(f"{program}: is linked dynamically and cannot run alone in an image; a static one is wanted")

    def fill(layer: tarfile.TarFile) -> None:
        for directory, mode in (("bin", 0o755), ("tmp", 0o1777), ("etc", 0o755)):
            layer.addfile(_entry(directory, tarfile.DIRTYPE, mode))
        for file, text in (("etc/passwd", "root:x:0:0:root:/:/bin/sh\n"), ("etc/group", "root:x:0:\n")):
            entry = _entry(file, tarfile.REGTYPE, 0o644)
            entry.size = len(text)
            layer.addfile(entry, io.BytesIO(text.encode()))
        layer.add(program.resolve(), arcname=f"bin/{program.name}", filter=_owned_by_root)
        for link in links:
            entry = _entry(f"bin/{link}", tarfile.SYMTYPE, 0o777)
            entry.linkname = program.name
            layer.addfile(entry)

    return _write_archive(archive, {name: ImageConfig(command=[f"/bin/{program.name}"])}, fill)


def busybox_image(archive: Path, name: str, busybox: Path) -> Path:
    """A shell and common tools, for pods that inspect their container or wait."""
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    return image_from_program(archive, name, busybox, links=[tool for tool in listed if tool != busybox.name])


def _write_archive(archive: Path, images: Mapping[str, ImageConfig], *fills: Callable[[tarfile.TarFile], None]) -> Path:
    archive.parent.mkdir(parents=True, exist_ok=True)
    layers: dict[str, Path] = {}
    for number, fill in enumerate(fills):
        layer = archive.with_suffix(f".layer{number}")
        with tarfile.open(layer, "w") as tar:
            fill(tar)
        with layer.open("rb") as content:
            layers[hashlib.file_digest(content, "sha256").hexdigest()] = layer
    files: dict[str, bytes] = {}
    manifest: list[dict[str, object]] = []
    for name, config in images.items():
        digests = [[*layers][number] for number in config.layers]
        document = json.dumps(config.document(digests)).encode()
        files[config_name := f"{hashlib.sha256(document).hexdigest()}.json"] = document
        parts = [f"{digest}.tar" for digest in digests]
        manifest.append({"Config": config_name, "RepoTags": [name], "Layers": parts})
    files["manifest.json"] = json.dumps(manifest).encode()
    with tarfile.open(archive, "w") as tar:
        for digest, layer in layers.items():
            tar.add(layer, arcname=f"{digest}.tar")
        for file, content in files.items():
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    for layer in layers.values():
        layer.unlink()
    return archive


def needs_a_loader(program: Path) -> bool:
    """Whether a (64-bit) ELF program has a program header of type PT_INTERP, which names its dynamic loader."""
    with program.open("rb") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\x02":
            return False
        (offset,) = struct.unpack_from("=Q", header, 32)
        size, count = struct.unpack_from("=HH", header, 54)
        file.seek(offset)
        table = file.read(size * count)
    return any(struct.unpack_from("=I", table, entry)[0] == _PT_INTERP for entry in range(0, len(table), size))


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    return entry


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
