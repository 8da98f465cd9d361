"""JSON web tokens with the signature of an issuer, as the API server makes them for service accounts."""

import base64
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512

HASHES = {"RS256": SHA256(), "RS384": SHA384(), "RS512": SHA512(), "ES256": SHA256(), "ES384": SHA384(),
          "ES512": SHA512()}  # fmt: skip
FAR_FUTURE = 2**40


class TokenIssuer:
    """An issuer with one key; `document` is what the API server publishes."""

    def __init__(self, key: "rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey", algorithm: str, name: str) -> None:
        self._key = key
        self._algorithm = algorithm
        self._name = name

    @classmethod
    def rsa(cls, algorithm: str = "RS256", name: str = "rsa") -> "TokenIssuer":
        return cls(rsa.generate_private_key(65537, 2048), algorithm, name)

    @classmethod
    def elliptic(cls, curve: ec.EllipticCurve | None = None, algorithm: str = "ES256") -> "TokenIssuer":
        return cls(ec.generate_private_key(curve or ec.SECP256R1()), algorithm, "elliptic")

    def token(self, user: str, audience: Any = ("accelplane-fleet",), *, expires: float = FAR_FUTURE) -> str:
        header = {"alg": self._algorithm, "kid": self._name}
        claims = {"sub": user, "aud": audience, "exp": expires, "iss": "https://kubernetes.default.svc"}
        signed = ".".join(text_of(msgspec.json.encode(part)) for part in (header, claims))
        return f"{signed}.{text_of(self._sign(signed.encode()))}"

    def _sign(self, signed: bytes) -> bytes:
        algorithm = HASHES[self._algorithm]
        if isinstance(self._key, rsa.RSAPrivateKey):
            return self._key.sign(signed, padding.PKCS1v15(), algorithm)
        size = (self._key.curve.key_size + 7) // 8
        numbers = decode_dss_signature(self._key.sign(signed, ec.ECDSA(algorithm)))
        return b"".join(number.to_bytes(size, "big") for number in numbers)

    @property
    def document(self) -> dict[str, Any]:
        numbers = self._key.public_key().public_numbers()
        key: dict[str, Any] = {"use": "sig", "kid": self._name, "alg": self._algorithm}
        if isinstance(numbers, rsa.RSAPublicNumbers):
            key |= {"kty": "RSA", "n": _number(numbers.n), "e": _number(numbers.e)}
        else:
            name = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}[numbers.curve.name]
            key |= {"kty": "EC", "crv": name, "x": _number(numbers.x), "y": _number(numbers.y)}
        return {"keys": [key]}


def text_of(content: bytes) -> str:
    """Base64url without padding."""
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _number(value: int) -> str:
    return text_of(value.to_bytes((value.bit_length() + 7) // 8, "big"))
