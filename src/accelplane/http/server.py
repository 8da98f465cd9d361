"""An HTTP/1.1 server for untrusted clients, with or without TLS, within limits of size, number and time.

Clients are the API server, probes, scrapers and all others that can reach the port. The reasons for an implementation
of our own are in docs/decisions/0013-admission-over-own-http.md.

No client is rejected because there are too many: further connections wait in the accept queue and in the backlog, and
large requests wait for memory. Connections whose clients make no progress are closed to admit others.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import socket
import ssl
import time
from collections import Counter
from collections.abc import Sequence

from accelplane.http.acceptqueue import AcceptQueue
from accelplane.http.connection import Connection
from accelplane.http.eviction import Evidence, evictable_at, eviction_order, is_attack, source_of
from accelplane.http.handler import Handler
from accelplane.http.listening import bind
from accelplane.http.messages import Head, HttpLimits, parse_head
from accelplane.http.tls import ConnectionContext

log = logging.getLogger(__name__)

_V2 = logging.INFO - 2  # klog's -v=2, as `accelplane.logs.v`
_RECV_BUFFER = 16 * 1024  # the largest TLS record
_ANY_ADDRESS = ("::", "0.0.0.0")  # noqa: S104 - compared only
_ACCEPT_BATCH = 64
# New connections in one iteration of the event loop: each needs about a millisecond for its handshake, while the others
# wait.
_ADMIT_BATCH = 8
_RETRY_INTERVAL = 0.1
_MIN_RETRY_INTERVAL = 0.005
_CLEANUP_TIMEOUT = 1.0  # for cancelled responses when the server stops
_RESERVE = 8  # the part of the memory that large requests leave to small ones
_SMALL = 64 * 1024


class HttpServer:
    """Serves the responses of `handler`, which returns a response or a coroutine of one.

    The handler may raise `HttpError`; any other exception becomes a 500. Requests of other `methods` get a 405. The
    response to a HEAD request is sent without its body.
    """

    def __init__(
        self,
        handler: Handler,
        limits: HttpLimits | None = None,
        *,
        methods: Sequence[str] = ("POST", "GET"),
        fields: Sequence[str] = (),
    ) -> None:
        """Requests have the header fields named in `fields` (in lower case), others are dropped."""
        self.handler = handler
        self.limits = limits or HttpLimits()
        self.connections: set[Connection] = set()
        self.recv_buffer = memoryview(bytearray(_RECV_BUFFER))
        self.reserved = 0
        self.buffered = 0
        self.closing = False
        self.draining = False
        self.accept_paused = False
        self.cached_heads: dict[bytes, Head] = {}
        self._methods = methods
        self._fields = fields
        self._listening: list[socket.socket] = []
        self._context: ConnectionContext | None = None
        self._attaching: set[asyncio.Task[None]] = set()
        self._cancelled: set[asyncio.Task[None]] = set()
        self._waiting: dict[Connection, int] = {}
        self._queue = AcceptQueue(self.limits.accept_queue)
        self._evidence = Evidence(self.limits)
        self._attacked_until = -math.inf
        self._no_connections = asyncio.Event()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        timeouts = (
            self.limits.request,
            self.limits.answer_timeout,
            self.limits.idle,
            self.limits.handshake,
            self.limits.wait,
        )
        self._sweep_interval = min(5.0, min(timeouts) / 2)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each listening socket."""
        return [each.getsockname()[:2] for each in self._listening]

    def in_flight(self, path: str) -> int:
        """The number of requests for `path` whose head is received and whose response is not sent."""
        return sum(each.path == path for each in self.connections)

    async def start(self, host: str | None, port: int, context: ConnectionContext | None = None) -> int:
        """Listens on all addresses of `host`, or on every address without one; uses TLS if `context` is given.

        Returns the port, which the kernel selects if it is 0. Raises `OSError`.
        """
        self._context = context
        self._listening = bind(host, port, self.limits.backlog)
        for each in self._listening:
            each.setblocking(False)
            if context is not None:
                # A client that sends nothing stays in the kernel, see tcp(7).
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, math.ceil(self.limits.handshake))
        self._resume_accepting()
        return self.addresses[0][1]

    async def accepts(self, within: float = 1.0) -> bool:
        """Whether a client can connect and complete a TLS handshake, tested by a connection to this server."""
        addresses = self.addresses
        if not addresses:
            return False
        host, port = addresses[0]
        context = _unverified_context() if self._context is not None else None
        try:
            async with asyncio.timeout(within):
                # 127.0.0.1 is served by the wildcard addresses, also where IPv6 is disabled.
                host = "127.0.0.1" if host in _ANY_ADDRESS else host
                _, writer = await asyncio.open_connection(host, port, ssl=context)
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return True

    def drain(self) -> None:
        """Makes each response the last one of its connection: clients connect again, where other servers are."""
        self.draining = True

    async def stop(self, grace: float = 5.0) -> None:
        """Closes the listening sockets and idle connections; requests that have begun may complete within `grace`.

        The others are cancelled, and have a second for their cleanup.
        """
        self.closing = True
        self._pause_accepting()
        for each in self._listening:
            each.close()
        self._listening.clear()
        self._queue.close()
        await asyncio.gather(*self._attaching, return_exceptions=True)
        for connection in list(self.connections):
            connection.close_when_idle()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._no_connections.wait()
        for connection in list(self.connections):
            connection.abort()
        for timer in (self._sweep_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        if self._cancelled:
            await asyncio.wait(self._cancelled, timeout=_CLEANUP_TIMEOUT)

    # Connections

    @property
    def under_pressure(self) -> bool:
        """Whether clients wait for connections of busy clients. Then a connection is closed after its response."""
        if not self._queue:
            return False
        requested = sum(each.has_requested for each in self.connections)
        return 2 * requested > len(self.connections) and self._queue.has_data()

    @property
    def waiting(self) -> int:
        """The number of clients in the accept queue."""
        return len(self._queue)

    def count_progress(self) -> None:
        """Called when a connection without a complete request has received something."""
        self._evidence.add_progress(time.monotonic())

    def _accept(self, listening: socket.socket) -> None:
        """Accepts clients into the queue. If it is full, they wait in the backlog."""
        for _ in range(_ACCEPT_BATCH):
            if self._queue.full and not self._drop_silent_client():
                self._pause_accepting()
                break
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # no file descriptor or memory
                log.error("accept: %s; retrying", error.strerror or error)
                self._pause_accepting()
                self._retry_later()
                break
            self._queue.add(accepted, source_of(address[0]), time.monotonic())
        self._admit()

    def _drop_silent_client(self) -> bool:
        """Closes a client of the full queue that has sent nothing, if there is an attack."""
        now = time.monotonic()
        return now < self._attacked_until and self._queue.drop_silent(now - self.limits.attack_stall)

    def _admit(self) -> None:
        """Makes connections of clients in the queue. At the limit, they replace connections without progress."""
        if not self._queue or self.closing:
            return
        free = self.limits.connections - len(self.connections)
        evictable = [] if free > 0 else self._evictable(min(_ADMIT_BATCH, self._queue.data_count()))
        admitted = self._queue.take(
            min(free, _ADMIT_BATCH) if free > 0 else len(evictable),
            Counter(each.source for each in self.connections if not each.has_requested),
            attacked=time.monotonic() < self._attacked_until,
            data_only=free <= 0,
        )
        for number, (accepted, source) in enumerate(admitted):
            if evictable:
                self._evict(evictable[number])
            self._add(accepted, source)
        if self._queue:
            # The next iteration of the event loop first serves the connections.
            self._retry_later(0 if admitted else self._until_evictable())
        if self.accept_paused and (not self._queue.full or self._drop_silent_client()):
            self._resume_accepting()
        if self._sweep_timer is None:
            self._sweep()

    def _add(self, accepted: socket.socket, source: bytes) -> None:
        connection = Connection(self, self._context, source)
        self.connections.add(connection)
        self._no_connections.clear()
        task = asyncio.get_running_loop().create_task(self._attach(connection, accepted))
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _attach(self, connection: Connection, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # the client has disconnected
            accepted.close()
            self.remove(connection)

    def _pause_accepting(self) -> None:
        self.accept_paused = True
        loop = asyncio.get_running_loop()
        for each in self._listening:
            loop.remove_reader(each)

    def _resume_accepting(self) -> None:
        self.accept_paused = False
        loop = asyncio.get_running_loop()
        for each in self._listening:
            loop.add_reader(each, self._accept, each)

    def _evictable(self, count: int) -> list[Connection]:
        """At most `count` connections that may be closed to admit others, in this order. See `http.eviction`."""
        now = time.monotonic()
        connections = list(self.connections)
        candidates = [each.candidate() for each in connections]
        order = eviction_order(candidates, self.limits, now, attacked=self._is_attacked(now))
        found = (connections[index] for index in order if not connections[index].has_unread_data())
        return list(itertools.islice(found, count))

    def _evict(self, connection: Connection) -> None:
        log.log(_V2, "%d connections: closing one without progress", len(self.connections))
        now = time.monotonic()
        if not connection.has_requested:
            if now < self._attacked_until:
                self._attacked_until = now + self.limits.attack_memory
            else:
                self._evidence.add_stall(now)
        connection.evict()
        self.remove(connection)

    def _is_attacked(self, now: float) -> bool:
        if now >= self._attacked_until:
            # A client with unread data is not silent.
            waiting = [each.candidate() for each in self.connections if not each.has_unread_data()]
            silent = not self._evidence.clients_continue(now) and is_attack(waiting, self.limits, now)
            if not silent and not self._evidence.many_stalls(now):
                return False
            log.warning(
                "%d connections: half of them or more are silent; closing silent connections after %g s, not %g s",
                len(self.connections),
                self.limits.attack_stall,
                self.limits.stall,
            )
            self._attacked_until = now + self.limits.attack_memory
        return True

    def _until_evictable(self) -> float:
        """Seconds until a connection may be closed, at most `_RETRY_INTERVAL`."""
        now = time.monotonic()
        candidates = [each.candidate() for each in self.connections]
        times = evictable_at(candidates, self.limits, attacked=now < self._attacked_until)
        return min(max(min(times, default=math.inf) - now, _MIN_RETRY_INTERVAL), _RETRY_INTERVAL)

    def remove(self, connection: Connection) -> None:
        """Called when a connection is closed."""
        self.connections.discard(connection)
        if not self.connections:
            self._no_connections.set()
        if self._queue and not self.closing:
            self._retry_later(0)

    def track(self, task: asyncio.Task[None]) -> None:
        """Called with the task of a response that is cancelled and still runs."""
        self._cancelled.add(task)
        task.add_done_callback(self._cancelled.discard)

    # Memory

    def reserve(self, connection: Connection, size: int) -> bool:
        """Reserves memory for a request; otherwise the connection's `on_memory` is called when it is available.

        A request that needs more than the limit gets the limit.
        """
        size = min(size, self._available(size))
        if self._missing(size) > 0:
            self._waiting[connection] = size
            self._retry_later(0)
            return False
        self._set_reserved(connection, size)
        return True

    def release(self, connection: Connection, keep: int = 0) -> None:
        """Releases the reservation of the connection except for `keep` bytes, and ends its wait for memory."""
        self._waiting.pop(connection, None)
        freed = connection.reserved - keep
        self._set_reserved(connection, keep)
        if freed > 0 and self._waiting:
            self._retry_later(0)

    def buffer(self, connection: Connection, size: int) -> bool:
        """Accounts for data that a connection received without a reservation; returns False if it exceeds the limit.

        Each connection may receive as much as one read returns. More than that is data of clients that send heads or
        small bodies in pieces.
        """
        self.buffered += size - connection.buffered
        connection.buffered = size
        limit = self.limits.connections * _RECV_BUFFER
        return size <= _RECV_BUFFER or self.buffered <= limit or self._evict_buffered(limit)

    def _set_reserved(self, connection: Connection, size: int) -> None:
        self.reserved += size - connection.reserved
        connection.reserved = size

    def _available(self, size: int) -> int:
        return self.limits.memory - (self.limits.memory // _RESERVE if size > _SMALL else 0)

    def _missing(self, size: int) -> int:
        return self.reserved + size - self._available(size)

    def _stalled(self) -> list[Connection]:
        """Connections whose clients make no progress, the longest first."""
        connections = list(self.connections)
        times = evictable_at([each.candidate() for each in connections], self.limits, attacked=False)
        order = sorted(range(len(connections)), key=times.__getitem__)
        now = time.monotonic()
        return [
            connections[index] for index in order if times[index] <= now and not connections[index].has_unread_data()
        ]

    def _evict_reserved(self, size: int) -> bool:
        """Closes connections without progress until `size` bytes that they had reserved are free."""
        target = self.reserved - size
        for each in self._stalled():
            if self.reserved > target and each.reserved:
                each.evict()
        return self.reserved <= target

    def _evict_buffered(self, limit: int) -> bool:
        for each in self._stalled():
            if self.buffered > limit and each.buffered:
                each.evict()
        return self.buffered <= limit

    def _retry_later(self, delay: float = _RETRY_INTERVAL) -> None:
        if self._retry_timer is None or (not delay and self._retry_timer.when() > time.monotonic()):
            if self._retry_timer is not None:
                self._retry_timer.cancel()
            self._retry_timer = asyncio.get_running_loop().call_later(delay, self._retry)

    def _retry(self) -> None:
        """Grants memory to waiting connections, the smallest requests first, and admits clients of the queue."""
        self._retry_timer = None
        for connection, size in sorted(self._waiting.items(), key=lambda each: each[1]):
            if connection not in self._waiting:
                continue  # has been closed
            if (missing := self._missing(size)) > 0 and not self._evict_reserved(missing):
                break
            del self._waiting[connection]
            self._set_reserved(connection, size)
            connection.on_memory()
        if self.accept_paused and not self.closing and not self._queue.full:
            self._resume_accepting()
        self._admit()
        if self._waiting:
            self._retry_later()

    # Requests

    def parse_head(self, text: bytes) -> Head:
        """Parses a head, or returns it from the cache. Raises `HttpError`.

        Parsing takes about as long as an admission review, and the heads of one client differ in their length only.
        Long heads and credentials are not cached: clients could fill the memory, and passwords would stay in it.
        """
        head = self.cached_heads.get(text)
        if head is None:
            head = parse_head(text, self.limits, self._methods, self._fields)
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
        for connection in list(self.connections):
            connection.abort_disconnected()
        self._queue.expire(now - self.limits.request)
        loop = asyncio.get_running_loop()
        waits = self.connections or self._queue
        self._sweep_timer = loop.call_later(self._sweep_interval, self._sweep) if waits else None


def _unverified_context() -> ssl.SSLContext:
    """Accepts any certificate: the client connects to its own process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
