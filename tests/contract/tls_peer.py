"""A TLS server with scripted responses, byte by byte, as a double of the API server."""

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from cluster.pki import Authority
from waiting import until

from accelplane.apiserver import ApiServer, ClientConfig

TOKEN = "a.service-account.token"  # noqa: S105 - of no account

Answer = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


class Request:
    """The request of the client."""

    def __init__(self, head: str, body: bytes) -> None:
        first, *lines = head.split("\r\n")
        self.method, self.path, self.version = first.split(" ")
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        self.body = body


class Peer:
    """A running server: the requests it got, and a client that trusts it."""

    def __init__(self, config: ClientConfig, directory: Path) -> None:
        self.config = config
        self.api = ApiServer(config)
        self.directory = directory
        self.requests: list[Request] = []


def response(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join((*lines, "", "")).encode() + body


def respond_with(*parts: bytes) -> Answer:
    """Responds with these bytes and closes the connection."""

    async def answer(_request: Request, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


def document(value: object, status: str = "200 OK") -> Answer:
    return respond_with(response(status, json.dumps(value).encode()))


def chunked(*chunks: bytes, end: bool = True) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + (b"0\r\n\r\n" if end else b"")


@contextlib.asynccontextmanager
async def serving(
    directory: Path, answer: Answer, *, name: str = "127.0.0.1", address: str = "127.0.0.1"
) -> AsyncGenerator[Peer]:
    """Serves at `address` with a certificate for `name`; at the end all connections are closed."""
    before = _sockets()
    authority = Authority("test authority")
    pair = authority.server("test server", name)
    (directory / "pair.pem").write_bytes(pair.certificate + pair.key)
    (directory / "ca.crt").write_bytes(authority.credentials.certificate)
    (directory / "token").write_text(TOKEN + "\n")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / "pair.pem")
    requests: list[Request] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            request = Request(head, b"")
            request.body = await reader.readexactly(int(request.headers.get("content-length", "0")))
            requests.append(request)
            await answer(request, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, address, 0, ssl=context)
    host, port = server.sockets[0].getsockname()[:2]
    server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    authority_file, token_file = str(directory / "ca.crt"), str(directory / "token")
    config = ClientConfig(server=f"https://{server_address}", authority=authority_file, token=token_file)
    peer = Peer(config, directory)
    peer.requests = requests
    try:
        yield peer
    finally:
        peer.api.close()
        server.close()
        await server.wait_closed()
        await until(lambda: _sockets() <= before)


def _sockets() -> set[str]:
    """The Internet sockets of this process, by the kernel's names for them.

    Unix sockets do not count: those of gRPC, which an embedded kubelet uses, stay open until garbage is collected.
    """
    unix = {f"socket:[{line.split()[6]}]" for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    found: set[str] = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {name for name in found - unix if name.startswith("socket:")}
