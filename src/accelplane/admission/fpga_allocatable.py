"""The number of nodes that offer each FPGA resource: the allocatable resources fpga.intel.com/* of all nodes.

Thousands of nodes update their status every few minutes. Subscribers are notified only if the resources of a node
changed, and only the name of a node without FPGAs is stored. If the account may not list nodes, everything else works.

The watch is not shared with that of the operator, which receives the metadata of nodes only: a shared one would receive
complete nodes in every cluster. This one starts with the first FPGA name, in the leader, and needs separate rights.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from accelplane.admission.mappings import PREFIX
from accelplane.apiserver import StatusError
from accelplane.kube.client import Client
from accelplane.kube.informer import Informer, WatchTimeouts
from accelplane.kube.interning import StringPool
from accelplane.kube.kinds import Node, NodeSpec, NodeStatus
from accelplane.kube.quantities import Quantity, number_of

log = logging.getLogger(__name__)


_NO_SPEC, _NONE = NodeSpec(), NodeStatus()
_intern = StringPool()


def fpgas_only(node: Node) -> None:
    """Removes everything except the name and the FPGA resources."""
    metadata = node.metadata
    metadata.uid = metadata.labels = metadata.annotations = metadata.creationTimestamp = None
    found = {_intern(name): number for name, number in _allocatable(node).items() if name.startswith(PREFIX)}
    node.spec, node.status = _NO_SPEC, NodeStatus(allocatable=found) if found else _NONE


class AllocatableByResource:
    """The number of nodes by resource. `initialized` is set when it is known, forbidden, or late by `wait` seconds."""

    def __init__(self, client: Client, watch_timeouts: WatchTimeouts, *, retry: float, wait: float = 10.0) -> None:
        self.initialized = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._listing: Counter[str] = Counter()
        self._retry = retry
        self._wait = wait
        self._subscribers: list[Callable[[Iterable[str] | None], None]] = []
        self._informer = Informer(client, watch_timeouts=watch_timeouts)
        self._nodes = self._informer.cache(Node, transform=fpgas_only)
        self._nodes.subscribe(self._node_changed)

    @property
    def counts(self) -> Mapping[str, int] | None:
        """The number of nodes by resource, None before the nodes are listed."""
        return self._counts if self._nodes.synced.is_set() else None

    def subscribe(self, changed: Callable[[Iterable[str] | None], None]) -> None:
        """Calls `changed` with the resources whose number of nodes changed, or with None for all resources."""
        self._subscribers.append(changed)

    async def run(self) -> None:
        """Watches the nodes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._informer.run_when_permitted(self._on_forbidden, retry=self._retry))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait):
                    await self._nodes.synced.wait()
            self._set_initialized()
            await self._nodes.synced.wait()
            self._notify(None)

    def _on_forbidden(self, error: StatusError) -> None:
        log.warning(
            "nodes cannot be listed: no number of nodes in FPGA statuses, no Events for unknown names: %s", error
        )
        self._set_initialized()

    def _set_initialized(self) -> None:
        if not self.initialized.is_set():
            self.initialized.set()
            self._notify(None)

    def _notify(self, resources: Iterable[str] | None) -> None:
        for changed in self._subscribers:
            changed(resources)

    def lists(self, resource: str) -> bool:
        """Whether a node lists the resource, also with the amount 0, as during a restart of its plugin."""
        return self._listing[resource] > 0

    def _node_changed(self, old: Node | None, new: Node | None) -> None:
        before, after = _allocatable(old), _allocatable(new)
        if before == after:
            return
        self._listing.subtract(before.keys())
        self._listing.update(after.keys())
        had, has = ({name for name, number in each.items() if number_of(number)} for each in (before, after))
        self._counts.subtract(had)
        self._counts.update(has)
        if had != has:
            self._notify(had ^ has)


def _allocatable(node: Node | None) -> Mapping[str, Quantity]:
    return (node.status.allocatable or {}) if node is not None else {}
