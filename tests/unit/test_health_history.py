"""The health history: unhealthy devices, reasons and durations."""

import pytest

from accelplane.devices import Cause, HealthPolicy, HealthState, Phase, Verdict
from accelplane.node.health_history import RECOVERY_BOUNDS, HealthHistory

POLICY = HealthPolicy(good_verdicts=1, recovery_delay=0.0)
HOT = Verdict("bad", "105 °C", "temperature")


class Unit:
    """A unit whose verdicts are recorded at times that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.history = HealthHistory(clock=lambda: self.now)
        self.state: HealthState | None = None

    def check(self, verdict: Verdict, now: float, policy: HealthPolicy = POLICY) -> None:
        self.now, old = now, self.state
        self.state = HealthState.first(verdict, policy) if old is None else old.after(verdict, policy, now)
        self.history.record("card0", old, self.state)


@pytest.fixture
def unit() -> Unit:
    return Unit()


def test_changes_have_phase_cause_and_reason(unit: Unit) -> None:
    for now, verdict in enumerate((Verdict("good"), HOT, HOT, Verdict("good"))):
        unit.check(verdict, now)
    changes = [(change.phase, change.cause, change.reason) for change in unit.history.changes("card0")]
    assert changes == [
        (Phase.HEALTHY, "other", ""), (Phase.UNHEALTHY, "temperature", "105 °C"), (Phase.HEALTHY, "other", ""),
    ]  # fmt: skip
    assert unit.history.failures == {"temperature": 1}


def test_a_recovering_unit_that_fails_again_is_one_failure(unit: Unit) -> None:
    slow = HealthPolicy(good_verdicts=2, recovery_delay=0.0)
    for now, verdict in enumerate((HOT, Verdict("good"), HOT, Verdict("good"), Verdict("good"))):
        unit.check(verdict, now, slow)
    assert unit.history.failures == {"temperature": 1}
    assert unit.history.recoveries.seconds == 4


@pytest.mark.parametrize(("seconds", "bucket"), [(0.5, 0), (1.0, 0), (1.1, 1), (86400.0, 8), (1e6, 9)])
def test_recovery_times_are_counted_in_buckets(unit: Unit, seconds: float, bucket: int) -> None:
    unit.check(HOT, 0.0)
    unit.check(Verdict("good"), seconds)
    expected = [0] * (len(RECOVERY_BOUNDS) + 1)
    expected[bucket] = 1
    assert list(unit.history.recoveries.counts) == expected


def test_the_unhealthy_time_includes_the_present_period(unit: Unit) -> None:
    for now, verdict in ((0.0, HOT), (10.0, Verdict("good")), (20.0, HOT)):
        unit.check(verdict, now)
    unit.now = 25.0
    assert unit.history.unhealthy_seconds("card0") == 15


def test_the_last_32_changes_are_kept(unit: Unit) -> None:
    for now in range(100):
        unit.check(HOT if now % 2 else Verdict("good"), now)
    changes = unit.history.changes("card0")
    assert (len(changes), changes[-1].phase) == (32, Phase.UNHEALTHY)


def test_a_removed_unit_has_no_history_and_counters_are_kept(unit: Unit) -> None:
    unit.check(HOT, 0.0)
    unit.history.forget("card0")
    assert unit.history.changes("card0") == ()
    assert unit.history.unhealthy_seconds("card0") == 0
    assert unit.history.failures == {"temperature": 1}


@pytest.mark.parametrize(("fail_closed", "cause"), [(True, "no-answer"), (False, None)])
def test_a_missing_answer_is_a_cause_if_the_policy_fails_closed(
    unit: Unit, fail_closed: bool, cause: Cause | None
) -> None:
    unit.check(Verdict("unknown", "no socket"), 0.0, HealthPolicy(fail_closed=fail_closed))
    assert unit.history.failures == ({cause: 1} if cause else {})


def test_a_suspect_unit_is_not_unhealthy(unit: Unit) -> None:
    patient = HealthPolicy(bad_verdicts=2)
    unit.check(Verdict("good"), 0.0, patient)
    unit.check(HOT, 1.0, patient)
    assert unit.history.failures == {}
    assert unit.history.changes("card0")[-1].cause == "temperature"
    unit.now = 9.0
    assert unit.history.unhealthy_seconds("card0") == 0
