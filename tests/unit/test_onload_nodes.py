"""Writes to nodes by the Onload operator, and what is read until its cache has them."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest

from accelplane.kube.cache import Cache
from accelplane.kube.client import Client, Selection
from accelplane.kube.manager import Manager
from accelplane.onload.names import Names
from accelplane.onload.nodes import Nodes
from accelplane.onload.plan import Action
from accelplane.onload.resources import Node

NAMES = Names("apps", "onload")
SELECTOR = {"onload": "true"}
ACTION = Action(node="a", step="RemovingGate", message="", labels={"gate": None})


def document(version: int, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "a", "resourceVersion": str(version), "labels": {**SELECTOR, **labels}}}


class Server:
    """A server whose watch delivers `events` before the response of a write, or nothing."""

    def __init__(self) -> None:
        self.client = cast("Client", self)
        self.caches: dict[type, Cache[Any]] = {}
        self.response: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []

    def cache(self, kind: type, *, transform: Any) -> Cache[Any]:
        self.caches[kind] = Cache(kind, Selection(), asyncio.Event(), transform=transform)
        return self.caches[kind]

    def deliver(self, thing: Mapping[str, Any]) -> None:
        self.caches[Node].store(msgspec.Raw(msgspec.json.encode(thing)))

    async def patch(self, kind: type[Node], _name: str, _change: object) -> Node:
        for event in self.events:
            self.deliver(event)
        return msgspec.convert(self.response, kind)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def nodes(server: Server) -> Nodes:
    instance = Nodes(cast("Manager", server))
    server.deliver(document(1))
    return instance


def version(nodes: Nodes) -> str:
    (view,) = nodes.views(NAMES, SELECTOR)
    return view.version


async def test_a_write_is_read_before_the_cache_has_it(server: Server, nodes: Nodes) -> None:
    server.response = document(2)
    await nodes.patch(NAMES, ACTION, "1")
    assert version(nodes) == "2"
    server.deliver(document(2))
    server.deliver(document(3))
    assert version(nodes) == "3"


async def test_changes_by_others_that_arrive_before_the_response_count(server: Server, nodes: Nodes) -> None:
    server.response, server.events = document(2), [document(2), document(3, other="changed")]
    await nodes.patch(NAMES, ACTION, "1")
    assert version(nodes) == "3"


async def test_the_last_of_several_writes_is_read_until_the_cache_has_it(server: Server, nodes: Nodes) -> None:
    for number in (2, 3):
        server.response = document(number)
        await nodes.patch(NAMES, ACTION, str(number - 1))
    server.deliver(document(2))
    assert version(nodes) == "3"
    server.deliver(document(3))
    server.deliver(document(4))
    assert version(nodes) == "4"
