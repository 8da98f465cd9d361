"""The encoding of gRPC: frames, headers, messages and flow control."""

import struct

import pytest
from hpack import Decoder, Encoder, HPACKError
from hyperframe.frame import Frame, GoAwayFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame
from hypothesis import example, given
from hypothesis import strategies as st

from accelplane.rpc import frames, headers
from accelplane.rpc.errors import STATUSES, Code, ConnectionFault, RpcError, StreamFault, code_name, reset_error
from accelplane.rpc.flood_limit import FloodLimit
from accelplane.rpc.frames import PADDED, WITH_PRIORITY, FrameReader, Setting
from accelplane.rpc.headers import HeaderDecoder, Rejection
from accelplane.rpc.messages import MessageReader, frame_message

# Frames


def parsed(data: bytes) -> Frame:
    """One frame, decoded by hyperframe."""
    found, length = Frame.parse_frame_header(memoryview(data[:9]), strict=True)
    found.parse_body(memoryview(data[9:]))
    assert len(data) == 9 + length
    return found


def test_encoded_frames_are_read_by_hyperframe() -> None:
    settings = parsed(frames.settings({Setting.MAX_CONCURRENT_STREAMS: 100, Setting.ENABLE_PUSH: 0}))
    assert isinstance(settings, SettingsFrame)
    assert settings.settings == {3: 100, 2: 0}
    update = parsed(frames.window_update(7, 70_000))
    assert isinstance(update, WindowUpdateFrame)
    assert (update.stream_id, update.window_increment) == (7, 70_000)
    reset = parsed(frames.rst_stream(9, Code.CANCEL))
    assert isinstance(reset, RstStreamFrame)
    assert (reset.stream_id, reset.error_code) == (9, 8)
    goaway = parsed(frames.goaway(11, Code.ENHANCE_YOUR_CALM, "x" * 500))
    assert isinstance(goaway, GoAwayFrame)
    assert (goaway.last_stream_id, goaway.error_code, goaway.additional_data) == (11, 11, b"x" * 200)


FRAMES = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**31 - 1), st.binary(max_size=100)), max_size=10
)


@given(expected=FRAMES, steps=st.lists(st.integers(1, 40), min_size=1), preface=st.sampled_from([b"", frames.PREFACE]))
def test_frames_survive_any_segmentation(expected: list[frames.Frame], steps: list[int], preface: bytes) -> None:
    reader = FrameReader(preface)
    data = preface + b"".join(frames.frame(*one) for one in expected)
    found: list[frames.Frame] = []
    while data:
        step = steps[len(data) % len(steps)]
        found += reader.feed(data[:step])
        data = data[step:]
    assert found == expected


def test_a_too_long_frame_is_rejected_by_its_header() -> None:
    assert list(FrameReader().feed(frames.frame(0, 0, 1, b"x" * 16384)))
    with pytest.raises(ConnectionFault, match="FRAME_SIZE_ERROR: frame of 16385 bytes"):
        list(FrameReader().feed(frames.frame(0, 0, 1, b"x" * 16385)[:9]))


def test_an_unknown_preface_is_rejected_at_its_first_wrong_byte() -> None:
    reader = FrameReader(frames.PREFACE)
    assert list(reader.feed(b"PRI * HTTP")) == []
    with pytest.raises(ConnectionFault, match="expected HTTP/2"):
        list(reader.feed(b"/1"))


@pytest.mark.parametrize(
    ("flags", "payload", "fragment"),
    [
        (0, b"abc", b"abc"), (PADDED, b"\0abc", b"abc"), (PADDED, b"\x02abc", b"a"), (PADDED, b"\x03abc", b""),
        (WITH_PRIORITY, b"12345abc", b"abc"), (PADDED | WITH_PRIORITY, b"\x0112345abc", b"ab"),
        (PADDED, b"\x04abc", None), (PADDED, b"", None), (WITH_PRIORITY, b"1234", None),
        (PADDED | WITH_PRIORITY, b"\x0112345", None),
    ],
)  # fmt: skip
def test_padding_and_priority_are_removed_from_headers(flags: int, payload: bytes, fragment: bytes | None) -> None:
    if fragment is None:
        with pytest.raises(ConnectionFault):
            frames.header_fragment(flags, payload)
    else:
        assert frames.header_fragment(flags, payload) == fragment


def test_settings_and_goaway_are_parsed() -> None:
    payload = struct.pack(">HIHIHI", 4, 2**31 - 1, 5, 16384, 99, 2**32 - 1)
    assert list(frames.read_settings(payload)) == [(4, 2**31 - 1), (5, 16384), (99, 2**32 - 1)]
    assert frames.read_goaway(struct.pack(">II", 2**31 + 5, 11) + b"too_many_pings\xff") == (5, 11, "too_many_pings�")


# Headers


