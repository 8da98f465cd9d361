"""The health state machine: every arrow of its drawing, and what holds for any run of verdicts."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.devices import HealthPolicy, HealthState, Phase, Verdict

GOOD, BAD, UNKNOWN = Verdict("good"), Verdict("bad", "too hot"), Verdict("unknown", "no answer")
WORDS = {"g": GOOD, "b": BAD, "?": UNKNOWN}
POLICIES = st.builds(
    HealthPolicy, bad_verdicts=st.integers(1, 4), good_verdicts=st.integers(1, 4), fail_closed=st.booleans()
)
VERDICTS = st.lists(st.sampled_from([GOOD, BAD, UNKNOWN]), max_size=30)


def run(verdicts: Sequence[Verdict], policy: HealthPolicy, state: HealthState | None = None) -> HealthState:
    state = state or HealthState()
    for verdict in verdicts:
        state = state.after(verdict, policy)
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
def test_verdicts_move_the_state_along_the_drawing(verdicts: str, phase: Phase, reason: str) -> None:
    state = run([WORDS[word] for word in verdicts], HealthPolicy())
    assert (state.phase, state.reason) == (phase, reason)


@pytest.mark.parametrize(
    ("phase", "usable", "settled"),
    [
        (Phase.HEALTHY, True, True),
        (Phase.SUSPECT, True, False),
        (Phase.UNHEALTHY, False, True),
        (Phase.RECOVERING, False, False),
    ],
)
def test_only_decided_turns_change_what_the_kubelet_is_told(phase: Phase, usable: bool, settled: bool) -> None:
    assert (HealthState(phase).usable, HealthState(phase).settled) == (usable, settled)


@pytest.mark.parametrize(
    ("verdict", "closed", "phase"),
    [
        (GOOD, False, Phase.HEALTHY),
        (BAD, False, Phase.UNHEALTHY),
        (UNKNOWN, False, Phase.HEALTHY),
        (UNKNOWN, True, Phase.UNHEALTHY),
    ],
)
def test_the_first_verdict_of_all_decides_at_once(verdict: Verdict, closed: bool, phase: Phase) -> None:
    policy = HealthPolicy(bad_verdicts=5, fail_closed=closed)
    assert HealthState.first(verdict, policy).phase == phase


def test_the_reason_is_why_the_device_fell_sick_and_not_each_reading_since() -> None:
    hot, hotter = Verdict("bad", "98 degrees"), Verdict("bad", "99 degrees")
    fallen = run([hot, hotter], HealthPolicy())
    assert fallen.reason == "99 degrees"
    assert run([hot] * 5, HealthPolicy(), fallen) == fallen


def test_failing_closed_no_answer_counts_as_a_bad_one() -> None:
    state = run([UNKNOWN, UNKNOWN], HealthPolicy(fail_closed=True))
    assert state == HealthState(Phase.UNHEALTHY, "no answer")


@given(VERDICTS, POLICIES)
def test_no_device_is_usable_after_enough_bad_verdicts(verdicts: list[Verdict], policy: HealthPolicy) -> None:
    state = run([*verdicts, *[BAD] * policy.bad_verdicts], policy)
    assert state.phase == Phase.UNHEALTHY
    assert not state.usable


@given(VERDICTS, POLICIES)
def test_every_device_recovers_by_enough_good_verdicts(verdicts: list[Verdict], policy: HealthPolicy) -> None:
    assert run([*verdicts, *[GOOD] * policy.good_verdicts], policy) == HealthState()


@given(VERDICTS, POLICIES)
def test_no_answers_alone_move_nothing_unless_failing_closed(verdicts: list[Verdict], policy: HealthPolicy) -> None:
    state = run(verdicts, policy)
    after = run([UNKNOWN] * 4, policy, state)
    assert after == state if not policy.fail_closed else after.phase == Phase.UNHEALTHY


@given(VERDICTS, POLICIES)
def test_one_odd_verdict_never_turns_what_was_settled_when_two_are_needed(
    verdicts: list[Verdict], policy: HealthPolicy
) -> None:
    state = run(verdicts, policy)
    if state.settled and min(policy.bad_verdicts, policy.good_verdicts) > 1:
        for verdict in (GOOD, BAD, UNKNOWN):
            assert state.after(verdict, policy).usable == state.usable


@given(VERDICTS, POLICIES)
def test_a_state_that_is_not_plainly_healthy_tells_why(verdicts: list[Verdict], policy: HealthPolicy) -> None:
    state = run(verdicts, policy)
    assert bool(state.reason) == (state.phase != Phase.HEALTHY)
    assert 0 <= state.streak < max(policy.bad_verdicts, policy.good_verdicts)
