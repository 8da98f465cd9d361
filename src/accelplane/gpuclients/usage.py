"""Sums of the use of GPUs by containers, from the clients that successive walks find.

Counters are sums of increases: a client that closes its file leaves its part in the sum. What a client does after the
last walk that finds it is not counted.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from accelplane.gpuclients.fdinfo import Cycles, DrmClient
from accelplane.gpuclients.messages import ContainerUse, DeviceUse, Report

_NANOSECOND = 1e-9
_MAX_CLIENTS = 16_384


class Container(NamedTuple):
    """`id` is the runtime's ID while `name` is not known, otherwise empty."""

    pod: str
    name: str
    id: str = ""


class Found(Struct, frozen=True):
    """A client as one walk found it. `at` is the monotonic time of the reading."""

    container: Container
    pid: int
    client: DrmClient
    at: float


class Walk(Struct, frozen=True, kw_only=True):
    """What one walk found. `present` are all processes, `visited` those whose files were read or need not be read."""

    found: Sequence[Found] = ()
    present: Collection[int] = frozenset()
    visited: Collection[int] = frozenset()
    complete: bool = True


class _Known(Struct):
    """A client that is open, as the last walk that saw it. `busy` and `cycles` are the largest values so far."""

    container: Container
    pid: int
    at: float
    client: DrmClient
    busy: dict[str, int]
    cycles: dict[str, Cycles]


_Key = tuple[str, int]  # BDF and client ID
_Sum = tuple[Container, str]  # container and BDF


class Usage:
    """The sums since the start. The caller serializes its calls."""

    def __init__(self) -> None:
        self._clients: dict[_Key, _Known] = {}
        self._seconds: dict[_Sum, dict[str, float]] = {}
        self._drivers: dict[str, str] = {}

    def update(self, walk: Walk) -> None:
        """Adds what clients used since the last walk."""
        seen: set[_Key] = set()
        for found in walk.found:
            key = (found.client.bdf, found.client.id)
            if key not in seen:  # the same file in another descriptor or process
                seen.add(key)
                self._add(key, found)
        removed = [
            key
            for key, known in self._clients.items()
            if key not in seen and (known.pid in walk.visited or known.pid not in walk.present)
        ]
        for key in removed:
            del self._clients[key]

    def forget(self, pods: Collection[str]) -> None:
        """Drops the sums and the clients of pods."""
        self._clients = {key: known for key, known in self._clients.items() if known.container.pod not in pods}
        self._seconds = {key: sums for key, sums in self._seconds.items() if key[0].pod not in pods}

    @property
    def pids(self) -> Collection[int]:
        """The processes in which clients were found."""
        return {known.pid for known in self._clients.values()}

    def report(self, pods: Collection[str], *, incomplete: bool, processes: int) -> Report:
        """The use by the given pods."""
        open_clients: dict[_Sum, list[DrmClient]] = {}
        for known in self._clients.values():
            open_clients.setdefault((known.container, known.client.bdf), []).append(known.client)
        devices: dict[Container, list[DeviceUse]] = {}
        for container, bdf in sorted(self._seconds):
            if container.pod in pods:
                clients = open_clients.get((container, bdf), ())
                use = DeviceUse(
                    bdf=bdf,
                    driver=self._drivers[bdf],
                    clients=len(clients),
                    busy_seconds=self._seconds[container, bdf],
                    memory_bytes=_memory(clients),
                )
                devices.setdefault(container, []).append(use)
        containers = [
            ContainerUse(pod=container.pod, name=container.name, devices=tuple(uses))
            for container, uses in devices.items()
        ]
        return Report(containers=tuple(containers), incomplete=incomplete, processes=processes)

    def _add(self, key: _Key, found: Found) -> None:
        client = found.client
        known = self._clients.get(key)
        if known is None:
            if len(self._clients) >= _MAX_CLIENTS:
                return
            known = _Known(found.container, found.pid, found.at, client, {}, dict(client.cycles))
            self._clients[key] = known
        increases = busy_increases(known.busy, client.busy)
        shares = cycle_shares(known.cycles, client.cycles, client.capacity)
        self._drivers[client.bdf] = client.driver
        sums = self._seconds.setdefault((known.container, client.bdf), {})
        for engine in (*client.busy, *client.cycles):
            sums.setdefault(engine, 0.0)
        for engine, nanoseconds in increases.items():
            sums[engine] += nanoseconds * _NANOSECOND
        for engine, share in shares.items():
            if engine not in client.busy:
                sums[engine] += share * max(0.0, found.at - known.at)
        for engine in increases:
            known.busy[engine] = client.busy[engine]
        known.cycles = {
            engine: Cycles(max(cycles.used, known.cycles[engine].used if engine in known.cycles else 0), cycles.total)
            for engine, cycles in client.cycles.items()
        }
        known.pid, known.at, known.client = found.pid, found.at, client


def busy_increases(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """The increases by engine class above the largest values `before`. The kernel may return smaller values."""
    return {engine: value - before.get(engine, 0) for engine, value in now.items() if value > before.get(engine, 0)}


def cycle_shares(
    before: Mapping[str, Cycles], now: Mapping[str, Cycles], capacity: Mapping[str, int]
) -> dict[str, float]:
    """The share of the time between two readings in which engines of a class were busy, at most their number."""
    shares: dict[str, float] = {}
    for engine, cycles in now.items():
        if engine in before:
            used, total = cycles.used - before[engine].used, cycles.total - before[engine].total
            if used > 0 and total > 0:
                shares[engine] = min(used / total, float(capacity.get(engine, 1)))
    return shares


def _memory(clients: Iterable[DrmClient]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for client in clients:
        for region, kinds in client.memory.items():
            sizes = sums.setdefault(region, {})
            for kind, size in kinds.items():
                sizes[kind] = sizes.get(kind, 0) + size
    return sums
