"""The inventory as generations: a reader has one, and waits for the next.

While readers wait, they follow the agent's changes and read the holders after allocations and at intervals. Without a
reader nothing runs.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from accelplane.kubelet.notifier import Notifier
from accelplane.node.status import NodeStatus
from accelplane.pages.holders import HolderReader, Holders
from accelplane.pages.inventory import (
    Facts,
    IdleSince,
    document,
    inventory_plugins,
    inventory_problems,
    state_of,
)
from accelplane.pages.readings import Readings
from accelplane.readings.plan import DevicePlan
from accelplane.report.inventory import HoldersSource, NodeInventory
from accelplane.report.limits import VERSION

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
        # The input of the last update: the number of notifications, plans, idle times and holders.
        self._seen = -1
        self._shown_plans: Mapping[str, Sequence[DevicePlan]] = {}
        self._shown_idle: IdleSince = {}
        self._shown_holders = Holders()
        self._current: Generation | None = None
        self._waiting: set[asyncio.Timeout] = set()  # the time limits of the readers
        # The number of allocations when a reader last counted them, and when the holders are read again.
        self._allocated = 0
        self._holders_due = 0.0
        self._lock = asyncio.Lock()

    async def current(self) -> Generation:
        """The generation now, with holders that are at most 10 s old."""
        _, plans = await asyncio.gather(self._holders.read(allocatable=False), self._readings.plans())
        if self._current is not None and plans == self._shown_plans and not self._is_outdated():
            return self._current
        return await self._update()

    def last(self, matches: Callable[[str], bool]) -> Generation | None:
        """The last generation if `matches` is true for its entity tag. `next` returns what has changed since."""
        return self._current if self._current is not None and matches(self._current.etag) else None

    async def next(self, known: str, seconds: float) -> Generation | None:
        """A generation other than that with the entity tag `known`; None if there is none within `seconds`."""
        if self._current is not None and self._current.etag != known:
            return self._current
        if seconds <= 0 or len(self._waiting) >= _MAX_WAITING:
            return None
        if not self._waiting:
            count = self._holders.allocations()
            # If there was an allocation without a reader, the kubelet may not have known its pod in `current`.
            now = self._clock()
            due = self._holders.last.began + _HOLDERS_INTERVAL if count == self._allocated else now + _AFTER_ALLOCATION
            self._allocated, self._holders_due = count, due
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds) as limit:
                self._waiting.add(limit)
                try:
                    while self._current is None or self._current.etag == known:
                        await self._follow()
                finally:
                    self._waiting.discard(limit)
        return self._current if self._current is not None and self._current.etag != known else None

    def close(self) -> None:
        """Ends the waits of all readers, which get None."""
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def _follow(self) -> None:
        """Waits for a change, or until the holders are due. Updates the generation."""
        # Notifications while no reader waited are in the count.
        if self._changes.count != self._seen or await self._changes.wait(max(0.0, self._holders_due - self._clock())):
            await asyncio.sleep(_DEBOUNCE)
        now, plans_changed = self._clock(), False
        if (count := self._holders.allocations()) != self._allocated:
            self._allocated = count
            self._holders_due = min(self._holders_due, now + _AFTER_ALLOCATION)
        if now >= self._holders_due:
            await self._holders.read(max_age=0.0, allocatable=False)
            self._holders_due = now + _HOLDERS_INTERVAL
            # A plan that blocked before may be complete now.
            plans_changed = await self._readings.plans() != self._shown_plans
        if plans_changed or self._is_outdated():
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
            self._shown_plans, self._shown_idle, self._shown_holders = plans, facts.idle_since, facts.holders
            plugins, problems = inventory_plugins(facts), inventory_problems(facts.status)
            state = state_of(plugins, facts.holders.source, problems)
            if self._current is not None and state == self._state:
                return self._current
            self._state = state
            self._counter += 1
            name = f"{self._started}.{self._counter}"
            holders = facts.holders
            age = None if holders.source == "none" else round(max(0.0, self._clock() - holders.began), 3)
            identity = NodeInventory(
                version=VERSION,
                node=self._node,
                agent=self._program,
                versions={"accelplane": facts.status.version},
                generation=name,
                holders=HoldersSource(holders.source, age),
                problems=problems,
            )
            self._current = Generation(f'"{name}"', document(plugins, identity))
            # Wakes the other readers. It is no change of the input.
            self._seen += 1
            self._changes.notify_all()
            return self._current
