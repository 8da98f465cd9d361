"""Events, as `kubectl describe` shows them.

A repeated event becomes a series with a count, which is written every 30 seconds at most: an object that fails ten
times per second causes two requests per minute. Recording an event never waits and never fails. An event that cannot be
written is dropped after one attempt; it is in the log.

Events of cluster-scoped objects are in the namespace `default`: the API server rejects them in most others, and
`kubectl describe` finds them only there.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from accelplane.apiserver import AlreadyExists, ApiError, NotFound, StatusError

from .client import Client
from .models import Event, EventSeries, ObjectReference
from .objects import Metadata, Object, api_of, metadata_of, micro_time

log = logging.getLogger(__name__)

# The API's limit for a note.
_MAX_NOTE = 1024
_MAX_EVENTS = 512
# After this time without repetition, an event starts a new series, as in client-go.
_SERIES = 360.0


class _Key(NamedTuple):
    uid: str
    kind: str
    type: str
    reason: str
    action: str
    note: str


class _Series:
    def __init__(self, event: Event, *, once: bool) -> None:
        self.event = event
        self.once = once
        self.count = 0
        self.written = 0
        self.last = 0.0
        self.written_at = -1e9


class Recorder:
    """Records events; `run` writes them. `component` is the name of the program, `instance` that of the process.

    Without the right to write events, the log has their notes, unless `log_notes` is False: then it has one line.
    """

    def __init__(
        self, client: Client, component: str, instance: str, *, every: float = 30.0, log_notes: bool = True
    ) -> None:
        self._client = client
        self._component = component
        self._instance = instance
        self._every = every
        self._log_notes = log_notes
        self._known: OrderedDict[_Key, _Series] = OrderedDict()
        self._recorded = asyncio.Event()
        self._writing = asyncio.Lock()
        self._forbidden: set[str] = set()

    def __len__(self) -> int:
        return len(self._known)

    def record(
        self,
        regarding: Object,
        kind: Literal["Normal", "Warning"],
        reason: str,
        note: str,
        *,
        action: str = "Reconcile",
        once: bool = False,
    ) -> None:
        """Records an event about an object. `kind` is its type.

        An event with `once` has no count, and a name that follows from its content: other replicas, and this one after
        a restart, do not write it again.
        """
        metadata = metadata_of(regarding)
        resource = api_of(type(regarding)).resource
        if len(note.encode()) > _MAX_NOTE:
            note = note.encode()[: _MAX_NOTE - 3].decode(errors="ignore") + "…"
        now = time.monotonic()
        key = _Key(metadata.uid or "", f"{resource.kind}/{metadata.name}", kind, reason, action, note)
        known = self._known.get(key)
        if known is not None and once:
            known.last = now
            return
        if known is None or now - known.last > _SERIES:
            unique = hashlib.sha256("\0".join(key).encode()).hexdigest() if once else uuid.uuid4().hex
            # Names have at most 253 characters.
            name = (metadata.name or "")[:236].rstrip("-.")
            known = self._known[key] = _Series(
                Event(
                    metadata=Metadata(name=f"{name}.{unique[:16]}", namespace=metadata.namespace or "default"),
                    eventTime=micro_time(datetime.now(UTC)),
                    type=kind,
                    reason=reason,
                    action=action,
                    note=note,
                    reportingController=self._component,
                    reportingInstance=self._instance,
                    regarding=ObjectReference(
                        apiVersion=f"{resource.group}/{resource.version}" if resource.group else resource.version,
                        kind=resource.kind,
                        name=metadata.name,
                        namespace=metadata.namespace,
                        uid=metadata.uid,
                        resourceVersion=metadata.resourceVersion,
                    ),
                ),
                once=once,
            )
        known.count += 1
        known.last = now
        self._known.move_to_end(key)
        if len(self._known) > _MAX_EVENTS:
            self._known.popitem(last=False)
        self._recorded.set()

    async def run(self) -> None:
        """Writes events until cancelled."""
        wait: float | None = None
        while True:
            # until a recorded event, or until a series is due
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._recorded.wait()
            self._recorded.clear()
            wait = await self._write()

    async def flush(self) -> None:
        """Writes all events that were recorded and not written."""
        await self._write(write_all=True)

    async def _write(self, *, write_all: bool = False) -> float | None:
        """Writes the events that are due, or all that are not written. Returns the seconds until the next is due."""
        # `flush` must not write events again that `run` is writing.
        async with self._writing:
            return await self._write_due(write_all=write_all)

    async def _write_due(self, *, write_all: bool) -> float | None:
        soonest: float | None = None
        for key, known in list(self._known.items()):
            now = time.monotonic()
            if known.written == known.count:
                if now - known.last > _SERIES:
                    self._known.pop(key, None)
                continue
            rest = 0.0 if write_all else known.written_at + self._every - now
            if rest > 0:
                soonest = rest if soonest is None else min(soonest, rest)
                continue
            known.written_at, count = now, known.count
            try:
                await self._write_one(known, count)
            except ApiError as error:
                self._log_error(key, metadata_of(known.event).namespace or "", error)
            # An event that could not be written is tried again when it is repeated.
            known.written = count
        return soonest

    def _log_error(self, key: _Key, namespace: str, error: ApiError) -> None:
        """Logs an event that could not be written. A missing right is logged once, with notes per namespace."""
        if not isinstance(error, StatusError) or error.code != 403:
            log.warning("event %s of %s: not written: %s", key.reason, key.kind, error)
            return
        if not self._log_notes:
            if not self._forbidden:
                log.warning("no events are written: %s", error)
            self._forbidden.add(namespace)
            return
        if namespace not in self._forbidden:
            self._forbidden.add(namespace)
            log.warning("no events are written in namespace %s, they are in this log only: %s", namespace, error)
        log.info("event %s of %s: %s", key.reason, key.kind, key.note)

    async def _write_one(self, known: _Series, count: int) -> None:
        metadata = metadata_of(known.event)
        if known.written:
            series = EventSeries(count=count, lastObservedTime=micro_time(datetime.now(UTC)))
            change = {"series": series}
            try:
                await self._client.patch(Event, metadata.name or "", change, namespace=metadata.namespace or "")
                return
            except NotFound:
                log.debug("event %s: expired, creating it again", metadata.name)
        if count > 1:
            known.event.series = EventSeries(count=count, lastObservedTime=micro_time(datetime.now(UTC)))
        try:
            await self._client.create(known.event)
        except AlreadyExists:
            if not known.once:
                raise
