"""When a resource is registered: a table of what is seen, and when, against what is due."""

from hypothesis import given
from hypothesis import strategies as st

from accelplane.kubelet.membership import LAST_RETRY, LOOK_AT_LEAST, STREAM_DEADLINE, Membership
from accelplane.kubelet.sockets import Identity

ONE, OTHER = Identity(1, 1, 1), Identity(1, 2, 2)


def member(now: float = 0.0) -> Membership:
    """Registered at ONE, a moment ago."""
    membership = Membership()
    membership.see(ONE, listening=False, now=now)
    membership.tried(now, accepted=True)
    return membership


def test_it_registers_as_soon_as_there_is_a_kubelet() -> None:
    membership = Membership()
    membership.see(None, listening=False, now=0)
    assert not membership.due(0)
    membership.see(ONE, listening=False, now=5)
    assert membership.due(5)


def test_refusals_are_followed_by_pauses_that_grow_up_to_a_limit() -> None:
    membership, now, pauses = Membership(), 0.0, list[float]()
    for _ in range(12):
        membership.see(ONE, listening=False, now=now)
        assert membership.due(now)
        membership.tried(now, accepted=False)
        assert not membership.due(now)
        pauses.append(membership.next_look(now))
        now += pauses[-1]
    assert 0.1 < pauses[0] < 0.3
    assert all(0.8 * LAST_RETRY <= pause <= 1.2 * LAST_RETRY for pause in pauses[-3:])


def test_another_socket_of_the_kubelet_is_tried_at_once_whatever_the_old_one_refused() -> None:
    membership = Membership()
    membership.see(ONE, listening=False, now=0)
    membership.tried(0, accepted=False)
    membership.see(OTHER, listening=False, now=0.01)
    assert membership.due(0.01)


def test_a_registered_resource_has_moved_when_the_kubelet_has_another_socket_and_not_when_it_has_none() -> None:
    membership = member()
    membership.see(None, listening=True, now=1)
    assert not membership.moved
    membership.see(OTHER, listening=True, now=1)
    assert membership.moved


def test_a_kubelet_that_never_listens_is_told_again_and_more_and_more_rarely() -> None:
    membership, now, waits = member(), 0.0, list[float]()
    for _ in range(4):
        wait = membership.next_look(now)
        while not membership.see(ONE, listening=False, now=now + wait):
            wait += membership.next_look(now + wait)
        waits.append(wait)
        now += wait
        assert membership.due(now)
        membership.tried(now, accepted=True)
    assert waits == [STREAM_DEADLINE, 2 * STREAM_DEADLINE, 4 * STREAM_DEADLINE, 8 * STREAM_DEADLINE]


def test_the_end_of_a_stream_that_lasted_is_answered_at_once() -> None:
    membership = member()
    membership.see(ONE, listening=True, now=STREAM_DEADLINE + 1)
    assert membership.see(ONE, listening=False, now=STREAM_DEADLINE + 2)
    assert membership.due(STREAM_DEADLINE + 2)


def test_a_kubelet_that_ends_every_stream_at_once_is_given_time() -> None:
    membership, now, pauses = member(), 0.0, list[float]()
    for _ in range(8):
        membership.see(ONE, listening=True, now=now)
        assert membership.see(ONE, listening=False, now=now)
        pauses.append(membership.next_look(now))
        now += pauses[-1]
        membership.see(ONE, listening=False, now=now)
        assert membership.due(now)
        membership.tried(now, accepted=True)
    assert pauses[0] < 0.3
    assert pauses[-1] >= 0.8 * LAST_RETRY


@given(
    st.lists(
        st.tuples(st.sampled_from([None, ONE, OTHER]), st.booleans(), st.floats(0, 400), st.sampled_from([True, False]))
    )
)
def test_whatever_happens_it_looks_again_in_time_and_is_never_due_without_a_kubelet(
    seen: list[tuple[Identity | None, bool, float, bool]],
) -> None:
    membership, now = Membership(), 0.0
    for kubelet, listening, passed, accepted in seen:
        now += passed
        membership.see(kubelet, listening=listening, now=now)
        assert 0 <= membership.next_look(now) <= LOOK_AT_LEAST
        if membership.due(now):
            assert kubelet is not None
            membership.tried(now, accepted=accepted)
            assert membership.registered is accepted
