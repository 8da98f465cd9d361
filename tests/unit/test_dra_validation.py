"""The local copy of the API's rules for slices: each rule is violated once."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from accelplane.dra.resourceslice import ResourceSlice, quantity, quantity_value
from accelplane.dra.validation import Layout, problems

Json = dict[str, Any]
Change = Callable[[Json], object]

LONG = "a" * 64
PER_COUNTER = {"value": "1"}


def document(**device: Any) -> Json:
    devices = [{"name": "one", **device}]
    pool = {"name": "node-1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.intel.com", "nodeName": "node-1", "pool": pool, "devices": devices}
    return {"metadata": {"name": "node-1-gpu.intel.com-0"}, "spec": spec}


def found(thing: Json, layout: Layout = "separate") -> list[tuple[str, str]]:
    return [(each.device, each.field) for each in problems(msgspec.convert(thing, ResourceSlice), layout)]


def attributes(count: int) -> Mapping[str, Json]:
    return {f"a{number}": {"int": number} for number in range(count)}


def counters(count: int) -> Mapping[str, Json]:
    return {f"c{number}": PER_COUNTER for number in range(count)}


def policy(value: str = "10", **fields: Any) -> Json:
    return {"allowMultipleAllocations": True, "capacity": {"shares": {"value": value, "requestPolicy": fields}}}


@pytest.mark.parametrize(
    "device",
    [
        {},
        {"attributes": {"a": {"string": "x" * 64}, "resource.kubernetes.io/numaNode": {"int": 0}}},
        {"attributes": {"a": {"version": "1.2.3-rc.1+b"}}},
        {"attributes": attributes(31), "capacity": {"memory": {"value": "16Gi"}}},
        {"taints": [{"key": "gpu.intel.com/health", "value": "hot", "effect": "None"}]},
        policy(default="1"),
        policy(default="1", validRange={"min": "1"}),
        policy(default="4", validRange={"min": "1", "max": "10", "step": "3"}),
        policy(default="2", validValues=["1", "2"]),
        {"consumesCounters": [{"counterSet": "set", "counters": counters(32)}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_slice_that_the_api_server_accepts_has_no_problem(device: Json) -> None:
    assert found(document(**device)) == []


@pytest.mark.parametrize(
    ("device", "field"),
    [
        ({"name": "One"}, ".name"),
        ({"name": LONG}, ".name"),
        ({"name": ""}, ".name"),
        ({"attributes": {"a-b": {"int": 1}}}, ".attributes[a-b]"),
        ({"attributes": {"a" * 33: {"int": 1}}}, f".attributes[{'a' * 33}]"),
        ({"attributes": {"a/b/c": {"int": 1}}}, ".attributes[a/b/c]"),
        ({"attributes": {"/a": {"int": 1}}}, ".attributes[/a]"),
        ({"attributes": {f"{LONG}/a": {"int": 1}}}, f".attributes[{LONG}/a]"),
        ({"attributes": {"a": {}}}, ".attributes[a]"),
        ({"attributes": {"a": {"int": 1, "bool": True}}}, ".attributes[a]"),
        ({"attributes": {"a": {"string": "é" * 33}}}, ".attributes[a]"),
        ({"attributes": {"a": {"int": 2**63}}}, ".attributes[a]"),
        ({"attributes": {"a": {"version": "1.2"}}}, ".attributes[a]"),
        ({"attributes": {"a": {"version": "1.02.3"}}}, ".attributes[a]"),
        ({"attributes": {"a": {"version": f"1.2.{'3' * 19}"}}}, ".attributes[a]"),
        ({"attributes": {"a": {"version": f"1.2.3-{LONG}"}}}, ".attributes[a]"),
        ({"attributes": attributes(32), "capacity": {"memory": {"value": "1"}}}, ""),
        ({"capacity": {"memory": {"value": "much"}}}, ".capacity[memory]"),
        ({"capacity": {"m.": {"value": "1"}}}, ".capacity[m.]"),
        ({"capacity": {"shares": {"value": "2", "requestPolicy": {"default": "1"}}}}, ".capacity[shares]"),
        (policy(validRange={"min": "1"}), ".capacity[shares]"),
        (policy(default="x"), ".capacity[shares]"),
        (policy(default="1", validRange={}), ".capacity[shares]"),
        (policy(default="1", validRange={"min": "2"}), ".capacity[shares]"),
        (policy(default="11", validRange={"min": "1"}), ".capacity[shares]"),
        (policy(default="3", validRange={"min": "1", "max": "2"}), ".capacity[shares]"),
        (policy(default="1", validRange={"min": "1", "max": "11"}), ".capacity[shares]"),
        (policy(default="1", validRange={"min": "-1"}), ".capacity[shares]"),
        (policy(default="1", validRange={"min": "1", "step": "0"}), ".capacity[shares]"),
        (policy(default="1", validRange={"min": "1", "step": "10"}), ".capacity[shares]"),
        (policy(default="2", validRange={"min": "1", "step": "2"}), ".capacity[shares]"),
        (policy(default="1", validRange={"min": "1", "max": "4", "step": "2"}), ".capacity[shares]"),
        (policy("16E", default="1", validRange={"min": "1", "max": "16E"}), ".capacity[shares]"),
        (policy(default="1", validValues=["2", "1"]), ".capacity[shares]"),
        (policy(default="1", validValues=["1", "1"]), ".capacity[shares]"),
        (policy(default="3", validValues=["1", "2"]), ".capacity[shares]"),
        (policy(default="1", validValues=["1", "11"]), ".capacity[shares]"),
        (policy(default="1", validValues=[str(number) for number in range(11)]), ".capacity[shares]"),
        (policy(default="1", validValues=["1"], validRange={"min": "1"}), ".capacity[shares]"),
        ({"taints": [{"key": f"k{number}", "effect": "NoSchedule"} for number in range(5)]}, ".taints"),
        ({"taints": [{"key": LONG, "effect": "NoSchedule"}]}, ".taints[0]"),
        ({"taints": [{"key": "a b", "effect": "NoSchedule"}]}, ".taints[0]"),
        ({"taints": [{"key": "a", "value": "too hot", "effect": "NoSchedule"}]}, ".taints[0]"),
        ({"taints": [{"key": "a", "effect": "PreferNoSchedule"}]}, ".taints[0]"),
        ({"consumesCounters": [{"counterSet": "Set", "counters": counters(1)}]}, ".consumesCounters[0]"),
        ({"consumesCounters": [{"counterSet": "set", "counters": {}}]}, ".consumesCounters[0].counters"),
        ({"consumesCounters": [{"counterSet": "set", "counters": counters(33)}]}, ".consumesCounters[0].counters"),
        ({"consumesCounters": [{"counterSet": "set", "counters": {"c_1": PER_COUNTER}}]},
         ".consumesCounters[0].counters"),
        ({"consumesCounters": [{"counterSet": f"s{number}", "counters": counters(1)} for number in range(3)]},
         ".consumesCounters"),
        ({"consumesCounters": [{"counterSet": "set", "counters": counters(1)}] * 2}, ".consumesCounters"),
    ],
    ids=str,
)  # fmt: skip
def test_a_violated_rule_names_the_device_and_the_field(device: Json, field: str) -> None:
    thing = document(**device)
    assert found(thing) == [(thing["spec"]["devices"][0]["name"], f"spec.devices[0]{field}")]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda thing: thing["metadata"].update(name="a" * 254), "metadata.name"),
        (lambda thing: thing["spec"].update(driver="GPU"), "spec.driver"),
        (lambda thing: thing["spec"].update(driver=f"{LONG}.io"), "spec.driver"),
        (lambda thing: thing["spec"].update(nodeName="Node"), "spec.nodeName"),
        (lambda thing: thing["spec"].pop("nodeName"), "spec.nodeName"),
        (lambda thing: thing["spec"]["pool"].update(name="a//b"), "spec.pool.name"),
        (lambda thing: thing["spec"]["pool"].update(generation=-1), "spec.pool.generation"),
        (lambda thing: thing["spec"]["pool"].update(resourceSliceCount=0), "spec.pool.resourceSliceCount"),
        (lambda thing: thing["spec"].update(devices=[{"name": f"d{number}"} for number in range(65)]), "spec.devices"),
        (lambda thing: thing["spec"].update(devices=[{"name": "one"}] * 2), "spec.devices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_violated_rule_of_the_slice_names_the_field(change: Change, field: str) -> None:
    thing = document()
    change(thing)
    assert [each[1] for each in found(thing)] == [field]


def sets(*numbers: int) -> list[Json]:
    return [{"name": f"set{number}", "counters": counters(count)} for number, count in enumerate(numbers)]


class TestLayouts:
    def test_since_135_a_slice_has_devices_or_counter_sets(self) -> None:
        thing = document()
        thing["spec"]["sharedCounters"] = sets(1)
        assert found(thing) == [("", "spec")]
        del thing["spec"]["devices"]
        assert found(thing) == []
        thing["spec"]["sharedCounters"] = sets(*[32] * 8)
        assert found(thing) == []
        thing["spec"]["sharedCounters"] = sets(*[1] * 9)
        assert found(thing) == [("", "spec.sharedCounters")]
        thing["spec"]["sharedCounters"] = sets(33)
        assert found(thing) == [("", "spec.sharedCounters[0].counters")]

    def test_with_134_counter_sets_are_in_the_slice_of_their_devices(self) -> None:
        thing = document(consumesCounters=[{"counterSet": "set0", "counters": counters(2)}])
        assert found(thing, "together") == [("one", "spec.devices[0].consumesCounters[0]")]
        thing["spec"]["sharedCounters"] = sets(1)
        assert found(thing, "together") == [("one", "spec.devices[0].consumesCounters[0]")]
        thing["spec"]["sharedCounters"] = sets(2)
        assert found(thing, "together") == []
        thing["spec"]["sharedCounters"] = sets(2, 31)
        assert found(thing, "together") == [("", "spec.sharedCounters")]

    def test_with_134_the_effect_none_is_unknown(self) -> None:
        thing = document(taints=[{"key": "health", "effect": "None"}])
        assert found(thing, "together") == [("one", "spec.devices[0].taints[0]")]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1, "1"), (1000, "1k"), (2000, "2k"), (1024, "1Ki"), (1536, "1536"), (16 << 30, "16Gi"),
     (1024000, "1000Ki"), (2**63 - 1, "9223372036854775807")],
)  # fmt: skip
def test_quantities_have_the_text_of_the_api_server(value: int, text: str) -> None:
    assert quantity(value) == text
    assert quantity_value(text) == value


@pytest.mark.parametrize("text", ["", "1.5", "1e3", "Ki", "1Kib", "1m", "²"])
def test_texts_without_an_integer_are_no_quantities(text: str) -> None:
    assert quantity_value(text) is None
