"""A proxy in front of a real API server that injects faults of networks and busy servers.

It serves plain HTTP and connects to the server with TLS. It reads each request and each response completely before it
forwards it, except for watches: their lines are forwarded immediately. The present watches can be aborted, ended in the
middle of a line, or paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig

from accelplane.kube.testing import Fault, RecordedRequest

_REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}


class FaultyProxy:
    """The proxy. `requests` are the received requests, `faults` apply to future requests."""

    def __init__(self, kubeconfig: Path) -> None:
        config = KubeConfig.from_file(kubeconfig).get()
        assert config
        self.requests: list[RecordedRequest] = []
        self.faults: list[Fault] = []
        self.url = ""
        self._server: asyncio.Server | None = None
        self._upstream = AsyncClient(config, ConnectionParams(timeout=httpx2.Timeout(None)))
        self._watches: dict[asyncio.StreamWriter, bool] = {}
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._upstream.aclose()

    # Faults

    def fault(self, pattern: str, status: int = 0, **more: object) -> Fault:
        self.faults.append(result := Fault(pattern, status, **more))  # pyright: ignore[reportArgumentType]
        return result

    def kill_watches(self) -> None:
        for writer in self._watches:
            writer.transport.abort()

    def end_watches(self, rest: bytes = b"") -> None:
        """Ends every watch as the server would, after these last bytes."""
        for writer in self._watches:
            writer.write((_chunk(rest) if rest else b"") + b"0\r\n\r\n")
            writer.close()

    def pause_watches(self) -> None:
        """Stops sending events to the present watches."""
        self._watches = dict.fromkeys(self._watches, True)

    def send_line(self, line: bytes) -> None:
        """Sends a line with any content to every watch."""
        for writer in self._watches:
            writer.write(_chunk(line + b"\n"))

    def count(self, pattern: str) -> int:
        """The number of requests that match."""
        return sum(1 for request in self.requests if re.search(pattern, str(request)))

    @property
    def watches(self) -> int:
        return len(self._watches)

    # Forwarding

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, EOFError, httpx2.HTTPError):
                while await self._one(reader, writer):
                    pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            self._watches.pop(writer, None)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        method, target, _ = first.split(" ")
        url = urlsplit(target)
        parameters = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        record = RecordedRequest(
            method, url.path, parameters, headers.get("content-type", ""), json.loads(body) if body else None
        )
        self.requests.append(record)
        kept = {name: headers[name] for name in ("content-type", "accept") if name in headers}
        request = self._upstream.build_request(method, target, content=body or None, headers=kept)
        fault = next((one for one in self.faults if one.hits(record)), None)
        if fault:
            return await self._apply_fault(fault, request, reader, writer)
        if record.watch:
            return await self._watch(request, reader, writer)
        answer = await self._upstream.send(request)
        _write(writer, answer.status_code, answer.content)
        return True

    async def _apply_fault(
        self, fault: Fault, request: httpx2.Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if fault.after:
            await self._upstream.send(request)
        fault.then()
        if fault.hang:
            # Until the client closes the connection.
            await reader.read()
        if fault.hang or not fault.status:
            writer.transport.abort()
            return False
        reason = _REASONS.get(fault.status, "")
        status = {"kind": "Status", "status": "Failure", "code": fault.status, "reason": reason, "message": "a fault"}
        _write(writer, fault.status, fault.body or json.dumps(status).encode(), fault.headers)
        return True

    async def _watch(self, request: httpx2.Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        answer = await self._upstream.send(request, stream=True)
        try:
            if not answer.is_success:
                _write(writer, answer.status_code, await answer.aread())
                return True
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
            self._watches[writer] = False
            telling = asyncio.create_task(self._send_events(answer, writer))
            # The only input of a watching client is the end of its connection.
            leaving = asyncio.create_task(reader.read())
            try:
                await asyncio.wait((telling, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (telling, leaving):
                    task.cancel()
                await asyncio.gather(telling, leaving, return_exceptions=True)
        finally:
            self._watches.pop(writer, None)
            await answer.aclose()
        return False

    async def _send_events(self, answer: httpx2.Response, writer: asyncio.StreamWriter) -> None:
        async for line in answer.aiter_lines():
            if not self._watches[writer]:
                writer.write(_chunk(line.encode() + b"\n"))
                await writer.drain()
        writer.write(b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def faulty_proxy(kubeconfig: Path) -> AsyncIterator[FaultyProxy]:
    """A proxy for the duration of the block, with the user of a kubeconfig file."""
    proxy = FaultyProxy(kubeconfig)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


def _write(writer: asyncio.StreamWriter, status: int, text: bytes, headers: dict[str, str] | None = None) -> None:
    lines = [f"HTTP/1.1 {status} Whatever", "Content-Type: application/json", f"Content-Length: {len(text)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + text)


def _chunk(text: bytes) -> bytes:
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"
