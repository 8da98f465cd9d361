"""Informers, controllers and managers in virtual time, with changes, outages and lost leaders in any order."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubekinds import Widget
from kubememory import FAULTS, MemoryClient, MemoryServer
from msgspec import Struct
from virtualtime import VirtualTimeLoop

from accelplane.kube.cache import Cache, UnreadableObject
from accelplane.kube.controller import Controller
from accelplane.kube.informer import Informer, WatchTimeouts
from accelplane.kube.leader import Election
from accelplane.kube.manager import OFF, Manager
from accelplane.kube.objects import ApiInfo, GlobalResource, Metadata, Request
from accelplane.kube.objects import api as api_info
from accelplane.kube.tasks import cancel

NAMES = st.sampled_from("abcde")
STEPS = st.one_of(
    st.tuples(st.just("put"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("malform"), NAMES, st.text("xyz", max_size=1)),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("break"), st.sampled_from([None, *FAULTS])),
    st.tuples(st.just("fail"), st.sampled_from(["LIST", "WATCH"]), st.sampled_from(list(FAULTS))),
    st.tuples(st.just("compact")),
    st.tuples(st.just("outage"), st.sampled_from([1.0, 20.0])),
    st.tuples(st.just("sleep"), st.sampled_from([0.001, 0.02, 1.0, 40.0])),
)
TIMEOUTS = WatchTimeouts(idle=30, duration=90, first_delay=0.1, max_delay=2)


class Outline(GlobalResource, Struct):
    """The metadata of a widget: readable when the widget is not."""

    _api_info: ClassVar[ApiInfo] = api_info("example.com", "v1", "Widget", "widgets")
    metadata: Metadata


@contextmanager
def virtual_time() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    try:
        yield loop
        assert loop.errors == []
    finally:
        loop.close()


async def apply_step(server: MemoryServer, step: tuple[Any, ...]) -> None:
    match step:
        case ("put", name, size):
            server.put(name, {"size": size})
        case ("malform", name, text):
            server.put(name, {"size": text})
        case ("remove", name):
            server.remove(name)
        case ("break", fault):
            server.break_watches(FAULTS[fault]() if fault else None)
        case ("fail", request, fault):
            server.fail_next[request].append(FAULTS[fault]())
        case ("compact",):
            server.compact()
        case ("outage", seconds):
            server.reachable = False
            server.break_watches()
            await asyncio.sleep(seconds)
            server.reachable = True
        case ("sleep", seconds):
            await asyncio.sleep(seconds)


class Reader:
    """The content of a cache according to its notifications."""

    def __init__(self, cache: Cache[Widget]) -> None:
        self.sizes: dict[str, int] = {}
        cache.subscribe(self._changed)

    def _changed(self, old: Widget | None, new: Widget | None) -> None:
        thing = new or old
        assert thing
        name = thing.metadata.name or ""
        assert (self.sizes.get(name)) == (old.spec.size if old else None)
        if new is None:
            del self.sizes[name]
        else:
            self.sizes[name] = new.spec.size


def check(server: MemoryServer, cache: Cache[Widget], outlines: Cache[Outline], reader: Reader) -> None:
    """At rest the caches equal the server, and all readers agree."""
    sizes = {name: each["spec"]["size"] for name, each in server.objects.items()}
    readable = {name: size for name, size in sizes.items() if isinstance(size, int)}
    assert {each.metadata.name: each.spec.size for each in cache} == reader.sizes == readable
    assert set(cache.requests()) == set(outlines.requests()) == {Request(name) for name in sizes}
    assert set(cache.unreadable) == {Request(name) for name in sizes.keys() - readable.keys()}
    for size in range(4):
        expected = {name for name, each in readable.items() if each == size}
        assert {each.metadata.name for each in cache.by_index("size", str(size))} == expected
    for name in "abcde":
        if name in sizes and name not in readable:
            with pytest.raises(UnreadableObject):
                cache.get(Request(name))
        else:
            assert (cache.get(Request(name)) is not None) == (name in readable)


async def run_steps(steps: list[tuple[Any, ...]], *, debounce: float, chance: random.Random) -> None:
    server = MemoryServer()
    server.put("a", {"size": 1})
    informer = Informer(MemoryClient(server), watch_timeouts=TIMEOUTS)
    cache, outlines = informer.cache(Widget), informer.cache(Outline)
    cache.add_index("size", lambda thing: [str(thing.spec.size)])
    reader = Reader(cache)
    sizes: dict[str, object] = {}
    reconciling: set[Request] = set()

    async def reconcile(request: Request) -> None:
        assert request not in reconciling
        reconciling.add(request)
        try:
            sizes[request.name] = "unreadable" if request in cache.unreadable else cache.get(request)
            await asyncio.sleep(chance.random())
            if chance.random() < 0.2:
                raise chance.choice([KeyError("reconcile"), asyncio.CancelledError()])
        finally:
            reconciling.discard(request)

    controller = Controller("widget", reconcile, workers=2, max_delay=5).for_object(cache, debounce=debounce)
    running = asyncio.create_task(informer.run())
    await informer.synced.wait()
    controlling = asyncio.create_task(controller.run())
    try:
        for step in steps:
            await apply_step(server, step)
        await asyncio.sleep(300)
        check(server, cache, outlines, reader)
        for request in {Request(name) for name in sizes} | set(cache.requests()):
            expected = "unreadable" if request in cache.unreadable else cache.get(request)
            assert sizes[request.name] == expected
    finally:
        controller.stop()
        await controlling
        await cancel(running)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@given(st.lists(STEPS, max_size=25), st.sampled_from([0.0, 3.0]), st.integers(0, 1000))
def test_caches_converge_to_the_server_and_every_change_is_reconciled(
    steps: list[tuple[Any, ...]], debounce: float, seed: int
) -> None:
    with virtual_time() as loop:
        loop.run(run_steps(steps, debounce=debounce, chance=random.Random(seed)))  # noqa: S311 - not a secret


REPLICAS = st.sampled_from([0, 1])
FLEET_STEPS = st.one_of(
    st.tuples(st.just("put"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("break"), st.sampled_from([None, *FAULTS])),
    st.tuples(st.just("outage"), st.sampled_from([1.0, 8.0, 20.0])),
    st.tuples(st.just("sleep"), st.sampled_from([0.001, 1.0, 8.0, 30.0])),
    st.tuples(st.just("partition"), REPLICAS),
    st.tuples(st.just("heal"), REPLICAS),
    st.tuples(st.just("restart"), REPLICAS),
    st.tuples(st.just("kill"), REPLICAS),
)


class Replica:
    """One process. It is started again when it ends, as by the kubelet."""

    def __init__(self, fleet: "Fleet", number: int) -> None:
        self.client = MemoryClient(fleet.server)
        self.ended = 0
        self._fleet = fleet
        self._identity = f"replica {number}"
        self._running: asyncio.Task[None] | None = None
        self.manager: Manager

    def start(self) -> None:
        election = Election(name="l", namespace="n", identity=f"{self._identity}, life {self.ended}")
        client: Any = self.client
        self.manager = manager = Manager(
            client, election=election, health_address=OFF, metrics_address=OFF, watch_timeouts=TIMEOUTS,
            graceful_shutdown_timeout=2, end=self._end,
        )  # fmt: skip
        assert manager.elector
        manager.elector._clock = asyncio.get_running_loop().time
        cache = manager.cache(Widget)

        async def reconcile(request: Request) -> None:
            self._fleet.active.append(self)
            self._fleet.most_active = max(self._fleet.most_active, len(set(self._fleet.active)))
            try:
                self._fleet.seen[request.name] = cache.get(request)
                await asyncio.sleep(1)
            finally:
                self._fleet.active.remove(self)

        manager.controller("widget", reconcile, workers=2, max_delay=5).for_object(cache)
        self._running = asyncio.create_task(manager.run())

    def _end(self, _code: int) -> None:
        """Kills the process: none of its tasks runs any more."""
        assert self._running
        self._running.cancel()

    async def stop(self, *, kill: bool) -> None:
        assert self._running
        if kill:
            self._running.cancel()
        self.manager.stop()
        await asyncio.gather(self._running, return_exceptions=True)
        self.ended += 1

    async def supervise(self) -> None:
        """Starts the process again whenever it has ended by itself."""
        while True:
            assert self._running
            await asyncio.wait((self._running,))
            await asyncio.sleep(0.5)
            if self._running.done():
                self.ended += 1
                self.start()


class Fleet:
    """Two replicas of one program."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.active: list[Replica] = []
        self.seen: dict[str, Widget | None] = {}
        self.most_active = 0
        self.replicas = [Replica(self, number) for number in range(2)]

    async def take(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("partition" | "heal" as what, number):
                self.replicas[number].client.partitioned = what == "partition"
                self.server.break_watches()
            case ("restart" | "kill" as what, number):
                await self.replicas[number].stop(kill=what == "kill")
            case _:
                await apply_step(self.server, step)


async def run_fleet_steps(steps: list[tuple[Any, ...]]) -> None:
    fleet = Fleet()
    fleet.server.put("a", {"size": 1})
    for replica in fleet.replicas:
        replica.start()
    supervising = [asyncio.create_task(replica.supervise()) for replica in fleet.replicas]
    for step in steps:
        await fleet.take(step)
    for replica in fleet.replicas:
        await fleet.take(("heal", fleet.replicas.index(replica)))
    await asyncio.sleep(120)
    leaders = [replica for replica in fleet.replicas if replica.manager.elector and replica.manager.elector.leading]
    assert len(leaders) == 1
    sizes = {name: each["spec"]["size"] for name, each in fleet.server.objects.items()}
    # A new leader does not know of objects that were deleted before it started.
    cached_sizes = {name: each.spec.size for name, each in fleet.seen.items() if each is not None and name in sizes}
    assert cached_sizes == sizes
    assert fleet.most_active <= 1
    await cancel(*supervising)
    for replica in fleet.replicas:
        await replica.stop(kill=False)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert fleet.server.lease
    assert not fleet.server.lease.holderIdentity


@given(st.lists(FLEET_STEPS, max_size=20))
def test_one_replica_at_a_time_reconciles_and_no_task_outlives_it(steps: list[tuple[Any, ...]]) -> None:
    with virtual_time() as loop:
        loop.run(run_fleet_steps(steps))
