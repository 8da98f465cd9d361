"""TLS of the admission server, and the replacement of its certificate."""

import asyncio
import os
import ssl
from pathlib import Path

import pytest
from admissionservers import AUTHORITY, SERVER, Caller, client_context, post, review, setup
from cluster.pki import Credentials
from waiting import until

from accelplane.admission.sgx import PATH
from accelplane.http.servingtls import CertificateError, ServingTls, TlsSettings


async def test_one_tls_version_with_two_cipher_suites_and_no_http_2_is_accepted() -> None:
    async with setup() as one:
        socket = (await one.caller()).writer.get_extra_info("ssl_object")
        assert (socket.version(), socket.cipher()[0]) == ("TLSv1.2", "ECDHE-ECDSA-AES256-GCM-SHA384")
        assert socket.selected_alpn_protocol() == "http/1.1"
        other = client_context(AUTHORITY)
        other.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        newer = client_context(AUTHORITY, ssl.TLSVersion.TLSv1_3)
        newer.minimum_version = ssl.TLSVersion.TLSv1_3
        for context in (other, newer):
            with pytest.raises(OSError):  # noqa: PT011 - an alert or a reset: who is first
                await one.caller(context)


async def test_tls_1_3_is_accepted_with_the_option() -> None:
    tls = ServingTls(TlsSettings(allow_tls13=True))
    tls.use(SERVER.certificate, SERVER.key)
    async with setup(tls=tls) as one:
        newest = await one.caller(client_context(AUTHORITY, ssl.TLSVersion.TLSv1_3))
        assert newest.writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert (await newest.ask(post(review()))).status == 200
        assert (await one.ask(post(review()))).status == 200


async def test_without_a_certificate_handshakes_fail_and_nothing_else() -> None:
    tls = ServingTls()
    async with setup(tls=tls) as one:
        with pytest.raises(OSError):  # noqa: PT011 - an alert or a reset: who is first
            await one.caller()
        tls.use(SERVER.certificate, SERVER.key)
        assert (await one.ask(post(review()))).status == 200


class MountedSecret:
    """A directory as the kubelet mounts a Secret: one link switches all files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0
        for name in ("tls.crt", "tls.key"):
            os.symlink(f"..data/{name}", path / name)

    def put(self, certificate: bytes, key: bytes) -> None:
        self._number += 1
        fresh = self.path / f"..{self._number}"
        fresh.mkdir()
        (fresh / "tls.crt").write_bytes(certificate)
        (fresh / "tls.key").write_bytes(key)
        os.symlink(fresh.name, self.path / "..tmp")
        os.replace(self.path / "..tmp", self.path / "..data")

    def issue(self) -> Credentials:
        instance = AUTHORITY.server("localhost", "localhost")
        self.put(instance.certificate, instance.key)
        return instance


def certificate_of(caller: Caller) -> bytes:
    return caller.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)


async def test_certificates_are_replaced_under_load_without_one_failed_review(tmp_path: Path) -> None:
    mounted = MountedSecret(tmp_path)
    mounted.issue()
    tls = ServingTls()
    tls.follow(str(tmp_path), check_interval=0)
    serials: set[bytes] = set()
    reviews = 0
    async with setup(tls=tls) as one:
        staying = await one.caller()
        first = certificate_of(staying)

        async def load(caller: Caller | None) -> None:
            nonlocal reviews
            while len(serials) < 3:
                asking = caller or await one.caller()
                serials.add(certificate_of(asking))
                assert (await asking.ask(post(review()))).response["allowed"]
                reviews += 1
                if caller is None:
                    await asking.close()

        async def rotate() -> None:
            while len(serials) < 3:
                known = len(serials)
                mounted.issue()
                await until(lambda known=known: len(serials) > known)

        async with asyncio.timeout(30):
            await asyncio.gather(load(staying), load(await one.caller()), load(None), load(None), rotate())
        assert certificate_of(staying) == first
        assert (await staying.ask(post(review()))).response["allowed"]
    assert reviews > 20
    assert one.server.stats[PATH].outcomes["mutated"] == reviews + 1


async def test_an_invalid_key_pair_never_replaces_a_valid_one(tmp_path: Path) -> None:
    mounted = MountedSecret(tmp_path)
    good = mounted.issue()
    tls = ServingTls()
    tls.follow(str(tmp_path), check_interval=0)
    async with setup(tls=tls) as one:
        before = certificate_of(await one.caller())
        for certificate, key in ((good.certificate, AUTHORITY.server("x").key), (b"", b""), (b"junk", good.key)):
            mounted.put(certificate, key)
            await asyncio.sleep(0)
            assert certificate_of(await one.caller()) == before
        os.unlink(tmp_path / "..data")
        assert certificate_of(await one.caller()) == before


@pytest.mark.parametrize(("certificate", "key"), [(b"", b""), (SERVER.certificate, b"x"), (b"x", SERVER.key)])
def test_a_server_does_not_start_with_an_invalid_key_pair(tmp_path: Path, certificate: bytes, key: bytes) -> None:
    MountedSecret(tmp_path).put(certificate, key)
    with pytest.raises(CertificateError, match=r"tls\.crt"):
        ServingTls().follow(str(tmp_path))


def test_a_missing_certificate_is_reported_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"tls\.crt: No such file"):
        ServingTls().follow(str(tmp_path))
