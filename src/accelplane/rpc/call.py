"""One call as its server sees it: the request comes together, a task answers it, its end is told."""

import asyncio
import logging
from typing import Protocol

from accelplane.rpc import frames
from accelplane.rpc.errors import Code, RpcError
from accelplane.rpc.frames import END_HEADERS, END_STREAM, HEADERS
from accelplane.rpc.headers import NO_TABLE, literal, status_fields
from accelplane.rpc.messages import MAX_MESSAGE, framed
from accelplane.rpc.methods import Method
from accelplane.rpc.outbox import Outbox
from accelplane.rpc.stream import Stream

log = logging.getLogger(__name__)

# What the unfinished calls of a connection may hold in memory, requests and answers, before others are refused.
_MAX_KEPT = 16 * 1024 * 1024

_CONTENT_TYPE = literal(b"content-type", b"application/grpc")
_ANSWER = NO_TABLE + literal(b":status", b"200") + _CONTENT_TYPE
_OK = literal(b"grpc-status", b"0")


class Ending(Protocol):
    """Who remembers tasks that were cancelled until they have ended."""

    def remember(self, task: asyncio.Task[None]) -> None: ...


class Server(Protocol):
    """What a call asks of its connection."""

    @property
    def outbox(self) -> Outbox: ...
    @property
    def ending(self) -> Ending: ...
    @property
    def initial_window(self) -> int: ...
    def kept(self) -> int: ...
    def forget(self, stream: Stream) -> None: ...
    def reset(self, stream_id: int, code: Code) -> None: ...


class Call(Stream):
    """A call of `method`, to be answered by `deadline` if there is one (the event loop's time)."""

    __slots__ = (
        *("_server", "_method", "_deadline", "_request", "_task", "_timer", "_room"),
        *("_started", "_finished", "_over"),
    )

    def __init__(self, server: Server, stream_id: int, method: Method, deadline: float | None) -> None:
        super().__init__(stream_id, server.initial_window, MAX_MESSAGE)
        self._server = server
        self._method = method
        self._deadline = deadline
        self._request: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._room: asyncio.Future[None] | None = None  # who waits until all is sent
        self._started = False  # the answer's headers are sent
        self._finished = False  # the answer's end is sent, or waits behind what is unsent
        self._over = False

    @property
    def kept(self) -> int:
        return super().kept + len(self._request or b"")

    def took(self, messages: list[bytes]) -> None:
        for message in messages:
            if self._request is not None:
                self.fail(RpcError("INTERNAL", "more than one message in the request"))
                return
            self._request = message
        if self.remote_ended:
            self._begin()
        elif self.kept > frames.DEFAULT_WINDOW and self._server.kept() > _MAX_KEPT:
            self.fail(_too_much())

    def sent(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        if self._finished:
            self._close()

    def fail(self, error: RpcError) -> None:
        """Ends the call with a status, unless it has one already."""
        if self._over or self._finished:
            return
        if self.unsent:  # the client would take a status for the rest of a message
            self._server.reset(self.id, Code.CANCEL)
            return
        self._server.outbox.write(self._status(error))
        if not self.remote_ended:
            self._server.outbox.write(frames.rst_stream(self.id, Code.NO_ERROR))  # nothing more need be sent
        self._close()

    def lost(self, error: RpcError) -> None:
        self._over = True
        self._stop()

    def farewell(self) -> None:
        """The server ends: what would never end by itself does now, the rest may."""
        goodbye = RpcError("UNAVAILABLE", "the server has stopped")
        if self._task is not None and not self._method.streams:
            return
        if self.unsent and not self._finished:
            self.after = self._status(goodbye)
            self._finished = True
        else:
            self.fail(goodbye)
        self._stop()

    def _begin(self) -> None:
        if self.reader.pending:
            self.fail(RpcError("INTERNAL", "the stream ended within a message"))
        elif self._request is None:
            self.fail(RpcError("INVALID_ARGUMENT", "no message in the request"))
        else:
            loop = asyncio.get_running_loop()
            if self._deadline is not None:
                self._timer = loop.call_at(self._deadline, self._expire)
            self._task = loop.create_task(self._answer(self._request))

    async def _answer(self, request: bytes) -> None:
        try:
            last = await self._method.answer(request, self._send)
            self._finish(last)
        except RpcError as error:
            self.fail(error)
        except asyncio.CancelledError:
            self.fail(RpcError("CANCELLED", "given up"))
            raise
        except Exception:
            log.exception("answering a call failed")
            self.fail(RpcError("UNKNOWN", "Internal Server Error"))

    async def _send(self, message: bytes) -> None:
        """Sends a response that is not the last one; returns when there is room for another."""
        self._check_room(message)
        before = self._headers()
        if not self._server.outbox.send(self, framed(message), before=before) and self.unsent:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _finish(self, last: bytes | None) -> None:
        """Sends the last response, and that all went well."""
        if last is None:
            self._server.outbox.write(self._end(_OK))
            self._close()
            return
        self._check_room(last)
        before = self._headers()
        self._finished = True
        if self._server.outbox.send(self, framed(last), before=before, after=self._end(_OK)):
            self._close()

    def _check_room(self, message: bytes) -> None:
        if self._over or self._finished:
            raise RpcError("CANCELLED", "the call is over")
        if len(message) > frames.MAX_FRAME and self._server.kept() + len(message) > _MAX_KEPT:
            raise _too_much()

    def _headers(self) -> bytes:
        """The answer's headers, unless they are sent already."""
        if self._started:
            return b""
        self._started = True
        return frames.frame(HEADERS, END_HEADERS, self.id, _ANSWER)

    def _status(self, error: RpcError) -> bytes:
        return self._end(status_fields(error.code, error.text))

    def _end(self, fields: bytes) -> bytes:
        """Trailers; also headers, when none were sent."""
        payload = (NO_TABLE if self._started else _ANSWER) + fields
        return frames.frame(HEADERS, END_HEADERS | END_STREAM, self.id, payload)

    def _expire(self) -> None:
        if self.unsent:
            self._server.reset(self.id, Code.CANCEL)
        else:
            self.fail(RpcError("DEADLINE_EXCEEDED", "the deadline has passed"))
            self._stop()

    def _close(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._server.forget(self)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self._server.ending.remember(self._task)


def refusal(stream_id: int, http_status: bytes, error: RpcError, *, ended: bool) -> bytes:
    """The whole answer to headers that are no call."""
    fields = NO_TABLE + literal(b":status", http_status) + _CONTENT_TYPE + status_fields(error.code, error.text)
    answer = frames.frame(HEADERS, END_HEADERS | END_STREAM, stream_id, fields)
    return answer if ended else answer + frames.rst_stream(stream_id, Code.NO_ERROR)


def _too_much() -> RpcError:
    return RpcError("RESOURCE_EXHAUSTED", f"the connection's calls hold more than {_MAX_KEPT} bytes")
