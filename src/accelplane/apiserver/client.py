"""The API server as a pod sees it, for processes that ask it once in a while: one connection for each request.

A client of more comfort costs a node process ten times the memory. This one stands on asyncio alone, whose streams
have TLS already (`http.client` would bring the mail package along), so that whatever an answer does, however slowly it
comes, a deadline ends it. Requests have one body and no redirects are followed; answers are JSON, of limited size,
decoded into the type that the caller names.

Facts: Kubernetes API concepts (Status, watch, patch media types), RFC 9112 (message framing). A pod finds the server in
`KUBERNETES_SERVICE_HOST` and `_PORT`, and its token and certificate authority in files that are replaced while it
runs, so they are read for each request.
"""

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from accelplane.apiserver.errors import NoCredentials, StatusError, Unreachable, status_error

if TYPE_CHECKING:
    import ssl

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"  # which JSON is, too

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

# etcd takes no object above 1.5 MiB; lists are not what this is for.
MAX_ANSWER = 4 * 1024 * 1024
DEADLINE = 15.0

_MAX_LINE = 16 * 1024
_MAX_HEADERS = 100
_MAX_CREDENTIAL = 1024 * 1024
_PIECE = 64 * 1024

T = TypeVar("T")

# A file's path, or what is in it.
Source: TypeAlias = str | bytes


