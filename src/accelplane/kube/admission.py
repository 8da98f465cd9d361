"""Admission of objects: AdmissionReview (`admission.k8s.io`, v1 or v1beta1) in and out, over HTTPS.

Whoever decides writes a function of the review and of the object, decoded as a type that has only the fields that
matter: a `Mutator` answers with a patch, a `Validator` with a yes or no. A whole object is never built, so what is
newer than this program passes through it untouched.
"""

import base64
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from accelplane.http.messages import HttpError, HttpLimits, Request, Response
from accelplane.http.server import HttpServer
from accelplane.kube.jsonpatch import Operation
from accelplane.logs import v

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_WARNING = 200  # characters; the API server cuts at 256 and drops all of them beyond 4096
_MAX_WARNINGS = 16
_MAX_DENIAL = 2048  # a message may quote a field of a megabyte


class Kind(Struct, frozen=True):
    """A group, version and kind."""

    group: str = ""
    version: str = ""
    kind: str = ""


class User(Struct, frozen=True):
    """Who asks."""

    username: str = ""


class Review(Struct, frozen=True, rename="camel"):
    """The request of an AdmissionReview; the objects are left as they came."""

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
    """Why an object is not admitted."""

    message: str
    code: int = 403
    reason: str = "Forbidden"


class Decision(Struct, frozen=True):
    """What becomes of an object: admitted, perhaps with changes, unless there is a denial. Users see the warnings."""

    patch: Sequence[Operation] = ()
    denial: Denial | None = None
    warnings: Sequence[str] = ()


ALLOWED = Decision()


def deny(message: str, *, code: int = 403, reason: str = "Forbidden") -> Decision:
    """A refusal that the user sees."""
    return Decision(denial=Denial(_short(message, _MAX_DENIAL), code, reason))


class _Status(Struct, frozen=True, omit_defaults=True):
    code: int
    reason: str = ""
    message: str = ""


class _Response(Struct, frozen=True, rename="camel"):
    uid: str
    allowed: bool
    status: _Status
    patch_type: str | UnsetType = UNSET
    patch: str | UnsetType = UNSET
    warnings: Sequence[str] | UnsetType = UNSET


class _Asked(Struct, frozen=True, rename="camel"):
    request: Review
    api_version: str = ""
    kind: str = ""


class _Answered(Struct, frozen=True, rename="camel"):
    response: _Response
    api_version: str
    kind: str = "AdmissionReview"


# Whoever configures a webhook may ask for the older one, which has the same fields.
_VERSIONS = ("admission.k8s.io/v1", "admission.k8s.io/v1beta1")
_ASKED = msgspec.json.Decoder(_Asked)
_ENCODER = msgspec.json.Encoder()
_OK = _Status(200)


class _DeletedMetadata(Struct, frozen=True, rename="camel"):
    deletion_timestamp: str | None = None


class _Deleted(Struct, frozen=True):
    metadata: _DeletedMetadata = _DeletedMetadata()


_DELETED = msgspec.json.Decoder(_Deleted)


class Webhook(Generic[T]):
    """One path: objects of `kind` come there, and `decide` says what becomes of them.

    Deletion is always allowed, and so are updates of an object that is being deleted: it goes when the last of its
    finalizers is taken from it, and a refusal of that, for whatever is wrong with the rest, would keep it for ever.
    """

    def __init__(self, path: str, kind: type[T], decide: Callable[[Review, T], Decision]) -> None:
        self.path = path
        self.decide = decide
        self._decoder = msgspec.json.Decoder(kind)

    def judge(self, review: Review) -> Decision:
        """The decision on one review; an object that cannot be decoded is denied with 400."""
        if review.operation == "DELETE" or (review.operation == "UPDATE" and _is_going(review.old_object)):
            return ALLOWED
        try:
            found = self._decoder.decode(review.object)
        # RecursionError: an object may be nested as deep as its sender likes.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return deny(f"the object cannot be decoded: {error}", code=400, reason="BadRequest")
        return self.decide(review, found)


def _is_going(thing: Raw) -> bool:
    try:
        return bool(_DELETED.decode(thing).metadata.deletion_timestamp)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


class Hook(Protocol):
    """What a server asks of a webhook, whatever its objects are."""

    @property
    def path(self) -> str: ...

    def judge(self, review: Review) -> Decision:
        """The decision on one review."""
        ...


class Mutator(Webhook[T]):
    """Changes objects: its decisions may have a patch."""


class Validator(Webhook[T]):
    """Admits objects or not: a patch in its decision is a fault, and the caller learns of it as an internal error."""

    def judge(self, review: Review) -> Decision:
        decision = super().judge(review)
        if decision.patch:
            raise TypeError(f"{self.path}: a validator has decided on a patch: {decision.patch[0].path}")
        return decision


def refusing(path: str, message: str) -> Validator[Raw]:
    """For kinds that are switched off: a word to the user instead of a call that fails obscurely."""
    return Validator(path, Raw, lambda _review, _object: deny(message))


def _respond(asked: _Asked, decision: Decision) -> bytes:
    """The AdmissionReview that carries the decision, of the version that was asked."""
    return _ENCODER.encode(_Answered(_response(asked.request.uid, decision), asked.api_version))


