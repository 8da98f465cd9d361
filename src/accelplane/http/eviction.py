"""Which connections a server at its limit closes to accept others: a pure decision.

A client is silent since its last progress; a client that sends slower than the minimum rate counts as silent, too.
Three rules protect the API server's connections:

- Connections that never had a complete request are closed first.
- Among these, those of the client address with the most such connections are closed first, the longest silent one
  before the others.
- Usually a connection is closed after `stall` at the earliest: a busy API server needs seconds between connect and
  request. But while it is busy with many connections, some of them always continue. So if half of the possible
  connections are silent for `attack_evidence`, and none that had no request sent anything in this time, this is an
  attack. Then `attack_stall` is the minimum for addresses with many connections: clients behind them need not wait.
"""

import math
import socket
from collections import Counter, deque
from collections.abc import Sequence

from msgspec import Struct

from accelplane.http.messages import HttpLimits

# A client that has sent requests is more likely to be the API server than one that has not: it may be idle for longer.
_KEPT_FACTOR = 5
_MAPPED = bytes(10) + b"\xff\xff"  # the prefix of IPv4 addresses in IPv6
_PREFIX = 8  # bytes of an IPv6 network: one client may have all of its addresses


class Candidate(Struct, frozen=True):
    """A connection. `silent_since` is infinite while its client waits for the server."""

    source: bytes
    silent_since: float
    has_requested: bool = False
    idle: bool = False  # between two requests
    closing: bool = False  # has its last response


def source_of(host: str) -> bytes:
    """The client that connections are counted for: an IPv4 address, or a network of IPv6 addresses."""
    if ":" not in host:
        return host.encode()
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return socket.inet_ntoa(packed[-4:]).encode() if packed.startswith(_MAPPED) else packed[:_PREFIX]


def is_attack(candidates: Sequence[Candidate], limits: HttpLimits, now: float) -> bool:
    """Whether half of the possible connections are silent for `attack_evidence`.

    This is evidence only while clients wait and none continues, see `Evidence`. Idle connections count after `stall` if
    one address has many of them.
    """
    crowds = _crowds(candidates, limits)
    silent = sum(
        not each.closing
        and (not each.has_requested or each.source in crowds)
        and now - each.silent_since >= (limits.stall if each.has_requested else limits.attack_evidence)
        for each in candidates
    )
    return 2 * silent >= limits.connections > 0


class Evidence:
    """Recent events that indicate an attack or its absence."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._progress_at = -math.inf
        self._stalls = deque[float](maxlen=max(1, limits.connections // 2))

    def add_progress(self, now: float) -> None:
        """A connection without a complete request has received something: a part of a handshake or of a request."""
        self._progress_at = now

    def add_stall(self, now: float) -> None:
        """A connection without a request was closed after `stall`."""
        self._stalls.append(now)

    def clients_continue(self, now: float) -> bool:
        """Whether there was progress within `attack_evidence`."""
        return now - self._progress_at < self._limits.attack_evidence

    def many_stalls(self, now: float) -> bool:
        """Whether half of the possible connections were closed after `stall` within the same time.

        Clients of an attack may send single bytes, so that `clients_continue` is true.
        """
        return len(self._stalls) == self._stalls.maxlen and now - self._stalls[0] < self._limits.stall


def evictable_at(candidates: Sequence[Candidate], limits: HttpLimits, *, attacked: bool) -> list[float]:
    """From when on each of the connections may be closed."""
    crowds = _crowds(candidates, limits)
    new = Counter(each.source for each in candidates if not each.has_requested)

    def allowed_silence(candidate: Candidate) -> float:
        if candidate.closing:
            return 0.0
        if not candidate.has_requested:
            # Addresses with fewer connections than the average do not attack.
            suspect = attacked and new[candidate.source] * len(new) >= new.total()
            return min(limits.stall, limits.attack_stall) if suspect else limits.stall
        if candidate.source in crowds:
            return limits.attack_idle if attacked else limits.stall
        return _KEPT_FACTOR * limits.stall if candidate.idle else limits.stall

    return [each.silent_since + allowed_silence(each) for each in candidates]


def eviction_order(candidates: Sequence[Candidate], limits: HttpLimits, now: float, *, attacked: bool) -> list[int]:
    """Indices of the connections that may be closed now, in the order in which they are closed."""
    times = evictable_at(candidates, limits, attacked=attacked)
    sources = Counter((each.source, each.has_requested) for each in candidates)

    def rank(index: int) -> tuple[bool, bool, int, float]:
        each = candidates[index]
        return not each.closing, each.has_requested, -sources[each.source, each.has_requested], each.silent_since

    return sorted((index for index, time in enumerate(times) if time <= now), key=rank)


def _crowds(candidates: Sequence[Candidate], limits: HttpLimits) -> set[bytes]:
    """Addresses with half of the possible connections after a request: an API server keeps fewer for later requests."""
    after_request = Counter(each.source for each in candidates if each.has_requested)
    return {source for source, count in after_request.items() if 2 * count >= limits.connections}
