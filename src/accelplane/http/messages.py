"""The part of HTTP/1.1 (RFC 9112) that the servers support, parsed strictly and within limits.

A request has a body of known length or none. Chunked bodies are rejected with 411.
"""

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from http import HTTPStatus

from msgspec import Struct

END_OF_HEAD = b"\r\n\r\n"

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.([01])")
# Without the blanks around the value: a client could make an expression for them try all ways to divide them.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\x20-\x7e\x80-\xff\t]*)")
_LENGTH = re.compile(rb"[0-9]{1,10}")
_SINGLETONS = (b"content-length", b"transfer-encoding", b"content-type", b"host", b"authorization")


class HttpLimits(Struct, frozen=True, kw_only=True):
    """Limits of a server. Sizes are bytes, times seconds.

    The defaults fit a program that needs 16 MiB for itself and has a memory limit of 30 MiB.
    """

    body: int = 7 * 1024 * 1024  # as controller-runtime: an old and a new object of 3 MiB each, and the review around
    head: int = 16 * 1024
    fields: int = 64
    cached_heads: int = 256  # number of parsed heads that are cached, each of `cached_head` bytes at most
    cached_head: int = 512
    connections: int = 80  # up to 40 KiB each with TLS; further ones wait
    accept_queue: int = 256  # accepted sockets that wait, up to 10 KiB each; further ones wait in the backlog
    backlog: int = 1024
    memory: int = 8 * 1024 * 1024  # for incomplete requests, and responses that are not sent, of all connections
    response: int = 2816 * 1024  # reserved for the response to a large request
    handshake: float = 10
    request: float = 15  # to receive a request, from its first byte; also to send the response
    answer: float | None = None  # to compute the response; as long as `request` by default
    wait: float = 8  # for memory; longer than `stall`, shorter than the API server waits for a webhook
    idle: float = 180  # longer than the API server keeps a connection, so the client closes first
    linger: float = 1  # between an error response and the close, so that the client can read the response
    stall: float = 5  # without progress of the client, before its connection may be closed to admit others
    attack_evidence: float = 2  # half of the connections silent, and no progress of others, for so long is an attack
    attack_stall: float = 0.05  # instead of `stall` during an attack, before the first request
    attack_idle: float = 1  # and after requests, if one address has half of the connections
    attack_memory: float = 30  # how long an attack is assumed to last after its last evidence

    @property
    def answer_timeout(self) -> float:
        return self.request if self.answer is None else self.answer

    def __post_init__(self) -> None:
        if self.body > self.memory * 7 // 8:
            raise ValueError(f"body: {self.body}: expected at most 7/8 of memory ({self.memory})")


# For pages of metrics and health: GET requests of scrapers, which connect about every 30 s, and of readers that wait up
# to a minute for a change.
PAGE_LIMITS = HttpLimits(
    body=0,
    cached_heads=0,
    connections=64,
    accept_queue=16,
    backlog=64,
    memory=1024 * 1024,
    answer=75,
    idle=30,
    linger=0.2,
)


class Request(Struct, frozen=True):
    """A request; `path` is without its query. `fields` are those that the server is configured to read, in lower case.

    `source` identifies the client's address, and `certificate_name` is the common name of a verified client
    certificate; it is `-` for one without a name.
    """

    method: str
    path: str
    content_type: str
    body: bytes | bytearray
    authorization: str = ""
    query: str = ""
    fields: Mapping[str, str] = {}
    source: bytes = b""
    certificate_name: str = ""


def accepts_gzip(request: Request) -> bool:
    """Whether the client accepts compressed responses. The server has to be configured to read `accept-encoding`."""
    accepted: dict[str, bool] = {}
    for coding in request.fields.get("accept-encoding", "").lower().split(","):
        name, _, parameter = coding.partition(";")
        weight, _, quality = parameter.partition("=")
        accepted[name.strip()] = weight.strip() != "q" or quality.strip().strip("0.") != ""
    # `*` stands for the codings that the field does not name.
    return accepted.get("gzip", accepted.get("*", False))


class Response(Struct, frozen=True):
    """A complete response, or the beginning of one whose other parts are those of `stream`.

    `fields` are further header fields, of ASCII text without line breaks. A streamed response has no length and ends
    with its connection; the stream is closed when the client disconnects.
    """

    status: int
    body: bytes | bytearray
    content_type: str = "application/json"
    fields: Mapping[str, str] = {}
    stream: AsyncGenerator[bytes, None] | None = None


class HttpError(Exception):
    """An error response; the text is its body. `fields` are further header fields, as those of `Response`."""

    def __init__(self, status: int, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.fields = fields or {}


def method_error(methods: Sequence[str]) -> HttpError:
    """The response to a request with another method."""
    return HttpError(405, f"expected method {' or '.join(methods)}", {"Allow": ", ".join(methods)})


class Head(Struct, frozen=True):
    """The request line and header fields that the servers use."""

    method: str
    path: str
    length: int
    content_type: str
    keep_alive: bool
    expects_continue: bool
    authorization: str
    query: str = ""
    fields: Mapping[str, str] = {}


def parse_head(text: bytes, limits: HttpLimits, methods: Sequence[str], names: Sequence[str] = ()) -> Head:
    """`names` are the lower-case names of the fields to return. Raises `HttpError`."""
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
        if name in fields and name in _SINGLETONS:
            raise HttpError(400, f"expected one {name.decode()}")
        value = field[2].strip(b" \t")
        fields[name] = fields[name] + b", " + value if name in fields and name.decode() in names else value
    method = found[1].decode()
    if method not in methods:
        raise method_error(methods)
    connection = [each.strip().lower() for each in fields.get(b"connection", b"").split(b",")]
    path, _, query = found[2].decode().partition("?")
    return Head(
        method=method,
        path=path,
        length=_length(method, fields, limits),
        content_type=fields.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1"),
        # HTTP/1.0 connections are closed after one response, also with `Connection: keep-alive`.
        keep_alive=found[3] == b"1" and b"close" not in connection,
        expects_continue=fields.get(b"expect", b"").lower() == b"100-continue",
        authorization=fields.get(b"authorization", b"").decode("latin-1"),
        query=query,
        fields={name: fields[key].decode("latin-1") for name in names if (key := name.encode()) in fields},
    )


def _length(method: str, fields: Mapping[bytes, bytes], limits: HttpLimits) -> int:
    """The length of the body. Raises `HttpError`."""
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


def serialize_head(response: Response, *, keep_alive: bool) -> bytes:
    """The bytes of a response before its body."""
    end = "" if keep_alive else "Connection: close\r\n"
    status = f"{response.status} {HTTPStatus(response.status).phrase}"
    content = f"Content-Type: {response.content_type}\r\nContent-Length: {len(response.body)}\r\n"
    if response.stream is not None:
        content = f"Content-Type: {response.content_type}\r\n"
    if response.status == HTTPStatus.NOT_MODIFIED:
        content = ""  # it has no content, and its fields would be those of the page
    more = "".join(f"{name}: {value}\r\n" for name, value in response.fields.items())
    return f"HTTP/1.1 {status}\r\n{content}{more}{end}\r\n".encode("ascii")
