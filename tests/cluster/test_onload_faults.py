"""The Onload operator is killed, or its request fails, at every request of an upgrade of three nodes.

The final state is the same as without faults, and recordings show that no module was unloaded under a pod.
The operator runs in this process and reaches a real API server through a proxy.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from accelplane.apiserver.ratelimit import RateLimit
from accelplane.kube.client import Client, load_config
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.manager import OFF, Manager
from accelplane.onload.program import add

from .faultyproxy import FaultyProxy, faulty_proxy
from .onload_lab import NEW, OLD, PLUGIN_IMAGE, Lab, application, onload, running_lab, violations
from .recording import Event, recording

pytestmark = pytest.mark.cluster

ANY = r"^(GET|PATCH|PUT|POST|DELETE) "
WRITE = r"^(PATCH|PUT|POST|DELETE) (?!.*/events)"
REPLICAS = 4
# Each request fails in one of these runs.
RUNS = 4
FAULTS: tuple[dict[str, Any], ...] = (
    {"status": 500},
    {},
    {"after": True},
    {"status": 429, "headers": {"Retry-After": "0"}},
    {"status": 409},
)


@pytest.fixture(scope="module")
def lab(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three nodes with the old version and an application. Other tests cover KMM 1.1."""
    with running_lab(tmp_path_factory.mktemp("onload-faults"), 2) as instance:
        with instance.operator():
            instance.create(onload(OLD))
            instance.wait_complete(OLD)
            instance.cluster.apply(*application(REPLICAS))
            instance.wait(lambda: instance.available() == REPLICAS, "the application")
        yield instance


class Operator:
    """An operator in this process, which ends as a killed process does."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self.lives = 0

    async def start(self) -> None:
        self.lives += 1
        self._client = Client(
            load_config(str(self._kubeconfig)), field_manager="onload-operator", rate_limit=RateLimit(500, 1000)
        )
        timeouts = WatchTimeouts(first_delay=0.01, max_delay=0.1)
        manager = Manager(self._client, health_address=OFF, metrics_address=OFF, watch_timeouts=timeouts)
        add(manager, PLUGIN_IMAGE)
        self._task = asyncio.create_task(manager.run())

    async def kill(self) -> None:
        assert self._task
        assert self._client
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._client.close()


class Setup:
    """An operator behind a proxy, and the version that the nodes do not have."""

    def __init__(self, lab: Lab, proxy: FaultyProxy, operator: Operator) -> None:
        self.lab = lab
        self.proxy = proxy
        self.operator = operator
        self.before = lab.resource()["spec"]["onload"]["version"]
        self.after = NEW if self.before == OLD else OLD

    async def upgrade(self) -> list[Event]:
        """Upgrades all nodes, and returns what happened to nodes and pods."""
        with recording(self.lab.cluster) as events:
            self.lab.upgrade(self.after)
            await asyncio.to_thread(self.lab.wait, self._is_complete, f"{self.after} on all nodes", 120)
            return await asyncio.to_thread(events)

    def _is_complete(self) -> bool:
        lab = self.lab
        return (
            not lab.problems(self.after)
            and not lab.progress()
            and lab.condition("Ready").get("status") == "True"
            and lab.available() == REPLICAS
        )


@asynccontextmanager
async def setup(lab: Lab, directory: Path) -> AsyncIterator[Setup]:
    async with faulty_proxy(lab.cluster.kubeconfig) as proxy:
        config = json.loads(lab.cluster.kubeconfig.read_text())
        config["clusters"][0]["cluster"] = {"server": proxy.url}
        del config["contexts"][0]["context"]["user"]
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(json.dumps(config))
        operator = Operator(kubeconfig)
        await operator.start()
        try:
            yield Setup(lab, proxy, operator)
        finally:
            proxy.faults.clear()
            await operator.kill()


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
async def test_an_operator_killed_at_every_write_completes_the_upgrade(lab: Lab, tmp_path: Path, after: bool) -> None:
    async with setup(lab, tmp_path) as context:
        fatal = asyncio.Event()

        async def kill_at_each_write() -> None:
            while True:
                # Before a write: each instance makes one write, and is killed at the next, which is lost.
                context.proxy.fault(WRITE, skip=0 if after else 1, hang=True, after=after, then=fatal.set)
                await fatal.wait()
                fatal.clear()
                context.proxy.faults.clear()
                await context.operator.kill()
                await context.operator.start()

        killing = asyncio.create_task(kill_at_each_write())
        try:
            events = await context.upgrade()
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        assert violations(events) == []
        # Each node has at least five changes.
        assert context.operator.lives > 15


@pytest.mark.parametrize("run", range(RUNS))
async def test_faults_at_every_request_do_not_change_the_final_state(lab: Lab, tmp_path: Path, run: int) -> None:
    async with setup(lab, tmp_path) as context:
        hits: list[int] = []

        def arm(skip: int = RUNS - 1) -> None:
            context.proxy.faults.clear()
            context.proxy.fault(ANY, skip=skip, then=hit, **FAULTS[(run + len(hits)) % len(FAULTS)])

        def hit() -> None:
            hits.append(context.proxy.count(ANY))
            arm()

        arm(run)
        assert violations(await context.upgrade()) == []
        assert len(hits) >= 3


async def test_an_api_server_that_is_killed_during_an_upgrade_delays_it(lab: Lab, tmp_path: Path) -> None:
    async with setup(lab, tmp_path) as context:

        def restart() -> None:
            context.lab.cluster.apiserver.kill()
            context.lab.cluster.apiserver.start()

        def is_changed() -> bool:
            return any(re.search(r"PATCH /api/v1/nodes/node-1$", str(request)) for request in context.proxy.requests)

        context.lab.upgrade(context.after)
        await asyncio.to_thread(context.lab.wait, is_changed, "a change of the second node")
        await asyncio.to_thread(restart)
        # Events during an outage of the server are not recorded: only the final state is checked.
        await context.upgrade()
