"""Signatures of the service account tokens of this cluster, which are verified with the keys of the API server.

The signature decides the order of reviews only: whether a token is valid is the decision of the API server. Facts:
RFC 7515 (JSON Web Signature), RFC 7517 (JSON Web Key), RFC 7518 (algorithms), and "Service account issuer discovery"
of the Kubernetes documentation: `/openid/v1/jwks` has RSA and ECDSA keys.
"""

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, HashAlgorithm
from msgspec import Struct

from accelplane.apiserver import ApiError
from accelplane.apiserver.client import ApiServer

log = logging.getLogger(__name__)

PATH = "/openid/v1/jwks"
_ACCEPT = "application/jwk-set+json"  # the API server answers 406 to any other type

_MAX_AGE = 3600.0
_MIN_INTERVAL = 60.0
_DEADLINE = 5.0
_MAX_DOCUMENT = 256 * 1024
_MAX_KEYS = 32
_MAX_RSA_BITS = 8192

_RSA_HASHES: Mapping[str, HashAlgorithm] = MappingProxyType({"RS256": SHA256(), "RS384": SHA384(), "RS512": SHA512()})
_CURVES: Mapping[str, ec.EllipticCurve] = MappingProxyType(
    {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}
)
_CURVE_OF: Mapping[str, tuple[str, HashAlgorithm]] = MappingProxyType(
    {"ES256": ("secp256r1", SHA256()), "ES384": ("secp384r1", SHA384()), "ES512": ("secp521r1", SHA512())}
)

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey


class JsonWebKey(Struct, frozen=True):
    """A key of the document. The numbers of RSA keys are `n` and `e`, those of ECDSA keys `x` and `y`."""

    kty: str = ""
    kid: str = ""
    n: str = ""
    e: str = ""
    crv: str = ""
    x: str = ""
    y: str = ""


class KeySet(Struct, frozen=True):
    """The document of the API server."""

    keys: list[JsonWebKey] = []


class _Header(Struct, frozen=True):
    alg: str = ""
    kid: str = ""


class _Claims(Struct, frozen=True):
    exp: float = 0.0
    aud: list[str] | str = ""


class SignedToken(Struct, frozen=True):
    """A JSON web token of which no part is verified. `signed` is the text that the signature belongs to."""

    algorithm: str
    key: str
    expires: float
    audiences: tuple[str, ...]
    signed: bytes
    signature: bytes


class IssuerKeys:
    """Verifies tokens with the keys of the cluster's issuer.

    The keys are read when the first token needs them, again for a token with an unknown key, and after an hour, at most
    once a minute. Without the right to read them no token is verified.
    """

    def __init__(self, server: ApiServer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._keys: Mapping[str, PublicKey] = {}
        self._lock = asyncio.Lock()
        self._read_at: float | None = None
        self._problem = ""

    async def is_signed(self, token: str, audiences: Sequence[str] = ()) -> bool:
        """Whether the cluster's issuer has signed this token for one of the audiences, and it has not expired."""
        parsed = parse_token(token)
        if parsed is None or parsed.expires <= time.time() or (audiences and not {*audiences} & {*parsed.audiences}):
            return False
        if self._needs_keys(parsed.key):
            async with self._lock:
                # Another token may have had the turn before this one.
                if self._needs_keys(parsed.key):
                    await self._read()
        key = self._keys.get(parsed.key)
        return key is not None and has_signature(parsed, key)

    def _needs_keys(self, key: str) -> bool:
        if self._read_at is None:
            return True
        age = self._clock() - self._read_at
        return age >= _MAX_AGE or (age >= _MIN_INTERVAL and key not in self._keys)

    async def _read(self) -> None:
        try:
            found = await self._server.get(PATH, KeySet, accept=_ACCEPT, deadline=_DEADLINE, limit=_MAX_DOCUMENT)
        except ApiError as error:
            self._log_problem(" ".join(str(error).split()))
        else:
            self._keys = public_keys(found)
            self._problem = ""
        # Not after a cancellation: a client that disconnects must not delay the next attempt.
        self._read_at = self._clock()

    def _log_problem(self, problem: str) -> None:
        """Logs a problem once, not for each attempt."""
        if problem != self._problem:
            self._problem = problem
            log.warning(
                "%s: %s; new tokens of service accounts have no precedence over unknown tokens; the account of the "
                "fleet needs the right of the role system:service-account-issuer-discovery",
                PATH, problem,
            )  # fmt: skip


def parse_token(token: str) -> SignedToken | None:
    """The parts of a token with a signature, None for other text."""
    signed, _, signature = token.rpartition(".")
    header, _, claims = signed.partition(".")
    try:
        head = msgspec.json.decode(_decode(header), type=_Header)
        found = msgspec.json.decode(_decode(claims), type=_Claims)
        audiences = (found.aud,) if isinstance(found.aud, str) else tuple(found.aud)
        return SignedToken(head.alg, head.kid, found.exp, audiences, signed.encode("ascii"), _decode(signature))
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None


def public_keys(found: KeySet) -> Mapping[str, PublicKey]:
    """The keys that can be used, by their identifiers; at most 32 of a document are read."""
    keys: dict[str, PublicKey] = {}
    for each in found.keys[:_MAX_KEYS]:
        try:
            key = _public_key(each)
        except ValueError as error:
            log.warning("%s: key %.80s cannot be used: %s", PATH, ascii(each.kid), error)
        else:
            keys[each.kid] = key
    return keys


def _public_key(found: JsonWebKey) -> PublicKey:
    """Raises `ValueError`."""
    if found.kty == "RSA":
        modulus = _number(found.n)
        if modulus.bit_length() > _MAX_RSA_BITS:
            raise ValueError(f"found an RSA key of {modulus.bit_length()} bits, expected at most {_MAX_RSA_BITS}")
        return rsa.RSAPublicNumbers(_number(found.e), modulus).public_key()
    curve = _CURVES.get(found.crv)
    if found.kty != "EC" or curve is None:
        raise ValueError(f"found type {found.kty[:20]!a} {found.crv[:20]!a}, expected RSA or EC")
    return ec.EllipticCurvePublicNumbers(_number(found.x), _number(found.y), curve).public_key()


def has_signature(token: SignedToken, key: PublicKey) -> bool:
    """Whether the signature of the token is that of the key."""
    try:
        if isinstance(key, rsa.RSAPublicKey):
            algorithm = _RSA_HASHES.get(token.algorithm)
            if algorithm is None:
                return False
            key.verify(token.signature, token.signed, padding.PKCS1v15(), algorithm)
            return True
        name, algorithm = _CURVE_OF.get(token.algorithm, ("", None))
        half = (key.curve.key_size + 7) // 8
        if algorithm is None or name != key.curve.name or len(token.signature) != 2 * half:
            return False
        r, s = (int.from_bytes(part, "big") for part in (token.signature[:half], token.signature[half:]))
        key.verify(encode_dss_signature(r, s), token.signed, ec.ECDSA(algorithm))
    except InvalidSignature:
        return False
    return True


def _number(text: str) -> int:
    """Raises `ValueError`."""
    return int.from_bytes(_decode(text), "big")


def _decode(text: str) -> bytes:
    """The bytes of a part. Raises `ValueError` for any but the one spelling of these bytes.

    One signature with many spellings would be many tokens.
    """
    try:
        found = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    if base64.urlsafe_b64encode(found).decode().rstrip("=") != text:
        raise ValueError("found another spelling of base64url, expected the canonical one")
    return found
