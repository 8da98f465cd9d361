"""Which names a viewer may see, by the API server's decisions.

Everyone who may open the page sees all numbers. Names of pods and namespaces are shown to those who may get pods in the
namespace. Decisions are cached for a minute, so a right that is revoked is effective after this time.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from accelplane.apiserver import ApiError
from accelplane.apiserver.client import ApiServer
from accelplane.authorized import PageAccess, ResourceAccess, UserInfo, review_access, review_token
from accelplane.http.messages import HttpError

from .issuer import IssuerKeys
from .reviewqueue import ReviewQueue

T = TypeVar("T")

log = logging.getLogger(__name__)

ALL_PODS = ResourceAccess("list", "pods")
PAGE = PageAccess("/fleet", "get")
METRICS = PageAccess("/metrics", "get")

_TTL = 60.0
_DENY_TTL = 10.0
_TIMEOUT = 8.0
_AT_ONCE = 8
_MAX_CACHED = 4096
_MAX_UNKNOWN = 100


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

    @property
    def key(self) -> str:
        """Equal for viewers with the same rights."""
        return hashlib.sha256(msgspec.json.encode(self.user)).hexdigest()


class Access:
    """Checks tokens and rights with reviews of the API server, and caches the results. Errors are not cached."""

    def __init__(
        self,
        server: ApiServer,
        audiences: Sequence[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        queue: ReviewQueue | None = None,
        keys: IssuerKeys | None = None,
    ) -> None:
        """`queue` has the turns of tokens that were not valid before, unless they have a signature of `keys`."""
        self._server = server
        self._unlimited = server.without_rate_limit()  # the queue limits these reviews
        self._audiences = audiences
        self._clock = clock
        # Anyone can send invalid tokens. They must not displace valid ones, nor delay reviews of rights and of tokens
        # that were valid before, whose entries stay after their time.
        self._users: OrderedDict[bytes, tuple[float, UserInfo]] = OrderedDict()
        self._invalid: OrderedDict[bytes, tuple[float, None]] = OrderedDict()
        self._decisions: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        self._queue = queue or ReviewQueue()
        self._signed_queue = ReviewQueue()
        self._keys = keys or IssuerKeys(server, clock=clock)
        self._token_turn = asyncio.Semaphore(_AT_ONCE)
        self._access_turn = asyncio.Semaphore(_AT_ONCE)

    async def user_of(self, token: str, source: bytes = b"") -> UserInfo | None:
        """The user of a token of a client at `source`, None if the token is not valid.

        Raises `HttpError` if the API server does not answer, and with too many unknown tokens of the address.
        """
        key = hash_of(token)  # tokens are not stored
        if (cached := self._cached(key)) is not None:
            return cached[1]
        try:
            if key in self._users:
                async with asyncio.timeout(_TIMEOUT), self._token_turn:
                    return await self._review(key, token, self._server)
            # Anyone can write a token, but only the cluster can sign it.
            signed = await self._keys.is_signed(token, self._audiences)
            queue = self._signed_queue if signed else self._queue
            async with queue.turn(source, token) as admitted:
                if not admitted:
                    raise HttpError(429, "too many unknown tokens of this address at the same time; try again later")
                async with asyncio.timeout(_TIMEOUT):
                    return await self._review(key, token, self._unlimited)
        except (ApiError, TimeoutError) as error:
            raise _unanswered(error) from None

    def _cached(self, key: bytes) -> tuple[float, UserInfo | None] | None:
        entry = self._users.get(key) or self._invalid.get(key)
        return entry if entry is not None and entry[0] > self._clock() else None

    async def _review(self, key: bytes, token: str, server: ApiServer) -> UserInfo | None:
        """Raises `ApiError`."""
        # Another request with the token may have had the turn before this one.
        if (cached := self._cached(key)) is not None:
            return cached[1]
        user = await review_token(server, token, self._audiences)
        self._users.pop(key, None)
        if user is not None:
            _store(self._users, key, (self._clock() + _TTL, user))
        else:
            _store(self._invalid, key, (self._clock() + _DENY_TTL, None))
        return user

    async def allowed(self, user: UserInfo, access: PageAccess | ResourceAccess) -> bool:
        """Whether the user may do this. Raises `HttpError` if the API server does not answer."""
        known = self.known(user, access)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(_TIMEOUT), self._access_turn:
                found = await review_access(self._server, user, access)
        except (ApiError, TimeoutError) as error:
            raise _unanswered(error) from None
        ttl = _TTL if found or isinstance(access, ResourceAccess) else _DENY_TTL
        _store(self._decisions, _key(user, access), (self._clock() + ttl, found))
        return found

    def known(self, user: UserInfo, access: PageAccess | ResourceAccess) -> bool | None:
        """The cached decision, None without one."""
        until, found = self._decisions.get(_key(user, access), (0.0, False))
        return found if until > self._clock() else None


class VisibleNames:
    """Which namespaces a viewer may see, while one page is made.

    `visible` answers from the cache. After `ask`, which returns False if nothing was unknown, the page is made again.
    """

    def __init__(self, access: Access | None, viewer: Viewer) -> None:
        self._access = access
        self._user = viewer.user
        self._decided: dict[str, bool] = {}
        self._unknown: set[str] = set()
        self._all = self._user is None

    def visible(self, namespace: str) -> bool:
        """Whether names in the namespace may be shown, as far as it is known."""
        if self._all:
            return True
        if namespace not in self._decided and len(self._unknown) < _MAX_UNKNOWN:
            self._unknown.add(namespace)
        return self._decided.get(namespace, False)

    @property
    def everything(self) -> bool:
        """Whether all names may be shown."""
        return self._all

    async def ask(self) -> bool:
        """Decides about the namespaces that `visible` did not know. Raises `HttpError`."""
        if not self._unknown or self._user is None or self._access is None:
            return False
        unknown, self._unknown = self._unknown, set()
        names = sorted(name for name in unknown if name)
        user, access = self._user, self._access
        try:
            # If one review fails, the others end, too.
            async with asyncio.TaskGroup() as group:
                reviews = [
                    group.create_task(access.allowed(user, ResourceAccess("get", "pods", namespace=name)))
                    for name in names
                ]
        except* HttpError as errors:
            raise _first(errors) from None
        found = [review.result() for review in reviews]
        self._decided |= dict.fromkeys(unknown, False) | dict(zip(names, found, strict=True))
        return True

    async def ask_everything(self) -> None:
        """Decides whether the viewer may list all pods; then no other decision is needed. Raises `HttpError`."""
        if self._user is not None and self._access is not None:
            self._all = await self._access.allowed(self._user, ALL_PODS)


def hash_of(token: str) -> bytes:
    """What stands for a token in the memory."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _key(user: UserInfo, access: PageAccess | ResourceAccess) -> bytes:
    return hashlib.sha256(msgspec.json.encode((type(access).__name__, user, access))).digest()


def _store(cache: OrderedDict[bytes, tuple[float, T]], key: bytes, value: tuple[float, T]) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > _MAX_CACHED:
        cache.popitem(last=False)


def _first(errors: "ExceptionGroup[HttpError]") -> HttpError:
    """The first error of a group."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


def _unanswered(error: Exception) -> HttpError:
    log.error("the API server did not review a token or a right: %s", str(error) or f"no answer in {_TIMEOUT:g} s")
    return HttpError(503, "the API server did not answer whether this is allowed; try again later")
