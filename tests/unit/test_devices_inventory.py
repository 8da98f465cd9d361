"""Devices as values, inventories, and the differences of two inventories."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from accelplane.devices import (
    UNHEALTHY,
    Allocation,
    CdiDevice,
    Device,
    DeviceNode,
    Inventory,
    Mount,
    Resource,
    Skipped,
)

NODE = DeviceNode("/dev/dri/card0")


class TestDevice:
    def test_a_device_has_default_fields(self) -> None:
        device = Device(resource="i915", id="card0")
        assert device.healthy
        assert (device.unit, device.topology, device.nodes, device.mounts) == ("card0", UNSET, (), ())
        assert not Device(resource="i915", id="card0", health=UNHEALTHY).healthy

    def test_container_paths_default_to_host_paths(self) -> None:
        assert DeviceNode("/dev/x") == DeviceNode("/dev/x", "/dev/x", "rw")
        assert Mount("/x") == Mount("/x", "/x", read_only=True)
        assert DeviceNode("/dev/x", "/dev/y").container_path == "/dev/y"

    def test_lists_and_tuples_make_equal_devices(self) -> None:
        mounts = [Mount("/x")]
        one = Device(resource="r", id="1", nodes=[NODE], mounts=mounts, topology=[0, 1])
        other = Device(resource="r", id="1", nodes=(NODE,), mounts=tuple(mounts), topology=(0, 1))
        assert one == other == Device(resource="r", id="1", nodes=(NODE,), mounts=mounts, topology=range(2))

    @pytest.mark.parametrize(
        "change",
        [
            {"unit": "x"}, {"health": UNHEALTHY}, {"reason": "x"}, {"nodes": ()}, {"mounts": [Mount("/x")]},
            {"envs": {"A": "b"}}, {"annotations": {"a": "b"}}, {"topology": None}, {"topology": ()},
            {"attributes": {"a": "b"}}, {"cdi": CdiDevice(kind="a/b", name="c", env=["A=b"])},
        ],
    )  # fmt: skip
    def test_devices_differ_if_any_field_differs(self, change: Mapping[str, object]) -> None:
        fields: dict[str, object] = {"resource": "r", "id": "1", "nodes": [NODE]}
        assert Device(**fields) != Device(**{**fields, **change})  # pyright: ignore[reportArgumentType] - that of the field


class TestAllocation:
    def test_numa_nodes_are_the_ordered_union_without_duplicates(self) -> None:
        cdi = CdiDevice(kind="vendor.com/gpu", name="card0", nodes=[])
        render = DeviceNode("/dev/dri/renderD128")
        first = Device(resource="r", id="1", nodes=[NODE, render], envs={"A": "1", "B": "1"}, cdi=cdi)
        second = Device(resource="r", id="2", nodes=[render], mounts=[Mount("/x")], envs={"B": "2"}, cdi=cdi)
        assert Allocation.of([first, second]) == Allocation(
            nodes=(NODE, render),
            mounts=(Mount("/x"),),
            envs={"A": "1", "B": "2"},
            cdi_devices=("vendor.com/gpu=card0",),
        )

    def test_an_empty_list_has_no_numa_nodes(self) -> None:
        assert Allocation.of([]) == Allocation()


class TestInventory:
    def test_an_inventory_is_in_natural_order(self) -> None:
        found = [Device(resource=resource, id=id_) for resource in ("xe10", "xe2") for id_ in ("card10", "card2")]
        inventory = Inventory.of(found)
        assert [(device.resource, device.id) for device in inventory] == [
            ("xe2", "card2"),
            ("xe2", "card10"),
            ("xe10", "card2"),
            ("xe10", "card10"),
        ]
        assert len(inventory) == 4

    def test_an_inventory_has_resources_without_devices(self) -> None:
        inventory = Inventory.of([Resource("empty"), Device(resource="r", id="1"), Resource("r")])
        assert {name: list(devices) for name, devices in inventory.resources.items()} == {"empty": [], "r": ["1"]}

    def test_an_inventory_has_the_skipped_hardware(self) -> None:
        skipped = Skipped("card0", "not ours")
        assert Inventory.of([skipped]) == Inventory({}, (skipped,))

    def test_replacing_devices_keeps_the_order(self) -> None:
        inventory = Inventory.of([Device(resource="r", id="1"), Device(resource="r", id="10")])
        failing = Device(resource="r", id="2", health=UNHEALTHY)
        grown = inventory.with_devices([failing, Device(resource="a", id="0")])
        assert [device.id for device in grown] == ["0", "1", "2", "10"]
        assert [device.id for device in inventory] == ["1", "10"]
        assert grown.with_devices([failing]) == grown


DEVICES = st.builds(
    Device,
    resource=st.sampled_from(["a", "b", "c"]),
    id=st.sampled_from(["0", "1", "2"]),
    reason=st.sampled_from(["", "x"]),
)
INVENTORIES = st.lists(DEVICES | st.builds(Resource, st.sampled_from(["a", "b", "c"])), max_size=8).map(Inventory.of)


@given(INVENTORIES, st.lists(DEVICES, max_size=5))
def test_replacing_devices_equals_an_inventory_of_these_devices(inventory: Inventory, devices: list[Device]) -> None:
    last = {(device.resource, device.id): device for device in (*inventory, *devices)}
    found = [*map(Resource, inventory.resources), *last.values(), *inventory.skipped]
    replaced, scanned = inventory.with_devices(devices), Inventory.of(found)
    assert replaced == scanned
    assert list(replaced) == list(scanned)
