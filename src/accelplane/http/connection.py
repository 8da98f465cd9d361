"""One connection of an HTTP server: the order of its requests, responses and timeouts.

`RequestReader` reads the requests, `ServerTransport` has the bytes and their encryption, `Progress` the deadlines.
"""

import asyncio
import logging
import math
import ssl
from collections.abc import AsyncGenerator
from typing import Protocol

from accelplane.http.eviction import Candidate
from accelplane.http.handler import Handler, PendingResponse, await_response, call_handler
from accelplane.http.messages import Head, HttpError, HttpLimits, Request, Response, serialize_head
from accelplane.http.progress import Progress
from accelplane.http.requestreader import RequestReader
from accelplane.http.servertransport import ServerTransport
from accelplane.http.tls import ConnectionContext

log = logging.getLogger(__name__)

_V2 = logging.INFO - 2  # klog's -v=2, as `accelplane.logs.v`
_CHUNK = 64 * 1024
# A response is at most so many times as large as its request.
_RESPONSE_FACTOR = 4


class ConnectionOwner(Protocol):
    """What a connection needs of its server."""

    handler: Handler
    limits: HttpLimits
    recv_buffer: memoryview
    closing: bool
    draining: bool

    @property
    def under_pressure(self) -> bool:
        """Whether clients wait for connections of busy clients."""
        ...

    def count_progress(self) -> None:
        """Called when a connection without a complete request has received something."""
        ...

    def parse_head(self, text: bytes) -> Head:
        """Raises `HttpError`."""
        ...

    def reserve(self, connection: "Connection", size: int) -> bool:
        """Reserves memory for a request; otherwise `on_memory` is called when it is available."""
        ...

    def release(self, connection: "Connection", keep: int = 0) -> None:
        """Gives back what the connection has reserved but for `keep` bytes, and ends its wait for memory."""
        ...

    def buffer(self, connection: "Connection", size: int) -> bool:
        """Accounts for what is received without a reservation; returns False if that is too much."""
        ...

    def remove(self, connection: "Connection") -> None:
        """Called when the connection is closed."""
        ...

    def track(self, task: asyncio.Task[None]) -> None:
        """Called with a cancelled task that still runs."""
        ...


