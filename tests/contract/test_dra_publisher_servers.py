"""Slices at API servers with other features, with other clients, and that fail."""

import asyncio

import pytest
from drapools import functions, offer, offers
from slicepublishers import NAMES, PARTS, QAT, TILES, identities, run, running, unhealthy, until, wipe
from sliceservers import DRIVER, NODE, SliceServer

from accelplane.dra.model import Features, Pool
from accelplane.dra.resourceslice import RequestRange


class TestFeatures:
    @pytest.mark.parametrize("minor", [34, 37])
    def test_tiles_are_not_published_without_shared_counters(self, minor: int) -> None:
        async def main() -> None:
            async with SliceServer(minor, gates=()) as server, running(server, TILES) as agent:
                await until(lambda: bool(server.slices))
                await asyncio.sleep(60)
                assert set(server.devices()) == {"0000-03-00-0-0x56c0"}
                assert server.writes == ["POST"]
                assert any("DRAPartitionableDevices" in each for each in agent.publisher.limitations)

        run(main)

    def test_counter_sets_move_to_their_own_slice_after_an_upgrade(self) -> None:
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

    def test_an_upgrade_behind_a_load_balancer_is_noticed_by_an_invalid_slice(self) -> None:
        async def main() -> None:
            async with SliceServer(34) as server, running(server, TILES) as agent:
                await until(lambda: set(server.devices()) == PARTS)
                server.become(37)  # the watch goes on
                agent.offer(offers(offer(attributes={"tiles": 4})))
                assert await until(lambda: len(server.slices) == 2) < 5
                assert len(server.devices()) == 5
                assert agent.publisher.problems == []

        run(main)

    def test_another_layout_is_tried_if_the_first_is_invalid(self) -> None:
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

    def test_shares_are_one_device_or_several(self) -> None:
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
    def test_a_gate_that_is_switched_off_and_on_is_followed(self, gate: str, caplog: pytest.LogCaptureFixture) -> None:
        given = offers(
            unhealthy("0000:03:00.0"), offer("0000:04:00.0", attributes={"tiles": 2}), offer("0000:05:00.0", shares=2)
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

    def test_a_field_that_only_the_write_loses_is_noticed(self) -> None:
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

    def test_v1beta1_wraps_the_content_of_devices(self) -> None:
        async def main() -> None:
            async with SliceServer(33, gates=(), versions=("v1beta1",)) as server, running(server):
                await until(lambda: bool(server.slices))
                [stored] = server.all("resourceslices")
                assert stored["apiVersion"] == "resource.k8s.io/v1beta1"
                assert all(set(device) == {"name", "basic"} for device in stored["spec"]["devices"])
                await asyncio.sleep(600)
                assert server.writes == ["POST"]

        run(main)

    def test_an_api_that_is_not_served_is_a_problem(self) -> None:
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
    def test_changes_by_hand_are_repaired_with_a_growing_delay(self) -> None:
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

    def test_a_slice_of_another_program_for_the_driver_is_deleted(self) -> None:
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

    def test_slices_of_other_drivers_stay(self) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                spec = {"driver": "nic.example.com", "nodeName": NODE, "pool": {"name": NODE}}
                server.put("resourceslices", {"metadata": {"name": "nic"}, "spec": spec})
                async with running(server):
                    await until(lambda: len(server.all("resourceslices")) == 2)
                    assert server.get("resourceslices", "nic") is not None

        run(main)

    def test_a_node_that_is_created_again_owns_the_new_slices(self) -> None:
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

    def test_slices_are_not_written_while_there_is_no_node(self) -> None:
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
    def test_a_refused_device_is_left_out(self) -> None:
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

    def test_a_refused_device_is_tried_again_after_an_upgrade(self) -> None:
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

    def test_late_events_of_own_writes_cause_no_requests(self) -> None:
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

    def test_a_conflict_reads_the_slices_and_starts_again(self) -> None:
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

    def test_a_create_without_response_makes_no_second_slice(self) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                server.fault("POST .*resourceslices", skip=1, after=True)
                async with running(server):
                    await until(lambda: bool(server.slices))
                    await asyncio.sleep(60)
                    assert len(server.slices) == 1
                    assert server.slices[0].spec.pool.generation == 1

        run(main)

    def test_changes_during_an_outage_are_written_afterwards(self) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                await server.stop()
                await asyncio.sleep(30)
                agent.offer(offers(unhealthy(), offer("0000:04:00.0")))
                await asyncio.sleep(90)
                assert agent.publisher.problems
                await server.start()
                assert await until(lambda: "temperature" in server.devices()["0000-03-00-0-0x56c0"]) <= 61
                assert agent.publisher.problems == []

        run(main)

    def test_missing_rights_are_a_problem_and_not_a_loop(self) -> None:
        async def main() -> None:
            async with SliceServer() as server:
                server.fault("POST .*resourceslices", 403, times=-1)
                async with running(server) as agent:
                    await asyncio.sleep(600)
                    assert 5 < server.count("POST") < 40
                    assert "403" in agent.publisher.problems[0]

        run(main)


def test_an_internal_error_does_not_end_the_publication() -> None:
    def broken(_features: Features) -> Pool:
        raise KeyError("unit")

    async def main() -> None:
        async with SliceServer() as server, running(server) as agent:
            await until(lambda: bool(server.slices))
            agent.publisher.set_pool(broken)
            await asyncio.sleep(10)
            assert "internal error: KeyError: 'unit'" in agent.publisher.problems[0]
            assert agent.publisher.published is None
            agent.offer(offers(offer("0000:03:00.0")))
            await until(lambda: set(server.devices()) == {"0000-03-00-0-0x56c0"})
            assert agent.publisher.problems == []

    run(main)
