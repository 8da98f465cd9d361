"""Which names a viewer may see, by the API server's decisions.

Everyone who may open the page sees all numbers. Names of pods and namespaces are shown to those who may get pods in the
namespace. Decisions are cached: a right that is revoked is effective after a minute, a new one after five.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from accelplane.apiserver import ApiError, RateLimit
from accelplane.apiserver.client import ApiServer
from accelplane.authorized import PageAccess, ResourceAccess, UserInfo, review_access, review_token
from accelplane.http.messages import HttpError
from accelplane.kube.tasks import cancel

T = TypeVar("T")

log = logging.getLogger(__name__)

ALL_PODS = ResourceAccess("list", "pods")
PAGE = PageAccess("/fleet", "get")
METRICS = PageAccess("/metrics", "get")

_TTL = 60.0
_DENY_TTL = 10.0
_HIDDEN_TTL = 300.0
_TIMEOUT = 8.0
_AT_ONCE = 8
_MAX_TOKENS = 4096
# Of 60 viewers with 500 namespaces each, about 10 MB.
_MAX_DECISIONS = 32_768
_MAX_UNKNOWN_TOKENS = 128
_NAMES_TIMEOUT = 5.0
# Requests a second and at once: the client's own limit is for controllers. 500 namespaces take a second.
_RIGHTS_RATE = (200.0, 400)
_TOKENS_RATE = (50.0, 50)


class Viewer(Struct, frozen=True):
    """The viewer of a page. Without `user` there is no authorization, and everything is shown.

    `credential` distinguishes users of the same account with different tokens; `source` is the client's address.
    """

    user: UserInfo | None = None
    session: str = ""
    credential: str = ""
    source: bytes = b""

    @property
    def name(self) -> str:
        return self.user.username if self.user is not None else ""


class Access:
    """Checks tokens and rights with reviews of the API server, and caches the results. Errors are not cached."""

    def __init__(
        self, server: ApiServer, audiences: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server.without_rate_limit()  # the limits here are those of viewers
        self._audiences = audiences
        self._clock = clock
        # Anyone can send invalid tokens. They must not displace valid ones, nor delay reviews of rights and of tokens
        # that were valid before, whose entries stay after their time.
        self._users: OrderedDict[bytes, tuple[float, UserInfo]] = OrderedDict()
        self._invalid: OrderedDict[bytes, tuple[float, None]] = OrderedDict()
        self._decisions: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        self._unknown = 0
        self._known_turn, self._unknown_turn, self._access_turn = (asyncio.Semaphore(_AT_ONCE) for _ in range(3))
        self._tokens_rate, self._rights_rate = RateLimit(*_TOKENS_RATE), RateLimit(*_RIGHTS_RATE)

    async def user_of(self, token: str) -> UserInfo | None:
        """The user of a token, None if the token is not valid.

        Raises `HttpError` if the API server does not answer, and with too many unknown tokens at the same time.
        """
        key = hash_of(token)  # tokens are not stored
        if (cached := self._cached(key)) is not None:
            return cached[1]
        if key in self._users:
            return await self._review(key, token, self._known_turn)
        if self._unknown >= _MAX_UNKNOWN_TOKENS:
            raise HttpError(429, "too many unknown tokens at the same time; try again later")
        self._unknown += 1
        try:
            await self._tokens_rate.acquire()
            return await self._review(key, token, self._unknown_turn)
        finally:
            self._unknown -= 1

    def _cached(self, key: bytes) -> tuple[float, UserInfo | None] | None:
        entry = self._users.get(key) or self._invalid.get(key)
        return entry if entry is not None and entry[0] > self._clock() else None

    async def _review(self, key: bytes, token: str, turn: asyncio.Semaphore) -> UserInfo | None:
        """Raises `HttpError`."""
        async with turn:
            # Another request with the token may have had the turn before this one.
            if (cached := self._cached(key)) is not None:
                return cached[1]
            try:
                async with asyncio.timeout(_TIMEOUT):
                    user = await review_token(self._server, token, self._audiences)
            except (ApiError, TimeoutError) as error:
                raise _unanswered(error) from None
        self._users.pop(key, None)
        if user is not None:
            _store(self._users, key, (self._clock() + _TTL, user), _MAX_TOKENS)
        else:
            _store(self._invalid, key, (self._clock() + _DENY_TTL, None), _MAX_TOKENS)
        return user

    async def allowed(self, user: UserInfo, access: PageAccess | ResourceAccess) -> bool:
        """Whether the user may do this. Raises `HttpError` if the API server does not answer."""
        known = self.known(user, access)
        if known is not None:
            return known
        await self._rights_rate.acquire()
        async with self._access_turn:
            try:
                async with asyncio.timeout(_TIMEOUT):
                    found = await review_access(self._server, user, access)
            except (ApiError, TimeoutError) as error:
                raise _unanswered(error) from None
        denied = _HIDDEN_TTL if isinstance(access, ResourceAccess) and access.namespace else _DENY_TTL
        _store(
            self._decisions, _key(user, access), (self._clock() + (_TTL if found else denied), found), _MAX_DECISIONS
        )
        return found

    def known(self, user: UserInfo, access: PageAccess | ResourceAccess) -> bool | None:
        """The cached decision, None without one."""
        until, found = self._decisions.get(_key(user, access), (0.0, False))
        return found if until > self._clock() else None


class Names(Struct, frozen=True):
    """The namespaces of which a viewer may see names. About `unknown` others there is no decision yet."""

    everything: bool = True
    namespaces: frozenset[str] = frozenset()
    unknown: int = 0

    def visible(self, namespace: str) -> bool:
        return self.everything or namespace in self.namespaces


async def names_of(access: Access | None, viewer: Viewer, namespaces: Collection[str]) -> Names:
    """The names that a viewer may see, of all pods or of those in some of the namespaces. Raises `HttpError`."""
    user = viewer.user
    if user is None or access is None or await access.allowed(user, ALL_PODS):
        return Names()
    rights = {name: ResourceAccess("get", "pods", namespace=name) for name in namespaces if name}
    tasks = [
        asyncio.create_task(access.allowed(user, right))
        for right in rights.values()
        if access.known(user, right) is None
    ]
    if tasks:
        try:
            done, _ = await asyncio.wait(tasks, timeout=_NAMES_TIMEOUT, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await cancel(*(task for task in tasks if not task.done()))
        if error := next((found for task in done if (found := task.exception()) is not None), None):
            raise error
    decisions = {name: access.known(user, right) for name, right in rights.items()}
    allowed = frozenset(name for name, found in decisions.items() if found)
    return Names(everything=False, namespaces=allowed, unknown=sum(found is None for found in decisions.values()))


def hash_of(token: str) -> bytes:
    """What stands for a token in the memory."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _key(user: UserInfo, access: PageAccess | ResourceAccess) -> bytes:
    return hashlib.sha256(msgspec.json.encode((type(access).__name__, user, access))).digest()


def _store(cache: OrderedDict[bytes, tuple[float, T]], key: bytes, value: tuple[float, T], limit: int) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > limit:
        cache.popitem(last=False)


def _unanswered(error: Exception) -> HttpError:
    log.error("the API server did not review a token or a right: %s", str(error) or f"no answer in {_TIMEOUT:g} s")
    return HttpError(503, "the API server did not answer whether this is allowed; try again later")
