"""What hooks return is checked: the valid part is used, and the problems name what was found."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from accelplane.devices import Allocation, Device, DeviceNode, Inventory, Mount, Resource, Skipped, Verdict
from accelplane.kubelet.server import AllocationError
from accelplane.node.hook_problems import HookProblems
from accelplane.node.hook_results import (
    MAX_SAMPLES,
    checked_allocation,
    checked_choice,
    checked_devices,
    checked_plans,
    checked_samples,
    checked_verdicts,
)
from accelplane.plugins import Sample
from accelplane.readings import DevicePlan

NODE = DeviceNode("/dev/a")


def inventory(found: object, namespace: str = "a.com") -> Inventory:
    return Inventory.of(checked_devices(namespace, found))


class TestDevices:
    def test_the_later_of_two_different_devices_with_one_id_is_skipped(self) -> None:
        first = Device(resource="r", id="1", reason="first")
        found = [first, Device(resource="r", id="1", reason="later"), Device(resource="r", id="1", reason="first")]
        reason = "scan yielded two devices with this id of the resource r"
        assert inventory(found) == Inventory({"r": {"1": first}}, (Skipped("'1'", reason, warning=True),))

    def test_a_value_that_is_no_device_is_skipped(self) -> None:
        reason = "scan yielded it, expected a Device, Resource or Skipped"
        device = Device(resource="r", id="1")
        assert inventory([None, device, "card0"]) == Inventory(
            {"r": {"1": device}},
            (Skipped("None", reason, warning=True), Skipped("'card0'", reason, warning=True)),
        )

    @pytest.mark.parametrize("found", [None, "card0", Device(resource="r", id="1")], ids=str)
    def test_a_result_that_is_not_iterable_is_an_error(self, found: object) -> None:
        with pytest.raises(TypeError, match=r"^found .*, expected devices$"):
            inventory(found)

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
        found = inventory([item, Device(resource="r", id="good")])
        assert [device.id for device in found] == ["good"]
        (skip,) = found.skipped
        assert skip.warning
        assert subject in skip.subject
        assert why in skip.reason
        assert skip.subject.isprintable()

    def test_an_inventory_with_an_invalid_namespace_is_empty(self) -> None:
        found = inventory([Device(resource="r", id="1"), Device(resource="r", id="2")], "Bad")
        assert not len(found)
        assert [skip.subject for skip in found.skipped] == ["'1'", "'2'"]

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
            ({"nodes": ["/dev/a"]}, "nodes has '/dev/a', expected a DeviceNode"),
            ({"nodes": [Mount("/dev/a")]}, "expected a DeviceNode"),
            ({"nodes": [DeviceNode("dev/a")]}, "nodes has the path 'dev/a', expected an absolute path"),
            ({"nodes": [DeviceNode("/dev/a", permissions="rx")]}, "permissions 'rx', expected letters of r, w and m"),
            ({"mounts": [Mount(7)]}, "mounts has the path 7, expected an absolute path"),
            ({"envs": {"COUNT": 4}}, "envs has 'COUNT': 4, expected texts"),
            ({"envs": ["COUNT=4"]}, "found ['COUNT=4'], expected a mapping of texts"),
            ({"annotations": {4: "x"}}, "annotations has 4: 'x', expected texts"),
            ({"attributes": {"a": 1.5}}, "attribute 'a' is 1.5, expected a text, number, bool or Version"),
            ({"capacities": {"memory": -1}}, "capacity 'memory' is -1, expected a number from 0"),
            ({"cdi": "example.com/x=y"}, "cdi is 'example.com/x=y', expected a CdiDevice"),
        ],
    )
    def test_a_device_with_an_invalid_value_is_skipped_and_the_others_are_kept(
        self, value: Mapping[str, object], problem: str
    ) -> None:
        options: dict[str, object] = {"resource": "r", "id": "a", **value}
        found = inventory([Device(**options), Device(resource="r", id="b", nodes=[NODE])])  # type: ignore[arg-type]
        assert [device.id for device in found] == ["b"]
        (skipped,) = found.skipped
        assert skipped.warning
        assert problem in skipped.reason

    def test_each_share_of_a_device_with_an_invalid_value_is_skipped(self) -> None:
        envs: dict[str, Any] = {"COUNT": 4}
        assert len(inventory(Device(resource="r", id="a", envs=envs).shared(3)).skipped) == 3

    def test_skipped_hardware_has_texts(self) -> None:
        unusable: Any = Skipped(7, OSError("gone"))  # type: ignore[arg-type]
        assert inventory([unusable]).skipped == (Skipped("7", "gone"),)


def test_verdicts_of_unknown_units_are_left_out() -> None:
    good = Verdict("good")
    assert checked_verdicts({"a": good, "a-0": good, 7: good}, ["a"]) == (
        {"a": good},
        ["found verdicts of 'a-0', 7, expected the units of the devices that it was called with"],
    )


def test_a_choice_has_available_ids_only() -> None:
    assert checked_choice(["a", "z", None], {"a", "b"}) == (["a"], ["found 'z', None, expected available ids"])


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (None, "post_allocate: found None, expected an Allocation"),
        (Allocation(envs={"A": 1}), "post_allocate: envs has 'A': 1, expected texts"),  # type: ignore[dict-item]
        (Allocation(nodes=["/dev/a"]), "post_allocate: nodes has '/dev/a', expected a DeviceNode"),  # type: ignore[list-item]
        (Allocation(cdi_devices=[NODE]), "post_allocate: cdi_devices has DeviceNode"),  # type: ignore[list-item]
    ],
)
def test_an_invalid_allocation_fails_the_call_with_the_hook_and_the_field(found: object, problem: str) -> None:
    with pytest.raises(AllocationError) as caught:
        checked_allocation("post_allocate", found)
    assert str(caught.value).startswith(problem)


def sample(**fields: object) -> Sample:
    return Sample(**{"name": "m", "help": "A value.", "labels": {}, "value": 1.0, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("invalid", "cause", "problem"),
    [
        (sample(name="m-a"), "invalid-name", "metric name 'm-a': expected letters"),
        (sample(name="accelplane_a"), "invalid-name", "expected another prefix than accelplane_ or process_"),
        (sample(labels={"a-b": "x"}), "invalid-name", "label 'a-b' of metric m: expected letters, digits and _"),
        (sample(labels={"a": 1}), "invalid-value", "label a of metric m: found 1, expected a text"),
        (sample(labels=None), "invalid-value", "m: found the labels None, expected a mapping of texts"),
        (sample(value="1"), "invalid-value", "m: found '1', expected a number"),
        (1.0, "invalid-value", "found 1.0, expected a Sample"),
    ],
)
def test_an_invalid_sample_is_left_out_and_counted(invalid: object, cause: str, problem: str) -> None:
    found = checked_samples([invalid, sample()])
    assert found.samples == [sample()]
    assert found.dropped == {cause: 1}
    assert problem in found.problems[0]


def test_samples_without_end_are_left_out_above_the_limit() -> None:
    first = [sample(name="first")] * 3
    found = checked_samples(itertools.chain(first, itertools.repeat(sample(name="endless"))))
    assert found.samples == first
    assert found.dropped["limit"] > MAX_SAMPLES


def test_the_first_plan_of_a_device_is_used() -> None:
    plan = DevicePlan(device="a", units=())
    assert checked_plans([plan, None, DevicePlan(device="a", units=("b",))]) == (
        [plan],
        ["found None, expected a DevicePlan", "found two plans of the device 'a', expected one"],
    )


@pytest.mark.parametrize("check", [checked_samples, checked_plans])
def test_a_result_without_values_is_an_error(check: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"^found None, expected "):
        check(None)


class TestProblems:
    def test_a_problem_is_logged_once_while_it_lasts(self, caplog: pytest.LogCaptureFixture) -> None:
        changes: list[None] = []
        problems = HookProblems("tpu", lambda: changes.append(None))
        for found in (["a"], ["a"], ["a", "b"], [], ["a"]):
            problems.update("health", found)
        assert caplog.messages == ["tpu: health: a", "tpu: health: b", "tpu: health: a"]
        assert problems.texts == ["health: a"]
        assert len(changes) == 4

    def test_their_number_is_limited(self) -> None:
        problems = HookProblems("tpu")
        problems.update("labels", map(str, range(20)))
        assert problems.texts[-1] == "labels: 12 more"
