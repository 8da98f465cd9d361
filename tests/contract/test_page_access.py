"""Access to the agent's pages: TLS, client certificates, tokens that the API server accepts."""

import asyncio
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster.pki import Authority
from kubeapi import Fault, KubeApi, kube_api
from pagereaders import Fixed
from waiting import until

from accelplane.apiserver import ApiServer
from accelplane.http.validity import validity
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.status import NodeStatus
from accelplane.pages import server as pages
from accelplane.pages.access import page_access

AUTHORITY, OTHER = Authority("tests"), Authority("other")
TOKEN, ACCESS = (
    "POST /apis/authentication.k8s.io/v1/tokenreviews",
    "POST /apis/authorization.k8s.io/v1/subjectaccessreviews",
)
USER = {"username": "system:serviceaccount:monitoring:prometheus"}


def certificate(directory: Path, authority: Authority = AUTHORITY, user: str = "") -> Path:
    """A directory with `tls.crt` and `tls.key`, of the server or of a user."""
    directory.mkdir(exist_ok=True)
    result = authority.client(user) if user else authority.server("agent", "127.0.0.1")
    (directory / "tls.crt").write_bytes(result.certificate)
    (directory / "tls.key").write_bytes(result.key)
    return directory


def client_context(tmp_path: Path, client: Path | None = None) -> ssl.SSLContext:
    authority = tmp_path / "authority.crt"
    authority.write_bytes(AUTHORITY.credentials.certificate)
    context = ssl.create_default_context(cafile=os.fspath(authority))
    if client is not None:
        context.load_cert_chain(client / "tls.crt", client / "tls.key")
    return context


@asynccontextmanager
async def serving(
    settings: Settings, port: int, connect: Callable[[], ApiServer] = ApiServer.in_cluster
) -> AsyncIterator[None]:
    status = NodeStatus(version="1", root="/", kubelet_dir="/k")
    async with pages.serving(f"127.0.0.1:{port}", lambda: status, Fixed(), page_access(settings, connect)):
        yield


async def get(port: int, path: str, context: ssl.SSLContext | None = None, token: str = "") -> int:
    """The status code."""
    return int((await response(port, path, context, token)).split()[1])


async def response(port: int, path: str, context: ssl.SSLContext | None = None, token: str = "") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{authorization}\r\n".encode())
        return await reader.read()
    finally:
        writer.close()


