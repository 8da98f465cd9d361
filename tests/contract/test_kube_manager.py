"""Managers: start, probes, metrics, leadership and shutdown."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from functools import partial

import pytest
from kubeapi import KubeApi
from kubekinds import Config, Widget, widget
from kubemanagers import make_manager, page, running
from waiting import until

from accelplane.kube.client import Client, Selection
from accelplane.kube.manager import OFF, Manager
from accelplane.kube.objects import Request


@pytest.fixture
def manager(client: Client) -> Manager:
    return make_manager(client)


async def test_controllers_share_caches_and_start_when_all_are_synced(
    api: KubeApi, client: Client, manager: Manager
) -> None:
    calls: list[Request] = []

    async def look(request: Request) -> None:
        assert all(cache.synced.is_set() for cache in (widgets, configs))
        calls.append(request)

    widgets = manager.cache(Widget)
    configs = manager.cache(Config, Selection(namespace="n"))
    assert manager.cache(Widget) is widgets
    assert manager.cache(Config) is not configs
    manager.controller("one", look).for_object(widgets)
    manager.controller("two", look).for_object(widgets)
    api.put("widgets", widget("w"))
    api.fault("GET .*/n/configmaps", 403, times=5)
    async with running(manager):
        await until(lambda: calls == [Request("w")] * 2)
        assert api.count("GET .*widgets") == 1
        assert api.count("GET .*/n/configmaps") == 6


async def test_controllers_of_other_kinds_run_while_it_is_unknown_whether_a_kind_is_served(
    api: KubeApi, manager: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("accelplane.kube.manager._UNSERVED_RETRY", 0.02)
    calls: list[tuple[str, Request]] = []

    async def record(kind: str, request: Request) -> None:
        calls.append((kind, request))

    widgets = manager.cache(Widget, optional=True)
    configs = manager.cache(Config, optional=True)
    manager.controller("config", partial(record, "config")).for_object(configs)
    manager.controller("both", partial(record, "both")).for_object(configs).watches(widgets, lambda _: ())
    manager.controller("widget", partial(record, "widget")).for_object(widgets)
    api.put("configmaps", {"metadata": {"name": "c", "namespace": "n"}})
    config = Request("c", "n")
    unknown = api.fault("GET .*/widgets", 503, times=1_000_000)
    async with running(manager):
        await until(lambda: calls == [("config", config)])
        assert await page(manager, "health", "/readyz") == (503, "not ready: cache widgets")
        missing = api.fault(".*/widgets", 404, times=1_000_000)
        unknown.times = 0

        async def is_ready() -> bool:
            return await page(manager, "health", "/readyz") == (200, "ok")

        await until(is_ready)
        await until(lambda: api.count("GET .*/widgets") > 10)
        assert caplog.text.count("widgets: not served, so its objects are managed when its definition exists") == 1
        assert calls == [("config", config)]
        api.put("widgets", widget("w"))
        missing.times = 0
        await until(lambda: len(calls) == 3)
        assert set(calls[1:]) == {("both", config), ("widget", Request("w"))}
        # The definition is deleted: the objects are not treated as deleted.
        missing.times = 1_000_000
        lists = api.count("GET .*/widgets")
        api.abort_watches()
        await until(lambda: api.count("GET .*/widgets") > lists)
        assert len(calls) == 3
        assert len(widgets) == 1


async def test_a_manager_is_not_ready_while_no_optional_kind_is_served(api: KubeApi, manager: Manager) -> None:
    manager.cache(Widget, optional=True)
    missing = api.fault("GET .*/widgets", 404, times=1_000_000)
    async with running(manager):
        await until(lambda: api.count("GET .*/widgets") == 1)
        assert await page(manager, "health", "/readyz") == (503, "not ready: cache widgets")
        missing.times = 0


async def test_a_cache_is_required_if_one_of_its_users_requires_it(api: KubeApi, manager: Manager) -> None:
    calls: list[Request] = []

    async def record(request: Request) -> None:
        calls.append(request)

    assert manager.cache(Widget, optional=True) is manager.cache(Widget)
    manager.controller("config", record).for_object(manager.cache(Config))
    api.put("configmaps", {"metadata": {"name": "c", "namespace": "n"}})
    missing = api.fault("GET .*/widgets", 404, times=1_000_000)
    async with running(manager):
        await until(lambda: api.count("GET .*/widgets") > 3)
        assert not calls
        missing.times = 0
        await until(lambda: calls == [Request("c", "n")])


async def test_a_manager_stops_at_once_while_a_controller_waits_for_its_kind(api: KubeApi, manager: Manager) -> None:
    async def reconcile(request: Request) -> None:
        raise AssertionError(request)

    manager.controller("widget", reconcile).for_object(manager.cache(Widget, optional=True))
    api.fault("GET .*/widgets", 404, times=1_000_000)
    async with running(manager):
        await until(lambda: api.count("GET .*/widgets") == 1)


async def test_readyz_reports_each_failed_check(api: KubeApi, manager: Manager) -> None:
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


async def test_metrics_have_the_names_of_controller_runtime(api: KubeApi, manager: Manager) -> None:
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
    # the name of a counter's family has no `_total`
    families = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert [name for name in NAMES if name not in families] == []
    assert "process_resident_memory_bytes" in families


async def test_profiles_are_served_with_profiling_only(client: Client) -> None:
    manager = make_manager(client, profiling=True)
    async with running(manager):
        assert (await page(manager, "health", "/debug/profile"))[1].startswith("profiling until")
        assert "function calls" in (await page(manager, "health", "/debug/profile"))[1]
        assert "manager.py" in (await page(manager, "health", "/debug/tasks"))[1]


async def test_off_disables_a_server(client: Client) -> None:
    manager = Manager(client, health_address=OFF, metrics_address=OFF)
    task = asyncio.create_task(manager.run())
    await asyncio.sleep(0)
    manager.stop()
    async with asyncio.timeout(5):
        await task
    assert manager.ports == {}


async def test_only_the_leader_reconciles_and_a_standby_takes_over(api: KubeApi, client: Client) -> None:
    calls: list[tuple[str, str]] = []
    leaders: list[str] = []

    def program(identity: str) -> Manager:
        async def look(request: Request) -> None:
            calls.append((identity, request.name))

        async def leader_task() -> None:
            leaders.append(identity)
            await asyncio.sleep(3600)

        manager = make_manager(client, identity)
        manager.controller("widget", look).for_object(manager.cache(Widget))
        manager.add_runnable(leader_task, leader_only=True)
        return manager

    api.put("widgets", widget("a"))
    first, second = program("first"), program("second")
    async with running(second), running(first):
        await until(lambda: len(calls) == 1)
        leader = calls[0][0]
        other = {"first": "second", "second": "first"}[leader]
        for name in "bcd":
            api.put("widgets", widget(name))
        await until(lambda: len(calls) == 4)
        assert {identity for identity, _ in calls} == {leader}
        (first if leader == "first" else second).stop()
        await until(lambda: {name for identity, name in calls if identity == other} == set("abcd"))
        assert leaders == [leader, other]


async def test_contexts_are_entered_first_and_exited_last(manager: Manager) -> None:
    calls: list[str] = []

    @contextlib.asynccontextmanager
    async def server() -> AsyncIterator[None]:
        calls.append("begun")
        yield
        calls.append("ended")

    manager.add_context(server())
    async with running(manager):
        await until(lambda: calls == ["begun"])
    assert calls == ["begun", "ended"]


async def test_caches_of_several_types_share_one_watch(api: KubeApi, manager: Manager) -> None:
    class Other(Widget):
        """Another type of the same resource."""

    first, second = manager.cache(Widget), manager.cache(Other)
    api.put("widgets", widget("a"))
    async with running(manager):
        await until(lambda: len(first) == len(second) == 1)
        assert api.count("GET .*/widgets") == 1
