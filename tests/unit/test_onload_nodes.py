"""Writes to nodes by the Onload operator, and what is read until its cache has them."""

import asyncio
import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from accelplane.kube.cache import Cache
from accelplane.kube.client import Client, Selection
from accelplane.kube.manager import Manager
from accelplane.onload.names import Names
from accelplane.onload.nodes import InUse, Nodes
from accelplane.onload.plan import Action
from accelplane.onload.resources import Node, Pod

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
        self.pods: list[dict[str, Any]] = []

    def cache(self, kind: type, *, transform: Any) -> Cache[Any]:
        self.caches[kind] = Cache(kind, Selection(), asyncio.Event(), transform=transform)
        return self.caches[kind]

    def deliver(self, thing: Mapping[str, Any]) -> None:
        self.caches[Node].store(msgspec.Raw(msgspec.json.encode(thing)))

    async def list(self, kind: type[Pod], _selection: Selection) -> SimpleNamespace:
        return SimpleNamespace(items=msgspec.convert(self.pods, list[kind]), unreadable=[])

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


def plugin(uid: str, version: int, *, ready: bool) -> dict[str, Any]:
    labels = {"onload.amd.com/name": NAMES.daemonset}
    return {
        "metadata": {
            "name": "plugin",
            "namespace": "apps",
            "uid": uid,
            "resourceVersion": str(version),
            "labels": labels,
        },
        "spec": {"nodeName": "a"},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def test_the_time_of_readiness_begins_again_when_a_plugin_pod_fails_or_is_replaced(server: Server) -> None:
    now = 100.0
    made = Nodes(cast("Manager", server), monotonic=lambda: now)
    server.deliver(document(1))

    versions = itertools.count(1)

    def ready_since(uid: str, *, ready: bool) -> float:
        pod = plugin(uid, next(versions), ready=ready)
        server.caches[Pod].store(msgspec.Raw(msgspec.json.encode(pod)))
        (found,) = made.views(NAMES, SELECTOR)
        return found.plugins[0].ready_since

    assert ready_since("1", ready=True) == 100
    now = 105.0
    assert ready_since("1", ready=True) == 100
    ready_since("1", ready=False)
    assert ready_since("1", ready=True) == 105
    now = 107.0
    assert ready_since("2", ready=True) == 107


async def test_a_plugin_pod_that_only_the_server_has_prevents_that_a_module_is_unloaded(
    server: Server, nodes: Nodes
) -> None:
    action = msgspec.structs.replace(ACTION, labels={"module": None}, unloads=True)
    server.pods = [plugin("1", 1, ready=False)]
    with pytest.raises(InUse, match="pod apps/plugin uses Onload"):
        await nodes.patch(NAMES, action, "1")
    server.response = document(2)
    await nodes.patch(NAMES._replace(name="other"), action, "1")


def test_only_probe_pods_of_the_resource_itself_are_exempt_from_eviction(server: Server, nodes: Nodes) -> None:
    owner = {
        "apiVersion": "onload.amd.com/v1alpha1",
        "kind": "Onload",
        "name": "onload",
        "uid": "u",
        "controller": True,
    }
    uses = {"nodeName": "a", "containers": [{"resources": {"requests": {"amd.com/onload": "1"}}}]}
    own = {"name": "probe", "namespace": "apps", "ownerReferences": [owner]}
    others = ({**own, "name": "foreign", "namespace": "else"}, {**own, "name": "unowned", "ownerReferences": []})
    for index, metadata in enumerate((own, *others)):
        labelled = {**metadata, "uid": str(index), "labels": {"onload.amd.com/verify": NAMES.daemonset}}
        pod = {"metadata": labelled, "spec": uses, "status": {"phase": "Running"}}
        server.caches[Pod].store(msgspec.Raw(msgspec.json.encode(pod)))
    (found,) = nodes.views(NAMES, SELECTOR)
    assert sorted(each.key.name for each in found.apps) == ["foreign", "unowned"]
    assert found.probe == "running"
