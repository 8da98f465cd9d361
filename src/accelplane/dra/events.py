"""Events of the driver for `kubectl describe`: about the Node, and about claims that are not prepared or unprepared.

Recording never waits and never fails: events wait in a bounded queue for the API server, and are dropped if it is full.
The same text about the same object is written at most once in 10 minutes, an object has at most 8 texts of a reason in
that time, and a node writes 5 events per minute after a burst of 10. There are no series, so the account needs no right
to change events.

Facts: Kubernetes API `events.k8s.io`. Events about cluster-scoped objects are in the namespace `default`. The kubelet
uses the node's name as UID of the Node, and `kubectl describe node` searches events with the UID and with the name.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from accelplane.apiserver import AlreadyExists, ApiError, ApiServer, RateLimit, StatusError, Unreachable, resource_path
from accelplane.apiserver.clock import loop_time
from accelplane.controls import escape_text
from accelplane.dra.claimtasks import log_failure
from accelplane.dra.model import ClaimRef
from accelplane.logs import v

log = logging.getLogger(__name__)

Reason: TypeAlias = Literal[
    "ClaimJournalDamaged", "ClaimTakeoverFailed", "DeviceNotPublished", "DriverNameInUse", "OtherAgent",
    "OtherDevicePlugin", "OwnersChanged", "OwnersUnknown", "PrepareFailed", "RegistrationRejected", "ResourceLeft",
    "SlicesNotWritten", "UnprepareFailed",
]  # fmt: skip

INTERVAL = 600.0
MAX_TEXTS = 8
QUEUE = 64
_ACTIONS: Mapping[Reason, str] = {
    "ClaimJournalDamaged": "Restore",
    "ClaimTakeoverFailed": "TakeOver",
    "DeviceNotPublished": "Publish",
    "DriverNameInUse": "Register",
    "OtherAgent": "ChangeOwner",
    "OtherDevicePlugin": "ChangeOwner",
    "OwnersChanged": "ChangeOwner",
    "OwnersUnknown": "ChangeOwner",
    "PrepareFailed": "Prepare",
    "RegistrationRejected": "Register",
    "ResourceLeft": "Publish",
    "SlicesNotWritten": "Publish",
    "UnprepareFailed": "Unprepare",
}
_NORMAL: frozenset[Reason] = frozenset(("OwnersChanged",))
_MAX_NOTE = 1024  # bytes, by the API
_MAX_OBJECTS = 512
_FORBIDDEN, _TOO_MANY_REQUESTS, _SERVER_ERROR = 403, 429, 500
_EVENTS_PER_SECOND, _BURST = 5 / 60, 10
_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0
_CLOSE_TIMEOUT = 1.0


class _Created(Struct, frozen=True):
    """The response has nothing that is used."""


class EventLimit:
    """Which events are recorded. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._recorded: dict[tuple[str, str], dict[str, float]] = {}  # times of texts, by object and reason

    def allows(self, subject: str, reason: str, text: str, now: float) -> bool:
        """Whether the event may be recorded. If so, it counts."""
        key = subject, reason
        recent = {text: time for text, time in self._recorded.pop(key, {}).items() if now - time < INTERVAL}
        self._recorded[key] = recent
        if len(self._recorded) > _MAX_OBJECTS:
            del self._recorded[next(iter(self._recorded))]
        if text in recent or len(recent) >= MAX_TEXTS:
            return False
        recent[text] = now
        return True


class EventWriter:
    """Writes the events of one node. All calls come from the event loop. The owner calls `close` at the end."""

    def __init__(
        self, api: ApiServer, node: str, *, rate_limit: RateLimit | None = None, first_retry: float = _FIRST_RETRY
    ) -> None:
        self._api = api
        self._node = node
        self._rate_limit = rate_limit or RateLimit(_EVENTS_PER_SECOND, _BURST)
        self._first_retry = first_retry
        self._limit = EventLimit()
        self._queue: deque[Mapping[str, Any]] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._retrying = False  # the API server cannot be reached
        self._forbidden = False  # and logged

    def record(self, driver: str, reason: Reason, text: str, claim: ClaimRef | None = None) -> None:
        """Records an event of a driver about the claim, or about the Node without one."""
        text = _note(text)
        if len(self._queue) >= QUEUE:
            log.log(v(1), "event %s dropped: %d others wait for the API server", reason, QUEUE)
            return
        if not self._limit.allows(claim.uid if claim is not None else "", f"{driver} {reason}", text, loop_time()):
            return
        self._queue.append(self._event(driver, reason, text, claim))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="events")
            self._writing.add_done_callback(log_failure)

    async def close(self) -> None:
        """Ends the writing, after what can be written at once."""
        if self._writing is not None:
            await asyncio.wait((self._writing,), timeout=0 if self._retrying else _CLOSE_TIMEOUT)
            self._writing.cancel()
            await asyncio.wait((self._writing,))

    async def _write(self) -> None:
        """Writes the queue."""
        retry = self._first_retry
        while self._queue:
            event = self._queue[0]
            await self._rate_limit.acquire()
            path = resource_path("events.k8s.io", "v1", "events", namespace=event["metadata"]["namespace"])
            try:
                await self._api.post(path, event, _Created)
            except AlreadyExists:
                pass  # the response to an earlier attempt was lost
            except ApiError as error:
                code = error.code if isinstance(error, StatusError) else 0
                if isinstance(error, Unreachable) or code == _TOO_MANY_REQUESTS or code >= _SERVER_ERROR:
                    self._retrying = True
                    await asyncio.sleep(retry)
                    retry = min(2 * retry, _LAST_RETRY)
                    continue
                # Without the right none is written; the log of their sources has all of them.
                level = v(1) if code == _FORBIDDEN and self._forbidden else logging.WARNING
                log.log(level, "event %s not written: %s", event["reason"], error)
                self._forbidden |= code == _FORBIDDEN
            self._retrying, retry = False, self._first_retry
            self._queue.popleft()

    def _event(self, driver: str, reason: Reason, text: str, claim: ClaimRef | None) -> Mapping[str, Any]:
        name = claim.name if claim is not None else self._node
        regarding = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": name}
        if claim is not None:
            regarding = {
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "name": name, "uid": claim.uid,
                "namespace": claim.namespace,
            }  # fmt: skip
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            # Names have at most 253 characters.
            "metadata": {
                "name": f"{name[:236].rstrip('-.')}.{secrets.token_hex(8)}",
                "namespace": claim.namespace if claim is not None else "default",
            },
            "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "type": "Normal" if reason in _NORMAL else "Warning",
            "reason": reason,
            "action": _ACTIONS[reason],
            "note": text,
            "reportingController": driver,
            "reportingInstance": self._node,
            "regarding": regarding,
        }


def _note(text: str) -> str:
    """The text as one line of at most 1,024 bytes."""
    text = escape_text(" ".join(text.split()))
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= _MAX_NOTE else f"{encoded[: _MAX_NOTE - 3].decode(errors='ignore')}…"