class Event(msgspec.Struct, Generic[T], frozen=True):
    """One event of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: T


class _Wrapped(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Request(msgspec.Struct, frozen=True):
    method: str
    path: str
    body: bytes | None = None
    content_type: str = ""


class _Head(msgspec.Struct, frozen=True):
    status: int
    phrase: str
    headers: Mapping[str, str]


def without_account(environment: Mapping[str, str] | None = None, directory: str = SERVICE_ACCOUNT) -> bool:
    """Whether this is a pod that is to ask the server nothing (`automountServiceAccountToken: false`)."""
    variables = os.environ if environment is None else environment
    return bool(variables.get("KUBERNETES_SERVICE_HOST")) and not os.path.isdir(directory)


class ApiServer:
    """Where the server is, and who asks. The files are read anew for each request."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        authority: Source,
        token_file: Source | None = None,
        certificate: tuple[Source, Source] | None = None,
    ) -> None:
        """Who asks has a bearer token, or a certificate with its key; `authority` and these two are PEM."""
        self.host = host
        self.port = port
        self._authority = authority
        self._token_file = token_file
        self._certificate = certificate

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str] | None = None, directory: str = SERVICE_ACCOUNT) -> "ApiServer":
        """The one of the cluster that this pod is in. Raises `NoCredentials`."""
        variables = os.environ if environment is None else environment
        host, port = variables.get("KUBERNETES_SERVICE_HOST", ""), variables.get("KUBERNETES_SERVICE_PORT", "")
        if not host or not port:
            raise NoCredentials(
                "not in a cluster",
                "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not both set; "
                "expected to run in a pod with a service account",
            )
        if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536):
            raise NoCredentials("KUBERNETES_SERVICE_PORT", f"{port[:40]!a}, expected a port")
        if not host.isascii() or any(character.isspace() or character in "/@?#[]" for character in host):
            raise NoCredentials("KUBERNETES_SERVICE_HOST", f"{host[:80]!a}, expected a name or an address")
        return cls(host, int(port), authority=f"{directory}/ca.crt", token_file=f"{directory}/token")

    @property
    def address(self) -> str:
        """`host:port` as a URL has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def get(self, path: str, answer: type[T], *, deadline: float = DEADLINE, limit: int = MAX_ANSWER) -> T:
        """The object at `path`. Raises `ApiError`."""
        return await self._ask(_Request("GET", path), answer, deadline, limit)

    async def patch(
        self,
        path: str,
        body: object,
        content_type: str,
        answer: type[T],
        *,
        query: Mapping[str, str] | None = None,
        deadline: float = DEADLINE,
        limit: int = MAX_ANSWER,
    ) -> T:
        """Changes the object at `path` and returns it as it is then. Raises `ApiError`."""
        request = _Request("PATCH", _with(path, query), msgspec.json.encode(body), content_type)
        return await self._ask(request, answer, deadline, limit)

    async def delete(self, path: str, *, deadline: float = DEADLINE) -> None:
        """Removes the object at `path`. Raises `ApiError`."""
        await self._ask(_Request("DELETE", path), msgspec.Raw, deadline, MAX_ANSWER)

    async def watch(
        self,
        path: str,
        kind: type[T],
        *,
        query: Mapping[str, str] | None = None,
        resource_version: str = "",
        seconds: float = 300.0,
        limit: int = MAX_ANSWER,
    ) -> AsyncGenerator[Event[T], None]:
        """The changes of the objects at `path`, for `seconds`; close it (`contextlib.aclosing`) when leaving early.

        Raises `Gone` when the changes since `resource_version` are forgotten, else `ApiError`. An event with more than
        `limit` bytes is an error.
        """
        asked = {**(query or {}), "watch": "true", "timeoutSeconds": str(max(1, round(seconds)))}
        if resource_version:
            asked["resourceVersion"] = resource_version
        request = _Request("GET", _with(path, asked))
        name, message = self._named(request), self._message(request)
        # The server ends it in time; one that does not is left.
        end = asyncio.get_running_loop().time() + seconds
        async with _connected(self, name, DEADLINE) as (reader, writer):
            async with _in_time(name, DEADLINE):
                head = await _exchange(reader, writer, message, name)
                if head.status != 200:
                    raise _status_error(name, head, await _body(reader, head, name, MAX_ANSWER))
            async with contextlib.aclosing(_lines(reader, head, name, limit, end)) as lines:
                async for line in lines:
                    yield _event(name, line, kind)

    async def _ask(self, request: _Request, answer: type[T], deadline: float, limit: int) -> T:
        name, message = self._named(request), self._message(request)
        async with _in_time(name, deadline), _connected(self, name, deadline) as (reader, writer):
            head = await _exchange(reader, writer, message, name)
            content = await _body(reader, head, name, limit)
        if not 200 <= head.status < 300:
            raise _status_error(name, head, content)
        try:
            return msgspec.json.decode(content, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Unreachable(name, f"{head.status} with an answer that is not understood: {error}") from None

    def _named(self, request: _Request) -> str:
        return f"{request.method} https://{self.address}{request.path.partition('?')[0]}"

    def _message(self, request: _Request) -> bytes:
        """The request as it goes over the wire. Raises `NoCredentials`."""
        lines = [
            f"{request.method} {request.path} HTTP/1.1",
            f"Host: {self.address}",
            "Accept: application/json",
            "User-Agent: accelplane",
            "Connection: close",
        ]
        if self._token_file is not None:
            lines.append(f"Authorization: Bearer {_token(self._token_file)}")
        if request.body is not None:
            lines += [f"Content-Type: {request.content_type}", f"Content-Length: {len(request.body)}"]
        return "\r\n".join((*lines, "", "")).encode("ascii") + (request.body or b"")

    def context(self) -> "ssl.SSLContext":
        """TLS that trusts the cluster's own authority and nobody else. Raises `NoCredentials`."""
        import ssl  # noqa: PLC0415 - imported by asyncio already, but not by everyone who imports this

        authority = _content(self._authority)
        try:
            # Not create_default_context: that trusts the whole world where the file is empty.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=authority.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise NoCredentials(_named(self._authority), f"no certificates in PEM: {error}") from None
        if self._certificate is not None:
            _identify(context, *self._certificate)
        # Clusters live for years with authorities whose certificates lack what Python 3.13 began to ask for.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


def object_path(base: str, name: str) -> str:
    """The path of the object `name` in the collection `base`, whatever characters the name has."""
    return f"{base}/{quote(name, safe='')}"


