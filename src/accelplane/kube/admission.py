"""Admission of objects: AdmissionReview (`admission.k8s.io`, v1 or v1beta1) over HTTPS.

A webhook is a function of the review and of the object, decoded as a type that has only the fields that matter. A
`Mutator` returns a patch, a `Validator` allows or denies. Fields that are newer than this program stay unchanged,
because the whole object is never decoded or encoded.
"""

import asyncio
import base64
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from accelplane.http.handler import PendingResponse
from accelplane.http.messages import HttpError, HttpLimits, Request, Response
from accelplane.http.server import HttpServer
from accelplane.http.tls import ConnectionContext
from accelplane.kube.jsonpatch import Operation
from accelplane.logs import v

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_WARNING = 200  # characters; the API server cuts at 256 and drops all of them beyond 4096
_MAX_WARNINGS = 16
_MAX_DENIAL = 2048  # a message may quote a field of a megabyte
# Larger reviews are processed one at a time and in steps, so that others do not wait for them.
_LARGE = 64 * 1024
_STEP = 0.004
# Each value of a decoded object takes up to 100 bytes.
_MAX_VALUES = 50_000
_BASE64_CHUNK = 48 * 1024


class Kind(Struct, frozen=True):
    """A group, version and kind."""

    group: str = ""
    version: str = ""
    kind: str = ""


class User(Struct, frozen=True):
    """The user of the request."""

    username: str = ""


class Review(Struct, frozen=True, rename="camel"):
    """The request of an AdmissionReview; the objects are not decoded."""

    uid: str
    operation: str = ""
    kind: Kind = Kind()
    name: str = ""
    namespace: str = ""
    user_info: User = User()
    dry_run: bool | None = None
    object: Raw = Raw(b"null")
    old_object: Raw = Raw(b"null")


class Denial(Struct, frozen=True):
    """Why an object is denied."""

    message: str
    code: int = 403
    reason: str = "Forbidden"


class Decision(Struct, frozen=True):
    """The result of a review: allowed, with a patch if it is not empty, unless there is a denial."""

    patch: Sequence[Operation] | Raw = ()
    denial: Denial | None = None
    warnings: Sequence[str] = ()


ALLOWED = Decision()

Steps = Generator[None, None, Decision]
"""A decision that is computed in steps of some milliseconds."""


def deny(message: str, *, code: int = 403, reason: str = "Forbidden") -> Decision:
    """Denies an object; users see the message."""
    return Decision(denial=Denial(_truncate(message, _MAX_DENIAL), code, reason))


