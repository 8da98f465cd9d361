"""The inventory as generations: a reader has one, and waits for the next.

While a reader waits, one task follows the agent's changes and reads the holders after allocations and at intervals.
Without a reader nothing runs.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable

from msgspec import Struct

from accelplane.kubelet.notifier import Notifier
from accelplane.node.holders import HolderReader, Holders
from accelplane.node.inventory import (
    VERSION,
    Facts,
    HoldersSource,
    IdleSince,
    Inventory,
    document,
    inventory_plugins,
    state_of,
)
from accelplane.node.readings import Readings
from accelplane.node.status import NodeStatus, allocations

# Changes come in groups: a scan, the health of several devices, registrations.
_DEBOUNCE = 0.1
# The kubelet knows the pod of an allocation a moment after it.
_AFTER_ALLOCATION = 1.0
_HOLDERS_INTERVAL = 30.0
# Further readers get an immediate response.
_MAX_WAITING = 16


class Generation(Struct, frozen=True):
    """One state of the inventory: its name as an entity tag, and the JSON."""

    etag: str
    body: bytes


class InventoryFeed:
    """The inventory of an agent. The owner calls `close` at its end."""

    def __init__(
        self,
        status: Callable[[], NodeStatus],
        changes: Notifier,
        holders: HolderReader,
        readings: Readings,
        *,
        program: str,
        node: str,
        idle_since: Callable[[], IdleSince] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status = status
        self._changes = changes
        self._holders = holders
        self._readings = readings
        self._program = program
        self._node = node
        self._idle_since = idle_since
        self._clock = clock
        # The agent's start and a number that differs from those of other agents started in the same second.
        self._started = f"{int(time.time()):x}.{secrets.token_hex(4)}"
        self._counter = 0
        self._state = b""
        # The input of the last update: the number of notifications, idle times and holders.
        self._seen = -1
        self._shown_idle: IdleSince = {}
        self._shown_holders = Holders()
        self._current: Generation | None = None
        self._waiting = 0
        self._advanced = Notifier()
        self._follower: asyncio.Task[None] | None = None
        # Also those that are cancelled and have not ended.
        self._followers: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    async def current(self) -> Generation:
        """The generation now, with holders that are at most 10 s old."""
        await asyncio.gather(self._holders.read(), self._readings.plans())
        return await self._update()

    async def next(self, known: str, seconds: float) -> Generation | None:
        """A generation other than that with the entity tag `known`; None if there is none within `seconds`."""
        if self._current is not None and self._current.etag != known:
            return self._current
        if seconds <= 0 or self._waiting >= _MAX_WAITING:
            return None
        self._waiting += 1
        try:
            follower = self._running_follower()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while (self._current is None or self._current.etag == known) and not follower.cancelled():
                        await self._wait_for_follower(follower)
            return self._current if self._current is not None and self._current.etag != known else None
        finally:
            self._waiting -= 1
            if not self._waiting and self._follower is not None:
                self._follower.cancel()

    async def close(self) -> None:
        """Ends the task. Readers that wait get None."""
        for follower in self._followers:
            follower.cancel()
        if self._followers:
            await asyncio.wait(self._followers)

    def _running_follower(self) -> "asyncio.Task[None]":
        """The task that follows the changes: a new one if the last one has ended or is ending."""
        if self._follower is None or self._follower.done() or self._follower.cancelling():
            self._follower = asyncio.create_task(self._follow())
            self._followers.add(self._follower)
            self._follower.add_done_callback(self._followers.discard)
        return self._follower

    async def _wait_for_follower(self, follower: "asyncio.Task[None]") -> None:
        """Returns at the next generation. Raises the exception that ended the follower."""
        advanced = asyncio.ensure_future(self._advanced.wait())
        try:
            await asyncio.wait((advanced, follower), return_when=asyncio.FIRST_COMPLETED)
        finally:
            advanced.cancel()
        if follower.done() and not follower.cancelled():
            follower.result()

    async def _follow(self) -> None:
        """Updates the generation after changes, until cancelled."""
        allocated = allocations(self._status())
        due = self._clock() + _HOLDERS_INTERVAL
        while True:
            # Notifications while this task did not wait are in the count.
            if self._changes.count != self._seen or await self._changes.wait(max(0.0, due - self._clock())):
                await asyncio.sleep(_DEBOUNCE)
            now = self._clock()
            if (count := allocations(self._status())) != allocated:
                allocated = count
                due = min(due, now + _AFTER_ALLOCATION)
            if now >= due:
                await self._holders.read(max_age=0.0, allocatable=False)
                due = now + _HOLDERS_INTERVAL
            if self._is_outdated():
                await self._update()

    def _is_outdated(self) -> bool:
        holders, shown = self._holders.last, self._shown_holders
        return (
            self._changes.count != self._seen
            or (holders.source, holders.rows, holders.claims) != (shown.source, shown.rows, shown.claims)
            or self._idle_since() != self._shown_idle
        )

    async def _update(self) -> Generation:
        """The present generation: a new one if the inventory has changed."""
        async with self._lock:
            # A change while the plans are made is not in them: the next update has it.
            seen = self._changes.count
            plans = await self._readings.plans()
            facts = Facts(status=self._status(), holders=self._holders.last, plans=plans, idle_since=self._idle_since())
            self._seen = seen
            self._shown_idle, self._shown_holders = facts.idle_since, facts.holders
            plugins = inventory_plugins(facts)
            state = state_of(plugins, facts.holders.source)
            if self._current is not None and state == self._state:
                return self._current
            self._state = state
            self._counter += 1
            name = f"{self._started}.{self._counter}"
            holders = facts.holders
            age = None if holders.source == "none" else round(max(0.0, self._clock() - holders.began), 3)
            identity = Inventory(
                version=VERSION,
                node=self._node,
                agent=self._program,
                versions={"accelplane": facts.status.version},
                generation=name,
                plugins=(),
                holders=HoldersSource(holders.source, age),
            )
            self._current = Generation(f'"{name}"', document(plugins, identity))
        self._advanced.notify_all()
        return self._current
