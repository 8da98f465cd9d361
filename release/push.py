"""Pushes a complete release to its registry: images, charts, bundles and the catalog, each with its signature.

A tag is written last: clients that pull it get the complete artefact and its signature, also during a push and after a
failed one. A push can be repeated: the registry keeps the blobs that it has.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from release import images, oci, signing
from release.errors import ReleaseError
from release.registry import Registry

Say = Callable[[str], None]


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """A release in a directory, the private key of its signatures, and how to reach its registry."""

    out: Path
    key: Path
    plain_http: bool = False
    ca_file: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """`release.json`."""
        return json.loads((self.out / "release.json").read_text())


def push(settings: Push, say: Say) -> None:
    """Pushes everything. Raises `ReleaseError` before the first upload if the registry has another release."""
    facts = settings.facts
    key = signing.load(settings.key)
    if signing.public_text(key) != (settings.out / "release.pub").read_bytes():
        raise ReleaseError(f"{settings.key}: found another key than that of {settings.out}/release.pub")
    registry = Registry(facts["registry"], plain_http=settings.plain_http, ca_file=settings.ca_file)
    wanted = list(artefacts(settings.out, facts))
    if not facts["draft"]:
        for name, _, digest in wanted:
            _check_tag(registry, name, facts["version"], digest)
    for name, layout, digest in wanted:
        say(f"pushing {facts['registry']}/{name}:{facts['version']}")
        content = json.loads(oci.blob(layout, digest).read_bytes())
        descriptor = {"digest": digest, "mediaType": content["mediaType"]}
        registry.push(name, layout, descriptor, [])
        with tempfile.TemporaryDirectory() as scratch:
            reference = f"{facts['registry']}/{name}"
            signature = signing.write_signature_image(Path(scratch), key, reference, digest)
            registry.push(name, Path(scratch), signature, [signing.signature_tag(digest)])
        registry.push(name, layout, descriptor, [facts["version"]])


def artefacts(out: Path, facts: dict[str, Any]) -> Iterator[tuple[str, Path, str]]:
    """Name, layout and digest of all artefacts of a release in a registry."""
    for name, digest in images.load(out / "images.json").digests.items():
        yield name, out / "images", digest
    for name, digest in facts["charts"].items():
        yield f"charts/{name}", out / "charts/oci", digest
    for name, digest in facts["olm"].items():
        yield name, olm_layout(out, name), digest


def olm_layout(out: Path, name: str) -> Path:
    """The layout of the image of a bundle or the catalog."""
    return out / "olm" / ("catalog-image" if name == "accelplane-catalog" else name)


def _check_tag(registry: Registry, name: str, tag: str, digest: str) -> None:
    found = registry.digest(name, tag)
    if found and found != digest:
        raise ReleaseError(
            f"{registry.host}/{registry.repository(name)}:{tag}: found {found}, expected {digest} or no such tag; "
            "release a new version"
        )
