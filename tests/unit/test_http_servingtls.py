"""TLS contexts of a server: sessions that they store, client certificates."""

import base64
import contextlib
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cluster.pki import Authority
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from accelplane.http.servingtls import ServingTls, TlsSettings
from accelplane.http.tls import TlsSession
from accelplane.http.validity import Validity, validity

AUTHORITY = Authority("tests")
SERVER = AUTHORITY.server("localhost", "localhost")
PEM = SERVER.certificate.decode()
DAY = timedelta(days=1)
TLS12, TLS13 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


def client(version: ssl.TLSVersion, directory: Path | None = None) -> ssl.SSLContext:
    """A context of a client, with the certificate and key of a directory."""
    context = ssl.create_default_context(cadata=AUTHORITY.credentials.certificate.decode())
    context.minimum_version = context.maximum_version = version
    if directory is not None:
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    return context


def connect(tls: ServingTls, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLObject:
    """One connection of a client, with a request and a response. Raises `ssl.SSLError` if the server rejects it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    end = context.wrap_bio(incoming, outgoing, server_hostname="localhost", session=session)
    server = TlsSession(tls.connection_context())
    for _ in range(4):
        try:
            end.do_handshake()
            break
        except ssl.SSLWantReadError:
            server.decrypt(outgoing.read())
            incoming.write(server.outgoing())
    end.write(b"request")
    assert server.decrypt(outgoing.read()) == b"request"
    server.encrypt(b"response")
    incoming.write(server.outgoing())
    assert end.read(100) == b"response"
    server.close()
    return end


def serving(settings: TlsSettings) -> ServingTls:
    tls = ServingTls(settings)
    tls.use(SERVER.certificate, SERVER.key)
    return tls


def issued(start: datetime, end: datetime) -> tuple[bytes, bytes]:
    """A self-signed certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, start, end)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return pem, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def store(directory: Path, pair: tuple[bytes, bytes]) -> None:
    for name, content in zip(("tls.crt", "tls.key"), pair, strict=True):
        (directory / name).write_bytes(content)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (datetime(1951, 2, 3, 4, 5, 6), datetime(2049, 12, 31, 23, 59, 59)),
        (datetime(2026, 1, 1), datetime(2050, 1, 1)),
        (datetime(2051, 1, 1), datetime(9999, 12, 31, 23, 59, 59)),
    ],
)
def test_the_validity_is_that_of_the_first_certificate(start: datetime, end: datetime) -> None:
    pem, _ = issued(start, end)
    found = validity(b"text before\n" + pem + SERVER.certificate)
    assert found == (start.replace(tzinfo=UTC).timestamp(), end.replace(tzinfo=UTC).timestamp())


@given(st.binary(max_size=80) | st.integers(0, 300).map(lambda size: ssl.PEM_cert_to_DER_cert(PEM)[:size]))
def test_a_certificate_that_cannot_be_read_is_an_error(der: bytes) -> None:
    text = b"-----BEGIN CERTIFICATE-----" + base64.b64encode(der) + b"-----END CERTIFICATE-----"
    with contextlib.suppress(ValueError):
        validity(text)
    with pytest.raises(ValueError, match="found no BEGIN CERTIFICATE"):
        validity(der)


def test_the_state_of_a_certificate_is_logged_once_each_time_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    store(tmp_path, issued(start, start + 90 * DAY))
    passed = -DAY

    def clock() -> float:
        return (start + passed).timestamp()

    tls = ServingTls(clock=clock)
    tls.follow(str(tmp_path), check_interval=0)
    expected = [("ERROR", "not valid before 2026-01-01T00:00:00Z; clients reject it; check the clock of this node")]
    for passed, state in (  # noqa: B007 - the clock reads it
        (DAY, None),
        (82 * DAY, None),
        (84 * DAY, ("WARNING", "expires at 2026-04-01T00:00:00Z; renew it")),
        (90 * DAY, ("ERROR", "expired at 2026-04-01T00:00:00Z; clients reject it; renew it")),
    ):
        for _ in range(2):
            assert tls.ready
        expected += [state] if state else []
        assert [(one.levelname, one.message) for one in caplog.records] == [
            (level, f"{tmp_path}/tls.crt: {text}") for level, text in expected
        ]
    now = start + 90 * DAY
    store(tmp_path, issued(now, now + 90 * DAY))
    assert tls.validity() == (now.timestamp(), (now + 90 * DAY).timestamp())
    assert len(caplog.records) == len(expected)


@pytest.mark.parametrize(
    ("lifetime", "left", "soon"), [(1, 3, False), (1, 2, True), (365, 169, False), (365, 167, True)]
)
def test_the_end_is_near_in_the_last_tenth_or_week(lifetime: int, left: int, soon: bool) -> None:
    assert Validity(0.0, lifetime * 86400.0).expires_soon(lifetime * 86400.0 - left * 3600.0) is soon


@pytest.mark.parametrize(("version", "most"), [(TLS12, 256), (TLS13, 0)])
def test_the_number_of_stored_sessions_is_limited(version: ssl.TLSVersion, most: int) -> None:
    tls, context = serving(TlsSettings(allow_tls13=True)), client(version)
    used: set[ssl.SSLContext] = set()
    for _ in range(300):
        connect(tls, context)
        used.add(tls.connection_context())
    assert max(each.session_stats()["number"] for each in used) <= most


def test_a_session_of_tls_1_3_is_not_resumed() -> None:
    tls, context = serving(TlsSettings(allow_tls13=True)), client(TLS13)
    first = connect(tls, context)
    assert not connect(tls, context, first.session).session_reused


@pytest.mark.parametrize("version", [TLS12, TLS13])
def test_each_context_requires_client_certificates(tmp_path: Path, version: ssl.TLSVersion) -> None:
    credentials = AUTHORITY.client("prometheus")
    (tmp_path / "tls.crt").write_bytes(credentials.certificate)
    (tmp_path / "tls.key").write_bytes(credentials.key)
    authority = tmp_path / "clients.crt"
    authority.write_bytes(AUTHORITY.credentials.certificate)
    tls = serving(TlsSettings(allow_tls13=True, client_authority=str(authority)))
    for _ in range(2):
        context = tls.connection_context()
        while tls.connection_context() is context:
            pass
        connect(tls, client(version, tmp_path))
        with pytest.raises(ssl.SSLError, match="did not return a certificate"):
            connect(tls, client(version))
