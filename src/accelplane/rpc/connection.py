"""One end of an HTTP/2 connection: what each frame means, and how it ends. Both ends of a call build on it.

Limits keep what a peer can cost within bounds: headers are short, windows small, while a peer does not read nothing is
read from it, and frames that bring nothing have a `Patience`. Facts: RFC 9113.
"""

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from accelplane.rpc import frames
from accelplane.rpc.errors import Code, ConnectionFault, RpcError, StreamFault, named, reset_error
from accelplane.rpc.frames import DEFAULT_WINDOW, MAX_WINDOW, Setting
from accelplane.rpc.headers import MAX_HEADERS, HeaderDecoder, Headers
from accelplane.rpc.outbox import Outbox
from accelplane.rpc.patience import Patience
from accelplane.rpc.stream import Stream

_MAX_CONTINUATIONS = 16


AnyStream = TypeVar("AnyStream", bound=Stream)


class Connection(asyncio.Protocol, ABC, Generic[AnyStream]):
    """`hello` is sent at once; `preface` is what the peer has to send before its first frame."""

    def __init__(self, hello: bytes, preface: bytes) -> None:
        self.patience = Patience()
        self.outbox = Outbox(self.patience)
        self.streams: dict[int, AnyStream] = {}
        self.last_stream = 0  # the highest that was opened
        self.peer_streams = MAX_WINDOW  # how many the peer takes at a time
        self.initial_window = DEFAULT_WINDOW
        self.leaving = False  # a GOAWAY was sent or has come: it ends with its last stream
        self.ended = False
        self._hello = hello
        self._reader = frames.FrameReader(preface)
        self._decoder = HeaderDecoder()
        self._block: tuple[int, int, bytearray] | None = None  # headers that go on: stream, flags, fragments
        self._continuations = 0
        self._greeted = False
        self._unreturned = 0  # bytes of the connection's window that the peer has not got back

    @abstractmethod
    def headers_begin(self, stream_id: int) -> None:
        """Raises `ConnectionFault` unless there may be headers for this stream."""

    @abstractmethod
    def headers_came(self, stream_id: int, headers: Headers, *, ended: bool) -> None: ...

    @abstractmethod
    def goaway_came(self, last_stream: int, reason: str) -> None: ...

    @abstractmethod
    def goaway(self, code: Code, text: str = "") -> bytes: ...

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self.outbox.open(transport)
        if self.ended:
            self.outbox.close(now=True)
        else:
            self.outbox.write(self._hello)

    def connection_lost(self, exc: Exception | None) -> None:
        self.outbox.closed()
        self.end("connection lost")

    def pause_writing(self) -> None:
        self.outbox.pause()

    def resume_writing(self) -> None:
        self.outbox.resume()

    def data_received(self, data: bytes) -> None:
        self.outbox.hold()
        try:
            for kind, flags, stream_id, payload in self._reader.feed(data):
                self._take(kind, flags, stream_id, payload)
                if self.ended:
                    break
        except ConnectionFault as fault:
            self.outbox.write(self.goaway(fault.code, fault.text))
            self.outbox.flush()
            self.end(f"connection ended: {fault}")
        finally:
            self.outbox.release()

    def forget(self, stream: Stream) -> None:
        """The stream is over; frames that still come for it are passed over."""
        self.streams.pop(stream.id, None)
        self.outbox.drop(stream)
        if self.leaving:
            self.end_when_done()

    def reset(self, stream_id: int, code: Code) -> None:
        """Ends a stream at once, on both sides."""
        self.outbox.write(frames.rst_stream(stream_id, code))
        if stream := self.streams.get(stream_id):
            self.forget(stream)
            stream.lost(reset_error(code))

    def return_window(self, stream: Stream) -> None:
        """Lets the peer send more, once it is worth a frame."""
        if stream.unreturned < DEFAULT_WINDOW // 2 or stream.remote_ended or not stream.takes_more:
            return
        if stream.id in self.streams:
            self.outbox.write(frames.window_update(stream.id, stream.unreturned))
            stream.unreturned = 0

    def end_when_done(self) -> None:
        """Ends a connection that is leaving once its streams are over."""
        if not self.streams and not self.ended:
            self.outbox.flush()
            self.end("connection ended")

    def end(self, text: str, *, now: bool = False) -> None:
        """Ends the connection, after what was written unless `now`. Calls that go on are lost."""
        self.ended = True
        self.outbox.close(now=now)
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.lost(RpcError("UNAVAILABLE", text))

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._greeted and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "expected settings first")
        if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block[0]):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "expected the headers to go on")
        try:
            match kind:
                case frames.HEADERS:
                    self._take_headers(flags, stream_id, payload)
                case frames.DATA:
                    self._take_data(flags, stream_id, payload)
                case frames.CONTINUATION:
                    self._take_continuation(flags, payload)
                case frames.WINDOW_UPDATE | frames.RST_STREAM | frames.PRIORITY:
                    self.patience.spend()
                    self._take_of_stream(kind, stream_id, payload)
                case _:
                    self.patience.spend()
                    self._take_of_connection(kind, flags, stream_id, payload)
        except StreamFault as fault:
            self.patience.spend()
            self.reset(stream_id, fault.code)

    def _take_of_stream(self, kind: int, stream_id: int, payload: bytes) -> None:
        match kind:
            case frames.WINDOW_UPDATE:
                self._take_window(stream_id, frames.read_number(payload, "WINDOW_UPDATE") & MAX_WINDOW)
            case frames.RST_STREAM:
                code = frames.read_number(payload, "RST_STREAM")
                if stream := self._stream(stream_id):
                    self.forget(stream)
                    stream.lost(reset_error(code))
            case _:
                if stream_id == 0:
                    raise ConnectionFault(Code.PROTOCOL_ERROR, "a priority without a stream")
                if len(payload) != 5:
                    raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a priority of {len(payload)} bytes, expected 5")

    def _take_of_connection(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind in (frames.SETTINGS, frames.PING, frames.GOAWAY) and stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"a frame of type {kind} for stream {stream_id}")
        match kind:
            case frames.SETTINGS:
                self._take_settings(flags, payload)
            case frames.PING:
                if len(payload) != 8:
                    raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a ping of {len(payload)} bytes, expected 8")
                if not flags & frames.ACK:
                    self.outbox.write(frames.frame(frames.PING, frames.ACK, 0, payload))
            case frames.GOAWAY:
                last, code, text = frames.read_goaway(payload)
                self.goaway_came(last, f"{named(code)} {text}".strip())
            case frames.PUSH_PROMISE:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "nobody may push")
            case _:  # unknown types are to be passed over, says the RFC
                pass

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self._stream(stream_id)
        self._unreturned += len(payload)
        # Given back at once, so that nobody can exceed it: what is kept is limited by stream.
        if self._unreturned >= DEFAULT_WINDOW // 2:
            self.outbox.write(frames.window_update(0, self._unreturned))
            self._unreturned = 0
        data = frames.unpadded(flags, payload)
        if not data or stream is None:
            self.patience.spend()
        if stream is None:
            return
        if stream.remote_ended:
            raise StreamFault(Code.STREAM_CLOSED, "data after the end")
        stream.unreturned += len(payload)
        if stream.unreturned > DEFAULT_WINDOW:
            raise StreamFault(Code.FLOW_CONTROL_ERROR, "more data than the stream's window")
        stream.remote_ended = bool(flags & frames.END_STREAM)
        try:
            messages = stream.reader.feed(data)
        except RpcError as error:
            stream.fail(error)
            return
        stream.took(messages)
        self.return_window(stream)

    def _take_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        fragment = frames.header_fragment(flags, payload)
        self.headers_begin(stream_id)
        if flags & frames.END_HEADERS:
            self._take_block(stream_id, flags, fragment)
        else:
            self._block, self._continuations = (stream_id, flags, bytearray(fragment)), 0

    def _take_continuation(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "no headers that go on")
        stream_id, first_flags, block = self._block
        block += payload
        self._continuations += 1
        if len(block) > MAX_HEADERS or self._continuations > _MAX_CONTINUATIONS:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"headers of more than {MAX_HEADERS} bytes")
        if flags & frames.END_HEADERS:
            self._block = None
            self._take_block(stream_id, first_flags, bytes(block))

    def _take_block(self, stream_id: int, flags: int, block: bytes) -> None:
        self.headers_came(stream_id, self._decoder.decode(block), ended=bool(flags & frames.END_STREAM))

    def _take_window(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            if increment == 0:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a window enlarged by nothing")
            self.outbox.widen(increment)
        elif stream := self._stream(stream_id):
            if increment == 0:
                raise StreamFault(Code.PROTOCOL_ERROR, "a window enlarged by nothing")
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW:
                raise StreamFault(Code.FLOW_CONTROL_ERROR, f"a window of {stream.send_window}")
            self.outbox.send_waiting()

    def _take_settings(self, flags: int, payload: bytes) -> None:
        self._greeted = True
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "settings acknowledged with others")
            return
        given = dict(frames.read_settings(payload))
        self.peer_streams = given.get(Setting.MAX_CONCURRENT_STREAMS, self.peer_streams)
        window = given.get(Setting.INITIAL_WINDOW_SIZE, self.initial_window)
        change, self.initial_window = window - self.initial_window, window
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"a window of {stream.send_window}")
        self.outbox.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.outbox.send_waiting()

    def _stream(self, stream_id: int) -> AnyStream | None:
        """None for one that is over. Raises `ConnectionFault` for one that was never opened."""
        stream = self.streams.get(stream_id)
        if stream is None and (stream_id > self.last_stream or stream_id % 2 == 0):
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"a frame for stream {stream_id}, which was not opened")
        return stream
