"""The health of devices about which the kernel has sent events."""

import threading
from collections.abc import Iterable, Iterator

import pytest

from accelplane.devices import Device, Inventory
from accelplane.host import Host, Uevent
from accelplane.node import health_loop
from accelplane.node.context import PluginContext
from accelplane.node.hardware_events import HardwareEvents
from accelplane.node.health_loop import HealthLoop
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.readings import DevicePlan

CARD = "/devices/pci0000:00/0000:00:02.0"


class Cards(Plugin[Config]):
    """One card, the files of which may block."""

    namespace = "x.example.com"

    def __init__(self) -> None:
        super().__init__(Config())
        self.files = threading.Event()
        self.files.set()
        self.reads = 0

    def scan(self, host: Host) -> Iterator[Device]:
        yield Device(resource="r", id="card0-0", unit="card0")

    def readings(self, host: Host, devices: Iterable[Device]) -> Iterator[DevicePlan]:
        self.reads += 1
        self.files.wait()
        yield DevicePlan(device="card0", bdf="0000:00:02.0", units=("card0",))


async def test_a_wedged_device_stays_unhealthy_while_its_files_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health_loop, "_ADDRESSES_TIMEOUT", 0.1)
    plugin, events, found = Cards(), HardwareEvents(), [Inventory()]

    async def publish() -> None: ...

    loop = HealthLoop(PluginContext("gpu", plugin, Settings(), events=events), lambda: found[0], publish)

    async def check() -> dict[str, str]:
        found[0] = Inventory.of(plugin.namespace, plugin.scan(Host()))
        loop.tracker.states.clear()
        await loop.check_new_devices()
        return {unit: state.phase.value for unit, state in loop.tracker.states.items()}

    events.record(Uevent("change", f"{CARD}/drm/card0", "drm", {"WEDGED": "rebind"}))
    try:
        assert await check() == {"card0": "unhealthy"}
        plugin.files.clear()
        for _ in range(3):
            assert await check() == {"card0": "unhealthy"}
        assert plugin.reads == 2  # one thread is blocked
        assert caplog.text.count("the devices of events are unknown") == 1
    finally:
        plugin.files.set()
        assert await loop.thread.wait_idle("gpu", 60)
