"""Sessions of browsers: tokens that stay at the server, under random identifiers in cookies."""

import base64
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from msgspec import Struct

from .access import hash_of

COOKIE = "__Secure-accelplane-fleet"

_MAX_AGE = 12 * 3600.0
_MAX_SESSIONS = 1024


class _Session(Struct):
    token: str
    expires: float


class Claims(Struct):
    """The claims of a JSON web token that are read: its expiry, 0 without one, and its audiences."""

    exp: float = 0.0
    aud: list[str] | str = ""

    @property
    def audiences(self) -> frozenset[str]:
        return frozenset([self.aud] if isinstance(self.aud, str) else self.aud) - {""}


class Sessions:
    """Tokens by the hash of a session's identifier, for at most 12 hours and the life of the token.

    With more than 1,024 sessions the oldest one ends.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()

    def create(self, token: str) -> tuple[str, int]:
        """Begins a session. Returns its identifier and its seconds."""
        identifier = secrets.token_urlsafe(32)
        now = self._clock()
        expires = min(now + _MAX_AGE, claims(token).exp or now + _MAX_AGE)
        self._sessions[hash_of(identifier)] = _Session(token, expires)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return identifier, max(0, int(expires - now))

    def token(self, identifier: str) -> str:
        """The token of a session, empty if it does not exist or has expired."""
        found = self._sessions.get(hash_of(identifier))
        if found is None:
            return ""
        if found.expires <= self._clock():
            self.remove(identifier)
            return ""
        return found.token

    def remove(self, identifier: str) -> None:
        """Ends a session."""
        self._sessions.pop(hash_of(identifier), None)


def cookie_of(identifier: str, seconds: int) -> str:
    """A cookie for the path of the form, which may be below a prefix; it is removed without an identifier."""
    return f"{COOKIE}={identifier}; Max-Age={seconds}; HttpOnly; Secure; SameSite=Strict"


def claims(token: str) -> Claims:
    """The claims of a token, none of other text. The token is not verified: the API server does that."""
    parts = token.split(".")
    if len(parts) != 3:
        return Claims()
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)), type=Claims)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return Claims()
