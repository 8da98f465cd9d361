"""Watches of the node's API client."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from apiservers import EVENTS, NODE, Thing
from tls_peer import Answer, Request, chunked, document, respond_with, serving
from waiting import until

from accelplane.apiserver import ApiError, DecodeError, Gone, StatusError, Unreachable, WatchEvent


async def watched(directory: Path, answer: Answer, **how: Any) -> list[WatchEvent[Thing]]:
    async with serving(directory, answer) as peer, contextlib.aclosing(peer.api.watch(NODE, Thing, **how)) as events:
        return [event async for event in events]


async def test_events_of_a_watch_are_independent_of_segmentation(tmp_path: Path) -> None:
    whole = b"".join(EVENTS)
    for pieces in (EVENTS, [whole], [whole[i : i + 7] for i in range(0, len(whole), 7)], [b"\n", *EVENTS, b"\n"]):
        events = await watched(tmp_path, respond_with(chunked(*pieces)))
        assert [(event.type, event.object.name) for event in events] == [
            ("ADDED", "a"), ("MODIFIED", "b"), ("DELETED", "c"),
        ]  # fmt: skip


async def test_a_watch_starts_at_the_listed_resource_version(tmp_path: Path) -> None:
    async with serving(tmp_path, respond_with(chunked())) as peer:
        watch = peer.api.watch(
            "/api/v1/nodes", Thing, query={"fieldSelector": "metadata.name=a b"}, resource_version="7", duration=60
        )
        assert [event async for event in watch] == []
        assert peer.requests[0].path == (
            "/api/v1/nodes?fieldSelector=metadata.name%3Da+b&watch=true&timeoutSeconds=60&resourceVersion=7"
        )


@pytest.mark.parametrize("status", ["200 OK", "410 Gone"])
async def test_an_expired_resource_version_has_its_own_error(tmp_path: Path, status: str) -> None:
    status_object = {"kind": "Status", "reason": "Expired", "message": "too old", "code": 410}
    line = {"type": "ERROR", "object": status_object} if status.startswith("200") else status_object
    with pytest.raises(Gone, match="410 Expired: too old"):
        await watched(tmp_path, document(line, status))


async def test_a_rejected_watch_raises_the_status_error(tmp_path: Path) -> None:
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
        await watched(tmp_path, respond_with(data), limit=65536)


async def test_an_idle_watch_ends_after_its_timeout(tmp_path: Path) -> None:
    async def silent(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(EVENTS[0], end=False))
        await writer.drain()
        await asyncio.sleep(3600)

    async with asyncio.timeout(10):
        events = await watched(tmp_path, silent, duration=0.3)
    assert [event.object.name for event in events] == ["a"]


async def test_a_watch_can_be_closed_and_cancelled_at_any_time(tmp_path: Path) -> None:
    disconnected = asyncio.Event()

    async def endless(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(EVENTS[0], end=False))
        try:
            while True:
                writer.write(b"1\r\n\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            disconnected.set()

    async with serving(tmp_path, endless) as peer:

        async def first() -> str:
            async with contextlib.aclosing(peer.api.watch(NODE, Thing)) as events:
                async for event in events:
                    return event.object.name
            raise AssertionError

        assert await first() == "a"
        async with asyncio.timeout(5):
            await disconnected.wait()
        disconnected.clear()

        async def read_all() -> None:
            async with contextlib.aclosing(peer.api.watch(NODE, Thing)) as events:
                async for _event in events:
                    pass

        task = asyncio.create_task(read_all())
        await until(lambda: len(peer.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await disconnected.wait()
