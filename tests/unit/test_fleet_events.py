"""Which devices get an Event when."""

from hypothesis import given
from hypothesis import strategies as st

from accelplane.fleet.events import (
    DEVICE_INTERVAL,
    PER_MINUTE,
    DeviceKey,
    DeviceState,
    EventPlan,
    device_states,
    note_of,
)
from accelplane.fleet.model import Node
from accelplane.report.inventory import Holder, ReportedUnit

KEY = DeviceKey("n", "gpu", "card0")
GOOD, BAD = DeviceState(False, "", 1, 0), DeviceState(True, "x", 1, 0)


def test_a_change_is_reported_once() -> None:
    plan = EventPlan()
    plan.update("n", {KEY: GOOD})
    plan.update("n", {KEY: BAD})
    assert plan.due(0.0) == [(KEY, BAD)]
    plan.update("n", {KEY: BAD})
    assert plan.due(1000.0) == []
    assert plan.next_time(1000.0) is None


def test_a_device_that_is_unhealthy_at_its_first_check_has_no_change() -> None:
    plan = EventPlan()
    plan.update("n", {KEY: BAD})
    assert plan.due(0.0) == []
    plan.update("n", {KEY: GOOD})
    assert plan.due(1.0) == [(KEY, GOOD)]


def test_a_device_has_one_event_in_ten_minutes_with_the_state_of_that_moment() -> None:
    plan = EventPlan()
    for state in (GOOD, BAD):
        plan.update("n", {KEY: state})
    assert plan.due(0.0) == [(KEY, BAD)]
    plan.update("n", {KEY: GOOD})
    assert plan.due(DEVICE_INTERVAL - 1) == []
    assert plan.next_time(1.0) == DEVICE_INTERVAL
    assert plan.due(DEVICE_INTERVAL) == [(KEY, GOOD)]


def test_a_device_that_returned_to_its_last_state_has_no_event() -> None:
    plan = EventPlan()
    for state in (GOOD, BAD, GOOD):
        plan.update("n", {KEY: state})
    assert plan.due(0.0) == []


def test_state_of_a_removed_device_is_deleted() -> None:
    plan = EventPlan()
    plan.update("n", {KEY: GOOD})
    plan.update("n", {})
    plan.update("n", {KEY: BAD})
    assert plan.due(0.0) == []


def test_events_beyond_ten_a_minute_are_postponed() -> None:
    plan, keys = EventPlan(), [DeviceKey("n", "gpu", f"card{number}") for number in range(PER_MINUTE + 2)]
    plan.update("n", dict.fromkeys(keys, GOOD))
    plan.update("n", dict.fromkeys(keys, BAD))
    assert len(plan.due(0.0)) == PER_MINUTE
    assert plan.next_time(0.0) == 60.0
    assert len(plan.due(59.0)) == 0
    assert len(plan.due(60.0)) == 2


def test_the_events_on_pods_count() -> None:
    plan, other = EventPlan(), DeviceKey("n", "gpu", "card1")
    state = DeviceState(True, "x", 20, 20, tuple(("a", f"p{number}") for number in range(20)))
    plan.update("n", {KEY: GOOD, other: GOOD})
    plan.update("n", {KEY: state, other: state})
    assert [key for key, _ in plan.due(0.0)] == [KEY]
    assert [key for key, _ in plan.due(60.0)] == [other]


def test_a_device_is_unhealthy_if_one_of_its_units_is() -> None:
    ids = {"dsa.intel.com/wq-user-shared": 2}
    holders = (Holder("b", "p", "c", "r", 1), Holder("a", "q", "c", "r", 1), Holder("", "", "", "r", 1))
    units = (
        ReportedUnit("dsa", "wq0.0", device="dsa0", ids=ids, holders=holders),
        ReportedUnit("dsa", "wq0.1", device="dsa0", ids=ids, phase="recovering", reason="halted"),
        ReportedUnit("dsa", "wq1.0", ids=ids),
    )
    found = device_states(Node("n", units=units))
    state = DeviceState(True, "halted", 4, 3, (("a", "q"), ("b", "p")))
    assert found == {
        DeviceKey("n", "dsa", "dsa0"): state,
        DeviceKey("n", "dsa", "wq1.0"): DeviceState(False, "no reason known", 2, 0),
    }
    key = DeviceKey("n", "dsa", "dsa0")
    assert note_of(key, state) == "dsa device dsa0 of node n is unhealthy: halted; 3 of 4 IDs are held"


def test_the_text_of_a_recovery_has_no_reason() -> None:
    assert note_of(KEY, GOOD) == "gpu device card0 of node n has recovered; 0 of 1 IDs are held"


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 15), st.booleans()), max_size=60))
def test_the_limits_hold_for_any_sequence(changes: list[tuple[float, int, bool]]) -> None:
    plan, now, written = EventPlan(), 0.0, list[tuple[float, DeviceKey]]()
    states = {DeviceKey("n", "gpu", f"card{number}"): GOOD for number in range(16)}
    plan.update("n", states)
    for passed, number, unhealthy in changes:
        now += passed
        states[DeviceKey("n", "gpu", f"card{number}")] = BAD if unhealthy else GOOD
        plan.update("n", states)
        written += [(now, key) for key, _ in plan.due(now)]
    for at, key in written:
        assert sum(at - 60 < other <= at for other, _ in written) <= PER_MINUTE
        assert sum(at - DEVICE_INTERVAL < other <= at and same == key for other, same in written) == 1
