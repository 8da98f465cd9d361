"""The sources of an agent's pages, with values that a test sets."""

from collections.abc import Sequence

from accelplane.pages.inventory_feed import Generation
from accelplane.pages.metrics import Contents
from accelplane.pages.readings import NodeReadings
from accelplane.plugins import Sample


class Fixed:
    """The same values at each request."""

    def __init__(
        self,
        samples: Sequence[Sample] = (),
        readings: NodeReadings = NodeReadings(),  # noqa: B008 - a frozen value
        body: bytes = b"{}",
    ) -> None:
        self.samples = samples
        self.found = readings
        self.body = body

    async def contents(self) -> Contents:
        return Contents(samples=self.samples, readings=self.found)

    async def readings(self) -> NodeReadings:
        return self.found

    async def inventory(self) -> Generation:
        return Generation('"1"', self.body)

    async def next_inventory(self, known: str, seconds: float) -> Generation | None:
        return None
