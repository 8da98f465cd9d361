"""The certificates of a program that is its own certificate authority (CA) for its webhooks.

One Secret has all of them: `ca.crt` is the bundle that callers trust, `ca.key` signs, `tls.crt` and `tls.key` serve.
`authority` decides what to renew. It runs in a short-lived child process, because its library needs 11 MB. It runs
again only when a certificate is due or the Secret has changed.
"""

import asyncio
import datetime
import sys
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec
from msgspec import Struct

from accelplane.processes import end_process

CA, CA_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"

_TIMEOUT = 60.0


class RenewalError(Exception):
    """The child process that issues certificates failed."""


class CertificatePolicy(Struct, frozen=True, kw_only=True):
    """Lifetimes. A certificate is renewed when less than a third of its lifetime is left."""

    authority: datetime.timedelta = datetime.timedelta(days=5 * 365)
    serving: datetime.timedelta = datetime.timedelta(days=90)
    # The time between publishing a CA and signing with it.
    overlap: datetime.timedelta = datetime.timedelta(hours=1)


class CertificateSet(Struct, frozen=True):
    """The trusted CAs (newest first), the newest CA's key, the serving certificate and its key, as PEM.

    A missing part is empty.
    """

    authorities: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def from_secret(cls, data: Mapping[str, bytes]) -> Self | None:
        """The certificates in a Secret's data, None if it has none of them."""
        found = cls(*(data.get(name, b"") for name in (CA, CA_KEY, CERTIFICATE, KEY)))
        return found if any(found.secret_data().values()) else None

    def secret_data(self) -> dict[str, bytes]:
        """The data of the Secret."""
        return {
            CA: self.authorities,
            CA_KEY: self.authority_key,
            CERTIFICATE: self.certificate,
            KEY: self.key,
        }


class RenewalRequest(Struct, frozen=True):
    """The current certificates, the DNS names to serve, the time and the policy."""

    current: CertificateSet | None
    names: Sequence[str]
    now: datetime.datetime
    policy: CertificatePolicy


class RenewalPlan(Struct, frozen=True):
    """The certificates to use from now on, None to keep the current ones, and the time of the next renewal."""

    certificates: CertificateSet | None
    until: datetime.datetime


def service_names(service: str, namespace: str) -> list[str]:
    """The DNS names of a service."""
    return [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"]


async def plan_renewal(request: RenewalRequest) -> RenewalPlan:
    """Runs `authority` in a child process. Raises `RenewalError`."""
    # The child must not import from the working directory, nor from more places than this process.
    command = (sys.executable, "-I" if sys.flags.isolated else "-P", "-m", "accelplane.kube.authority")
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise RenewalError(f"{' '.join(command)}: {error}") from error
    try:
        async with asyncio.timeout(_TIMEOUT):
            output, errors = await process.communicate(msgspec.json.encode(request))
    except TimeoutError:
        raise RenewalError(f"{' '.join(command)}: did not exit within {_TIMEOUT:g} s") from None
    finally:
        await end_process(process)
    try:
        return msgspec.json.decode(output, type=RenewalPlan)
    except msgspec.DecodeError as error:
        cause = errors.decode("utf-8", "replace").strip().rpartition("\n")[2] or str(error)
        raise RenewalError(f"{' '.join(command)}: exit status {process.returncode}: {cause}") from error