def _token(source: Source) -> str:
    token = _content(source).strip()
    text = token.decode("ascii", "replace")
    if not text or " " in text or not text.isascii() or not text.isprintable():
        raise NoCredentials(_named(source), f"{len(token)} bytes that are no token, expected a service account's")
    return text


def _identify(context: "ssl.SSLContext", certificate: Source, key: Source) -> None:
    """Has TLS tell who asks. Raises `NoCredentials`."""
    both = b"%s\n%s" % (_content(certificate), _content(key))
    # OpenSSL takes them from files only, and a key that is in none should not get into one.
    with open(os.memfd_create("key"), "w+b") as file:
        file.write(both)
        file.flush()
        try:
            # An empty password, or it would ask the terminal for that of a key that has one.
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")
        except OSError as error:  # ssl.SSLError is one
            problem = getattr(error, "reason", None) or error
            named = f"{_named(certificate)} and {_named(key)}"
            raise NoCredentials(named, f"no certificate with its key in PEM: {problem}") from None


def _with(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path


@contextlib.asynccontextmanager
async def _connected(
    server: ApiServer, request: str, deadline: float
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is gone afterwards. What goes wrong in it is `Unreachable`."""
    context = server.context()
    writer: asyncio.StreamWriter | None = None
    try:
        async with _in_time(request, deadline):
            reader, writer = await asyncio.open_connection(
                server.host, server.port, ssl=context, server_hostname=server.host, limit=_MAX_LINE
            )
        yield reader, writer
    except OSError as error:  # also of TLS; a deadline that passed is another matter
        if isinstance(error, TimeoutError):
            raise
        raise Unreachable(request, str(error.strerror or error)) from None
    except UnicodeError as error:  # a name that DNS cannot have
        raise Unreachable(request, str(error)) from None
    finally:
        if writer is not None:
            # Nothing is left to be said, and who does not answer would hold an orderly end.
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def _in_time(request: str, deadline: float) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(deadline):
            yield
    except TimeoutError:
        raise Unreachable(request, f"no complete answer within {deadline:g} s") from None


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes, request: str) -> _Head:
    writer.write(message)
    await writer.drain()
    while True:
        head = await _read_head(reader, request)
        if head.status >= 200:
            return head


async def _read_head(reader: asyncio.StreamReader, request: str) -> _Head:
    first = await _line(reader, request)
    version, _, rest = first.partition(" ")
    code, _, phrase = rest.partition(" ")
    if not version.startswith("HTTP/1.") or len(code) != 3 or not code.isdecimal() or not code.isascii():
        raise Unreachable(request, f"answered {first[:60]!a}, expected HTTP/1.1")
    headers: dict[str, str] = {}
    while line := await _line(reader, request):
        name, colon, value = line.partition(":")
        if not colon or len(headers) >= _MAX_HEADERS:
            raise Unreachable(request, f"headers that are not understood: {line[:60]!a}")
        headers[name.strip().lower()] = value.strip()
    return _Head(int(code), phrase, headers)


async def _line(reader: asyncio.StreamReader, request: str) -> str:
    try:
        return (await reader.readuntil(b"\n")).decode("latin-1").rstrip("\r\n")
    except asyncio.IncompleteReadError as error:
        told = f" behind {len(error.partial)} bytes of a line" if error.partial else ""
        raise Unreachable(request, f"the connection ended early{told}") from None
    except asyncio.LimitOverrunError:
        raise Unreachable(request, f"a line of more than {_MAX_LINE} bytes") from None


async def _body(reader: asyncio.StreamReader, head: _Head, request: str, limit: int) -> bytes:
    content = bytearray()
    async with contextlib.aclosing(_pieces(reader, head, request)) as pieces:
        async for piece in pieces:
            content += piece
            if len(content) > limit:
                raise Unreachable(request, f"an answer of more than {limit} bytes")
    return bytes(content)


async def _pieces(reader: asyncio.StreamReader, head: _Head, request: str) -> AsyncGenerator[bytes, None]:
    """The body as it comes. Raises `Unreachable` when it ends before its end."""
    if head.status in (204, 304):
        return
    if "chunked" in head.headers.get("transfer-encoding", "").lower():
        while size := _chunk_size(await _line(reader, request), request):
            async with contextlib.aclosing(_exactly(reader, size, request)) as pieces:
                async for piece in pieces:
                    yield piece
            if await _line(reader, request):
                raise Unreachable(request, "a chunk that does not end where it should")
        return
    length = head.headers.get("content-length")
    if length is None:
        while piece := await reader.read(_PIECE):
            yield piece
        return
    if not (length.isascii() and length.isdecimal()) or len(length) > 15:
        raise Unreachable(request, f"Content-Length {length[:40]!a}, expected a number")
    async with contextlib.aclosing(_exactly(reader, int(length), request)) as pieces:
        async for piece in pieces:
            yield piece


def _chunk_size(line: str, request: str) -> int:
    size = line.partition(";")[0].strip()
    if not size or len(size) > 12 or any(character not in "0123456789abcdefABCDEF" for character in size):
        raise Unreachable(request, f"a chunk of size {line[:40]!a}, expected a hexadecimal number")
    return int(size, 16)


async def _exactly(reader: asyncio.StreamReader, size: int, request: str) -> AsyncGenerator[bytes, None]:
    while size:
        piece = await reader.read(min(size, _PIECE))
        if not piece:
            raise Unreachable(request, f"the connection ended {size} bytes early")
        size -= len(piece)
        yield piece


async def _lines(
    reader: asyncio.StreamReader, head: _Head, request: str, limit: int, end: float
) -> AsyncGenerator[bytes, None]:
    """The lines of a body until `end` (of the loop's clock) or its own."""
    waiting = bytearray()
    pieces = _pieces(reader, head, request)
    try:
        while True:
            try:
                async with asyncio.timeout_at(end):
                    piece = await anext(pieces)
            except TimeoutError:
                return
            except StopAsyncIteration:
                if waiting.strip():
                    yield bytes(waiting)
                return
            searched = len(waiting)
            waiting += piece
            while (newline := waiting.find(b"\n", searched)) >= 0:
                line = bytes(waiting[:newline])
                del waiting[: newline + 1]
                searched = 0
                if line.strip():
                    yield line
            if len(waiting) > limit:
                raise Unreachable(request, f"an event of more than {limit} bytes")
    finally:
        await pieces.aclose()


def _event(request: str, line: bytes, kind: type[T]) -> Event[T]:
    """Raises `Gone`, `StatusError` or `Unreachable`."""
    try:
        wrapped = msgspec.json.decode(line, type=_Wrapped)
        if wrapped.type == "ERROR":
            raise status_error(request, 0, wrapped.object)
        if wrapped.type not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
            raise Unreachable(request, f"an event of type {wrapped.type[:40]!a}")
        return Event(wrapped.type, msgspec.json.decode(wrapped.object, type=kind))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreachable(request, f"an event that is not understood: {error}") from None


def _status_error(request: str, head: _Head, content: bytes) -> StatusError:
    phrase, retry_after = head.phrase, head.headers.get("retry-after", "")
    return status_error(request, head.status, content, phrase=phrase, retry_after=retry_after)


def _named(source: Source) -> str:
    return source if isinstance(source, str) else "(given inline)"


def _content(source: Source) -> bytes:
    return _read(source) if isinstance(source, str) else source


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise NoCredentials(path, "not a regular file, expected a service account's")
            data = file.read(_MAX_CREDENTIAL + 1)
    except OSError as error:
        raise NoCredentials(path, f"{error.strerror}; expected a pod with a service account") from None
    if len(data) > _MAX_CREDENTIAL:
        raise NoCredentials(path, f"more than {_MAX_CREDENTIAL} bytes")
    return data
