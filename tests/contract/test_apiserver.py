"""The small client of the API server against a server of real sockets that is right, wrong, slow or hostile."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster.pki import Authority
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tls_peer import TOKEN, Answer, Request, chunked, document, response, says, serving
from waiting import until

from accelplane.apiserver import (
    JSON_PATCH,
    ApiError,
    ApiServer,
    ClientConfig,
    DecodeError,
    Gone,
    NoCredentials,
    StatusError,
    Unreachable,
    WatchEvent,
)


class Thing(msgspec.Struct):
    name: str


NODE = "/api/v1/nodes/one"
EVENTS = [
    b'{"type":"ADDED","object":{"name":"a"}}\n',
    b'{"type":"MODIFIED","object":{"name":"b","more":1}}\n',
    b'{"type":"DELETED","object":{"name":"c"}}\n',
]


async def fetched(directory: Path, answer: Answer, **how: Any) -> Thing:
    async with serving(directory, answer) as peer:
        return await peer.api.get(NODE, Thing, **how)


async def watched(directory: Path, answer: Answer, **how: Any) -> list[WatchEvent[Thing]]:
    async with serving(directory, answer) as peer, contextlib.aclosing(peer.api.watch(NODE, Thing, **how)) as events:
        return [event async for event in events]


async def test_an_object_is_read_with_the_tokens_word(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one", "unknown": [1, 2]})) as peer:
        assert await peer.api.get(NODE, Thing) == Thing("one")
        (request,) = peer.requests
        assert (request.method, request.path, request.version) == ("GET", NODE, "HTTP/1.1")
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        assert request.headers["host"] == peer.api.address
        assert request.headers["accept"] == "application/json"


async def test_who_asks_may_have_a_certificate_in_place_of_a_token(tmp_path: Path) -> None:
    authority = Authority("test authority")
    client = authority.client("me")
    (tmp_path / "key").write_bytes(client.key)
    pair = authority.server("test server", "127.0.0.1")
    (tmp_path / "pair.pem").write_bytes(pair.certificate + pair.key)
    (tmp_path / "ca.crt").write_bytes(authority.credentials.certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.crt"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(tmp_path / "pair.pem")
    asked: list[tuple[object, bytes]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append((writer.get_extra_info("peercert")["subject"], head))
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
    ((subject, head),) = asked
    assert subject == ((("commonName", "me"),),)
    assert b"Authorization" not in head


async def test_a_token_that_was_replaced_is_the_next_requests(tmp_path: Path) -> None:
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
async def test_every_framing_of_an_answer_is_understood(tmp_path: Path, body: bytes) -> None:
    assert await fetched(tmp_path, says(body)) == Thing("one")


async def test_a_refusal_carries_what_the_server_said(tmp_path: Path) -> None:
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
async def test_a_refusal_by_somebody_else_is_told_too(tmp_path: Path, status: str, body: bytes) -> None:
    with pytest.raises(StatusError, match=status[:3]) as caught:
        await fetched(tmp_path, says(response(status, body)))
    assert caught.value.code == int(status[:3])


@pytest.mark.parametrize("status", ["301 Moved Permanently", "307 Temporary Redirect", "304 Not Modified"])
async def test_redirects_are_not_followed(tmp_path: Path, status: str) -> None:
    async with serving(tmp_path, says(response(status, b"", "Location: https://127.0.0.1:1/else"))) as peer:
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
        await fetched(tmp_path, says(data), limit=65536)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"GET {NODE}: ")


async def drip(_request: Request, writer: asyncio.StreamWriter) -> None:
    """A byte now and then: each would put off a timeout of the socket's own."""
    for byte in b"HTTP/1.1 200 OK\r\n" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def test_an_answer_that_drips_ends_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"no complete response within 0\.3 s"):
        await fetched(tmp_path, drip, deadline=0.3)