@given(
    fields=st.lists(
        st.tuples(st.from_regex(rb"[a-z][a-z0-9-]{0,200}", fullmatch=True), st.binary(max_size=300)), max_size=20
    )
)
@example(fields=[(b"x", b"y" * length) for length in (126, 127, 128, 254, 255, 16_510, 16_511)])
def test_literals_are_decoded_by_hpack_without_a_dynamic_table(fields: list[tuple[bytes, bytes]]) -> None:
    decoder = Decoder()
    decoder.max_allowed_table_size = 0
    block = headers.EMPTY_TABLE + b"".join(headers.literal(name, value) for name, value in fields)
    assert [tuple(field) for field in decoder.decode(block, raw=True)] == fields


def test_headers_with_huffman_codes_and_a_dynamic_table_are_decoded() -> None:
    encoder, decoder = Encoder(), HeaderDecoder()
    for turn in range(5):
        pairs = [(":path", "/a"), ("te", "trailers"), ("x", str(turn // 2))]
        expected = {name.encode(): value.encode() for name, value in pairs}
        assert decoder.decode(encoder.encode(pairs, huffman=turn % 2 == 0)) == expected


def test_a_repeated_block_of_indices_follows_table_changes() -> None:
    encoder, decoder = Encoder(), HeaderDecoder()
    decoder.decode(encoder.encode([("x", "1")]))
    indices = encoder.encode([("x", "1")])
    assert indices == b"\xbe"
    assert [decoder.decode(indices) for _ in range(3)] == [{b"x": b"1"}] * 3
    decoder.decode(encoder.encode([("x", "2")]))
    assert decoder.decode(b"") == {}
    assert decoder.decode(indices) == {b"x": b"2"}
    assert decoder.decode(b"") == {}


@pytest.mark.parametrize(
    ("block", "field"),
    [
        (b"\x40\x01x\x011", (b"x", b"1")),
        (b"\x41\x81\xf3", (b":authority", b"x")),  # no byte below 0x40, as in a block of indices
    ],
    ids=["new name", "indexed name"],
)
def test_a_repeated_literal_is_added_to_the_table_each_time(block: bytes, field: tuple[bytes, bytes]) -> None:
    decoder = HeaderDecoder()
    assert decoder.decode(block) == decoder.decode(block) == dict([field])
    assert decoder.decode(b"\xbf") == dict([field])  # the older of the two entries


ADD_1, ADD_2 = b"\x40\1x\x011", b"\x40\1x\x012"
NO_ENTRY, ONE_ENTRY, TWO_ENTRIES, FULL_SIZE = b"\x20", b"\x3f\x21", b"\x3f\x45", b"\x3f\xe1\x1f"
BLOCKS = (
    *(b"", b"\x88", b"\xbe", b"\xbf", b"\xbe\0\1y\x011", b"\0\1y\x012", ADD_1, ADD_2, FULL_SIZE + ADD_1),
    *(NO_ENTRY, ONE_ENTRY, TWO_ENTRIES, FULL_SIZE, NO_ENTRY + b"\x88", ONE_ENTRY + b"\x88", FULL_SIZE + b"\x88"),
)


@given(st.lists(st.sampled_from(BLOCKS), max_size=40))
@example([FULL_SIZE + b"\x88", NO_ENTRY + b"\x88", FULL_SIZE + b"\x88", ADD_1, b"\xbe"])
@example([ONE_ENTRY, ADD_1, b"\xbe", ADD_2, b"\xbe"])
@example([TWO_ENTRIES, ADD_2, ADD_1, b"\xbf", ADD_1, b"\xbf"])
def test_repeated_blocks_decode_as_without_a_cache(blocks: list[bytes]) -> None:
    decoder, reference = HeaderDecoder(), Decoder()
    for block in blocks:
        try:
            expected = dict(reference.decode(block, raw=True))
        except HPACKError:
            with pytest.raises(ConnectionFault):
                decoder.decode(block)
            return
        assert decoder.decode(block) == expected


def test_too_long_headers_are_a_connection_error() -> None:
    with pytest.raises(ConnectionFault, match="COMPRESSION_ERROR"):
        HeaderDecoder().decode(Encoder().encode([("x" * 10_000, "y" * 10_000)], huffman=True))


@given(blocks=st.lists(st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(lambda data: b"@\1x" + data))))
def test_any_bytes_decode_to_headers_or_an_error(blocks: list[bytes]) -> None:
    decoder = HeaderDecoder()
    for block in blocks:
        try:
            found = decoder.decode(block)
        except (ConnectionFault, StreamFault):
            continue
        assert all(isinstance(part, bytes) for pair in found.items() for part in pair)


GRPC = {
    b":method": b"POST", b":scheme": b"http", b":path": b"/a/b", b"te": b"trailers",
    b"content-type": b"application/grpc",
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (b"1H", 3600), (b"99999999H", 99999999 * 3600), (b"2M", 120), (b"3S", 3), (b"4m", 0.004), (b"5u", 5e-6),
        (b"6n", 6e-9), (b"0n", 0), (b"", None), (b"1", None), (b"S", None), (b"1s", None), (b"100000000S", None),
        (b"1.5S", None), (b" 1S", None), ("\u0661S".encode(), None),
    ],
)  # fmt: skip
def test_a_timeout_is_a_number_and_a_unit(data: bytes, seconds: float | None) -> None:
    request = {**GRPC, b"grpc-timeout": data}
    if seconds is None:
        with pytest.raises(Rejection, match="malformed grpc-timeout") as caught:
            headers.read_request(request)
        assert (caught.value.http_status, caught.value.code) == (b"400", "INTERNAL")
    else:
        assert headers.read_request(request)[1] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5, "2500000u"), (0.0000001, "1u"), (0, "1u"), (99.9, "99900000u"), (100, "100000m"), (86400, "86400000m"),
        (1e6, "1000000S"), (1e9, "99999999S"),
    ],
)  # fmt: skip
def test_a_deadline_is_encoded_in_the_smallest_unit_of_eight_digits(seconds: float, text: str) -> None:
    ((name, value),) = Decoder().decode(headers.timeout_field(seconds))
    assert (name, value) == ("grpc-timeout", text)


