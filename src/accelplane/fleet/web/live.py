"""Updates of open pages as server-sent events.

All viewers of a screen with the same filters and rights share a channel: the screen is made once for all of them, at
most every half second, and only what differs is sent. `overview` events have the numbers of the cluster and the first
screen, at most one a second; `rows` events have all else. A client that has missed something, or that is too slow, gets
`reload`: it has to fetch the page again.
"""

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from accelplane.http.messages import HttpError
from accelplane.kube.tasks import cancel

from ..view import FleetView
from .access import Viewer
from .html import Element, as_json
from .page import ScreenName, announcement
from .query import Query
from .summaries import Totals

log = logging.getLogger(__name__)

Blocks = Mapping[str, Mapping[str, Element]]

RELOAD = b"event: reload\ndata: {}\n\n"
_KEEPALIVE = b": keepalive\n\n"
_BEGIN = b"retry: 3000\n\n"
_MAX_KNOWN = 128
_HEADER_BLOCKS = ("summary", "notices")


class Content(Struct, frozen=True):
    """A screen at one moment: its blocks and the numbers of the cluster."""

    generation: int
    blocks: Blocks
    totals: Totals


Digests = Mapping[str, Mapping[str, int]]
"""Hashes of the elements of a screen, by block and key: enough to know what differs from it."""


def digests(blocks: Blocks) -> Digests:
    """The hashes of the elements of a screen."""
    return {
        name: {key: hash(msgspec.json.encode(as_json(each))) for key, each in rows.items()}
        for name, rows in blocks.items()
    }


class Subject(Struct, frozen=True):
    """The content of a channel. `rights` identifies viewers who see the same names; `refresh` is for current values."""

    screen: ScreenName
    query: Query
    rights: str
    refresh: float = 0.0


Make = Callable[[], Awaitable[Content]]
StillAdmitted = Callable[[], Awaitable[bool]]


class LiveLimits(Struct, frozen=True, kw_only=True):
    """Limits of updates; times are seconds. A screen takes at most one `share`th of the processor's time.

    `viewers` limits the open streams of all, `account` those of one user, or of one address without users, and
    `credential` those of one session or token: one viewer does not take the streams of the others.
    """

    viewers: int = 200
    account: int = 100
    credential: int = 20
    queued: int = 64 * 1024
    rows: float = 0.5
    overview: float = 1.0
    keepalive: float = 15.0
    check: float = 60.0
    share: int = 20


class Live:
    """The open event streams."""

    def __init__(
        self,
        view: FleetView,
        limits: LiveLimits = LiveLimits(),  # noqa: B008 - a frozen value
    ) -> None:
        self._view = view
        self.limits = limits
        self._channels: dict[Subject, _Channel] = {}
        self._known = _Known()
        self._streams: Counter[_Share] = Counter()
        self.viewers = 0

    def remember(self, subject: Subject, content: Content) -> None:
        """Records the content of a page, so that its updates begin with later changes."""
        self._known.add(subject, content.generation, digests(content.blocks))

    def subscribe(
        self, viewer: Viewer, subject: Subject, make: Make, seen: int | None, still_admitted: StillAdmitted
    ) -> AsyncGenerator[bytes, None]:
        """The events since the generation that the client has seen. Raises `HttpError` with too many open streams.

        `make` makes the content of the screen. Viewers with other rights need another subject.
        """
        if self.viewers >= self.limits.viewers:
            raise HttpError(503, f"expected at most {self.limits.viewers} viewers; the page can be refreshed")
        shares = _shares(viewer, self.limits)
        for share, limit in shares.items():
            if self._streams[share] >= limit:
                raise HttpError(
                    503,
                    f"found {limit} pages with live updates of this {share.kind}, expected fewer; "
                    "close some of them, or refresh this one",
                )
        return self._events(tuple(shares), subject, make, seen, still_admitted)

    async def close(self) -> None:
        """Ends all channels."""
        channels = list(self._channels.values())
        self._channels.clear()
        await cancel(*(channel.task for channel in channels if channel.task is not None))

    async def _events(
        self,
        shares: Sequence["_Share"],
        subject: Subject,
        make: Make,
        seen: int | None,
        still_admitted: StillAdmitted,
    ) -> AsyncGenerator[bytes, None]:
        subscriber = _Subscriber(self.limits.queued)
        self.viewers += 1
        self._streams.update(shares)
        try:
            yield _BEGIN
            cluster = self._view.cluster()
            # Generations of another process are not comparable.
            if seen is not None and not int(cluster.started * 1000) <= seen <= cluster.generation:
                subscriber.reload()
            self._join(subject, make, subscriber, seen)
            async for event in self._queued(subscriber, still_admitted):
                yield event
        finally:
            self.viewers -= 1
            for share in shares:
                self._streams[share] -= 1
                if not self._streams[share]:
                    del self._streams[share]
            await self._leave(subject, subscriber)

    async def _queued(self, subscriber: "_Subscriber", still_admitted: StillAdmitted) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        checked = loop.time()
        while True:
            try:
                async with asyncio.timeout(self.limits.keepalive):
                    event = await subscriber.next()
            except TimeoutError:
                event = _KEEPALIVE
            if loop.time() - checked >= self.limits.check:
                checked = loop.time()
                if not await still_admitted():
                    yield RELOAD
                    return
            yield event

    def _join(self, subject: Subject, make: Make, subscriber: "_Subscriber", seen: int | None) -> None:
        channel = self._channels.get(subject)
        if channel is None:
            channel = self._channels[subject] = _Channel(self._view, make, subject, self._known, self.limits)
            channel.start()
        channel.add(subscriber, seen)

    async def _leave(self, subject: Subject, subscriber: "_Subscriber") -> None:
        channel = self._channels.get(subject)
        if channel is not None and not channel.remove(subscriber):
            del self._channels[subject]
            if channel.task is not None:
                await cancel(channel.task)


