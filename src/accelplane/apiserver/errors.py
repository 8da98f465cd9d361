"""The errors of requests to the API server, one class for each thing that a caller can act on.

Facts: Kubernetes API concepts (the Status object, its reasons and `details`), RFC 9110 (Retry-After).
"""

from collections.abc import Sequence

import msgspec

# A wrong answer of a server or of a proxy must not stop a cache or a controller for hours.
MAX_RETRY_AFTER = 60.0
_MAX_MESSAGE = 2000
_MAX_REASON = 100


class ApiError(Exception):
    """A request that failed. `retry_after` is the delay in seconds that the server requested, 0 without one."""

    def __init__(self, subject: str, problem: str, *, retry_after: float = 0.0) -> None:
        """`subject` is the request, or the file or object at fault."""
        super().__init__(f"{subject}: {problem}")
        self.retry_after = retry_after


class NoCredentials(ApiError):
    """The server's address or the credentials are missing or unusable; no request was sent."""


class Unreachable(ApiError):
    """No complete response: network, TLS or timeout. A later request may succeed."""


class WatchIdleTimeout(Unreachable):
    """A watch that received nothing for too long: the connection is broken, or there were no events."""


class DecodeError(ApiError):
    """A response that is not HTTP, not JSON, of another type, or larger than allowed."""


class Cause(msgspec.Struct, frozen=True):
    """One cause of a Status, for example a field with another manager."""

    reason: str = ""
    message: str = ""
    field: str = ""


class StatusError(ApiError):
    """A response with an error status. `code` is the HTTP status; `reason`, `message` and `causes` are the Status's."""

    def __init__(
        self,
        request: str,
        message: str = "",
        *,
        code: int = 0,
        reason: str = "",
        causes: Sequence[Cause] = (),
        retry_after: float = 0.0,
    ) -> None:
        status = " ".join(each for each in (str(code or ""), reason) if each)
        super().__init__(request, ": ".join(each for each in (status, message) if each), retry_after=retry_after)
        self.code = code
        self.reason = reason
        self.message = message
        self.causes = causes

    @property
    def permanent(self) -> bool:
        """Whether the same request fails again until an object, a role or the request itself changes."""
        return 400 <= self.code < 500 and self.code != 408 and not isinstance(self, Conflict | Gone | TooManyRequests)


class NotFound(StatusError):
    """The object does not exist, or its kind is not served."""


class Conflict(StatusError):
    """The object changed since it was read, or another manager owns a field; read it again."""


class AlreadyExists(StatusError):
    """An object of this name exists."""


class Gone(StatusError):
    """The resource version of a watch, or the continue token of a list, has expired; list again."""


class TooManyRequests(StatusError):
    """The server limits the rate of requests; wait for `retry_after` seconds."""


class _Details(msgspec.Struct, frozen=True):
    retry_after: int | None = msgspec.field(name="retryAfterSeconds", default=None)
    causes: list[Cause] | None = None


class _Status(msgspec.Struct, frozen=True):
    code: int | None = None
    reason: str | None = None
    message: str | None = None
    details: _Details | None = None


_CLASSES: dict[str | int, type[StatusError]] = {
    "NotFound": NotFound,
    404: NotFound,
    "Conflict": Conflict,
    409: Conflict,
    "AlreadyExists": AlreadyExists,
    "Expired": Gone,
    "Gone": Gone,
    410: Gone,
    "TooManyRequests": TooManyRequests,
    429: TooManyRequests,
}


def status_error(
    request: str, code: int, body: bytes | msgspec.Raw, *, phrase: str = "", retry_after: str = ""
) -> StatusError:
    """The error for a response whose status is not a success, or, with code 0, for the Status in an ERROR event.

    Proxies and authenticators in front of the server respond with text; then the message is the start of it.
    `retry_after` is the header of that name; longer delays than `MAX_RETRY_AFTER` are shortened.
    """
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = bytes(body)[:_MAX_MESSAGE].decode(errors="backslashreplace")
        status = _Status(message=f"{phrase} {text.strip()}".strip())
    details = status.details or _Details()
    code = code or status.code or 500
    reason = (status.reason or "")[:_MAX_REASON]
    seconds = float(retry_after[:6]) if retry_after.isascii() and retry_after.isdigit() else details.retry_after or 0
    kind = _CLASSES.get(reason) or _CLASSES.get(code, StatusError)
    return kind(
        request,
        (status.message or phrase)[:_MAX_MESSAGE],
        code=code,
        reason=reason,
        causes=tuple(details.causes or ()),
        retry_after=min(max(0.0, seconds), MAX_RETRY_AFTER),
    )
