"""The slices in an API server, in virtual time."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any

import pytest
from drapools import functions, offer, offers
from sliceservers import DRIVER, NODE, SliceServer
from virtualtime import TCP_DELAY, VirtualTimeLoop

from accelplane.apiserver import ApiServer
from accelplane.dra import catalog
from accelplane.dra.model import Features, Offer, Pool
from accelplane.dra.publisher import Pace, SlicePublisher
from accelplane.dra.resourceslice import RequestRange

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]

QAT = "qat.intel.com"
GPUS = offers(offer("0000:03:00.0"), offer("0000:04:00.0"))
TILES = offers(offer(attributes={"tiles": 2}))
PARTS = {"0000-03-00-0-0x56c0", "0000-03-00-0-0x56c0-t0", "0000-03-00-0-0x56c0-t1"}
NAMES = {"0000-03-00-0-0x56c0", "0000-04-00-0-0x56c0"}


class Agent:
    """A publisher with offers that a test changes."""

    def __init__(self, server: SliceServer, given: Mapping[str, Offer], driver: str = DRIVER, **options: Any) -> None:
        self.events: list[tuple[str, str]] = []
        self.held: Collection[str] = ()
        self.offers = given
        self.publisher = SlicePublisher(
            ApiServer(server.config),
            NODE,
            driver,
            on_event=lambda reason, text: self.events.append((reason, text)),
            **options,
        )
        self.driver = driver
        self.publisher.set_pool(self.pool)

    def pool(self, features: Features) -> Pool:
        return catalog.pool(self.driver, NODE, self.offers, features, held=self.held, evict="gone")

    def offer(self, given: Mapping[str, Offer]) -> None:
        self.offers = given
        self.publisher.set_pool(self.pool)


@contextlib.asynccontextmanager
async def running(
    server: SliceServer, given: Mapping[str, Offer] = GPUS, *, registered: bool = True, **options: Any
) -> AsyncGenerator[Agent]:
    agent = Agent(server, given, **options)
    task = asyncio.create_task(agent.publisher.run())
    agent.publisher.registered(registered)
    try:
        yield agent
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], seconds: float = 300) -> float:
    """Waits in virtual time; returns the seconds."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start < seconds
        await asyncio.sleep(0.05 if loop.time() - start < 3 else 0.5)
    return loop.time() - start


@pytest.fixture
def run() -> Run:
    def in_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, TCP_DELAY)) as runner:
            runner.run(main())

    return in_virtual_time


def test_the_slices_of_a_node_have_owner_label_pool_and_devices(run: Run) -> None:
    async def main() -> None:
        async with SliceServer() as server, running(server):
            assert await until(lambda: bool(server.slices)) < 3
            [one] = server.slices
            assert one.metadata.name == f"{NODE}-{DRIVER}-0"
            assert one.metadata.labels == {"app.kubernetes.io/managed-by": "accelplane"}
            [owner] = one.metadata.owner_references or []
            node = server.get("nodes", NODE) or {}
            assert (owner.kind, owner.uid, owner.controller) == ("Node", node["metadata"]["uid"], True)
            assert (one.spec.pool.name, one.spec.pool.generation, one.spec.pool.resource_slice_count) == (NODE, 1, 1)
            assert (one.spec.node_name, one.spec.driver) == (NODE, DRIVER)
            assert set(server.devices()) == NAMES

    run(main)


def test_nothing_is_requested_before_the_registration(run: Run) -> None:
    async def main() -> None:
        async with SliceServer() as server, running(server, registered=False) as agent:
            await asyncio.sleep(600)
            assert server.requests == []
            agent.publisher.registered(True)
            assert await until(lambda: bool(server.slices)) < 2

    run(main)


def wipe(server: SliceServer) -> None:
    """What the kubelet does when it starts, and the garbage collector for a node that is gone."""
    for each in server.slices:
        server.remove("resourceslices", each.metadata.name)


def identities(server: SliceServer) -> dict[str, tuple[str, int]]:
    return {each.metadata.name: (each.metadata.uid, each.spec.pool.generation) for each in server.slices}


