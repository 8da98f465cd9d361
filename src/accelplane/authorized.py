"""Pages for authorized clients. The API server authenticates a client's token (TokenReview) and authorizes it for the
path of the page (SubjectAccessReview for a nonResourceURL).

The status codes are those of controller-runtime's filter for metrics: 401 without a valid token, 403 without the right.
If the API server cannot be asked, no page is served: 503 if it is unreachable, 500 if it rejects the review. The
program's account needs `create` on `tokenreviews` (`authentication.k8s.io`) and on `subjectaccessreviews`
(`authorization.k8s.io`).
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

from msgspec import Struct

from accelplane.apiserver.client import ApiServer
from accelplane.apiserver.errors import ApiError, StatusError, TooManyRequests
from accelplane.apiserver.paths import resource_path
from accelplane.http.handler import Handler
from accelplane.http.messages import HttpError, Request, Response

T = TypeVar("T")

log = logging.getLogger(__name__)

_MAX_CACHED = 128  # allowed clients, and as many others
# Reviews at the same time, and those of them for clients that were not allowed before.
_MAX_CONCURRENT, _MAX_UNKNOWN = 4, 3
# Seconds for which a decision is cached.
_ALLOW_TTL, _DENY_TTL = 60.0, 10.0

# The authentication scheme that a response with status 401 has to name (RFC 9110, 11.6.1).
CHALLENGE: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}

_TOKEN_REVIEWS = resource_path("authentication.k8s.io", "v1", "tokenreviews")
_ACCESS_REVIEWS = resource_path("authorization.k8s.io", "v1", "subjectaccessreviews")


class UserInfo(Struct, rename="camel", omit_defaults=True, frozen=True):
    """The user that a token belongs to."""

    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class TokenStatus(Struct, frozen=True):
    """`audiences` are those of the request that the token is valid for; null if the server knows none."""

    authenticated: bool = False
    user: UserInfo = UserInfo()
    audiences: list[str] | None = None


class TokenReview(Struct, frozen=True):
    status: TokenStatus | None = None


class PageAccess(Struct, frozen=True):
    path: str
    verb: str


class ResourceAccess(Struct, omit_defaults=True, frozen=True):
    """An operation on a resource: in one namespace, or in all without one."""

    verb: str
    resource: str
    group: str = ""
    namespace: str = ""


class AccessStatus(Struct, frozen=True):
    allowed: bool = False


class SubjectAccessReview(Struct, frozen=True):
    status: AccessStatus | None = None


class Authorized:
    """A handler for an `HttpServer` that calls the handler `page` for authorized clients only.

    `public` are the paths that need no token. With `audiences`, a token must be valid for one of them. `review_path`
    returns the path whose nonResourceURL a client needs the right for, by the path of the page.

    Decisions are cached, for at most 256 clients: for a minute if allowed, so a revoked right is effective after this
    time, and for 10 s if not. A client waits at most `timeout` seconds for a decision. Anyone can send invalid tokens:
    they displace no allowed client, and do not delay the next review of one.
    """

    def __init__(
        self,
        server: ApiServer,
        page: Handler,
        *,
        audiences: Sequence[str] = (),
        public: Sequence[str] = (),
        review_path: Callable[[str], str] = lambda path: path,
        timeout: float = 8.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._page = page
        self._audiences = audiences
        self._public = public
        self._review_path = review_path
        self._timeout = timeout
        self._clock = clock
        # By client when the decision expires, and why access was denied. Allowed clients stay after that.
        self._allowed: OrderedDict[bytes, tuple[float, None]] = OrderedDict()
        self._denied: OrderedDict[bytes, tuple[float, HttpError]] = OrderedDict()
        self._reviews = asyncio.Semaphore(_MAX_CONCURRENT)
        self._unknown = asyncio.Semaphore(_MAX_UNKNOWN)
        # Requests of one client at the same time share a review.
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._problem = ""

    async def __call__(self, request: Request) -> Response:
        """Returns the page. Raises `HttpError` if the client is not authorized."""
        if request.path in self._public:
            return await self._answer(request)
        token = _token(request)
        verb, path = request.method.lower(), self._review_path(request.path)
        # Tokens are not stored, only their hashes.
        key = hashlib.sha256(f"{verb} {path}\n{token}".encode()).digest()
        cached = self._cached(key) or await self._decide(key, token, PageAccess(path, verb))
        refusal = cached[1]
        if refusal is not None:
            raise HttpError(refusal.status, str(refusal), refusal.fields)
        return await self._answer(request)

    def _cached(self, key: bytes) -> tuple[float, HttpError | None] | None:
        """The decision about a client, None if it has expired or there is none."""
        found = self._allowed.get(key) or self._denied.get(key)
        return found if found is not None and found[0] > self._clock() else None

    async def _answer(self, request: Request) -> Response:
        response = self._page(request)
        return response if isinstance(response, Response) else await response

    async def _decide(self, key: bytes, token: str, access: PageAccess) -> tuple[float, HttpError | None]:
        """The decision about a client, which is cached. Raises `HttpError` if the API server does not decide."""
        turn = self._turns.setdefault(key, asyncio.Lock())
        unknown = contextlib.nullcontext() if key in self._allowed else self._unknown
        try:
            async with asyncio.timeout(self._timeout), turn:
                if (cached := self._cached(key)) is not None:
                    return cached
                async with unknown, self._reviews:
                    refusal = await self._review(token, access)
        except (ApiError, TimeoutError) as error:
            problem = f"{access.path}: cannot be authorized: {str(error) or f'no answer in {self._timeout:g} s'}"
            if problem != self._problem:  # not for each request
                self._problem = problem
                log.error("%s; it is served to no client until then", problem)
            if isinstance(error, StatusError) and not isinstance(error, TooManyRequests) and error.code < 500:
                raise HttpError(500, "the API server rejected the review of the token; see the log") from None
            raise HttpError(503, "the API server did not review the token; try again later") from None
        self._problem = ""
        self._allowed.pop(key, None)
        if refusal is None:
            return _store(self._allowed, key, (self._clock() + _ALLOW_TTL, None))
        return _store(self._denied, key, (self._clock() + _DENY_TTL, refusal))

    async def _review(self, token: str, access: PageAccess) -> HttpError | None:
        """The refusal of a token, None if it is authorized. Raises `ApiError`."""
        user = await review_token(self._server, token, self._audiences)
        if user is None:
            return HttpError(401, "the token is not valid in this cluster", CHALLENGE)
        allowed = await review_access(self._server, user, access)
        return None if allowed else HttpError(403, f"{user.username} may not {access.verb} {access.path}")


async def review_token(server: ApiServer, token: str, audiences: Sequence[str] = ()) -> UserInfo | None:
    """The user of a token, None if it is not valid for one of the audiences. Raises `ApiError`."""
    request = _review("authentication.k8s.io/v1", "TokenReview", {"token": token, "audiences": audiences})
    found = (await server.post(_TOKEN_REVIEWS, request, TokenReview)).status or TokenStatus()
    # A server that does not know audiences returns none.
    accepted = not audiences or bool(set(found.audiences or ()) & set(audiences))
    return found.user if found.authenticated and found.user.username and accepted else None


async def review_access(server: ApiServer, user: UserInfo, access: PageAccess | ResourceAccess) -> bool:
    """Whether a user may do this. Raises `ApiError`."""
    attributes = "nonResourceAttributes" if isinstance(access, PageAccess) else "resourceAttributes"
    spec = {"user": user.username, "uid": user.uid, "groups": user.groups, "extra": user.extra, attributes: access}
    request = _review("authorization.k8s.io/v1", "SubjectAccessReview", spec)
    reviewed = await server.post(_ACCESS_REVIEWS, request, SubjectAccessReview)
    return (reviewed.status or AccessStatus()).allowed


def _store(cache: OrderedDict[bytes, T], key: bytes, decision: T) -> T:
    cache[key] = decision
    cache.move_to_end(key)
    if len(cache) > _MAX_CACHED:
        cache.popitem(last=False)
    return decision


def _review(api_version: str, kind: str, spec: Mapping[str, object]) -> dict[str, object]:
    return {"apiVersion": api_version, "kind": kind, "spec": {key: value for key, value in spec.items() if value}}


def _token(request: Request) -> str:
    """Raises `HttpError`."""
    scheme, _, token = request.authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise HttpError(401, "expected the header Authorization: Bearer TOKEN", CHALLENGE)
    return token
