"""Activity of allocated units, from two readings."""

import pytest

from accelplane.pages.activity import Activity
from accelplane.pages.device_reader import DeviceReading
from accelplane.pages.readings import NodeReadings
from accelplane.readings import Family, Value
from accelplane.readings.families import (
    GPU_IDLE,
    IDXD_QUEUE_CLIENTS,
    IDXD_QUEUE_ENTRIES,
    NPU_BUSY,
    QAT_REQUESTS,
    TEMPERATURE,
)

U = ("p", "u")


def reading(*values: Value, units: tuple[str, ...] = ("u",), fresh: bool = True) -> NodeReadings:
    found = DeviceReading({}, {}, plugin="p", device="d", units=units, activity=values, fresh=fresh)
    return NodeReadings([found])


@pytest.mark.parametrize(
    ("family", "before", "after", "idle"),
    [
        (GPU_IDLE, 0, 10, 10), (GPU_IDLE, 0, 9.9, 10), (GPU_IDLE, 0, 9.7, 0), (GPU_IDLE, 50, 0, 10),
        (NPU_BUSY, 5, 5, 10), (NPU_BUSY, 5, 6, 0), (NPU_BUSY, 5, 1, 10),
        (QAT_REQUESTS, 5, 5, 10), (QAT_REQUESTS, 5, 6, 0),
    ],
)  # fmt: skip
def test_a_unit_is_idle_while_its_counter_is_constant(family: Family, before: float, after: float, idle: float) -> None:
    activity = Activity()
    activity.update(reading(Value(family, "", before)), {U}, 100.0)
    activity.update(reading(Value(family, "", after)), {U}, 110.0)
    assert activity.idle_seconds(110.0) == {U: idle}


@pytest.mark.parametrize("family", [IDXD_QUEUE_CLIENTS, IDXD_QUEUE_ENTRIES])
def test_a_queue_is_idle_without_clients_and_entries(family: Family) -> None:
    activity = Activity()
    units = {("p", "wq0.0"), ("p", "wq0.1")}
    values = [Value(family, f'unit="wq0.{n}",mode="shared"', n) for n in (0, 1)]
    for now in (100.0, 110.0):
        activity.update(reading(*values, units=("wq0.0", "wq0.1")), units, now)
    assert activity.idle_seconds(110.0) == {("p", "wq0.0"): 10, ("p", "wq0.1"): 0}


def test_client_time_makes_a_gpu_active_whose_gt_counts_as_idle() -> None:
    activity = Activity()
    for now, seconds in ((100.0, 3.0), (110.0, 3.0), (120.0, 3.1)):
        activity.update(reading(Value(GPU_IDLE, "", now)), {U}, now)
        activity.update_clients({U: seconds}, {U}, now)
    assert activity.idle_seconds(125.0) == {U: 5}
    # The sum without a pod that has ended is no activity, and neither is the first report.
    activity.update_clients({U: 1.0}, {U}, 130.0)
    assert activity.idle_seconds(130.0) == {U: 10}


def test_client_time_alone_is_a_signal_of_held_units() -> None:
    activity = Activity()
    other = ("p", "other")
    for now, seconds in ((100.0, 0.0), (110.0, 2.0)):
        activity.update_clients({U: seconds, other: seconds}, {U}, now)
    assert activity.idle_seconds(710.0) == {U: 600}
    assert set(activity.idle_since(710.0)) == {U}
    activity.update_clients({U: 2.0}, set(), 720.0)
    assert not activity.idle_seconds(720.0)


def test_units_without_holder_or_signal_are_absent_and_the_time_begins_with_the_holder() -> None:
    activity = Activity()
    activity.update(reading(Value(NPU_BUSY, "", 5)), set(), 100.0)
    assert not activity.idle_seconds(100.0)
    activity.update(reading(Value(NPU_BUSY, "", 5)), {U}, 200.0)
    activity.update(reading(Value(NPU_BUSY, "", 5)), {U}, 230.0)
    assert activity.idle_seconds(230.0) == {U: 30}
    activity.update(reading(Value(TEMPERATURE, "", 40)), set(), 240.0)
    activity.update(reading(Value(TEMPERATURE, "", 40)), {U}, 250.0)
    assert not activity.idle_seconds(250.0)


def test_a_sleeping_gpu_stays_idle_and_repeated_counters_are_no_activity() -> None:
    activity = Activity()
    activity.update(reading(Value(GPU_IDLE, "", 10)), {U}, 100.0)
    activity.update(reading(Value(GPU_IDLE, "", 10), fresh=False), {U}, 110.0)
    activity.update(reading(Value(GPU_IDLE, "", 30)), {U}, 120.0)
    assert activity.idle_seconds(120.0) == {U: 20}


def test_the_busy_time_of_a_sleeping_npu_is_its_activity() -> None:
    """The driver answers without waking the NPU, which sleeps between its jobs."""
    activity = Activity()
    for now, busy in ((100.0, 5), (110.0, 5)):
        activity.update(reading(Value(NPU_BUSY, "", busy), fresh=False), {U}, now)
    assert activity.idle_seconds(110.0) == {U: 10}
    activity.update(reading(Value(NPU_BUSY, "", 6), fresh=False), {U}, 120.0)
    assert activity.idle_seconds(121.0) == {U: 1}


def test_only_long_pauses_are_part_of_the_inventory() -> None:
    activity = Activity()
    for now in (100.0, 110.0):
        activity.update(reading(Value(NPU_BUSY, "", 5)), {U}, now)
    assert not activity.idle_since(699.0)
    first = activity.idle_since(700.0)
    assert first.keys() == {U}
    assert activity.idle_since(1300.5) == first
