"""The generations of the inventory for readers that wait."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

from waiting import until

from accelplane.kubelet.notifier import Notifier
from accelplane.node.status import NodeStatus, PluginStatus, ResourceCounters, ResourceStatus, ScanStatus
from accelplane.pages.holders import HolderReader, Holders
from accelplane.pages.inventory_feed import InventoryFeed
from accelplane.pages.readings import Readings
from accelplane.readings import DevicePlan


class Setup:
    """An agent whose plugins, holders and plans the test sets."""

    def __init__(self) -> None:
        self.changes = Notifier()
        self.names: list[str] = []
        self.calls = 0  # of Allocate
        self.last = Holders()
        self.now, self.step = 100.0, 0.0
        self.reads = 0
        self.blocked = asyncio.Event()
        self.blocked.set()
        self.planned: list[tuple[str, ...]] = []  # the plugins at the time of each call of `plans`
        self.planning = asyncio.Event()
        self.planning.set()
        self.made: Mapping[str, Sequence[DevicePlan]] = {}
        self.statuses = 0  # the number of calls of `status`

    def status(self) -> NodeStatus:
        self.statuses += 1
        plugins = {name: PluginStatus(name=name, namespace="x", scan=ScanStatus(completed=True)) for name in self.names}
        served = ResourceStatus(name="x/y", counters=ResourceCounters(allocations=self.calls))
        plugins["served"] = PluginStatus(
            name="served", namespace="x", scan=ScanStatus(completed=True), resources={"y": served}
        )
        return NodeStatus(version="1", root="/", kubelet_dir="/k", plugins=plugins)

    def clock(self) -> float:
        self.now += self.step
        return self.now

    def allocations(self) -> int:
        return self.calls

    def add(self, name: str) -> None:
        self.names.append(name)
        self.changes.notify_all()

    async def read(self, max_age: float = 10.0, *, allocatable: bool = True) -> Holders:
        self.reads += not allocatable
        await self.blocked.wait()
        return self.last

    async def plans(self) -> Mapping[str, Sequence[DevicePlan]]:
        self.planned.append(tuple(self.names))
        await self.planning.wait()
        return dict(self.made)


@asynccontextmanager
async def feeding(setup: Setup) -> AsyncIterator[InventoryFeed]:
    feed = InventoryFeed(
        setup.status, setup.changes, cast("HolderReader", setup), cast("Readings", setup),
        program="p", node="n", clock=setup.clock,
    )  # fmt: skip
    try:
        yield feed
    finally:
        setup.blocked.set()
        setup.planning.set()
        feed.close()


async def test_a_reader_that_arrives_when_the_last_one_leaves_gets_the_next_generation() -> None:
    setup = Setup()
    async with feeding(setup) as feed:
        known = (await feed.current()).etag
        first, second = feed.next(known, 50.0), feed.next(known, 50.0)
        leaving = asyncio.create_task(first)
        await asyncio.sleep(0.01)
        leaving.cancel()
        coming = asyncio.create_task(second)  # its first step is right after the cancellation of the other reader
        await asyncio.sleep(0.01)
        setup.add("gpu")
        assert await coming is not None


async def test_a_change_while_the_holders_are_read_is_a_new_generation() -> None:
    setup = Setup()
    async with feeding(setup) as feed:
        known = (await feed.current()).etag
        setup.blocked.clear()
        setup.step = 31.0  # the holders are due at once
        waiting = asyncio.create_task(feed.next(known, 50.0))
        await until(lambda: setup.reads == 1)
        setup.step = 0.0
        setup.add("gpu")
        setup.blocked.set()
        assert await waiting is not None


async def test_a_change_while_plans_are_made_is_planned_too() -> None:
    setup = Setup()
    async with feeding(setup) as feed:
        known = (await feed.current()).etag
        setup.planning.clear()
        waiting = asyncio.create_task(feed.next(known, 50.0))
        setup.add("gpu")
        await until(lambda: setup.planned[-1] == ("gpu",))
        setup.add("npu")
        setup.planning.set()
        found = await waiting
        assert found is not None
        following = asyncio.create_task(feed.next(found.etag, 50.0))
        await until(lambda: setup.planned[-1] == ("gpu", "npu"))
        following.cancel()


async def test_a_change_between_the_request_and_the_wait_is_a_new_generation() -> None:
    setup = Setup()
    async with feeding(setup) as feed:
        known = (await feed.current()).etag
        waiting = asyncio.create_task(feed.next(known, 50.0))
        setup.add("gpu")
        assert await waiting is not None


async def test_the_holders_are_read_after_an_allocation_just_before_a_reader_waits() -> None:
    setup = Setup()
    async with feeding(setup) as feed:
        known = (await feed.current()).etag
        setup.calls, setup.step = 1, 0.5
        waiting = asyncio.create_task(feed.next(known, 50.0))
        await until(lambda: setup.reads == 1)
        waiting.cancel()


async def test_an_inventory_without_changes_is_not_made_again() -> None:
    setup = Setup()
    async with feeding(setup) as feed:
        first = await feed.current()
        made = setup.statuses
        assert await feed.current() is first
        assert setup.statuses == made
        setup.made = {"gpu": [DevicePlan(device="card0", units=("card0",))]}
        await feed.current()
        assert setup.statuses == made + 1


async def test_a_plan_that_is_made_while_a_reader_waits_is_used() -> None:
    setup = Setup()
    async with feeding(setup) as feed:
        known = (await feed.current()).etag
        made = setup.statuses
        setup.made = {"gpu": [DevicePlan(device="card0", units=("card0",))]}
        setup.step = 31.0  # the holders are due at once
        waiting = asyncio.create_task(feed.next(known, 50.0))
        await until(lambda: setup.statuses == made + 1)
        waiting.cancel()


async def test_a_reader_that_waits_again_gets_what_changed_meanwhile() -> None:
    setup = Setup()
    async with feeding(setup) as feed:
        current = await feed.current()
        assert feed.last(lambda etag: etag == current.etag) is current
        assert feed.last(lambda _etag: False) is None
        setup.add("gpu")
        assert await feed.next(current.etag, 50.0) not in (None, current)


async def test_readers_that_wait_at_the_end_get_no_generation() -> None:
    setup = Setup()
    async with feeding(setup) as feed:
        known = (await feed.current()).etag
        waiting = [asyncio.create_task(feed.next(known, 50.0)) for _ in range(2)]
        await asyncio.sleep(0.01)
    assert await asyncio.gather(*waiting) == [None, None]
