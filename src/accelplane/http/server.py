"""An HTTP/1.1 server for untrusted clients, with or without TLS, within limits of size, number and time.

Clients are the API server, probes, scrapers and everyone who can reach the port. The reasons for an implementation of
our own are in docs/decisions/0013-admission-over-own-http.md.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence

from accelplane.http.messages import END_OF_HEAD, Head, HttpError, HttpLimits, Request, Response, parse_head, serialize
from accelplane.http.tls import TlsSession

log = logging.getLogger(__name__)

_V2 = logging.INFO - 2  # klog's -v=2, as `accelplane.logs.v`
_RECV_BUFFER = 64 * 1024
_ANY_ADDRESS = ("::", "0.0.0.0")  # noqa: S104 - compared only
_INTERNAL_ERROR = "internal error; see the log"

PendingResponse = Coroutine[object, object, Response]
Handler = Callable[[Request], Response | PendingResponse]


class HttpServer:
    """Serves the responses of `handler`, which returns a response or a coroutine of one.

    The handler may raise `HttpError`; any other exception becomes a 500. Requests of other `methods` get a 405. The
    response to a HEAD request is sent without its body.
    """

    def __init__(
        self, handler: Handler, limits: HttpLimits | None = None, *, methods: Sequence[str] = ("POST", "GET")
    ) -> None:
        self.handler = handler
        self.limits = limits or HttpLimits()
        self.connections: set[_Connection] = set()
        self.recv_buffer = memoryview(bytearray(_RECV_BUFFER))
        self.buffered = 0
        self.closing = False
        self.cached_heads: dict[bytes, Head] = {}
        self._methods = methods
        self._servers: list[asyncio.Server] = []
        self._secure = False
        self._no_connections = asyncio.Event()
        self._sweep_timer: asyncio.TimerHandle | None = None
        timeouts = (self.limits.request, self.limits.idle, self.limits.handshake)
        self._sweep_interval = min(5.0, min(timeouts) / 2)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each listening socket."""
        return [each.getsockname()[:2] for server in self._servers for each in server.sockets]

    async def start(self, host: str | None, port: int, context: ssl.SSLContext | None = None) -> int:
        """Listens on all addresses of `host`, or on every address without one; uses TLS if `context` is given.

        Returns the port, which the kernel selects if it is 0. Raises `OSError`.
        """
        listening = _bind(host, port)
        self._secure = context is not None
        loop = asyncio.get_running_loop()
        try:
            for each in listening:
                server = await loop.create_server(
                    lambda: _Connection(self, context), sock=each, backlog=self.limits.backlog
                )
                self._servers.append(server)
        except BaseException:
            for server in self._servers:
                server.close()
            self._servers.clear()
            for each in listening:
                each.close()
            raise
        return self.addresses[0][1]

    async def accepts(self, within: float = 1.0) -> bool:
        """Whether a client can connect and complete a TLS handshake, tested by a connection to this server."""
        addresses = self.addresses
        if not addresses:
            return False
        host, port = addresses[0]
        context = _unverified_context() if self._secure else None
        try:
            async with asyncio.timeout(within):
                # 127.0.0.1 is served by the wildcard addresses, also where IPv6 is disabled.
                host = "127.0.0.1" if host in _ANY_ADDRESS else host
                _, writer = await asyncio.open_connection(host, port, ssl=context)
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return True

    async def stop(self, grace: float = 5.0) -> None:
        """Closes the listening sockets and idle connections; requests that have begun may complete within `grace`."""
        self.closing = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.close_when_idle()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._no_connections.wait()
        for connection in list(self.connections):
            connection.abort()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()

    def add(self, connection: "_Connection") -> bool:
        """Returns whether the connection is accepted. At the limit it replaces the one that waits longest."""
        if self.closing or (len(self.connections) >= self.limits.connections and not self._evict()):
            return False
        self.connections.add(connection)
        self._no_connections.clear()
        if self._sweep_timer is None:
            self._sweep()
        return True

    def _evict(self) -> bool:
        """Closes the connection that waits longest for its client; returns whether there is one."""
        waiting = [each for each in self.connections if each.waits_for_client]
        if not waiting:
            return False
        longest = min(waiting, key=lambda each: each.active_at)
        log.log(_V2, "%d connections: the one that waits longest for its client is closed", len(self.connections))
        self.connections.discard(longest)
        longest.abort()
        return True

    def remove(self, connection: "_Connection") -> None:
        """Called when a connection is closed."""
        self.connections.discard(connection)
        if not self.connections:
            self._no_connections.set()

    def parse_head(self, text: bytes) -> Head:
        """Parses a head, or returns it from the cache. Raises `HttpError`.

        Parsing takes about as long as an admission review, and the heads of one client differ in their length only.
        Long heads and credentials are not cached: clients could fill the memory, and passwords would stay in it.
        """
        head = self.cached_heads.get(text)
        if head is None:
            head = parse_head(text, self.limits, self._methods)
            if self.limits.cached_heads and len(text) <= self.limits.cached_head and not head.authorization:
                if len(self.cached_heads) >= self.limits.cached_heads:
                    del self.cached_heads[next(iter(self.cached_heads))]
                self.cached_heads[text] = head
        return head

    def _sweep(self) -> None:
        """Ends connections whose deadline has passed. One timer for all, and none without connections."""
        now = time.monotonic()
        for connection in [each for each in self.connections if each.deadline < now]:
            connection.on_deadline()
        loop = asyncio.get_running_loop()
        self._sweep_timer = loop.call_later(self._sweep_interval, self._sweep) if self.connections else None


