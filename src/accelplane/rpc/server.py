"""The server: connections that answer calls, until it is stopped."""

import asyncio
import contextlib
from collections.abc import Mapping

from accelplane.rpc import frames
from accelplane.rpc.call import Call, refusal
from accelplane.rpc.connection import Connection
from accelplane.rpc.errors import Code, ConnectionFault, RpcError, StreamFault
from accelplane.rpc.frames import Setting
from accelplane.rpc.headers import MAX_HEADERS, Headers, Refusal, read_request
from accelplane.rpc.methods import Method

MAX_STREAMS = 100  # at a time and connection
_FAREWELL = 0.5  # seconds that calls have to end, and a peer to read what was sent, before its connection ends
_HELLO = frames.settings({Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS, Setting.MAX_HEADER_LIST_SIZE: MAX_HEADERS})


class RpcServer:
    """Serves methods on a Unix socket until stopped."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._methods = {path.encode(): method for path, method in methods.items()}
        self._server: asyncio.Server | None = None
        self._life = Life()

    async def start(self, path: str) -> None:
        """Binds `path` and listens. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: ServerConnection(self._methods, self._life), path)

    async def stop(self) -> None:
        """Stops listening and ends every connection; handlers are cancelled. Nothing happens if it never started.

        Calls with one response get a moment to be answered, and every peer to read what was sent.
        """
        if self._server is None:
            return
        loop = asyncio.get_running_loop()
        for listener in self._server.sockets:
            loop.remove_reader(listener)
        try:
            # A connection accepted in this iteration of the event loop has no transport yet. It gets one now: a closed
            # server refuses, and asyncio leaves the accepted socket open.
            await asyncio.sleep(0)
            self._server.close()
            for connection in tuple(self._life.connections):
                connection.farewell()
            await self._life.over(_FAREWELL)
        finally:
            self._server.close()
            for connection in tuple(self._life.connections):
                connection.end("the server has stopped", now=True)
        await asyncio.sleep(0)  # the transports' own end comes with the loop's next round
        await self._life.over(_FAREWELL)
        await self._server.wait_closed()


class Life:
    """What has to end before a server is gone: its connections, and tasks that were cancelled."""

    def __init__(self) -> None:
        self.connections: set[ServerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def remember(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def leave(self, connection: "ServerConnection") -> None:
        self.connections.discard(connection)
        self._changed.set()

    async def over(self, seconds: float) -> None:
        """Returns when all has ended, or after some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.connections or self._tasks:
                    self._changed.clear()
                    await self._changed.wait()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()


class ServerConnection(Connection[Call]):
    """A client's connection."""

    def __init__(self, methods: Mapping[bytes, Method], life: Life) -> None:
        super().__init__(_HELLO, frames.PREFACE)
        self.ending = life
        self._methods = methods
        life.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ending.leave(self)

    def kept(self) -> int:
        """How many bytes are in memory for calls that are not finished."""
        return sum(stream.kept for stream in self.streams.values())

    def farewell(self) -> None:
        """Takes no more calls, and ends with the last of those that there are."""
        self.leaving = True
        self.outbox.write(self.goaway(Code.NO_ERROR))
        for call in tuple(self.streams.values()):
            call.farewell()
        self.end_when_done()

    def goaway(self, code: Code, text: str = "") -> bytes:
        return frames.goaway(self.last_stream, code, text)

    def goaway_came(self, last_stream: int, reason: str) -> None:
        """The client opens no more streams; those that it has go on."""

    def headers_begin(self, stream_id: int) -> None:
        if stream_id in self.streams:
            return
        if stream_id % 2 == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"a client's stream with the number {stream_id}")
        if stream_id <= self.last_stream:
            raise ConnectionFault(Code.STREAM_CLOSED, f"headers for stream {stream_id}, which is over")
        self.last_stream = stream_id

    def headers_came(self, stream_id: int, headers: Headers, *, ended: bool) -> None:
        if call := self.streams.get(stream_id):
            if call.remote_ended:
                raise StreamFault(Code.STREAM_CLOSED, "headers after the end")
            if not ended:
                raise StreamFault(Code.PROTOCOL_ERROR, "headers between data")
            call.remote_ended = True
            call.took([])
            return
        if self.leaving or len(self.streams) >= MAX_STREAMS:
            raise StreamFault(Code.REFUSED_STREAM, "no more calls are taken")
        request = read_request(headers)
        if isinstance(request, Refusal):
            error = RpcError(request.code, request.text)
            self.outbox.write(refusal(stream_id, request.http_status, error, ended=ended))
            return
        method = self._methods.get(request.path)
        if method is None:
            error = RpcError("UNIMPLEMENTED", "no such method")
            self.outbox.write(refusal(stream_id, b"200", error, ended=ended))
            return
        deadline = None if request.timeout is None else asyncio.get_running_loop().time() + request.timeout
        call = self.streams[stream_id] = Call(self, stream_id, method, deadline)
        if ended:
            call.remote_ended = True
            call.took([])
