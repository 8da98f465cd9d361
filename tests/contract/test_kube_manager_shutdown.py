"""Shutdown of a manager: signals, leases, and parts that end."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest
from kubeapi import KubeApi
from kubekinds import Widget, widget
from kubemanagers import HASTE, make_manager, page, running
from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.leader import Election, LeaseLost
from accelplane.kube.manager import OFF, Manager
from accelplane.kube.objects import Request
from accelplane.kube.tasks import UnexpectedCancellation


@pytest.fixture
def manager(client: Client) -> Manager:
    return make_manager(client)


async def test_sigterm_lets_reconciliations_finish_and_releases_the_lease(api: KubeApi, client: Client) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> None:
        started.set()
        await asyncio.sleep(0.1)
        ended.set()

    manager = make_manager(client, "one")
    manager.controller("widget", slow).for_object(manager.cache(Widget))
    api.put("widgets", widget("w"))
    async with running(manager) as task:
        await started.wait()
        assert api.objects["leases", "n", "l"]["spec"]["holderIdentity"] == "one"
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await task
    assert ended.is_set()
    assert (
        "holderIdentity" not in api.objects["leases", "n", "l"]["spec"]
        or not (api.objects["leases", "n", "l"]["spec"]["holderIdentity"])
    )


async def test_a_second_signal_ends_the_process_immediately(api: KubeApi, client: Client) -> None:
    codes: list[int] = []
    started = asyncio.Event()

    async def stuck(request: Request) -> None:
        started.set()
        await asyncio.sleep(3600)

    manager = make_manager(client, end=codes.append)
    manager.controller("widget", stuck).for_object(manager.cache(Widget))
    api.put("widgets", widget("w"))
    async with running(manager) as task:
        await started.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.02)
        assert not task.done()
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: codes == [1])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_late_reconciliations_are_cancelled_before_the_lease_is_released(api: KubeApi, client: Client) -> None:
    started: set[str] = set()
    ended: dict[str, object] = {}

    async def stuck(name: str) -> None:
        started.add(name)
        try:
            await asyncio.sleep(3600)
        finally:
            # cleanup during shutdown
            await client.get(Widget, "w")
            ended[name] = api.objects["leases", "n", "l"]["spec"]["holderIdentity"]

    election = Election(name="l", namespace="n", identity="one", lease_duration=2, renew_deadline=1, retry_period=0.05)
    manager = Manager(client, election=election, health_address=OFF, metrics_address=OFF, graceful_shutdown_timeout=0.1)
    manager.controller("widget", lambda _request: stuck("controller")).for_object(manager.cache(Widget))
    manager.add_runnable(lambda: stuck("background"), leader_only=True)
    api.put("widgets", widget("w"))
    task = asyncio.create_task(manager.run())
    await until(lambda: len(started) == 2)
    manager.stop()
    async with asyncio.timeout(5):
        await task
    assert ended == {"controller": "one", "background": "one"}
    assert not api.objects["leases", "n", "l"]["spec"].get("holderIdentity")


async def test_shutdown_ends_though_events_cannot_be_written(api: KubeApi, client: Client) -> None:
    manager = Manager(client, health_address=OFF, metrics_address=OFF, graceful_shutdown_timeout=0.2)
    widgets = manager.cache(Widget)
    api.put("widgets", widget("w"))
    task = asyncio.create_task(manager.run())
    await until(lambda: len(widgets) == 1)
    api.fault("POST .*/events", hang=True, times=100)
    for number in range(9):
        manager.events.record(next(iter(widgets)), "Normal", "Seen", f"number {number}")
    manager.stop()
    async with asyncio.timeout(5):
        await task


async def test_a_lost_lease_ends_the_process(api: KubeApi, client: Client) -> None:
    codes: list[int] = []
    manager = make_manager(client, "one", codes.append)
    async with running(manager) as task:
        await until(lambda: ("leases", "n", "l") in api.objects)
        lease = api.objects["leases", "n", "l"]
        api.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": "another"}})
        await until(lambda: codes == [1])
        with pytest.raises(LeaseLost, match="held by another"):
            await task


async def test_a_runnable_that_fails_or_returns_ends_the_program(client: Client, manager: Manager) -> None:
    async def fail() -> None:
        raise OSError("the disk is full")

    async def end() -> None:
        pass

    manager.add_runnable(fail)
    with pytest.raises(OSError, match="the disk is full"):
        await manager.run()
    manager = make_manager(client)
    manager.add_runnable(end)
    with pytest.raises(RuntimeError, match=r"runnable .*\.end: returned, expected to run until the program ends"):
        await manager.run()


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("ending", ["returns", "is cancelled", "fails"])
async def test_a_runnable_of_the_leader_that_ends_ends_the_program(client: Client, leads: bool, ending: str) -> None:
    async def end() -> None:
        await asyncio.sleep(0.01)
        if ending == "is cancelled":
            raise asyncio.CancelledError
        if ending == "fails":
            raise OSError("end: disk is full")

    manager = make_manager(client, "one" if leads else "")
    manager.add_runnable(end, leader_only=True)
    async with asyncio.timeout(30):
        with pytest.raises((RuntimeError, UnexpectedCancellation, OSError), match=r"end: "):
            await manager.run()


async def test_a_controller_that_returns_stops_the_program(api: KubeApi, client: Client, manager: Manager) -> None:
    async def reconcile(_request: Request) -> None:
        pass

    controller = manager.controller("widget", reconcile).for_object(manager.cache(Widget))
    manager.add_runnable(run_forever)
    task = asyncio.create_task(manager.run())
    await until(lambda: api.open_watches == 1)
    controller.stop()
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="controller widget: returned"):
            await task


async def run_forever() -> None:
    await asyncio.Event().wait()


async def test_a_server_serves_after_sigterm_until_the_shutdown_delay_is_over(api: KubeApi, client: Client) -> None:
    steps: list[str] = []
    ended = asyncio.Event()

    async def reconcile(_request: Request) -> None:
        ended.set()

    @contextlib.asynccontextmanager
    async def server() -> AsyncIterator[None]:
        yield
        lease = api.objects["leases", "n", "l"]["spec"]
        steps.append(f"closed, held by {lease.get('holderIdentity') or 'no one'}, {len(widgets)} widgets")

    election = Election(
        name="l", namespace="n", identity="one", lease_duration=15, renew_deadline=10, retry_period=0.05
    )
    manager = Manager(
        client, election=election, health_address="127.0.0.1:0", metrics_address=OFF, shutdown_delay=1.0,
        watch_timeouts=HASTE,
    )  # fmt: skip
    widgets = manager.cache(Widget)
    manager.controller("widget", reconcile).for_object(widgets)
    manager.add_context(server(), drain=lambda: steps.append("drained"))
    api.put("widgets", widget("a"))
    task = asyncio.create_task(manager.run())
    await ended.wait()
    assert await page(manager, "health", "/readyz") == (200, "ok")
    stopped = asyncio.get_running_loop().time()
    os.kill(os.getpid(), signal.SIGTERM)

    async def is_unready() -> bool:
        return await page(manager, "health", "/readyz") == (503, "not ready: shutting down")

    await until(is_unready)
    assert steps == ["drained"]
    assert (await page(manager, "health", "/healthz"))[0] == 200
    # What the server serves is current until it is closed, though another replica may lead already.
    api.put("widgets", widget("b"))
    await until(lambda: not api.objects["leases", "n", "l"]["spec"].get("holderIdentity"))
    async with asyncio.timeout(30):
        await task
    assert steps == ["drained", "closed, held by no one, 2 widgets"]
    assert asyncio.get_running_loop().time() - stopped >= 1.0


async def test_a_standby_that_is_stopped_does_not_start_to_lead(api: KubeApi, client: Client) -> None:
    lease = {"holderIdentity": "another", "leaseDurationSeconds": 1}
    api.put("leases", {"metadata": {"name": "l", "namespace": "n"}, "spec": lease})
    manager = make_manager(client, "one")
    leaders: list[str] = []

    async def leader_task() -> None:
        leaders.append("one")
        await run_forever()

    @contextlib.asynccontextmanager
    async def slow_server() -> AsyncIterator[None]:
        yield
        # longer than the Lease of the other one lasts
        await asyncio.sleep(1.5)

    manager.add_runnable(leader_task, leader_only=True)
    manager.add_context(slow_server())
    async with running(manager):
        await until(lambda: api.count("GET .*/leases/l") > 1)
    assert leaders == []
    assert api.objects["leases", "n", "l"]["spec"]["holderIdentity"] == "another"


async def test_no_task_outlives_the_manager(api: KubeApi, client: Client) -> None:
    before = asyncio.all_tasks()
    api.put("widgets", widget("a"))
    started = asyncio.Event()

    async def reconcile(_request: Request) -> None:
        started.set()
        await run_forever()

    for ending in ("stop", "failure", "cancellation"):
        started.clear()
        failing = asyncio.Event()

        async def fail(event: asyncio.Event = failing) -> None:
            await event.wait()
            raise OSError("failed")

        election = Election(name=ending, namespace="n", identity="one")
        manager = Manager(
            client, election=election, health_address="127.0.0.1:0", metrics_address=OFF, watch_timeouts=HASTE,
            graceful_shutdown_timeout=0.1,
        )  # fmt: skip
        manager.controller("widget", reconcile).for_object(manager.cache(Widget))
        manager.add_runnable(fail)
        task = asyncio.create_task(manager.run())
        await started.wait()
        {"stop": manager.stop, "failure": failing.set, "cancellation": task.cancel}[ending]()
        await asyncio.gather(task, return_exceptions=True)
        assert [each for each in asyncio.all_tasks() - before if "FakeApiServer" not in repr(each)] == []
        assert not api.objects["leases", "n", ending]["spec"].get("holderIdentity")
