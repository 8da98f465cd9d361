"""The certificate authority (CA) of a program: decides about renewals, and issues certificates.

A new CA is trusted for some time before it signs, and an old CA is trusted until it expires. So callers always trust
the certificate of each replica. A CA or certificate that is not valid yet, because it was issued while the clock was
ahead, is replaced: no caller accepts it. Concurrent replicas are safe: a write to the Secret carries the resource
version that the decision is based on.

Run as a program, it reads one `RenewalRequest` from standard input and writes the `RenewalPlan` to standard output.
"""

import datetime
import sys
from collections.abc import Sequence

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

from accelplane.kube.certificates import CertificatePolicy, CertificateSet, RenewalPlan, RenewalRequest

# Clocks differ: for a caller whose clock is behind, a certificate that starts now is not valid yet.
_SKEW = datetime.timedelta(minutes=10)


class _Signer(Struct, frozen=True):
    """A CA and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def renew(
    current: CertificateSet | None, names: Sequence[str], now: datetime.datetime, policy: CertificatePolicy
) -> CertificateSet:
    """The certificates to use from now on: `current` itself if nothing is due.

    Unreadable parts are treated like missing ones.
    """
    known = _certificates(current.authorities if current else b"")
    trusted = [authority for authority in known if _is_current(authority, now)]
    signer = _signer(trusted, current, now) or _new_authority(now, policy)
    if signer.certificate not in trusted:
        trusted.insert(0, signer.certificate)
    unchanged = current is not None and trusted == known
    bundle = b"".join(authority.public_bytes(Encoding.PEM) for authority in trusted)
    if current is not None and not _serving_due(current, signer, trusted, names, now=now, policy=policy):
        return current if unchanged else CertificateSet(bundle, _key_pem(signer.key), current.certificate, current.key)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _issue(key, names, signer, now + policy.serving, now)
    return CertificateSet(bundle, _key_pem(signer.key), certificate, _key_pem(key))


def plan(request: RenewalRequest) -> RenewalPlan:
    """The result of `renew` and the latest time for the next call."""
    renewed = renew(request.current, request.names, request.now, request.policy)
    until = _next_renewal(renewed, request.now, request.policy)
    return RenewalPlan(None if renewed is request.current else renewed, until)


async def plan_renewal_in_process(request: RenewalRequest) -> RenewalPlan:
    """`certificates.plan_renewal` without a child process, for a container whose memory limit has no room for one."""
    return plan(request)


def _serving_due(
    current: CertificateSet,
    signer: _Signer,
    trusted: Sequence[x509.Certificate],
    names: Sequence[str],
    *,
    now: datetime.datetime,
    policy: CertificatePolicy,
) -> bool:
    """Whether to issue a serving certificate: no valid one exists, or the signer may replace it."""
    served, key = _certificates(current.certificate), _key(current.key)
    if not served or key is None or not _key_matches(served[0], key) or not _valid(served[0], trusted, names, now):
        return True
    if now < _trusted_from(signer.certificate, policy):
        return False
    return _needs_renewal(served[0], now) or not _is_signed_by(served[0], signer.certificate)


def _next_renewal(certificates: CertificateSet, now: datetime.datetime, policy: CertificatePolicy) -> datetime.datetime:
    trusted, served = _certificates(certificates.authorities), _certificates(certificates.certificate)
    times = [certificate.not_valid_after_utc for certificate in (*trusted, *served)]
    times += [certificate.not_valid_after_utc - _lifetime(certificate) / 3 for certificate in (trusted[0], served[0])]
    times.append(_trusted_from(trusted[0], policy))
    return min((time for time in times if time >= now), default=now)


def _trusted_from(authority: x509.Certificate, policy: CertificatePolicy) -> datetime.datetime:
    """The time from which all callers trust a CA that this module issued."""
    return authority.not_valid_before_utc + _SKEW + policy.overlap


def _signer(
    trusted: Sequence[x509.Certificate], current: CertificateSet | None, now: datetime.datetime
) -> _Signer | None:
    """The CA that signs, None if a new one is due."""
    key = _key(current.authority_key if current else b"")
    if not trusted or key is None or not _key_matches(trusted[0], key) or _needs_renewal(trusted[0], now):
        return None
    return _Signer(trusted[0], key)


def _valid(
    certificate: x509.Certificate, trusted: Sequence[x509.Certificate], names: Sequence[str], now: datetime.datetime
) -> bool:
    """Whether callers accept this certificate now."""
    return (
        _is_current(certificate, now)
        and set(names) <= _names(certificate)
        and any(_is_signed_by(certificate, authority) for authority in trusted)
    )


def _is_current(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def _needs_renewal(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    return certificate.not_valid_after_utc - now < _lifetime(certificate) / 3


def _lifetime(certificate: x509.Certificate) -> datetime.timedelta:
    return certificate.not_valid_after_utc - certificate.not_valid_before_utc


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _key_matches(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> bool:
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return certificate.public_key().public_bytes(*form) == key.public_key().public_bytes(*form)


def _names(certificate: x509.Certificate) -> set[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        return set()
    return set(found.value.get_values_for_type(x509.DNSName))


def _certificates(text: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError:
        return []


def _key(text: bytes) -> ec.EllipticCurvePrivateKey | None:
    try:
        found = load_pem_private_key(text, None)
    except (ValueError, TypeError):
        return None
    return found if isinstance(found, ec.EllipticCurvePrivateKey) else None


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _new_authority(now: datetime.datetime, policy: CertificatePolicy) -> _Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    # A unique name: two CAs with the same name and different keys confuse certificate verification.
    name = _common_name(f"webhook-ca-{now:%Y%m%d}-{x509.random_serial_number() % 16**8:08x}")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(name, name, key, now, now + policy.authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _Signer(certificate, key)


def _issue(
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    signer: _Signer,
    end: datetime.datetime,
    now: datetime.datetime,
) -> bytes:
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key())
    certificate = (
        # A common name has at most 64 characters. Callers verify the subject alternative names only.
        _builder(_common_name(names[0][:64]), signer.certificate.subject, key, now, end)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(identifier, critical=False)
        .sign(signer.key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(end)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=RenewalRequest)
    sys.stdout.buffer.write(msgspec.json.encode(plan(request)))


if __name__ == "__main__":
    main()