def run(steps: Generator[None, None, T]) -> T:
    """Runs all steps and returns their result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: T = end.value
        return result


class _Status(Struct, frozen=True, omit_defaults=True):
    code: int
    reason: str = ""
    message: str = ""


class _Response(Struct, frozen=True, rename="camel"):
    uid: str
    allowed: bool
    status: _Status
    warnings: Sequence[str] | UnsetType = UNSET
    patch_type: str | UnsetType = UNSET


class _ReviewRequest(Struct, frozen=True, rename="camel"):
    request: Review
    api_version: str = ""
    kind: str = ""


class _ReviewResponse(Struct, frozen=True, rename="camel", kw_only=True):
    api_version: str
    kind: str = "AdmissionReview"
    response: _Response  # last, so that the patch can be appended to its text


# A webhook configuration may request the older version, which has the same fields.
_VERSIONS = ("admission.k8s.io/v1", "admission.k8s.io/v1beta1")
_DECODER = msgspec.json.Decoder(_ReviewRequest)
_ENCODER = msgspec.json.Encoder()
_OK = _Status(200)
_NULL = Raw(b"null")


class _OldMetadata(Struct, frozen=True, rename="camel"):
    deletion_timestamp: str | None = None


class _OldObject(Struct, frozen=True):
    metadata: _OldMetadata = _OldMetadata()


_OLD_OBJECT = msgspec.json.Decoder(_OldObject)


class Webhook(Generic[T]):
    """One path, to which objects of `kind` are sent, and the function that decides about them.

    `decide` returns the decision or its steps. Deletions are always allowed, and so are updates of an object that is
    being deleted: denying these would prevent the removal of its finalizers.

    An object with more than `max_values` values is denied, as it could exhaust the memory. None disables this for kinds
    that leave long lists undecoded.
    """

    def __init__(
        self,
        path: str,
        kind: type[T],
        decide: Callable[[Review, T], Decision | Steps],
        *,
        max_values: int | None = _MAX_VALUES,
    ) -> None:
        self.path = path
        self._decide = decide
        self._max_values = max_values
        self._decoder = msgspec.json.Decoder(kind)

    def steps(self, review: Review) -> Steps:
        """The decision on one review; an object that cannot be decoded is denied with 400."""
        if review.operation == "DELETE" or (review.operation == "UPDATE" and _is_being_deleted(review.old_object)):
            return ALLOWED
        if self._max_values is not None and (count := _count_values(review.object)) > self._max_values:
            message = f"the object has {count} values, expected at most {self._max_values}"
            return deny(message, code=413, reason="RequestEntityTooLarge")
        try:
            decision = self._decide(review, self._decoder.decode(review.object))
            if not isinstance(decision, Decision):
                decision = yield from decision
        # RecursionError: objects may be nested to any depth.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return deny(f"the object cannot be decoded: {error}", code=400, reason="BadRequest")
        return decision

    def handle(self, review: Review) -> Decision:
        """The decision on one review, computed in one step."""
        return run(self.steps(review))


def _count_values(value: Raw) -> int:
    """An upper bound of the number of values, exact only for large objects."""
    if len(memoryview(value)) < _LARGE:
        return 0
    text = bytes(value)
    return sum(map(text.count, (b",", b"{", b"[")))


def _is_being_deleted(value: Raw) -> bool:
    try:
        return bool(_OLD_OBJECT.decode(value).metadata.deletion_timestamp)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


class Hook(Protocol):
    """A webhook of any kind of object, as a server needs it."""

    @property
    def path(self) -> str: ...

    def steps(self, review: Review) -> Steps:
        """The decision on one review."""
        ...

    def handle(self, review: Review) -> Decision:
        """The decision on one review, computed in one step."""
        ...


class Mutator(Webhook[T]):
    """A webhook that changes objects: its decisions may have a patch."""


class Validator(Webhook[T]):
    """A webhook that allows or denies objects. A patch in its decision is an internal error."""

    def steps(self, review: Review) -> Steps:
        decision = yield from super().steps(review)
        if decision.patch:
            raise TypeError(f"{self.path}: found a patch, expected a validator's decision to have none")
        return decision


def denying(path: str, message: str) -> Validator[Raw]:
    """Denies all objects with a message: for kinds that are disabled."""
    return Validator(path, Raw, lambda _review, _object: deny(message), max_values=None)


def _respond(api_version: str, uid: str, decision: Decision) -> bytes | bytearray:
    """The AdmissionReview with the decision, of the version of the request."""
    response = _ReviewResponse(api_version=api_version, response=_response(uid, decision))
    if decision.denial is not None or not decision.patch:
        return _ENCODER.encode(response)
    patch = decision.patch if isinstance(decision.patch, Raw) else Raw(_ENCODER.encode(decision.patch))
    # The patch may be some megabytes: it is encoded without copies of all of it.
    text = bytearray(_ENCODER.encode(response).removesuffix(b"}}"))
    text += b',"patch":"'
    view = memoryview(patch)
    for start in range(0, len(view), _BASE64_CHUNK):
        text += base64.b64encode(view[start : start + _BASE64_CHUNK])
    text += b'"}}'
    return text


def _response(uid: str, decision: Decision) -> _Response:
    warnings = [_truncate(text, _MAX_WARNING) for text in decision.warnings[:_MAX_WARNINGS]] or UNSET
    if decision.denial is not None:
        denial = decision.denial
        status = _Status(denial.code, denial.reason, denial.message)
        return _Response(uid, False, status, warnings)
    return _Response(uid, True, _OK, warnings, "JSONPatch" if decision.patch else UNSET)


def _read(body: bytes | bytearray) -> _ReviewRequest:
    """An AdmissionReview with a request. Raises `HttpError`: a response needs the request's uid."""
    try:
        found = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"expected an AdmissionReview: {error}") from error
    if found.kind != "AdmissionReview" or found.api_version not in _VERSIONS:
        raise HttpError(400, f"{found.kind[:64]!a} of {found.api_version[:64]!a}: expected AdmissionReview of v1")
    return found


Page = Callable[[], tuple[int, str]]


