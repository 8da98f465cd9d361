"""What can come of a request to the API server, one class for each thing that a caller does something about."""

import msgspec


class ApiError(Exception):
    """A request that came to nothing. `retry_after` are the seconds that the server asked to be left alone for."""

    def __init__(self, request: str, problem: str, *, retry_after: float = 0.0) -> None:
        super().__init__(f"{request}: {problem}")
        self.retry_after = retry_after


class Unreachable(ApiError):
    """No answer: the network, TLS, a time-out. Later it may work."""


class Silent(Unreachable):
    """A watch that told nothing for too long: a dead connection, or only a server that had nothing to tell."""


class Unintelligible(ApiError):
    """An answer that is not what it should be: junk, another type, too much of it."""


class Refused(ApiError):
    """The server answered, and did not do it. `code` is HTTP's, `reason` the API's word for it."""

    def __init__(
        self, request: str, problem: str, *, code: int = 0, reason: str = "", retry_after: float = 0.0
    ) -> None:
        super().__init__(request, problem, retry_after=retry_after)
        self.code = code
        self.reason = reason

    @property
    def final(self) -> bool:
        """Whether the same request will be refused again, for as long as nobody changes something."""
        return 400 <= self.code < 500 and not isinstance(self, Conflict | Gone | Throttled)


class NotFound(Refused):
    """There is no such object, or no such kind."""


class Conflict(Refused):
    """The object is not as it was when it was read, or somebody else manages a field: read it again."""


class AlreadyExists(Refused):
    """There is an object of that name."""


class Gone(Refused):
    """The server no longer knows the resource version, or the rest of a list: list again."""


class Throttled(Refused):
    """Too many requests: come again later, not before `retry_after` seconds."""


class Details(msgspec.Struct, frozen=True):
    """The part of a Status that tells when to come again."""

    retryAfterSeconds: int | None = None


class Status(msgspec.Struct, frozen=True):
    """The API server's account of a refusal."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None
    details: Details | None = None


def refusal(request: str, code: int, body: bytes | msgspec.Raw, retry_after: str | None = None) -> Refused:
    """The error for an answer with a status that is none of success; `body` may be anything."""
    try:
        status = msgspec.json.decode(body, type=Status)
    except msgspec.MsgspecError:
        status = Status(message=bytes(body)[:200].decode(errors="backslashreplace"))
    code = code or status.code or 0
    reason = status.reason or ""
    seconds = float(status.details.retryAfterSeconds or 0) if status.details else 0.0
    if retry_after and retry_after.isascii() and retry_after.isdigit():
        seconds = float(retry_after[:6])
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, Refused)
    problem = f"{code} {reason or 'without a reason'}: {status.message or 'without a message'}"
    return kind(request, problem, code=code, reason=reason, retry_after=seconds)


_BY_REASON: dict[str, type[Refused]] = {
    "NotFound": NotFound,
    "Conflict": Conflict,
    "AlreadyExists": AlreadyExists,
    "Expired": Gone,
    "Gone": Gone,
    "TooManyRequests": Throttled,
}
_BY_CODE: dict[int, type[Refused]] = {404: NotFound, 409: Conflict, 410: Gone, 429: Throttled}
