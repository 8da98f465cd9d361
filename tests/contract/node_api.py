"""A Node served over real sockets: get, patch and watch."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tls_peer import Peer, Request, response, serving

JSON_PATCH = "application/json-patch+json"


class NodeApi:
    """The Node `one`. `refuse` answers the next requests of a method instead."""

    def __init__(self) -> None:
        self.node: dict[str, Any] = {
            "metadata": {"name": "one", "uid": "u1", "resourceVersion": "1", "labels": {"a": "b"}},
            "status": {"capacity": {"cpu": "4"}},
        }
        self.patches: list[tuple[str, Any]] = []
        self.others: dict[str, Any] = {}
        self.deleted: list[str] = []
        self.refuse: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self._changed = asyncio.Condition()

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        split = urlsplit(request.path)
        if waiting := self.refuse.get(request.method):
            status, body = waiting.pop(0)
            writer.write(response(status, json.dumps(body).encode()))
            return
        if "watch" in parse_qs(split.query):
            await self._watch(writer)
            return
        body: Any = {}
        if split.path in ("/api/v1/nodes/one", "/api/v1/nodes/one/status"):
            if request.method == "PATCH":
                await self._patch(request)
            body = self.node
        elif request.method == "PATCH":
            body = self.others[split.path] = json.loads(request.body)
        elif request.method == "DELETE":
            self.deleted.append(split.path)
        writer.write(response("200 OK", json.dumps(body).encode()))
        await writer.drain()

    async def change(self, part: str, field: str, key: str, value: str | None) -> None:
        """Sets or removes a key of `metadata.labels` or `status.capacity` as another client."""
        content = self.node[part].setdefault(field, {})
        content.pop(key, None)
        if value is not None:
            content[key] = value
        await self._tell()

    async def _patch(self, request: Request) -> None:
        body = json.loads(request.body)
        self.patches.append((request.path, body))
        if request.headers["content-type"] == JSON_PATCH:
            for operation in body:
                part, field, *rest = [word.replace("~1", "/") for word in operation["path"].split("/")[1:]]
                if not rest:
                    self.node[part][field] = operation["value"]
                elif operation["op"] == "remove":
                    del self.node[part][field][rest[0]]
                else:
                    self.node[part][field][rest[0]] = str(operation["value"])
        else:
            self.node["metadata"].setdefault("labels", {}).update(body["metadata"].get("labels", {}))
            self.node["status"].setdefault("capacity", {}).update(body.get("status", {}).get("capacity", {}))
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            metadata = self.node["metadata"]
            metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
            self._changed.notify_all()

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            line = json.dumps({"type": "MODIFIED", "object": self.node}).encode() + b"\n"
            writer.write(b"%x\r\n%s\r\n" % (len(line), line))
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1), self._changed:
                    await self._changed.wait()


@contextlib.asynccontextmanager
async def node_api(directory: Path) -> AsyncGenerator[tuple[NodeApi, Peer]]:
    api = NodeApi()
    async with serving(directory, api.answer) as peer:
        yield api, peer
