"""The health state machine: every transition, and the invariants for any sequence of verdicts."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.devices import HealthPolicy, HealthState, Phase, Verdict

GOOD, BAD, UNKNOWN = Verdict("good"), Verdict("bad", "too hot"), Verdict("unknown", "no answer")
WORDS = {"g": GOOD, "b": BAD, "?": UNKNOWN}
POLICIES = st.builds(
    HealthPolicy,
    bad_verdicts=st.integers(1, 4),
    good_verdicts=st.integers(1, 4),
    recovery_delay=st.sampled_from((0.0, 2.5, 6.0)),
    fail_closed=st.booleans(),
)
# Two bad verdicts make a device unhealthy, two good ones make it healthy.
TWO = HealthPolicy(bad_verdicts=2, recovery_delay=1.0)
VERDICTS = st.lists(st.sampled_from([GOOD, BAD, UNKNOWN]), max_size=30)


def run(verdicts: Sequence[Verdict], policy: HealthPolicy, state: HealthState | None = None) -> HealthState:
    """The state after the verdicts, one per second."""
    state = state or HealthState()
    for second, verdict in enumerate(verdicts):
        state = state.after(verdict, policy, float(second))
    return state


@pytest.mark.parametrize(
    ("verdicts", "phase", "reason"),
    [
        ("", Phase.HEALTHY, ""),
        ("g", Phase.HEALTHY, ""),
        ("b", Phase.SUSPECT, "too hot"),
        ("bg", Phase.HEALTHY, ""),
        ("bgb", Phase.SUSPECT, "too hot"),
        ("bb", Phase.UNHEALTHY, "too hot"),
        ("bbb", Phase.UNHEALTHY, "too hot"),
        ("bbg", Phase.RECOVERING, "too hot"),
        ("bbgb", Phase.UNHEALTHY, "too hot"),
        ("bbgbg", Phase.RECOVERING, "too hot"),
        ("bbgg", Phase.HEALTHY, ""),
        ("bbggb", Phase.SUSPECT, "too hot"),
        ("?", Phase.HEALTHY, ""),
        ("b?", Phase.SUSPECT, "too hot"),
        ("b?b", Phase.UNHEALTHY, "too hot"),
        ("bb????", Phase.UNHEALTHY, "too hot"),
        ("bbg?", Phase.RECOVERING, "too hot"),
        ("bbg?g", Phase.HEALTHY, ""),
    ],
)
def test_verdicts_cause_the_documented_transitions(verdicts: str, phase: Phase, reason: str) -> None:
    state = run([WORDS[word] for word in verdicts], TWO)
    assert (state.phase, state.reason) == (phase, reason)


@pytest.mark.parametrize("phase", [Phase.HEALTHY, Phase.RECOVERING])
def test_by_default_one_bad_verdict_makes_a_device_unhealthy(phase: Phase) -> None:
    assert HealthState(phase).after(BAD, HealthPolicy(), 0.0) == HealthState(Phase.UNHEALTHY, "too hot")


@pytest.mark.parametrize(
    ("times", "phase"),
    [
        ((0.0,), Phase.RECOVERING),
        ((0.0, 0.1), Phase.RECOVERING),
        ((0.0, 0.1, 0.2, 0.3), Phase.RECOVERING),
        ((0.0, 2.9), Phase.RECOVERING),
        ((0.0, 3.0), Phase.HEALTHY),
        ((0.0, 0.1, 3.0), Phase.HEALTHY),
        ((50.0, 52.0), Phase.RECOVERING),
        ((50.0, 53.0), Phase.HEALTHY),
    ],
)
def test_recovery_takes_the_delay_however_many_good_verdicts_come(times: Sequence[float], phase: Phase) -> None:
    state = HealthState(Phase.UNHEALTHY, "too hot")
    for now in times:
        state = state.after(GOOD, HealthPolicy(recovery_delay=3.0), now)
    assert state.phase == phase


def test_a_bad_verdict_restarts_the_recovery_delay() -> None:
    state = HealthState(Phase.UNHEALTHY, "too hot")
    for verdict, now in ((GOOD, 0.0), (BAD, 1.0), (GOOD, 2.0), (GOOD, 4.0)):
        state = state.after(verdict, HealthPolicy(recovery_delay=3.0), now)
    assert state.phase == Phase.RECOVERING
    assert state.after(GOOD, HealthPolicy(recovery_delay=3.0), 5.0) == HealthState()


@pytest.mark.parametrize(
    ("phase", "usable"),
    [(Phase.HEALTHY, True), (Phase.SUSPECT, True), (Phase.UNHEALTHY, False), (Phase.RECOVERING, False)],
)
def test_suspect_devices_are_usable_and_recovering_ones_are_not(phase: Phase, usable: bool) -> None:
    assert HealthState(phase).usable is usable


@pytest.mark.parametrize(
    ("verdict", "closed", "phase"),
    [
        (GOOD, False, Phase.HEALTHY),
        (BAD, False, Phase.UNHEALTHY),
        (UNKNOWN, False, Phase.HEALTHY),
        (UNKNOWN, True, Phase.UNHEALTHY),
    ],
)
def test_one_verdict_determines_the_state_of_a_new_device(verdict: Verdict, closed: bool, phase: Phase) -> None:
    policy = HealthPolicy(bad_verdicts=5, fail_closed=closed)
    assert HealthState.first(verdict, policy).phase == phase


def test_the_first_answer_replaces_the_reason_that_there_was_none() -> None:
    policy = HealthPolicy(fail_closed=True)
    state = HealthState.first(Verdict("unknown", "no answer"), policy)
    assert (state.reason, state.cause) == ("no answer", "no-answer")
    assert state.after(Verdict("unknown", "still none"), policy, 1.0) is state
    state = state.after(Verdict("bad", "too hot", "temperature"), policy, 2.0)
    assert (state.phase, state.reason, state.cause) == (Phase.UNHEALTHY, "too hot", "temperature")
    assert state.after(Verdict("unknown", "no answer"), policy, 3.0) is state


def test_an_unhealthy_device_keeps_its_first_reason() -> None:
    hot, hotter = Verdict("bad", "98 degrees"), Verdict("bad", "99 degrees")
    unhealthy = run([hot, hotter], TWO)
    assert unhealthy.reason == "99 degrees"
    assert run([hot] * 5, TWO, unhealthy) == unhealthy


def test_with_fail_closed_an_unknown_verdict_is_a_bad_one() -> None:
    state = run([UNKNOWN, UNKNOWN], HealthPolicy(bad_verdicts=2, fail_closed=True))
    assert state == HealthState(Phase.UNHEALTHY, "no answer", cause="no-answer")


@given(VERDICTS, POLICIES)
def test_no_device_is_usable_after_enough_bad_verdicts(verdicts: list[Verdict], policy: HealthPolicy) -> None:
    state = run([*verdicts, *[BAD] * policy.bad_verdicts], policy)
    assert state.phase == Phase.UNHEALTHY
    assert not state.usable


@given(VERDICTS, POLICIES)
def test_every_device_recovers_by_enough_good_verdicts(verdicts: list[Verdict], policy: HealthPolicy) -> None:
    assert run([*verdicts, *[GOOD] * (policy.good_verdicts + 6)], policy) == HealthState()


@given(VERDICTS, POLICIES)
def test_unknown_verdicts_change_nothing_unless_the_policy_fails_closed(
    verdicts: list[Verdict], policy: HealthPolicy
) -> None:
    state = run(verdicts, policy)
    after = run([UNKNOWN] * 4, policy, state)
    assert after == state if not policy.fail_closed else after.phase == Phase.UNHEALTHY


@given(VERDICTS, POLICIES)
def test_one_good_verdict_makes_no_unhealthy_device_usable_if_there_is_a_delay(
    verdicts: list[Verdict], policy: HealthPolicy
) -> None:
    state = run(verdicts, policy)
    if state.phase == Phase.UNHEALTHY and (policy.good_verdicts > 1 or policy.recovery_delay):
        assert not state.after(GOOD, policy, 1000.0).usable


@given(VERDICTS, POLICIES)
def test_every_state_but_healthy_has_a_reason(verdicts: list[Verdict], policy: HealthPolicy) -> None:
    state = run(verdicts, policy)
    assert bool(state.reason) == (state.phase != Phase.HEALTHY)
    assert state.phase != Phase.SUSPECT or 0 < state.streak < policy.bad_verdicts
