"""The agent's HTTP pages, as a scraper, a probe and a curious administrator see them."""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator

import pytest
from conftest import Start
from kubelets import Kubelet
from waiting import until

from accelplane.devices import Device, Resource, Skipped
from accelplane.host import Host
from accelplane.node.agent import Agent
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.plugins import Plugin, Sample, ScanError
from accelplane.plugins.base import Config

Get = Callable[..., Awaitable[tuple[int, str]]]


class Meters(Plugin[Config]):
    """Two devices, one sick, one thing passed over; counts what a device did."""

    namespace = "meters.example.com"
    blind = False

    def scan(self, host: Host) -> Iterator[Device | Resource | Skipped]:
        if self.blind:
            raise ScanError("the lamp is out")
        yield Device(resource="meter", id="m0", topology=None)
        yield Device(resource="meter", id="m1", topology=None, health="Unhealthy", reason="dented")
        yield Skipped("m2", "somebody else's")

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterator[Sample]:
        for device in devices:
            yield Sample("meter_turns_total", "Turns of the wheel.", {"device": device.id}, 7)


@pytest.fixture
def port(unused_tcp_port: int) -> int:
    return unused_tcp_port


@pytest.fixture
def get(port: int) -> Get:
    """`await get("/path")`: status code and body."""

    async def get(path: str, method: str = "GET", raw: bytes | None = None) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw or f"{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split()[1]), body

    return get


async def looking(agent: Agent) -> None:
    """Returns when the agent has its pages up and has looked once."""
    await until(lambda: "meters" in agent.runners and agent.runners["meters"].scan.completed.is_set())


async def test_the_metrics_page_counts_devices_registrations_lists_and_allocations(
    start_agent: Start, kubelet: Kubelet, get: Get, port: int
) -> None:
    await start_agent({"http_address": f"127.0.0.1:{port}"}, meters=Meters())
    await kubelet.until(lambda resources: resources.get("meters.example.com/meter") == (2, 1))
    await kubelet.run_pod("a", {"meters.example.com/meter": 1})
    code, text = await get("/metrics")
    assert code == 200
    values = dict(re.findall(r"^([a-z_]+(?:\{.*\})?) (\S+)$", text, re.MULTILINE))
    resource = 'resource="meters.example.com/meter"'
    assert values[f'accelplane_devices{{health="Healthy",{resource}}}'] == "1.0"
    assert values[f'accelplane_devices{{health="Unhealthy",{resource}}}'] == "1.0"
    assert values[f"accelplane_registered{{{resource}}}"] == "1.0"
    assert values[f"accelplane_registrations_total{{{resource}}}"] == "1.0"
    assert float(values[f"accelplane_lists_sent_total{{{resource}}}"]) >= 1
    assert values[f"accelplane_allocation_seconds_count{{{resource}}}"] == "1.0"
    assert values[f"accelplane_allocation_failures_total{{{resource}}}"] == "0.0"
    assert values['accelplane_skipped{plugin="meters"}'] == "1.0"
    assert values['meter_turns_total{device="m0"}'] == "7.0"
    assert "process_resident_memory_bytes" in values


async def test_readiness_follows_registration_and_scans(
    start_agent: Start, idle_kubelet: Kubelet, get: Get, port: int
) -> None:
    plugin = Meters()
    agent = await start_agent({"http_address": f"127.0.0.1:{port}"}, meters=plugin)
    await looking(agent)
    code, text = await get("/readyz")
    assert code == 503
    assert "meters.example.com/meter" in text
    assert "device-plugins does not exist" in text
    await idle_kubelet.start()

    async def ready() -> bool:
        return await get("/readyz") == (200, "ok\n")

    await until(ready)
    plugin.blind = True
    agent.runners["meters"].scan.request()
    await until(lambda: agent.runners["meters"].scan.failing)
    assert await get("/readyz") == (503, "meters: scan fails: the lamp is out\n")
    assert await get("/healthz") == (200, "ok\n"), "a restart would not mend a failing scan"
    await idle_kubelet.kill()


async def test_the_status_page_tells_why_something_is_not_published(
    start_agent: Start, kubelet: Kubelet, get: Get, port: int
) -> None:
    await start_agent({"http_address": f"127.0.0.1:{port}"}, meters=Meters())
    await kubelet.until(lambda resources: "meters.example.com/meter" in resources)
    code, text = await get("/status")
    assert code == 200
    plugin = json.loads(text)["plugins"]["meters"]
    assert plugin["skipped"] == [{"subject": "m2", "reason": "somebody else's", "warning": False}]
    devices = plugin["resources"]["meters.example.com/meter"]["devices"]
    assert [(device["id"], device["health"], device["reason"]) for device in devices] == [
        ("m0", "Healthy", ""),
        ("m1", "Unhealthy", "dented"),
    ]


