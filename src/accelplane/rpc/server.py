"""The server: a Unix socket, its connections, and graceful shutdown."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from accelplane.rpc import frames
from accelplane.rpc.call import Call, rejection
from accelplane.rpc.connection import Connection
from accelplane.rpc.errors import Code, ConnectionFault, StreamFault
from accelplane.rpc.frames import Setting
from accelplane.rpc.headers import MAX_HEADERS, Headers, Rejection, read_request
from accelplane.rpc.methods import Method

MAX_STREAMS = 100  # concurrent calls of a connection
SHUTDOWN_GRACE = 0.5  # seconds for calls to end, and for peers to read the responses
_INITIAL_FRAMES = frames.settings(
    {Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS, Setting.MAX_HEADER_LIST_SIZE: MAX_HEADERS}
)
_STOPPED = "the server is stopped"


class RpcServer:
    """Serves methods on a Unix socket until stopped."""

    def __init__(
        self, methods: Mapping[str, Method], *, connections_changed: Callable[[], None] = lambda: None
    ) -> None:
        """`connections_changed` is called when a client has connected or its connection has ended."""
        self._methods = {path.encode(): method for path, method in methods.items()}
        self._server: asyncio.Server | None = None
        self._tracker = ConnectionTracker(connections_changed)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._tracker.connections)

    async def start(self, path: str) -> None:
        """Binds `path` and listens. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        # In two steps: the start can be cancelled after it has begun to listen, and `stop` needs the server then.
        self._server = await loop.create_unix_server(
            lambda: ServerConnection(self._methods, self._tracker), path, start_serving=False
        )
        await self._server.start_serving()

    async def stop(self, grace: float = SHUTDOWN_GRACE) -> None:
        """Stops listening and ends every connection. Does nothing if the server was not started.

        Unary calls have `grace` seconds to finish, and peers to read the responses. Other handlers are cancelled.
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
            for connection in tuple(self._tracker.connections):
                connection.begin_shutdown()
            await self._tracker.wait_closed(grace)
        finally:
            self._server.close()
            for connection in tuple(self._tracker.connections):
                connection.end(_STOPPED, now=True)
        await asyncio.sleep(0)  # the event loop closes transports in its next iteration
        await self._tracker.wait_closed(SHUTDOWN_GRACE)
        await self._server.wait_closed()


class ConnectionTracker:
    """A server's open connections, and the cancelled tasks that still run."""

    def __init__(self, connections_changed: Callable[[], None] = lambda: None) -> None:
        self.connections: set[ServerConnection] = set()
        self._connections_changed = connections_changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def add(self, connection: "ServerConnection") -> None:
        self.connections.add(connection)
        self._connections_changed()

    def track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def remove(self, connection: "ServerConnection") -> None:
        self.connections.discard(connection)
        self._connections_changed()
        self._changed.set()

    async def wait_closed(self, seconds: float) -> None:
        """Returns when all connections are closed and all tasks are done, or after some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.connections or self._tasks:
                    self._changed.clear()
                    await self._changed.wait()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()


class ServerConnection(Connection[Call]):
    def __init__(self, methods: Mapping[bytes, Method], tracker: ConnectionTracker) -> None:
        super().__init__(_INITIAL_FRAMES, frames.PREFACE)
        self._tracker = tracker
        self._methods = methods
        tracker.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._tracker.remove(self)

    def begin_shutdown(self) -> None:
        """Accepts no more calls, and ends when the last one has ended."""
        self.draining = True
        self.outbox.write(frames.goaway(self.last_peer_stream, Code.NO_ERROR))
        for call in tuple(self.streams.values()):
            call.begin_shutdown(_STOPPED)
        self.end_if_idle()

    def on_goaway(self, last_stream: int, reason: str) -> None:
        """The client opens no more streams; open ones continue."""

    def on_headers_start(self, stream_id: int) -> None:
        if stream_id in self.streams:
            return
        if stream_id % 2 == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"stream {stream_id} of a client, expected an odd number")
        if stream_id <= self.last_stream:
            raise ConnectionFault(Code.STREAM_CLOSED, f"headers for stream {stream_id}, which is closed")
        self.last_stream = self.last_peer_stream = stream_id

    def on_headers(self, stream_id: int, headers: Headers, *, ended: bool) -> None:
        if call := self.streams.get(stream_id):
            if call.remote_ended:
                raise StreamFault(Code.STREAM_CLOSED, "headers after the end")
            if not ended:
                raise StreamFault(Code.PROTOCOL_ERROR, "headers between data")
            call.remote_ended = True
            call.on_messages([])
            return
        if self.draining or len(self.streams) >= MAX_STREAMS:
            raise StreamFault(Code.REFUSED_STREAM, "no more calls are accepted")
        try:
            path, timeout = read_request(headers)
            if (method := self._methods.get(path)) is None:
                raise Rejection(b"200", "UNIMPLEMENTED", "unknown method")
        except Rejection as error:
            self.outbox.write(rejection(stream_id, error, ended=ended))
            return
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        call = self.streams[stream_id] = Call(self, self._tracker.track, stream_id, method, deadline)
        if ended:
            call.remote_ended = True
            call.on_messages([])
