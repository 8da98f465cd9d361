"""The connections that a server at its limit closes."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.http.eviction import Candidate, Evidence, evictable_at, eviction_order, is_attack, source_of
from accelplane.http.messages import HttpLimits

LIMITS = HttpLimits(connections=8)
NOW = 100.0
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        source=st.sampled_from([b"a", b"b", b"c"]),
        silent_since=st.one_of(st.just(math.inf), st.sampled_from([0, 70, 94, 98.5, 99.9, 99.99])),
        has_requested=st.booleans(),
        idle=st.booleans(),
        closing=st.booleans(),
    ),
    max_size=12,
)

pytestmark = pytest.mark.untraced


def order(candidates: Sequence[Candidate], *, attacked: bool = False) -> list[Candidate]:
    return [candidates[index] for index in eviction_order(candidates, LIMITS, NOW, attacked=attacked)]


def unused_client(seconds: float, source: bytes = b"a") -> Candidate:
    return Candidate(source, NOW - seconds)


def idle_client(seconds: float, source: bytes = b"a", *, idle: bool = True) -> Candidate:
    return Candidate(source, NOW - seconds, has_requested=True, idle=idle)


def test_the_client_without_request_for_longest_is_first() -> None:
    assert order([unused_client(6), unused_client(8), unused_client(7)]) == [
        unused_client(8),
        unused_client(7),
        unused_client(6),
    ]


def test_a_connection_without_request_is_closed_before_one_that_had_requests() -> None:
    assert order([idle_client(1000), unused_client(6)]) == [unused_client(6), idle_client(1000)]


def test_the_address_with_the_most_connections_without_request_is_first() -> None:
    most_connections = [unused_client(6, b"b"), unused_client(5.5, b"b")]
    idle_connections = [idle_client(30, b"a") for _ in range(3)]
    assert order([unused_client(60, b"a"), *most_connections, *idle_connections])[:3] == [
        *most_connections,
        unused_client(60, b"a"),
    ]


def test_a_connection_with_its_last_response_is_first() -> None:
    closing = Candidate(b"a", NOW, has_requested=True, closing=True)
    assert order([unused_client(1000, b"b"), unused_client(1000, b"b"), closing])[0] is closing


def test_clients_without_request_have_five_seconds_and_fewer_during_an_attack() -> None:
    assert order([unused_client(4.9), unused_client(0.06), unused_client(0.04)]) == []
    assert order([unused_client(4.9), unused_client(0.06), unused_client(0.04)], attacked=True) == [
        unused_client(4.9),
        unused_client(0.06),
    ]


def test_an_address_with_few_connections_has_five_seconds_during_an_attack() -> None:
    most_connections = [unused_client(0.06, b"b")] * 3
    assert order([unused_client(4), *most_connections], attacked=True) == most_connections
    assert order([unused_client(4), unused_client(3), *most_connections[:2]], attacked=True)[0] == unused_client(4)


def test_kept_connections_are_idle_for_long_unless_one_address_has_half_of_them() -> None:
    assert order([idle_client(24), idle_client(24, idle=False)], attacked=True) == [idle_client(24, idle=False)]
    assert order([idle_client(24)] * 3) == []
    assert order([idle_client(5)] * 4 + [idle_client(24, b"b")]) == [idle_client(5)] * 4
    assert order([idle_client(4.9)] * 4) == []
    assert order([idle_client(1)] * 4 + [idle_client(24, b"b")], attacked=True) == [idle_client(1)] * 4
    assert order([idle_client(0.9)] * 4, attacked=True) == []


@pytest.mark.parametrize("seconds", [1.99, 2.0])
def test_half_of_the_connections_silent_for_two_seconds_are_an_attack(seconds: float) -> None:
    clients = [unused_client(seconds, source) for source in (b"a", b"b", b"c", b"d")]
    assert is_attack(clients, LIMITS, NOW) == (seconds == 2)
    assert not is_attack(clients[1:], LIMITS, NOW)


def test_idle_connections_of_one_address_are_an_attack_after_five_seconds() -> None:
    assert not is_attack([idle_client(4.9)] * 4, LIMITS, NOW)
    assert is_attack([idle_client(5)] * 4, LIMITS, NOW)


def test_clients_continue_for_two_seconds_after_progress() -> None:
    evidence = Evidence(LIMITS)
    assert not evidence.clients_continue(NOW)
    evidence.add_progress(NOW)
    assert evidence.clients_continue(NOW + 1.9)
    assert not evidence.clients_continue(NOW + 2)


def test_half_of_the_connections_closed_within_five_seconds_are_an_attack() -> None:
    evidence = Evidence(LIMITS)
    for number in range(4):
        assert not evidence.many_stalls(NOW)
        evidence.add_stall(NOW + number)
    assert evidence.many_stalls(NOW + 4.9)
    assert not evidence.many_stalls(NOW + 5)


def test_idle_clients_with_requests_and_pending_responses_are_no_attack() -> None:
    assert not is_attack([idle_client(20)] * 3 + [idle_client(20, b"b")] * 3, LIMITS, NOW)
    assert is_attack([idle_client(20)] * 4, LIMITS, NOW)
    assert not is_attack([Candidate(b"a", math.inf)] * 8, LIMITS, NOW)
    assert not is_attack([Candidate(b"a", NOW - 9, closing=True)] * 8, LIMITS, NOW)
    assert not is_attack([], HttpLimits(connections=0), NOW)


@given(CANDIDATES, st.booleans())
def test_eviction_is_fair(candidates: list[Candidate], attacked: bool) -> None:
    found = [each for each in order(candidates, attacked=attacked) if not each.closing]
    assert all(NOW - each.silent_since >= (LIMITS.attack_stall if attacked else LIMITS.stall) for each in found)
    # A connection that had a request is never closed before one without.
    assert [each.has_requested for each in found] == sorted(each.has_requested for each in found)
    counts = Counter((each.source, each.has_requested) for each in candidates)
    for before, after in itertools.pairwise(found):
        if before.has_requested == after.has_requested:
            assert counts[before.source, before.has_requested] >= counts[after.source, after.has_requested]
        if (before.source, before.has_requested) == (after.source, after.has_requested):
            assert before.silent_since <= after.silent_since


@given(CANDIDATES, st.booleans())
def test_exactly_expired_connections_are_evicted(candidates: list[Candidate], attacked: bool) -> None:
    times = evictable_at(candidates, LIMITS, attacked=attacked)
    found = eviction_order(candidates, LIMITS, NOW, attacked=attacked)
    assert sorted(found) == [index for index, time in enumerate(times) if time <= NOW]
    assert all(math.isinf(times[index]) for index, each in enumerate(candidates) if math.isinf(each.silent_since))


@given(CANDIDATES)
def test_an_attack_never_protects_a_connection(candidates: list[Candidate]) -> None:
    usual = evictable_at(candidates, LIMITS, attacked=False)
    attacked = evictable_at(candidates, LIMITS, attacked=True)
    assert all(after <= before for before, after in zip(usual, attacked, strict=True))
    assert set(eviction_order(candidates, LIMITS, NOW, attacked=False)) <= set(
        eviction_order(candidates, LIMITS, NOW, attacked=True)
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::2", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_sources_are_ipv4_addresses_and_ipv6_networks(one: str, other: str, same: bool) -> None:
    assert (source_of(one) == source_of(other)) == same
