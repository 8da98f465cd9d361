"""Accepted sockets without a connection object: clients that wait for a place among the connections.

The kernel's queue is first in, first out: a client waits until the server has accepted all before it, which may be
those of an attacker. From this queue the server selects. A waiting socket has no TLS session, so it takes a quarter of
the memory of a connection.
"""

import fcntl
import itertools
import socket
import sys
import termios
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

_TCP_ESTABLISHED = 1


class Waiting(Struct, frozen=True):
    """A client that waits: its address, the time of its arrival, and whether it has sent data."""

    source: bytes
    arrived: float
    has_data: bool = True


def admission_order(waiting: Sequence[Waiting], held: Mapping[bytes, int], *, attacked: bool) -> list[int]:
    """Indices of the clients in the order in which they get a connection.

    Clients that have sent data are first: the others would only hold the connection. Then those whose addresses hold
    the fewest connections without a request, and of these the oldest.

    During an attack, clients without data get no connection, and the newest and the oldest clients take turns: a client
    behind many attackers is served immediately if no others follow, and after a bounded time if many follow.
    """

    def rank(index: int) -> tuple[bool, int, float]:
        each = waiting[index]
        return not each.has_data, held.get(each.source, 0), each.arrived

    if not attacked:
        return sorted(range(len(waiting)), key=rank)
    oldest_first = sorted((index for index, each in enumerate(waiting) if each.has_data), key=rank)
    groups = itertools.groupby(oldest_first, key=lambda index: held.get(waiting[index].source, 0))
    return [index for _, group in groups for index in _from_both_ends(list(group))]


def _from_both_ends(indices: Sequence[int]) -> Iterator[int]:
    """The last one, the first one, the second to last one and so on."""
    for turn in range(len(indices)):
        yield indices[turn // 2] if turn % 2 else indices[-1 - turn // 2]


def silent_index(waiting: Sequence[Waiting], before: float) -> int | None:
    """Index of the client that is closed if there are too many, None if there is none.

    Only clients are closed that arrived before that time and have sent nothing: the oldest one of the address with the
    most of them.
    """
    silent = [index for index, each in enumerate(waiting) if not each.has_data and each.arrived < before]
    counts = Counter(waiting[index].source for index in silent)
    return min(silent, key=lambda index: (-counts[waiting[index].source], waiting[index].arrived), default=None)


class AcceptQueue:
    """The waiting sockets of a server, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sockets: list[tuple[socket.socket, bytes, float]] = []

    def __len__(self) -> int:
        return len(self._sockets)

    @property
    def full(self) -> bool:
        """Whether another socket has no place."""
        return len(self._sockets) >= self._limit

    def add(self, accepted: socket.socket, source: bytes, now: float) -> None:
        """Adds a socket of a client with this address."""
        accepted.setblocking(False)
        self._sockets.append((accepted, source, now))

    def has_data(self) -> bool:
        """Whether a waiting client has sent data."""
        return any(has_unread_data(each) for each, _, _ in self._sockets)

    def data_count(self) -> int:
        """The number of waiting clients that have sent data."""
        return sum(has_unread_data(each) for each, _, _ in self._sockets)

    def take(
        self, count: int, held: Mapping[bytes, int], *, attacked: bool, data_only: bool = False
    ) -> list[tuple[socket.socket, bytes]]:
        """Removes and returns at most `count` sockets with their addresses, in the order of `admission_order`."""
        waiting = self._waiting()
        order = admission_order(waiting, held, attacked=attacked)
        selected = [index for index in order if waiting[index].has_data or not data_only][:count]
        found = [self._sockets[index][:2] for index in selected]
        for index in sorted(selected, reverse=True):
            del self._sockets[index]
        return found

    def drop_silent(self, before: float) -> bool:
        """Closes one socket to make a place, see `silent_index`; returns whether there was one."""
        index = silent_index(self._waiting(), before)
        if index is not None:
            self._sockets.pop(index)[0].close()
        return index is not None

    def expire(self, before: float) -> None:
        """Closes the sockets that were accepted before this time."""
        for each, _, arrived in self._sockets:
            if arrived < before:
                each.close()
        self._sockets = [each for each in self._sockets if each[2] >= before]

    def close(self) -> None:
        """Closes all sockets."""
        for each, _, _ in self._sockets:
            each.close()
        self._sockets.clear()

    def _waiting(self) -> list[Waiting]:
        return [Waiting(source, arrived, has_unread_data(each)) for each, source, arrived in self._sockets]


def has_unread_data(client: socket.socket) -> bool:
    """Whether the kernel has data of the client that is not read yet."""
    unread = fcntl.ioctl(client, termios.FIONREAD, bytes(4))
    return int.from_bytes(unread, sys.byteorder) > 0


def is_disconnected(client: socket.socket) -> bool:
    """Whether the client has closed its side, also if data before it is not read. See tcp(7), TCP_INFO."""
    try:
        state = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:  # no TCP socket, or closed
        return False
    return state != _TCP_ESTABLISHED
