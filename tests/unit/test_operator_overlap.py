"""Nodes that two custom resources of a kind select."""

from typing import Any

import pytest
from customresources import plugin

from accelplane.operator import models
from accelplane.operator.overlap import Overlap, format_overlap, overlaps_of

AMD64 = {"kubernetes.io/arch": "amd64"}
NODES = {
    "n1": AMD64 | {"a": "1"},
    "n2": AMD64 | {"a": "1", "b": "1"},
    "n3": AMD64 | {"b": "1"},
    "arm": {"kubernetes.io/arch": "arm64", "a": "1", "b": "1"},
}


@pytest.mark.parametrize(
    ("family", "first", "second", "shared"),
    [
        ("gpu", {"a": "1"}, {"a": "1"}, ("arm", "n1", "n2")),
        ("gpu", {"a": "1"}, {"b": "1"}, ("arm", "n2")),
        ("iaa", {"a": "1"}, {"b": "1"}, ("n2",)),
        ("gpu", {"a": "1"}, {}, ("n1", "n2")),
        ("gpu", {}, {}, ("n1", "n2", "n3")),
        ("gpu", {"a": "1"}, {"a": "2"}, ()),
    ],
)
def test_two_resources_overlap_on_the_nodes_that_both_select(
    family: str, first: dict[str, str], second: dict[str, str], shared: tuple[str, ...]
) -> None:
    one, two = plugin(family, "one", nodeSelector=first), plugin(family, "two", nodeSelector=second)
    expected = [Overlap(models.KINDS[family].__name__, "one", "two", shared)] if shared else []
    assert overlaps_of(one, [one, two], NODES) == overlaps_of(two, [one, two], NODES) == expected


def test_generic_plugins_overlap_only_if_they_have_a_resource_in_common() -> None:
    def generic(name: str, resource: str, domain: str = "") -> models.DevicePlugin:
        groups = [{"paths": [{"path": "/dev/a"}]}]
        devices = [{"name": resource, "groups": groups}, {"name": f"{name}-own", "groups": groups}]
        return plugin("generic", name, nodeSelector={"a": "1"}, domain=domain, devices=devices)

    one = generic("one", "fuse")
    others = [generic("two", "fuse", "squat.ai"), generic("three", "kvm"), generic("four", "fuse", "b.example")]
    assert [(each.other("one"), each.nodes) for each in overlaps_of(one, others, NODES)] == [
        ("two", ("arm", "n1", "n2"))
    ]


def test_generic_plugins_overlap_if_both_are_the_dra_driver_of_a_domain() -> None:
    def generic(name: str, domain: str = "", **dra: Any) -> models.DevicePlugin:
        return plugin(
            "generic", name, nodeSelector={"a": "1"}, domain=domain, devices=[{"name": name, "groups": []}], **dra
        )

    one = generic("one", dra={})
    others = [
        generic("two", "squat.ai", dra={}),
        generic("three"),
        generic("four", "b.example", dra={}),
        generic("five", dra={"api": "plugin"}),
    ]
    assert [each.other("one") for each in overlaps_of(one, others, NODES)] == ["two"]


def test_the_new_selector_of_a_changed_resource_is_used() -> None:
    before, after = (plugin("gpu", "one", nodeSelector={"a": value}) for value in ("1", "2"))
    others = [before, plugin("gpu", "two", nodeSelector={"b": "1"}), plugin("gpu", "three", nodeSelector={"b": "1"})]
    assert [each.other("one") for each in overlaps_of(before, others, NODES)] == ["three", "two"]
    assert overlaps_of(after, others, NODES) == []


def test_an_overlap_is_formatted_for_either_author_with_at_most_three_nodes() -> None:
    found = Overlap("GpuDevicePlugin", "one", "two", ("a", "b", "c", "d", "e"))
    assert format_overlap(found, "one").startswith("GpuDevicePlugin two also selects nodes a, b, c and 2 more;")
    assert format_overlap(found, "two").startswith("GpuDevicePlugin one also selects")
    assert "also selects node a;" in format_overlap(Overlap("GpuDevicePlugin", "one", "two", ("a",)), "one")
