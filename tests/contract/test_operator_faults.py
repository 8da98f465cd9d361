"""The operator killed, refused, left without an answer at every single request: in the end there is what is asked for.

For each scenario a run without faults tells how many requests there are to spoil and what the end is. Then, one run
each, every one of them is spoilt in every way; where the operator was killed it is started again, as Kubernetes does.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from kubeapi import Fault, KubeApi, Object, kube_api
from operatorscenarios import (
    JUDGED,
    NAMESPACE,
    OVERRIDES,
    SCENARIOS,
    Copy,
    Deed,
    Drift,
    Put,
    Remove,
    copied,
    difference,
    end,
)
from waiting import until

from accelplane.kube.cache import Patience
from accelplane.kube.client import Client
from accelplane.kube.manager import OFF, Manager
from accelplane.operator import models
from accelplane.operator.controller import controllers
from accelplane.operator.daemonsets import provisioning_hash, render
from accelplane.operator.settings import ImagePolicy, Settings
from accelplane.operator.update import plan

# Everything but watches.
ANY = r"^(GET|PATCH|PUT|POST|DELETE) "
SETTINGS = Settings(namespace=NAMESPACE, images=ImagePolicy(overrides=OVERRIDES))
PATIENCE = Patience(first_delay=0.01, max_delay=0.1)
# As many at a time as keep the processor busy while they wait.
AT_A_TIME = 8

FAULTS: dict[str, dict[str, Any]] = {
    "409": {"status": 409},
    "410": {"status": 410},
    "429": {"status": 429, "headers": {"Retry-After": "0"}},
    "500": {"status": 500},
    "no answer": {"hang": True},
    "done without an answer": {"after": True},
}


class Operator:
    """The operator's controllers, started again whenever they are killed."""

    def __init__(self, api: KubeApi, families: Sequence[str], timeout: float = 1) -> None:
        self.api = api
        self.families = families
        self.kills = 0
        self._stopped = False
        self._timeout = timeout
        self._running: asyncio.Task[None] | None = None
        self._manager: Manager | None = None

    def kill(self) -> None:
        """Ends them where they are: nothing is finished."""
        self.kills += 1
        assert self._running
        self._running.cancel()

    async def run(self) -> None:
        while not await self._one_life() and not self._stopped:
            pass

    def stop(self) -> None:
        """Ends them in order, also when they were killed a moment ago."""
        assert self._manager
        self._stopped = True
        self._manager.stop()

    async def _one_life(self) -> bool:
        """Whether it ended in order."""
        client = Client(self.api.config, field_manager="accelplane-operator", timeout=self._timeout)
        self._manager = Manager(client, health_address=OFF, metrics_address=OFF, patience=PATIENCE)
        controllers(self._manager, self.families, SETTINGS)
        kills = self.kills
        self._running = asyncio.create_task(self._manager.run())
        try:
            await asyncio.wait([self._running])
            if self._running.cancelled() and kills != self.kills:
                return False
            await self._running
            return True
        finally:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            await client.close()


@contextlib.asynccontextmanager
async def operator(api: KubeApi, *families: str, **more: Any) -> AsyncIterator[Operator]:
    made = Operator(api, families, **more)
    task = asyncio.create_task(made.run())
    try:
        await asyncio.sleep(0)
        yield made
        assert not task.done()
        made.stop()
        async with asyncio.timeout(10):
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def do(api: KubeApi, deed: Deed) -> None:
    match deed:
        case Put(plural, thing):
            put(api, plural, copy.deepcopy(thing))
        case Remove(plural, name, namespace):
            api.remove(plural, name, namespace)
        case Copy(name, new):
            found = api.get("daemonsets", name, NAMESPACE)
            assert found
            made = copied(found, new)
            made["metadata"]["creationTimestamp"] = "2030-01-01T00:00:00Z"
            api.put("daemonsets", made)
        case Drift(name, args):
            drifted = copy.deepcopy(api.get("daemonsets", name, NAMESPACE))
            assert drifted
            drifted["spec"]["template"]["spec"]["containers"][0]["args"] = list(args)
            api.put("daemonsets", drifted)


def put(api: KubeApi, plural: str, thing: Object) -> None:
    metadata = thing["metadata"]
    known = api.get(plural, metadata["name"], metadata.get("namespace", ""))
    if plural.endswith("deviceplugins"):
        generation = known["metadata"]["generation"] if known else 0
        metadata["generation"] = generation + (not known or known["spec"] != thing["spec"])
        if known and "status" in known:
            thing["status"] = known["status"]
    api.put(plural, thing)


def end_of(api: KubeApi) -> Object:
    return end({plural: api.all(plural) for plural in JUDGED})


