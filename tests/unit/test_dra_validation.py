"""The local copy of the API's rules for slices: each rule is violated once."""

from collections.abc import Callable

import msgspec
import pytest
from slicerules import INVALID, LONG, STRICTER, VALID, Json, counters, document

from accelplane.dra.resourceslice import ResourceSlice, quantity, quantity_value
from accelplane.dra.validation import Layout, problems

Change = Callable[[Json], object]


def found(thing: Json, layout: Layout = "separate") -> list[tuple[str, str]]:
    return [(each.device, each.field) for each in problems(msgspec.convert(thing, ResourceSlice), layout)]


@pytest.mark.parametrize(
    "device",
    VALID,
    ids=str,
)  # fmt: skip
def test_a_slice_that_the_api_server_accepts_has_no_problem(device: Json) -> None:
    assert found(document(**device)) == []


@pytest.mark.parametrize(
    ("device", "field"),
    [*INVALID, *STRICTER],
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
