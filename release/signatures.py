"""The signatures of all artefacts of a release: one OCI image layout, which is pushed with the artefacts.

The offline archive has this layout too, so that `cosign verify` accepts the artefacts in a mirror.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec

from release import oci, signing
from release.artefacts import registry_artefacts
from release.errors import ReleaseError

LAYOUT = "signatures"


def write(out: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Signs all artefacts of a release."""
    layout = out / LAYOUT
    registry = json.loads((out / "release.json").read_text())["registry"]
    entries: list[oci.Json] = []
    for name, _, digest in registry_artefacts(out):
        descriptor = signing.write_signature_image(layout, key, f"{registry}/{name}", digest)
        annotations = {oci.REF_NAME: f"{name}:{signing.signature_tag(digest)}"}
        entries.append({**descriptor, "annotations": annotations})
    oci.write_index(layout, entries)


def load(out: Path) -> dict[str, oci.Descriptor]:
    """The manifests of the signatures by name and tag. Raises `ReleaseError` if the layout is not valid."""
    file = out / LAYOUT / "index.json"
    try:
        found = msgspec.convert(json.loads(file.read_bytes())["manifests"], list[oci.Descriptor])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReleaseError(f"{file}: {error}; expected the index of an OCI image layout") from error
    return {(each.annotations or {}).get(oci.REF_NAME, ""): each for each in found}


def find(known: dict[str, oci.Descriptor], name: str, digest: str) -> oci.Descriptor:
    """The manifest of the signature of an artefact. Raises `ReleaseError` if there is none."""
    if found := known.get(f"{name}:{signing.signature_tag(digest)}"):
        return found
    raise ReleaseError(f"{LAYOUT}: found no signature of {name}@{digest}, expected one of make release")


def check(key: ec.EllipticCurvePublicKey, manifest: bytes, content: bytes, reference: str, digest: str) -> None:
    """Raises `ReleaseError` if a signature does not fit to an artefact and the key. `content` is the signed text."""
    (layer,) = json.loads(manifest)["layers"]
    name = f"signature of {reference}"
    signing.verify(key, content, layer["annotations"][signing.ANNOTATION], name)
    if content != signing.payload(reference, digest):
        raise ReleaseError(f"{name}: found {content.decode(errors='replace')[:300]}, expected {digest}")


def blobs(out: Path, known: dict[str, oci.Descriptor]) -> Iterator[str]:
    """The digests of all blobs of the signatures, after a check of their content."""
    for descriptor in known.values():
        for each, content in oci.walk(out / LAYOUT, descriptor):
            if content is None:
                oci.checked(out / LAYOUT, each)
            yield each.digest
