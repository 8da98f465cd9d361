"""The period in which a certificate is valid, read from its file (RFC 5280, section 4.1; X.690 for the encoding).

The ssl module of Python has no function for this, and a library for certificates needs 11 MB.
"""

import base64
import re
from datetime import UTC, datetime
from typing import NamedTuple

NOT_BEFORE = "accelplane_serving_certificate_not_before_timestamp_seconds"
NOT_AFTER = "accelplane_serving_certificate_not_after_timestamp_seconds"
"""The metrics of programs that serve TLS."""

HELP = {NOT_BEFORE: "Start of the validity of the serving certificate", NOT_AFTER: "End of the validity"}

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18
_WEEK = 7 * 86400.0


class Validity(NamedTuple):
    """Both ends, as seconds since the epoch."""

    not_before: float
    not_after: float

    def samples(self) -> dict[str, float]:
        """The metrics by name."""
        return {NOT_BEFORE: self.not_before, NOT_AFTER: self.not_after}

    def expires_soon(self, now: float) -> bool:
        """Whether less than a tenth of the lifetime is left, or less than a week of a longer one."""
        return self.not_after - now < min(_WEEK, (self.not_after - self.not_before) / 10)


def validity(pem: bytes) -> Validity:
    """The validity of the first certificate. Raises `ValueError` if it cannot be read."""
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("found no BEGIN CERTIFICATE")
    try:
        return _validity(base64.b64decode(found[1]))
    except IndexError as error:
        raise ValueError("the certificate is incomplete") from error


def _validity(der: bytes) -> Validity:
    at = _element(der, 0)[1]  # Certificate
    at = _element(der, at)[1]  # TBSCertificate
    tag, _, end = _element(der, at)
    if tag == _VERSION:
        at = end
    for _ in range(3):  # serialNumber, signature, issuer
        at = _element(der, at)[2]
    at = _element(der, at)[1]
    first, start, end = _element(der, at)
    second, second_start, second_end = _element(der, end)
    return Validity(_time(first, der[start:end]), _time(second, der[second_start:second_end]))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """The tag of the element at an offset, and the offsets of its content's start and end."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size]), start + size
    return tag, start, start + length


def _time(tag: int, text: bytes) -> float:
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("19" if digits >= "5" else "20") + digits
    elif tag != _GENERALIZED_TIME:
        raise ValueError(f"found tag {tag}, expected a time")
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
