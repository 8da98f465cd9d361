"""Metrics of the fleet server."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_BYTES = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576, 2_097_152)

Counts = Callable[[], tuple[int, Mapping[str, int], Mapping[str, int]]]


class FleetMetrics(Collector):
    """Adds the metrics of a fleet to a registry until `close`. `counts` returns generation, nodes and agents."""

    def __init__(self, registry: CollectorRegistry, counts: Counts) -> None:
        self._registry = registry
        self._counts = counts
        self._seconds = Histogram(
            "accelplane_fleet_inventory_seconds", "Time to receive an inventory", buckets=_SECONDS, registry=registry
        )
        self._bytes = Histogram(
            "accelplane_fleet_inventory_bytes", "Size of received inventories", buckets=_BYTES, registry=registry
        )
        registry.register(self)

    def observe(self, seconds: float, size: int) -> None:
        """Counts an inventory that was received."""
        self._seconds.observe(seconds)
        self._bytes.observe(size)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        generation, nodes, agents = self._counts()
        yield GaugeMetricFamily("accelplane_fleet_generation", "Generation of the snapshot", value=generation)
        for name, text, counted in (("nodes", "Nodes by state", nodes), ("agents", "Agents by state", agents)):
            family = GaugeMetricFamily(f"accelplane_fleet_{name}", text, labels=("state",))
            for state, count in sorted(counted.items()):
                family.add_metric((state,), count)
            yield family

    def close(self) -> None:
        """Removes the metrics."""
        for each in (self, self._seconds, self._bytes):
            self._registry.unregister(each)