async def test_pages_are_served_over_tls_and_a_replaced_certificate_is_used(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    directory = certificate(tmp_path / "tls")
    async with serving(Settings(http_tls_dir=os.fspath(directory)), unused_tcp_port):
        assert await get(unused_tcp_port, "/metrics", client_context(tmp_path)) == 200
        seconds = validity((directory / "tls.crt").read_bytes()).not_after
        text = (await response(unused_tcp_port, "/metrics", client_context(tmp_path))).decode()
        (found,) = re.findall(r"^accelplane_serving_certificate_not_after_timestamp_seconds (.*)$", text, re.MULTILINE)
        assert float(found) == seconds
        certificate(directory, OTHER)

        async def rejected() -> bool:
            try:
                await get(unused_tcp_port, "/metrics", client_context(tmp_path))
            except ssl.SSLCertVerificationError:
                return True
            return False

        await until(rejected)


async def test_with_a_client_authority_clients_need_its_certificate(tmp_path: Path, unused_tcp_port: int) -> None:
    directory = certificate(tmp_path / "tls")
    client = certificate(tmp_path / "client", user="prometheus")
    stranger = certificate(tmp_path / "stranger", OTHER, user="prometheus")
    authority = tmp_path / "clients.crt"
    authority.write_bytes(AUTHORITY.credentials.certificate)
    settings = Settings(http_tls_dir=os.fspath(directory), http_client_ca=os.fspath(authority))
    async with serving(settings, unused_tcp_port):
        assert await get(unused_tcp_port, "/metrics", client_context(tmp_path, client)) == 200
        for context in (client_context(tmp_path), client_context(tmp_path, stranger)):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await get(unused_tcp_port, "/metrics", context)


async def test_a_replaced_client_authority_is_used(
    tmp_path: Path, unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    directory = certificate(tmp_path / "tls")
    clients = {
        authority: certificate(tmp_path / name, authority, user="prometheus")
        for name, authority in (("before", AUTHORITY), ("after", OTHER))
    }
    file = tmp_path / "clients.crt"
    file.write_bytes(AUTHORITY.credentials.certificate)
    settings = Settings(http_tls_dir=os.fspath(directory), http_client_ca=os.fspath(file))

    async def accepted(authority: Authority) -> bool:
        try:
            return await get(unused_tcp_port, "/metrics", client_context(tmp_path, clients[authority])) == 200
        except (ssl.SSLError, ConnectionError, IndexError):
            return False

    async with serving(settings, unused_tcp_port):
        assert await accepted(AUTHORITY)
        file.write_bytes(OTHER.credentials.certificate)
        await until(lambda: accepted(OTHER))
        assert not await accepted(AUTHORITY)
        file.write_text("junk")

        async def is_logged() -> bool:
            assert await accepted(OTHER)
            return "clients.crt: " in caplog.text and "; the previous files stay in use" in caplog.text

        await until(is_logged)
        assert not await accepted(AUTHORITY)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_clients_use_tls_1_2_or_newer(tmp_path: Path, unused_tcp_port: int, version: ssl.TLSVersion) -> None:
    context = client_context(tmp_path)
    context.minimum_version = context.maximum_version = version
    async with serving(Settings(http_tls_dir=os.fspath(certificate(tmp_path / "tls"))), unused_tcp_port):
        assert await get(unused_tcp_port, "/metrics", context) == 200


def answers(api: KubeApi, request: str, status: dict[str, Any]) -> Fault:
    return api.fault(request, 201, body=json.dumps({"status": status}).encode(), times=1_000_000)


@pytest.fixture
async def api() -> AsyncIterator[KubeApi]:
    async with kube_api() as api:
        yield api


@pytest.mark.parametrize(
    ("token", "allowed", "path", "code"),
    [
        ("", True, "/metrics", 401),
        ("valid", True, "/metrics", 200),
        ("valid", False, "/metrics", 403),
        ("valid", True, "/status", 200),
        ("", True, "/api/v1/inventory", 401),
        ("valid", False, "/api/v1/inventory?wait=55", 403),
        ("valid", True, "/api/v1/inventory", 200),
        ("valid", False, "/api/v1/readings", 403),
        ("", False, "/healthz", 200),
        ("", False, "/readyz", 200),
    ],
)
async def test_pages_require_an_authorized_token_and_probes_do_not(  # noqa: PLR0917 - cases
    api: KubeApi, unused_tcp_port: int, token: str, allowed: bool, path: str, code: int
) -> None:
    answers(api, TOKEN, {"authenticated": True, "user": USER})
    answers(api, ACCESS, {"allowed": allowed})
    settings = Settings(http_address="127.0.0.1:0", http_authorized=True)
    async with serving(settings, unused_tcp_port, lambda: ApiServer(api.config)):
        assert await get(unused_tcp_port, path, token=token) == code


async def test_pages_below_the_path_of_the_discovery_of_kubernetes_need_the_right_for_status(
    api: KubeApi, unused_tcp_port: int
) -> None:
    """Every authenticated user may get `/api/*` by the role system:discovery."""
    answers(api, TOKEN, {"authenticated": True, "user": USER})
    answers(api, ACCESS, {"allowed": True})
    settings = Settings(http_address="127.0.0.1:0", http_authorized=True)
    async with serving(settings, unused_tcp_port, lambda: ApiServer(api.config)):
        for path in ("/api/v1/inventory", "/api/v1/readings", "/api", "/apis", "/metrics"):
            await get(unused_tcp_port, path, token="t")  # noqa: S106
    reviews = [request.body["spec"] for request in api.requests if "subjectaccess" in request.path]
    assert [spec["nonResourceAttributes"]["path"] for spec in reviews] == ["/status", "/apis", "/metrics"]


@pytest.mark.parametrize(
    ("audiences", "code"), [(["agents"], 200), (["scrapers"], 200), (["others"], 401), ([], 401), (None, 401)]
)
async def test_a_token_must_be_valid_for_the_audience(
    api: KubeApi, unused_tcp_port: int, audiences: list[str] | None, code: int
) -> None:
    answers(api, TOKEN, {"authenticated": True, "user": USER, "audiences": audiences})
    answers(api, ACCESS, {"allowed": True})
    settings = Settings(http_address="127.0.0.1:0", http_authorized=True, http_audience="agents, scrapers")
    async with serving(settings, unused_tcp_port, lambda: ApiServer(api.config)):
        assert await get(unused_tcp_port, "/metrics", token="t")  # noqa: S106 == code
    [review] = [request.body for request in api.requests if "tokenreviews" in request.path]
    assert review["spec"] == {"token": "t", "audiences": ["agents", "scrapers"]}


@pytest.mark.parametrize(
    ("host", "options", "warned"),
    [
        ("127.0.0.1", (), False),
        ("[::1]", (), False),
        ("", (), True),
        ("0.0.0.0", ("http_tls_dir",), True),  # noqa: S104 - the case
        ("", ("http_tls_dir", "http_client_ca"), False),
        ("", ("http_tls_dir", "http_authorized"), False),
    ],
)
async def test_pages_that_all_clients_can_read_cause_one_warning(  # noqa: PLR0917 - fixtures and cases
    tmp_path: Path,
    api: KubeApi,
    caplog: pytest.LogCaptureFixture,
    host: str,
    options: tuple[str, ...],
    warned: bool,
) -> None:
    directory = certificate(tmp_path / "tls")
    values = {"http_tls_dir": str(directory), "http_client_ca": str(directory / "tls.crt"), "http_authorized": True}
    settings = Settings(**{name: values[name] for name in options})  # type: ignore[arg-type]
    status = NodeStatus(version="1", root="/", kubelet_dir="/k")
    access = page_access(settings, lambda: ApiServer(api.config))
    async with pages.serving(f"{host}:0", lambda: status, Fixed(), access):
        warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == warned
    assert all(f"-http-address: found {host}:0 without -http-authorized" in each for each in warnings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"http-client-ca": "/x"},
            "-http-client-ca: found without http-tls-dir, expected both: client certificates need TLS",
        ),
        ({"http-tls-dir": "/x"}, "-http-tls-dir: found without http-address, expected both"),
        ({"http-authorized": True}, "-http-authorized: found without http-address, expected both"),
        ({"http-audience": "x"}, "-http-audience: found without http-authorized, expected both"),
        (
            {"http-authorized": True, "http-address": ":9400"},
            (
                "-http-authorized: found http-address ':9400' without TLS, expected http-tls-dir or a loopback "
                "address: others on the network could read the tokens"
            ),
        ),
        (
            {"http-authorized": True, "http-address": "127.example.com:9400"},
            (
                "-http-authorized: found http-address '127.example.com:9400' without TLS, expected http-tls-dir or a "
                "loopback address: others on the network could read the tokens"
            ),
        ),
    ],
)
def test_contradictory_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Settings.of(options, "-")
    assert str(raised.value) == message


def test_unusable_files_and_a_missing_account_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^-http-tls-dir: .*tls\.crt: No such file or directory"):
        page_access(Settings(http_tls_dir=os.fspath(tmp_path)))
    directory = certificate(tmp_path / "tls")
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(ConfigurationError, match=r"^-http-tls-dir: .*junk: .*; expected PEM certificates"):
        page_access(Settings(http_tls_dir=os.fspath(directory), http_client_ca=os.fspath(tmp_path / "junk")))
    with pytest.raises(ConfigurationError, match=r"^-http-authorized: "):
        page_access(Settings(http_authorized=True, http_address="127.0.0.1:1"))
