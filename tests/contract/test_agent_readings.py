"""Readings of devices by an agent: shared by readers, none delayed by a device that does not answer."""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

import pytest
from threadlimit import ThreadLimit
from trees import write
from waiting import until

from accelplane.devices import Device, Inventory
from accelplane.host import Host
from accelplane.host.blocking import ThreadQueue
from accelplane.pages.readings import NodeReadings, Readings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.readings import DevicePlan, Family, Source, Value

LEVEL = Family("meters_level", "A level.")
CHANGING = "/proc/sys/kernel/random/uuid"  # has another text at each read


class Meters(Plugin[Config]):
    """Devices whose files are read by functions of the test."""

    namespace = "meters.example.com"

    def __init__(self, **reads: Callable[[], float]) -> None:
        super().__init__()
        self.reads = reads
        self.plans = 0
        self.count: Counter[str] = Counter()

    def readings(self, host: Host, devices: Iterable[Device]) -> Iterable[DevicePlan]:
        self.plans += 1
        for device in devices:
            source = Source(path=CHANGING, parse=self._parse(device.unit))
            yield DevicePlan(device=device.unit, units=(device.unit,), sources=(source,))

    def _parse(self, name: str) -> Callable[[str], Sequence[Value]]:
        def parse(_text: str) -> Sequence[Value]:
            self.count[name] += 1
            return (Value(LEVEL, "", self.reads[name]()),)

        return parse