class _Share(NamedTuple):
    """Whose streams are counted together."""

    kind: Literal["address", "user", "session or token"]
    key: str | bytes


def _shares(viewer: Viewer, limits: LiveLimits) -> dict[_Share, int]:
    """What the streams of a viewer count for, with the limits."""
    if viewer.user is None:
        return {_Share("address", viewer.source): limits.account}
    return {
        _Share("session or token", viewer.credential or viewer.name): limits.credential,
        _Share("user", viewer.name): limits.account,
    }


class _Known:
    """What clients have seen: the digests of screens by generation, the latest ones.

    Screens with current values, or with other decisions about rights, can differ within a generation. Then the digest
    of a row that differs is `_AMBIGUOUS`: it is unknown which one a client has.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[tuple[Subject, int], Digests] = OrderedDict()

    def add(self, subject: Subject, generation: int, found: Digests) -> None:
        earlier = self._digests.get((subject, generation))
        self._digests[subject, generation] = found if earlier is None else _common(earlier, found)
        self._digests.move_to_end((subject, generation))
        if len(self._digests) > _MAX_KNOWN:
            self._digests.popitem(last=False)

    def get(self, subject: Subject, generation: int | None) -> Digests:
        """The digests, none if they are not known."""
        return self._digests.get((subject, generation), {}) if generation is not None else {}


# A hash is never -1. The key stands for an order that is unknown; no row has it.
_AMBIGUOUS = -1
_UNKNOWN_ORDER = "\0"


def _common(one: Digests, other: Digests) -> Digests:
    """The digests that two contents share; what differs is ambiguous."""
    if one == other and all(list(one[name]) == list(other[name]) for name in other):
        return other
    found: dict[str, Mapping[str, int]] = {}
    for name in one.keys() | other.keys():
        first, second = one.get(name, {}), other.get(name, {})
        rows = {key: digest if first.get(key) == digest else _AMBIGUOUS for key, digest in second.items()}
        found[name] = rows if list(first) == list(second) else rows | {_UNKNOWN_ORDER: _AMBIGUOUS}
    return found


class _Subscriber:
    """The events that were not sent to a client yet, with a limit of their size."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[bytes] = deque()
        self._size = 0
        self._filled = asyncio.Event()

    def put(self, event: bytes) -> None:
        """Adds an event. If the limit is exceeded, the client gets `reload` in place of all of them."""
        if self._events and self._events[-1] is RELOAD:
            return
        if self._size + len(event) > self._limit:
            self.reload()
            return
        self._events.append(event)
        self._size += len(event)
        self._filled.set()

    def reload(self) -> None:
        self._events.clear()
        self._events.append(RELOAD)
        self._size = len(RELOAD)
        self._filled.set()

    async def next(self) -> bytes:
        """Waits for an event and removes it."""
        await self._filled.wait()
        event = self._events.popleft()
        self._size -= len(event)
        if not self._events:
            self._filled.clear()
        return event


