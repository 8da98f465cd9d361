"""Heads and bodies of requests in received bytes."""

import contextlib
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.http.messages import HttpError, HttpLimits, Request, accepts_gzip, parse_head
from accelplane.http.requestreader import RequestReader

LIMITS = HttpLimits(head=256, body=64)

requests = st.lists(st.tuples(st.sampled_from(["/a", "/b?c=d"]), st.binary(max_size=LIMITS.body)), max_size=5)


def reader() -> RequestReader:
    return RequestReader(functools.partial(parse_head, limits=LIMITS, methods=("POST",)), LIMITS.head)


def read(found: RequestReader) -> tuple[str, bytes] | None:
    """Path and body of the next complete request."""
    head = found.head or found.read_head()
    if head is None:
        return None
    body = found.read_body(head.length)
    if body is None:
        return None
    found.finish()
    return head.path, bytes(body)


@given(sent=requests, cuts=st.lists(st.integers(min_value=1, max_value=200), max_size=20))
def test_requests_are_the_same_for_any_split_of_their_bytes(sent: list[tuple[str, bytes]], cuts: list[int]) -> None:
    data = b"".join(
        f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body for path, body in sent
    )
    found = reader()
    received: list[tuple[str, bytes]] = []
    for size in [*cuts, len(data)]:
        part, data = data[:size], data[size:]
        found.received += part
        while (request := read(found)) is not None:
            received.append(request)

    assert received == [(path.partition("?")[0], body) for path, body in sent]
    assert not found.started


@given(parts=st.lists(st.binary(max_size=LIMITS.head), max_size=6))
def test_any_bytes_are_a_request_an_error_or_an_incomplete_head(parts: list[bytes]) -> None:
    found = reader()
    with contextlib.suppress(HttpError):
        for part in parts:
            found.received += part
            while read(found) is not None:
                pass
            assert found.head is not None or len(found.received) <= LIMITS.head


def test_a_head_that_exceeds_the_limit_is_rejected_before_it_is_complete() -> None:
    found = reader()
    found.received += b"G" * LIMITS.head
    assert found.read_head() is None
    found.received += b"G"
    with pytest.raises(HttpError, match="expected a head of at most 256 bytes") as caught:
        found.read_head()
    assert caught.value.status == 431


def test_a_body_that_is_everything_received_is_not_copied() -> None:
    found = reader()
    found.received += b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n12"
    head = found.read_head()
    assert head is not None
    received = found.received
    assert found.read_body(head.length) is received
    assert found.received == b""


BLANKS = " \t" * 500_000
"""So many that reading them takes seconds at most in linear time, and days in quadratic time."""


@pytest.mark.timeout(60)
def test_blanks_of_a_header_field_are_read_in_linear_time() -> None:
    field = f"Accept-Encoding:{BLANKS}gzip{BLANKS}".encode()
    head = parse_head(b"GET / HTTP/1.1\r\n" + field, LIMITS, ("GET",), ("accept-encoding",))
    assert head.fields == {"accept-encoding": "gzip"}
    with pytest.raises(HttpError, match="expected header fields as name: value"):
        parse_head(b"GET / HTTP/1.1\r\n" + field + b"\x01", LIMITS, ("GET",))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("accepted", "found"),
    [(f"gzip{BLANKS}", True), (f"gzip{BLANKS}x", False), (f"gzip;{BLANKS}q{BLANKS}={BLANKS}0{BLANKS}", False)],
)
def test_accepted_codings_are_read_in_linear_time(accepted: str, *, found: bool) -> None:
    assert accepts_gzip(Request("GET", "/", "", b"", fields={"accept-encoding": accepted})) is found
