"""The operator's controllers in tests with faults, and the changes that users and other programs make."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kubeapi import KubeApi, Object
from operatorscenarios import (
    JUDGED,
    NAMESPACE,
    SETTINGS,
    Change,
    Copy,
    Drift,
    PutObject,
    Remove,
    differences_to_desired,
    duplicate,
    end,
)
from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.manager import OFF, Manager
from accelplane.operator.controller import controllers

# All requests except watches.
ANY = r"^(GET|PATCH|PUT|POST|DELETE) "
FAST_WATCHES = WatchTimeouts(first_delay=0.01, max_delay=0.1)


class Operator:
    """The operator's controllers, started again whenever they are killed. `extend` adds more to their manager."""

    def __init__(
        self,
        api: KubeApi,
        families: Sequence[str],
        *,
        timeout: float = 1,
        watch_timeouts: WatchTimeouts = FAST_WATCHES,
        extend: Callable[[Manager], None] = lambda _: None,
    ) -> None:
        self.api = api
        self.families = families
        self.watch_timeouts = watch_timeouts
        self.kills = 0
        self._stopped = False
        self._timeout = timeout
        self._extend = extend
        self._running: asyncio.Task[None] | None = None
        self._manager: Manager | None = None

    def kill(self) -> None:
        """Kills them without completing any work."""
        self.kills += 1
        assert self._running
        self._running.cancel()

    async def run(self) -> None:
        while not await self._run_once() and not self._stopped:
            pass

    def stop(self) -> None:
        """Stops them, also directly after they were killed."""
        assert self._manager
        self._stopped = True
        self._manager.stop()

    async def _run_once(self) -> bool:
        """Runs them once. Returns whether they were stopped, not killed."""
        client = Client(self.api.config, field_manager="accelplane-operator", timeout=self._timeout)
        self._manager = Manager(client, health_address=OFF, metrics_address=OFF, watch_timeouts=self.watch_timeouts)
        controllers(self._manager, self.families, SETTINGS)
        self._extend(self._manager)
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
    instance = Operator(api, families, **more)
    task = asyncio.create_task(instance.run())
    try:
        await asyncio.sleep(0)
        yield instance
        assert not task.done()
        instance.stop()
        async with asyncio.timeout(60):
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def do(api: KubeApi, change: Change) -> None:
    match change:
        case PutObject(plural, thing):
            put(api, plural, copy.deepcopy(thing))
        case Remove(plural, name, namespace):
            api.remove(plural, name, namespace)
        case Copy(name, new):
            found = api.get("daemonsets", name, NAMESPACE)
            assert found
            result = duplicate(found, new)
            result["metadata"]["creationTimestamp"] = "2030-01-01T00:00:00Z"
            api.put("daemonsets", result)
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


def missing_in(api: KubeApi) -> str:
    return differences_to_desired({plural: api.all(plural) for plural in (*JUDGED, "nodes", "configmaps")})


async def wait_idle(api: KubeApi, many: int = 30) -> None:
    """Waits until there were no requests during many iterations of the loop that client and server share."""
    request_count, turns = -1, 0
    async with asyncio.timeout(60):
        while turns < many:
            before, request_count = request_count, api.count(ANY)
            turns = turns + 1 if request_count == before else 0
            await asyncio.sleep(0.01)


async def wait_until_true(api: KubeApi, condition: Callable[[], bool]) -> None:
    """Waits until the condition is true, and evaluates it after each change of the objects. Has a timeout."""
    known_version = -1

    def has_changed() -> bool:
        nonlocal known_version
        news, known_version = api.version != known_version, api.version
        return news and condition()

    with contextlib.suppress(TimeoutError):
        await until(has_changed, 60)
