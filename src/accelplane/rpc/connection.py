"""One end of an HTTP/2 connection: frame handling, flow control and shutdown. Base of client and server connections.

Limits bound the memory and time that a peer can use: headers are short and windows small, nothing is read from a peer
that does not read, and frames without data are subject to a `FloodLimit`. Specification: RFC 9113.
"""

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from accelplane.rpc import frames
from accelplane.rpc.errors import Code, ConnectionFault, RpcError, StreamFault, code_name, reset_error
from accelplane.rpc.flood_limit import FloodLimit
from accelplane.rpc.frames import DEFAULT_WINDOW, MAX_WINDOW, Setting
from accelplane.rpc.headers import MAX_HEADERS, HeaderDecoder, Headers
from accelplane.rpc.outbox import Outbox
from accelplane.rpc.stream import Stream

_MAX_CONTINUATIONS = 16

AnyStream = TypeVar("AnyStream", bound=Stream)


class Connection(asyncio.Protocol, ABC, Generic[AnyStream]):
    """Sends `initial_frames` when connected, and expects `preface` before the peer's first frame."""

    def __init__(self, initial_frames: bytes, preface: bytes) -> None:
        self.flood_limit = FloodLimit()
        self.outbox = Outbox(self.flood_limit)
        self.streams: dict[int, AnyStream] = {}
        self.last_stream = 0  # the highest opened one
        self.last_peer_stream = 0  # the highest one that the peer opened
        self.max_peer_streams = MAX_WINDOW  # concurrent streams that the peer accepts
        self.initial_window = DEFAULT_WINDOW
        self.draining = False  # GOAWAY is sent or received: the connection ends with its last stream
        self.ended = False
        self._initial_frames = initial_frames
        self._reader = frames.FrameReader(preface)
        self._decoder = HeaderDecoder()
        # Headers that a CONTINUATION follows: stream, flags, fragments.
        self._partial_headers: tuple[int, int, bytearray] | None = None
        self._continuations = 0
        self._settings_received = False
        self._unacked_bytes = 0  # received, and not yet acknowledged by a WINDOW_UPDATE

    @abstractmethod
    def on_headers_start(self, stream_id: int) -> None:
        """Raises `ConnectionFault` unless the peer may send headers for this stream."""

    @abstractmethod
    def on_headers(self, stream_id: int, headers: Headers, *, ended: bool) -> None: ...

    @abstractmethod
    def on_goaway(self, last_stream: int, reason: str) -> None: ...

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self.outbox.transport = transport
        if self.ended:
            self.outbox.close(now=True)
        else:
            self.outbox.write(self._initial_frames)

    def connection_lost(self, exc: Exception | None) -> None:
        self.outbox.transport = None  # it is closed; its methods must not be called any more
        self.end("connection lost")

    def pause_writing(self) -> None:
        self.outbox.pause()

    def resume_writing(self) -> None:
        self.outbox.resume()

    def data_received(self, data: bytes) -> None:
        self.outbox.cork()
        try:
            for kind, flags, stream_id, payload in self._reader.feed(data):
                self._handle(kind, flags, stream_id, payload)
                if self.ended:
                    break
        except ConnectionFault as fault:
            self.outbox.write(frames.goaway(self.last_peer_stream, fault.code, fault.text))
            self.outbox.flush()
            self.end(f"connection ended: {fault}")
        finally:
            self.outbox.uncork()

    def buffered_bytes(self) -> int:
        """The size of unfinished calls in memory."""
        return sum(stream.buffered_bytes for stream in self.streams.values())

    def remove_stream(self, stream: Stream) -> None:
        """Removes a stream that has ended. Later frames for it are ignored."""
        self.streams.pop(stream.id, None)
        self.outbox.drop(stream)
        if self.draining:
            self.end_if_idle()

    def reset_stream(self, stream_id: int, code: Code) -> None:
        """Ends a stream immediately, on both sides."""
        self.outbox.write(frames.rst_stream(stream_id, code))
        if stream := self.streams.get(stream_id):
            self.remove_stream(stream)
            stream.on_closed(reset_error(code))

    def return_window(self, stream: Stream) -> None:
        """Acknowledges received data once it is half a window."""
        due = stream.unacked_bytes >= DEFAULT_WINDOW // 2 and not stream.remote_ended and stream.accepts_data
        if due and stream.id in self.streams:
            self.outbox.write(frames.window_update(stream.id, stream.unacked_bytes))
            stream.unacked_bytes = 0

    def end_if_idle(self) -> None:
        """Ends a draining connection without streams."""
        if not self.streams and not self.ended:
            self.outbox.flush()
            self.end("connection ended")

    def end(self, text: str, *, now: bool = False) -> None:
        """Ends the connection, after sending buffered data unless `now`. Its calls end with UNAVAILABLE."""
        self.ended = True
        self.outbox.close(now=now)
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.on_closed(RpcError("UNAVAILABLE", text))

    def _handle(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._settings_received and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "expected SETTINGS first")
        if self._partial_headers is not None and (kind != frames.CONTINUATION or stream_id != self._partial_headers[0]):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "expected CONTINUATION")
        try:
            match kind:
                case frames.HEADERS:
                    self._handle_headers(flags, stream_id, payload)
                case frames.DATA:
                    self._handle_data(flags, stream_id, payload)
                case frames.CONTINUATION:
                    self._handle_continuation(flags, payload)
                case frames.WINDOW_UPDATE | frames.RST_STREAM | frames.PRIORITY:
                    self.flood_limit.consume()
                    self._handle_stream_frame(kind, stream_id, payload)
                case _:
                    self.flood_limit.consume()
                    self._handle_connection_frame(kind, flags, stream_id, payload)
        except StreamFault as fault:
            self.flood_limit.consume()
            self.reset_stream(stream_id, fault.code)

    def _handle_stream_frame(self, kind: int, stream_id: int, payload: bytes) -> None:
        match kind:
            case frames.WINDOW_UPDATE:
                self._handle_window(stream_id, frames.read_number(payload, "WINDOW_UPDATE") & MAX_WINDOW)
            case frames.RST_STREAM:
                code = frames.read_number(payload, "RST_STREAM")
                if stream := self._stream(stream_id):
                    self.remove_stream(stream)
                    stream.on_closed(reset_error(code))
            case _:
                if stream_id == 0:
                    raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY for stream 0")
                if len(payload) != 5:
                    raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes, expected 5")

    def _handle_connection_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind in (frames.SETTINGS, frames.PING, frames.GOAWAY) and stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"frame of type {kind} for stream {stream_id}, expected 0")
        match kind:
            case frames.SETTINGS:
                self._handle_settings(flags, payload)
            case frames.PING:
                if len(payload) != 8:
                    raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes, expected 8")
                if not flags & frames.ACK:
                    self.outbox.write(frames.frame(frames.PING, frames.ACK, 0, payload))
            case frames.GOAWAY:
                last, code, text = frames.read_goaway(payload)
                self.on_goaway(last, f"{code_name(code)} {text}".strip())
            case frames.PUSH_PROMISE:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE is not supported")
            case _:  # RFC 9113, section 5.5: unknown types are ignored
                pass

    def _handle_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self._stream(stream_id)
        self._unacked_bytes += len(payload)
        # Acknowledged immediately: the streams' windows limit the buffered data.
        if self._unacked_bytes >= DEFAULT_WINDOW // 2:
            self.outbox.write(frames.window_update(0, self._unacked_bytes))
            self._unacked_bytes = 0
        data = frames.remove_padding(flags, payload)
        if not data or stream is None:
            self.flood_limit.consume()
        if stream is None:
            return
        if stream.remote_ended:
            raise StreamFault(Code.STREAM_CLOSED, "data after the end")
        stream.unacked_bytes += len(payload)
        if stream.unacked_bytes > DEFAULT_WINDOW:
            raise StreamFault(Code.FLOW_CONTROL_ERROR, "more data than the stream's window allows")
        stream.remote_ended = bool(flags & frames.END_STREAM)
        try:
            messages = stream.reader.feed(data)
        except RpcError as error:
            stream.fail(error)
            return
        stream.on_messages(messages)
        self.return_window(stream)

    def _handle_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        fragment = frames.header_fragment(flags, payload)
        self.on_headers_start(stream_id)
        if flags & frames.END_HEADERS:
            self._handle_block(stream_id, flags, fragment)
        else:
            self._partial_headers, self._continuations = (stream_id, flags, bytearray(fragment)), 0

    def _handle_continuation(self, flags: int, payload: bytes) -> None:
        if self._partial_headers is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        stream_id, first_flags, block = self._partial_headers
        block += payload
        self._continuations += 1
        if len(block) > MAX_HEADERS or self._continuations > _MAX_CONTINUATIONS:
            raise ConnectionFault(
                Code.ENHANCE_YOUR_CALM, f"headers longer than {MAX_HEADERS} bytes or {_MAX_CONTINUATIONS} frames"
            )
        if flags & frames.END_HEADERS:
            self._partial_headers = None
            self._handle_block(stream_id, first_flags, bytes(block))

    def _handle_block(self, stream_id: int, flags: int, block: bytes) -> None:
        self.on_headers(stream_id, self._decoder.decode(block), ended=bool(flags & frames.END_STREAM))

    def _handle_window(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            if increment == 0:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
            self.outbox.enlarge_window(increment)
        elif stream := self._stream(stream_id):
            if increment == 0:
                raise StreamFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW:
                raise StreamFault(Code.FLOW_CONTROL_ERROR, "window exceeds 2**31 - 1")
            self.outbox.send_pending()

    def _handle_settings(self, flags: int, payload: bytes) -> None:
        self._settings_received = True
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS acknowledgment with a payload, expected none")
            return
        values = dict(frames.read_settings(payload))
        self.max_peer_streams = values.get(Setting.MAX_CONCURRENT_STREAMS, self.max_peer_streams)
        window = values.get(Setting.INITIAL_WINDOW_SIZE, self.initial_window)
        change, self.initial_window = window - self.initial_window, window
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "window exceeds 2**31 - 1")
        self.outbox.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.outbox.send_pending()

    def _stream(self, stream_id: int) -> AnyStream | None:
        """Returns the stream, None if it has ended. Raises `ConnectionFault` if it was never opened."""
        stream = self.streams.get(stream_id)
        if stream is None and (stream_id > self.last_stream or stream_id % 2 == 0):
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"frame for stream {stream_id}, which is not open")
        return stream
