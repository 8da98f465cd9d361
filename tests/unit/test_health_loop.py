"""The time of health checks: after events of the kernel, and by a thread while devices are healthy."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from threadlimit import ThreadLimit
from trees import gpu_card, link, write
from waiting import until

from accelplane.devices import Device, HealthPolicy, Inventory, Verdict
from accelplane.host import Host
from accelplane.host.uevent import Uevent
from accelplane.node import health_loop, units
from accelplane.node.context import PluginContext
from accelplane.node.hardware_events import HardwareEvents
from accelplane.node.health_loop import HealthLoop
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.plugins.gpu import GpuPlugin

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
        yield Device(resource="r", id="card0-0", unit="card0", path="/sys/class/drm/card0")

    def read_address(self, host: Host, device: Device) -> str:
        """In place of the files of the card."""
        assert device.unit == "card0"
        self.reads += 1
        self.files.wait()
        return "0000:00:02.0"


async def test_a_wedged_device_stays_unhealthy_while_its_files_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health_loop, "_ADDRESSES_TIMEOUT", 0.1)
    plugin, events = Cards(), HardwareEvents()
    monkeypatch.setattr(units, "function_address", plugin.read_address)

    async def publish() -> None: ...

    context = PluginContext("gpu", plugin, Settings(), events=events)
    loop = HealthLoop(context, publish)

    async def check() -> dict[str, str]:
        context.devices.found = Inventory.of(plugin.scan(Host()))
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
        assert caplog.text.count("cannot read the PCI addresses of devices for kernel events") == 1
    finally:
        plugin.files.set()
        assert await loop.thread.wait_idle("gpu", 60)


async def test_a_virtual_function_is_unhealthy_with_its_physical_function(tmp_path: Path) -> None:
    functions = [gpu_card(tmp_path, index) for index in range(3)]
    for function in functions:
        link(tmp_path / "sys/bus/pci/devices" / function.name, function)
    write(functions[0] / "sriov_numvfs", "1\n")
    link(functions[1] / "physfn", functions[0])
    plugin, events, host = GpuPlugin(), HardwareEvents(), Host(tmp_path)

    async def publish() -> None: ...

    context = PluginContext("gpu", plugin, Settings(root=str(tmp_path)), events=events)
    context.devices.found = Inventory.of(plugin.scan(host))
    loop = HealthLoop(context, publish)
    events.record(Uevent("change", f"/devices/pci0000:00/{functions[0].name}/drm/card0", "drm", {"WEDGED": "rebind"}))
    await loop.check_new_devices()
    assert {unit: state.cause for unit, state in loop.tracker.states.items()} == {"card1": "wedged"}


class Meters(Plugin[Config]):
    """Devices whose health is that of `verdict`, checked every 10 ms. `watch` is what a thread finds."""

    namespace = "meters.example.com"
    health_policy = HealthPolicy(interval=0.01, good_verdicts=1, recovery_delay=0.0)

    def __init__(self) -> None:
        super().__init__(Config())
        self.verdict = Verdict("good")
        self.watch: Callable[[], bool] = lambda: self.verdict.answer == "good"
        self.watched = self.checks = 0

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        self.checks += 1
        return {device.unit: self.verdict for device in devices}

    def all_healthy(self, host: Host, devices: Sequence[Device]) -> bool:
        assert [device.id for device in devices] == ["m0-1", "m1"]
        self.watched += 1
        return self.watch()


class Watched:
    """A health loop with two meters."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.plugin = Meters()
        devices = [Device(resource="meter", id=id_, unit=id_[:2]) for id_ in ("m0-0", "m0-1", "m1")]
        context = PluginContext("meters", self.plugin, settings or Settings())
        context.devices.found = Inventory.of(devices)
        self.loop = HealthLoop(context, self.publish)
        self.published = 0

    async def publish(self) -> None:
        self.published += 1

    @property
    def phases(self) -> set[str]:
        return {state.phase.value for state in self.loop.tracker.states.values()}


@contextlib.asynccontextmanager
async def running(settings: Settings | None = None) -> AsyncIterator[Watched]:
    watched = Watched(settings)
    await watched.loop.check_new_devices()
    assert (watched.plugin.checks, watched.phases) == (1, {"healthy"})
    task = asyncio.create_task(watched.loop.run())
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        assert await watched.loop.watch_thread.wait_idle("meters", 60)


async def test_while_all_devices_are_healthy_a_thread_checks_them() -> None:
    async with running() as found:
        await until(lambda: found.plugin.watched >= 5)
        assert (found.plugin.checks, found.published) == (1, 0)


async def test_a_device_reported_by_the_thread_is_checked_and_the_thread_stops_until_it_is_healthy() -> None:
    async with running() as found:
        await until(lambda: found.plugin.watched >= 2)
        found.plugin.verdict = Verdict("bad", "dented")
        await until(lambda: found.published == 1)
        assert found.phases == {"unhealthy"}
        await until(lambda: not found.loop.watch_thread.busy)
        watched, checks = found.plugin.watched, found.plugin.checks
        await until(lambda: found.plugin.checks >= checks + 3)
        assert found.plugin.watched == watched
        found.plugin.verdict = Verdict("good")
        await until(lambda: found.plugin.watched >= watched + 2)
        assert (found.phases, found.published) == ({"healthy"}, 2)


def fail() -> bool:
    raise ZeroDivisionError


@pytest.mark.parametrize("watch", [lambda: False, fail])
async def test_the_check_decides_if_the_thread_is_inconclusive(watch: Callable[[], bool]) -> None:
    async with running() as found:
        found.plugin.watch = watch
        await until(lambda: found.plugin.watched >= 3)
        assert (found.phases, found.published) == ({"healthy"}, 0)
        assert found.plugin.checks >= 2
        assert found.plugin.checks <= found.plugin.watched + 1  # at most one in each interval


async def test_a_read_of_the_thread_that_hangs_delays_no_requested_check() -> None:
    release = threading.Event()
    async with running() as found:
        found.plugin.watch = lambda: release.wait(60)
        await until(lambda: found.plugin.watched == 1)
        found.plugin.verdict = Verdict("bad", "dented")
        found.loop.request()
        await until(lambda: found.phases == {"unhealthy"})
        found.plugin.verdict = Verdict("good")
        await until(lambda: found.phases == {"healthy"})
        checks = found.plugin.checks
        await until(lambda: found.plugin.checks >= checks + 3)  # the loop checks while the thread hangs
        assert found.plugin.watched == 1
        release.set()
        await until(lambda: found.plugin.watched >= 3)


async def test_a_new_device_that_is_unhealthy_ends_the_watch() -> None:
    async with running() as found:
        await until(lambda: found.plugin.watched >= 1)
        found.plugin.watch = lambda: True
        found.plugin.verdict = Verdict("bad", "dented")
        del found.loop.tracker.states["m1"]
        await found.loop.check_new_devices()
        await until(lambda: not found.loop.watch_thread.busy)
        checks = found.plugin.checks
        await until(lambda: found.plugin.checks >= checks + 2)


async def test_devices_that_are_seldom_checked_are_not_watched() -> None:
    async with running(Settings(health_interval=60)) as found:
        found.loop.request()
        await until(lambda: found.plugin.checks == 2)
        assert not found.loop.watch_thread.busy


async def test_at_the_limit_of_threads_the_loop_checks_until_a_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = ThreadLimit(monkeypatch, failures=2)
    async with running() as found:
        await until(lambda: found.plugin.watched >= 2)
        assert limit.failures == 0
        assert found.plugin.checks >= 3
