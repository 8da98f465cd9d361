"""The small client of the API server with a server on real sockets that is valid, invalid, slow or hostile."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from apiservers import NODE, Thing, sequence
from cluster.pki import Authority
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tls_peer import TOKEN, Answer, Request, chunked, document, respond_with, response, serving

from accelplane.apiserver import (
    JSON_PATCH,
    ApiError,
    ApiServer,
    ClientConfig,
    DecodeError,
    NoCredentials,
    NotFound,
    StatusError,
    Unreachable,
)
from accelplane.apiserver.credentials import trust_context
from accelplane.apiserver.discovery import in_cluster


async def fetched(directory: Path, answer: Answer, **how: Any) -> Thing:
    async with serving(directory, answer) as peer:
        return await peer.api.get(NODE, Thing, **how)


async def test_an_object_is_read_with_the_bearer_token(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one", "unknown": [1, 2]})) as peer:
        assert await peer.api.get(NODE, Thing) == Thing("one")
        (request,) = peer.requests
        assert (request.method, request.path, request.version) == ("GET", NODE, "HTTP/1.1")
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        assert request.headers["host"] == peer.api.address
        assert request.headers["accept"] == "application/json"


async def test_a_client_certificate_replaces_a_token(tmp_path: Path) -> None:
    authority = Authority("test authority")
    client = authority.client("me")
    (tmp_path / "key").write_bytes(client.key)
    pair = authority.server("test server", "127.0.0.1")
    (tmp_path / "pair.pem").write_bytes(pair.certificate + pair.key)
    (tmp_path / "ca.crt").write_bytes(authority.credentials.certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.crt"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(tmp_path / "pair.pem")
    authorizations: list[tuple[object, bytes]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        authorizations.append((writer.get_extra_info("peercert")["subject"], head))
        writer.write(response("200 OK", b'{"name":"one"}'))
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        certificate = (client.certificate, str(tmp_path / "key"))
        config = ClientConfig(
            server=f"https://127.0.0.1:{port}", authority=authority.credentials.certificate, certificate=certificate
        )
        api = ApiServer(config)
        assert await api.get(NODE, Thing) == Thing("one")
    ((subject, head),) = authorizations
    assert subject == ((("commonName", "me"),),)
    assert b"Authorization" not in head


async def test_the_next_request_has_the_replaced_token(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"})) as peer:
        await peer.api.get(NODE, Thing)
        (peer.directory / "token").write_text("another")
        await peer.api.get(NODE, Thing)
        assert [each.headers["authorization"] for each in peer.requests] == [f"Bearer {TOKEN}", "Bearer another"]


async def test_a_patch_carries_its_document_and_its_kind(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"})) as peer:
        operations = [{"op": "add", "path": "/x", "value": 1}]
        assert await peer.api.patch(NODE, operations, JSON_PATCH, Thing, query={"force": "true"}) == Thing("one")
        (request,) = peer.requests
        assert (request.method, request.path) == ("PATCH", f"{NODE}?force=true")
        assert request.headers["content-type"] == JSON_PATCH
        assert json.loads(request.body) == operations


async def test_an_object_is_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"kind": "Status", "status": "Success"})) as peer:
        await peer.api.delete(NODE)
        assert peer.requests[0].method == "DELETE"


async def test_a_server_is_found_at_an_address_of_version_6(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "six"}), name="::1", address="::1") as peer:
        assert peer.api.address.startswith("[::1]:")
        assert await peer.api.get(NODE, Thing) == Thing("six")
        assert peer.requests[0].headers["host"] == peer.api.address


@pytest.mark.parametrize(
    "body",
    [
        chunked(b'{"na', b'me":"o', b'ne"}'),
        b'HTTP/1.1 200 OK\r\n\r\n{"name":"one"}',
        b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 14\r\n\r\n{"name":"one"}',
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ne;extension=1\r\n{"name":"one"}\r\n0\r\n\r\n',
    ],
    ids=["chunks", "until the end", "after an interim answer", "chunk extension"],
)
async def test_every_framing_of_a_response_is_parsed(tmp_path: Path, body: bytes) -> None:
    assert await fetched(tmp_path, respond_with(body)) == Thing("one")


async def test_an_error_has_the_message_of_the_server(tmp_path: Path) -> None:
    status = {
        "kind": "Status",
        "reason": "Conflict",
        "message": "somebody else has it",
        "code": 409,
        "details": {"causes": [{"reason": "FieldManagerConflict", "message": "x", "field": ".metadata.labels.a"}]},
    }
    with pytest.raises(StatusError) as caught:
        await fetched(tmp_path, document(status, "409 Conflict"))
    assert (caught.value.code, caught.value.reason, caught.value.message) == (409, "Conflict", "somebody else has it")
    assert [cause.field for cause in caught.value.causes] == [".metadata.labels.a"]
    assert f"{NODE}: 409 Conflict: somebody else has it" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body"),
    [("502 Bad Gateway", b"<html>no</html>"), ("403 Forbidden", b""), ("500 Oops", b'{"reason": 7}'), ("404", b"\xff")],
)
async def test_an_error_of_a_proxy_is_reported(tmp_path: Path, status: str, body: bytes) -> None:
    with pytest.raises(StatusError, match=status[:3]) as caught:
        await fetched(tmp_path, respond_with(response(status, body)))
    assert caught.value.code == int(status[:3])


@pytest.mark.parametrize("status", ["301 Moved Permanently", "307 Temporary Redirect", "304 Not Modified"])
async def test_redirects_are_not_followed(tmp_path: Path, status: str) -> None:
    async with serving(tmp_path, respond_with(response(status, b"", "Location: https://127.0.0.1:1/else"))) as peer:
        with pytest.raises(StatusError, match=status[:3]):
            await peer.api.get(NODE, Thing)
        assert len(peer.requests) == 1


HOSTILE: dict[str, tuple[bytes, type[ApiError], str]] = {
    "nothing": (b"", Unreachable, "closed the connection before"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", DecodeError, "expected a status line of HTTP/1.1"),
    "a body that is too short": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", Unreachable, "closed the connection before",
    ),
    "too large": (response("200 OK", b" " * 70_000), DecodeError, "a body of more than 65536 bytes"),
    "too large in chunks": (chunked(*[b" " * 10_000] * 10), DecodeError, "a body of more than 65536 bytes"),
    "no JSON": (response("200 OK", b"<html>"), DecodeError, "expected Thing in JSON"),
    "other JSON": (response("200 OK", b'{"name": 7}'), DecodeError, "Expected `str`, got `int`"),
    "not UTF-8": (response("200 OK", b'{"name": "\xff"}'), DecodeError, "expected Thing in JSON"),
    "deep JSON": (response("200 OK", b'{"x":' + b"[" * 30_000), DecodeError, "expected Thing in JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_an_invalid_response_is_a_typed_error(tmp_path: Path, name: str) -> None:
    data, kind, text = HOSTILE[name]
    with pytest.raises(kind, match=text) as caught:
        await fetched(tmp_path, respond_with(data), limit=65536)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"GET {NODE}: ")


async def send_slowly(_request: Request, writer: asyncio.StreamWriter) -> None:
    """Sends single bytes, each of which would reset a socket timeout."""
    for byte in b"HTTP/1.1 200 OK\r\n" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def test_a_slow_response_ends_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"no complete response within 0\.3 s"):
        await fetched(tmp_path, send_slowly, deadline=0.3)


async def test_a_server_without_settings_frame_ends_at_the_deadline(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with serving(tmp_path, respond_with()) as peer, await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        api = ApiServer(structs.replace(peer.config, server=f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        with pytest.raises(Unreachable, match="no complete response"):
            await api.get(NODE, Thing, deadline=0.3)


async def test_a_refused_connection_is_reported(tmp_path: Path) -> None:
    async with serving(tmp_path, respond_with()) as peer:
        pass
    with pytest.raises(Unreachable, match=NODE):
        await peer.api.get(NODE, Thing)


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "."])
async def test_an_invalid_host_name_is_reported_as_unreachable(tmp_path: Path, host: str) -> None:
    async with serving(tmp_path, respond_with()) as peer:
        api = ApiServer(structs.replace(peer.config, server=f"https://{host}"))
        with pytest.raises(Unreachable, match=f"{NODE}: .*label"):
            await api.get(NODE, Thing)


async def test_a_certificate_for_another_name_is_rejected(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"}), name="elsewhere") as peer:
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            await peer.api.get(NODE, Thing)
        assert peer.requests == []


async def test_a_certificate_of_another_authority_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with serving(tmp_path, document({})) as peer, serving(tmp_path / "other", document({})) as other:
        api = ApiServer(structs.replace(peer.config, server=other.config.server))
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            await api.get(NODE, Thing)
        assert other.requests == []


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("token", None), ("token", b""), ("token", b"two\nlines"), ("token", b"two words"), ("token", b"\xff\xfe"),
        ("token", b"x" * 2_000_000), ("ca.crt", None), ("ca.crt", b""), ("ca.crt", b"no PEM"), ("ca.crt", b"\xff"),
    ],
)  # fmt: skip
async def test_unusable_credentials_are_reported(tmp_path: Path, file: str, content: bytes | None) -> None:
    async with serving(tmp_path, document({"name": "one"})) as peer:
        (tmp_path / file).unlink()
        if content is not None:
            (tmp_path / file).write_bytes(content)
        with pytest.raises(NoCredentials, match=str(tmp_path / file)):
            await peer.api.get(NODE, Thing)
        assert peer.requests == []


async def test_a_missing_service_account_is_an_error_with_file_and_remedy(tmp_path: Path) -> None:
    directory = tmp_path / "secrets/kubernetes.io/serviceaccount"
    directory.mkdir(parents=True)
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    api = ApiServer(in_cluster(environment, str(directory)))
    with pytest.raises(
        NoCredentials, match=f"{directory}/token: found no file.*set automountServiceAccountToken: true"
    ):
        await api.get(NODE, Thing)


async def test_a_fifo_instead_of_a_token_does_not_block(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"})) as peer:
        (tmp_path / "token").unlink()
        os.mkfifo(tmp_path / "token")
        with pytest.raises(NoCredentials, match="regular file"):
            await peer.api.get(NODE, Thing)


async def test_responses_are_reported_with_method_and_status(tmp_path: Path) -> None:
    reported: list[tuple[str, str]] = []
    answers = sequence(document({"name": "one"}), document({}, "404 Not Found"), respond_with(b""))
    async with serving(tmp_path, answers) as peer:
        api = ApiServer(peer.config, on_response=lambda method, status: reported.append((method, status)))
        await api.get(NODE, Thing)
        with pytest.raises(NotFound):
            await api.delete(NODE)
        with pytest.raises(Unreachable):
            await api.get(NODE, Thing)
    assert reported == [("GET", "200"), ("DELETE", "404"), ("GET", "<error>")]


async def test_a_list_is_read_in_pages(tmp_path: Path) -> None:
    pages = [
        {"metadata": {"resourceVersion": "5", "continue": "a&b"}, "items": [{"name": "1"}, {"name": "2"}]},
        {"metadata": {"resourceVersion": "5", "continue": ""}, "items": [{"name": "3"}]},
    ]
    async with serving(tmp_path, sequence(*map(document, pages), document({"metadata": {}, "items": None}))) as peer:
        names: list[str] = []

        def consume(items: Sequence[msgspec.Raw]) -> None:
            names.extend(msgspec.json.decode(each, type=Thing).name for each in items)

        assert await peer.api.list("/api/v1/nodes", consume, query={"labelSelector": "x"}, page=2) == "5"
        assert names == ["1", "2", "3"]
        assert [each.path.partition("?")[2] for each in peer.requests] == [
            "labelSelector=x&limit=2", "labelSelector=x&limit=2&continue=a%26b",
        ]  # fmt: skip
        assert await peer.api.list("/api/v1/nodes", consume) == ""


async def test_an_object_is_created_and_replaced(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"}, "201 Created")) as peer:
        assert await peer.api.post("/api/v1/nodes", {"a": 1}, Thing, query={"dryRun": "All"}) == Thing("one")
        assert await peer.api.put(NODE, {"a": 2}, Thing) == Thing("one")
        await peer.api.delete(NODE, options={"propagationPolicy": "Orphan"})
        assert [(each.method, each.path, json.loads(each.body)) for each in peer.requests] == [
            ("POST", "/api/v1/nodes?dryRun=All", {"a": 1}),
            ("PUT", NODE, {"a": 2}),
            ("DELETE", NODE, {"propagationPolicy": "Orphan"}),
        ]
        assert {each.headers["content-type"] for each in peer.requests} == {"application/json"}


async def test_the_path_of_the_address_precedes_those_of_the_api(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"})) as peer:
        await ApiServer(structs.replace(peer.config, server=f"{peer.config.server}/k8s/c-1/")).get(NODE, Thing)
        assert peer.requests[0].path == f"/k8s/c-1{NODE}"


async def test_a_password_is_sent_as_basic_credentials(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"})) as peer:
        await ApiServer(structs.replace(peer.config, token=None, password=("u", "p:w"))).get(NODE, Thing)
        assert peer.requests[0].headers["authorization"] == "Basic dTpwOnc="


async def test_a_replaced_authority_is_used_for_the_next_connection(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with serving(tmp_path, document({"name": "one"})) as peer, serving(tmp_path / "other", document({})) as other:
        api = ApiServer(structs.replace(peer.config, authority=str(tmp_path / "used.crt")), idle_timeout=60)
        (tmp_path / "used.crt").write_bytes((other.directory / "ca.crt").read_bytes())
        with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await api.get(NODE, Thing)
        (tmp_path / "new.crt").write_bytes((peer.directory / "ca.crt").read_bytes())
        (tmp_path / "new.crt").rename(tmp_path / "used.crt")
        assert await api.get(NODE, Thing) == Thing("one")
        api.close()


async def test_insecure_accepts_every_certificate_and_a_server_name_replaces_the_host(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"}), name="elsewhere") as peer:
        with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await peer.api.get(NODE, Thing)
        for options in ({"insecure": True, "authority": None}, {"server_name": "elsewhere"}):
            assert await ApiServer(structs.replace(peer.config, **options)).get(NODE, Thing) == Thing("one")


def test_certificates_without_the_extensions_of_python_3_13_are_accepted() -> None:
    authority = Authority("x").credentials.certificate
    for context in (trust_context(authority), trust_context(None), trust_context(authority, insecure=True)):
        assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert trust_context(authority).verify_mode == ssl.CERT_REQUIRED
    assert trust_context(authority).check_hostname


async def test_https_proxy_is_used_and_no_proxy_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connects: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connects.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy, serving(tmp_path, document({})) as peer:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        config = structs.replace(peer.config, server="https://api.example:6443")
        with pytest.raises(Unreachable, match=r"proxy .*: found 403 Forbidden, expected 200"):
            await ApiServer(config).get(NODE, Thing)
        assert connects == [b"CONNECT api.example:6443 HTTP/1.1"]
        monkeypatch.setenv("NO_PROXY", ".example")
        with pytest.raises(Unreachable):
            await ApiServer(structs.replace(config, server="https://none.example:1")).get(NODE, Thing, deadline=5)
        assert len(connects) == 1


@given(st.binary(max_size=300))
async def test_any_response_raises_only_api_errors(tmp_path: Path, data: bytes) -> None:
    with contextlib.suppress(ApiError):
        await fetched(tmp_path, respond_with(b"HTTP/1.1 200 OK\r\n" + data), deadline=5)


def test_importing_the_module_loads_no_http_and_no_mail() -> None:
    program = (
        "import sys, asyncio, msgspec; before = set(sys.modules); import accelplane.apiserver; "
        "print(*(set(sys.modules) - before))"
    )
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", program]
    loaded = set(subprocess.run(command, env=unmeasured, check=True, capture_output=True, text=True).stdout.split())
    assert "accelplane.apiserver" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in {"http", "email", "httpx", "h2", "threading"}}
