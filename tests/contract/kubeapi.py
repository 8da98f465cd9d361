"""An API server small enough to misbehave on demand: objects, resource versions, watches, and faults.

It keeps JSON objects of any kind in memory and does with them what the real one does, as far as clients notice: list
in pages, watch with bookmarks, optimistic locking, merge and JSON patches, server-side apply, deletion. It refuses no
apply (`managedfields`).
Faults are put in with `fault`: the next requests that match get them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from faults import Asked, Fault
from jsonpatching import applied
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from managedfields import KEYS, removable, with_entry

Object = dict[str, Any]
REASONS = {404: "NotFound", 409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}


class Answer(Exception):
    """A request that ends with this status."""

    def __init__(self, status: int, message: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason or REASONS.get(status, "")


@dataclass(frozen=True)
class Place:
    """What a path names."""

    group: str
    plural: str
    namespace: str
    name: str
    subresource: str


def place_of(path: str) -> Place:
    parts = path.strip("/").split("/")
    group, parts = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    plural, name, subresource = [*parts, "", ""][:3]
    return Place(group, plural, namespace, name, subresource)


class KubeApi:
    """The server. `objects` are by plural, namespace and name; `asked` is every request that came."""

    def __init__(self) -> None:
        self.version = 100
        self.oldest = 0
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        # what a mutating webhook makes of objects that are written
        self.admit: Callable[[Object], Object] = lambda thing: thing
        self.bookmarks_every: float = 60.0
        self.silent = False
        self.url = ""
        self._history: list[tuple[int, str, str, Object]] = []
        self._news = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.StreamWriter] = set()
        self._mute: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    @property
    def config(self) -> SingleConfig:
        found = KubeConfig.from_server(self.url, namespace="default").get()
        assert found
        return found

    async def start(self) -> None:
        """Serves, again at the same port after `stop`."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=1 << 20)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Closes every connection."""
        if self._server:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # The world

    def put(self, plural: str, thing: Object) -> Object:
        """Makes or changes an object, as somebody else would."""
        metadata = thing.setdefault("metadata", {})
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        known = self.objects.get(key)
        self.version += 1
        metadata["uid"] = known["metadata"]["uid"] if known else metadata.get("uid") or str(uuid.uuid4())
        metadata["resourceVersion"] = str(self.version)
        if known and "managedFields" in known["metadata"]:
            metadata.setdefault("managedFields", known["metadata"]["managedFields"])
        self.objects[key] = thing
        self._tell("MODIFIED" if known else "ADDED", plural, thing)
        return thing

    def remove(self, plural: str, name: str, namespace: str = "") -> None:
        thing = self.objects.pop((plural, namespace, name))
        self.version += 1
        gone = copy.deepcopy(thing)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", plural, gone)

    def get(self, plural: str, name: str, namespace: str = "") -> Object | None:
        return self.objects.get((plural, namespace, name))

    def all(self, plural: str) -> list[Object]:
        return [thing for key, thing in self.objects.items() if key[0] == plural]

    def become(self, other: KubeApi) -> None:
        """Has the objects that another server has, and knows of them what it knows."""
        self.version = self.oldest = other.version
        self.objects = copy.deepcopy(other.objects)

    # Misbehaving

    def fault(self, pattern: str, status: int = 0, **more: Any) -> Fault:
        self.faults.append(made := Fault(pattern, status, **more))
        return made

    def compact(self) -> None:
        """Forgets all that happened: watches from before are too old."""
        self.oldest = self.version
        self._history.clear()

    def kill_watches(self) -> None:
        for writer in self._watchers:
            writer.transport.abort()

    def end_watches(self, rest: bytes = b"") -> None:
        """Ends every watch as the server would, after these last bytes."""
        for writer in self._watchers:
            writer.write((_chunk(rest) if rest else b"") + b"0\r\n\r\n")
            writer.close()

    def mute_watches(self) -> None:
        """Tells those who watch now nothing any more."""
        self._mute |= self._watchers

    def say(self, line: bytes) -> None:
        """Sends a line, whatever it is, to every watch."""
        for writer in self._watchers:
            writer.write(_chunk(line + b"\n"))

    def count(self, pattern: str) -> int:
        """How many requests matched."""
        return sum(1 for asked in self.asked if re.search(pattern, str(asked)))

    @property
    def watches(self) -> int:
        return len(self._watchers)

    # Serving

    def _tell(self, kind: str, plural: str, thing: Object) -> None:
        self._history.append((self.version, kind, plural, copy.deepcopy(thing)))
        self._news.set()
        self._news = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, EOFError):
                while await self._one(reader, writer):
                    pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            self._watchers.discard(writer)
            self._mute.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        method, target, _ = first.split(" ")
        url = urlsplit(target)
        parameters = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        content, accept = headers.get("content-type", ""), headers.get("accept", "")
        asked = Asked(method, url.path, parameters, content, json.loads(body) if body else None, accept)
        self.asked.append(asked)
        fault = next((one for one in self.faults if one.hits(asked)), None)
        if fault:
            if fault.after:
                with contextlib.suppress(Answer):
                    self._do(asked)
            fault.then()
            if fault.hang:
                await asyncio.sleep(3600)
            if not fault.status:
                writer.transport.abort()
                return False
            text = fault.body if fault.body is not None else _status(Answer(fault.status, "a fault"))
            self._write(writer, fault.status, text, fault.headers)
            return True
        try:
            if asked.watch:
                await self._watch(asked, writer)
                return True
            self._write(writer, *self._do(asked))
        except Answer as answer:
            self._write(writer, answer.status, _status(answer))
        return True

    def _write(
        self, writer: asyncio.StreamWriter, status: int, text: bytes, headers: dict[str, str] | None = None
    ) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", "Content-Type: application/json", f"Content-Length: {len(text)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + text)

    def _do(self, asked: Asked) -> tuple[int, bytes]:
        place = place_of(asked.path)
        if not place.name and asked.method == "GET":
            return 200, self._list(place, asked)
        key = (place.plural, place.namespace, place.name or (asked.body or {}).get("metadata", {}).get("name", ""))
        known = self.objects.get(key)
        if asked.method == "POST":
            if known:
                raise Answer(409, f"{key[2]} exists", "AlreadyExists")
            return 201, json.dumps(self._create(place, asked, "Update")).encode()
        if asked.method == "PATCH" and "apply" in asked.content_type and known is None and not place.subresource:
            if asked.body["metadata"].get("uid"):
                raise Answer(409, "uid mismatch: no existing object was found")
            return 201, json.dumps(self._create(place, asked, "Apply")).encode()
        if known is None:
            raise Answer(404, f"{place.plural} {key[2]} not found")
        return self._do_with(known, place, asked)

    def _create(self, place: Place, asked: Asked, operation: str) -> Object:
        made = copy.deepcopy(asked.body)
        made["metadata"].setdefault("namespace", place.namespace)
        manager = asked.parameters.get("fieldManager", "")
        made["metadata"]["managedFields"] = with_entry({"metadata": {}}, made, manager, operation, "")
        return self.put(place.plural, self.admit(made))

    def _do_with(self, known: Object, place: Place, asked: Asked) -> tuple[int, bytes]:
        if asked.method == "DELETE":
            wanted = (asked.body or {}).get("preconditions", {}).get("uid")
            if wanted and wanted != known["metadata"]["uid"]:
                raise Answer(409, "another uid")
            self.remove(place.plural, place.name, place.namespace)
            return 200, json.dumps({"kind": "Status", "status": "Success"}).encode()
        changed = _written(known, place, asked)
        if asked.method != "GET":
            changed = self.admit(changed)
        if "generation" in known["metadata"] and changed.get("spec") != known.get("spec"):
            generation = known["metadata"]["generation"] + 1
            changed = {**changed, "metadata": {**changed["metadata"], "generation": generation}}
        if asked.method != "GET" and _without_version(changed) != _without_version(known):
            return 200, json.dumps(self.put(place.plural, copy.deepcopy(changed))).encode()
        return 200, json.dumps(known).encode()

    def _list(self, place: Place, asked: Asked) -> bytes:
        things = [
            thing
            for key, thing in sorted(self.objects.items())
            if key[0] == place.plural and place.namespace in {"", key[1]} and _selected(thing, asked.parameters)
        ]
        start, _, version = asked.parameters.get("continue", "").partition("@")
        if version and int(version) < self.oldest:
            raise Answer(410, "the continue token is too old")
        first = int(start or 0)
        limit = int(asked.parameters.get("limit", "0")) or len(things) or 1
        metadata: Object = {"resourceVersion": str(self.version)}
        if first + limit < len(things):
            metadata["continue"] = f"{first + limit}@{version or self.version}"
        return json.dumps({"metadata": metadata, "items": things[first : first + limit] or None}).encode()

    async def _watch(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        since = int(asked.parameters["resourceVersion"])
        place = place_of(asked.path)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        if since < self.oldest:
            writer.write(_chunk(json.dumps({"type": "ERROR", "object": json.loads(_status(Answer(410)))}).encode()))
            writer.write(b"0\r\n\r\n")
            return
        loop = asyncio.get_running_loop()
        end = loop.time() + float(asked.parameters.get("timeoutSeconds", "1800"))
        self._watchers.add(writer)
        seen: set[tuple[str, str]] = {
            (key[1], key[2]) for key, thing in self.objects.items() if _selected(thing, asked.parameters)
        }
        while loop.time() < end and not writer.transport.is_closing():
            news = self._news
            for version, happened, plural, thing in [one for one in self._history if one[0] > since]:
                since = version
                namespace = thing["metadata"].get("namespace", "")
                if plural != place.plural or place.namespace not in {"", namespace} or self._is_silent(writer):
                    continue
                key = (namespace, thing["metadata"]["name"])
                selected = _selected(thing, asked.parameters)
                if not selected and key not in seen:
                    continue
                kind = happened if selected else "DELETED"
                seen.add(key)
                writer.write(_chunk(json.dumps({"type": kind, "object": thing}).encode() + b"\n"))
            await writer.drain()
            try:
                async with asyncio.timeout(min(self.bookmarks_every, max(0.0, end - loop.time()))):
                    await news.wait()
            except TimeoutError:
                if not self._is_silent(writer) and asked.parameters.get("allowWatchBookmarks") == "true":
                    mark = {"kind": "X", "metadata": {"resourceVersion": str(self.version)}}
                    writer.write(_chunk(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n"))
        self._watchers.discard(writer)
        writer.write(b"0\r\n\r\n")

    def _is_silent(self, writer: asyncio.StreamWriter) -> bool:
        return self.silent or writer in self._mute


@contextlib.asynccontextmanager
async def kube_api() -> AsyncIterator[KubeApi]:
    """A server for as long as the block lasts."""
    api = KubeApi()
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


def _chunk(text: bytes) -> bytes:
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"


def _status(answer: Answer) -> bytes:
    return json.dumps(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": answer.status,
            "reason": answer.reason,
            "message": str(answer),
        }
    ).encode()


def _merged(known: Any, change: Any) -> Any:
    if not isinstance(change, dict) or not isinstance(known, dict):
        return change
    result = dict(known)
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name, {}), value)
    return result


