"""A pulse wakes everyone who waits, and long waits end together."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.kubelet.pulse import Pulse, end_of_wait


async def test_it_wakes_all_who_wait_and_nobody_who_comes_later() -> None:
    pulse = Pulse()
    waiting = [asyncio.create_task(pulse.wait(60)) for _ in range(2)]
    await asyncio.sleep(0)
    pulse.fire()
    assert await asyncio.gather(*waiting) == [True, True]
    assert not await pulse.wait(0.001)


@pytest.mark.parametrize(
    ("now", "seconds", "end"),
    [(100.3, 30, 130), (101.9, 30, 130), (130.01, 30, 160), (100.3, 300, 400), (100.3, 29, 129.3), (0.5, 0.1, 0.6)],
)
def test_long_waits_end_together_and_short_ones_when_they_should(now: float, seconds: float, end: float) -> None:
    assert end_of_wait(now, seconds) == pytest.approx(end)


@given(st.floats(0, 1e7), st.floats(0, 4000))
def test_no_wait_is_more_than_a_few_seconds_off(now: float, seconds: float) -> None:
    assert abs(end_of_wait(now, seconds) - now - seconds) <= 2.5 + 1e-6
