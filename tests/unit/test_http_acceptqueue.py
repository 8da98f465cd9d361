"""The order in which waiting clients get a connection, and the client that is closed if there are too many."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.http.acceptqueue import AcceptQueue, Waiting, admission_order, silent_index

pytestmark = pytest.mark.untraced

WAITING = st.lists(
    st.builds(
        Waiting,
        source=st.sampled_from([b"a", b"b", b"c"]),
        arrived=st.integers(0, 20).map(float),
        has_data=st.booleans(),
    ),
    max_size=12,
)
HELD = st.dictionaries(st.sampled_from([b"a", b"b"]), st.integers(0, 3))


def test_the_oldest_client_with_data_is_first() -> None:
    waiting = [Waiting(b"a", 3), Waiting(b"a", 1, has_data=False), Waiting(b"a", 2)]
    assert admission_order(waiting, {}, attacked=False) == [2, 0, 1]


@pytest.mark.parametrize("attacked", [False, True])
def test_addresses_with_fewer_connections_without_request_are_first(attacked: bool) -> None:
    waiting = [Waiting(b"a", 1), Waiting(b"b", 2), Waiting(b"a", 3)]
    assert admission_order(waiting, {b"a": 1}, attacked=attacked)[0] == 1


def test_newest_and_oldest_connections_are_evicted_alternately_during_an_attack() -> None:
    waiting = [Waiting(b"a", time) for time in (1, 2, 3, 4, 5)]
    assert admission_order(waiting, {}, attacked=True) == [4, 0, 3, 1, 2]


def test_clients_without_data_get_no_connection_during_an_attack() -> None:
    assert admission_order([Waiting(b"a", 1, has_data=False), Waiting(b"a", 2)], {}, attacked=True) == [1]


def test_the_oldest_silent_client_of_the_busiest_address_is_dropped() -> None:
    waiting = [Waiting(b"b", 1, False), Waiting(b"a", 4, False), Waiting(b"a", 3, False), Waiting(b"a", 2)]
    assert silent_index(waiting, 5) == 2
    assert silent_index(waiting, 3) == 0
    assert silent_index(waiting, 1) is None


@given(WAITING, HELD, st.booleans())
def test_every_client_with_data_is_served(
    waiting: list[Waiting], connections: dict[bytes, int], attacked: bool
) -> None:
    order = admission_order(waiting, connections, attacked=attacked)
    assert len(set(order)) == len(order)
    with_data = [index for index, each in enumerate(waiting) if each.has_data]
    assert sorted(order[: len(with_data)]) == with_data
    ranks = [connections.get(waiting[index].source, 0) for index in order[: len(with_data)]]
    assert ranks == sorted(ranks)
    assert attacked or sorted(order) == list(range(len(waiting)))


@given(WAITING, st.integers(0, 20))
def test_no_client_with_data_is_evicted(waiting: list[Waiting], before: int) -> None:
    index = silent_index(waiting, before)
    silent = [each for each in waiting if not each.has_data and each.arrived < before]
    assert (index is None) == (not silent)
    assert index is None or waiting[index] in silent


def test_a_queue_returns_sockets_with_data_and_closes_old_ones() -> None:
    queue = AcceptQueue(3)
    pairs = [socket.socketpair() for _ in range(3)]
    for number, (server, _) in enumerate(pairs):
        assert not queue.full
        queue.add(server, b"a", float(number))
    assert queue.full
    pairs[1][1].send(b"x")
    assert queue.data_count() == 1
    assert queue.has_data()
    assert queue.take(3, {}, attacked=False, data_only=True) == [(pairs[1][0], b"a")]
    queue.expire(1)
    assert len(queue) == 1
    assert pairs[0][1].recv(1) == b""
    assert not queue.drop_silent(2)
    assert queue.drop_silent(3)
    assert len(queue) == 0
    assert pairs[2][1].recv(1) == b""
    queue.add(pairs[1][0], b"a", 0)
    queue.close()
    assert pairs[1][0].fileno() == -1
    for _, client in pairs:
        client.close()