def _written(known: Object, place: Place, asked: Asked) -> Object:
    """What a request makes of an object, without what the server itself changes."""
    if asked.method == "PUT":
        _check_version(known, asked.body)
        return {**known, "status": asked.body.get("status")} if place.subresource == "status" else asked.body
    if asked.method != "PATCH":
        return known
    if "json-patch" in asked.content_type:
        changed = applied(known, asked.body)
        _check_version(known, changed)
        return changed
    if "apply" in asked.content_type:
        return _applied(known, place, asked)
    _check_version(known, asked.body)
    return _merged(known, asked.body)


def _check_version(known: Object, body: Object) -> None:
    version = body.get("metadata", {}).get("resourceVersion")
    if version and version != known["metadata"]["resourceVersion"]:
        raise Answer(409, "the object has been modified")


def _applied(known: Object, place: Place, asked: Asked) -> Object:
    _check_version(known, asked.body)
    if asked.body["metadata"].get("uid") not in (None, known["metadata"]["uid"]):
        raise Answer(409, "another uid")
    manager = asked.parameters["fieldManager"]
    changed = _reapplied(known, removable(known, manager, place.subresource), asked.body)
    entries = with_entry(known, asked.body, manager, "Apply", place.subresource)
    return {**changed, "metadata": {**changed["metadata"], "managedFields": entries}}


