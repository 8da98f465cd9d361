"""A call on the server: collects the request, runs the handler in a task, sends responses and the status."""

import asyncio
import logging
from collections.abc import Callable

from accelplane.rpc import frames
from accelplane.rpc.connection import Connection
from accelplane.rpc.errors import Code, RpcError
from accelplane.rpc.frames import END_HEADERS, END_STREAM, HEADERS
from accelplane.rpc.headers import EMPTY_TABLE, Rejection, literal, status_fields
from accelplane.rpc.messages import MAX_MESSAGE, frame_message
from accelplane.rpc.methods import Method
from accelplane.rpc.stream import Stream

log = logging.getLogger(__name__)

TrackTask = Callable[[asyncio.Task[None]], None]

# The limit on requests and responses of a connection's unfinished calls in memory; a call that exceeds it fails.
_MAX_BUFFERED = 16 * 1024 * 1024

_CONTENT_TYPE = literal(b"content-type", b"application/grpc")
_RESPONSE_HEADERS = EMPTY_TABLE + literal(b":status", b"200") + _CONTENT_TYPE
_OK = literal(b"grpc-status", b"0")


class Call(Stream):
    """A call of `method`, whose deadline is in the event loop's time. `track` gets a cancelled task that still runs."""

    __slots__ = (
        *("_connection", "_track", "_method", "_deadline", "_request", "_task", "_timer", "_sent_waiter"),
        *("_headers_sent", "_finished", "_closed"),
    )

    def __init__(
        self, connection: "Connection[Call]", track: TrackTask, stream_id: int, method: Method, deadline: float | None
    ) -> None:
        super().__init__(stream_id, connection.initial_window, MAX_MESSAGE)
        self._connection = connection
        self._track = track
        self._method = method
        self._deadline = deadline
        self._request: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent_waiter: asyncio.Future[None] | None = None  # done when nothing is unsent
        self._headers_sent = False
        self._finished = False  # trailers are sent, or follow the unsent data
        self._closed = False

    @property
    def buffered_bytes(self) -> int:
        return super().buffered_bytes + len(self._request or b"")

    def on_messages(self, messages: list[bytes]) -> None:
        for message in messages:
            if self._request is not None:
                self.fail(RpcError("INTERNAL", "more than one message in the request"))
                return
            self._request = message
        if self.remote_ended:
            self._start()
        elif self.buffered_bytes > frames.DEFAULT_WINDOW and self._connection.buffered_bytes() > _MAX_BUFFERED:
            self.fail(_buffer_limit_exceeded())

    def on_sent(self) -> None:
        if self._sent_waiter is not None and not self._sent_waiter.done():
            self._sent_waiter.set_result(None)
        if self._finished:
            self._close()

    def fail(self, error: RpcError) -> None:
        """Ends the call with a status, unless it has ended."""
        if self._closed or self._finished:
            return
        if self.unsent:  # the client would read a status as the rest of a message
            self._connection.reset_stream(self.id, Code.CANCEL)
            return
        self._connection.outbox.write(self._status(error))
        if not self.remote_ended:
            self._connection.outbox.write(frames.rst_stream(self.id, Code.NO_ERROR))  # the client can stop sending
        self._close()

    def on_closed(self, error: RpcError) -> None:
        self._closed = True
        self._cancel_task()

    def begin_shutdown(self, reason: str) -> None:
        """The server stops: ends a streaming call and an incomplete request. Another call may still finish."""
        if self._task is not None and not self._method.streams:
            return
        error = RpcError("UNAVAILABLE", reason)
        if self.unsent and not self._finished:
            self.trailing_frames = self._status(error)
            self._finished = True
        else:
            self.fail(error)
        self._cancel_task()

    def _start(self) -> None:
        if self.reader.pending:
            self.fail(RpcError("INTERNAL", "the stream ended within a message"))
        elif self._request is None:
            self.fail(RpcError("INVALID_ARGUMENT", "no message in the request"))
        else:
            loop = asyncio.get_running_loop()
            if self._deadline is not None:
                self._timer = loop.call_at(self._deadline, self._on_deadline)
            self._task = loop.create_task(self._run(self._request))

    async def _run(self, request: bytes) -> None:
        try:
            last = await self._method.handler(request, self._send)
            self._finish(last)
        except RpcError as error:
            self.fail(error)
        except asyncio.CancelledError:
            self.fail(RpcError("CANCELLED", "the handler was cancelled"))
            raise
        except Exception:
            log.exception("gRPC handler failed")
            self.fail(RpcError("UNKNOWN", "Internal Server Error"))

    async def _send(self, message: bytes) -> None:
        """Sends a response that is not the last one. Returns when the next one can be sent."""
        self._check_sendable(message)
        before = self._headers()
        if not self._connection.outbox.send(self, frame_message(message), before=before) and self.unsent:
            self._sent_waiter = asyncio.get_running_loop().create_future()
            await self._sent_waiter

    def _finish(self, last: bytes | None) -> None:
        """Sends the last response and status OK."""
        if last is None:
            self._connection.outbox.write(self._trailers(_OK))
            self._close()
            return
        self._check_sendable(last)
        before = self._headers()
        self._finished = True
        if self._connection.outbox.send(self, frame_message(last), before=before, after=self._trailers(_OK)):
            self._close()

    def _check_sendable(self, message: bytes) -> None:
        if self._closed or self._finished:
            raise RpcError("CANCELLED", "the call has ended")
        if len(message) > frames.MAX_FRAME and self._connection.buffered_bytes() + len(message) > _MAX_BUFFERED:
            raise _buffer_limit_exceeded()

    def _headers(self) -> bytes:
        """The response headers, or nothing if they are sent already."""
        if self._headers_sent:
            return b""
        self._headers_sent = True
        return frames.frame(HEADERS, END_HEADERS, self.id, _RESPONSE_HEADERS)

    def _status(self, error: RpcError) -> bytes:
        return self._trailers(status_fields(error.code, error.text))

    def _trailers(self, fields: bytes) -> bytes:
        """Trailers, which include the response headers if these are not sent yet."""
        payload = (EMPTY_TABLE if self._headers_sent else _RESPONSE_HEADERS) + fields
        return frames.frame(HEADERS, END_HEADERS | END_STREAM, self.id, payload)

    def _on_deadline(self) -> None:
        if self.unsent:
            self._connection.reset_stream(self.id, Code.CANCEL)
        else:
            self.fail(RpcError("DEADLINE_EXCEEDED", "deadline exceeded"))
            self._cancel_task()

    def _close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._connection.remove_stream(self)

    def _cancel_task(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self._track(self._task)


def rejection(stream_id: int, error: Rejection, *, ended: bool) -> bytes:
    """The complete response to headers that are not a valid call."""
    status = literal(b":status", error.http_status)
    fields = EMPTY_TABLE + status + _CONTENT_TYPE + status_fields(error.code, error.text)
    response = frames.frame(HEADERS, END_HEADERS | END_STREAM, stream_id, fields)
    return response if ended else response + frames.rst_stream(stream_id, Code.NO_ERROR)


def _buffer_limit_exceeded() -> RpcError:
    return RpcError("RESOURCE_EXHAUSTED", f"calls of the connection use more than {_MAX_BUFFERED} bytes of memory")
