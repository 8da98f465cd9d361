"""Controllers fed by caches, and the events that they record."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from kubeapi import kube_api
from kubecontrollers import Setup
from kubekinds import Config, Widget, widget
from waiting import until

from accelplane.apiserver import Conflict, TooManyRequests
from accelplane.kube.cache import UnreadableObject
from accelplane.kube.client import Client
from accelplane.kube.controller import Result, TerminalError
from accelplane.kube.objects import Request
from accelplane.kube.predicates import Predicate, field_changed
from accelplane.kube.tasks import UnexpectedCancellation


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with kube_api() as api:
        client = Client(api.config, field_manager="test", timeout=1)
        yield Setup(api, client)
        await client.close()


def config(name: str, owner: str, api_version: str = "example.com/v1") -> dict[str, object]:
    reference = {"apiVersion": api_version, "kind": "Widget", "name": owner, "uid": "u", "controller": True}
    return {"metadata": {"name": name, "namespace": "n", "ownerReferences": [reference]}}


async def test_all_objects_are_reconciled_at_the_start_and_each_when_it_changes_or_is_deleted(setup: Setup) -> None:
    setup.api.put("widgets", widget("a"))
    async with setup.running(setup.controller().for_object(setup.widgets)):
        await until(lambda: setup.seen == [Request("a")])
        setup.api.put("widgets", widget("b"))
        await until(lambda: setup.seen[1:] == [Request("b")])
        setup.api.remove("widgets", "a")
        await until(lambda: setup.seen[2:] == [Request("a")])


async def test_an_unreadable_object_is_reconciled(setup: Setup) -> None:
    setup.api.put("widgets", {"metadata": {"name": "bad"}, "spec": 5})

    async def read(request: Request) -> None:
        setup.seen.append(request)
        setup.widgets.get(request)

    async with setup.running(setup.controller(read).for_object(setup.widgets)):
        await until(lambda: len(setup.seen) > 2)


async def test_an_owner_is_reconciled_when_an_owned_object_changes(setup: Setup) -> None:
    async with setup.running(setup.controller().owns(setup.configs, Widget)):
        setup.api.put("configmaps", config("other", "x", "elsewhere.com/v1"))
        setup.api.put("configmaps", config("c", "w", "example.com/v1beta1"))
        await until(lambda: setup.seen == [Request("w")])
        setup.api.remove("configmaps", "c", "n")
        await until(lambda: len(setup.seen) == 2)


async def test_a_standby_queues_nothing_and_reconciles_everything_when_it_starts(setup: Setup) -> None:
    controller = setup.controller().for_object(setup.widgets).owns(setup.configs, Widget)
    tasks = [asyncio.create_task(informer.run()) for informer in setup.informers]
    await until(lambda: setup.widgets.synced.is_set() and setup.configs.synced.is_set())
    setup.api.put("widgets", widget("gone"))
    await until(lambda: setup.widgets.requests() == [Request("gone")])
    setup.api.remove("widgets", "gone")
    setup.api.put("widgets", widget("there"))
    setup.api.put("configmaps", config("left", "former"))
    await until(lambda: setup.widgets.requests() == [Request("there")] and len(setup.configs) == 1)
    assert setup.counted("workqueue_depth") == {"": 0}
    tasks.append(asyncio.create_task(controller.run()))
    await until(lambda: sorted(setup.seen) == [Request("former"), Request("there")])
    for task in tasks:
        task.cancel()


async def test_changes_that_leave_the_generation_are_debounced(setup: Setup) -> None:
    def put(generation: int, note: str) -> None:
        setup.api.put(
            "widgets", {"metadata": {"name": "a", "generation": generation, "labels": {"note": note}}, "spec": {}}
        )

    def is_logged() -> str:
        thing = setup.widgets.get(Request("a"))
        assert thing is not None
        assert thing.metadata.labels is not None
        return thing.metadata.labels["note"]

    put(1, "first")
    async with setup.running(setup.controller().for_object(setup.widgets, debounce=3600)):
        await until(lambda: setup.seen == [Request("a")])
        put(1, "same")
        await until(lambda: is_logged() == "same")
        assert setup.counted("workqueue_adds_total").popitem()[1] == 1
        put(2, "other")
        await until(lambda: setup.seen[1:] == [Request("a")])


async def test_debounced_changes_are_reconciled_once(setup: Setup) -> None:
    setup.api.put("widgets", {"metadata": {"name": "a", "generation": 1}, "spec": {}})
    async with setup.running(setup.controller().for_object(setup.widgets, debounce=0.2)):
        await until(lambda: setup.seen == [Request("a")])
        for count in range(100):
            change = {"name": "a", "generation": 1, "labels": {"count": str(count)}}
            setup.api.put("widgets", {"metadata": change, "spec": {}})
        await until(lambda: len(setup.seen) > 1)
        assert len(setup.seen) < 50


async def test_watches_maps_the_old_and_the_new_object(setup: Setup) -> None:
    controller = setup.controller().watches(setup.configs, lambda thing: [Request(thing.data["for"])])
    setup.api.put("configmaps", {"metadata": {"name": "c", "namespace": "n"}, "data": {"for": "a"}})
    async with setup.running(controller):
        await until(lambda: setup.seen == [Request("a")])
        setup.api.put("configmaps", {"metadata": {"name": "c", "namespace": "n"}, "data": {"for": "b"}})
        await until(lambda: sorted(setup.seen[1:]) == [Request("a"), Request("b")])


async def test_a_failed_reconciliation_is_retried_without_delaying_others(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter(range(4))

    async def fail(request: Request) -> None:
        setup.seen.append(request)
        if request.name == "bad" and next(failures, None) is not None:
            raise KeyError("unexpected")

    setup.api.put("widgets", widget("bad"))
    setup.api.put("widgets", widget("good"))
    async with setup.running(setup.controller(fail).for_object(setup.widgets)):
        await until(lambda: setup.seen.count(Request("bad")) == 5)
        await until(lambda: setup.counted("controller_runtime_reconcile_total") == {"error": 4, "success": 2})
    assert setup.seen.count(Request("good")) == 1
    assert setup.counted("controller_runtime_reconcile_errors_total") == {"": 4}
    assert setup.counted("workqueue_retries_total") == {"": 4}
    assert setup.counted("workqueue_depth") == {"": 0}
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert records[0].getMessage().startswith("widget bad: retrying in 0.005 s")
    assert records[0].exc_info


async def test_retry_after_is_a_lower_bound_of_the_delay(setup: Setup) -> None:
    async def throttled(request: Request) -> None:
        setup.seen.append(request)
        raise TooManyRequests("GET /x", "429", retry_after=3600)

    setup.api.put("widgets", widget("w"))
    async with setup.running(setup.controller(throttled).for_object(setup.widgets)):
        await until(lambda: setup.seen == [Request("w")])
        setup.api.put("widgets", widget("v"))
        await until(lambda: len(setup.seen) == 2)
        assert setup.seen == [Request("w"), Request("v")]


async def test_a_conflict_is_logged_as_info(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    async def conflict(request: Request) -> None:
        setup.seen.append(request)
        if len(setup.seen) < 3:
            raise Conflict("PUT /x", "modified")

    setup.api.put("widgets", widget("w"))
    async with setup.running(setup.controller(conflict).for_object(setup.widgets)):
        await until(lambda: len(setup.seen) == 3)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_terminal_error_is_retried_only_after_a_change(setup: Setup) -> None:
    async def impossible(request: Request) -> None:
        setup.seen.append(request)
        raise TerminalError("no such size")

    setup.api.put("widgets", widget("w"))
    async with setup.running(setup.controller(impossible).for_object(setup.widgets)):
        await until(lambda: setup.counted("controller_runtime_terminal_reconcile_errors_total") == {"": 1})
        assert setup.counted("controller_runtime_reconcile_errors_total") == {"": 1}
        await asyncio.sleep(0.05)
        assert len(setup.seen) == 1
        assert setup.counted("controller_runtime_active_workers") == {"": 0}
        assert setup.counted("controller_runtime_max_concurrent_reconciles") == {"": 1}
        setup.api.put("widgets", widget("w", size=1))
        await until(lambda: len(setup.seen) == 2)


async def test_requeue_after_reconciles_the_object_again(setup: Setup) -> None:
    async def again(request: Request) -> Result | None:
        setup.seen.append(request)
        return Result(requeue_after=0.01) if len(setup.seen) < 4 else None

    setup.api.put("widgets", widget("w"))
    async with setup.running(setup.controller(again).for_object(setup.widgets)):
        await until(lambda: len(setup.seen) == 4)
        await until(lambda: setup.counted("controller_runtime_reconcile_total") == {"requeue_after": 3, "success": 1})


async def test_a_resync_reconciles_all_objects(setup: Setup) -> None:
    setup.api.put("widgets", widget("w"))
    async with setup.running(setup.controller(resync=0.02).for_object(setup.widgets)):
        await until(lambda: len(setup.seen) > 3)


async def test_an_object_is_never_reconciled_concurrently(setup: Setup) -> None:
    working: set[Request] = set()
    go_on = asyncio.Event()

    async def slow(request: Request) -> None:
        assert request not in working
        working.add(request)
        await go_on.wait()
        await asyncio.sleep(0)
        working.discard(request)
        setup.seen.append(request)

    async with setup.running(setup.controller(slow, workers=4).for_object(setup.widgets)):
        for size in range(30):
            setup.api.put("widgets", widget(f"w{size % 3}", size=size))
        await until(lambda: sorted(each.spec.size for each in setup.widgets) == [27, 28, 29] and len(working) == 3)
        go_on.set()
        await until(lambda: set(setup.seen) == {Request("w0"), Request("w1"), Request("w2")} and not working)
    assert setup.counted("controller_runtime_reconcile_errors_total") == {}
    assert len(setup.seen) <= 6


async def test_stop_lets_running_reconciliations_finish(setup: Setup) -> None:
    async def slow(request: Request) -> None:
        await asyncio.sleep(0.05)
        setup.seen.append(request)

    controller = setup.controller(slow).for_object(setup.widgets)
    setup.api.put("widgets", widget("a"))
    setup.api.put("widgets", widget("b"))
    async with setup.running(controller):
        await until(lambda: setup.counted("controller_runtime_active_workers") == {"": 1})
        controller.stop()
    assert setup.seen == [Request("a")]


async def test_a_cancellation_that_leaks_out_of_reconcile_is_retried(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    async def leak(request: Request) -> None:
        setup.seen.append(request)
        if setup.seen.count(request) < 3:
            raise asyncio.CancelledError

    setup.api.put("widgets", widget("w"))
    async with setup.running(setup.controller(leak).for_object(setup.widgets)):
        await until(lambda: setup.counted("controller_runtime_reconcile_total") == {"error": 2, "success": 1})
        setup.api.put("widgets", widget("next"))
        await until(lambda: setup.seen.count(Request("next")) == 3)
    assert "widget w: retrying in 0.005 s" in caplog.text
    assert "cancelled, but not by its owner" in caplog.text


async def test_a_task_group_that_fails_in_reconcile_leaves_the_worker_alive(setup: Setup) -> None:
    async def fail() -> None:
        raise OSError("no")

    async def reconcile(request: Request) -> None:
        setup.seen.append(request)
        if len(setup.seen) == 1:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
        elif len(setup.seen) == 2:
            raise asyncio.CancelledError

    setup.api.put("widgets", widget("w"))
    async with setup.running(setup.controller(reconcile).for_object(setup.widgets)):
        await until(lambda: len(setup.seen) == 3)


async def test_cancelling_a_controller_ends_its_reconciliations_first(setup: Setup) -> None:
    started, steps = asyncio.Event(), list[str]()

    async def slow(_request: Request) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await setup.client.get(Widget, "w")
            steps.append("cleaned up")

    setup.api.put("widgets", widget("w"))
    controller = setup.controller(slow).starts_with(Request("w"))
    running = asyncio.create_task(controller.run())
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert steps == ["cleaned up"]


async def test_a_controller_whose_worker_is_cancelled_fails(setup: Setup) -> None:
    running = asyncio.create_task(setup.controller(workers=2).run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    next(task for task in asyncio.all_tasks() if task.get_name() == "widget worker 1").cancel()
    with pytest.raises(UnexpectedCancellation, match="widget worker 1"):
        await running


async def test_a_standby_drops_requests_that_are_enqueued_directly(setup: Setup) -> None:
    controller = setup.controller().starts_with(Request("first"))
    for number in range(300):
        controller.enqueue(Request(f"w{number}"))
        controller.enqueue(Request(f"w{number}"), after=3600)
    assert setup.counted("workqueue_depth") == {"": 0}
    assert setup.counted("workqueue_adds_total") == {"": 0}
    async with setup.running(controller):
        await until(lambda: setup.seen == [Request("first")])
        controller.enqueue(Request("now"))
        await until(lambda: setup.seen == [Request("first"), Request("now")])
    controller.enqueue(Request("late"))
    assert setup.counted("workqueue_adds_total") == {"": 2}


async def test_a_predicate_selects_the_changes_that_are_reconciled(setup: Setup) -> None:
    size_changed: Predicate[Widget] = field_changed(lambda thing: thing.spec.size)

    def predicate(old: Widget | None, new: Widget | None) -> bool:
        is_ours = any((each.metadata.labels or {}).get("team") == "ours" for each in (old, new) if each)
        return is_ours and size_changed(old, new)

    setup.api.put("widgets", widget("a", team="ours"))
    setup.api.put("widgets", widget("b"))
    async with setup.running(setup.controller().for_object(setup.widgets, predicate=predicate)):
        await until(lambda: setup.seen == [Request("a")])
        setup.api.put("widgets", widget("a", team="ours", note="changed"))
        setup.api.put("widgets", widget("b", size=1))
        setup.api.put("widgets", widget("a", size=1, team="ours"))
        await until(lambda: len(setup.seen) == 2)
        setup.api.remove("widgets", "a")
        await until(lambda: len(setup.seen) == 3)
        assert set(setup.seen) == {Request("a")}


async def test_predicates_apply_to_owned_and_watched_objects(setup: Setup) -> None:
    predicate: Predicate[Config] = field_changed(lambda thing: thing.data)
    controller = setup.controller().owns(setup.configs, Widget, predicate=predicate)
    controller.watches(setup.configs, lambda thing: [Request(f"of-{thing.metadata.name}")], predicate=predicate)
    setup.api.put("configmaps", config("c", "w"))
    async with setup.running(controller):
        await until(lambda: sorted(setup.seen) == [Request("of-c"), Request("w")])
        changed = config("c", "w")
        setup.api.put("configmaps", {**changed, "metadata": {**changed["metadata"], "labels": {"a": "b"}}})  # pyright: ignore[reportGeneralTypeIssues]
        setup.api.put("configmaps", {**changed, "data": {"key": "value"}})
        await until(lambda: len(setup.seen) == 4)
        assert sorted(setup.seen) == [Request("of-c"), Request("of-c"), Request("w"), Request("w")]


async def test_updates_of_kinds_without_generation_are_debounced(setup: Setup) -> None:
    setup.api.put("widgets", widget("a"))
    async with setup.running(setup.controller().for_object(setup.widgets, debounce=3600)):
        await until(lambda: setup.seen == [Request("a")])
        setup.api.put("widgets", widget("a", size=1))
        await until(lambda: next(iter(setup.widgets)).spec.size == 1)
        assert setup.counted("workqueue_adds_total") == {"": 1}
        setup.api.put("widgets", widget("b"))
        await until(lambda: setup.seen[1:] == [Request("b")])
        setup.api.remove("widgets", "a")
        await until(lambda: setup.seen[2:] == [Request("a")])


async def test_an_owner_is_reconciled_when_an_owned_object_becomes_unreadable(setup: Setup) -> None:
    setup.api.put("configmaps", config("c", "w"))
    async with setup.running(setup.controller().owns(setup.configs, Widget)):
        await until(lambda: setup.seen == [Request("w")])
        setup.api.put("configmaps", {**config("c", "w"), "data": 7})
        await until(lambda: setup.seen == [Request("w"), Request("w")])


async def test_an_object_that_becomes_unreadable_or_is_then_deleted_is_reconciled(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: list[str] = []

    async def read(request: Request) -> None:
        try:
            outcomes.append("exists" if setup.widgets.get(request) else "absent")
        except UnreadableObject:
            outcomes.append("unreadable")
            raise

    setup.api.put("widgets", widget("w"))
    async with setup.running(setup.controller(read, base_delay=3600).for_object(setup.widgets)):
        await until(lambda: outcomes == ["exists"])
        setup.api.put("widgets", {"metadata": {"name": "w"}, "spec": 5})
        await until(lambda: outcomes[1:] == ["unreadable"])
        setup.api.remove("widgets", "w")
        await until(lambda: outcomes[2:] == ["absent"])
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info for record in records] == [None]
