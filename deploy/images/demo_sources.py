"""Files of vendors that images of demo workloads are built from: names and verifies them, and reads archives.

No package registry has these files. The caller downloads them and gives their digest. Nothing of a file is used before
its digest is verified.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from buildroot import unpack_over
from debian import RecipeError, run
from demo_recipes import Demo, Source

_GIVEN = re.compile(r"([a-z]+)=(.+),sha256:([0-9a-f]{64})")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_DOCUMENT = 4 << 20


class GivenSource(NamedTuple):
    """A downloaded file and its expected digest."""

    file: Path
    sha256: str


def parse_sources(given: Iterable[str], known: Iterable[Source]) -> dict[str, GivenSource]:
    """Reads `NAME=FILE,sha256:HEX`. Raises `RecipeError` for another form, and for a name that no recipe has."""
    names = {source.name for source in known}
    found: dict[str, GivenSource] = {}
    for text in given:
        match = _GIVEN.fullmatch(text)
        if not match or match[1] not in names:
            expected = f"NAME=FILE,sha256:HEX with 64 digits, and one of the names {', '.join(sorted(names))}"
            raise RecipeError(f"--source: found {text[:300]!a}, expected {expected}")
        if match[1] in found:
            raise RecipeError(f"--source: found {match[1]} twice, expected it once")
        found[match[1]] = GivenSource(Path(match[2]), match[3])
    return found


def missing_sources(demo: Demo, given: Mapping[str, GivenSource]) -> list[Source]:
    """The sources of a recipe that are not given."""
    return [source for source in demo.sources if source.name not in given]


def describe_missing(demo: Demo, missing: Sequence[Source]) -> str:
    """One line: which files an image needs, and where they are published."""
    files = "; ".join(
        f"--source {source.name}=FILE,sha256:HEX with {source.file} of {source.product} ({source.publisher})"
        for source in missing
    )
    return f"{demo.name}: skipped: found no {', '.join(source.name for source in missing)}, expected {files}"


def verify(source: GivenSource) -> Path:
    """Returns the file. Raises `RecipeError` if it cannot be read or has another digest."""
    try:
        with source.file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise RecipeError(f"{source.file}: {error.strerror}; give the path of the downloaded file") from error
    if digest != source.sha256:
        raise RecipeError(f"{source.file}: found SHA-256 {digest}, expected {source.sha256}; download it again")
    return source.file


def unpack_archive(archive: Path, directory: Path) -> None:
    """Unpacks a tar archive with any compression that tar knows."""
    directory.mkdir(parents=True)
    run("tar", "-x", "--no-same-owner", "-f", archive.resolve(), "-C", directory)


def unpack_archived(demo: Demo, source: GivenSource, root: Path) -> None:
    """Unpacks the Debian packages of a recipe from an archive of packages over a root file system."""
    with tempfile.TemporaryDirectory() as scratch:
        unpack_archive(verify(source), directory := Path(scratch) / "archive")
        for name in demo.archived:
            packages = sorted(directory.rglob(f"{name}_*.deb"))
            if len(packages) != 1:
                remedy = f"give {demo.sources[0].file}"
                raise RecipeError(f"{source.file}: found {len(packages)} packages {name}, expected one; {remedy}")
            unpack_over(packages[0], root)


def copy_image(source: GivenSource, target: Path, name: str, tag: str) -> str:
    """Writes the layout of an image from its OCI archive, with its name and tag. Returns the digest of the image."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        unpack_archive(verify(source), made := Path(scratch) / "layout")
        index = _document(made / "index.json")
        manifests = index.get("manifests")
        if not isinstance(manifests, list) or len(manifests) != 1 or not isinstance(manifests[0], dict):
            raise RecipeError(f"{source.file}: found no or several images, expected one; export one image")
        descriptor: dict[str, Any] = manifests[0]
        _check_blobs(descriptor, made)
        names = {"io.containerd.image.name": f"{name}:{tag}", "org.opencontainers.image.ref.name": tag}
        index["manifests"] = [descriptor | {"annotations": names}]
        (made / "index.json").write_text(json.dumps(index, sort_keys=True))
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
    return str(descriptor["digest"])


def _check_blobs(descriptor: object, layout: Path) -> None:
    """Raises `RecipeError` unless the blob of a descriptor, and all that it refers to, have their digests."""
    digest = _DIGEST.fullmatch(str(descriptor.get("digest"))) if isinstance(descriptor, dict) else None
    if not isinstance(descriptor, dict) or not digest:
        raise RecipeError(f"image: found {str(descriptor)[:200]!a}, expected a descriptor with a SHA-256 digest")
    blob = layout / "blobs/sha256" / digest[1]
    verify(GivenSource(blob, digest[1]))
    if not str(descriptor.get("mediaType")).endswith(("manifest.v1+json", "index.v1+json", "manifest.v2+json")):
        return
    document = _document(blob)
    for key in ("manifests", "layers"):
        for each in document.get(key) or ():
            _check_blobs(each, layout)
    if "config" in document:
        _check_blobs(document["config"], layout)


def _document(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_DOCUMENT:
            raise RecipeError(f"{file.name}: found {file.stat().st_size} bytes, expected at most {_MAX_DOCUMENT}")
        document = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file.name}: {error}; expected an OCI archive, as skopeo copies it") from error
    if not isinstance(document, dict):
        raise RecipeError(f"{file.name}: found {type(document).__name__}, expected an object")
    return document
