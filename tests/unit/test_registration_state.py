"""Registration decisions: a table of timed observations."""

from hypothesis import given
from hypothesis import strategies as st

from accelplane.kubelet.registration_state import (
    LAST_RETRY,
    MAX_CHECK_INTERVAL,
    STREAM_DEADLINE,
    RegistrationState,
)
from accelplane.kubelet.sockets import Identity

ONE, OTHER = Identity(1, 1, 1), Identity(1, 2, 2)


def observe(
    state: RegistrationState, kubelet: Identity | None, *, watching: bool, now: float, opened: int | None = None
) -> bool:
    """One observation; `opened` is the number of streams so far, by default as many as are open."""
    return state.observe(kubelet, open_streams=watching, opened=watching if opened is None else opened, now=now)


def registered(now: float = 0.0) -> RegistrationState:
    """Registered at ONE a moment ago; no stream has been opened yet."""
    state = RegistrationState()
    observe(state, ONE, watching=False, now=now)
    state.record_attempt(now, accepted=True)
    return state


def test_the_plugin_registers_when_the_kubelet_appears() -> None:
    state = RegistrationState()
    observe(state, None, watching=False, now=0)
    assert not state.should_register(0)
    observe(state, ONE, watching=False, now=5)
    assert state.should_register(5)


def test_rejections_are_retried_with_backoff_up_to_a_limit() -> None:
    state, now, pauses = RegistrationState(), 0.0, list[float]()
    for _ in range(12):
        observe(state, ONE, watching=False, now=now)
        assert state.should_register(now)
        state.record_attempt(now, accepted=False)
        assert not state.should_register(now)
        pauses.append(state.next_check(now))
        now += pauses[-1]
    assert 0.1 < pauses[0] < 0.3
    assert all(0.8 * LAST_RETRY <= pause <= 1.2 * LAST_RETRY for pause in pauses[-3:])


def test_a_new_kubelet_socket_after_a_rejection_causes_immediate_registration() -> None:
    state = RegistrationState()
    observe(state, ONE, watching=False, now=0)
    state.record_attempt(0, accepted=False)
    observe(state, OTHER, watching=False, now=0.01)
    assert state.should_register(0.01)


def test_moved_when_the_kubelet_has_another_socket_and_not_when_it_has_none() -> None:
    state = registered()
    observe(state, None, watching=True, now=1)
    assert not state.moved
    observe(state, OTHER, watching=True, now=1)
    assert state.moved


def test_a_kubelet_that_never_opens_a_stream_gets_registrations_at_growing_intervals() -> None:
    state, now, waits = registered(), 0.0, list[float]()
    for _ in range(4):
        wait = state.next_check(now)
        while not observe(state, ONE, watching=False, now=now + wait):
            wait += state.next_check(now + wait)
        waits.append(wait)
        now += wait
        assert state.should_register(now)
        state.record_attempt(now, accepted=True)
    assert waits == [STREAM_DEADLINE, 2 * STREAM_DEADLINE, 4 * STREAM_DEADLINE, 8 * STREAM_DEADLINE]


def test_the_end_of_a_long_stream_causes_immediate_registration() -> None:
    state = registered()
    observe(state, ONE, watching=True, now=STREAM_DEADLINE + 1)
    assert observe(state, ONE, watching=False, now=STREAM_DEADLINE + 2)
    assert state.should_register(STREAM_DEADLINE + 2)


def test_a_stream_that_opened_and_ended_while_register_was_unanswered_counts_as_ended() -> None:
    state = RegistrationState()
    observe(state, ONE, watching=False, opened=3, now=0)
    state.record_attempt(0.1, accepted=True)
    assert observe(state, ONE, watching=False, opened=4, now=0.1)
    assert state.next_check(0.1) < 0.3


def test_streams_of_an_earlier_registration_do_not_count_as_ended() -> None:
    state = RegistrationState()
    observe(state, ONE, watching=False, opened=3, now=0)
    state.record_attempt(0.1, accepted=True)
    assert not observe(state, ONE, watching=False, opened=3, now=0.1)
    assert state.registered


def test_streams_that_end_immediately_are_retried_with_backoff() -> None:
    state, now, pauses = registered(), 0.0, list[float]()
    for _ in range(8):
        observe(state, ONE, watching=True, now=now)
        assert observe(state, ONE, watching=False, now=now)
        pauses.append(state.next_check(now))
        now += pauses[-1]
        observe(state, ONE, watching=False, now=now)
        assert state.should_register(now)
        state.record_attempt(now, accepted=True)
    assert pauses[0] < 0.3
    assert pauses[-1] >= 0.8 * LAST_RETRY


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, ONE, OTHER]),
            st.integers(0, 2),
            st.integers(0, 2),
            st.floats(0, 400),
            st.sampled_from([True, False]),
        )
    )
)
def test_the_next_check_is_scheduled_and_registration_requires_a_kubelet(
    observations: list[tuple[Identity | None, int, int, float, bool]],
) -> None:
    state, now, opened = RegistrationState(), 0.0, 0
    for kubelet, open_streams, new_streams, passed, accepted in observations:
        now += passed
        opened += new_streams
        state.observe(kubelet, open_streams=open_streams, opened=opened, now=now)
        assert 0 <= state.next_check(now) <= MAX_CHECK_INTERVAL
        if state.should_register(now):
            assert kubelet is not None
            state.record_attempt(now, accepted=accepted)
            assert state.registered is accepted
