"""Devices as values, inventories, and the differences of two inventories."""

from collections.abc import Mapping
from typing import Any

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
        inventory = Inventory.of("gpu.intel.com", found)
        assert [(device.resource, device.id) for device in inventory] == [
            ("xe2", "card2"),
            ("xe2", "card10"),
            ("xe10", "card2"),
            ("xe10", "card10"),
        ]
        assert len(inventory) == 4

    def test_the_later_of_two_different_devices_with_one_id_is_skipped(self) -> None:
        first = Device(resource="r", id="1", reason="first")
        found = [first, Device(resource="r", id="1", reason="later"), Device(resource="r", id="1", reason="first")]
        reason = "scan yielded two devices with this id of the resource r"
        assert Inventory.of("a.com", found) == Inventory({"r": {"1": first}}, (Skipped("'1'", reason, warning=True),))

    def test_a_value_that_is_no_device_is_skipped(self) -> None:
        reason = "scan yielded it, expected a Device, Resource or Skipped"
        device = Device(resource="r", id="1")
        found: list[Any] = [None, device, "card0"]
        assert Inventory.of("a.com", found) == Inventory(
            {"r": {"1": device}},
            (Skipped("None", reason, warning=True), Skipped("'card0'", reason, warning=True)),
        )

    def test_an_inventory_has_resources_without_devices(self) -> None:
        inventory = Inventory.of("a.com", [Resource("empty"), Device(resource="r", id="1"), Resource("r")])
        assert {name: list(devices) for name, devices in inventory.resources.items()} == {"empty": [], "r": ["1"]}

    def test_an_inventory_has_the_skipped_hardware(self) -> None:
        skipped = Skipped("card0", "not ours")
        assert Inventory.of("a.com", [skipped]) == Inventory({}, (skipped,))

    @pytest.mark.parametrize(
        ("item", "subject", "why"),
        [
            (Device(resource="a/b", id="1"), "'1'", "the part after the slash"),
            (Resource("-"), "'-'", "the part after the slash"),
            (Device(resource="r", id=""), "''", "is empty"),
            (Device(resource="r", id="\udcff\n" + "x" * 400), "\\udcff", "expected at most 253"),
        ],
    )
    def test_names_that_the_kubelet_rejects_are_skipped(self, item: Device | Resource, subject: str, why: str) -> None:
        inventory = Inventory.of("a.com", [item, Device(resource="r", id="good")])
        assert [device.id for device in inventory] == ["good"]
        (skip,) = inventory.skipped
        assert skip.warning
        assert subject in skip.subject
        assert why in skip.reason
        assert skip.subject.isprintable()

    def test_an_inventory_with_an_invalid_namespace_is_empty(self) -> None:
        inventory = Inventory.of("Bad", [Device(resource="r", id="1"), Device(resource="r", id="2")])
        assert not len(inventory)
        assert [skip.subject for skip in inventory.skipped] == ["'1'", "'2'"]

    def test_replacing_devices_keeps_the_order(self) -> None:
        inventory = Inventory.of("a.com", [Device(resource="r", id="1"), Device(resource="r", id="10")])
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
INVENTORIES = st.lists(DEVICES | st.builds(Resource, st.sampled_from(["a", "b", "c"])), max_size=8).map(
    lambda found: Inventory.of("a.com", found)
)


@given(INVENTORIES, st.lists(DEVICES, max_size=5))
def test_replacing_devices_equals_an_inventory_of_these_devices(inventory: Inventory, devices: list[Device]) -> None:
    last = {(device.resource, device.id): device for device in (*inventory, *devices)}
    found = [*map(Resource, inventory.resources), *last.values(), *inventory.skipped]
    replaced, scanned = inventory.with_devices(devices), Inventory.of("a.com", found)
    assert replaced == scanned
    assert list(replaced) == list(scanned)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"topology": ["0"]}, "topology has '0', expected numbers of NUMA nodes"),
        ({"topology": [-1]}, "topology has -1, expected numbers of NUMA nodes"),
        ({"topology": [True]}, "topology has True"),
        ({"health": "healthy"}, "health is 'healthy', expected 'Healthy' or 'Unhealthy'"),
        ({"reason": None}, "reason is None, expected a text"),
        ({"unit": 7}, "unit is 7, expected a text"),
        ({"id": 7}, ""),
    ],
)
def test_a_device_with_an_invalid_value_is_skipped_and_the_others_are_kept(
    value: Mapping[str, object], problem: str
) -> None:
    options: dict[str, object] = {"resource": "r", "id": "a", **value}
    inventory = Inventory.of("example.com", [Device(**options), Device(resource="r", id="b")])  # type: ignore[arg-type]
    assert [device.id for device in inventory] == ["b"]
    (skipped,) = inventory.skipped
    assert skipped.warning
    assert problem in skipped.reason