async def quiet(api: KubeApi, many: int = 30) -> None:
    """Returns when nothing was asked for while client and server, which share a loop, had many a turn."""
    asked, turns = -1, 0
    async with asyncio.timeout(60):
        while turns < many:
            before, asked = asked, api.count(ANY)
            turns = turns + 1 if asked == before else 0
            await asyncio.sleep(0.01)


class Recorded:
    """What a run without faults shows: the world that the deeds are done to, their end, and how many requests."""

    def __init__(self, prepared: KubeApi, end: Object, requests: int, watches: int) -> None:
        self.prepared = prepared
        self.end = end
        self.requests = requests
        self.watches = watches


_recorded: dict[str, Recorded] = {}


async def recorded(name: str) -> Recorded:
    """The run of a scenario without faults, made once."""
    if name not in _recorded:
        scenario = SCENARIOS[name]
        # The operator takes its time, a second, until it looks what other labels of nodes mean.
        many = 150 if any(isinstance(deed, Put) and deed.plural == "nodes" for deed in scenario.deeds) else 30
        async with kube_api() as api:
            async with operator(api, *scenario.families):
                for deed in scenario.before:
                    do(api, deed)
                await quiet(api, many)
                prepared = KubeApi()
                prepared.become(api)
                watches, asked = api.watches, api.count(ANY)
                for deed in scenario.deeds:
                    do(api, deed)
                await quiet(api, many)
            assert_is_asked_for(api)
            _recorded[name] = Recorded(prepared, end_of(api), api.count(ANY) - asked, watches)
    return _recorded[name]


def assert_is_asked_for(api: KubeApi) -> None:
    """That there is one DaemonSet for each resource, the one that it asks for, and no object besides."""
    resources = [each for plural in JUDGED if plural.endswith("deviceplugins") for each in api.all(plural)]
    for each in resources:
        plugin = models.decode(each)
        config = api.get("configmaps", each["spec"].get("provisioningConfig", ""), NAMESPACE)
        provisioning = provisioning_hash(config["data"], None) if config else ""
        desired = render(plugin, SETTINGS, provisioning=provisioning)
        there = [one for one in api.all("daemonsets") if one["metadata"]["name"] == desired.metadata.name]
        planned = plan(desired, there, manager="accelplane-operator")
        assert planned.kept is not None, each["metadata"]["name"]
        assert (planned.differences, planned.surplus) == ((), ())
    assert len(api.all("daemonsets")) == len(resources)
    shared = any(each["spec"].get("resourceManager") for each in api.all("gpudeviceplugins"))
    assert len(api.all("serviceaccounts")) == len(api.all("clusterrolebindings")) == shared


async def troubled(name: str, trouble: Callable[[KubeApi, Operator], Fault], **more: Any) -> bool:
    """One run of a scenario, with a fault from when its deeds begin; its end is as ever. Whether the fault happened."""
    scenario, record = SCENARIOS[name], await recorded(name)
    async with kube_api() as api:
        api.become(record.prepared)
        async with operator(api, *scenario.families, **more) as running:
            await until(lambda: api.watches == record.watches)
            fault = trouble(api, running)
            for deed in scenario.deeds:
                do(api, deed)
            with contextlib.suppress(TimeoutError):
                await until(lambda: end_of(api) == record.end)
            assert not difference(end_of(api), record.end)
        assert not difference(end_of(api), record.end)
        return not fault.times


async def at_each_request(name: str, run: Callable[[int], Awaitable[bool]]) -> None:
    """Runs a scenario as often as it has requests, a few runs at a time."""
    slots = asyncio.Semaphore(AT_A_TIME)
    failed: list[str] = []
    happened: list[int] = []

    async def one(position: int) -> None:
        async with slots:
            try:
                if await run(position):
                    happened.append(position)
            except AssertionError as error:
                failed.append(f"request {position}: {error}")

    positions = range((await recorded(name)).requests)
    await asyncio.gather(*(one(position) for position in positions))
    assert not failed, "\n".join(failed)
    # In which order things happen is not the same each time, and one run has a request more than another.
    assert len(happened) > len(positions) // 2


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_fault_at_any_request_changes_nothing_in_the_end(name: str, fault: str) -> None:
    more = {"timeout": 0.2} if FAULTS[fault].get("hang") else {}

    async def run(position: int) -> bool:
        return await troubled(name, lambda api, _: api.fault(ANY, skip=position, **FAULTS[fault]), **more)

    await at_each_request(name, run)


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_an_operator_that_is_killed_at_any_request_goes_on_where_it_was(name: str, after: bool) -> None:
    async def run(position: int) -> bool:
        def trouble(api: KubeApi, running: Operator) -> Fault:
            return api.fault(ANY, skip=position, hang=True, after=after, then=running.kill)

        return await troubled(name, trouble)

    await at_each_request(name, run)
