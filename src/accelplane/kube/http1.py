"""The part of HTTP/1.1 (RFC 9112) that our servers speak, read strictly and within limits.

A request is a `POST` with a body of known length or a `GET`; whatever else HTTP can do is refused with a word on why.
"""

import re
from collections.abc import Mapping
from http import HTTPStatus

from msgspec import Struct

END_OF_HEAD = b"\r\n\r\n"

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*)")
_LENGTH = re.compile(rb"[0-9]{1,10}")
_ONCE = (b"content-length", b"transfer-encoding", b"content-type", b"host", b"authorization")


class HttpLimits(Struct, frozen=True, kw_only=True):
    """What a caller may cost. Sizes are bytes, times seconds."""

    body: int = 3 * 1024 * 1024  # what the API server itself takes at most
    head: int = 16 * 1024
    fields: int = 64
    remembered: int = 256  # heads that came before; with 0 none is, nor a password in it
    connections: int = 512
    unfinished: int = 32 * 1024 * 1024  # of all connections together
    handshake: float = 10
    request: float = 15  # a whole one, from its first byte; also for taking the answer
    idle: float = 180  # longer than the API server keeps one, so it is never the server who closes under a request
    linger: float = 1  # for a caller who is still talking to hear a refusal


class Request(Struct, frozen=True):
    """A request; `path` is without its query. Of its header fields nobody needs more than these."""

    method: str
    path: str
    content_type: str
    body: bytes | bytearray
    authorization: str = ""


class Answer(Struct, frozen=True):
    """What the caller gets."""

    status: int
    body: bytes
    content_type: str = "application/json"


class HttpError(Exception):
    """A request that is refused; the text is for the caller."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Head(Struct, frozen=True):
    """What stands before a body, as far as it matters."""

    method: str
    path: str
    length: int
    content_type: str
    keep: bool
    expects: bool
    authorization: str


def read_head(text: bytes, limits: HttpLimits) -> Head:
    """Raises `HttpError`."""
    first, *lines = text.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None:
        raise HttpError(400, "expected a request line of HTTP/1.1 with a path")
    if len(lines) > limits.fields:
        raise HttpError(431, f"expected at most {limits.fields} header fields")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise HttpError(400, "expected header fields as name: value")
        name = field[1].lower()
        if name in fields and name in _ONCE:
            raise HttpError(400, f"expected one {name.decode()}")
        fields[name] = field[2].rstrip()
    method = found[1].decode()
    connection = [each.strip().lower() for each in fields.get(b"connection", b"").split(b",")]
    return Head(
        method=method,
        path=found[2].partition(b"?")[0].decode(),
        length=_length(method, fields, limits),
        content_type=fields.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1"),
        # HTTP/1.0 would have to ask for it, and nobody who matters speaks that.
        keep=found[3] == b"1" and b"close" not in connection,
        expects=fields.get(b"expect", b"").lower() == b"100-continue",
        authorization=fields.get(b"authorization", b"").decode("latin-1"),
    )


def _length(method: str, fields: Mapping[bytes, bytes], limits: HttpLimits) -> int:
    """Raises `HttpError`."""
    if method not in ("POST", "GET"):
        raise HttpError(405, "expected POST, or GET for pages")
    if b"transfer-encoding" in fields:
        raise HttpError(411, "expected a body with a content-length")
    text = fields.get(b"content-length")
    if text is None:
        if method == "POST":
            raise HttpError(411, "expected a body with a content-length")
        return 0
    if not _LENGTH.fullmatch(text):
        raise HttpError(400, "expected a content-length that is a number")
    if int(text) > limits.body:
        raise HttpError(413, f"expected a body of at most {limits.body} bytes")
    return int(text)


def written(answer: Answer, *, keep: bool) -> bytes:
    """An answer as it goes over the wire; without `keep` it is the last one of its connection."""
    end = "" if keep else "Connection: close\r\n"
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n{end}\r\n"
    )
    return head.encode("ascii") + answer.body
