"""The list of images of a release: `images.json`, which `make images` writes beside the images."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from release.errors import ReleaseError

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")


class Image(msgspec.Struct, frozen=True):
    """An image: the digest of its index, its platforms, its compressed size in bytes, and the images it replaces."""

    name: str
    digest: str
    platforms: tuple[str, ...] = ()
    bytes: int = 0
    aliases: tuple[str, ...] = ()


class Images(msgspec.Struct, frozen=True):
    """All images of a version."""

    version: str
    images: tuple[Image, ...]

    @property
    def digests(self) -> dict[str, str]:
        """The digests of all images by name."""
        return {image.name: image.digest for image in self.images}


class References(msgspec.Struct, frozen=True):
    """Names of images as references: by digest if there is one, and otherwise by version."""

    registry: str
    version: str
    digests: Mapping[str, str] = {}

    def of(self, name: str) -> str:
        """The reference of an image. Raises `ReleaseError` if the image has no digest but others have."""
        if not self.digests:
            return f"{self.registry}/{name}:{self.version}"
        if name not in self.digests:
            raise ReleaseError(f"image {name}: found no digest; build it with make images, or add it to images.json")
        return f"{self.registry}/{name}@{self.digests[name]}"


def load(file: Path) -> Images:
    """The list of images in a file. Raises `ReleaseError` if it is not valid."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Images)
    except (OSError, msgspec.DecodeError) as error:
        raise ReleaseError(f"{file}: {error}; run make images to write it") from error
    for image in found.images:
        if not _NAME.fullmatch(image.name):
            raise ReleaseError(f"{file}: found the image name {image.name!a}, expected lower case letters and -")
        if not _DIGEST.fullmatch(image.digest):
            raise ReleaseError(f"{file}: image {image.name}: found digest {image.digest!a}, expected sha256:…")
    if not found.images:
        raise ReleaseError(f"{file}: found no images")
    if len(found.digests) < len(found.images):
        raise ReleaseError(f"{file}: found an image twice")
    return found
