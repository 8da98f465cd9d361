"""What a program has that is its own certificate authority (CA) for its webhooks, so that nobody has to install one.

Everything is in one Secret: `ca.crt` is what callers trust, `ca.key` signs, `tls.crt` and `tls.key` serve. What is due
when is decided by `authority`, in a process that ends as soon as it has: what it needs for that is 11 MB that would
otherwise be held for ever. It is asked again only when something is due or the Secret has changed.
"""

import asyncio
import datetime
import sys
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

CA, CA_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"

_DEADLINE = 60.0


class CertificateTrouble(Exception):
    """The process that issues certificates did not."""


class CertificatePolicy(Struct, frozen=True, kw_only=True):
    """How long things last. What has less than a third of its life left is renewed."""

    authority: datetime.timedelta = datetime.timedelta(days=5 * 365)
    serving: datetime.timedelta = datetime.timedelta(days=90)
    # From the moment that a CA is published to that in which something is signed by it.
    overlap: datetime.timedelta = datetime.timedelta(hours=1)


class Issued(Struct, frozen=True):
    """All PEM: the CAs to trust, newest first, the newest one's key, and what is served. What is lacking is empty."""

    authorities: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes

    def data(self) -> dict[str, bytes]:
        """The content of the Secret."""
        return {
            CA: self.authorities,
            CA_KEY: self.authority_key,
            CERTIFICATE: self.certificate,
            KEY: self.key,
        }


class Question(Struct, frozen=True):
    """What is to be issued for these names at this moment, where `current` is what there is?"""

    current: Issued | None
    names: Sequence[str]
    now: datetime.datetime
    policy: CertificatePolicy


class Judgement(Struct, frozen=True):
    """What is to be issued, None for what there is, and until when nothing is due then."""

    issued: Issued | None
    until: datetime.datetime


def issued(data: Mapping[str, bytes]) -> Issued | None:
    """What a Secret holds; None when that is nothing, as in a new one."""
    found = Issued(*(data.get(name, b"") for name in (CA, CA_KEY, CERTIFICATE, KEY)))
    return found if any(found.data().values()) else None


def service_names(service: str, namespace: str) -> list[str]:
    """The names that the API server and others call a service by."""
    return [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"]


async def judged(question: Question) -> Judgement:
    """What `authority` says. Raises `CertificateTrouble`."""
    # no more of the environment decides what is imported than did here, and never what lies in the working directory
    command = (sys.executable, "-I" if sys.flags.isolated else "-P", "-m", "accelplane.kube.authority")
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise CertificateTrouble(f"{' '.join(command)}: {error}") from error
    try:
        async with asyncio.timeout(_DEADLINE):
            answer, complaint = await process.communicate(msgspec.json.encode(question))
    except TimeoutError:
        raise CertificateTrouble(f"{' '.join(command)}: no answer within {_DEADLINE:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return msgspec.json.decode(answer, type=Judgement)
    except msgspec.DecodeError as error:
        told = complaint.decode("utf-8", "replace").strip().rpartition("\n")[2] or str(error)
        raise CertificateTrouble(f"{' '.join(command)}: status {process.returncode}: {told}") from error
