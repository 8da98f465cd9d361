"""Pushes a complete release to its registry: images, charts, bundles and the catalog, each with its signature.

A tag is written last: clients that pull it get the complete artefact and its signature, also during a push and after a
failed one. A push can be repeated: the registry keeps the blobs that it has.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from release import oci, signatures, signing
from release.artefacts import registry_artefacts
from release.errors import ReleaseError
from release.registry import Registry

Say = Callable[[str], None]


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """A release in a directory, and how to reach its registry."""

    out: Path
    plain_http: bool = False
    ca_file: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """`release.json`."""
        return json.loads((self.out / "release.json").read_text())


def push(settings: Push, say: Say) -> None:
    """Pushes everything. Raises `ReleaseError` before the first upload if the registry has another release."""
    facts = settings.facts
    known = signatures.load(settings.out)
    registry = Registry(facts["registry"], plain_http=settings.plain_http, ca_file=settings.ca_file)
    complete = [(*each, signatures.find(known, each[0], each[2])) for each in registry_artefacts(settings.out)]
    if not facts["draft"]:
        for name, _, digest, _ in complete:
            _check_tag(registry, name, facts["version"], digest)
    for name, layout, digest, signature in complete:
        say(f"pushing {facts['registry']}/{name}:{facts['version']}")
        content = json.loads(oci.blob(layout, digest).read_bytes())
        descriptor = {"digest": digest, "mediaType": content["mediaType"]}
        registry.push(name, layout, descriptor, [])
        tag = signing.signature_tag(digest)
        registry.push(name, settings.out / signatures.LAYOUT, signature.json, [tag])
        registry.tag(name, layout, descriptor, facts["version"])


def _check_tag(registry: Registry, name: str, tag: str, digest: str) -> None:
    found = registry.digest(name, tag)
    if found and found != digest:
        raise ReleaseError(
            f"{registry.host}/{registry.repository(name)}:{tag}: found {found}, expected {digest} or no such tag; "
            "release a new version"
        )