def split_address(address: str) -> tuple[str | None, int]:
    """Host and port of `host:port` as in Go; an empty host means every address. Raises `ValueError`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {address!a}: expected host:port, for example :8080")
    return host.removeprefix("[").removesuffix("]") or None, int(port)


def _bind(host: str | None, port: int) -> list[socket.socket]:
    """Bound sockets for each address of `host`; one for IPv4 and IPv6 without a host. Raises `OSError`."""
    if not host:
        return [_bind_any(port)]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    problem: OSError | None = None
    for family, address in dict.fromkeys((each[0], str(each[4][0])) for each in found):
        try:
            bound.append(socket.create_server((address, port), family=family))
        except OSError as error:
            problem = problem or error
        else:
            port = port or bound[0].getsockname()[1]
    if problem is not None and not bound:
        raise problem
    return bound


def _bind_any(port: int) -> socket.socket:
    """Raises `OSError`."""
    if socket.has_dualstack_ipv6():
        # The kernel may support IPv6 while it is disabled for all interfaces.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _unverified_context() -> ssl.SSLContext:
    """Accepts any certificate: the client connects to its own process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class _Connection(asyncio.BufferedProtocol):
    """One client. Its requests are answered in order, one at a time."""

    def __init__(self, server: HttpServer, context: ssl.SSLContext | None) -> None:
        self._server = server
        self._limits = server.limits
        self._tls = None if context is None else TlsSession(context)
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._head: Head | None = None
        self._head_only = False
        self._response_task: asyncio.Task[None] | None = None
        self._buffered = 0
        self._write_paused = False
        self._closing = False
        self._set_deadline(self._limits.idle if context is None else self._limits.handshake)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport) or not self._server.add(self):
            transport.close()
            self._closing = True
            return
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._cancel_response()
        self._account(0)
        self._server.remove(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """One buffer for all connections: `buffer_updated` consumes it before the next read."""
        return self._server.recv_buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._server.recv_buffer[:nbytes]
        if self._tls is not None:
            data = self._decrypt(self._tls, data)
        if self._closing or not data:
            return
        if not self._received and self._head is None and self._response_task is None:
            self._set_deadline(self._limits.request)
        self._received += data
        self._process()

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing happens before the client sends or receives data."""
        return self._response_task is None

    def _set_deadline(self, timeout: float) -> None:
        self.active_at = time.monotonic()
        self.deadline = self.active_at + timeout

    def _decrypt(self, tls: TlsSession, data: memoryview) -> bytes:
        """The plain text in `data`. Continues the handshake and answers a close_notify alert."""
        handshake_done = tls.handshake_done
        try:
            plain = tls.decrypt(data)
        except ssl.SSLError as error:
            log.log(_V2, "connection closed: TLS error: %s", error.reason or error)
            self._flush(tls)
            self._close()
            return b""
        if tls.handshake_done and not handshake_done:
            self._set_deadline(self._limits.idle)
        self._flush(tls)
        # A client that got an error response may still send its close_notify alert.
        if tls.eof and (self._closing or not plain):
            self._close()
        return plain

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._tls is None:
            self._transport.write(data)
        else:
            self._tls.encrypt(data)
            self._flush(self._tls)

    def _flush(self, tls: TlsSession) -> None:
        if self._transport is not None and (records := tls.outgoing()):
            self._transport.write(records)

    def _close(self) -> None:
        """Closes the connection after the data written so far."""
        self._closing = True
        if self._transport is None or self._transport.is_closing():
            return
        if self._tls is not None:
            self._tls.close()
            self._flush(self._tls)
        self._transport.close()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._set_deadline(self._limits.request)
        self._update_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._update_reading()
        self._process()

    def _update_reading(self) -> None:
        """Stops reading while a response is computed or cannot be sent."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._write_paused or self._response_task is not None:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def on_deadline(self) -> None:
        """Ends the connection, with an error response if a request has begun."""
        if self._response_task is not None and not self._closing:
            self._cancel_response()
            self._send_error(HttpError(503, f"no answer within {self._limits.request:g} s"))
        elif self._closing or self._write_paused or not (self._received or self._head):
            self.abort()
        else:
            self._send_error(HttpError(408, f"no complete request within {self._limits.request:g} s"))

    def close_when_idle(self) -> None:
        """Closes an idle connection now, any other one after its current response."""
        if not self._closing and not self._received and self._head is None and self._response_task is None:
            self._close()

    def abort(self) -> None:
        self._closing = True
        self._cancel_response()
        if self._transport is not None:
            self._transport.abort()

    def _process(self) -> None:
        """Answers every complete request."""
        try:
            while self._response_task is None and not self._closing and not self._write_paused:
                if (request := self._next_request()) is None:
                    break
                keep_alive = self._head is not None and self._head.keep_alive
                self._head = None
                response = _call(self._server.handler, request)
                if isinstance(response, Response):
                    self._send_response(response, keep_alive)
                else:
                    task = self._response_task = asyncio.create_task(self._send_pending(response, request, keep_alive))
                    # A task that is cancelled before its first step never awaits the coroutine.
                    task.add_done_callback(lambda _task, pending=response: pending.close())
                    self._set_deadline(self._limits.request)
                    self._update_reading()
            self._account(len(self._received))
        except HttpError as error:
            self._send_error(error)

    def _send_response(self, response: Response, keep_alive: bool) -> None:
        self._send(response, keep_alive=keep_alive and not self._server.closing)
        self._set_deadline(self._limits.request if self._received else self._limits.idle)

    async def _send_pending(self, pending: PendingResponse, request: Request, keep_alive: bool) -> None:
        """Awaits and sends a response, then processes the requests received meanwhile."""
        response = await _await_response(pending, request)
        self._response_task = None
        self._update_reading()
        if isinstance(response, Response):
            self._send_response(response, keep_alive)
            self._process()
        else:
            self._send_error(response)

    def _cancel_response(self) -> None:
        if self._response_task is not None:
            self._response_task.cancel()
            self._response_task = None
            self._update_reading()

    def _next_request(self) -> Request | None:
        """The next request, None until it is complete. Raises `HttpError`."""
        if self._head is None:
            self._head_only = False
            end = self._received.find(END_OF_HEAD, 0, self._limits.head + len(END_OF_HEAD))
            if end < 0:
                if len(self._received) > self._limits.head:
                    raise HttpError(431, f"expected a head of at most {self._limits.head} bytes")
                return None
            head = self._server.parse_head(bytes(self._received[:end]))
            if head.expects_continue and len(self._received) < end + len(END_OF_HEAD) + head.length:
                self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
            del self._received[: end + len(END_OF_HEAD)]
            self._head = head
            self._head_only = head.method == "HEAD"
        head = self._head
        if len(self._received) < head.length:
            return None
        if len(self._received) == head.length:
            body, self._received = self._received, bytearray()  # not copied: it may be most of the process's memory
        else:
            body = self._received[: head.length]
            del self._received[: head.length]
        return Request(head.method, head.path, head.content_type, body, head.authorization)

    def _account(self, buffered: int) -> None:
        """Updates the server's count of buffered bytes. Raises `HttpError` when it exceeds the limit."""
        self._server.buffered += buffered - self._buffered
        self._buffered = buffered
        if buffered and self._server.buffered > self._limits.buffered:
            raise HttpError(503, "too many large requests at once")

    def _send_error(self, error: HttpError) -> None:
        """Sends an error response and closes the connection later: an immediate close could discard the response."""
        response = Response(error.status, f"{error}\n".encode(), "text/plain; charset=utf-8")
        self._send(response, keep_alive=False, linger=True)

    def _send(self, response: Response, *, keep_alive: bool, linger: bool = False) -> None:
        self._write(serialize(response, keep_alive=keep_alive, head_only=self._head_only))
        if keep_alive:
            return
        self._closing = True
        self._received.clear()
        self._account(0)
        if linger:
            self._set_deadline(self._limits.linger + self._limits.request)
            asyncio.get_running_loop().call_later(self._limits.linger, self._close)
        else:
            self._close()


def _call(handler: Handler, request: Request) -> Response | PendingResponse:
    """Raises `HttpError`."""
    try:
        return handler(request)
    except HttpError:
        raise
    except Exception:
        log.exception("%s %s: internal error", request.method, request.path)
        raise HttpError(500, _INTERNAL_ERROR) from None


async def _await_response(pending: PendingResponse, request: Request) -> Response | HttpError:
    try:
        return await pending
    except HttpError as error:
        return error
    except Exception:
        log.exception("%s %s: internal error", request.method, request.path)
        return HttpError(500, _INTERNAL_ERROR)
