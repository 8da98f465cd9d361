"""Pages for those alone who may read them: the API server says who asks (TokenReview) and whether he may
(SubjectAccessReview for the page's path as a nonResourceURL).

As controller-runtime's filter of metrics does it: without a token 401, refused 403. What cannot be asked is not shown:
503 while the API server is away, 500 when it does not let us ask, for which the account needs `create` on
`tokenreviews` of `authentication.k8s.io` and on `subjectaccessreviews` of `authorization.k8s.io`.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct

from accelplane.apiserver import ApiError, StatusError, TooManyRequests
from accelplane.http.messages import HttpError, Request, Response

from .client import Client
from .objects import GlobalResource, Metadata, api

log = logging.getLogger(__name__)

_MOST = 256
# As many questions at a time, whoever makes us ask them; others wait.
_AT_A_TIME = 4


class TokenSpec(Struct, frozen=True):
    token: str = ""


class Who(Struct, rename="camel", omit_defaults=True, frozen=True):
    """Whom a token belongs to, as the API server says it and takes it."""

    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class TokenStatus(Struct, frozen=True):
    authenticated: bool = False
    user: Who = Who()


class TokenReview(GlobalResource, Struct, omit_defaults=True):
    spec: TokenSpec
    metadata: Metadata | None = None
    status: TokenStatus | None = None
    _api_info = api("authentication.k8s.io", "v1", "TokenReview", "tokenreviews")


class PageAccess(Struct, frozen=True):
    path: str
    verb: str


class AccessSpec(Struct, rename="camel", omit_defaults=True, frozen=True):
    user: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None
    non_resource_attributes: PageAccess | None = None


class AccessStatus(Struct, frozen=True):
    allowed: bool = False


class SubjectAccessReview(GlobalResource, Struct, omit_defaults=True):
    spec: AccessSpec
    metadata: Metadata | None = None
    status: AccessStatus | None = None
    _api_info = api("authorization.k8s.io", "v1", "SubjectAccessReview", "subjectaccessreviews")


class Authorized:
    """A handler in front of another one, which `page` is, for an `HttpServer`.

    An answer is remembered for a while, of so many callers at most: `allowed_for` seconds are how long somebody can
    still read who may no more. `patience` is how long a caller waits for it.
    """

    def __init__(
        self,
        client: Client,
        page: Callable[[Request], Response],
        *,
        allowed_for: float = 60.0,
        refused_for: float = 10.0,
        patience: float = 8.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._page = page
        self._allowed_for = allowed_for
        self._refused_for = refused_for
        self._patience = patience
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, HttpError | None]] = OrderedDict()
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self._problem = ""

    async def __call__(self, request: Request) -> Response:
        """The page. Raises `HttpError` for who may not read it."""
        token = _token(request)
        verb = request.method.lower()
        # No token is kept, only what tells it from others.
        key = hashlib.sha256(f"{verb} {request.path}\n{token}".encode()).digest()
        until, refusal = self._known.get(key, (0.0, None))
        if until <= self._clock():
            refusal = await self._ask(token, PageAccess(request.path, verb))
            lasting = self._allowed_for if refusal is None else self._refused_for
            self._known[key] = (self._clock() + lasting, refusal)
            self._known.move_to_end(key)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        if refusal is not None:
            raise HttpError(refusal.status, str(refusal))
        return self._page(request)

    async def _ask(self, token: str, access: PageAccess) -> HttpError | None:
        """Why the owner of a token may not read a page, None when he may. Raises `HttpError` when that is not known."""
        try:
            async with asyncio.timeout(self._patience), self._turns:
                refusal = await self._reviewed(token, access)
        except (ApiError, TimeoutError) as error:
            self._tell(f"cannot ask the API server who may read {access.path}: {str(error) or 'no answer in time'}")
            if isinstance(error, StatusError) and not isinstance(error, TooManyRequests) and error.code < 500:
                raise HttpError(
                    500, "the API server does not let us ask who may read this; the log tells more"
                ) from None
            raise HttpError(503, "the API server does not say now who may read this; try again later") from None
        self._problem = ""
        return refusal

    async def _reviewed(self, token: str, access: PageAccess) -> HttpError | None:
        found = (await self._client.create(TokenReview(TokenSpec(token)))).status or TokenStatus()
        if not found.authenticated or not found.user.username:
            return HttpError(401, "the API server does not know this token")
        who = found.user
        asked = SubjectAccessReview(AccessSpec(who.username, who.uid, who.groups, who.extra, access))
        allowed = ((await self._client.create(asked)).status or AccessStatus()).allowed
        return None if allowed else HttpError(403, f"{who.username} may not {access.verb} {access.path}")

    def _tell(self, problem: str) -> None:
        """Once, and not with each page that somebody asks for."""
        if problem != self._problem:
            self._problem = problem
            log.error("%s; nobody reads it until then", problem)


def _token(request: Request) -> str:
    """Raises `HttpError`."""
    scheme, _, token = request.authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise HttpError(401, "expected a token of the cluster: Authorization: Bearer TOKEN")
    return token