class WebhookStats:
    """Counts the reviews of one path: by outcome and by HTTP status, and the time they took."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.codes: Counter[int] = Counter()
        self.seconds = 0.0


class AdmissionServer:
    """Serves webhooks over HTTPS; `pages` are plain text for `GET`, such as `/healthz`.

    `observe` is called after each review with its path, its outcome (as in `WebhookStats`), its HTTP status and its
    duration in seconds.
    """

    def __init__(
        self,
        webhooks: Iterable[Hook] = (),
        pages: Mapping[str, Page] | None = None,
        limits: HttpLimits | None = None,
        observe: Callable[[str, str, int, float], None] | None = None,
    ) -> None:
        self.webhooks: dict[str, Hook] = {}
        self.stats: dict[str, WebhookStats] = {}
        for webhook in webhooks:
            if webhook.path in self.webhooks:
                raise ValueError(f"{webhook.path}: two webhooks have this path")
            self.webhooks[webhook.path] = webhook
            self.stats[webhook.path] = WebhookStats()
        self._pages = dict(pages or {})
        self._observe = observe
        self._http = HttpServer(self.handle, limits)
        self._large = asyncio.Lock()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._http.connections)

    def in_flight(self, path: str) -> int:
        """The number of reviews of a path that are received or processed."""
        return self._http.in_flight(path)

    async def start(self, host: str | None, port: int, context: ConnectionContext | None) -> int:
        """Starts to serve; returns the port. Raises `OSError`."""
        return await self._http.start(host, port, context)

    async def accepts(self) -> bool:
        """Whether a client can connect and complete a TLS handshake, for readiness."""
        return await self._http.accepts()

    def drain(self) -> None:
        """Closes each connection after its next response, so that clients move to other replicas."""
        self._http.drain()

    async def stop(self, grace: float = 5.0) -> None:
        """Completes the reviews that have begun, for up to `grace` seconds, and closes."""
        await self._http.stop(grace)

    def handle(self, request: Request) -> Response | PendingResponse:
        """Returns the response, or its coroutine if the request is large. Raises `HttpError`."""
        if request.method == "GET":
            page = self._pages.get(request.path)
            if page is None:
                status, fields = (405, {"Allow": "POST"}) if request.path in self.webhooks else (404, None)
                raise HttpError(status, "expected a POST to a webhook's path", fields)
            status, text = page()
            return Response(status, text.encode(), "text/plain; charset=utf-8")
        webhook = self.webhooks.get(request.path)
        if webhook is None:
            raise HttpError(404, "no such webhook is enabled")
        steps = self._review(webhook, request)
        return self._run_slowly(steps) if len(request.body) > _LARGE else run(steps)

    async def _run_slowly(self, steps: Generator[None, None, Response]) -> Response:
        """Runs steps with interruptions for other requests. Raises `HttpError`."""
        async with self._large:
            until = time.monotonic() + _STEP
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    response: Response = end.value
                    return response
                if time.monotonic() >= until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + _STEP

    def _review(self, webhook: Hook, request: Request) -> Generator[None, None, Response]:
        """Raises `HttpError`."""
        start = time.perf_counter()
        outcome, code = "error", 500
        try:
            if request.content_type != "application/json":
                raise HttpError(415, "expected application/json")
            found = _read(request.body)
            yield
            decision = yield from webhook.steps(found.request)
            yield
            version, review = found.api_version, structs.replace(found.request, object=_NULL, old_object=_NULL)
            del found
            if isinstance(request.body, bytearray):
                request.body.clear()  # a response may be large too
            response = Response(200, _respond(version, review.uid, decision))
            outcome, code = _outcome(decision), 200
        except HttpError as error:
            code = error.status
            raise
        finally:
            self._count(webhook.path, outcome, code, time.perf_counter() - start)
        _log(webhook.path, review, decision)
        return response

    def _count(self, path: str, outcome: str, code: int, seconds: float) -> None:
        stats = self.stats[path]
        stats.outcomes[outcome] += 1
        stats.codes[code] += 1
        stats.seconds += seconds
        if self._observe is not None:
            self._observe(path, outcome, code, seconds)


def _log(path: str, review: Review, decision: Decision) -> None:
    if decision.denial is not None:
        log.info("%s: %s %s denied: %s", path, review.operation[:16], _name(review), decision.denial.message)
    elif decision.patch and log.isEnabledFor(v(2)):
        log.log(v(2), "%s: %s mutated", path, _name(review))


def _outcome(decision: Decision) -> str:
    if decision.denial is not None:
        return f"denied {decision.denial.code}"
    return "mutated" if decision.patch else "allowed"


def _name(review: Review) -> str:
    # Pods of a controller have no name yet.
    return f"{review.kind.kind[:64]} {review.namespace[:64]}/{review.name[:253] or '(new)'}"


def _truncate(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
