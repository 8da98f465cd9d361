"""Whole programs of controllers: how they begin, what they show, how they end."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable

import pytest
from kubeapi import KubeApi
from kubekinds import Config, Widget, widget
from waiting import until

from accelplane.kube.client import Client, Selection
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.leader import Election, LeaseLost
from accelplane.kube.manager import OFF, Manager
from accelplane.kube.objects import Request

HASTE = WatchTimeouts(first_delay=0.01, max_delay=0.1)


@pytest.fixture
def manager(client: Client) -> Manager:
    return made(client)


def made(
    client: Client, identity: str = "", end: Callable[[int], None] = os._exit, *, profiling: bool = False
) -> Manager:
    election = None
    if identity:
        election = Election(
            name="l", namespace="n", identity=identity, lease_duration=1, renew_deadline=0.6, retry_period=0.05
        )
    return Manager(
        client,
        election=election,
        health_address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        watch_timeouts=HASTE,
        end=end,
        profiling=profiling,
    )


@contextlib.asynccontextmanager
async def running(manager: Manager) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(manager.run())
    await until(lambda: len(manager.ports) == 2 or task.done())
    try:
        yield task
        if task.done():
            return
        manager.stop()
        async with asyncio.timeout(5):
            await task
    finally:
        task.cancel()


async def page(manager: Manager, server: str, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", manager.ports[server])
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split(" ")[1]), answer.partition("\r\n\r\n")[2]


async def test_controllers_share_caches_and_begin_when_all_are_synced(
    api: KubeApi, client: Client, manager: Manager
) -> None:
    seen: list[Request] = []

    async def look(request: Request) -> None:
        assert all(cache.synced.is_set() for cache in (widgets, configs))
        seen.append(request)

    widgets = manager.cache(Widget)
    configs = manager.cache(Config, Selection(namespace="n"))
    assert manager.cache(Widget) is widgets
    assert manager.cache(Config) is not configs
    manager.controller("one", look).for_object(widgets)
    manager.controller("two", look).for_object(widgets)
    api.put("widgets", widget("w"))
    api.fault("GET .*/n/configmaps", 403, times=5)
    async with running(manager):
        await until(lambda: seen == [Request("w")] * 2)
        assert api.count("GET .*widgets") == 1
        assert api.count("GET .*/n/configmaps") == 6


async def test_probes_tell_what_is_awaited(api: KubeApi, manager: Manager) -> None:
    manager.cache(Widget, Selection(labels="a=b"))
    fault = api.fault("GET", 500, times=1_000_000)
    ready = [False]
    manager.add_readyz_check("certificate", lambda: ready[0])
    async with running(manager):
        assert await page(manager, "health", "/healthz") == (200, "ok")
        assert await page(manager, "health", "/readyz") == (503, "not ready: cache widgets a=b, certificate")
        fault.times = 0
        ready[0] = True

        async def is_ready() -> bool:
            return await page(manager, "health", "/readyz") == (200, "ok")

        await until(is_ready)
        assert (await page(manager, "health", "/debug/tasks"))[0] == 404
        assert (await page(manager, "health", "/metrics"))[0] == 404


NAMES = [
    "controller_runtime_reconcile_total",
    "controller_runtime_reconcile_errors_total",
    "controller_runtime_reconcile_time_seconds",
    "controller_runtime_webhook_requests_total",
    "controller_runtime_webhook_latency_seconds",
    "controller_runtime_max_concurrent_reconciles",
    "workqueue_depth",
    "workqueue_adds_total",
    "workqueue_retries_total",
    "workqueue_queue_duration_seconds",
    "workqueue_work_duration_seconds",
    "workqueue_unfinished_work_seconds",
    "workqueue_longest_running_processor_seconds",
    "rest_client_requests_total",
    "leader_election_master_status",
]


async def test_metrics_have_the_names_that_dashboards_know(api: KubeApi, manager: Manager) -> None:
    async def look(request: Request) -> None:
        pass

    manager.controller("widget", look).for_object(manager.cache(Widget))
    api.put("widgets", widget("w"))
    async with running(manager):

        async def reconciled() -> bool:
            return (
                'controller_runtime_reconcile_total{controller="widget",result="success"} 1.0'
                in (await page(manager, "metrics", "/metrics"))[1]
            )

        await until(reconciled)
        text = (await page(manager, "metrics", "/metrics"))[1]
    # a counter's family is called as its samples are without `_total`
    families = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert [name for name in NAMES if name not in families] == []
    assert "process_resident_memory_bytes" in families


async def test_profiles_are_shown_where_they_were_asked_for(client: Client) -> None:
    manager = made(client, profiling=True)
    async with running(manager):
        assert (await page(manager, "health", "/debug/profile"))[1].startswith("profiling until")
        assert "function calls" in (await page(manager, "health", "/debug/profile"))[1]
        assert "manager.py" in (await page(manager, "health", "/debug/tasks"))[1]


async def test_no_server_where_none_is_wanted(client: Client) -> None:
    manager = Manager(client, health_address=OFF, metrics_address=OFF)
    task = asyncio.create_task(manager.run())
    await asyncio.sleep(0)
    manager.stop()
    async with asyncio.timeout(5):
        await task
    assert manager.ports == {}


async def test_a_signal_ends_it_after_what_was_begun_and_releases_the_lease(api: KubeApi, client: Client) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> None:
        begun.set()
        await asyncio.sleep(0.1)
        ended.set()

    manager = made(client, "one")
    manager.controller("widget", slow).for_object(manager.cache(Widget))
    api.put("widgets", widget("w"))
    async with running(manager) as task:
        await begun.wait()
        assert api.objects["leases", "n", "l"]["spec"]["holderIdentity"] == "one"
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await task
    assert ended.is_set()
    assert (
        "holderIdentity" not in api.objects["leases", "n", "l"]["spec"]
        or not (api.objects["leases", "n", "l"]["spec"]["holderIdentity"])
    )


async def test_the_second_signal_ends_it_at_once(api: KubeApi, client: Client) -> None:
    codes: list[int] = []
    begun = asyncio.Event()

    async def stuck(request: Request) -> None:
        begun.set()
        await asyncio.sleep(3600)

    manager = made(client, end=codes.append)
    manager.controller("widget", stuck).for_object(manager.cache(Widget))
    api.put("widgets", widget("w"))
    async with running(manager) as task:
        await begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.02)
        assert not task.done()
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: codes == [1])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_who_does_not_end_in_time_is_ended_before_the_lease_is_released(api: KubeApi, client: Client) -> None:
    begun: set[str] = set()
    ended: dict[str, object] = {}

    async def stuck(who: str) -> None:
        begun.add(who)
        try:
            await asyncio.sleep(3600)
        finally:
            # what such an end may have to do
            await client.get(Widget, "w")
            ended[who] = api.objects["leases", "n", "l"]["spec"]["holderIdentity"]

    election = Election(name="l", namespace="n", identity="one", lease_duration=2, renew_deadline=1, retry_period=0.05)
    manager = Manager(client, election=election, health_address=OFF, metrics_address=OFF, graceful_shutdown_timeout=0.1)
    manager.controller("widget", lambda _request: stuck("controller")).for_object(manager.cache(Widget))
    manager.add_runnable(lambda: stuck("background"), leader_only=True)
    api.put("widgets", widget("w"))
    task = asyncio.create_task(manager.run())
    await until(lambda: len(begun) == 2)
    manager.stop()
    async with asyncio.timeout(5):
        await task
    assert ended == {"controller": "one", "background": "one"}
    assert not api.objects["leases", "n", "l"]["spec"].get("holderIdentity")


async def test_an_api_server_that_is_away_does_not_keep_it_from_ending_in_order(api: KubeApi, client: Client) -> None:
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


async def test_only_the_leader_reconciles_and_the_next_one_takes_over(api: KubeApi, client: Client) -> None:
    seen: list[tuple[str, str]] = []
    led: list[str] = []

    def program(identity: str) -> Manager:
        async def look(request: Request) -> None:
            seen.append((identity, request.name))

        async def lead() -> None:
            led.append(identity)
            await asyncio.sleep(3600)

        manager = made(client, identity)
        manager.controller("widget", look).for_object(manager.cache(Widget))
        manager.add_runnable(lead, leader_only=True)
        return manager

    api.put("widgets", widget("a"))
    first, second = program("first"), program("second")
    async with running(second), running(first):
        await until(lambda: len(seen) == 1)
        leader = seen[0][0]
        other = {"first": "second", "second": "first"}[leader]
        for name in "bcd":
            api.put("widgets", widget(name))
        await until(lambda: len(seen) == 4)
        assert {who for who, _ in seen} == {leader}
        (first if leader == "first" else second).stop()
        await until(lambda: {name for who, name in seen if who == other} == set("abcd"))
        assert led == [leader, other]


async def test_a_lost_lease_ends_the_process_at_once(api: KubeApi, client: Client) -> None:
    codes: list[int] = []
    manager = made(client, "one", codes.append)
    async with running(manager) as task:
        await until(lambda: ("leases", "n", "l") in api.objects)
        lease = api.objects["leases", "n", "l"]
        api.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": "another"}})
        await until(lambda: codes == [1])
        with pytest.raises(LeaseLost, match="held by another"):
            await task


async def test_background_work_that_fails_ends_the_program_and_says_why(client: Client, manager: Manager) -> None:
    async def fail() -> None:
        raise OSError("the disk is full")

    async def end() -> None:
        pass

    manager.add_runnable(fail)
    with pytest.raises(OSError, match="the disk is full"):
        await manager.run()
    manager = made(client)
    manager.add_runnable(end)
    with pytest.raises(RuntimeError, match=r"runnable .*\.end: returned, expected to run until the program ends"):
        await manager.run()


async def test_servers_of_others_run_from_the_beginning_to_the_end(manager: Manager) -> None:
    said: list[str] = []

    @contextlib.asynccontextmanager
    async def server() -> AsyncIterator[None]:
        said.append("begun")
        yield
        said.append("ended")

    manager.add_context(server())
    async with running(manager):
        await until(lambda: said == ["begun"])
    assert said == ["begun", "ended"]
