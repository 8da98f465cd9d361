"""The operator is killed, or its request fails or hangs, at every single request: the final state is the desired one.

For each scenario a run without faults determines the number of requests and the final state. Then there is one run
for each request (in `make test` for a third) and kind of fault. A killed operator is started
again, as Kubernetes does.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
from customresources import resource
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeapi import Fault, KubeApi, Object, kube_api
from operatorruns import (
    ANY,
    FAST_WATCHES,
    Operator,
    do,
    end_of,
    missing_in,
    operator,
    put,
    wait_idle,
    wait_until_true,
)
from operatorscenarios import NAMESPACE, SCENARIOS, VERSION, Copy, Drift, PutObject, Remove, difference
from thoroughness import examples, places
from virtualtime import TCP_DELAY, VirtualTimeLoop
from waiting import until

from accelplane.kube.informer import WatchTimeouts

pytestmark = [pytest.mark.untraced, pytest.mark.virtual_time]

_SHORT = WatchTimeouts(first_delay=0.01, max_delay=0.1, idle=0.4)
EXPIRED = b'{"type":"ERROR","object":{"kind":"Status","status":"Failure","code":410,"reason":"Expired"}}'
# The number of concurrent runs that keeps the processor busy.
AT_A_TIME = 8

FAULTS: dict[str, dict[str, Any]] = {
    "409": {"status": 409},
    "410": {"status": 410},
    "429": {"status": 429, "headers": {"Retry-After": "0"}},
    "500": {"status": 500},
    "no answer": {"hang": True},
    "done without an answer": {"after": True},
}


class FaultFreeRun:
    """A run without faults: the initial state, the final state, and how many requests."""

    def __init__(self, prepared: KubeApi, end: Object, requests: int, watches: int) -> None:
        self.prepared = prepared
        self.end = end
        self.requests = requests
        self.watches = watches


_recorded: dict[str, FaultFreeRun] = {}


async def recorded(name: str) -> FaultFreeRun:
    """The run of a scenario without faults, made once."""
    if name not in _recorded:
        scenario = SCENARIOS[name]
        # The operator debounces changed labels of nodes for a second.
        many = (
            150
            if any(isinstance(change, PutObject) and change.plural == "nodes" for change in scenario.changes)
            else 30
        )
        async with kube_api() as api:
            async with operator(api, *scenario.families):
                for change in scenario.before:
                    do(api, change)
                await wait_idle(api, many)
                prepared = KubeApi()
                prepared.copy_from(api)
                watches, counts = api.open_watches, api.count(ANY)
                for change in scenario.changes:
                    do(api, change)
                await wait_idle(api, many)
            assert not missing_in(api)
            _recorded[name] = FaultFreeRun(prepared, end_of(api), api.count(ANY) - counts, watches)
    return _recorded[name]


async def wait_final_state(api: KubeApi, name: str) -> None:
    """Waits until the state is the final state of the run without faults."""
    expected = (await recorded(name)).end
    await wait_until_true(api, lambda: end_of(api) == expected)
    assert not difference(end_of(api), expected)


async def run_with_fault(name: str, inject: Callable[[KubeApi, Operator], Fault], **more: Any) -> bool:
    """Runs a scenario with a fault during its changes; checks the final state. Returns whether the fault occurred."""
    scenario, record = SCENARIOS[name], await recorded(name)
    async with kube_api() as api:
        api.copy_from(record.prepared)
        async with operator(api, *scenario.families, **more) as running:
            await until(lambda: api.open_watches >= record.watches, 60)
            fault = inject(api, running)
            for change in scenario.changes:
                do(api, change)
            await wait_final_state(api, name)
        assert not difference(end_of(api), record.end)
        return not fault.times


async def each(positions: Sequence[int], run: Callable[[int], Awaitable[bool]]) -> None:
    """Runs the scenario for each position, a few concurrently. Most runs must have a fault."""
    slots = asyncio.Semaphore(AT_A_TIME)
    failed: list[str] = []
    happened: list[int] = []

    async def one(position: int) -> None:
        async with slots:
            try:
                if await run(position):
                    happened.append(position)
            except AssertionError as error:
                failed.append(f"run {position}: {error}")

    await asyncio.gather(*(one(position) for position in positions))
    assert not failed, "\n".join(failed)
    # The order of events differs between runs, and so does the number of requests by one.
    assert happened
    assert 2 * len(happened) >= len(positions)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_fault_at_any_request_does_not_change_the_final_state(name: str, fault: str) -> None:
    more = {"timeout": 0.2} if FAULTS[fault].get("hang") else {}

    async def run(position: int) -> bool:
        return await run_with_fault(name, lambda api, _: api.fault(ANY, skip=position, **FAULTS[fault]), **more)

    await each(places((await recorded(name)).requests, list(FAULTS).index(fault)), run)


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_an_operator_killed_at_any_request_continues(name: str, after: bool) -> None:
    async def run(position: int) -> bool:
        def inject(api: KubeApi, running: Operator) -> Fault:
            return api.fault(ANY, skip=position, hang=True, after=after, then=running.kill)

        return await run_with_fault(name, inject)

    await each(places((await recorded(name)).requests, int(after)), run)


def unanswered(api: KubeApi) -> None:
    api.compact()
    api.abort_watches()
    api.fault("^GET ", 500, times=3)
    api.fault("^WATCH ", 429, times=3)


WATCHES: dict[str, Callable[[KubeApi], object]] = {
    "cut": KubeApi.abort_watches,
    "cut for long": lambda api: (api.compact(), api.abort_watches()),
    "too old": lambda api: (api.compact(), api.send(EXPIRED)),
    "ended": KubeApi.end_watches,
    "ended in a line": lambda api: api.end_watches(b'{"type":"MODIFIED","object":{"metadata":{"na'),
    "silent": KubeApi.pause_watches,
    "not to be had": unanswered,
}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("description", WATCHES)
async def test_failing_watches_hide_no_changes(description: str, moment: str) -> None:
    names = list(SCENARIOS)

    async def run(index: int) -> bool:
        name = names[index]
        scenario, record = SCENARIOS[name], await recorded(name)
        async with kube_api() as api:
            api.copy_from(record.prepared)
            async with operator(
                api, *scenario.families, watch_timeouts=_SHORT if description == "silent" else FAST_WATCHES
            ):
                await until(lambda: api.open_watches >= record.watches, 60)
                if moment == "before":
                    WATCHES[description](api)
                for change in scenario.changes:
                    do(api, change)
                if moment == "after":
                    WATCHES[description](api)
                await wait_final_state(api, name)
            assert not difference(end_of(api), record.end)
        return True

    await each(range(len(names)), run)


@pytest.mark.parametrize("fault", ["500", "done without an answer"])
@pytest.mark.parametrize("name", ["edited", "gone"])
async def test_changes_made_without_an_operator_are_reconciled_even_after_a_failed_start(name: str, fault: str) -> None:
    scenario, record = SCENARIOS[name], await recorded(name)

    async def run(position: int) -> bool:
        async with kube_api() as api:
            api.copy_from(record.prepared)
            for change in scenario.changes:
                do(api, change)
            spoilt = api.fault("", skip=position, **FAULTS[fault])
            async with operator(api, *scenario.families):
                await wait_final_state(api, name)
            assert not difference(end_of(api), record.end)
            return not spoilt.times

    await each(places(record.requests + 2 * record.watches, list(FAULTS).index(fault)), run)


SPECS = st.fixed_dictionaries(
    {
        "image": st.sampled_from([f"intel/intel-gpu-plugin:{VERSION}", "intel/intel-gpu-plugin:0.30.0"]),
        "resourceManager": st.booleans(),
    },
    optional={
        "sharedDevNum": st.integers(1, 9),
        "nodeSelector": st.sampled_from([{"a": "yes"}, {"b": "yes"}, {"a": "yes", "b": "yes"}]),
        "initImage": st.just(f"intel/intel-gpu-initcontainer:{VERSION}"),
        "tolerations": st.just([{"operator": "Exists"}]),
    },
)
NAMES = st.sampled_from(["one", "two"])
# The pattern of requests, and how many of them succeed before the fault.
WHERE = st.tuples(st.sampled_from([ANY, "^DELETE ", "^PATCH ", "^PATCH .*/daemonsets/", "^POST "]), st.integers(0, 3))
STEPS = st.one_of(
    st.tuples(st.just("edit"), NAMES, SPECS),
    st.tuples(st.just("edit"), NAMES, SPECS),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("drift"), NAMES),
    st.tuples(st.just("copy"), NAMES),
    st.tuples(st.just("delete"), NAMES),
    st.tuples(st.just("fault"), WHERE, st.sampled_from([name for name in FAULTS if name != "no answer"])),
    st.tuples(st.just("kill"), WHERE, st.booleans()),
    st.tuples(st.just("watches"), st.sampled_from(list(WATCHES))),
    st.tuples(st.just("turns"), st.integers(1, 20)),
)


async def step(api: KubeApi, running: Operator, description: str, *how: Any) -> None:
    daemonset = f"intel-gpu-plugin-{how[0]}"
    existing = api.get("daemonsets", daemonset, NAMESPACE) is not None
    match description:
        case "edit":
            put(api, "gpudeviceplugins", resource("gpu", how[0], **copy.deepcopy(how[1])))
        case "remove" if api.get("gpudeviceplugins", how[0]):
            do(api, Remove("gpudeviceplugins", how[0]))
        case "drift" if existing:
            do(api, Drift(daemonset, ["-bad"]))
        case "copy" if existing and not api.get("daemonsets", f"{daemonset}-x", NAMESPACE):
            do(api, Copy(daemonset, f"{daemonset}-x"))
        case "delete" if existing:
            do(api, Remove("daemonsets", daemonset, NAMESPACE))
        case "fault":
            api.fault(how[0][0], skip=how[0][1], **FAULTS[how[1]])
        case "kill":
            api.fault(how[0][0], skip=how[0][1], hang=True, after=how[1], then=running.kill)
        case "watches":
            WATCHES[how[0]](api)
        case "turns":
            for _ in range(how[0]):
                await asyncio.sleep(0)
        case _:
            pass


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(STEPS, min_size=3, max_size=12))
def test_after_any_fault_the_final_state_is_that_of_the_last_edit(steps: list[tuple[Any, ...]]) -> None:
    async def live() -> None:
        async with kube_api() as api:
            async with operator(api, "gpu", watch_timeouts=_SHORT) as running:
                for each in steps:
                    await step(api, running, *each)
                # Work for a resource that was deleted meanwhile is completed, too.
                await wait_idle(api, 10)
                await wait_until_true(api, lambda: not missing_in(api))
                await wait_idle(api, 10)
            assert not missing_in(api)

    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, TCP_DELAY)) as runner:
        runner.run(live())