@pytest.mark.parametrize(
    ("path", "method", "code"), [("/", "GET", 404), ("/metrics/..", "GET", 404), ("/metrics", "POST", 405)]
)
async def test_other_questions_get_a_plain_refusal(  # noqa: PLR0917 - fixtures and the table's columns
    start_agent: Start, get: Get, port: int, path: str, method: str, code: int
) -> None:
    await looking(await start_agent({"http_address": f"127.0.0.1:{port}"}, meters=Meters()))
    assert (await get(path, method))[0] == code


async def test_a_head_request_gets_no_body(start_agent: Start, get: Get, port: int) -> None:
    await looking(await start_agent({"http_address": f"127.0.0.1:{port}"}, meters=Meters()))
    assert await get("/healthz", "HEAD") == (200, "")


async def test_junk_and_endless_headers_are_refused_and_the_agent_goes_on(
    start_agent: Start, get: Get, port: int
) -> None:
    await looking(await start_agent({"http_address": f"127.0.0.1:{port}"}, meters=Meters()))
    assert (await get("", raw=b"\x00\xff\r\n\r\n"))[0] == 400
    with contextlib.suppress(ConnectionResetError):  # the refusal is lost where the rest is not read any more
        assert (await get("", raw=b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000))[0] == 400
    assert await get("/healthz") == (200, "ok\n")


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "127.0.0.1:port", "192.0.2.1:1"])
async def test_an_address_that_cannot_be_had_ends_the_agent_with_its_name(directory: str, address: str) -> None:
    agent = Agent(Settings(kubelet_dir=directory, http_address=address), {})
    with pytest.raises(ConfigurationError, match=f"-http-address: '?{address}"):
        await agent.run()


class Odd(Meters):
    """Measures what a test puts into `reading`: raises, or waits until `released`."""

    namespace = "odd.example.com"

    def __init__(self, reading: Sample | Exception | None) -> None:
        super().__init__()
        self.reading = reading
        self.released = threading.Event()
        self.asked = 0

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterator[Sample]:
        self.asked += 1
        if isinstance(self.reading, Exception):
            raise self.reading
        if self.reading is None:
            self.released.wait(60)
        else:
            yield self.reading


@pytest.mark.parametrize(
    ("reading", "problem"),
    [
        (ZeroDivisionError("no turns"), "ZeroDivisionError: no turns"),
        (Sample("", "Wrong.", {}, 1.0), "ValueError: metric name cannot be empty"),
        (Sample("wheel_turns", "Wrong.", {}, None), "ValidationError: Expected `float`, got `null`"),  # type: ignore[arg-type]
    ],
    ids=["raises", "name", "value"],
)
async def test_measurements_that_are_none_cost_the_page_nothing_else(  # noqa: PLR0917 - fixtures and the table's columns
    start_agent: Start, get: Get, port: int, caplog: pytest.LogCaptureFixture, reading: Sample | Exception, problem: str
) -> None:
    agent = await start_agent({"http_address": f"127.0.0.1:{port}"}, odd=Odd(reading), meters=Meters())
    await until(lambda: [runner.scan.completed.is_set() for runner in agent.runners.values()] == [True, True])
    for _ in range(2):
        code, page = await get("/metrics")
        assert code == 200
        assert 'meter_turns_total{device="m0"} 7.0' in page
    told = [record.message for record in caplog.records if "measurements" in record.message]
    assert len(told) == 1
    assert told[0].startswith(f"odd: its measurements are not on the metrics page: {problem}")


async def test_a_measurement_that_hangs_is_not_begun_again(start_agent: Start, get: Get, port: int) -> None:
    odd = Odd(None)
    agent = await start_agent({"http_address": f"127.0.0.1:{port}"}, odd=odd)
    await until(lambda: [runner.scan.completed.is_set() for runner in agent.runners.values()] == [True])
    asked = [asyncio.create_task(get("/metrics")) for _ in range(3)]
    await until(lambda: odd.asked == 1)
    odd.released.set()
    assert {code for code, _page in await asyncio.gather(*asked)} == {200}
    assert odd.asked == 1


async def test_connections_beyond_a_number_are_ended_at_once_and_leave_the_agent_its_descriptors(
    start_agent: Start, port: int
) -> None:
    agent = await start_agent({"http_address": f"127.0.0.1:{port}"}, meters=Meters())
    await until(lambda: [runner.scan.completed.is_set() for runner in agent.runners.values()] == [True])
    async with contextlib.AsyncExitStack() as stack:
        idle: list[asyncio.StreamReader] = []
        for _ in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            idle.append(reader)
        await until(lambda: sum(reader.at_eof() for reader in idle) == 100 - 64)


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", r"\[::1\]")])
async def test_the_log_tells_the_port_that_the_machine_chose(
    start_agent: Start, caplog: pytest.LogCaptureFixture, address: str, host: str
) -> None:
    caplog.set_level("INFO")
    await start_agent({"http_address": address}, meters=Meters())
    await until(lambda: bool(re.search(rf"pages at http://{host}:[1-9]\d*$", caplog.text, re.MULTILINE)))
