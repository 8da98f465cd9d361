"""OCI image layouts: reading and checking them, and writing images and artefacts without a container engine.

All output is reproducible: archives have sorted names, no times and no owners.
"""

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from release.errors import ReleaseError

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
REF_NAME = "org.opencontainers.image.ref.name"
MAX_MANIFEST = 4 * 1024 * 1024

Json = dict[str, Any]


class Descriptor(msgspec.Struct, frozen=True, rename={"media_type": "mediaType", "artifact_type": "artifactType"}):
    """The reference to a blob."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] | None = None
    platform: dict[str, Any] | None = None
    artifact_type: str | None = None

    @property
    def json(self) -> Json:
        """The descriptor without empty fields."""
        return {key: value for key, value in msgspec.to_builtins(self).items() if value is not None}


def digest_of(content: bytes) -> str:
    """The digest of a blob."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def file_digest(file: Path) -> str:
    """The digest of a file, which is read in parts."""
    with file.open("rb") as stream:
        return stream_digest(stream)


def stream_digest(stream: IO[bytes]) -> str:
    """The digest of the rest of a stream, which is read in parts."""
    digest = hashlib.sha256()
    while part := stream.read(1 << 20):
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def blob(layout: Path, digest: str) -> Path:
    """The file of a blob. Raises `ReleaseError` if the digest is not valid."""
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ReleaseError(f"{layout}: found digest {digest[:100]!a}, expected sha256: and 64 digits")
    return layout / "blobs/sha256" / value


def put(layout: Path, content: bytes, media_type: str, **fields: Any) -> Descriptor:
    """Writes a blob and returns its descriptor."""
    file = blob(layout, digest_of(content))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return Descriptor(media_type, digest_of(content), len(content), **fields)


def encoded(value: object) -> bytes:
    """JSON with a fixed form."""
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def write_index(layout: Path, manifests: list[Json]) -> None:
    """Writes `index.json` and `oci-layout`."""
    (layout / "oci-layout").write_bytes(encoded({"imageLayoutVersion": "1.0.0"}))
    (layout / "index.json").write_bytes(encoded({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}))


def root(layout: Path) -> Descriptor:
    """The only entry of `index.json`. Raises `ReleaseError` if there is another number of entries."""
    try:
        content = json.loads((layout / "index.json").read_bytes())
        manifests = msgspec.convert(content["manifests"], list[Descriptor])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReleaseError(f"{layout}/index.json: {error}; expected an OCI image layout") from error
    if len(manifests) != 1:
        raise ReleaseError(f"{layout}/index.json: found {len(manifests)} manifests, expected 1")
    return manifests[0]


def manifest(layout: Path, descriptor: Descriptor) -> Json:
    """The JSON of a manifest, index or configuration, after a check of size and digest."""
    content = checked(layout, descriptor)
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ReleaseError(f"{layout}: blob {descriptor.digest}: found invalid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ReleaseError(f"{layout}: blob {descriptor.digest}: found no JSON object")
    return found


def checked(layout: Path, descriptor: Descriptor) -> bytes:
    """The content of a small blob with the size and digest of its descriptor."""
    if descriptor.size > MAX_MANIFEST:
        raise ReleaseError(
            f"{layout}: blob {descriptor.digest}: found {descriptor.size} bytes, too many for a manifest"
        )
    file = blob(layout, descriptor.digest)
    if not file.is_file():
        raise ReleaseError(f"{layout}: blob {descriptor.digest}: not found")
    content = file.read_bytes()
    if digest_of(content) != descriptor.digest or len(content) != descriptor.size:
        raise ReleaseError(f"{layout}: blob {descriptor.digest}: found other content, expected that of the digest")
    return content


def walk(layout: Path, descriptor: Descriptor) -> Iterator[tuple[Descriptor, Json | None]]:
    """All blobs below a descriptor, the leaves first, with the JSON of manifests."""
    if descriptor.media_type not in {INDEX, MANIFEST}:
        yield descriptor, None
        return
    content = manifest(layout, descriptor)
    children = content.get("manifests", []) + content.get("layers", [])
    if "config" in content:
        children.append(content["config"])
    try:
        parsed = msgspec.convert(children, list[Descriptor])
    except msgspec.ValidationError as error:
        raise ReleaseError(f"{layout}: blob {descriptor.digest}: {error}") from error
    for child in parsed:
        yield from walk(layout, child)
    yield descriptor, content


def verify(layout: Path) -> set[str]:
    """Checks size and digest of every blob of a layout, and returns the digests of all blobs in use."""
    found: set[str] = set()
    for descriptor, content in walk(layout, root(layout)):
        file = blob(layout, descriptor.digest)
        if content is None and descriptor.digest not in found:
            if not file.is_file():
                raise ReleaseError(f"{layout}: blob {descriptor.digest}: not found")
            if file.stat().st_size != descriptor.size or file_digest(file) != descriptor.digest:
                raise ReleaseError(
                    f"{layout}: blob {descriptor.digest}: found other content, expected that of the digest"
                )
        found.add(descriptor.digest)
    return found


def archive(files: Mapping[str, bytes]) -> bytes:
    """A tar archive with these files and their directories."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        directories: set[str] = set()
        for name, content in sorted(files.items()):
            for parent in reversed(Path(name).parents[:-1]):
                if str(parent) not in directories:
                    directories.add(str(parent))
                    member = tarfile.TarInfo(str(parent))
                    member.type, member.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(member)
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def compressed(content: bytes) -> bytes:
    """Gzip without a time."""
    return gzip.compress(content, compresslevel=9, mtime=0)


def write_data_image(
    layout: Path, files: Mapping[str, bytes], *, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> str:
    """Replaces a layout by an image with one layer of files, which runs nothing. Returns the digest of the index."""
    shutil.rmtree(layout, ignore_errors=True)
    tar = archive(files)
    layer = put(layout, compressed(tar), LAYER)
    platform = {"architecture": "amd64", "os": "linux"}
    configuration = {
        **platform,
        "config": {"Labels": dict(labels)},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(tar)]},
    }
    config = put(layout, encoded(configuration), CONFIG)
    image = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config.json, "layers": [layer.json]}
    if annotations:
        image["annotations"] = dict(annotations)
    content = put(layout, encoded(image), MANIFEST, platform=platform)
    index = put(layout, encoded({"schemaVersion": 2, "mediaType": INDEX, "manifests": [content.json]}), INDEX)
    write_index(layout, [index.json])
    return index.digest
