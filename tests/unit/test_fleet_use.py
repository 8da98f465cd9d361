"""The use of devices in the memory of the fleet page: rates, the last hour, and limits."""

from accelplane.fleet.model import NodeReadings
from accelplane.fleet.use import MINUTES, UNKNOWN, UseHistory
from accelplane.report.inventory import ReportedUnit
from accelplane.report.readings import DeviceReadings, Value

CARD = ReportedUnit("gpu", "card0", "card0")


def watts(value: float, device: str = "card0") -> DeviceReadings:
    return DeviceReadings("gpu", device, values=(Value("accelplane_device_power_watts", {"sensor": "card"}, value),))


def idle(seconds: float, *, fresh: bool = True) -> DeviceReadings:
    values = (Value("accelplane_gpu_idle_seconds_total", {"gt": "gt0"}, seconds),)
    return DeviceReadings("gpu", "card0", values=values, fresh=fresh)


def read(history: UseHistory, time: float, *devices: DeviceReadings, node: str = "n", now: float | None = None) -> None:
    history.add(node, NodeReadings(time, devices), time if now is None else now)


def test_rates_are_those_between_two_readings_by_the_clock_of_the_node() -> None:
    history = UseHistory()
    read(history, 5000, idle(100), now=10)
    assert history.of("n", CARD, 10).busy is None
    read(history, 5010, idle(104), now=400)
    assert history.of("n", CARD, 400).busy == 0.6


def test_a_repeated_counter_keeps_the_last_rate_until_it_is_read_again() -> None:
    history = UseHistory()
    for time, reading in ((0, idle(0)), (10, idle(5)), (20, idle(5, fresh=False)), (30, idle(15))):
        read(history, time, reading)
        if time == 20:
            assert history.of("n", CARD, 20).busy == 0.5
    assert history.of("n", CARD, 30).busy == 0.5


def test_the_last_hour_has_one_value_a_minute_and_gaps_where_nothing_was_read() -> None:
    history = UseHistory()
    for minute in (0, 1, 2, 5, 61):
        read(history, minute * 60, watts(100 + minute))
    values = history.history("n", CARD, "power", 61 * 60)
    assert len(values) == MINUTES
    assert values[:4] == [102, None, None, 105]
    assert values[-1] == 161
    assert [each for each in values if each is not None] == [102, 105, 161]
    assert history.history("n", CARD, "busy", 61 * 60) == [None] * MINUTES
    assert [each for each in history.history("n", CARD, "power", 63 * 60) if each is not None] == [105, 161]


def test_old_values_are_not_shown_as_the_current_ones() -> None:
    history = UseHistory()
    read(history, 60, watts(100))
    assert history.of("n", CARD, 900).power == 100
    assert history.of("n", CARD, 961) == UNKNOWN


def test_values_outside_of_the_stored_range_are_limited() -> None:
    history = UseHistory()
    read(history, 0, watts(1e12))
    read(history, 60, watts(-5))
    assert [round(each or 0) for each in history.history("n", CARD, "power", 60)[-2:]] == [6553, 0]


def test_the_number_of_devices_is_limited_and_places_of_deleted_nodes_are_free() -> None:
    history = UseHistory(max_devices=2)
    read(history, 0, watts(1), watts(2, "card1"), node="a")
    read(history, 0, watts(3), node="b")
    assert (history.size, history.of("b", CARD, 0)) == (2, UNKNOWN)
    history.retain(["b"])
    read(history, 60, watts(3), node="b")
    assert (history.size, history.of("b", CARD, 60).power) == (1, 3)


def test_devices_without_values_take_no_place() -> None:
    history = UseHistory()
    read(history, 0, DeviceReadings("qat", "0000:01:00.0", outcomes={"asleep": 3}))
    assert history.size == 0
    assert history.history("n", CARD, "busy", 0) == ()
