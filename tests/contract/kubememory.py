"""An API server in memory, without HTTP, for tests in virtual time: lists, watches, Leases, and faults.

It stands for `accelplane.kube.client.Client`. Objects are documents; each write gets the next resource version.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from accelplane.apiserver.errors import (
    Conflict,
    DecodeError,
    Gone,
    NotFound,
    StatusError,
    Unreachable,
    WatchIdleTimeout,
)
from accelplane.kube.client import Selection, Watched
from accelplane.kube.metrics import Metrics
from accelplane.kube.models import Lease, LeaseSpec
from accelplane.kube.objects import Metadata, Object

Document = dict[str, Any]
LATENCY = 0.01


class MemoryServer:
    """Widgets and one Lease. `fail_next` are errors of the next requests, by "LIST" or "WATCH"."""

    def __init__(self) -> None:
        self.objects: dict[str, Document] = {}
        self.version = 100
        self.lease: LeaseSpec | None = None
        self.lease_version = 0
        self.reachable = True
        self.fail_next: dict[str, list[Exception]] = {"LIST": [], "WATCH": []}
        self.lists = 0
        self._history: list[tuple[int, str, bytes]] = []
        self._oldest = 0
        self._changed = asyncio.Event()
        self._break: Exception | None = None

    # Changes by other clients

    def put(self, name: str, spec: object) -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.objects[name] = {"metadata": {"name": name, "resourceVersion": str(self.version)}, "spec": spec}
        self._record(kind, self.objects[name])

    def remove(self, name: str) -> None:
        if name in self.objects:
            self.version += 1
            document = self.objects.pop(name)
            document = {**document, "metadata": {"name": name, "resourceVersion": str(self.version)}}
            self._record("DELETED", document)

    # Faults

    def compact(self) -> None:
        self._oldest = self.version

    def break_watches(self, error: Exception | None = None) -> None:
        """Ends the watches, with an error or in order."""
        self._break = error
        self._notify()

    def _record(self, kind: str, document: Document) -> None:
        self._history.append((self.version, kind, json.dumps(document).encode()))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # The state of the client


class MemoryClient:
    """One replica's client of a `MemoryServer`; `partitioned` cuts it off."""

    def __init__(self, server: MemoryServer) -> None:
        self.metrics = Metrics()
        self.field_manager = "test"
        self.namespace = "n"
        self.partitioned = False
        self._server = server

    def without_rate_limit(self) -> MemoryClient:
        return self

    async def _request(self, name: str) -> None:
        await asyncio.sleep(LATENCY)
        if self.partitioned or not self._server.reachable:
            raise Unreachable(name, "no route to host")
        errors = self._server.fail_next.get(name, [])
        if errors:
            raise errors.pop()

    async def list_pages(
        self, _kind: type[Object], _selection: Selection, consume: Callable[[Sequence[msgspec.Raw]], None]
    ) -> str:
        server = self._server
        server.lists += 1
        await self._request("LIST")
        # A list is a snapshot, whose pages arrive one by one.
        version, documents = str(server.version), list(server.objects.values())
        for start in range(0, max(len(documents), 1), 2):
            page = [msgspec.Raw(json.dumps(each).encode()) for each in documents[start : start + 2]]
            consume(page)
            await self._request("PAGE")
        return version

    async def watch(
        self, _kind: type[Object], _selection: Selection, resource_version: str, *, duration: float, idle: float
    ) -> AsyncGenerator[Watched, None]:
        server = self._server
        await self._request("WATCH")
        since = int(resource_version)
        if since < server._oldest:
            raise Gone("WATCH", "too old resource version", code=410)
        loop = asyncio.get_running_loop()
        end = loop.time() + duration
        server._break = None
        while loop.time() < end:
            changed = server._changed
            for version, kind, document in [each for each in server._history if each[0] > since]:
                since = version
                yield Watched(kind, msgspec.Raw(document))  # pyright: ignore[reportArgumentType]
            try:
                async with asyncio.timeout(min(idle, end - loop.time())):
                    await changed.wait()
            except TimeoutError:
                if loop.time() < end:
                    raise WatchIdleTimeout("WATCH", "idle") from None
            if self.partitioned or not server.reachable:
                raise Unreachable("WATCH", "connection reset")
            if isinstance(server._break, Exception):
                raise server._break

    async def get(self, _kind: type[Any], name: str, namespace: str = "") -> Any:
        await self._request("GET")
        spec = self._server.lease
        if spec is None:
            raise NotFound("GET", code=404)
        metadata = Metadata(name=name, namespace=namespace, resourceVersion=str(self._server.lease_version))
        return Lease(metadata=metadata, spec=msgspec.structs.replace(spec))

    async def create(self, new: Any) -> Any:
        await self._request("POST")
        if isinstance(new, Lease):
            if self._server.lease is not None:
                raise Conflict("POST", "exists", code=409)
            self._write_lease(new)
        return new

    async def replace(self, changed: Lease) -> Lease:
        await self._request("PUT")
        assert changed.metadata
        if changed.metadata.resourceVersion != str(self._server.lease_version):
            raise Conflict("PUT", "modified", code=409)
        self._write_lease(changed)
        return changed

    def _write_lease(self, lease: Lease) -> None:
        assert lease.spec
        self._server.lease = msgspec.structs.replace(lease.spec)
        self._server.lease_version += 1


FAULTS: dict[str, Callable[[], Exception]] = {
    "unreachable": lambda: Unreachable("x", "connection reset"),
    "gone": lambda: Gone("x", "expired", code=410),
    "internal": lambda: StatusError("x", "internal", code=500),
    "rate limit": lambda: StatusError("x", "slow down", code=429, retry_after=2),
    "junk": lambda: DecodeError("x", "junk"),
}
