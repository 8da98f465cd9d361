"""Events: what `kubectl describe` tells of an object at its end.

An event that comes again becomes one with a count, and is written at most every few seconds, so that an object that
fails ten times a second makes two requests a minute. Nobody waits for an event to be written, and none that cannot be
is kept for long: the log has it, too.

Events about objects of the whole cluster stand in namespace `default`: in no other one that people use does the API
server take them, nor does `kubectl describe` look there.
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
_MOST = 512
# An event that has not come again for so long is a new one the next time, as with other recorders.
_SERIES = 360.0


class _Key(NamedTuple):
    uid: str
    kind: str
    type: str
    reason: str
    action: str
    note: str


class _Known:
    def __init__(self, event: Event, *, once: bool) -> None:
        self.event = event
        self.once = once
        self.count = 0
        self.written = 0
        self.last = 0.0
        self.written_at = -1e9


class Recorder:
    """Events of one program, which `run` writes. `component` is its name, `instance` the one of this process."""

    def __init__(self, client: Client, component: str, instance: str, *, every: float = 30.0) -> None:
        self._client = client
        self._component = component
        self._instance = instance
        self._every = every
        self._known: OrderedDict[_Key, _Known] = OrderedDict()
        self._news = asyncio.Event()
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
        """Notes that something happened to an object. Never waits, never fails.

        What is to be said `once` is not counted, and has a name by which it is known who else said it: another
        replica, or this one before it was started again.
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
            # no name is longer than 253, the object's or the event's
            name = (metadata.name or "")[:236].rstrip("-.")
            known = self._known[key] = _Known(
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
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        self._news.set()

    async def run(self) -> None:
        """Writes events until cancelled."""
        wait: float | None = None
        while True:
            # what is due later is looked at then, and what is new at once
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._news.wait()
            self._news.clear()
            wait = await self._write()

    async def flush(self) -> None:
        """Writes what was recorded and not written: the end of a program is worth an event."""
        await self._write(due=True)

    async def _write(self, *, due: bool = False) -> float | None:
        """Writes what is due; after how many seconds something will be."""
        # who wants the rest written does not write again what is on its way
        async with self._writing:
            return await self._write_all(due=due)

    async def _write_all(self, *, due: bool) -> float | None:
        soonest: float | None = None
        for key, known in list(self._known.items()):
            now = time.monotonic()
            if known.written == known.count:
                if now - known.last > _SERIES:
                    self._known.pop(key, None)
                continue
            rest = 0.0 if due else known.written_at + self._every - now
            if rest > 0:
                soonest = rest if soonest is None else min(soonest, rest)
                continue
            known.written_at, count = now, known.count
            try:
                await self._write_one(known, count)
            except ApiError as error:
                self._tell(key, metadata_of(known.event).namespace or "", error)
            # one that could not be written is not tried again until it comes again
            known.written = count
        return soonest

    def _tell(self, key: _Key, namespace: str, error: ApiError) -> None:
        """That an event is not written. A role that does not allow it is no news at the second time."""
        if not isinstance(error, StatusError) or error.code != 403:
            log.warning("event %s of %s: not written: %s", key.reason, key.kind, error)
            return
        if namespace not in self._forbidden:
            self._forbidden.add(namespace)
            log.warning("no events are written in namespace %s, they are in this log alone: %s", namespace, error)
        log.info("event %s of %s: %s", key.reason, key.kind, key.note)

    async def _write_one(self, known: _Known, count: int) -> None:
        metadata = metadata_of(known.event)
        if known.written:
            series = EventSeries(count=count, lastObservedTime=micro_time(datetime.now(UTC)))
            change = {"series": series}
            try:
                await self._client.patch(Event, metadata.name or "", change, namespace=metadata.namespace or "")
                return
            except NotFound:
                log.debug("event %s: expired, made anew", metadata.name)
        if count > 1:
            known.event.series = EventSeries(count=count, lastObservedTime=micro_time(datetime.now(UTC)))
        try:
            await self._client.create(known.event)
        except AlreadyExists:
            if not known.once:
                raise
