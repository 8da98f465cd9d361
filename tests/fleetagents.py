"""Doubles of agents: their pages over real sockets, and their pods."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

I915 = "gpu.intel.com/i915"
LABELS = {"app.kubernetes.io/part-of": "accelplane", "app.kubernetes.io/component": "agent"}


class AgentDouble:
    """The pages of an agent. `answer`, if set, returns the complete response to a request instead."""

    def __init__(self, node: str, host: str = "127.0.0.1") -> None:
        self.node = node
        self.host = host
        self.number = 1
        self.units: list[dict[str, Any]] = [unit("card0"), unit("card1")]
        self.stage = "registered"
        self.answer: Callable[[str], bytes | None] | None = None
        self.requests: list[str] = []
        self.port = 0
        self._changed = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self, context: ssl.SSLContext | None = None) -> AsyncIterator["AgentDouble"]:
        server = await asyncio.start_server(self._serve, self.host, self.port, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.abort()

    def abort(self) -> None:
        """Resets all connections."""
        for task in self._connections:
            task.cancel()

    def change(self) -> None:
        """Responds to waiting requests: the inventory has changed."""
        self.number += 1
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def document(self) -> dict[str, Any]:
        holders = [holder for each in self.units for holder in each["holders"]]
        healthy = sum(each["ids"][I915] for each in self.units if each["phase"] == "healthy")
        resource = {
            "name": I915, "stage": self.stage, "problem": "", "ids": sum(each["ids"][I915] for each in self.units),
            "healthy": healthy, "allocated": sum(holder["count"] for holder in holders),
        }  # fmt: skip
        plugin = {"name": "gpu", "resources": [resource], "units": self.units, "skipped": []}
        return {
            "version": 1, "node": self.node, "agent": "accelplane node", "versions": {"accelplane": "1.0.0"},
            "generation": f"1-{self.number}", "plugins": [plugin],
            "holders": {"source": "podresources", "age": 1.0},
        }  # fmt: skip

    @property
    def readings(self) -> dict[str, Any]:
        value = {"name": "accelplane_device_temperature_celsius", "labels": {}, "value": 41.0}
        device = {"plugin": "gpu", "device": "card0", "values": [value], "outcomes": {"ok": 1}}
        return {"version": 1, "node": self.node, "time": 7.0, "plugins": [{"name": "gpu", "devices": [device]}]}

    def pod(self, name: str = "", **changes: Any) -> dict[str, Any]:
        """The pod of the agent."""
        ports = [{"name": "pages", "containerPort": self.port}]
        return {
            "metadata": {"name": name or f"agent-{self.node}", "namespace": "kube-system", "labels": LABELS},
            "spec": {
                "nodeName": self.node,
                "serviceAccountName": "accelplane-node",
                "containers": [{"name": "agent", "ports": ports}],
            },
            "status": {"phase": "Running", "podIP": self.host},
        } | changes

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, EOFError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    self.requests.append(head)
                    body = self.answer(head) if self.answer is not None else await self._answer(head)
                    if body is None:
                        await asyncio.Event().wait()
                    writer.write(body or b"")
                    await writer.drain()
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, head: str) -> bytes:
        if "/api/v1/readings" in head:
            return response(msgspec.json.encode(self.readings))
        changed = self._changed
        if f'If-None-Match: "1-{self.number}"' in head:
            await changed.wait()
        return response(msgspec.json.encode(self.document), etag=f'"1-{self.number}"')


def unit(name: str, phase: str = "healthy", holders: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """A unit with one ID for each of its holders (`namespace/pod`), and at least one."""
    return {
        "plugin": "gpu", "unit": name, "device": name, "phase": phase, "known": True,
        "ids": {I915: max(1, len(holders))},
        "holders": [
            {"namespace": each.partition("/")[0], "pod": each.partition("/")[2], "container": "c", "resource": I915,
             "count": 1, "since": 5}
            for each in holders
        ],
        "history": [],
    } | changes  # fmt: skip


def response(body: bytes, status: str = "200 OK", etag: str = "", fields: str = "") -> bytes:
    """A response with this body."""
    lines = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{fields}"
    return f"{lines}{f'ETag: {etag}' if etag else 'X: y'}\r\n\r\n".encode() + body


def node(name: str, count: int = 2, **spec: Any) -> dict[str, Any]:
    """A node with `count` IDs of i915."""
    numbers = {I915: str(count), "cpu": "8"}
    conditions = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}]
    return {
        "metadata": {"name": name, "labels": {"zone": "a"}},
        "spec": spec,
        "status": {"capacity": numbers, "allocatable": numbers, "conditions": conditions},
    }


def pod(name: str, count: int = 1, node: str = "", **status: Any) -> dict[str, Any]:
    """A pod in the namespace `team` that requests IDs of i915."""
    resources = {"limits": {I915: str(count)}, "requests": {I915: str(count)}}
    return {
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"containers": [{"name": "c", "resources": resources}]} | ({"nodeName": node} if node else {}),
        "status": {"phase": "Running" if node else "Pending"} | status,
    }
