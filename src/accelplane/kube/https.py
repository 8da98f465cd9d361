"""HTTP/1.1 servers for callers that nobody chose, with or without TLS, within limits of size, number and time.

Callers are the API server, probes, and anybody who can reach the port. Why this is ours:
docs/decisions/0013-admission-over-own-http.md.
"""

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
import time
from collections.abc import Callable, Coroutine

from accelplane.kube.http1 import END_OF_HEAD, Answer, Head, HttpError, HttpLimits, Request, read_head, written
from accelplane.kube.tls import TlsSession
from accelplane.logs import v

log = logging.getLogger(__name__)

_LANDING = 64 * 1024
_ALL = ("::", "0.0.0.0")  # noqa: S104 - compared only

_FAULT = "%s %s: this is a fault of ours"
_TOLD = "an internal error; the log tells more"

Answering = Coroutine[object, object, Answer]
Handler = Callable[[Request], Answer | Answering]


class HttpServer:
    """Answers requests at an address with what `handler` says, at once or, when it has to ask others first, awaited.

    It may raise `HttpError`; all else is a 500.
    """

    def __init__(self, handler: Handler, limits: HttpLimits | None = None) -> None:
        self.handler = handler
        self.limits = limits or HttpLimits()
        self.connections: set[_Connection] = set()
        self.landing = memoryview(bytearray(_LANDING))
        self.unfinished = 0
        self.ending = False
        # Heads of one caller differ in their length at most; a review takes little longer than reading one anew.
        remembering = functools.lru_cache(self.limits.remembered)
        self.read_head = remembering(functools.partial(read_head, limits=self.limits))
        self._server: asyncio.Server | None = None
        self._secure = False
        self._empty = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None
        times = (self.limits.request, self.limits.idle, self.limits.handshake)
        self._interval = min(5.0, min(times) / 2)

    async def start(self, host: str | None, port: int, context: ssl.SSLContext | None = None) -> int:
        """Serves, over TLS with a context. Returns the port, which the kernel chose if it was 0. Raises `OSError`."""
        listening = _listening(host, port)
        self._secure = context is not None
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Connection(self, context), sock=listening, backlog=1024
            )
        except BaseException:
            listening.close()
            raise
        return int(listening.getsockname()[1])

    async def accepts(self, within: float = 1.0) -> bool:
        """Whether somebody who connects is listened to, and over TLS gets a handshake: found out by connecting."""
        if self._server is None or not self._server.sockets:
            return False
        host, port = self._server.sockets[0].getsockname()[:2]
        context = _trusting() if self._secure else None
        try:
            async with asyncio.timeout(within):
                # All addresses are this one, too, also where IPv6 is switched off.
                _, writer = await asyncio.open_connection("127.0.0.1" if host in _ALL else host, port, ssl=context)
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return True

    async def stop(self, grace: float = 5.0) -> None:
        """Takes no more connections, lets requests that have begun end within `grace`, and closes."""
        self.ending = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.end_when_idle()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._empty.wait()
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def admit(self, connection: "_Connection") -> bool:
        """Whether there is room for one more."""
        if self.ending or len(self.connections) >= self.limits.connections:
            return False
        self.connections.add(connection)
        self._empty.clear()
        if self._sweeper is None:
            self._sweep()
        return True

    def forget(self, connection: "_Connection") -> None:
        """It is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def _sweep(self) -> None:
        """Ends those who are late. One timer for all, and none while nobody is connected."""
        now = time.monotonic()
        for connection in [one for one in self.connections if one.deadline < now]:
            connection.late()
        self._sweeper = asyncio.get_running_loop().call_later(self._interval, self._sweep) if self.connections else None


def _listening(host: str | None, port: int) -> socket.socket:
    """A socket at an address, or at all of them: one for both families, so that there is one port. Raises `OSError`."""
    if host:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(address[0]), port), family=family)
    if socket.has_dualstack_ipv6():
        # A kernel may know of IPv6 and be told not to use it.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _trusting() -> ssl.SSLContext:
    """For a caller who knows whom he calls, whatever certificate is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class _Connection(asyncio.BufferedProtocol):
    """One caller: requests come in, answers go out, one after the other."""

    def __init__(self, server: HttpServer, context: ssl.SSLContext | None) -> None:
        self._server = server
        self._limits = server.limits
        self._tls = None if context is None else TlsSession(context)
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._head: Head | None = None
        self._answering: asyncio.Task[None] | None = None
        self._counted = 0
        self._stuck = False
        self._deaf = False
        self.deadline = time.monotonic() + (self._limits.idle if context is None else self._limits.handshake)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport) or not self._server.admit(self):
            transport.close()
            self._deaf = True
            return
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._give_up()
        self._count(0)
        self._server.forget(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the kernel puts what has come: one place for all, since it is dealt with at once."""
        return self._server.landing

    def buffer_updated(self, nbytes: int) -> None:
        data = self._server.landing[:nbytes]
        if self._tls is not None:
            data = self._deciphered(self._tls, data)
        if self._deaf or not data:
            return
        if not self._received and self._head is None and self._answering is None:
            self.deadline = time.monotonic() + self._limits.request
        self._received += data
        self._work()

    def _deciphered(self, tls: TlsSession, data: memoryview) -> bytes:
        """What the caller has said in this; handshake and farewell are answered on the way."""
        before = tls.shaken
        try:
            plain = tls.received(data)
        except ssl.SSLError as error:
            log.log(v(2), "a connection ends for %s", error.reason or error)
            self._write_out(tls)
            self._close()
            return b""
        if tls.shaken and not before:
            self.deadline = time.monotonic() + self._limits.idle
        self._write_out(tls)
        # Who has been refused and is still there says farewell like everybody.
        if tls.ended and (self._deaf or not plain):
            self._close()
        return plain

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._tls is None:
            self._transport.write(data)
        else:
            self._tls.send(data)
            self._write_out(self._tls)

    def _write_out(self, tls: TlsSession) -> None:
        if self._transport is not None and (ciphered := tls.outgoing()):
            self._transport.write(ciphered)

    def _close(self) -> None:
        """Ends the connection behind what has been written."""
        self._deaf = True
        if self._transport is None or self._transport.is_closing():
            return
        if self._tls is not None:
            self._tls.close()
            self._write_out(self._tls)
        self._transport.close()

    def pause_writing(self) -> None:
        self._stuck = True
        self.deadline = time.monotonic() + self._limits.request
        self._listen()

    def resume_writing(self) -> None:
        self._stuck = False
        self._listen()
        self._work()

    def _listen(self) -> None:
        """Takes more from the caller, unless there is something that he has to wait for."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._stuck or self._answering is not None:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def late(self) -> None:
        """Ends a connection whose time is up."""
        if self._answering is not None and not self._deaf:
            self._give_up()
            self._refuse(HttpError(503, f"no answer within {self._limits.request:g} s"))
        elif self._deaf or self._stuck or not (self._received or self._head):
            self.abort()
        else:
            self._refuse(HttpError(408, f"no complete request within {self._limits.request:g} s"))

    def end_when_idle(self) -> None:
        """Closes now, or behind the answer to a request that has begun."""
        if not self._deaf and not self._received and self._head is None and self._answering is None:
            self._close()

    def abort(self) -> None:
        self._deaf = True
        self._give_up()
        if self._transport is not None:
            self._transport.abort()

    def _work(self) -> None:
        """Answers every request that is complete."""
        try:
            while self._answering is None and not self._deaf and not self._stuck:
                if (request := self._next()) is None:
                    break
                keep = self._head is not None and self._head.keep
                self._head = None
                answer = _answer(self._server.handler, request)
                if isinstance(answer, Answer):
                    self._answered(answer, keep)
                else:
                    self._answering = asyncio.create_task(self._await(answer, request, keep))
                    # It may be given up before it has begun.
                    self._answering.add_done_callback(lambda _task, coming=answer: coming.close())
                    self.deadline = time.monotonic() + self._limits.request
                    self._listen()
            self._count(len(self._received))
        except HttpError as error:
            self._refuse(error)

    def _answered(self, answer: Answer, keep: bool) -> None:
        self._send(answer, keep=keep and not self._server.ending)
        self.deadline = time.monotonic() + (self._limits.request if self._received else self._limits.idle)

    async def _await(self, coming: Answering, request: Request, keep: bool) -> None:
        """Answers when there is an answer, and goes on."""
        answer = await _awaited(coming, request)
        self._answering = None
        self._listen()
        if isinstance(answer, Answer):
            self._answered(answer, keep)
            self._work()
        else:
            self._refuse(answer)

    def _give_up(self) -> None:
        """Nobody is there for the answer any more."""
        if self._answering is not None:
            self._answering.cancel()
            self._answering = None
            self._listen()

    def _next(self) -> Request | None:
        """The next request, None while it is not complete. Raises `HttpError`."""
        if self._head is None:
            end = self._received.find(END_OF_HEAD, 0, self._limits.head + len(END_OF_HEAD))
            if end < 0:
                if len(self._received) > self._limits.head:
                    raise HttpError(431, f"expected a head of at most {self._limits.head} bytes")
                return None
            head = self._server.read_head(bytes(self._received[:end]))
            if head.expects and len(self._received) < end + len(END_OF_HEAD) + head.length:
                self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
            del self._received[: end + len(END_OF_HEAD)]
            self._head = head
        if len(self._received) < self._head.length:
            return None
        length = self._head.length
        if len(self._received) == length:
            body, self._received = self._received, bytearray()  # not copied: it may be the greater part of our memory
        else:
            body = self._received[:length]
            del self._received[:length]
        return Request(self._head.method, self._head.path, self._head.content_type, body, self._head.authorization)

    def _count(self, held: int) -> None:
        """Keeps the account of what all callers together make us hold. Raises `HttpError`."""
        self._server.unfinished += held - self._counted
        self._counted = held
        if held and self._server.unfinished > self._limits.unfinished:
            raise HttpError(503, "too many large requests at once")

    def _refuse(self, error: HttpError) -> None:
        """Answers with the error and listens no more, but stays a moment: a closed socket would eat the answer."""
        self._send(Answer(error.status, f"{error}\n".encode(), "text/plain; charset=utf-8"), keep=False, linger=True)

    def _send(self, answer: Answer, *, keep: bool, linger: bool = False) -> None:
        self._write(written(answer, keep=keep))
        if keep:
            return
        self._deaf = True
        self._received.clear()
        self._count(0)
        if linger:
            self.deadline = time.monotonic() + self._limits.linger + self._limits.request
            asyncio.get_running_loop().call_later(self._limits.linger, self._close)
        else:
            self._close()


def _answer(handler: Handler, request: Request) -> Answer | Answering:
    """Raises `HttpError`."""
    try:
        return handler(request)
    except HttpError:
        raise
    except Exception:
        log.exception(_FAULT, request.method, request.path)
        raise HttpError(500, _TOLD) from None


async def _awaited(coming: Answering, request: Request) -> Answer | HttpError:
    try:
        return await coming
    except HttpError as error:
        return error
    except Exception:
        log.exception(_FAULT, request.method, request.path)
        return HttpError(500, _TOLD)
