"""A certificate authority for one cluster, so that every connection is verified as in production."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Credentials:
    """A certificate and its key, both PEM."""

    certificate: bytes
    key: bytes


class Authority:
    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(name, ())
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
            decipher_only=False,
        )  # fmt: skip
        self._certificate = (
            _unsigned(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def credentials(self) -> Credentials:
        return Credentials(self._certificate.public_bytes(Encoding.PEM), _private_pem(self._key))

    def client(self, user: str, *groups: str) -> Credentials:
        """A client certificate of a user with these groups."""
        return self._issue(_subject(user, groups), [ExtendedKeyUsageOID.CLIENT_AUTH], ())

    def server(self, name: str, *addresses: str) -> Credentials:
        """For a server reached by these host names and IP addresses."""
        return self._issue(_subject(name, ()), [ExtendedKeyUsageOID.SERVER_AUTH], addresses)

    def _issue(
        self, subject: x509.Name, usages: list[x509.ObjectIdentifier], addresses: tuple[str, ...]
    ) -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _unsigned(subject, self._name, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        if addresses:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(address) for address in addresses]), critical=False
            )
        certificate = builder.sign(self._key, hashes.SHA256())
        return Credentials(certificate.public_bytes(Encoding.PEM), _private_pem(key))


def signing_key() -> tuple[bytes, bytes]:
    """Private and public half of a key for service account tokens, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _private_pem(key), key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _subject(name: str, groups: tuple[str, ...]) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _unsigned(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _LIFETIME)
    )


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
