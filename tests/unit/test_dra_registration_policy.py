"""When a driver creates its registration socket again."""

import pytest

from accelplane.dra.registration_policy import RegistrationPolicy, Version

NEW = (1, 37)


def connected(policy: RegistrationPolicy, start: float, end: float) -> None:
    policy.observe_connections(start, 1)
    policy.observe_connections(end, 0)


def test_rejections_are_retried_with_exponential_backoff_up_to_two_minutes() -> None:
    policy, delays, now = RegistrationPolicy(), [], 0.0
    for _ in range(9):
        policy.record_status(now, accepted=False, version=(1, 35))
        delay = policy.next_check(now, (1, 35))
        assert delay is not None
        assert not policy.should_recreate(now + delay - 0.1, (1, 35))
        now += delay
        assert policy.should_recreate(now, (1, 35))
        policy.record_created(now, again=True)
        delays.append(delay)
    assert delays == [1, 2, 4, 8, 16, 32, 64, 120, 120]


@pytest.mark.parametrize(("version", "guarded"), [((1, 32), False), ((1, 33), False), ((1, 34), True), (None, True)])
def test_a_lost_connection_counts_since_kubelet_1_34(version: Version | None, *, guarded: bool) -> None:
    policy = RegistrationPolicy()
    policy.record_status(0, accepted=True, version=version)
    connected(policy, 1, 10)
    assert policy.is_registered(version) is not guarded
    assert policy.should_recreate(14.9, version) is False
    assert policy.should_recreate(15, version) is guarded
    assert policy.next_check(10, version) == (5 if guarded else None)


def test_a_socket_is_created_again_at_most_once_in_30_seconds_and_later_less_often() -> None:
    policy, times = RegistrationPolicy(), []
    connected(policy, 0, 10)
    for now in range(10, 800):
        if policy.should_recreate(now, NEW):
            policy.record_created(now, again=True)
            times.append(now)
    assert times == [15, 45, 105, 225, 465, 765]


def test_short_connections_of_other_programs_change_nothing() -> None:
    policy = RegistrationPolicy()
    policy.record_status(0, accepted=True, version=NEW)
    connected(policy, 1, 1.1)
    assert policy.is_registered(NEW)
    connected(policy, 2, 10)
    for now in range(10, 15):
        connected(policy, now, now + 0.1)
    assert policy.should_recreate(15, NEW)


def test_a_second_connection_keeps_the_registration() -> None:
    policy = RegistrationPolicy()
    policy.record_status(0, accepted=True, version=NEW)
    for count in (1, 2, 1):
        policy.observe_connections(5 * count, count)
    assert policy.is_registered(NEW)
