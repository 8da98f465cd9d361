"""A Node object at the API server, kept as it should be.

Somebody may write the object anew (the kubelet zeroes resources that it does not know when a node registers again),
take something out of it, or make it again: so it is read, settled, and watched from there; read again when the watch
ends, as it does from time to time. The API server may be away; then it is asked again, less and less often.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from accelplane.apiserver import APPLY_PATCH, ApiError, ApiServer, Event, Gone, Refused, object_path

log = logging.getLogger(__name__)

NODES = "/api/v1/nodes"

_FIRST_RETRY, _LAST_RETRY, _STEADY = 1.0, 60.0, 10.0
# Two who want different things of one object would otherwise answer each other as fast as the network carries.
_CALM = 1.0
_LABELS = ".metadata.labels."
_UNITS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)},
}
_QUANTITY = re.compile(rf"([0-9]{{1,30}})({'|'.join(_UNITS)})")


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None


class NodeInfo(msgspec.Struct, frozen=True, rename="camel"):
    container_runtime_version: str = ""


class NodeStatus(msgspec.Struct, frozen=True, rename="camel"):
    capacity: Mapping[str, str] | None = None
    node_info: NodeInfo = NodeInfo()


class Node(msgspec.Struct, frozen=True):
    """As much of a Node as is looked at."""

    metadata: Metadata = Metadata()
    status: NodeStatus = NodeStatus()

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or {}

    @property
    def capacity(self) -> Mapping[str, str]:
        return self.status.capacity or {}


# Makes a Node what it should be; whether that took a change. Raises `ApiError`.
Settle = Callable[[Node], Awaitable[bool]]


async def read(api: ApiServer, name: str) -> Node:
    """Raises `ApiError`."""
    return await api.get(object_path(NODES, name), Node)


async def keep(api: ApiServer, name: str, settle: Settle, *, interval: float) -> None:
    """Settles the node now, whenever it changes, and at least every `interval` seconds, for ever."""
    loop = asyncio.get_running_loop()
    retry = _FIRST_RETRY
    problem = ""
    while True:
        start = loop.time()
        try:
            node = await read(api, name)
            if await settle(node):
                await asyncio.sleep(_CALM)
            await _follow(api, name, node.metadata.resource_version, settle, interval)
            problem = ""
        except ApiError as error:
            # Also those who may not watch, by a role of older manifests, get to the node once in a while.
            if not isinstance(error, Gone) and str(error) != problem:
                problem = str(error)
                log.error("%s; trying again, every %g s at last", problem, _LAST_RETRY)
        # A server that ends watches as soon as they begin, as one that shuts down does, is in trouble too.
        if loop.time() - start > _STEADY:
            retry = _FIRST_RETRY
        await asyncio.sleep(retry)
        retry = min(2 * retry, _LAST_RETRY)


async def _follow(api: ApiServer, name: str, version: str, settle: Settle, interval: float) -> None:
    query = {"fieldSelector": f"metadata.name={name}"}
    watch = api.watch(NODES, Node, query=query, resource_version=version, seconds=interval)
    async with contextlib.aclosing(watch) as events:
        async for event in events:
            if await _settled(event, settle):
                await asyncio.sleep(_CALM)


async def _settled(event: Event[Node], settle: Settle) -> bool:
    return event.type in ("ADDED", "MODIFIED") and await settle(event.object)


class Labels:
    """Labels of a node that are ours: those written earlier and not wanted any more go, what others wrote stays.

    The API server knows whose a label is (server-side apply). One that somebody else has set to another value is left
    to them.
    """

    def __init__(self, api: ApiServer, manager: str, wanted: Mapping[str, str]) -> None:
        self._api = api
        self._manager = manager
        self._wanted = wanted
        self._left: frozenset[str] = frozenset()
        self._applied = False

    async def settle(self, node: Node) -> bool:
        """Makes the node's labels so; whether that took a request. Raises `ApiError`."""
        if self._applied and all(
            node.labels.get(key) == value or (key in self._left and key in node.labels)
            for key, value in self._wanted.items()
        ):
            return False
        try:
            await self._apply(node, self._wanted)
            self._left = frozenset()
        except Refused as error:
            left = frozenset(
                cause.field.removeprefix(_LABELS)
                for cause in error.causes
                if cause.reason == "FieldManagerConflict" and cause.field.startswith(_LABELS)
            )
            if error.status != 409 or not left:
                raise
            for key in sorted(left - self._left):
                log.warning(
                    "label %s: %r is left as it is, somebody else set it; ours would be %r",
                    key, node.labels.get(key, ""), self._wanted.get(key, ""),
                )  # fmt: skip
            await self._apply(node, {key: value for key, value in self._wanted.items() if key not in left})
            self._left = left
        self._applied = True
        log.info("node %s: %d labels written", node.metadata.name, len(self._wanted) - len(self._left))
        return True

    async def _apply(self, node: Node, labels: Mapping[str, str]) -> None:
        await _applied(self._api, node, self._manager, "", {"labels": labels})


class Resources:
    """Resources of a node that are ours, as `Labels`; but their amounts are facts, and nobody else's is left."""

    def __init__(self, api: ApiServer, manager: str, wanted: Mapping[str, int]) -> None:
        self._api = api
        self._manager = manager
        self._wanted = wanted
        self._applied = False

    async def settle(self, node: Node) -> bool:
        """Makes the node's capacity so; whether that took a request. Raises `ApiError`."""
        if self._applied and all(amount(node.capacity.get(name)) == number for name, number in self._wanted.items()):
            return False
        capacity = {name: str(number) for name, number in self._wanted.items()}
        await _applied(self._api, node, self._manager, "/status", {"status": {"capacity": capacity}})
        self._applied = True
        log.info("node %s: capacity %s written", node.metadata.name, capacity)
        return True


def amount(quantity: str | None) -> int | None:
    """The number that a quantity stands for, None for none and for what is no whole number without exponent.

    The API server writes 98000000 as `98M`.
    """
    found = _QUANTITY.fullmatch(quantity or "")
    return int(found[1]) * _UNITS[found[2]] if found else None


async def _applied(api: ApiServer, node: Node, manager: str, part: str, content: Mapping[str, object]) -> None:
    """Server-side apply of fields of the metadata or, to the part `/status`, of the object.

    A map that was ours in part is named also when nothing of it is ours any more. Were it left out, it would be
    removed as a whole, with all that nobody is known to own: of a node, the capacity that the kubelet registered.
    """
    # With its uid, for applying would make a node that is not there any more.
    metadata: dict[str, object] = {"name": node.metadata.name, "uid": node.metadata.uid}
    body: dict[str, object] = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    (body if part else metadata).update(content)
    query = {"fieldManager": manager, **({"force": "true"} if part else {})}
    await api.patch(f"{object_path(NODES, node.metadata.name)}{part}", body, APPLY_PATCH, Node, query=query)
