"""A notification wakes all waiters, and long waits end at common times."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.kubelet.notifier import Notifier, coalesced_deadline


async def test_notification_wakes_current_waiters_only() -> None:
    notifier = Notifier()
    waiting = [asyncio.create_task(notifier.wait(60)) for _ in range(2)]
    await asyncio.sleep(0)
    notifier.notify_all()
    assert await asyncio.gather(*waiting) == [True, True]
    assert not await notifier.wait(0.001)


@pytest.mark.parametrize(
    ("now", "seconds", "end"),
    [(100.3, 30, 130), (101.9, 30, 130), (130.01, 30, 160), (100.3, 300, 400), (100.3, 29, 129.3), (0.5, 0.1, 0.6)],
)
def test_long_waits_end_at_multiples_of_five_seconds(now: float, seconds: float, end: float) -> None:
    assert coalesced_deadline(now, seconds) == pytest.approx(end)


@given(st.floats(0, 1e7), st.floats(0, 4000))
def test_deadline_differs_by_a_few_seconds_at_most(now: float, seconds: float) -> None:
    assert abs(coalesced_deadline(now, seconds) - now - seconds) <= 2.5 + 1e-6
