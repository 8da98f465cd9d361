"""Writes OCI image layouts (image-spec 1.1): layers from directories, and one index for all platforms of an image.

All bytes depend on the content only: entries are sorted, belong to root, have one time and the modes 0755 or 0644 (the
sticky bit of /tmp excepted), and the compressor is that of the build root.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from buildroot import BuildRoot
from containerfile import Image

_CONFIG = "application/vnd.oci.image.config.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_VARIANTS = {"arm64": {"variant": "v8"}}
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Labels that are annotations of manifest and index too.
_ANNOTATIONS = "org.opencontainers.image."


class Layer(NamedTuple):
    """A compressed layer in the cache."""

    blob: Path
    digest: str
    size: int
    diff_id: str


class Written(NamedTuple):
    """What is in a layout: the digest of its index, its platforms, and the compressed size of each."""

    digest: str
    sizes: dict[str, int]


def write_tar(root: Path, target: Path, epoch: int) -> None:
    """Writes the tree below a directory."""
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
        for path in _sorted(root):
            entry = tar.gettarinfo(path, arcname=str(path.relative_to(root)))
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = epoch
            entry.mode = _mode(entry)
            if entry.isreg():
                with path.open("rb") as content:
                    tar.addfile(entry, content)
            else:
                tar.addfile(entry)


def _sorted(root: Path) -> Iterator[Path]:
    yield from sorted(root.rglob("*"), key=lambda path: path.relative_to(root).parts)


def _mode(entry: tarfile.TarInfo) -> int:
    if entry.issym():
        return 0o777
    if entry.mode & stat.S_ISVTX:
        return 0o1777
    return 0o755 if entry.isdir() or entry.mode & stat.S_IXUSR else 0o644


def make_layer(root: Path, cache: Path, epoch: int, build_root: BuildRoot) -> Layer:
    """The layer of a directory, whose name in the cache is that of the directory."""
    blob = cache / f"{root.name}-{epoch}.tar.gz"
    described = blob.with_suffix(".json")
    if not described.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            write_tar(root, tar := Path(scratch) / "layer.tar", epoch)
            build_root.gzip(tar, compressed := Path(scratch) / "layer.tar.gz")
            facts = {
                "digest": _file_digest(compressed),
                "size": compressed.stat().st_size,
                "diff_id": _file_digest(tar),
            }
            compressed.rename(blob)
            (made := Path(scratch) / "layer.json").write_text(json.dumps(facts))
            made.rename(described)
    return Layer(blob, **json.loads(described.read_text()))


class LayoutWriter:
    """Writes the layouts of one release beside each other. They share layers by hard links."""

    def __init__(self, out: Path, organisation: str, tag: str, epoch: int) -> None:
        self._out = out
        self._organisation = organisation
        self._tag = tag
        self._created = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        # The image that has a layer already.
        self._images: dict[str, str] = {}

    def write(self, image: Image, layers: Mapping[str, Sequence[Layer]]) -> Written:
        """Replaces the layout of an image, whose layers are given by architecture, by a complete new one."""
        target = self._out / image.name
        with tempfile.TemporaryDirectory(dir=self._out, prefix=f".{image.name}-") as scratch:
            written = self._write(made := Path(scratch) / image.name, image, layers)
            if target.exists():
                target.rename(Path(scratch) / "old")
            made.rename(target)
        return written

    def _write(self, target: Path, image: Image, layers: Mapping[str, Sequence[Layer]]) -> Written:
        blobs = target / "blobs/sha256"
        blobs.mkdir(parents=True)
        annotations = {key: value for key, value in image.labels.items() if key.startswith(_ANNOTATIONS)}
        annotations |= {f"{_ANNOTATIONS}{key}": image.labels[key] for key in ("description", "vendor")}
        annotations[f"{_ANNOTATIONS}created"] = self._created
        manifests: list[dict[str, object]] = []
        for architecture, parts in layers.items():
            platform = {"architecture": architecture, "os": "linux", **_VARIANTS.get(architecture, {})}
            for layer in parts:
                self._link(layer, blobs)
            manifest = {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": _put(blobs, _CONFIG, _config(image, platform, parts, self._created)),
                "layers": [{"mediaType": _LAYER, "digest": layer.digest, "size": layer.size} for layer in parts],
                "annotations": annotations,
            }
            manifests.append({**_put(blobs, _MANIFEST, manifest), "platform": platform})
        index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": manifests, "annotations": annotations}
        descriptor = _put(blobs, _INDEX, index)
        names = {
            "io.containerd.image.name": f"{self._organisation}/{image.name}:{self._tag}",
            "org.opencontainers.image.ref.name": self._tag,
        }
        top = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [{**descriptor, "annotations": names}]}
        (target / "index.json").write_bytes(_document(top))
        (target / "oci-layout").write_bytes(_document({"imageLayoutVersion": "1.0.0"}))
        sizes = {f"linux/{each}": sum(layer.size for layer in parts) for each, parts in layers.items()}
        return Written(str(descriptor["digest"]), sizes)

    def _link(self, layer: Layer, blobs: Path) -> None:
        """Puts a layer into a layout."""
        target = blobs / layer.digest.removeprefix("sha256:")
        if target.exists():
            return
        if layer.digest in self._images:
            os.link(self._out / self._images[layer.digest] / target.relative_to(blobs.parents[1]), target)
        else:
            shutil.copy(layer.blob, target)
            self._images[layer.digest] = blobs.parents[1].name


def _config(image: Image, platform: Mapping[str, str], layers: Sequence[Layer], created: str) -> dict[str, object]:
    settings: dict[str, object] = {"Env": [_PATH], "Entrypoint": list(image.entrypoint), "Labels": image.labels}
    if image.user:
        settings["User"] = image.user
    settings["WorkingDir"] = image.working_directory
    return {
        "created": created,
        **platform,
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": created, "created_by": f"COPY /image/{part}/ /"} for part in image.parts],
    }


def _put(blobs: Path, media_type: str, document: Mapping[str, object]) -> dict[str, object]:
    data = _document(document)
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _document(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
