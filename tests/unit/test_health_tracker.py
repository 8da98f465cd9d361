"""Health of units that come, stay and leave while a plugin is asked about them."""

from collections.abc import Mapping, Sequence

from accelplane.devices import Device, Verdict
from accelplane.host import Host
from accelplane.node.health import HealthTracker
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

CARD = Device(resource="gadget", id="card0-0", unit="card0", topology=None)


class Asked(Plugin[Config]):
    """Finds everything bad; while it is asked, the units leave if it was told so."""

    namespace = "example.com"

    def __init__(self, tracker: HealthTracker, *, leaving: bool) -> None:
        super().__init__()
        self._tracker = tracker
        self._leaving = leaving

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        if self._leaving:
            self._tracker.keep(())
        return {device.unit: Verdict("bad", "dented") for device in devices}


async def test_a_unit_that_leaves_while_it_is_judged_leaves_no_judgement_behind() -> None:
    tracker = HealthTracker("gadgets")
    tracker.keep(("card0",))
    await tracker.judge(Asked(tracker, leaving=True), Host(), [CARD])
    assert tracker.states == {}
    assert tracker.applied(CARD).healthy


async def test_the_first_verdict_on_a_unit_counts_at_once() -> None:
    tracker = HealthTracker("gadgets")
    tracker.keep(("card0",))
    await tracker.judge(Asked(tracker, leaving=False), Host(), [CARD])
    assert not tracker.applied(CARD).healthy
    assert tracker.applied(CARD).reason == "dented"