def _reapplied(known: Any, before: Any, wanted: Any, key: str = "") -> Any:
    """What is known with what is wanted in it, and without what was `before` and is not wanted now."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        before = before if isinstance(before, dict) else {}
        gone = {name: part for name, part in before.items() if name not in wanted}
        rest = _without(known, gone)
        return rest | {name: _reapplied(known.get(name), before.get(name), part, name) for name, part in wanted.items()}
    if isinstance(known, list) and isinstance(wanted, list) and key in KEYS:
        by = KEYS[key]
        there, old = {each[by]: each for each in known}, {each[by]: each for each in before or ()}
        new = {each[by]: each for each in wanted}
        others = [each for name, each in there.items() if name not in old and name not in new]
        return [*(_reapplied(there.get(name), old.get(name), each) for name, each in new.items()), *others]
    return copy.deepcopy(wanted)


def _without(known: Object, gone: Object) -> Object:
    """What is known without the fields of `gone`; what others have put beside them stays."""
    result: Object = {}
    for name, part in known.items():
        left = part
        if name in gone:
            deeper = isinstance(part, dict) and isinstance(gone[name], dict) and gone[name]
            left = _without(part, gone[name]) if deeper else None
        if left or name not in gone:
            result[name] = left
    return result


def _without_version(thing: Object) -> Object:
    return {**thing, "metadata": {**thing["metadata"], "resourceVersion": "", "uid": ""}}


def _selected(thing: Object, parameters: dict[str, str]) -> bool:
    labels = thing["metadata"].get("labels") or {}
    by_label, by_field = (
        [part.partition("=") for part in parameters.get(f"{what}Selector", "").split(",") if part]
        for what in ("label", "field")
    )
    return all(labels.get(name) == value for name, _, value in by_label) and all(
        _field(thing, path) == value for path, _, value in by_field
    )


def _field(thing: Object, path: str) -> str:
    """What a field selector sees: the text of a field, empty for none."""
    found: Any = thing
    for name in path.split("."):
        found = found.get(name) or {}
    return str(found or "")