class _Channel:
    """A screen that is updated for its subscribers."""

    def __init__(self, view: FleetView, make: Make, subject: Subject, known: _Known, limits: LiveLimits) -> None:
        self._view = view
        self._make = make
        self._subject = subject
        self._known = known
        self._limits = limits
        self._subscribers: dict[_Subscriber, int | None] = {}
        self._new_subscribers: list[_Subscriber] = []
        self._sent: dict[str, Mapping[str, int]] = {}
        self._content: Content | None = None
        self._announced: Totals | None = None
        self._overview_due = 0.0
        self._pending = False
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self._run(), name=f"updates of {self._subject.screen}")

    def add(self, subscriber: _Subscriber, seen: int | None) -> None:
        """Adds a subscriber, which gets what has changed since the generation that it has seen."""
        self._subscribers[subscriber] = seen
        # The content can be older than the page of the client, which it must not replace.
        if self._content is None or (seen is not None and seen > self._content.generation):
            self._new_subscribers.append(subscriber)
        else:
            self._send_missed(subscriber, self._content, seen)

    def remove(self, subscriber: _Subscriber) -> bool:
        """Removes a subscriber. Returns whether there are others."""
        self._subscribers.pop(subscriber, None)
        if subscriber in self._new_subscribers:
            self._new_subscribers.remove(subscriber)
        return bool(self._subscribers)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        seen = -1
        while True:
            await self._wait(seen)
            started = loop.time()
            seen = self._view.cluster().generation
            try:
                content = await self._make()
                self._publish(content, loop.time())
                seen = content.generation
            except HttpError:
                # The rights are unknown without the API server: clients fetch the page, which shows the problem.
                self._reload_all()
            except Exception:
                log.exception("updates of %s: internal error", self._subject.screen)
                self._reload_all()
            cost = loop.time() - started
            overview = self._subject.screen == "overview"
            interval = self._limits.overview if overview else self._limits.rows
            await asyncio.sleep(max(interval, cost * self._limits.share))

    def _reload_all(self) -> None:
        for subscriber in self._subscribers:
            subscriber.reload()

    async def _wait(self, seen: int) -> None:
        """Waits for a change, or until something is due without one."""
        timeouts = [self._subject.refresh] if self._subject.refresh else []
        if self._pending:
            timeouts.append(max(0.0, self._overview_due - asyncio.get_running_loop().time()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeouts) if timeouts else None):
                await self._view.changed(seen)

    def _publish(self, content: Content, now: float) -> None:
        first, self._content = self._content is None, content
        current = digests(content.blocks)
        if first:
            self._sent = dict(current)
            self._announced = content.totals
            self._known.add(self._subject, content.generation, current)
            self._send_joined(content)
            return
        overview, rows = self._split(current)
        events = [self._event("rows", content, rows, "")] if rows else []
        self._pending = bool(overview) and now < self._overview_due
        if overview and not self._pending:
            text = announcement(self._announced, content.totals) if self._announced is not None else ""
            self._announced = content.totals
            self._overview_due = now + self._limits.overview
            events.append(self._event("overview", content, overview, text))
        if events:
            self._known.add(self._subject, content.generation, dict(self._sent))
        joined = self._send_joined(content)
        for subscriber in self._subscribers.keys() - joined:
            for each in events:
                subscriber.put(each)

    def _send_joined(self, content: Content) -> set[_Subscriber]:
        """Sends what new subscribers have missed. Returns them, and those that have seen newer content."""
        joined = set(self._new_subscribers)
        self._new_subscribers.clear()
        for subscriber in joined:
            seen = self._subscribers[subscriber]
            if seen is not None and seen > content.generation:
                self._new_subscribers.append(subscriber)
            else:
                self._send_missed(subscriber, content, seen)
        return joined

    def _split(self, blocks: Digests) -> tuple[Digests, Digests]:
        """The blocks that differ from the sent ones: those of `overview` events and the others."""
        changed = {name: rows for name, rows in blocks.items() if rows != self._sent.get(name)}
        whole = self._subject.screen == "overview"
        overview = {name: rows for name, rows in changed.items() if whole or name in _HEADER_BLOCKS}
        return overview, {name: rows for name, rows in changed.items() if name not in overview}

    def _event(self, kind: str, content: Content, blocks: Digests, text: str) -> bytes:
        data = {name: difference(self._sent.get(name, {}), rows, content.blocks[name]) for name, rows in blocks.items()}
        self._sent |= blocks
        return event(kind, content.generation, data, text)

    def _send_missed(self, subscriber: _Subscriber, content: Content, seen: int | None) -> None:
        if seen == content.generation and not self._subject.refresh:
            return
        known, current = self._known.get(self._subject, seen), digests(content.blocks)
        data = {
            name: difference(known.get(name, {}), rows, content.blocks[name])
            for name, rows in current.items()
            if rows != known.get(name)
        }
        if data:
            subscriber.put(event("rows", content.generation, data))


def event(kind: str, generation: int, blocks: Mapping[str, object], text: str = "") -> bytes:
    """An event with changed blocks, and a text for assistive technology."""
    data = msgspec.json.encode({"blocks": blocks, "announcement": text})
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (generation, kind.encode(), data)


def difference(old: Mapping[str, int], new: Mapping[str, int], elements: Mapping[str, Element]) -> Mapping[str, object]:
    """What changes a block: its new and changed elements, and the order of the keys if that differs."""
    changed = {key: as_json(elements[key]) for key, found in new.items() if found != old.get(key)}
    return {"set": changed} if list(old) == list(new) else {"set": changed, "order": list(new)}
