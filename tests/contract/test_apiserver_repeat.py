"""Requests of the API client that are repeated, limited in rate, or not repeated."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from apiservers import EVENTS, NODE, Thing, sequence
from tls_peer import Answer, chunked, document, respond_with, response, serving

from accelplane.apiserver import JSON_PATCH, ApiServer, DecodeError, RateLimit, StatusError, TooManyRequests


def rejected(status: str, retry_after: int = 1) -> Answer:
    return respond_with(response(status, b"{}", f"Retry-After: {retry_after}"))


CALLS: dict[str, Callable[[ApiServer], Awaitable[Any]]] = {
    "GET": lambda api: api.get(NODE, Thing, deadline=30),
    "POST": lambda api: api.post(NODE, {}, Thing, deadline=30),
    "PUT": lambda api: api.put(NODE, {}, Thing, deadline=30),
    "PATCH": lambda api: api.patch(NODE, {}, JSON_PATCH, Thing, deadline=30),
    "DELETE": lambda api: api.delete(NODE, deadline=30),
}


@pytest.mark.parametrize(
    ("method", "status", "requests"),
    [
        *((method, "429 Too Many Requests", 2) for method in CALLS),
        *((method, "503 Service Unavailable", 2) for method in CALLS),
        *((method, "500 Internal Server Error", 2 if method == "GET" else 1) for method in CALLS),
        *((method, "504 Gateway Timeout", 2 if method == "GET" else 1) for method in CALLS),
        *((method, "409 Conflict", 1) for method in CALLS),
    ],
)
async def test_a_request_that_the_server_did_not_process_is_sent_again(
    tmp_path: Path, method: str, status: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = without_delays(monkeypatch)
    async with serving(tmp_path, sequence(rejected(status, 7), document({"name": "one"}))) as peer:
        if requests == 1:
            with pytest.raises(StatusError) as caught:
                await CALLS[method](peer.api)
            assert caught.value.retry_after == 7
        else:
            await CALLS[method](peer.api)
        assert [each.method for each in peer.requests] == [method] * requests
    assert delays == [7] * (requests - 1)


def without_delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes retries immediate; yields the requested delays."""
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr("accelplane.apiserver.client.asyncio", Substitute(asyncio, sleep=sleep))
    return delays


class Substitute:
    """A module with other members."""

    def __init__(self, module: object, **members: object) -> None:
        self._module = module
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


async def test_a_request_is_sent_at_most_ten_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_delays(monkeypatch)
    async with serving(tmp_path, rejected("429 Too Many Requests")) as peer:
        with pytest.raises(TooManyRequests):
            await peer.api.get(NODE, Thing, deadline=60)
        assert len(peer.requests) == 10


async def test_a_delay_beyond_the_deadline_is_returned_to_the_caller(tmp_path: Path) -> None:
    async with serving(tmp_path, rejected("429 Too Many Requests", 60)) as peer:
        with pytest.raises(TooManyRequests) as caught:
            await peer.api.get(NODE, Thing, deadline=30)
        assert caught.value.retry_after == 60
        assert len(peer.requests) == 1


async def test_without_retry_after_nothing_is_sent_again(tmp_path: Path) -> None:
    async with serving(tmp_path, respond_with(response("429 Too Many Requests", b"{}"))) as peer:
        with pytest.raises(TooManyRequests):
            await peer.api.get(NODE, Thing)
        assert len(peer.requests) == 1


async def test_forbidden_writes_are_not_repeated(tmp_path: Path) -> None:
    allowed = [True, False]

    def check() -> None:
        if not allowed.pop(0):
            raise ZeroDivisionError

    async with serving(tmp_path, rejected("503 Service Unavailable")) as peer:
        api = ApiServer(peer.config, before_write=check)
        with pytest.raises(ZeroDivisionError):
            await api.put(NODE, {}, Thing)
        assert len(peer.requests) == 1


async def test_requests_wait_for_the_rate_limit_and_a_watch_only_to_open(tmp_path: Path) -> None:
    sleeps: list[float] = []

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    async with serving(tmp_path, respond_with(chunked(*EVENTS))) as peer:
        api = ApiServer(peer.config, rate_limit=RateLimit(1, 1, clock=lambda: 0.0, sleep=sleep))
        async with contextlib.aclosing(api.watch(NODE, Thing)) as events:
            assert len([event async for event in events]) == 3
        assert sleeps == []
        with pytest.raises(DecodeError):
            await api.get(NODE, Thing)
        assert sleeps == [1]
        with pytest.raises(DecodeError):
            await api.without_rate_limit().get(NODE, Thing)
        assert sleeps == [1]