def sick(address: str = "0000:03:00.0", **fields: Any) -> Offer:
    return offer(address, "sick", reason="temperature", **fields)


class TestKubelet:
    def test_slices_are_back_after_a_kubelet_restart(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                agent.publisher.registered(False)
                wipe(server)
                await asyncio.sleep(30)
                assert server.slices == []
                agent.publisher.registered(True)
                assert await until(lambda: bool(server.slices)) < 2
                await asyncio.sleep(60)
                assert len(server.slices) == 1
                assert server.writes == ["POST", "POST"]

        run(main)

    def test_a_wipe_after_the_registration_is_repaired(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server, functions(200), driver=QAT):
                await until(lambda: len(server.slices) == 4)
                await asyncio.sleep(40)
                wipe(server)
                assert await until(lambda: len(server.slices) == 4) < 3
                assert {each.spec.pool.generation for each in server.slices} == {2}

        run(main)

    def test_a_late_wipe_is_repaired_soon_also_after_many_repairs(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                for _ in range(5):
                    wipe(server)
                    await until(lambda: bool(server.slices))
                agent.publisher.registered(True)
                await asyncio.sleep(10)
                wipe(server)
                assert await until(lambda: bool(server.slices)) < 3

        run(main)

    def test_an_agent_restart_writes_nothing(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                async with running(server, functions(200), driver=QAT):
                    await until(lambda: len(server.slices) == 4)
                    before = identities(server)
                async with running(server, functions(200), driver=QAT):
                    await asyncio.sleep(60)
                assert identities(server) == before
                assert server.writes == ["POST"] * 4

        run(main)


class TestPlacement:
    def test_the_removal_of_one_of_200_devices_is_one_update(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server, functions(200), driver=QAT) as agent:
                await until(lambda: len(server.slices) == 4)
                assert all(len(each.spec.devices or ()) <= 64 for each in server.slices)
                assert {each.spec.pool.resource_slice_count for each in server.slices} == {4}
                assert len(server.devices()) == 200
                before = {each.metadata.name: each.metadata.resource_version for each in server.slices}
                agent.offer(functions(200, without=[70]))
                await until(lambda: len(server.devices()) == 199)
                await asyncio.sleep(30)
                after = {each.metadata.name: each.metadata.resource_version for each in server.slices}
                assert len(set(before.items()) - set(after.items())) == 1
                assert {each.spec.pool.generation for each in server.slices} == {1}
                assert server.writes == ["POST"] * 4 + ["PUT"]

        run(main)

    def test_readers_see_no_complete_pool_that_is_wrong(self, run: Run) -> None:
        counts = [200, 10, 130, 64, 129, 0, 65]

        async def main() -> None:
            expected = [set(catalog.device_names(QAT, functions(count))) for count in counts]
            async with SliceServer() as server, running(server, functions(200), driver=QAT) as agent:
                seen: list[set[str]] = []

                def look() -> None:
                    highest = max((each.spec.pool.generation for each in server.slices), default=0)
                    newest = [each.spec for each in server.slices if each.spec.pool.generation == highest]
                    if newest and len(newest) == newest[0].pool.resource_slice_count:
                        seen.append({device.name for each in newest for device in each.devices or ()})

                store, remove = server.store, server.remove

                def observed_store(*arguments: Any) -> Any:
                    stored = store(*arguments)
                    look()
                    return stored

                def observed_remove(*arguments: Any) -> None:
                    remove(*arguments)
                    look()

                server.store, server.remove = observed_store, observed_remove  # type: ignore[method-assign]
                for count in counts:
                    agent.offer(functions(count))
                    await until(lambda: len(server.devices()) == count)  # noqa: B023 - called at once
                    await asyncio.sleep(11)
                assert all(each in expected for each in seen)
                assert [each for each in expected if each in seen] == expected

        run(main)

    def test_without_units_an_empty_slice_remains_only_where_there_were_units(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                async with running(server, {}):
                    await asyncio.sleep(60)
                    assert server.slices == []
                async with running(server, {}, always=True):
                    await until(lambda: bool(server.slices))
                    assert server.devices() == {}
                wipe(server)
                async with running(server) as agent:
                    await until(lambda: bool(server.devices()))
                    agent.offer({})
                    await until(lambda: not server.devices())
                    await asyncio.sleep(30)
                    assert [each.spec.devices for each in server.slices] == [None]

        run(main)


class TestHealth:
    def test_an_unhealthy_device_gets_a_taint_and_loses_it(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                agent.offer(offers(sick(), offer("0000:04:00.0")))
                taints = {"0000-03-00-0-0x56c0": f"{DRIVER}/health=temperature:NoSchedule", "0000-04-00-0-0x56c0": ""}
                assert await until(lambda: server.devices() == taints) < 3
                time = "2026-01-01T00:00:01Z"
                [stored] = server.all("resourceslices")
                stored["spec"]["devices"][0]["taints"][0]["timeAdded"] = time
                server.put("resourceslices", stored)
                agent.offer(offers(sick(), offer("0000:04:00.0", capacities={})))
                await until(lambda: len(server.writes) == 3)
                [stored] = server.all("resourceslices")
                assert [each["timeAdded"] for each in stored["spec"]["devices"][0]["taints"]] == [time]
                agent.offer(GPUS)
                assert await until(lambda: set(server.devices().values()) == {""}) < 12

        run(main)

    @pytest.mark.parametrize("minor", [34, 37])
    def test_without_taints_an_unhealthy_device_is_withdrawn(self, run: Run, minor: int) -> None:
        async def main() -> None:
            async with SliceServer(minor, gates=()) as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                agent.offer(offers(sick(), offer("0000:04:00.0")))
                await until(lambda: set(server.devices()) == {"0000-04-00-0-0x56c0"})
                assert any("DRADeviceTaints" in each for each in agent.publisher.problems)
                await asyncio.sleep(60)
                agent.offer(GPUS)
                await until(lambda: set(server.devices()) == NAMES)
                await asyncio.sleep(600)
                assert server.writes == ["POST", "PUT", "PUT"]
                assert agent.publisher.problems == []

        run(main)

    def test_flapping_health_is_one_write_in_ten_seconds(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                for number in range(200):
                    agent.offer(offers(sick() if number % 2 else offer(), offer("0000:04:00.0")))
                    await asyncio.sleep(0.5)
                assert 5 <= len(server.writes) <= 12
                agent.offer(offers(sick(), offer("0000:04:00.0")))
                await asyncio.sleep(11)
                assert "temperature" in server.devices()["0000-03-00-0-0x56c0"]

        run(main)

    def test_the_withdrawal_of_a_unit_that_has_just_changed_is_reported(self, run: Run) -> None:
        async def main() -> None:
            seen: list[Collection[str] | None] = []
            async with SliceServer() as server, running(server, changed=lambda: seen.append(published())) as agent:

                def published() -> Collection[str] | None:
                    return agent.publisher.published

                await until(lambda: bool(seen))
                agent.offer(offers(sick(), offer("0000:04:00.0")))
                await until(lambda: len(seen) == 2)
                agent.offer(offers(offer("0000:04:00.0")))
                await until(lambda: seen[-1] == {"0000:04:00.0"}, 15)
                assert set(server.devices()) == {"0000-04-00-0-0x56c0"}
                assert seen[:2] == [{"0000:03:00.0", "0000:04:00.0"}] * 2

        run(main)


class TestFeatures:
    @pytest.mark.parametrize("minor", [34, 37])
    def test_tiles_are_not_published_without_shared_counters(self, run: Run, minor: int) -> None:
        async def main() -> None:
            async with SliceServer(minor, gates=()) as server, running(server, TILES) as agent:
                await until(lambda: bool(server.slices))
                await asyncio.sleep(60)
                assert set(server.devices()) == {"0000-03-00-0-0x56c0"}
                assert server.writes == ["POST"]
                assert any("DRAPartitionableDevices" in each for each in agent.publisher.problems)

        run(main)

    def test_counter_sets_move_to_their_own_slice_after_an_upgrade(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer(34) as server, running(server, TILES):
                await until(lambda: set(server.devices()) == PARTS)
                [one] = server.slices
                assert [each.name for each in one.spec.shared_counters or ()] == ["0000-03-00-0-0x56c0"]
                server.become(36)
                server.abort_watches()
                await until(lambda: len(server.slices) == 2)
                await asyncio.sleep(30)
                counters = [each.metadata.name for each in server.slices if each.spec.shared_counters]
                assert counters == [f"{NODE}-{DRIVER}-c0"]
                assert set(server.devices()) == PARTS
                assert {each.spec.pool.generation for each in server.slices} == {2}

        run(main)

    def test_an_upgrade_behind_a_load_balancer_is_noticed_by_an_invalid_slice(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer(34) as server, running(server, TILES) as agent:
                await until(lambda: set(server.devices()) == PARTS)
                server.become(37)  # the watch goes on
                agent.offer(offers(offer(attributes={"tiles": 4})))
                assert await until(lambda: len(server.slices) == 2) < 5
                assert len(server.devices()) == 5
                assert agent.publisher.problems == []

        run(main)

    def test_another_layout_is_tried_if_the_first_is_invalid(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer(36) as server:
                # Another API server of the cluster is older.
                server.faults.insert(0, server.faults.pop())
                server.fault("GET /version$", 200, times=-1, body=b'{"minor": "34+", "gitVersion": "v1.34.0"}')
                server.faults.insert(0, server.faults.pop())
                async with running(server, TILES):
                    await until(lambda: set(server.devices()) == PARTS)
                    assert len(server.slices) == 2

        run(main)

    def test_shares_are_one_device_or_several(self, run: Run) -> None:
        async def main() -> None:
            shared = offers(offer(shares=3))
            async with SliceServer() as server, running(server, shared):
                await until(lambda: bool(server.slices))
                [device] = server.slices[0].spec.devices or []
                policy = (device.capacity or {})["shares"].request_policy
                assert device.allow_multiple_allocations
                assert policy is not None
                assert (policy.default, policy.valid_range) == ("1", RequestRange(minimum="1"))
            async with SliceServer(34, gates=()) as server, running(server, shared):
                await until(lambda: bool(server.slices))
                assert set(server.devices()) == {f"0000-03-00-0-0x56c0-s{number}" for number in range(3)}

        run(main)

    @pytest.mark.parametrize("gate", ["taints", "counters", "consumable"])
    def test_a_gate_that_is_switched_off_and_on_is_followed(
        self, run: Run, gate: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        given = offers(
            sick("0000:03:00.0"), offer("0000:04:00.0", attributes={"tiles": 2}), offer("0000:05:00.0", shares=2)
        )

        async def main() -> None:
            async with SliceServer() as server, running(server, given):
                await until(lambda: bool(server.devices()))
                await asyncio.sleep(120)
                complete, number = server.devices(), len(server.writes)
                for gates in ({"taints", "counters", "consumable"} - {gate}, {"taints", "counters", "consumable"}):
                    server.become(37, gates)
                    server.abort_watches()
                    await asyncio.sleep(120)
                    assert (server.devices() == complete) == (gate in gates)
                assert len(server.writes) - number <= 6

        run(main)
        assert sum("feature gate" in each.message for each in caplog.records) == 1

    def test_a_field_that_only_the_write_loses_is_noticed(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                # The request after the probes and this one reaches an older API server.
                node = b'{"metadata": {"uid": "1"}}'
                server.fault("GET .*/nodes/", 200, body=node, then=lambda: server.gates.discard("counters"))
                async with running(server, TILES) as agent:
                    await until(lambda: bool(server.devices()))
                    await asyncio.sleep(5)
                    assert set(server.devices()) == {"0000-03-00-0-0x56c0"}
                    assert agent.publisher.features == Features(taints=True, counters=False, consumable=True)

        run(main)

    def test_v1beta1_wraps_the_content_of_devices(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer(33, gates=(), versions=("v1beta1",)) as server, running(server):
                await until(lambda: bool(server.slices))
                [stored] = server.all("resourceslices")
                assert stored["apiVersion"] == "resource.k8s.io/v1beta1"
                assert all(set(device) == {"name", "basic"} for device in stored["spec"]["devices"])
                await asyncio.sleep(600)
                assert server.writes == ["POST"]

        run(main)

    def test_an_api_that_is_not_served_is_a_problem(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer(33, versions=()) as server, running(server) as agent:
                await until(lambda: bool(agent.publisher.problems))
                assert "--runtime-config=resource.k8s.io/v1beta1=true" in agent.publisher.problems[0]
                await asyncio.sleep(600)
                assert server.count("GET /apis") < 40
                server.versions = ("v1",)
                server.become(37)
                assert await until(lambda: bool(server.slices)) <= 61
                assert agent.publisher.problems == []

        run(main)


class TestOtherClients:
    def test_changes_by_hand_are_repaired_with_a_growing_delay(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server):
                await until(lambda: bool(server.slices))
                delays: list[float] = []
                for number in range(9):
                    [stored] = server.all("resourceslices")
                    if number % 3 == 2:
                        wipe(server)
                    else:
                        annotations = {"note": f"{number}"}
                        metadata = {**stored["metadata"], "annotations": annotations, "labels": {"team": "a"}}
                        spec = {**stored["spec"], "devices": stored["spec"]["devices"][:1]}
                        server.put("resourceslices", {**stored, "metadata": metadata, "spec": spec})
                    delays.append(await until(lambda: set(server.devices()) == NAMES))
                    [stored] = server.all("resourceslices")
                    if number % 3 != 2:
                        assert stored["metadata"]["annotations"] == {"note": f"{number}"}
                        assert stored["metadata"]["labels"]["team"] == "a"
                    assert stored["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "accelplane"
                assert delays == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60], abs=0.6)
                await asyncio.sleep(400)
                wipe(server)
                assert await until(lambda: bool(server.slices)) == pytest.approx(1, abs=0.2)

        run(main)

    def test_a_slice_of_another_program_for_the_driver_is_deleted(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                foreign = {
                    "metadata": {"name": f"{NODE}-{DRIVER}-x7k2p"},
                    "spec": {
                        "driver": DRIVER, "nodeName": NODE, "devices": [{"name": "0000-03-00-0-0x56c0"}],
                        "pool": {"name": NODE, "generation": 7, "resourceSliceCount": 1},
                    },
                }  # fmt: skip
                server.put("resourceslices", foreign)
                async with running(server):
                    await until(lambda: set(server.devices()) == NAMES)
                    assert identities(server).keys() == {f"{NODE}-{DRIVER}-0"}
                    assert server.slices[0].spec.pool.generation == 8

        run(main)

    def test_slices_of_other_drivers_stay(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                spec = {"driver": "nic.example.com", "nodeName": NODE, "pool": {"name": NODE}}
                server.put("resourceslices", {"metadata": {"name": "nic"}, "spec": spec})
                async with running(server):
                    await until(lambda: len(server.all("resourceslices")) == 2)
                    assert server.get("resourceslices", "nic") is not None

        run(main)

    def test_a_node_that_is_created_again_owns_the_new_slices(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server):
                await until(lambda: bool(server.slices))
                server.remove("nodes", NODE)
                server.put("nodes", {"metadata": {"name": NODE, "uid": "new"}})
                wipe(server)  # by the garbage collector
                await until(lambda: bool(server.slices))
                [owner] = server.slices[0].metadata.owner_references or []
                assert owner.uid == "new"

        run(main)

    def test_slices_are_not_written_while_there_is_no_node(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                server.remove("nodes", NODE)
                async with running(server) as agent:
                    await asyncio.sleep(120)
                    assert server.writes == []
                    assert "node node-1: not found" in agent.publisher.problems[0]
                    server.put("nodes", {"metadata": {"name": NODE}})
                    assert await until(lambda: bool(server.slices)) <= 61

        run(main)


class TestErrors:
    def test_a_refused_device_is_left_out(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                server.refused.add("0000-04-00-0-0x56c0")
                async with running(server) as agent:
                    await until(lambda: bool(server.slices))
                    assert set(server.devices()) == {"0000-03-00-0-0x56c0"}
                    text = "device 0000-04-00-0-0x56c0 is not published: spec.devices[1].name: refused"
                    assert agent.events == [("DeviceNotPublished", text)]
                    assert agent.publisher.problems == [text]
                    await asyncio.sleep(600)
                    assert server.writes == ["POST", "POST"]
                    # The device changes, and the API server accepts it.
                    server.refused.clear()
                    agent.offer(offers(offer(), offer("0000:04:00.0", capacities={})))
                    await until(lambda: set(server.devices()) == NAMES)
                    assert agent.publisher.problems == []

        run(main)

    def test_a_refused_device_is_tried_again_after_an_upgrade(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                server.refused.add("0000-04-00-0-0x56c0")
                async with running(server):
                    await until(lambda: bool(server.slices))
                    server.refused.clear()
                    server.abort_watches()
                    await asyncio.sleep(10)
                    assert set(server.devices()) == {"0000-03-00-0-0x56c0"}
                    server.become(38)
                    server.abort_watches()
                    await until(lambda: set(server.devices()) == NAMES)

        run(main)

    def test_late_events_of_own_writes_cause_no_requests(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server, functions(200), driver=QAT) as agent:
                server.delay_watches("resourceslices", 5)
                await until(lambda: len(server.slices) == 4)
                for count in (199, 198, 10, 150, 149):
                    agent.offer(functions(count))
                    await asyncio.sleep(2)
                await asyncio.sleep(60)
                assert len(server.devices()) == 149
                # Two updates, three slices less, and two slices more when the units may change again.
                assert "".join(each[:2] for each in server.writes) == "POPOPOPOPUPUDEDEDEPUPUPOPO"
                assert server.count("GET .*resourceslices") == 1

        run(main)

    def test_a_conflict_reads_the_slices_and_starts_again(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                server.pause_watches()
                [stored] = server.all("resourceslices")
                server.put("resourceslices", {**stored, "metadata": {**stored["metadata"], "annotations": {"a": "b"}}})
                agent.offer(offers(offer()))
                assert await until(lambda: set(server.devices()) == {"0000-03-00-0-0x56c0"}) < 3
                assert server.writes == ["POST", "PUT", "PUT"]

        run(main)

    def test_a_create_without_response_makes_no_second_slice(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                server.fault("POST .*resourceslices", skip=1, after=True)
                async with running(server):
                    await until(lambda: bool(server.slices))
                    await asyncio.sleep(60)
                    assert len(server.slices) == 1
                    assert server.slices[0].spec.pool.generation == 1

        run(main)

    def test_changes_during_an_outage_are_written_afterwards(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                await server.stop()
                await asyncio.sleep(30)
                agent.offer(offers(sick(), offer("0000:04:00.0")))
                await asyncio.sleep(90)
                assert agent.publisher.problems
                await server.start()
                assert await until(lambda: "temperature" in server.devices()["0000-03-00-0-0x56c0"]) <= 61
                assert agent.publisher.problems == []

        run(main)

    def test_missing_rights_are_a_problem_and_not_a_loop(self, run: Run) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                server.fault("POST .*resourceslices", 403, times=-1)
                async with running(server) as agent:
                    await asyncio.sleep(600)
                    assert 5 < server.count("POST") < 40
                    assert "403" in agent.publisher.problems[0]

        run(main)


def test_drivers_of_a_node_begin_one_publication_in_a_second(run: Run) -> None:
    async def main() -> None:
        pace = Pace()
        async with SliceServer() as server, contextlib.AsyncExitStack() as stack:
            agents = [
                await stack.enter_async_context(running(server, GPUS, driver=f"gpu{number}.example.com", pace=pace))
                for number in range(6)
            ]
            await until(lambda: len(server.slices) == 6)
            loop, times = asyncio.get_running_loop(), list[float]()
            store = server.store

            def observed_store(*arguments: Any) -> Any:
                times.append(loop.time())
                return store(*arguments)

            server.store = observed_store  # type: ignore[method-assign]
            await asyncio.sleep(2)
            for agent in agents:
                agent.offer(offers(offer()))
            await until(lambda: len(times) == 6)
            assert all(later - earlier >= 0.999 for earlier, later in itertools.pairwise(times))

    run(main)
