"""Signatures in the format of cosign: ECDSA with P-256 and SHA-256, with keys in PEM files.

`cosign verify-blob --key release.pub --signature FILE.sig`, `cosign verify --key release.pub IMAGE` and
`cosign verify-blob-attestation` accept them. OpenSSL verifies those of files too.
"""

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from release import oci
from release.errors import ReleaseError

PASSWORD = "RELEASE_KEY_PASSWORD"  # noqa: S105 - the name of a variable
SIMPLE_SIGNING = "application/vnd.dev.cosign.simplesigning.v1+json"
ANNOTATION = "dev.cosignproject.cosign/signature"
STATEMENT = "application/vnd.in-toto+json"
_ALGORITHM = ec.ECDSA(hashes.SHA256())


def generate(file: Path) -> None:
    """Writes a new private key, encrypted with $RELEASE_KEY_PASSWORD if it is set, and the public key to `file`.pub."""
    key = ec.generate_private_key(ec.SECP256R1())
    password = os.environ.get(PASSWORD, "").encode()
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(text)
    file.with_name(f"{file.name}.pub").write_bytes(public_text(key))


def load(file: Path) -> ec.EllipticCurvePrivateKey:
    """The private key of a PEM file. Raises `ReleaseError`."""
    try:
        password = os.environ.get(PASSWORD, "").encode() or None
        key = serialization.load_pem_private_key(file.read_bytes(), password)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ReleaseError(f"{file}: {error}; expected a PEM key of make release-key, and {PASSWORD}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ReleaseError(f"{file}: found another kind of key, expected P-256")
    return key


def load_public(file: Path) -> ec.EllipticCurvePublicKey:
    """The public key of a PEM file. Raises `ReleaseError`."""
    try:
        key = serialization.load_pem_public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ReleaseError(f"{file}: {error}; expected a public key in PEM format") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ReleaseError(f"{file}: found another kind of key, expected P-256")
    return key


def public_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key in PEM format."""
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> str:
    """The signature of a content in base64."""
    return base64.b64encode(key.sign(content, _ALGORITHM)).decode()


def verify(key: ec.EllipticCurvePublicKey, content: bytes, signature: str, name: str) -> None:
    """Raises `ReleaseError` if the signature does not fit to the content and the key."""
    try:
        key.verify(base64.b64decode(signature.strip(), validate=True), content, _ALGORITHM)
    except (InvalidSignature, ValueError) as error:
        raise ReleaseError(f"{name}: the signature does not fit to the content and the key") from error


def envelope(key: ec.EllipticCurvePrivateKey, statement: bytes) -> bytes:
    """A DSSE envelope with a signed in-toto statement."""
    signature = {"keyid": "", "sig": sign(key, _encoded(statement))}
    payload = base64.b64encode(statement).decode()
    return oci.encoded({"payloadType": STATEMENT, "payload": payload, "signatures": [signature]})


def opened(key: ec.EllipticCurvePublicKey, text: bytes, name: str) -> bytes:
    """The statement in a DSSE envelope, after a check of its signature."""
    try:
        found = json.loads(text)
        statement = base64.b64decode(found["payload"], validate=True)
        signature, kind = found["signatures"][0]["sig"], found["payloadType"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ReleaseError(f"{name}: {error!r}; expected a DSSE envelope") from error
    if kind != STATEMENT:
        raise ReleaseError(f"{name}: found payload type {kind!a}, expected {STATEMENT}")
    verify(key, _encoded(statement), signature, name)
    return statement


def _encoded(statement: bytes) -> bytes:
    """The bytes that DSSE signs."""
    return b"DSSEv1 %d %s %d %s" % (len(STATEMENT), STATEMENT.encode(), len(statement), statement)


def payload(reference: str, digest: str) -> bytes:
    """What cosign signs for an image: its name and digest."""
    critical = {
        "identity": {"docker-reference": reference},
        "image": {"docker-manifest-digest": digest},
        "type": "cosign container image signature",
    }
    return json.dumps({"critical": critical, "optional": None}, separators=(",", ":")).encode()


def signature_tag(digest: str) -> str:
    """The tag of the signature of an image."""
    return f"{digest.replace(':', '-')}.sig"


def write_signature_image(
    layout: Path, key: ec.EllipticCurvePrivateKey, reference: str, digest: str
) -> Mapping[str, object]:
    """Writes the image that holds the signature of another image to a layout, and returns its descriptor."""
    content = payload(reference, digest)
    layer = oci.put(layout, content, SIMPLE_SIGNING, annotations={ANNOTATION: sign(key, content)})
    configuration = {
        "architecture": "",
        "os": "",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer.digest]},
    }
    config = oci.put(layout, oci.encoded(configuration), oci.CONFIG)
    image = {"schemaVersion": 2, "mediaType": oci.MANIFEST, "config": config.json, "layers": [layer.json]}
    return oci.put(layout, oci.encoded(image), oci.MANIFEST).json