class Setup:
    """Readings with a clock that the test sets, of plugins by name."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.released = threading.Event()
        self.sources: dict[str, tuple[Plugin[Config], Inventory]] = {}
        self.readings = Readings(lambda: self.sources, "/", held=lambda: (), read_timeout=0.05, clock=lambda: self.now)

    def add(self, name: str, plugin: Meters) -> Meters:
        found = [Device(resource="meter", id=unit) for unit in plugin.reads]
        self.sources[name] = plugin, Inventory.of(found)
        return plugin

    def hang(self) -> float:
        self.released.wait(60)
        return 9.0

    async def take(self) -> NodeReadings:
        self.now += 1
        async with asyncio.timeout(10):
            return await self.readings.take()

    async def levels(self) -> list[str]:
        """The samples of the page: device and value; `stuck` for a device that is not read."""
        found: list[str] = []
        for device in (await self.take()).devices:
            for family, lines in device.lines.items():
                for line in lines:
                    name = line.partition('device="')[2].partition('"')[0]
                    if family == LEVEL:
                        found.append(f"{name} {line.rpartition(' ')[2]}")
                    elif family.name == "accelplane_device_stuck":
                        found.append(f"{name} stuck")
        return found


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    instance = Setup()
    yield instance
    instance.released.set()
    await instance.readings.close()


async def test_readings_of_all_plugins_are_on_the_page(setup: Setup) -> None:
    setup.add("a", Meters(m0=lambda: 1.0, m1=lambda: 2.5))
    setup.add("b", Meters(m2=lambda: 3.0))
    assert await setup.levels() == ["m0 1", "m1 2.5", "m2 3"]
    assert (await setup.take()).outcomes == {"a": {"ok": 4}, "b": {"ok": 2}}


class Files(Plugin[Config]):
    """A device whose file is below the root."""

    namespace = "files.example.com"

    def __init__(self, number: Callable[[str], float] = float) -> None:
        super().__init__()
        self.number = number

    def readings(self, host: Host, devices: Iterable[Device]) -> Iterable[DevicePlan]:
        source = Source(path="/sys/devices/d0/level", parse=lambda text: (Value(LEVEL, "", self.number(text)),))
        yield DevicePlan(device="d0", units=("d0",), power="/sys/devices/d0/power", sources=(source,))


async def test_only_directories_stay_open_and_only_until_the_next_scan(tmp_path: Path) -> None:
    write(tmp_path / "sys/devices/d0/level", "3")
    write(tmp_path / "sys/devices/d0/power/runtime_status", "active")
    sources: dict[str, tuple[Plugin[Config], Inventory]] = {}
    now = [1000.0]
    readings = Readings(lambda: sources, str(tmp_path), held=lambda: (), clock=lambda: now[0])

    async def open_after_a_reading() -> list[str]:
        now[0] += 2
        found = (await readings.take()).devices
        assert [line for each in found for lines in each.lines.values() for line in lines if line.endswith(" 3")]
        return open_below(tmp_path)

    plugin = Files()
    sources["files"] = plugin, Inventory()
    opened = await open_after_a_reading()
    assert "sys/devices/d0" in opened
    assert all((tmp_path / path).is_dir() for path in opened)
    assert await open_after_a_reading() == opened
    (tmp_path / "sys/devices/d0").rename(tmp_path / "sys/devices/d1")
    write(tmp_path / "sys/devices/d0/level", "3")
    sources["files"] = plugin, Inventory()  # as a scan makes it
    assert "sys/devices/d1" not in await open_after_a_reading()
    await readings.close()
    await until(lambda: not open_below(tmp_path))  # after the end of the thread that has read


async def test_directories_are_closed_when_nobody_reads(tmp_path: Path) -> None:
    write(tmp_path / "sys/devices/d0/level", "3")
    source = Files(), Inventory()
    now = [1000.0]
    readings = Readings(
        lambda: {"files": source}, str(tmp_path), held=lambda: (), open_seconds=0.5, clock=lambda: now[0]
    )
    for _ in range(2):
        now[0] += 2
        assert (await readings.take()).devices
        assert "sys/devices/d0" in open_below(tmp_path)
        await until(lambda: not open_below(tmp_path))
    await readings.close()


async def test_a_thread_that_is_abandoned_has_no_open_directories(tmp_path: Path) -> None:
    write(tmp_path / "sys/devices/d0/level", "3")
    released = threading.Event()
    source = Files(lambda text: float(text) if released.wait(60) else 0.0), Inventory()
    readings = Readings(lambda: {"files": source}, str(tmp_path), held=lambda: (), read_timeout=0.05)
    try:
        await readings.take()
        assert readings.blocked == ["d0"]
        assert open_below(tmp_path) == []
    finally:
        released.set()
        await readings.close()


def open_below(root: Path) -> list[str]:
    """The files below `root` that this process has open."""
    targets = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sorted(os.path.relpath(target, root) for target in targets if f"{target}/".startswith(f"{root}/"))


async def test_plugins_are_read_one_at_a_time(setup: Setup) -> None:
    reading = threading.Lock()

    def read() -> float:
        assert reading.acquire(blocking=False)
        time.sleep(0.001)
        reading.release()
        return 1.0

    for name in ("a", "b", "c"):
        setup.add(name, Meters(**{f"{name}0": read, f"{name}1": read}))
    readings = Readings(lambda: setup.sources, "/", held=lambda: (), queue=ThreadQueue(stall_timeout=60))
    found = (await readings.take()).devices
    await readings.close()
    assert [device.device for device in found] == ["a0", "a1", "b0", "b1", "c0", "c1"]


async def test_a_reading_younger_than_the_interval_is_used_again(setup: Setup) -> None:
    plugin = setup.add("a", Meters(m0=lambda: 1.0))
    await setup.take()
    setup.now += 0.5
    await setup.readings.take()
    assert plugin.count["m0"] == 1
    await setup.take()
    assert plugin.count["m0"] == 2


async def test_concurrent_readers_share_one_read_and_one_may_be_cancelled(setup: Setup) -> None:
    plugin = setup.add("a", Meters(m0=setup.hang))
    setup.readings = Readings(lambda: setup.sources, "/", held=lambda: (), clock=lambda: setup.now)
    readers = [asyncio.create_task(setup.readings.take()) for _ in range(3)]
    await until(lambda: plugin.count["m0"] == 1)
    readers[0].cancel()
    setup.released.set()
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1] is results[2]
    assert plugin.count["m0"] == 1


async def test_at_the_limit_of_threads_devices_are_left_out_until_the_next_reading(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup.add("a", Meters(m0=lambda: 1.0))
    setup.add("b", Meters(m1=lambda: 2.0))
    ThreadLimit(monkeypatch, failures=1)
    assert await setup.levels() == ["m1 2"]
    assert caplog.messages == ["a: readings: can't start new thread"]
    assert await setup.levels() == ["m0 1", "m1 2"]


async def test_a_blocked_read_marks_its_device_and_other_devices_are_read(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = setup.add("a", Meters(m0=lambda: 1.0, m1=setup.hang, m2=lambda: 3.0))
    assert await setup.levels() == ["m0 1", "m1 stuck", "m2 3"]
    assert await setup.levels() == ["m0 1", "m1 stuck", "m2 3"]
    assert plugin.count == {"m0": 2, "m1": 1, "m2": 2}
    assert caplog.messages == ["a: m1: a read takes longer than 0.05 s; the device is not read for 60 s"]


async def test_after_a_blocked_read_devices_are_read_at_the_same_time(setup: Setup) -> None:
    setup.readings = Readings(lambda: setup.sources, "/", held=lambda: (), clock=lambda: setup.now)
    barrier = threading.Barrier(4)

    def read() -> float:
        barrier.wait(60)  # for the reads of the other three devices
        return 1.0

    plugin = setup.add("a", Meters(m0=setup.hang, m1=read, m2=read, m3=read, m4=read))
    assert await setup.levels() == ["m0 stuck", "m1 1", "m2 1", "m3 1", "m4 1"]
    plugin.reads |= {f"m{number}": setup.hang for number in range(1, 5)}
    assert await setup.levels() == [f"m{number} stuck" for number in range(5)]
    assert len(setup.readings.blocked) == 5


async def test_a_second_plan_of_a_device_is_reported_and_not_used(
    setup: Setup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = setup.add("a", Meters(m0=lambda: 1.0, m1=lambda: 2.0))
    readings = plugin.readings
    monkeypatch.setattr(plugin, "readings", lambda *given: [*readings(*given), *readings(*given)])
    assert await setup.levels() == ["m0 1", "m1 2"]
    assert caplog.messages == [
        "a: readings: found two plans of the device 'm0', expected one",
        "a: readings: found two plans of the device 'm1', expected one",
    ]


async def test_a_blocked_device_is_read_again_with_backoff(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    releases: list[threading.Event] = []

    def hang() -> float:
        releases.append(threading.Event())
        releases[-1].wait(60)
        return 1.0

    plugin = setup.add("a", Meters(m0=hang))
    for times, pause in enumerate((60, 120, 240, 480, 600, 600), 1):
        assert await setup.levels() == ["m0 stuck"]
        assert caplog.messages[-1].endswith(f"not read for {pause} s")
        releases[-1].set()
        setup.now += pause - 2
        assert await setup.levels() == ["m0 stuck"]
        assert plugin.count["m0"] == times
        setup.now += 2
        await until(lambda: not setup.readings.blocked)
    plugin.reads = {"m0": lambda: 4.0}
    assert await setup.levels() == ["m0 4"]


async def test_a_device_with_a_blocked_thread_gets_no_second_thread(setup: Setup) -> None:
    plugin = setup.add("a", Meters(m0=setup.hang))
    assert await setup.levels() == ["m0 stuck"]
    setup.now += 3600
    assert await setup.levels() == ["m0 stuck"]
    assert plugin.count["m0"] == 1
    setup.released.set()
    await until(lambda: not setup.readings.blocked)
    assert await setup.levels() == ["m0 9"]


async def test_plans_are_made_once_per_scan(setup: Setup) -> None:
    plugin = setup.add("a", Meters(m0=lambda: 1.0))
    await setup.take()
    await setup.take()
    assert plugin.plans == 1
    setup.add("a", plugin)
    await setup.take()
    assert plugin.plans == 2


async def test_a_plan_that_was_begun_for_an_earlier_scan_is_made_again(setup: Setup) -> None:
    """The client of the first page disconnects while the plan is made. Then a device appears."""

    class Slow(Meters):
        def readings(self, host: Host, devices: Iterable[Device]) -> Iterable[DevicePlan]:
            found = list(super().readings(host, devices))
            if self.plans == 1:
                setup.hang()
            return found

    plugin = setup.add("a", Slow(m0=lambda: 1.0))
    client = asyncio.create_task(setup.readings.plans())
    await until(lambda: plugin.plans == 1)
    client.cancel()
    plugin.reads["m1"] = lambda: 2.0
    setup.add("a", plugin)
    setup.released.set()
    assert await setup.levels() == ["m0 1", "m1 2"]


async def test_a_plan_during_a_reading_keeps_what_the_reading_finds(tmp_path: Path) -> None:
    """The file powers the device up, so it is read once a minute: the next reading repeats the value."""
    write(tmp_path / "device/power/runtime_status", "active")
    write(tmp_path / "device/level", "1")
    released, started = threading.Event(), threading.Event()

    class Waking(Meters):
        def readings(self, host: Host, devices: Iterable[Device]) -> Iterable[DevicePlan]:
            for device in devices:
                source = Source(path="/device/level", parse=self.parse, waking=True)
                yield DevicePlan(device=device.unit, units=(device.unit,), sources=(source,), power="/device/power")

        def parse(self, text: str) -> Sequence[Value]:
            started.set()
            released.wait(60)
            return (Value(LEVEL, "", float(text)),)

    setup = Setup()
    setup.readings = Readings(
        lambda: setup.sources, str(tmp_path), held=lambda: (), read_timeout=60, clock=lambda: setup.now
    )
    plugin = setup.add("a", Waking(m0=lambda: 0.0))
    reading = asyncio.create_task(setup.levels())
    await until(started.is_set)
    plugin.reads["m1"] = lambda: 0.0
    setup.add("a", plugin)
    assert [plan.device for plan in (await setup.readings.plans())["a"]] == ["m0", "m1"]
    released.set()
    assert await reading == ["m0 1"]
    write(tmp_path / "device/level", "2")
    assert await setup.levels() == ["m0 1", "m1 2"]
    await setup.readings.close()


async def test_a_failed_plugin_is_omitted_and_its_problem_is_logged_once(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Meters):
        def readings(self, host: Host, devices: Iterable[Device]) -> Iterable[DevicePlan]:
            raise ZeroDivisionError("no turns")

    def fail() -> float:
        raise ZeroDivisionError("no level")

    setup.add("a", Failing(m0=lambda: 1.0))
    setup.add("b", Meters(m1=fail, m2=lambda: 2.0))
    assert [await setup.levels() for _ in range(2)] == [["m2 2"]] * 2
    # Each plugin is read in a thread of its own: the order is not fixed.
    assert sorted(caplog.messages) == [
        "a: readings: ZeroDivisionError: no turns",
        "b: readings of devices: m1: ZeroDivisionError: no level",
    ]


async def test_close_ends_all_tasks_while_a_read_blocks(setup: Setup) -> None:
    plugin = setup.add("a", Meters(m0=setup.hang))
    setup.readings = Readings(lambda: setup.sources, "/", held=lambda: ())
    reader = asyncio.create_task(setup.readings.take())
    await until(lambda: plugin.count["m0"] == 1)
    async with asyncio.timeout(10):
        await setup.readings.close()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert asyncio.all_tasks() == {asyncio.current_task()}
