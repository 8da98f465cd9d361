"""The work queue."""

import asyncio

import pytest
from waiting import until

from accelplane.kube.metrics import Metrics
from accelplane.kube.objects import Request
from accelplane.kube.queue import QueueShutDown, WorkQueue

A, B = Request("a"), Request("b", "somewhere")


async def take_keys(queue: WorkQueue, count: int) -> list[Request]:
    async with asyncio.timeout(5):
        return [await queue.get() for _ in range(count)]


def is_empty(queue: WorkQueue) -> bool:
    take = queue.get()
    try:
        take.send(None)
    except StopIteration:
        return False
    take.close()
    return True


async def test_a_key_added_many_times_is_processed_once() -> None:
    queue = WorkQueue("test")
    for key in (A, B, A, A):
        queue.add(key)
    assert await take_keys(queue, 2) == [A, B]
    assert is_empty(queue)


async def test_a_key_added_during_its_processing_is_processed_again_afterwards() -> None:
    queue = WorkQueue("test")
    queue.add(A)
    await take_keys(queue, 1)
    queue.add(A)
    queue.add(A)
    assert is_empty(queue)
    queue.done(A)
    assert await take_keys(queue, 1) == [A]
    queue.done(A)
    assert is_empty(queue)


async def test_delays_double_with_failures_up_to_the_longest_and_are_forgotten() -> None:
    queue = WorkQueue("test", base_delay=0.005, max_delay=1000)
    delays = [queue.add_rate_limited(A) for _ in range(20)]
    assert delays[:4] == [0.005, 0.01, 0.02, 0.04]
    assert delays[-2:] == [1000, 1000]
    assert queue.add_rate_limited(B) == 0.005
    queue.forget(A)
    assert queue.add_rate_limited(A) == 0.005
    queue.shut_down()


async def test_ten_thousand_failures_do_not_overflow() -> None:
    queue = WorkQueue("test")
    assert {queue.add_rate_limited(A) for _ in range(10_000)} >= {0.005, 1000.0}
    queue.shut_down()


async def test_retry_after_extends_the_delay() -> None:
    queue = WorkQueue("test")
    assert queue.add_rate_limited(A, at_least=7) == 7
    queue.shut_down()


async def test_a_delayed_key_becomes_ready_after_the_shortest_delay() -> None:
    queue = WorkQueue("test")
    queue.add_after(A, 3600)
    queue.add_after(A, 0.01)
    queue.add_after(A, 3600)
    assert is_empty(queue)
    assert await take_keys(queue, 1) == [A]


async def test_adding_a_delayed_key_makes_it_ready_once() -> None:
    queue = WorkQueue("test")
    queue.add_after(A, 0.01)
    queue.add(A)
    assert await take_keys(queue, 1) == [A]
    queue.done(A)
    await asyncio.sleep(0.03)
    assert is_empty(queue)


async def test_shutdown_ends_waiters_and_drops_keys() -> None:
    queue = WorkQueue("test")
    waiting = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.add_after(A, 0.001)
    queue.shut_down()
    queue.add(A)
    for task in waiting:
        with pytest.raises(QueueShutDown):
            await task


async def test_two_workers_share_the_queue_without_concurrent_keys() -> None:
    queue = WorkQueue("test")
    keys = [Request(str(number)) for number in range(20)]
    working: set[Request] = set()
    processed: list[Request] = []

    async def work() -> None:
        while True:
            key = await queue.get()
            assert key not in working
            working.add(key)
            await asyncio.sleep(0)
            queue.add(key) if len(processed) < 50 else None
            await asyncio.sleep(0)
            working.discard(key)
            processed.append(key)
            queue.done(key)

    workers = [asyncio.create_task(work()) for _ in range(4)]
    for key in keys * 3:
        queue.add(key)
    await until(lambda: len(processed) >= 70)
    assert set(processed) == set(keys)
    queue.shut_down()
    results = await asyncio.gather(*workers, return_exceptions=True)
    assert {type(result) for result in results} == {QueueShutDown}


async def test_queue_metrics_show_waiting_and_processing_times() -> None:
    now, metrics = [100.0], Metrics()
    queue = WorkQueue("test", metrics=metrics, clock=lambda: now[0])

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"workqueue_{name}", {"name": "test"})

    queue.add(A)
    queue.add_after(B, 60)
    now[0] += 3
    assert [len(queue), value("depth")] == [2, 1]
    assert await queue.get() == A
    now[0] += 5
    assert [len(queue), value("depth")] == [2, 0]
    assert value("queue_duration_seconds_sum") == 3
    assert [value("unfinished_work_seconds"), value("longest_running_processor_seconds")] == [5, 5]
    queue.done(A)
    assert value("work_duration_seconds_sum") == 5
    assert [value("unfinished_work_seconds"), value("longest_running_processor_seconds")] == [0, 0]
    queue.shut_down()
    assert len(queue) == 0
