"""`/api/v1/inventory` and `/api/v1/readings` of an agent, read as `accelplane fleet` reads them."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from conftest import Start
from kubelets import Embedded, Kubelet, embedded_only
from pagereaders import Fixed
from waiting import until

from accelplane.devices import Device, HealthPolicy, Skipped, Verdict
from accelplane.fleet.agents import Agents, AgentTimes, Place
from accelplane.fleet.options import FleetOptions
from accelplane.host import Host
from accelplane.node.agent import Agent
from accelplane.node.status import NodeStatus
from accelplane.pages import server as pages
from accelplane.pages.observer import Observer
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.plugins.qat import QatPlugin
from accelplane.readings import DevicePlan, Family, Source, Value
from accelplane.report.decoding import decode_inventory, decode_readings
from accelplane.report.inventory import ReportedUnit
from accelplane.simulate.offload import QatSpec
from accelplane.simulate.specs import NodeSpec
from accelplane.simulate.tree import SimulatedNode

METERS = "meters.example.com/meter"
LEVEL = Family("meters_level", "A level.")


class Meters(Plugin[Config]):
    """Two units of two IDs each, whose health the test sets, and a device that is skipped."""

    namespace = "meters.example.com"
    verdict = Verdict("good")
    units = ("m0", "m1")

    def scan(self, host: Host) -> Iterator[Device | Skipped]:
        for number, unit in enumerate(self.units):
            for n in (0, 1):
                yield Device(resource="meter", id=f"{unit}-{n}", unit=unit, topology=(number,))
        yield Skipped("m2", "bound to another driver")

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        return {device.unit: self.verdict if device.unit == "m0" else Verdict("good") for device in devices}

    @property
    def health_policy(self) -> HealthPolicy:
        return HealthPolicy(good_verdicts=1)

    def readings(self, host: Host, devices: Iterable[Device]) -> Iterator[DevicePlan]:
        for unit in self.units:
            facts = {"model": "Meter 7", "pci_id": "8086:0001"}
            source = Source(path="/sys/level", parse=lambda _: (Value(LEVEL, 'place="a\\"b"', 7.5),))
            yield DevicePlan(device=unit, bdf="0000:01:00.0", units=(unit,), facts=facts, sources=(source,))


class Answer(NamedTuple):
    code: int
    fields: Mapping[str, str]
    body: bytes


async def get(port: int, path: str, **fields: str) -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    first, *rest = head.decode().split("\r\n")
    return Answer(int(first.split()[1]), dict(line.lower().split(": ", 1) for line in rest), body)


@asynccontextmanager
async def get_inventory(agent: Agent, port: int) -> AsyncIterator[None]:
    observer = Observer(agent)
    try:
        async with pages.serving(f"127.0.0.1:{port}", agent.status, observer):
            yield
    finally:
        await observer.close()


def unit(answer: Answer, name: str = "m0") -> ReportedUnit:
    return next(each for each in decode_inventory(answer.body).units if each.unit == name)


async def test_the_inventory_has_devices_health_holders_and_skipped_hardware(
    start_agent: Start, kubelet: Kubelet, unused_tcp_port: int
) -> None:
    agent = await start_agent(meters=Meters())
    await kubelet.until(lambda resources: resources.get(METERS) == (4, 4))
    await kubelet.run_pod("a", {METERS: 3})
    async with get_inventory(agent, unused_tcp_port):
        answer = await get(unused_tcp_port, "/api/v1/inventory")
    found = decode_inventory(answer.body)
    assert (answer.code, answer.fields["content-type"]) == (200, "application/json")
    assert answer.fields["etag"] == f'"{found.generation}"'
    assert (found.agent, found.holders.source) == ("accelplane-node", "podresources")
    assert [(each.name, each.ids, each.healthy, each.allocated, each.stage) for each in found.plugins[0].resources] == [
        (METERS, 4, 4, 3, "registered")
    ]
    assert [(each.plugin, each.subject, each.reason) for each in found.plugins[0].skipped] == [
        ("meters", "m2", "bound to another driver")
    ]
    first = unit(answer)
    assert (first.device, first.bdf, first.model, first.numa) == ("m0", "0000:01:00.0", "Meter 7", 0)
    assert (first.phase, first.known, first.ids) == ("healthy", True, {METERS: 2})
    assert sum(holder.count for each in found.units for holder in each.holders) == 3
    assert {(holder.pod, holder.container) for each in found.units for holder in each.holders} == {("a", "main")}


async def test_inventory_and_metrics_have_the_model_of_the_physical_device(
    start_agent: Start, kubelet: Kubelet, unused_tcp_port: int, tmp_path: Path
) -> None:
    SimulatedNode(tmp_path).build(NodeSpec(qats=[QatSpec(bdf="0000:6b:00.0", vfs=1)]))
    agent = await start_agent(qat=QatPlugin())
    await kubelet.until(lambda resources: "qat.intel.com/cy" in resources)
    async with get_inventory(agent, unused_tcp_port):
        inventory = await get(unused_tcp_port, "/api/v1/inventory")
        metrics = await get(unused_tcp_port, "/metrics")
    found = unit(inventory, "0000:6b:00.0")
    assert (found.device, found.bdf, found.model) == ("0000:6b:00.0", "0000:6b:00.0", "4xxx Series QAT")
    [info] = [line for line in metrics.body.decode().splitlines() if line.startswith("accelplane_device_info{")]
    assert info == (
        'accelplane_device_info{plugin="qat",device="0000:6b:00.0",bdf="0000:6b:00.0",driver="4xxx",'
        'model="4xxx Series QAT",pci_id="0x4940",kind="",function="pf",numa_node="0"} 1'
    )


async def test_readings_do_not_change_the_generation_and_health_does(
    start_agent: Start, kubelet: Kubelet, unused_tcp_port: int
) -> None:
    plugin = Meters()
    agent = await start_agent(meters=plugin)
    await kubelet.until(lambda resources: resources.get(METERS) == (4, 4))
    async with get_inventory(agent, unused_tcp_port):
        before = await get(unused_tcp_port, "/api/v1/inventory")
        tag = before.fields["etag"]
        for path in ("/metrics", "/api/v1/readings", "/status"):
            assert (await get(unused_tcp_port, path)).code == 200
        unchanged = await get(unused_tcp_port, "/api/v1/inventory", if_none_match=f'"other", {tag}')
        assert (unchanged.code, unchanged.body, unchanged.fields["etag"]) == (304, b"", tag)

        waiting = asyncio.create_task(get(unused_tcp_port, "/api/v1/inventory?wait=55", if_none_match=tag))
        plugin.verdict = Verdict("bad", "too hot", "temperature")
        agent.runners["meters"].request_check()
        changed = unit(await waiting)
    assert (changed.phase, changed.reason, changed.text) == ("unhealthy", "temperature", "too hot")
    assert [(each.phase, each.reason, each.text) for each in changed.history] == [
        ("healthy", "", ""),
        ("unhealthy", "temperature", "too hot"),
    ]
    assert changed.since == changed.history[-1].time


async def test_a_waiting_reader_gets_new_and_lost_devices_and_holders(
    start_agent: Start, kubelet: Kubelet, unused_tcp_port: int
) -> None:
    plugin = Meters()
    agent = await start_agent(meters=plugin)
    await kubelet.until(lambda resources: resources.get(METERS) == (4, 4))
    async with get_inventory(agent, unused_tcp_port):
        answer = await get(unused_tcp_port, "/api/v1/inventory")

        async def follow() -> Answer:
            nonlocal answer
            tag = answer.fields["etag"]
            found = await get(unused_tcp_port, "/api/v1/inventory?wait=55", if_none_match=tag)
            answer = found if found.code == 200 else answer
            return answer

        async def holders() -> bool:
            return bool(unit(await follow()).holders or unit(answer, "m1").holders)

        async def is_removed() -> bool:
            found = {each.unit: (each.phase, each.reason) for each in decode_inventory((await follow()).body).units}
            return found.get("m1", ("unhealthy", "gone")) == ("unhealthy", "gone")

        pod = asyncio.create_task(kubelet.run_pod("a", {METERS: 1}))
        await until(holders, 30)
        await pod
        plugin.units = ("m0",)
        agent.runners["meters"].scan.request()
        await until(is_removed, 30)


@embedded_only("the time of the answer is that of the agent")
async def test_a_reader_that_times_out_gets_304_and_leaks_nothing(
    start_agent: Start, kubelet: Embedded, unused_tcp_port: int
) -> None:
    agent = await start_agent(meters=Meters())
    await kubelet.until(lambda resources: resources.get(METERS) == (4, 4))
    async with get_inventory(agent, unused_tcp_port):
        tag = (await get(unused_tcp_port, "/api/v1/inventory")).fields["etag"]
        before = len(asyncio.all_tasks())
        answers = await asyncio.gather(
            *(get(unused_tcp_port, "/api/v1/inventory?wait=1", if_none_match=tag) for _ in range(20))
        )
        assert {answer.code for answer in answers} == {304}
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_slots_of_disconnected_readers_are_reused(
    start_agent: Start, kubelet: Kubelet, unused_tcp_port: int
) -> None:
    agent = await start_agent(meters=Meters())
    await kubelet.until(lambda resources: resources.get(METERS) == (4, 4))
    observer = Observer(agent)
    try:
        async with pages.serving(f"127.0.0.1:{unused_tcp_port}", agent.status, observer):
            tag = (await get(unused_tcp_port, "/api/v1/inventory")).fields["etag"]
            request = (
                f"GET /api/v1/inventory?wait=55 HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: {tag}\r\n\r\n".encode()
            )
            for _ in range(2):
                writers = [(await asyncio.open_connection("127.0.0.1", unused_tcp_port))[1] for _ in range(16)]
                for writer in writers:
                    writer.write(request)
                await until(lambda: len(observer._inventory._waiting) == 16)
                for writer in writers:
                    writer.close()
                await until(lambda: not observer._inventory._waiting)
            page = (await get(unused_tcp_port, "/metrics")).body.decode()
            counted = [line for line in page.splitlines() if 'page="inventory"' in line and "requests_total" in line]
            assert counted == ['accelplane_page_requests_total{code="200",page="inventory"} 1.0']
    finally:
        await observer.close()


@pytest.mark.parametrize(
    ("query", "code"), [("wait=x", 400), ("wait=-1", 400), ("wait=99999", 400), ("wait=", 400), ("other=1", 200)]
)
async def test_a_non_numeric_wait_is_rejected(unused_tcp_port: int, query: str, code: int) -> None:
    status = NodeStatus(version="1", root="/", kubelet_dir="/k")
    async with pages.serving(f"127.0.0.1:{unused_tcp_port}", lambda: status, Fixed()):
        assert (await get(unused_tcp_port, f"/api/v1/inventory?{query}")).code == code


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("gzip", True), ("deflate, gzip;q=0.5", True), ("*", True), ("GZIP ; q=1", True),
        ("*;q=0, gzip", True), ("*, gzip;q=0", False),
        ("gzip;q=0", False), ("gzip;q=0.000", False), ("identity", False), ("x-gzip", False), ("", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/metrics", "/api/v1/inventory", "/api/v1/readings"])
async def test_pages_are_compressed_if_the_client_accepts_gzip(
    unused_tcp_port: int, path: str, accepted: str, compressed: bool
) -> None:
    status = NodeStatus(version="1", root="/", kubelet_dir="/k")
    body = b'{"version": 1}'
    async with pages.serving(f"127.0.0.1:{unused_tcp_port}", lambda: status, Fixed(body=body)):
        answer = await get(unused_tcp_port, path, accept_encoding=accepted)
    assert answer.code == 200
    assert answer.fields["vary"] == "accept-encoding"
    assert (answer.fields.get("content-encoding") == "gzip") is compressed
    text = gzip.decompress(answer.body) if compressed else answer.body
    assert text.startswith({"/metrics": b"# HELP", "/api/v1/inventory": body}.get(path, b'{"version":1'))
    if path.endswith("inventory"):
        assert answer.fields["etag"] == ('"1-gzip"' if compressed else '"1"')


async def test_the_readings_page_has_the_current_values(
    start_agent: Start, kubelet: Kubelet, unused_tcp_port: int, tmp_path: Path
) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys/level").write_text("7")
    agent = await start_agent(meters=Meters())
    await kubelet.until(lambda resources: resources.get(METERS) == (4, 4))
    async with get_inventory(agent, unused_tcp_port):
        answer = await get(unused_tcp_port, "/api/v1/readings")
    found = decode_readings(answer.body)
    devices = found.plugins[0].devices
    assert found.time > 1_700_000_000
    assert [(each.plugin, each.device, each.bdf, each.awake, each.stuck) for each in devices] == [
        ("meters", "m0", "0000:01:00.0", True, False),
        ("meters", "m1", "0000:01:00.0", True, False),
    ]
    assert [(value.name, value.labels, value.value) for value in devices[0].values] == [
        ("meters_level", {"place": 'a"b'}, 7.5)
    ]
    assert devices[0].outcomes == {"ok": 1}
    assert "etag" not in answer.fields
    assert msgspec.json.decode(answer.body)["version"] == 1


async def test_the_fleet_follows_the_agent_by_waiting_requests(
    start_agent: Start, kubelet: Kubelet, unused_tcp_port: int
) -> None:
    plugin = Meters()
    agent = await start_agent(meters=plugin)
    await kubelet.until(lambda resources: resources.get(METERS) == (4, 4))
    # Short waits: unchanged answers come in between.
    fleet = Agents(FleetOptions(), lambda _node: None, times=AgentTimes(wait=1, min_interval=0.01))
    fleet.set(Place("n", "p", "node-1", "127.0.0.1", unused_tcp_port))

    def phases() -> set[str]:
        found = [report.inventory for report in fleet.reports("node-1") if report.state == "connected"]
        return {each.phase for inventory in found if inventory is not None for each in inventory.units}

    async with get_inventory(agent, unused_tcp_port):
        following = asyncio.create_task(fleet.run())
        try:
            await until(lambda: phases() == {"healthy"}, 30)
            plugin.verdict = Verdict("bad", "too hot", "temperature")
            agent.runners["meters"].request_check()
            await until(lambda: phases() == {"healthy", "unhealthy"}, 30)
            answered = next(fleet.all_reports()).answered
            await until(lambda: next(fleet.all_reports()).answered > answered, 30)  # an answer without a change
            assert phases() == {"healthy", "unhealthy"}
            readings = await fleet.readings("node-1")
            assert (readings.problem, len(readings.devices)) == ("", 2)
        finally:
            following.cancel()
            await asyncio.wait((following,))
