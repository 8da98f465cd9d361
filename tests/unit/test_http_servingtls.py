"""TLS contexts of a server: sessions that they store, client certificates."""

import ssl
from pathlib import Path

import pytest
from cluster.pki import Authority

from accelplane.http.servingtls import ServingTls, TlsSettings
from accelplane.http.tls import TlsSession

AUTHORITY = Authority("tests")
SERVER = AUTHORITY.server("localhost", "localhost")
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
