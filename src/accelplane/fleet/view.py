"""What screens need of the fleet: the current snapshot, its changes, and two questions about one node.

`Fleet` is the implementation for a cluster; tests and demos have others.
"""

from typing import Protocol

from accelplane.report.inventory import Holder

from .model import Cluster, NodeReadings
from .use import UseHistory


class FleetView(Protocol):
    """A cluster as it changes."""

    @property
    def use(self) -> UseHistory:
        """The use of the devices."""
        ...

    def cluster(self) -> Cluster:
        """The current snapshot."""
        ...

    async def changed(self, after: int) -> int:
        """Waits until the generation is greater than `after`, and returns it."""
        ...

    async def holders(self, node: str) -> tuple[Holder, ...]:
        """The containers on a node that request resources of ours, by the API server, at most a minute old.

        For nodes without an agent that answers. Raises `accelplane.apiserver.ApiError`.
        """
        ...

    async def readings(self, node: str) -> NodeReadings:
        """The current values of a node's devices, at most two seconds old."""
        ...
