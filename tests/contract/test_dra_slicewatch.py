"""One watch of slices for all drivers of a node, in virtual time."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from drapools import functions
from slicepublishers import QAT, run, running, until, wipe
from sliceservers import DRIVER, NODE, SliceServer

from accelplane.apiserver import ApiServer
from accelplane.dra.observedslices import ObservedSlices
from accelplane.dra.resourceslice import Metadata, ResourcePool, ResourceSlice, SliceSpec
from accelplane.dra.slicewatch import SliceWatches


def a_slice(name: str, version: str, driver: str = DRIVER) -> ResourceSlice:
    pool = ResourcePool(name=NODE, generation=1, resource_slice_count=1)
    return ResourceSlice(
        metadata=Metadata(name=name, uid=name, resource_version=version),
        spec=SliceSpec(driver=driver, pool=pool, node_name=NODE),
    )


def test_drivers_of_a_node_share_one_watch() -> None:
    async def main() -> None:
        async with SliceServer() as server:
            watches = SliceWatches(ApiServer(server.config), NODE)
            async with running(server, watches=watches):
                await until(lambda: len(server.slices) == 1)
                async with running(server, functions(3), driver=QAT, watches=watches):
                    await until(lambda: len(server.slices) == 2)
                    for disturb in (server.abort_watches, lambda: None):
                        disturb()
                        await asyncio.sleep(10)
                        wipe(server)
                        await until(lambda: len(server.slices) == 2)
                    assert server.open_watches == 1
                    assert server.count("WATCH .*resourceslices") == 2
                server.remove("resourceslices", f"{NODE}-{QAT}-0")
                wipe(server)
                await until(lambda: [each.spec.driver for each in server.slices] == [DRIVER])
                assert server.open_watches == 1
            await until(lambda: server.open_watches == 0)

    run(main)


def test_drivers_that_start_at_the_same_time_share_one_watch() -> None:
    async def main() -> None:
        async with SliceServer() as server:
            watches = SliceWatches(ApiServer(server.config), NODE)
            async with running(server, watches=watches), running(server, functions(3), driver=QAT, watches=watches):
                await until(lambda: len(server.slices) == 2)
                wipe(server)
                await until(lambda: len(server.slices) == 2)
                assert server.count("WATCH .*resourceslices") == 1

    run(main)


def test_slices_of_other_programs_are_not_decoded() -> None:
    async def main() -> None:
        async with SliceServer() as server, running(server):
            await until(lambda: len(server.slices) == 1)
            admit, server.admit = server.admit, lambda thing: thing
            spec = {"driver": "gpu.example.com", "nodeName": NODE, "devices": "a later version"}
            server.put("resourceslices", {"metadata": {"name": "other"}, "spec": spec})
            server.remove("resourceslices", "other")
            server.admit = admit
            await asyncio.sleep(1)
            wipe(server)
            await until(lambda: len(server.slices) == 1)
            assert server.count("WATCH .*resourceslices") == 1

    run(main)


class _Lists:
    """An API server where slices change during a list."""

    def __init__(self, slices: Sequence[ResourceSlice]) -> None:
        self._slices = slices
        self.during: Callable[[], None] = lambda: None

    async def list(self, _path: str, consume: Callable[[Sequence[Any]], None], **_options: Any) -> str:
        self.during()
        consume([msgspec.json.encode(each) for each in self._slices])
        return "5"


async def test_events_during_a_list_are_not_lost() -> None:
    api: Any = _Lists([a_slice("a", "4"), a_slice("b", "3")])
    observed = ObservedSlices(api, "/slices", NODE, DRIVER, lambda: None)

    def change() -> None:
        observed.observe("MODIFIED", a_slice("a", "2"))
        observed.observe("DELETED", a_slice("b", "6"))
        observed.observe("ADDED", a_slice("c", "7"))

    for during in (lambda: None, change):
        api.during = during
        await observed.list()
    assert {name: each.metadata.resource_version for name, each in observed.present.items()} == {"a": "4", "c": "7"}
