"""An admission server and its callers."""

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from typing import Any

from cluster.pki import Authority

from accelplane.admission.sgx import PATH, SgxOptions, mutator
from accelplane.http.messages import HttpLimits
from accelplane.http.servingtls import ServingTls
from accelplane.kube.admission import AdmissionServer, Hook

AUTHORITY = Authority("tests")
SERVER = AUTHORITY.server("localhost", "localhost")

POD = {
    "metadata": {"generateName": "p-", "namespace": "default"},
    "spec": {
        "containers": [
            {
                "name": "a",
                "resources": {"limits": {"sgx.intel.com/epc": "1Mi"}, "requests": {"sgx.intel.com/epc": "1Mi"}},
                "ofTomorrow": True,
            }
        ]
    },
}


def review(of: Any = POD, operation: str = "CREATE", **more: Any) -> bytes:
    request = {"uid": "u-1", "operation": operation, "namespace": "default", "object": of, "oldObject": None, **more}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def post(body: bytes, path: str = PATH, *fields: str, content_type: str = "application/json") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        *fields,
    ]
    return "\r\n".join((*lines, "", "")).encode() + body


class Reply:
    """A response with status, fields and body."""

    def __init__(self, head: str, body: bytes) -> None:
        first, *lines = head.split("\r\n")
        self.status = int(first.split(" ")[1])
        self.fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        self.body = body

    @property
    def response(self) -> dict[str, Any]:
        answered = json.loads(self.body)
        assert (answered["apiVersion"], answered["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        return answered["response"]

    @property
    def patch(self) -> Any:
        return json.loads(base64.b64decode(self.response["patch"]))


class Caller:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def reply(self) -> Reply:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
            return Reply(head, await self.reader.readexactly(length))

    async def ask(self, message: bytes) -> Reply:
        self.writer.write(message)
        return await self.reply()

    async def ended(self) -> bool:
        """Waits for the end of the connection; whether nothing came before it."""
        async with asyncio.timeout(10):
            try:
                return await self.reader.read() == b""
            except OSError:
                return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def client_context(authority: Authority, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.credentials.certificate.decode())
    context.maximum_version = newest
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


class Setup:
    """A server, and callers of it."""

    def __init__(self, server: AdmissionServer, port: int, *, secure: bool) -> None:
        self.server, self.port, self._secure = server, port, secure
        self.callers: list[Caller] = []

    async def caller(self, context: ssl.SSLContext | None = None) -> Caller:
        trusted = (context or client_context(AUTHORITY)) if self._secure else None
        name = "localhost" if self._secure else None
        caller = Caller(*await asyncio.open_connection("127.0.0.1", self.port, ssl=trusted, server_hostname=name))
        self.callers.append(caller)
        return caller

    async def ask(self, message: bytes) -> Reply:
        return await (await self.caller()).ask(message)


@contextlib.asynccontextmanager
async def setup(
    *hooks: Hook, limits: HttpLimits | None = None, tls: ServingTls | None = None, secure: bool = True
) -> AsyncGenerator[Setup]:
    server = AdmissionServer(hooks or [mutator(SgxOptions())], {"/healthz": lambda: (200, "ok\n")}, limits)
    if tls is None:
        tls = ServingTls()
        tls.use(SERVER.certificate, SERVER.key)
    port = await server.start("127.0.0.1", 0, tls.connection_context if secure else None)
    instance = Setup(server, port, secure=secure)
    try:
        yield instance
    finally:
        for caller in instance.callers:
            await caller.close()
        await server.stop(1)
