"""Which containers hold devices: from the kubelet, or from its checkpoint while it does not answer."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from conftest import Start
from kubelets import Embedded, Kubelet, embedded_only
from prometheus_client.parser import text_string_to_metric_families
from virtualtime import in_virtual_time
from waiting import until

from accelplane import rpc
from accelplane.devices import Device
from accelplane.host import Host
from accelplane.kubelet import podresources_v1_pb2 as pb
from accelplane.kubelet.podresources import DeviceHolder
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings
from accelplane.pages import metrics
from accelplane.pages.hardware_metrics import held_units
from accelplane.pages.holders import HolderReader, Holders, counts_by_unit, without_stale
from accelplane.pages.observer import Observer
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

METERS = "meters.example.com/meter"


class Meters(Plugin[Config]):
    """Two units of two IDs each."""

    namespace = "meters.example.com"

    def scan(self, host: Host) -> list[Device]:
        return [
            Device(resource="meter", id=f"{unit}-{n}", unit=unit, topology=None)
            for unit in ("m0", "m1")
            for n in (0, 1)
        ]


@asynccontextmanager
async def reading(agent: Agent, now: list[float]) -> AsyncIterator[HolderReader]:
    reader = HolderReader(agent.settings, agent.allocations, allocated_at=agent.allocated_at, clock=lambda: now[0])
    try:
        yield reader
    finally:
        await reader.close()


def wait_held(agent: Agent, holders: Holders) -> set[tuple[str, str]]:
    return set(held_units(agent.status(), holders))


async def test_the_page_names_the_containers_that_hold_devices(start_agent: Start, kubelet: Kubelet) -> None:
    agent = await start_agent(meters=Meters())
    await kubelet.until(lambda resources: METERS in resources)
    before = time.time()
    await kubelet.run_pod("a", {METERS: 3})
    observer = Observer(agent)
    try:
        page = metrics.MetricsPage().render(agent.status(), await observer.contents()).decode()
    finally:
        await observer.close()
    families = {family.name: family.samples for family in text_string_to_metric_families(page)}
    found = {
        (sample.labels["pod"], sample.labels["container"], sample.labels["unit"]): sample.value
        for sample in families["accelplane_container_devices"]
    }
    assert sum(found.values()) == 3
    assert {key[:2] for key in found} == {("a", "main")}
    assert {key[2] for key in found} == {"m0", "m1"}
    [total] = families["accelplane_resource_allocated"]
    assert (total.labels, total.value) == ({"resource": METERS}, 3)
    [allocatable] = families["accelplane_resource_allocatable"]
    assert (allocatable.labels, allocatable.value) == ({"resource": METERS}, 4)
    [since] = families["accelplane_container_held_since_timestamp_seconds"]
    assert (since.labels["pod"], since.labels["resource"]) == ("a", METERS)
    assert before <= since.value <= time.time()


async def test_a_container_keeps_the_time_at_which_it_was_first_seen(start_agent: Start, kubelet: Kubelet) -> None:
    agent, now = await start_agent(meters=Meters()), [100.0]
    await kubelet.until(lambda resources: METERS in resources)
    await kubelet.run_pod("a", {METERS: 1})
    async with reading(agent, now) as reader:
        first = (await reader.read()).since
        now[0] += 60
        await kubelet.run_pod("b", {METERS: 1})
        second = (await reader.read()).since
    [[key, seconds]] = first.items()
    assert second[key] == seconds
    assert len(second) == 2


async def test_a_container_has_the_time_of_its_allocate_call(start_agent: Start, kubelet: Kubelet) -> None:
    agent = await start_agent(meters=Meters())
    await kubelet.until(lambda resources: METERS in resources)
    before = time.time()
    await kubelet.run_pod("a", {METERS: 1})
    after = time.time()
    await until(lambda: time.time() > after)
    observer = Observer(agent)
    try:
        [seconds] = (await observer.contents()).holders.since.values()
    finally:
        await observer.close()
    assert before <= seconds <= after


async def test_a_pod_that_is_created_again_has_the_time_of_its_own_allocate_call(
    start_agent: Start, kubelet: Kubelet
) -> None:
    """As those of a StatefulSet, it has the name of the pod before it, and no page is read between the two."""
    agent, now = await start_agent(meters=Meters()), [100.0]
    await kubelet.until(lambda resources: METERS in resources)
    await kubelet.run_pod("a", {METERS: 1})
    async with reading(agent, now) as reader:
        [before] = (await reader.read()).since.values()
        await kubelet.delete_pod("a")
        await kubelet.run_pod("a", {METERS: 1})

        async def is_new() -> bool:
            now[0] += 10
            return all(seconds > before for seconds in (await reader.read()).since.values())

        await until(is_new)
        [after] = (await reader.read()).since.values()
    assert before < after <= time.time()


async def test_holders_are_read_again_after_an_allocation_or_ten_seconds(start_agent: Start, kubelet: Kubelet) -> None:
    agent, now = await start_agent(meters=Meters()), [100.0]
    await kubelet.until(lambda resources: METERS in resources)
    async with reading(agent, now) as reader:
        assert wait_held(agent, await reader.read()) == set()
        await kubelet.run_pod("a", {METERS: 2})
        assert len(wait_held(agent, await reader.read())) >= 1
        await kubelet.delete_pod("a")
        now[0] += 9
        assert len(wait_held(agent, await reader.read())) >= 1
        assert reader.requests["List", "ok"] == 2
        now[0] += 1

        async def released() -> bool:
            now[0] += 10
            return not wait_held(agent, await reader.read())

        await until(released)


async def test_a_read_without_allocatable_ids_is_not_reused_for_a_read_with_them(
    start_agent: Start, kubelet: Kubelet
) -> None:
    agent, now = await start_agent(meters=Meters()), [100.0]
    await kubelet.until(lambda resources: resources.get(METERS) == (4, 4))
    async with reading(agent, now) as reader:
        assert (await reader.read(allocatable=False)).allocatable == {}
        assert (await reader.read()).allocatable[METERS] == 4
        now[0] += 9
        await reader.read(max_age=0.0, allocatable=False)
        now[0] += 2
        await reader.read()
        assert reader.requests["GetAllocatableResources", "ok"] == 2
        await reader.read()
        assert reader.requests["GetAllocatableResources", "ok"] == 2


@embedded_only("the real kubelet has no socket while it is killed, too, but takes seconds to start")
@asynccontextmanager
async def slow_lists(settings: Settings, *answers: pb.ListPodResourcesResponse) -> AsyncIterator[list[asyncio.Event]]:
    """A kubelet that gives these answers, each when the test sets the event of its call."""
    calls: list[asyncio.Event] = []

    async def list_pods(_request: pb.ListPodResourcesRequest) -> pb.ListPodResourcesResponse:
        calls.append(asyncio.Event())
        answer = answers[len(calls) - 1]
        await calls[-1].wait()
        return answer

    async def allocatable(_request: pb.AllocatableResourcesRequest) -> pb.AllocatableResourcesResponse:
        return pb.AllocatableResourcesResponse(devices=[pb.ContainerDevices(resource_name=METERS, device_ids=["m0-0"])])

    os.makedirs(os.path.dirname(settings.pod_resources_socket), exist_ok=True)
    server = rpc.RpcServer(
        {
            "/v1.PodResourcesLister/List": rpc.unary(
                pb.ListPodResourcesRequest, pb.ListPodResourcesResponse, list_pods
            ),
            "/v1.PodResourcesLister/GetAllocatableResources": rpc.unary(
                pb.AllocatableResourcesRequest, pb.AllocatableResourcesResponse, allocatable
            ),
        }
    )
    await server.start(settings.pod_resources_socket)
    try:
        yield calls
    finally:
        await server.stop()


HELD = pb.ListPodResourcesResponse(
    pod_resources=[
        pb.PodResources(
            name="a",
            namespace="default",
            containers=[
                pb.ContainerResources(
                    name="main", devices=[pb.ContainerDevices(resource_name=METERS, device_ids=["m0-0"])]
                )
            ],
        )
    ]
)


def pod(name: str, *ids: str) -> pb.PodResources:
    devices = [pb.ContainerDevices(resource_name=METERS, device_ids=ids)]
    return pb.PodResources(
        name=name, namespace="default", containers=[pb.ContainerResources(name="main", devices=devices)]
    )


async def test_the_pod_that_is_later_in_the_list_of_the_kubelet_has_the_id(directory: str) -> None:
    answer = pb.ListPodResourcesResponse(pod_resources=[pod("z-ended", "m0-0"), pod("b", "m1-0"), pod("a", "m0-0")])
    settings = Settings(kubelet_dir=directory)
    reader = HolderReader(settings, lambda: 0)
    async with slow_lists(settings, answer) as calls:
        reading = asyncio.create_task(reader.read())
        await until(lambda: len(calls) == 1)
        calls[0].set()
        found = await reading
        await reader.close()
    assert [(row.pod, row.device_ids) for row in found.rows] == [("a", ("m0-0",)), ("b", ("m1-0",))]
    assert found.stale == 1


async def test_an_outage_of_the_kubelet_does_not_change_the_time_of_a_holder(directory: str) -> None:
    settings, now = Settings(kubelet_dir=directory), [100.0]
    allocated = iter((1000.0, None))  # the call may be forgotten meanwhile
    reader = HolderReader(
        settings, lambda: 0, allocated_at=lambda _resource, _ids: next(allocated), clock=lambda: now[0]
    )
    times: list[float] = []
    for _ in range(2):
        async with slow_lists(settings, HELD) as calls:
            reading = asyncio.create_task(reader.read())
            await until(lambda calls=calls: len(calls) == 1)
            calls[0].set()
            times += (await reading).since.values()
        now[0] += 61
        assert (await reader.read()).source == "none"
        now[0] += 61
    await reader.close()
    assert times == [1000.0, 1000.0]


@pytest.mark.parametrize("change", ["an allocation", "allocatable IDs"])
@in_virtual_time()
async def test_a_reading_that_lacks_what_a_later_reader_needs_is_not_shared_with_it(
    directory: str, change: str
) -> None:
    settings = Settings(kubelet_dir=directory)
    allocated = [0]
    reader = HolderReader(settings, lambda: allocated[0])
    async with slow_lists(settings, pb.ListPodResourcesResponse(), HELD) as calls:
        first = asyncio.create_task(reader.read(allocatable=False))
        await until(lambda: len(calls) == 1)
        allocated[0] = int(change == "an allocation")
        later = [asyncio.create_task(reader.read(allocatable=change == "allocatable IDs")) for _ in range(2)]
        await asyncio.sleep(0)
        calls[0].set()
        assert (await first).rows == ()
        await until(lambda: len(calls) == 2)
        calls[1].set()
        for found in [await each for each in later]:
            assert [row.pod for row in found.rows] == ["a"]
            assert bool(found.allocatable) == (change == "allocatable IDs")
        await reader.close()


async def test_the_last_answer_is_used_for_a_minute_and_then_the_checkpoint(
    start_agent: Start, kubelet: Embedded
) -> None:
    agent, now = await start_agent(meters=Meters()), [100.0]
    await kubelet.until(lambda resources: METERS in resources)
    await kubelet.run_pod("a", {METERS: 1})
    async with reading(agent, now) as reader:
        before = await reader.read()
        await kubelet.kill()
        now[0] += 59
        assert await reader.read() == before
        now[0] += 1
        after = await reader.read()
        assert (after.source, wait_held(agent, after)) == ("checkpoint", wait_held(agent, before))
        assert [(row.namespace, row.pod, row.container) for row in after.rows] == [("", "", "main")]
        assert reader.requests["List", "error"] == 2


@embedded_only("a real kubelet cannot be made to hang")
async def test_a_hanging_kubelet_does_not_delay_a_page(start_agent: Start, kubelet: Embedded) -> None:
    agent, now = await start_agent(meters=Meters()), [100.0]
    await kubelet.until(lambda resources: METERS in resources)
    await kubelet.run_pod("a", {METERS: 1})
    async with reading(agent, now) as reader:
        before = await reader.read()
        await kubelet.kill()
        connected: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_unix_server(
            lambda _, writer: connected.append(writer), agent.settings.pod_resources_socket
        )
        async with silent:
            now[0] += 30
            assert await reader.read() == before
            now[0] += 30
            assert (await reader.read()).source == "none"
            for writer in connected:
                writer.close()
                await writer.wait_closed()


async def test_the_kubelet_is_not_called_without_holders(start_agent: Start, kubelet: Kubelet) -> None:
    agent = await start_agent({"metrics_holders": "off"}, meters=Meters())
    await kubelet.until(lambda resources: METERS in resources)
    await kubelet.run_pod("a", {METERS: 1})
    async with reading(agent, [100.0]) as reader:
        assert await reader.read() == Holders()
        assert not reader.requests


@pytest.mark.parametrize("content", [None, b"junk"])
async def test_without_kubelet_and_checkpoint_there_are_no_holders(tmp_path: os.PathLike[str], content: bytes) -> None:
    directory = os.path.join(tmp_path, "device-plugins")
    os.makedirs(directory)
    if content:
        with open(os.path.join(directory, "kubelet_internal_checkpoint"), "wb") as file:
            file.write(content)
    reader = HolderReader(Settings(kubelet_dir=os.fspath(tmp_path)), lambda: 0, clock=lambda: 5.0)
    assert await reader.read() == Holders(began=5.0)
    await reader.close()


def test_the_later_of_two_pods_with_one_id_is_its_holder() -> None:
    rows = [
        DeviceHolder("n", "old", "c", METERS, ("m0", "m1")),
        DeviceHolder("n", "older", "c", METERS, ("m2",)),
        DeviceHolder("n", "new", "c", METERS, ("m0", "m2")),
    ]
    found = without_stale(Holders(rows, "podresources", 1.0))
    assert [(row.pod, row.device_ids) for row in found.rows] == [("old", ("m1",)), ("new", ("m0", "m2"))]
    assert found.stale == 2


def test_ids_are_counted_by_unit_without_those_of_other_plugins() -> None:
    rows = [
        DeviceHolder("n", "a", "c", METERS, ("m0-0", "m0-1", "m1-0", "gone")),
        DeviceHolder("n", "b", "c", "other.com/x", ("x",)),
    ]
    devices = {id_: Device(resource="meters", id=id_, unit=id_.partition("-")[0]) for id_ in ("m0-0", "m0-1", "m1-0")}
    key = ("n", "a", "c", METERS)
    assert counts_by_unit(rows, {METERS: ("meter", devices)}) == {(key, "m0"): 2, (key, "m1"): 1, (key, ""): 1}
