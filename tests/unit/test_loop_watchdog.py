"""A hook that blocks the event loop is named, with the place at which it blocks."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from waiting import until

from accelplane.node import loop_watchdog
from accelplane.node.loop_watchdog import watched


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watchdog, "_LIMIT", 0.02)
    monkeypatch.setattr(loop_watchdog, "_WATCHDOG", loop_watchdog._Watchdog())


def has_message(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    return lambda: bool(caplog.messages)


async def test_a_hook_that_blocks_is_named_while_it_blocks(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[str] = []
    is_named = has_message(caplog)

    async def blocking_hook() -> str:
        await asyncio.sleep(0)
        while not is_named():
            time.sleep(0.001)  # noqa: ASYNC251 - what is tested
        return "done"

    assert await watched("tpu", "health", blocking_hook, reports.append) == "done"
    (message,) = caplog.messages
    assert message.startswith("plugin tpu: health has blocked the event loop for 0.")
    assert "blocking_hook" in message.splitlines()[-2]
    assert "time.sleep" in message.splitlines()[-1] or "is_named" in message
    assert loop_watchdog.__file__ not in message
    (report,) = reports
    assert report.startswith("health blocked it for 0.")
    assert f'at File "{__file__}", line ' in report


async def test_a_hook_that_waits_does_not_block(caplog: pytest.LogCaptureFixture) -> None:
    async def waiting_hook() -> None:
        await asyncio.sleep(0.1)

    await watched("tpu", "background", waiting_hook)
    assert caplog.messages == []


async def test_its_thread_ends_without_calls() -> None:
    async def hook() -> None: ...

    def is_running() -> bool:
        return loop_watchdog._WATCHDOG._running

    await watched("tpu", "allocate", hook)
    assert is_running()
    await until(lambda: not is_running())


async def test_a_cancelled_hook_is_cancelled() -> None:
    cancelled = threading.Event()

    async def hook() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.ensure_future(watched("tpu", "background", hook))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()


async def test_a_hook_that_exits_does_not_end_the_agent() -> None:
    async def hook() -> None:
        raise SystemExit("no license")

    with pytest.raises(RuntimeError, match=r"^refresh raised SystemExit: no license$"):
        await watched("tpu", "refresh", hook)


async def test_a_hook_without_async_is_an_error_that_says_so() -> None:
    def hook() -> object:
        return {}

    with pytest.raises(TypeError, match=r"^allocate: found {}, expected a coroutine; define the hook with async def$"):
        await watched("tpu", "allocate", hook)  # type: ignore[arg-type]