def _response(uid: str, decision: Decision) -> _Response:
    warnings = [_short(text, _MAX_WARNING) for text in decision.warnings[:_MAX_WARNINGS]] or UNSET
    if decision.denial is not None:
        denial = decision.denial
        status = _Status(denial.code, denial.reason, denial.message)
        return _Response(uid, False, status, warnings=warnings)
    if not decision.patch:
        return _Response(uid, True, _OK, warnings=warnings)
    patch = base64.b64encode(_ENCODER.encode(decision.patch)).decode("ascii")
    return _Response(uid, True, _OK, "JSONPatch", patch, warnings)


def _read(body: bytes | bytearray) -> _Asked:
    """An AdmissionReview with a request. Raises `HttpError`: without its uid there is nothing to answer."""
    try:
        asked = _ASKED.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"expected an AdmissionReview: {error}") from error
    if asked.kind != "AdmissionReview" or asked.api_version not in _VERSIONS:
        raise HttpError(400, f"{asked.kind[:64]!a} of {asked.api_version[:64]!a}: expected AdmissionReview of v1")
    return asked


Page = Callable[[], tuple[int, str]]


class Tally:
    """What one path has answered: how often with which outcome and which status of HTTP, and how long it all took."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.codes: Counter[int] = Counter()
        self.seconds = 0.0


class AdmissionServer:
    """Serves webhooks over HTTPS; `pages` are plain text for `GET`, such as `/healthz`.

    `observe` is told of each review: its path, its outcome (as in a `Tally`), the status of HTTP that it gets, and the
    seconds that it took.
    """

    def __init__(
        self,
        webhooks: Iterable[Hook] = (),
        pages: Mapping[str, Page] | None = None,
        limits: HttpLimits | None = None,
        observe: Callable[[str, str, int, float], None] | None = None,
    ) -> None:
        self.webhooks: dict[str, Hook] = {}
        self.tallies: dict[str, Tally] = {}
        for webhook in webhooks:
            if webhook.path in self.webhooks:
                raise ValueError(f"{webhook.path}: two webhooks want this path")
            self.webhooks[webhook.path] = webhook
            self.tallies[webhook.path] = Tally()
        self._pages = dict(pages or {})
        self._observe = observe
        self._http = HttpServer(self.answer, limits)

    @property
    def callers(self) -> int:
        """How many are connected."""
        return len(self._http.connections)

    async def start(self, host: str | None, port: int, context: ssl.SSLContext | None) -> int:
        """Serves; returns the port. Raises `OSError`."""
        return await self._http.start(host, port, context)

    async def accepts(self) -> bool:
        """Whether who connects gets a handshake, as readiness is meant to say."""
        return await self._http.accepts()

    async def stop(self, grace: float = 5.0) -> None:
        """Lets reviews that have begun end, and closes."""
        await self._http.stop(grace)

    def answer(self, request: Request) -> Response:
        """The answer to one request. Raises `HttpError`."""
        if request.method == "GET":
            page = self._pages.get(request.path)
            if page is None:
                raise HttpError(405 if request.path in self.webhooks else 404, "expected a POST to a webhook's path")
            status, text = page()
            return Response(status, text.encode(), "text/plain; charset=utf-8")
        webhook = self.webhooks.get(request.path)
        if webhook is None:
            raise HttpError(404, "no such webhook is enabled")
        start = time.perf_counter()
        outcome, code = "error", 500
        try:
            asked, decision = _judged(webhook, request)
            answer = Response(200, _respond(asked, decision))
            outcome, code = _outcome(decision), 200
        except HttpError as error:
            code = error.status
            raise
        finally:
            self._count(webhook.path, outcome, code, time.perf_counter() - start)
        _tell(webhook.path, asked.request, decision)
        return answer

    def _count(self, path: str, outcome: str, code: int, seconds: float) -> None:
        tally = self.tallies[path]
        tally.outcomes[outcome] += 1
        tally.codes[code] += 1
        tally.seconds += seconds
        if self._observe is not None:
            self._observe(path, outcome, code, seconds)


def _judged(webhook: Hook, request: Request) -> tuple[_Asked, Decision]:
    """Raises `HttpError`."""
    if request.content_type != "application/json":
        raise HttpError(415, "expected application/json")
    asked = _read(request.body)
    return asked, webhook.judge(asked.request)


def _tell(path: str, review: Review, decision: Decision) -> None:
    if decision.denial is not None:
        log.info("%s: %s %s denied: %s", path, review.operation[:16], _name(review), decision.denial.message)
    elif decision.patch and log.isEnabledFor(v(2)):
        log.log(v(2), "%s: %s mutated", path, _name(review))


def _outcome(decision: Decision) -> str:
    if decision.denial is not None:
        return f"denied {decision.denial.code}"
    return "mutated" if decision.patch else "allowed"


def _name(review: Review) -> str:
    # A pod that is made by a controller has no name yet.
    return f"{review.kind.kind[:64]} {review.namespace[:64]}/{review.name[:253] or '(new)'}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
