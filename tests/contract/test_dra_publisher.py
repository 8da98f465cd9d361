"""The slices in an API server, in virtual time."""

import asyncio
import contextlib
import itertools
from collections.abc import Collection
from typing import Any

import pytest
from drapools import functions, offer, offers
from slicepublishers import GPUS, NAMES, QAT, identities, run, running, unhealthy, until, wipe
from sliceservers import DRIVER, NODE, SliceServer

from accelplane.dra import catalog
from accelplane.dra.publisher import Pace


def test_the_slices_of_a_node_have_owner_label_pool_and_devices() -> None:
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


def test_nothing_is_requested_before_the_registration() -> None:
    async def main() -> None:
        async with SliceServer() as server, running(server, registered=False) as agent:
            await asyncio.sleep(600)
            assert server.requests == []
            agent.publisher.registered(True)
            assert await until(lambda: bool(server.slices)) < 2

    run(main)


class TestKubelet:
    def test_slices_are_back_after_a_kubelet_restart(self) -> None:
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

    def test_a_wipe_after_the_registration_is_repaired(self) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server, functions(200), driver=QAT):
                await until(lambda: len(server.slices) == 4)
                await asyncio.sleep(40)
                wipe(server)
                assert await until(lambda: len(server.slices) == 4) < 3
                assert {each.spec.pool.generation for each in server.slices} == {2}

        run(main)

    def test_a_late_wipe_is_repaired_soon_also_after_many_repairs(self) -> None:
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

    def test_an_agent_restart_writes_nothing(self) -> None:
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
    def test_the_removal_of_one_of_200_devices_is_one_update(self) -> None:
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

    def test_readers_see_no_complete_pool_that_is_wrong(self) -> None:
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

    def test_without_units_an_empty_slice_remains_only_where_there_were_units(self) -> None:
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
    def test_an_unhealthy_device_gets_a_taint_and_loses_it(self) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                agent.offer(offers(unhealthy(), offer("0000:04:00.0")))
                taints = {"0000-03-00-0-0x56c0": f"{DRIVER}/health=temperature:NoSchedule", "0000-04-00-0-0x56c0": ""}
                assert await until(lambda: server.devices() == taints) < 3
                of_units = {"0000:03:00.0": [f"{DRIVER}/health=temperature:NoSchedule"]}
                await until(lambda: agent.publisher.taints == of_units)
                time = "2026-01-01T00:00:01Z"
                [stored] = server.all("resourceslices")
                stored["spec"]["devices"][0]["taints"][0]["timeAdded"] = time
                server.put("resourceslices", stored)
                agent.offer(offers(unhealthy(), offer("0000:04:00.0", capacities={})))
                await until(lambda: len(server.writes) == 3)
                [stored] = server.all("resourceslices")
                assert [each["timeAdded"] for each in stored["spec"]["devices"][0]["taints"]] == [time]
                agent.offer(GPUS)
                assert await until(lambda: set(server.devices().values()) == {""}) < 12

        run(main)

    @pytest.mark.parametrize("minor", [34, 37])
    def test_without_taints_an_unhealthy_device_is_withdrawn(self, minor: int) -> None:
        async def main() -> None:
            async with SliceServer(minor, gates=()) as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                agent.offer(offers(unhealthy(), offer("0000:04:00.0")))
                await until(lambda: set(server.devices()) == {"0000-04-00-0-0x56c0"})
                assert any("DRADeviceTaints" in each for each in agent.publisher.limitations)
                assert agent.publisher.problems == []
                await asyncio.sleep(60)
                agent.offer(GPUS)
                await until(lambda: set(server.devices()) == NAMES)
                await asyncio.sleep(600)
                assert server.writes == ["POST", "PUT", "PUT"]
                assert agent.publisher.limitations == []

        run(main)

    def test_flapping_health_is_one_write_in_ten_seconds(self) -> None:
        async def main() -> None:
            async with SliceServer() as server, running(server) as agent:
                await until(lambda: bool(server.slices))
                for number in range(200):
                    agent.offer(offers(unhealthy() if number % 2 else offer(), offer("0000:04:00.0")))
                    await asyncio.sleep(0.5)
                assert 5 <= len(server.writes) <= 12
                agent.offer(offers(unhealthy(), offer("0000:04:00.0")))
                await asyncio.sleep(11)
                assert "temperature" in server.devices()["0000-03-00-0-0x56c0"]

        run(main)

    def test_the_withdrawal_of_a_unit_that_has_just_changed_is_reported(self) -> None:
        async def main() -> None:
            seen: list[Collection[str] | None] = []
            async with SliceServer() as server, running(server, changed=lambda: seen.append(published())) as agent:

                def published() -> Collection[str] | None:
                    return agent.publisher.published

                await until(lambda: bool(seen))
                agent.offer(offers(unhealthy(), offer("0000:04:00.0")))
                await until(lambda: len(seen) == 2)
                agent.offer(offers(offer("0000:04:00.0")))
                await until(lambda: seen[-1] == {"0000:04:00.0"}, 15)
                assert set(server.devices()) == {"0000-04-00-0-0x56c0"}
                assert seen[:2] == [{"0000:03:00.0", "0000:04:00.0"}] * 2

        run(main)


def test_drivers_of_a_node_begin_one_publication_in_a_second() -> None:
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
