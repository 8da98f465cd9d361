"""Verification of issued certificates."""

import datetime

from cryptography import x509


def accepts(bundle: bytes, certificate: bytes, name: str, now: datetime.datetime) -> bool:
    """Whether a caller that trusts `bundle` accepts this certificate for the name at that time."""
    leaf = x509.load_pem_x509_certificate(certificate)
    roots = x509.load_pem_x509_certificates(bundle)
    verifier = x509.verification.PolicyBuilder().store(x509.verification.Store(roots)).time(now)
    try:
        verifier.build_server_verifier(x509.DNSName(name)).verify(leaf, [])
    except x509.verification.VerificationError:
        return False
    return True