async def test_a_server_that_never_greets_ends_at_the_deadline(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with serving(tmp_path, says()) as peer, await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        api = ApiServer(structs.replace(peer.config, server=f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        with pytest.raises(Unreachable, match="no complete response"):
            await api.get(NODE, Thing, deadline=0.3)


async def test_nobody_there_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as peer:
        pass
    with pytest.raises(Unreachable, match=NODE):
        await peer.api.get(NODE, Thing)


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "."])
async def test_what_can_be_no_name_is_told_as_nobody_there(tmp_path: Path, host: str) -> None:
    async with serving(tmp_path, says()) as peer:
        api = ApiServer(structs.replace(peer.config, server=f"https://{host}"))
        with pytest.raises(Unreachable, match=f"{NODE}: .*label"):
            await api.get(NODE, Thing)


async def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"}), name="elsewhere") as peer:
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            await peer.api.get(NODE, Thing)
        assert peer.requests == []


async def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
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
async def test_credentials_that_cannot_be_used_are_named(tmp_path: Path, file: str, content: bytes | None) -> None:
    async with serving(tmp_path, document({"name": "one"})) as peer:
        (tmp_path / file).unlink()
        if content is not None:
            (tmp_path / file).write_bytes(content)
        with pytest.raises(NoCredentials, match=str(tmp_path / file)):
            await peer.api.get(NODE, Thing)
        assert peer.requests == []


async def test_a_pipe_in_the_place_of_a_token_holds_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"})) as peer:
        (tmp_path / "token").unlink()
        os.mkfifo(tmp_path / "token")
        with pytest.raises(NoCredentials, match="regular file"):
            await peer.api.get(NODE, Thing)


# Watching.


async def test_a_watch_gives_what_happens_however_it_is_cut(tmp_path: Path) -> None:
    whole = b"".join(EVENTS)
    for pieces in (EVENTS, [whole], [whole[i : i + 7] for i in range(0, len(whole), 7)], [b"\n", *EVENTS, b"\n"]):
        events = await watched(tmp_path, says(chunked(*pieces)))
        assert [(event.type, event.object.name) for event in events] == [
            ("ADDED", "a"), ("MODIFIED", "b"), ("DELETED", "c"),
        ]  # fmt: skip


async def test_a_watch_asks_from_where_it_read(tmp_path: Path) -> None:
    async with serving(tmp_path, says(chunked())) as peer:
        watch = peer.api.watch(
            "/api/v1/nodes", Thing, query={"fieldSelector": "metadata.name=a b"}, resource_version="7", duration=60
        )
        assert [event async for event in watch] == []
        assert peer.requests[0].path == (
            "/api/v1/nodes?fieldSelector=metadata.name%3Da+b&watch=true&timeoutSeconds=60&resourceVersion=7"
        )


@pytest.mark.parametrize("status", ["200 OK", "410 Gone"])
async def test_a_forgotten_version_is_an_error_of_its_own(tmp_path: Path, status: str) -> None:
    gone = {"kind": "Status", "reason": "Expired", "message": "too old", "code": 410}
    told = {"type": "ERROR", "object": gone} if status.startswith("200") else gone
    with pytest.raises(Gone, match="410 Expired: too old"):
        await watched(tmp_path, document(told, status))


async def test_a_watch_that_is_refused_tells_so(tmp_path: Path) -> None:
    with pytest.raises(StatusError, match="403") as caught:
        await watched(tmp_path, document({"reason": "Forbidden", "message": "no watch"}, "403 Forbidden"))
    assert caught.value.reason == "Forbidden"


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (chunked(b'{"type":"ADDED","object":{"name":7}}\n'), DecodeError, "expected Thing in JSON"),
        (chunked(b"nonsense\n"), DecodeError, "in JSON"),
        (chunked(b'{"type":"SURPRISE","object":{"name":"x"}}\n'), DecodeError, "an event of type 'SURPRISE'"),
        (chunked(*[b"x" * 10_000] * 10), DecodeError, "an event of more than 65536 bytes"),
        (chunked(EVENTS[0], end=False), Unreachable, "closed the connection before"),
    ],
    ids=["other object", "junk", "unknown type", "endless line", "cut"],
)
async def test_invalid_events_end_the_watch(tmp_path: Path, data: bytes, kind: type[ApiError], text: str) -> None:
    with pytest.raises(kind, match=f"WATCH {NODE}: .*{text}"):
        await watched(tmp_path, says(data), limit=65536)


async def test_a_silent_watch_ends_in_time(tmp_path: Path) -> None:
    async def silent(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(EVENTS[0], end=False))
        await writer.drain()
        await asyncio.sleep(3600)

    async with asyncio.timeout(10):
        events = await watched(tmp_path, silent, duration=0.3)
    assert [event.object.name for event in events] == ["a"]


async def test_a_watch_can_be_left_and_cancelled_at_any_time(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def endless(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(EVENTS[0], end=False))
        try:
            while True:
                writer.write(b"1\r\n\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            gone.set()

    async with serving(tmp_path, endless) as peer:

        async def first() -> str:
            async with contextlib.aclosing(peer.api.watch(NODE, Thing)) as events:
                async for event in events:
                    return event.object.name
            raise AssertionError

        assert await first() == "a"
        async with asyncio.timeout(5):
            await gone.wait()
        gone.clear()

        async def all_of_it() -> None:
            async with contextlib.aclosing(peer.api.watch(NODE, Thing)) as events:
                async for _event in events:
                    pass

        task = asyncio.create_task(all_of_it())
        await until(lambda: len(peer.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await gone.wait()


@given(st.binary(max_size=300))
async def test_no_answer_makes_anything_but_an_api_error(tmp_path: Path, data: bytes) -> None:
    with contextlib.suppress(ApiError):
        await fetched(tmp_path, says(b"HTTP/1.1 200 OK\r\n" + data), deadline=5)


def test_importing_it_brings_no_http_and_no_mail() -> None:
    program = (
        "import sys, asyncio, msgspec; before = set(sys.modules); import accelplane.apiserver; "
        "print(*(set(sys.modules) - before))"
    )
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", program]
    loaded = set(subprocess.run(command, env=unmeasured, check=True, capture_output=True, text=True).stdout.split())
    assert "accelplane.apiserver" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in {"http", "email", "httpx", "h2", "threading"}}
