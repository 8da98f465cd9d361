"""Measurements of plugins: one read per plugin at a time, and none delays or hides the others."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import pytest
from waiting import until

from accelplane.devices import Device, Inventory
from accelplane.host import Host
from accelplane.pages.measurements import Measurements
from accelplane.plugins import Plugin, Sample
from accelplane.plugins.base import Config


class Meter(Plugin[Config]):
    """Measures what `read` returns or raises."""

    namespace = "meters.example.com"

    def __init__(self, read: Callable[[], object]) -> None:
        super().__init__()
        self.read = read
        self.reads = 0

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterable[Sample]:
        self.reads += 1
        return [Sample("meter_value", "A value.", {"device": device.id}, self.read()) for device in devices]  # type: ignore[arg-type]


class PluginWithoutMeasurements(Plugin[Config]):
    namespace = "unmeasured.example.com"


def fail(error: Exception) -> Callable[[], object]:
    def read() -> object:
        raise error

    return read


FOUND = Inventory.of([Device(resource="meter", id="m0")])


class Setup:
    """Measurements of `plugins`, of which a test may release the hanging ones."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.plugins: dict[str, Plugin[Config]] = {}
        self.measurements = Measurements(
            lambda: {name: (plugin, FOUND) for name, plugin in self.plugins.items()}, "/", timeout=0.1
        )

    def hang(self) -> float:
        self.released.wait(60)
        return 2.0

    async def values(self) -> list[float]:
        async with asyncio.timeout(10):
            return [sample.value for sample in await self.measurements.take()]


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    instance = Setup()
    yield instance
    instance.released.set()
    await instance.measurements.close()


async def test_samples_of_all_plugins_are_returned_in_the_order_of_the_plugins(setup: Setup) -> None:
    setup.plugins = {"b": Meter(lambda: 1.0), "none": PluginWithoutMeasurements(), "a": Meter(lambda: 2.0)}
    assert await setup.values() == [1.0, 2.0]


async def test_a_hanging_plugin_is_omitted_and_not_read_again_until_it_returns(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Meter(setup.hang)
    setup.plugins = {"hanging": hanging, "well": Meter(lambda: 1.0)}
    assert await setup.values() == [1.0]
    setup.measurements.timeout = 3600  # no call waits for a read that is known to hang
    assert await setup.values() == [1.0]
    assert hanging.reads == 1
    assert [record.message for record in caplog.records] == ["hanging: measure: no result within 0.1 s"]
    setup.released.set()

    async def is_measured() -> bool:
        return await setup.values() == [2.0, 1.0]

    await until(is_measured)
    assert hanging.reads == 2


async def test_concurrent_calls_share_one_read(setup: Setup) -> None:
    hanging = Meter(setup.hang)
    setup.plugins = {"hanging": hanging}
    setup.measurements.timeout = 3600
    calls = [asyncio.create_task(setup.values()) for _ in range(3)]
    await until(lambda: hanging.reads == 1)
    setup.released.set()
    assert await asyncio.gather(*calls) == [[2.0]] * 3
    assert hanging.reads == 1


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (fail(ZeroDivisionError("no turns")), "ZeroDivisionError: no turns"),
        (fail(StopIteration()), "StopIteration: "),
        (lambda: None, "meter_value: found None, expected a number and a help text"),
    ],
    ids=["raises", "stop-iteration", "value"],
)
async def test_a_failing_plugin_is_omitted_and_its_problem_is_logged_once(
    setup: Setup, caplog: pytest.LogCaptureFixture, read: Callable[[], object], problem: str
) -> None:
    failing = Meter(read)
    setup.plugins = {"failing": failing, "well": Meter(lambda: 1.0)}
    assert [await setup.values() for _ in range(2)] == [[1.0], [1.0]]
    failing.read = lambda: 2.0
    assert await setup.values() == [2.0, 1.0]
    message = f"failing: measure: {problem}"
    assert [record.message for record in caplog.records] == [message]
    failing.read = read
    assert await setup.values() == [1.0]
    assert [record.message for record in caplog.records] == [message] * 2, "a problem that returns is logged again"


async def test_a_sample_with_an_invalid_name_does_not_reach_the_page(setup: Setup) -> None:
    class InvalidMeasurementNames(Meter):
        def measure(self, host: Host, devices: Iterable[Device]) -> Iterator[Sample]:
            yield Sample("meter-value", "A value.", {}, 1.0)

    setup.plugins = {"misnamed": InvalidMeasurementNames(lambda: 1.0), "well": Meter(lambda: 1.0)}
    assert await setup.values() == [1.0]


async def test_disabling_a_plugin_does_not_wait_for_its_hanging_read(setup: Setup) -> None:
    setup.plugins = {"hanging": Meter(setup.hang), "well": Meter(lambda: 1.0)}
    assert await setup.values() == [1.0]
    del setup.plugins["hanging"]
    setup.measurements.timeout = 3600
    assert await setup.values() == [1.0]


async def test_close_ends_all_tasks_while_a_read_hangs(setup: Setup) -> None:
    setup.plugins = {"hanging": Meter(setup.hang)}
    assert await setup.values() == []
    async with asyncio.timeout(10):
        await setup.measurements.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
