"""A certificate authority (CA) of a program's own: what is issued when.

A new CA is trusted for a while before anything is signed by it, and an old one until it expires, so at every moment
callers trust what any replica serves. Who writes first wins: writes carry the version that they were decided on.

As a program it answers one `Question` on its standard input, with the `Judgement` on its output: see `certificates`.
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

from accelplane.kube.certificates import CertificatePolicy, Issued, Judgement, Question

# Clocks differ, and a certificate that begins now is not valid yet for those that are behind.
_SKEW = datetime.timedelta(minutes=10)


def renewed(current: Issued | None, names: Sequence[str], now: datetime.datetime, policy: CertificatePolicy) -> Issued:
    """What is to be issued at this moment: `current` itself while nothing is due.

    What cannot be read is replaced like what was never there.
    """
    known = _certificates(current.authorities if current else b"")
    trusted = [one for one in known if one.not_valid_after_utc > now]
    signer = _signer(trusted, current, now) or _authority(now, policy)
    if signer.certificate not in trusted:
        trusted.insert(0, signer.certificate)
    served = _certificates(current.certificate if current else b"")
    key = _key(current.key if current else b"")
    usable = bool(served) and key is not None and _belong(served[0], key) and _valid(served[0], trusted, names, now)
    trusted_everywhere = now >= signer.certificate.not_valid_before_utc + _SKEW + policy.overlap
    due = not usable or (trusted_everywhere and (_worn(served[0], now) or not _signed(served[0], signer.certificate)))
    if current is not None and trusted == known and not due:
        return current
    bundle = b"".join(one.public_bytes(Encoding.PEM) for one in trusted)
    if current is not None and not due:
        return Issued(bundle, _pem(signer.key), current.certificate, current.key)
    made = ec.generate_private_key(ec.SECP256R1())
    return Issued(bundle, _pem(signer.key), _serving(made, names, signer, now + policy.serving, now), _pem(made))


def judgement(question: Question) -> Judgement:
    """What `renewed` says, and when to ask it again at the latest."""
    wanted = renewed(question.current, question.names, question.now, question.policy)
    until = _until(wanted, question.now, question.policy)
    return Judgement(None if wanted is question.current else wanted, until)


async def judged_here(question: Question) -> Judgement:
    """The same for a `Trust` whose process keeps the library: where memory is limited to less than two processes."""
    return judgement(question)


def _until(wanted: Issued, now: datetime.datetime, policy: CertificatePolicy) -> datetime.datetime:
    trusted, served = _certificates(wanted.authorities), _certificates(wanted.certificate)
    moments = [one.not_valid_after_utc for one in (*trusted, *served)]
    moments += [one.not_valid_after_utc - _life(one) / 3 for one in (trusted[0], served[0])]
    moments.append(trusted[0].not_valid_before_utc + _SKEW + policy.overlap)
    return min((one for one in moments if one >= now), default=now)


class _Signer(Struct, frozen=True):
    """A CA and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def _signer(trusted: Sequence[x509.Certificate], current: Issued | None, now: datetime.datetime) -> _Signer | None:
    """The CA that signs; None when a new one is due."""
    key = _key(current.authority_key if current else b"")
    if not trusted or key is None or not _belong(trusted[0], key) or _worn(trusted[0], now):
        return None
    return _Signer(trusted[0], key)


def _valid(
    certificate: x509.Certificate, trusted: Sequence[x509.Certificate], names: Sequence[str], now: datetime.datetime
) -> bool:
    """Whether callers take this certificate at all."""
    return (
        certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc
        and set(names) <= _names(certificate)
        and any(_signed(certificate, one) for one in trusted)
    )


def _worn(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    return certificate.not_valid_after_utc - now < _life(certificate) / 3


def _life(certificate: x509.Certificate) -> datetime.timedelta:
    return certificate.not_valid_after_utc - certificate.not_valid_before_utc


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _belong(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> bool:
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


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _authority(now: datetime.datetime, policy: CertificatePolicy) -> _Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    # Something of its own in its name: two CAs of one name and of different keys confuse who checks signatures.
    name = _named(f"webhook-ca-{now:%Y%m%d}-{x509.random_serial_number() % 16**8:08x}")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _begun(name, name, key, now, now + policy.authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _Signer(certificate, key)


def _serving(
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    signer: _Signer,
    end: datetime.datetime,
    now: datetime.datetime,
) -> bytes:
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key())
    certificate = (
        # A common name has at most 64 characters; callers look at the other names anyway.
        _begun(_named(names[0][:64]), signer.certificate.subject, key, now, end)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(identifier, critical=False)
        .sign(signer.key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM)


def _begun(
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


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def main() -> None:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.json.encode(judgement(question)))


if __name__ == "__main__":
    main()
