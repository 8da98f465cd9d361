"""From pools to writes, without an API server."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelplane.apiserver import ApiError
from accelplane.dra.model import Capacity, Pool, PoolDevice, Taint
from accelplane.dra.observedslices import ObservedSlices
from accelplane.dra.resourceslice import OwnerReference, ResourceSlice
from accelplane.dra.slices import Plan, Target, plan, slice_name
from accelplane.dra.slicewatch import SliceWatches
from accelplane.dra.validation import Layout, problems

NODE, DRIVER = "node-1", "gpu.intel.com"
Present = Mapping[str, ResourceSlice]
OWNER = OwnerReference(api_version="v1", kind="Node", name=NODE, uid="1", controller=True)


def device(name: str, **fields: Any) -> PoolDevice:
    return PoolDevice(name=name, unit=name, attributes={"model": "x"}, **fields)


def pool(*devices: PoolDevice, **fields: Any) -> Pool:
    return Pool(driver=DRIVER, name=NODE, devices=devices, **fields)


def tiles(*numbers: int) -> Pool:
    """GPUs with this number of tiles."""
    devices: list[PoolDevice] = []
    for gpu, count in enumerate(numbers):
        devices.append(device(f"gpu{gpu}", counters={f"gpu{gpu}": {"tiles": count}}))
        devices.extend(device(f"gpu{gpu}-t{tile}", counters={f"gpu{gpu}": {"tiles": 1}}) for tile in range(count))
    return pool(*devices, counter_sets={f"gpu{gpu}": {"tiles": count} for gpu, count in enumerate(numbers)})


def target(layout: Layout = "separate") -> Target:
    return Target(node=NODE, layout=layout, owner=OWNER)


def steps(planned: Plan, present: Present) -> list[Present]:
    """The slices after each write, as the API server stores them."""
    states: list[Present] = []
    current = dict(present)
    for each in planned.deletes:
        del current[each.metadata.name]
        states.append(dict(current))
    for each in (*planned.updates, *planned.creates):
        body = msgspec.json.decode(msgspec.json.encode(each), type=ResourceSlice)
        metadata = msgspec.structs.replace(body.metadata, uid="u", resource_version="1")
        current[each.metadata.name] = msgspec.structs.replace(body, metadata=metadata)
        states.append(dict(current))
    return states


def write(wanted: Pool, present: Present, layout: Layout = "separate", **options: Any) -> Present:
    states = steps(plan(wanted, present, target(layout), **options), present)
    return states[-1] if states else present


def view(present: Present) -> set[str] | None:
    """The devices that a reader sees, None if the pool is incomplete."""
    highest = max((each.spec.pool.generation for each in present.values()), default=0)
    newest = [each.spec for each in present.values() if each.spec.pool.generation == highest]
    if newest and len(newest) != newest[0].pool.resource_slice_count:
        return None
    return {one.name for each in newest for one in each.devices or ()}


def homes(present: Present) -> dict[str, str]:
    return {one.name: name for name, each in present.items() for one in each.spec.devices or ()}


NAMES = st.sets(st.integers(0, 150), max_size=150)


class TestPlan:
    @given(st.lists(NAMES, min_size=2, max_size=5))
    @settings(max_examples=40, deadline=None)
    def test_a_reader_sees_the_pool_before_or_after_or_an_incomplete_one(self, numbers: list[set[int]]) -> None:
        present: Present = {}
        before: set[str] = set()
        for chosen in numbers:
            wanted = pool(*(device(f"d{number}") for number in sorted(chosen)))
            planned = plan(wanted, present, target())
            states = steps(planned, present)
            after = {each.name for each in wanted.devices}
            assert all(view(state) in (None, before, after) for state in states)
            earlier, present, before = homes(present), states[-1] if states else present, after
            assert view(present) == after
            assert not plan(wanted, present, target())
            assert all(home == earlier[name] for name, home in homes(present).items() if name in earlier)
            assert all(len(each.spec.devices or ()) <= 64 for each in present.values())

    def test_one_changed_slice_is_an_update_of_the_same_generation(self) -> None:
        devices = [device(f"d{number}") for number in range(130)]
        present = write(pool(*devices), {})
        changed = [*devices[:70], device("d70", taints=(Taint("a/health", "hot", "NoSchedule"),)), *devices[71:]]
        planned = plan(pool(*changed), present, target())
        [updated] = planned.updates
        assert (planned.deletes, planned.creates, updated.spec.pool.generation) == ([], [], 1)

    def test_two_changed_slices_are_a_new_generation_of_all(self) -> None:
        devices = [device(f"d{number}") for number in range(130)]
        present = write(pool(*devices), {})
        changed = [device(each.name, capacities={"memory": Capacity(1)}) for each in devices[:100]] + devices[100:]
        planned = plan(pool(*changed), present, target())
        assert len(planned.updates) == 3
        assert {each.spec.pool.generation for each in planned.updates} == {2}

    def test_a_generation_that_was_deleted_is_not_used_again(self) -> None:
        [created] = plan(pool(device("one")), {}, target(), generation=7).creates
        assert created.spec.pool.generation == 8

    def test_slices_with_other_names_or_pools_are_deleted(self) -> None:
        present = write(pool(device("one")), {})
        [ours] = present.values()
        foreign = msgspec.structs.replace(ours, metadata=msgspec.structs.replace(ours.metadata, name="node-1-x7k2p"))
        planned = plan(pool(device("one")), {**present, "node-1-x7k2p": foreign}, target())
        assert [each.metadata.name for each in planned.deletes] == ["node-1-x7k2p"]

    def test_an_owner_of_another_program_stays(self) -> None:
        [ours] = write(pool(device("one")), {}).values()
        other = OwnerReference(api_version="v1", kind="ConfigMap", name="a", uid="2")
        old = OwnerReference(api_version="v1", kind="Node", name=NODE, uid="0", controller=True)
        metadata = msgspec.structs.replace(ours.metadata, owner_references=[old, other])
        changed = msgspec.structs.replace(ours, metadata=metadata)
        [updated] = plan(pool(device("one")), {ours.metadata.name: changed}, target()).updates
        assert updated.metadata.owner_references == [other, OWNER]
        assert updated.spec.pool.generation == 1

    def test_without_devices_a_slice_is_kept_or_none(self) -> None:
        present = write(pool(device("one")), {})
        assert write(pool(), present) == {}
        [empty] = write(pool(), present, keep_empty=True).values()
        assert empty.spec.devices is None
        assert len(write(pool(), {}, keep_empty=True)) == 1


class TestCounters:
    def test_since_135_counter_sets_are_in_slices_of_eight(self) -> None:
        present = write(tiles(*[2] * 20), {})
        counts = {name: len(each.spec.shared_counters or ()) for name, each in present.items()}
        assert counts == {
            f"{NODE}-{DRIVER}-{suffix}": count for suffix, count in [("0", 0), ("c0", 8), ("c1", 8), ("c2", 4)]
        }
        assert all(not list(problems(each, "separate")) for each in present.values())

    def test_with_134_a_unit_and_its_counters_are_in_one_slice(self) -> None:
        wanted = tiles(*[4] * 40)
        present = write(wanted, {}, "together")
        assert all(not list(problems(each, "together")) for each in present.values())
        found = homes(present)
        assert all(found[name] == found[name.partition("-")[0]] for name in found)
        assert len(found) == 200

    @given(st.lists(st.integers(1, 8), min_size=1, max_size=30), st.lists(st.integers(1, 8), min_size=1, max_size=30))
    @settings(max_examples=25, deadline=None)
    def test_a_layout_becomes_the_other_one(self, first: list[int], second: list[int]) -> None:
        present: Present = {}
        pairs: list[tuple[list[int], Layout]] = [(first, "together"), (second, "separate"), (first, "together")]
        for numbers, layout in pairs:
            wanted = tiles(*numbers)
            present = write(wanted, present, layout)
            assert homes(present).keys() == {each.name for each in wanted.devices}
            assert all(not list(problems(each, layout)) for each in present.values())
            assert not plan(wanted, present, target(layout))


def test_names_of_slices_are_short_enough_and_different() -> None:
    long = ".".join(["a" * 60] * 4)
    names = {slice_name(long, DRIVER, str(number)) for number in range(20)}
    assert len(names) == 20
    assert all(len(name) <= 253 for name in names)
    pooled = Pool(driver=DRIVER, name=long, devices=[device("one")])
    [created] = plan(pooled, {}, Target(node=long)).creates
    assert not list(problems(created, "separate"))


class EndingWatches:
    """An API server, or a proxy before it, that ends each watch at once."""

    watches = 0

    async def list(self, *_arguments: Any, **_options: Any) -> str:
        return "1"

    async def watch(self, *_arguments: Any, **_options: Any) -> AsyncIterator[Any]:
        self.watches += 1
        assert self.watches < 5
        for event in ():
            yield event


async def test_watches_that_end_at_once_are_an_error() -> None:
    api: Any = EndingWatches()
    observed = ObservedSlices(api, "/slices", "node-1", "gpu.intel.com", lambda: None)

    async with SliceWatches(api, "node-1").following(observed) as watch:
        with pytest.raises(ApiError, match="ended at once"):
            await watch