@pytest.mark.parametrize("omitted", [b":method", b":scheme", b":path"])
def test_a_request_without_a_required_pseudo_header_is_malformed(omitted: bytes) -> None:
    with pytest.raises(StreamFault):
        headers.read_request({name: value for name, value in GRPC.items() if name != omitted})


@given(code=st.sampled_from(STATUSES[1:]), text=st.text(max_size=600))
def test_status_and_message_survive_encoding(code: str, text: str) -> None:
    fields = Decoder().decode(headers.status_fields(code, text), raw=True)
    found = headers.status_error({bytes(name): bytes(value) for name, value in fields})
    assert isinstance(found, RpcError)
    assert (found.code, found.text) == (code, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x" * 3000, "x" * 2048 + "…"), ("\u2603" * 1000, "\u2603" * 682 + "…"), ("a\udcffb", "a\\udcffb"),
        ("%41\r\n\0\x7f", "%41\r\n\0\x7f"),
    ],
    ids=["long", "long when encoded", "no text", "control characters"],
)  # fmt: skip
def test_an_invalid_status_message_is_escaped_or_truncated(text: str, expected: str) -> None:
    fields = {
        bytes(name): bytes(value) for name, value in Decoder().decode(headers.status_fields("OK?", text), raw=True)
    }
    assert all(0x20 <= byte <= 0x7E for byte in fields[b"grpc-message"])
    assert len(fields[b"grpc-message"]) < 8192
    found = headers.status_error(fields)
    assert found is not None
    assert (found.code, found.text) == ("UNKNOWN", expected)


@pytest.mark.parametrize(
    ("data", "text"), [(b"%", "%"), (b"%4", "%4"), (b"%zz%41", "%zzA"), (b"%ff", "�"), (b"a\xffb", "a�b")]
)
def test_a_status_message_with_invalid_escapes_is_decoded(data: bytes, text: str) -> None:
    found = headers.status_error({b"grpc-status": b"1", b"grpc-message": data})
    assert found is not None
    assert found.text == text


@pytest.mark.parametrize(
    ("data", "code"), [(b"16", "UNAUTHENTICATED"), (b"17", "UNKNOWN"), (b"005", "NOT_FOUND"), (b"0005", "UNKNOWN")]
)
def test_an_unknown_status_number_reads_as_unknown(data: bytes, code: str) -> None:
    found = headers.status_error({b"grpc-status": data})
    assert found is not None
    assert found.code == code


# Messages


@given(messages=st.lists(st.binary(max_size=50), max_size=8), step=st.integers(1, 60))
def test_messages_survive_any_segmentation(messages: list[bytes], step: int) -> None:
    reader = MessageReader(50)
    data = b"".join(frame_message(message) for message in messages)
    found: list[bytes] = []
    for at in range(0, len(data), step):
        found += reader.feed(data[at : at + step])
    assert (found, reader.pending) == (messages, 0)


@pytest.mark.parametrize(
    ("head", "code"),
    [(b"\1\0\0\0\0", "UNIMPLEMENTED"), (b"\xff\0\0\0\0", "UNIMPLEMENTED"), (b"\0\0\0\0\x33", "RESOURCE_EXHAUSTED")],
)
def test_an_unsupported_message_is_rejected_by_its_header(head: bytes, code: str) -> None:
    reader = MessageReader(50)
    assert reader.feed(frame_message(b"first") + head[:4]) == [b"first"]
    with pytest.raises(RpcError) as caught:
        reader.feed(head[4:])
    assert caught.value.code == code


# Errors and credit


def test_error_codes_have_names() -> None:
    assert [code_name(code) for code in (0, 11, 4711)] == ["NO_ERROR", "ENHANCE_YOUR_CALM", "error 4711"]
    assert [reset_error(code).code for code in (7, 8, 11, 2, 4711)] == [
        "UNAVAILABLE", "CANCELLED", "RESOURCE_EXHAUSTED", "INTERNAL", "INTERNAL",
    ]  # fmt: skip
    assert STATUSES[16] == "UNAUTHENTICATED"


def test_flood_limit_is_refilled_by_sent_data() -> None:
    flood_limit = FloodLimit()

    def consume(count: int) -> None:
        for _ in range(count):
            flood_limit.consume()

    consume(1000)
    flood_limit.refill()
    consume(10)
    with pytest.raises(ConnectionFault, match="ENHANCE_YOUR_CALM"):
        consume(1000)
