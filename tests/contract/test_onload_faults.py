"""The Onload operator with faults at writes, and killed at writes: the final state is the desired one.

For each scenario, a run without faults counts the writes. Then there is one run for each of them (in `make test` for a
third) with a fault. The cluster reacts in between, and never sees a module unloaded that is in use, or too many nodes
changed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from kubeapi import Fault, KubeApi, kube_api
from onloadoperators import wall_clock
from onloadresources import MAPPING
from onloadsetup import Setup, app
from thoroughness import places
from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.manager import OFF, Manager
from accelplane.onload.reconciler import OnloadController

pytestmark = [pytest.mark.untraced, pytest.mark.virtual_time]

WRITES = r"^(PATCH|PUT|POST|DELETE) (?!.*/events)"
TIMEOUTS = WatchTimeouts(first_delay=0.01, max_delay=0.1)
VERSION, NEW = "8.1.2.26", "8.2"
SFC = {**MAPPING, "sfc": {}}
AT_A_TIME = 8
# Resources, nodes, pods, DaemonSets and Modules.
WATCHES = 5


class Operator:
    """The operator, started again whenever it is killed."""

    def __init__(self, api: KubeApi) -> None:
        self.api = api
        self._stopped = False
        self._running: asyncio.Task[None] | None = None
        self._manager: Manager | None = None

    def kill(self) -> None:
        assert self._running
        self._running.cancel()

    def stop(self) -> None:
        assert self._manager
        self._stopped = True
        self._manager.stop()

    async def run(self) -> None:
        while not self._stopped:
            client = Client(self.api.config, field_manager="onload-operator", timeout=1)
            self._manager = Manager(client, health_address=OFF, metrics_address=OFF, watch_timeouts=TIMEOUTS)
            OnloadController(self._manager, "image", clock=wall_clock())
            self._running = asyncio.create_task(self._manager.run())
            try:
                await asyncio.wait([self._running])
                if not self._running.cancelled():
                    await self._running
            finally:
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)
                await client.close()


@contextlib.asynccontextmanager
async def running_operator(api: KubeApi, setup: Setup) -> AsyncIterator[Operator]:
    operator = Operator(api)
    tasks = [asyncio.create_task(operator.run()), asyncio.create_task(setup.run())]
    try:
        await asyncio.sleep(0)
        yield operator
        operator.stop()
        async with asyncio.timeout(60):
            await tasks[0]
        assert not tasks[1].done(), tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Scenario:
    """`prepare` creates the initial state, `change` is the change, `is_done` checks the final state."""

    def __init__(
        self, before: bool, change: Callable[[KubeApi, Setup], object], is_done: Callable[[Setup], bool]
    ) -> None:
        self.before = before
        self.change = change
        self.is_done = is_done


def upgrade(api: KubeApi, setup: Setup) -> None:
    api.put("pods", app("app", "node-0"))
    setup.create(onload__version=NEW, onload__userImage="new", onload__kernelMappings=[SFC])


SCENARIOS = {
    "created": Scenario(
        False,
        lambda _api, setup: setup.create(onload__kernelMappings=[SFC]),
        lambda setup: setup.is_ready(VERSION) and setup.versions() == {(VERSION, VERSION, VERSION)},
    ),
    "upgraded": Scenario(True, upgrade, lambda setup: setup.is_ready(NEW) and setup.versions() == {(NEW, NEW, NEW)}),
    "deleted": Scenario(
        True, lambda _api, setup: setup.delete(), lambda setup: setup.onload() is None and not setup.leftovers()
    ),
    "selector": Scenario(
        True,
        lambda _api, setup: setup.create(selector={"none": "none"}),
        lambda setup: setup.is_ready(VERSION) and not setup.leftovers(),
    ),
}
# Two faults share the writes: one has the even ones, the other the odd ones.
FAULTS: dict[str, tuple[int, dict[str, Any]]] = {
    "500": (0, {"status": 500}),
    "done without an answer": (1, {"after": True}),
}


_prepared: list[KubeApi] = []


async def prepared() -> KubeApi:
    """A cluster in which a version is verified on all nodes, made once."""
    if not _prepared:
        async with kube_api() as api:
            setup = Setup(api)
            async with running_operator(api, setup):
                setup.create(onload__kernelMappings=[SFC])
                await until(lambda: setup.is_ready(VERSION), 60)
        copied = KubeApi()
        copied.copy_from(api)
        _prepared.append(copied)
    return _prepared[0]


async def run(scenario: Scenario, inject: Callable[[KubeApi, Operator], Fault | None]) -> tuple[int, bool]:
    """One run. Returns the number of writes, and whether the fault happened."""
    before = await prepared() if scenario.before else None
    async with kube_api() as api:
        setup = Setup(api)
        if before is not None:
            api.copy_from(before)
        async with running_operator(api, setup) as operator:
            await until(lambda: api.open_watches >= WATCHES, 60)
            writes = api.count(WRITES)
            fault = inject(api, operator)
            scenario.change(api, setup)
            await until(lambda: scenario.is_done(setup), 60)
            writes = api.count(WRITES) - writes
        assert not setup.violations
        # A deletion releases all nodes at once.
        assert setup.most_down <= 1 or setup.onload() is None
        return writes, fault is not None and not fault.times


async def at_every_second_write(name: str, first: int, inject: Callable[[KubeApi, Operator, int], Fault]) -> None:
    scenario = SCENARIOS[name]
    writes, _ = await run(scenario, lambda _api, _operator: None)
    slots = asyncio.Semaphore(AT_A_TIME)

    async def one(position: int) -> bool:
        async with slots:
            return (await run(scenario, lambda api, operator: inject(api, operator, position)))[1]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(position)) for position in places(writes, first, 2)]
    # The order of events is not the same in each run, and one run has a write more than another.
    happened = sum(task.result() for task in tasks)
    assert happened
    assert 2 * happened >= len(tasks)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_fault_at_any_write_does_not_change_the_final_state(name: str, fault: str) -> None:
    first, options = FAULTS[fault]
    await at_every_second_write(name, first, lambda api, _, position: api.fault(WRITES, skip=position, **options))


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_an_operator_killed_at_any_write_continues(name: str, after: bool) -> None:
    def inject(api: KubeApi, operator: Operator, position: int) -> Fault:
        return api.fault(WRITES, skip=position, hang=True, after=after, then=operator.kill)

    await at_every_second_write(name, int(after), inject)