class Connection(asyncio.BufferedProtocol):
    """One client. Its requests are answered in order, one at a time."""

    def __init__(self, server: ConnectionOwner, context: ConnectionContext | None, source: bytes = b"") -> None:
        self._server = server
        self.source = source
        self._limits = server.limits
        self._encrypted = context is not None
        self._transport = ServerTransport(context)
        self._reader = RequestReader(server.parse_head, self._limits.head)
        self._progress = Progress(self._limits.idle if context is None else self._limits.handshake)
        self._unsent = memoryview(b"")
        self._head_only = False
        self._keep_alive = True
        self._response_task: asyncio.Task[None] | None = None
        self._streaming = False
        self._writable = asyncio.Event()
        self._waits_for_memory = False
        self._write_paused = False
        self._closing = False
        self._linger = 0.0
        self.reserved = 0
        self.buffered = 0
        self.has_requested = False

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport.attach(transport)
        if self._closing:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._cancel_response()
        self._release()
        self._server.remove(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """One buffer for all connections: `buffer_updated` consumes it before the next read."""
        return self._server.recv_buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._server.recv_buffer[:nbytes]
        if not self.has_requested:
            self._server.count_progress()
        if self._encrypted:
            data = self._decrypt(data)
        if self._closing or self._streaming or not data:
            return
        if not self._reader.started:
            self._progress.start(self._limits.request)
        self._reader.received += data
        self._progress.add(len(data))
        if self._response_task is not None:
            self._update_reading()
        self._process()

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._streaming:
            self._progress.start(self._limits.request)
        self._update_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._streaming:
            self._writable.set()
            self._progress.suspend_deadline()
        self._update_reading()
        self._send_rest()
        self._process()

    # Called by the server

    @property
    def path(self) -> str:
        """The path of the request that is received or answered, empty without one."""
        head = self._reader.head
        return head.path if head is not None else ""

    @property
    def deadline(self) -> float:
        """The time of `time.monotonic` after which the server calls `on_deadline`."""
        return self._progress.deadline

    def candidate(self) -> Candidate:
        """What decides whether the connection may be closed to admit others."""
        closing = self._closing and not self._unsent
        idle = not self._reader.started and not self._unsent
        since = self._progress.silent_since
        if not closing and (self._response_task is not None or not self._transport.attached):
            since = math.inf
        elif self.has_requested and idle:
            since = self._progress.started_at
        return Candidate(self.source, since, self.has_requested, idle, closing)

    def has_unread_data(self) -> bool:
        """Whether the kernel has data of the client that is not read yet."""
        return self._transport.has_unread_data

    def abort_disconnected(self) -> None:
        """Ends a pending response whose client has disconnected after a further request, which is not read."""
        if self._response_task is None or self._streaming or not self._reader.received:
            return
        if self._transport.disconnected:
            self.abort()

    def evict(self) -> None:
        """Closes the connection to admit others, with an error response if a request has begun."""
        if self._write_paused or self._transport.handshaking:
            self.abort()
        elif self._reader.started and not self._closing:
            self._send_error(HttpError(503, "closed for other clients: the request was not received in time"), linger=0)
        else:
            self._close()
        self._release()

    def on_memory(self) -> None:
        """Called when memory is reserved for a request that has waited for it."""
        self._waits_for_memory = False
        self._progress.start(self._limits.request)
        self._continue_request()
        self._update_reading()
        self._process()

    def on_deadline(self) -> None:
        """Ends the connection, with an error response if a request has begun."""
        if self._streaming:
            self.abort()
        elif self._response_task is not None and not self._closing:
            self._cancel_response()
            self._send_error(HttpError(503, f"no answer within {self._limits.answer_timeout:g} s"))
        elif self._waits_for_memory:
            self._send_error(HttpError(503, "too many large requests at once"))
        elif self._closing or self._unsent or self._write_paused or not self._reader.started:
            self.abort()
        else:
            self._send_error(HttpError(408, f"no complete request within {self._limits.request:g} s"))

    def close_when_idle(self) -> None:
        """Closes an idle connection and one with a stream now, any other one after its current response."""
        if self._streaming:
            self._cancel_response()
            self._close()
        if not self._closing and not self._reader.started and self._response_task is None and not self._unsent:
            self._close()

    def abort(self) -> None:
        self._closing = True
        self._cancel_response()
        self._unsent = memoryview(b"")
        self._transport.abort()

    # Requests

    def _update_reading(self) -> None:
        """Stops reading while a request waits for memory, its response cannot be sent, or another one follows it.

        While a response is pending, reading continues until the client sends more, so that a disconnect is detected
        immediately; afterwards `abort_disconnected` detects it. A client that only ends its sending direction has
        disconnected, too.
        """
        if self._transport.closing:
            return
        # A client whose connection is about to be closed may still send: what it sends is dropped.
        pipelined = self._response_task is not None and bool(self._reader.received)
        busy = not self._streaming and (self._write_paused or pipelined or self._waits_for_memory)
        if busy and not (self._closing and not self._unsent):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _process(self) -> None:
        """Answers every complete request."""
        try:
            while self._can_process() and (request := self._next_request()) is not None:
                self.has_requested = True
                response = call_handler(self._server.handler, request)
                if isinstance(response, Response) and response.stream is None:
                    self._send_response(response)
                else:
                    self._await(_completed(response) if isinstance(response, Response) else response, request)
            self._account()
        except HttpError as error:
            self._send_error(error)

    def _can_process(self) -> bool:
        busy = self._response_task is not None or self._waits_for_memory or self._write_paused or self._unsent
        return not busy and not self._closing

    def _next_request(self) -> Request | None:
        """The next request, None until it is complete. Raises `HttpError`."""
        head = self._reader.head or self._read_head()
        if head is None or self._waits_for_memory:
            return None
        body = self._reader.read_body(head.length)
        if body is None:
            return None
        return Request(
            head.method, head.path, head.content_type, body, head.authorization, head.query, head.fields,
            self.source, self._transport.certificate_name,
        )  # fmt: skip

    def _read_head(self) -> Head | None:
        """Reads the head of a request and reserves memory for its body. Raises `HttpError`."""
        self._head_only = False
        head = self._reader.read_head()
        if head is None:
            return None
        self._head_only = head.method == "HEAD"
        self._keep_alive = head.keep_alive
        if head.length <= len(self._reader.received):
            return head
        if self._server.reserve(self, head.length + min(_RESPONSE_FACTOR * head.length, self._limits.response)):
            self._continue_request()
        else:
            self._waits_for_memory = True
            self._progress.start(self._limits.wait)
            self._update_reading()
        return head

    def _continue_request(self) -> None:
        head = self._reader.head
        if head is not None and head.expects_continue:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _account(self) -> None:
        """Updates how much is received and not reserved. Raises `HttpError` if that is too much of all together."""
        size = 0 if self.reserved else len(self._reader.received)
        if size != self.buffered and not self._server.buffer(self, size):
            raise HttpError(503, "too many incomplete requests at once")

    def _release(self) -> None:
        """Gives back all memory of the request."""
        self._waits_for_memory = False
        self._reader.clear()
        self._server.buffer(self, 0)
        self._server.release(self)

    # Responses

    def _await(self, pending: PendingResponse, request: Request) -> None:
        task = self._response_task = asyncio.create_task(self._send_pending(pending, request))
        # A task that is cancelled before its first step never awaits the coroutine.
        task.add_done_callback(lambda _task: pending.close())
        self._progress.start(self._limits.answer_timeout)
        self._update_reading()

    async def _send_pending(self, pending: PendingResponse, request: Request) -> None:
        """Awaits and sends a response, then processes the requests received meanwhile."""
        response = await await_response(pending, request)
        if isinstance(response, Response) and response.stream is not None:
            await self._send_stream(response, response.stream)
            return
        self._response_task = None
        if isinstance(response, Response):
            self._send_response(response)
            self._update_reading()
            self._process()
        else:
            self._send_error(response)
            self._update_reading()

    async def _send_stream(self, response: Response, stream: AsyncGenerator[bytes, None]) -> None:
        """Sends the parts of a response as the client takes them, then closes the connection."""
        try:
            self._transport.write(serialize_head(response, keep_alive=False))
            if not self._head_only:
                self._streaming = True
                self._progress.suspend_deadline()
                self._update_reading()
                self._transport.write(bytes(response.body))
                async for part in stream:
                    self._transport.write(part)
                    await self._wait_writable()
        except Exception:
            log.exception("internal error in a streamed response")
        finally:
            await stream.aclose()
        self._response_task = None
        self._streaming = False
        self._reader.finish()
        self._progress.start(self._limits.request)
        self._close()

    async def _wait_writable(self) -> None:
        while self._write_paused:
            self._writable.clear()
            await self._writable.wait()

    def _cancel_response(self) -> None:
        if self._response_task is not None:
            self._response_task.cancel()
            self._server.track(self._response_task)
            self._response_task = None
            self._update_reading()

    def _send_response(self, response: Response) -> None:
        server = self._server
        keep_alive = self._keep_alive and not (server.closing or server.draining or server.under_pressure)
        self._reader.finish()
        self._closing = not keep_alive
        self._send(response)

    def _send_error(self, error: HttpError, *, linger: float | None = None) -> None:
        """Sends an error response and closes the connection later: an immediate close could discard the response."""
        self._closing = True
        self._reader.finish()
        self._release()
        self._linger = self._limits.linger if linger is None else linger
        self._send(Response(error.status, f"{error}\n".encode(), "text/plain; charset=utf-8", error.fields))
        self._update_reading()

    def _send(self, response: Response) -> None:
        self._progress.start(self._limits.request)
        head = serialize_head(response, keep_alive=not self._closing)
        body = b"" if self._head_only else response.body
        if len(body) <= _CHUNK:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._unsent = memoryview(body)
        self._send_rest()

    def _send_rest(self) -> None:
        """Sends as much of the response as the client takes, then ends the request."""
        while self._unsent and not self._write_paused:
            self._transport.write(self._unsent[:_CHUNK])
            self._progress.add(_CHUNK)
            self._unsent = self._unsent[_CHUNK:]
        if self.reserved or self._unsent:
            self._server.release(self, keep=len(self._unsent))
        if self._unsent:
            return
        if self._closing:
            self._end()
        elif not self._reader.started:
            self._progress.start(self._limits.idle)

    def _end(self) -> None:
        self._release()
        if self._linger:
            self._progress.start(self._linger + self._limits.request)
            asyncio.get_running_loop().call_later(self._linger, self._close)
            self._linger = 0.0
        else:
            self._close()

    # Bytes

    def _decrypt(self, data: memoryview) -> bytes | memoryview:
        """The plain text in `data`. Closes the connection after an error and after a close_notify alert."""
        handshake_done = self._transport.handshake_done
        try:
            plain = self._transport.decrypt(data)
        except ssl.SSLError as error:
            log.log(_V2, "connection closed: TLS error: %s", error.reason or error)
            self._close()
            return b""
        if self._transport.handshake_done and not handshake_done:
            self._progress.start(self._limits.idle)
        # A client that got an error response may still send its close_notify alert.
        if self._transport.eof and (self._closing or not plain):
            self._close()
        return plain

    def _close(self) -> None:
        """Closes the connection after the data written so far."""
        self._closing = True
        self._transport.close()


async def _completed(response: Response) -> Response:
    return response
