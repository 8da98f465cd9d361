"""Reconciles the Node object at the API server: labels and extended resources.

Others may change or recreate the object; the kubelet, for example, sets unknown resources to zero when a node
registers again. So the Node is read, reconciled and watched, and read again when the watch ends. Requests to an
unavailable API server are retried with exponential backoff.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from accelplane.apiserver import APPLY_PATCH, ApiError, ApiServer, Gone, StatusError, object_path

log = logging.getLogger(__name__)

NODES = "/api/v1/nodes"

_FIRST_RETRY, _LAST_RETRY, _STEADY = 1.0, 60.0, 10.0
# Seconds between two changes, which limits the load if another client writes other values.
_MIN_INTERVAL = 1.0
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
    """The fields of a Node that are used."""

    metadata: Metadata = Metadata()
    status: NodeStatus = NodeStatus()

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or {}

    @property
    def capacity(self) -> Mapping[str, str]:
        return self.status.capacity or {}


# Changes the Node to the desired state. Returns whether it sent a request. Raises `ApiError`.
Reconcile = Callable[[Node], Awaitable[bool]]


async def read(api: ApiServer, name: str) -> Node:
    """Raises `ApiError`."""
    return await api.get(object_path(NODES, name), Node)


async def run(api: ApiServer, name: str, reconcile: Reconcile, *, interval: float) -> None:
    """Reconciles the node immediately, at each change, and at least every `interval` seconds, until cancelled."""
    loop = asyncio.get_running_loop()
    retry = _FIRST_RETRY
    problem = ""
    while True:
        start = loop.time()
        try:
            node = await read(api, name)
            if await reconcile(node):
                await asyncio.sleep(_MIN_INTERVAL)
            await _follow(api, name, node.metadata.resource_version, reconcile, interval)
            problem = ""
        except ApiError as error:
            # Without permission to watch (the role of older manifests) the node is reconciled at each retry.
            if not isinstance(error, Gone) and str(error) != problem:
                problem = str(error)
                log.error("%s; retrying with backoff up to %g s", problem, _LAST_RETRY)
        # Watches that end immediately, for example during a shutdown of the server, are retried with backoff too.
        if loop.time() - start > _STEADY:
            retry = _FIRST_RETRY
        await asyncio.sleep(retry)
        retry = min(2 * retry, _LAST_RETRY)


async def _follow(api: ApiServer, name: str, version: str, reconcile: Reconcile, interval: float) -> None:
    query = {"fieldSelector": f"metadata.name={name}"}
    watch = api.watch(NODES, Node, query=query, resource_version=version, duration=interval)
    async with contextlib.aclosing(watch) as events:
        async for event in events:
            if event.type in ("ADDED", "MODIFIED") and await reconcile(event.object):
                await asyncio.sleep(_MIN_INTERVAL)


class Labels:
    """Applies labels to a node by server-side apply, which removes labels that were applied before and are not now.

    Labels of other field managers are unchanged, also in case of a conflict.
    """

    def __init__(self, api: ApiServer, manager: str, labels: Mapping[str, str]) -> None:
        self._api = api
        self._manager = manager
        self._labels = labels
        self._conflicts: frozenset[str] = frozenset()
        self._applied = False

    async def reconcile(self, node: Node) -> bool:
        """Applies the labels unless the node has them. Returns whether it sent a request. Raises `ApiError`."""
        if self._applied and all(
            node.labels.get(key) == value or (key in self._conflicts and key in node.labels)
            for key, value in self._labels.items()
        ):
            return False
        try:
            await _server_side_apply(self._api, node, self._manager, "", {"labels": self._labels})
            self._conflicts = frozenset()
        except StatusError as error:
            conflicts = frozenset(
                cause.field.removeprefix(_LABELS)
                for cause in error.causes
                if cause.reason == "FieldManagerConflict" and cause.field.startswith(_LABELS)
            )
            if error.code != 409 or not conflicts:
                raise
            for key in sorted(conflicts - self._conflicts):
                log.warning(
                    "label %s: found %r of another field manager, expected %r; unchanged",
                    key, node.labels.get(key, ""), self._labels.get(key, ""),
                )  # fmt: skip
            labels = {key: value for key, value in self._labels.items() if key not in conflicts}
            await _server_side_apply(self._api, node, self._manager, "", {"labels": labels})
            self._conflicts = conflicts
        self._applied = True
        log.info("node %s: applied %d labels", node.metadata.name, len(self._labels) - len(self._conflicts))
        return True


class Resources:
    """Applies extended resources to a node like `Labels`, but overrides the values of other field managers."""

    def __init__(self, api: ApiServer, manager: str, capacity: Mapping[str, int]) -> None:
        self._api = api
        self._manager = manager
        self._capacity = capacity
        self._applied = False

    async def reconcile(self, node: Node) -> bool:
        """Applies the capacity unless the node has it. Returns whether it sent a request. Raises `ApiError`."""
        if self._applied and all(amount(node.capacity.get(name)) == number for name, number in self._capacity.items()):
            return False
        capacity = {name: str(number) for name, number in self._capacity.items()}
        await _server_side_apply(self._api, node, self._manager, "/status", {"status": {"capacity": capacity}})
        self._applied = True
        log.info("node %s: applied capacity %s", node.metadata.name, capacity)
        return True


def amount(quantity: str | None) -> int | None:
    """Returns the number of a quantity like `98M`, None unless it is an integer without exponent."""
    found = _QUANTITY.fullmatch(quantity or "")
    return int(found[1]) * _UNITS[found[2]] if found else None


async def _server_side_apply(
    api: ApiServer, node: Node, manager: str, part: str, content: Mapping[str, object]
) -> None:
    """Applies fields of the metadata or, with the part `/status`, of the object.

    A map that the manager owned in part must be present even if it is empty. Without it the API server removes the
    complete map with all fields that have no owner, such as the capacity that the kubelet registered.
    """
    # With the uid, because apply would create a Node that was deleted.
    metadata: dict[str, object] = {"name": node.metadata.name, "uid": node.metadata.uid}
    body: dict[str, object] = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    (body if part else metadata).update(content)
    query = {"fieldManager": manager, **({"force": "true"} if part else {})}
    await api.patch(f"{object_path(NODES, node.metadata.name)}{part}", body, APPLY_PATCH, Node, query=query)
