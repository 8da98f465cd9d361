"""The state of the operator's custom resources, as the fleet shows it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifests import DEPLOY, render

from accelplane.fleet import deviceplugins
from accelplane.fleet.deviceplugins import (
    KINDS,
    device_plugin,
    problems_first,
    relevant_plugin,
    unreadable_plugin,
)
from accelplane.fleet.model import DevicePlugin
from accelplane.kube.objects import api_of
from accelplane.operator import crds, models

GPU = next(kind for kind in KINDS if kind.__name__ == "GpuDevicePlugin")


def plugin(status: dict[str, Any] | None, **metadata: Any) -> DevicePlugin:
    document = {"metadata": {"name": "gpu"} | metadata} | ({"status": status} if status is not None else {})
    resource = msgspec.convert(document, GPU)
    relevant_plugin(resource)
    return device_plugin("GpuDevicePlugin", resource)


def status(desired: int = 2, ready: int = 2, *conditions: dict[str, str], **more: Any) -> dict[str, Any]:
    return {
        "desiredNumberScheduled": desired, "numberReady": ready, "nodeNames": ["a", "b"],
        "conditions": [{"reason": "X", "lastTransitionTime": "2026-01-01T00:00:00Z"} | each for each in conditions],
    } | more  # fmt: skip


def condition(kind: str, holds: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": holds, "message": message}


def test_the_account_of_the_manifests_may_list_and_watch_the_kinds() -> None:
    (role,) = [
        each for each in render(DEPLOY / "fleet")
        if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", "accelplane-fleet")
    ]  # fmt: skip
    assert [rule for rule in role["rules"] if rule["apiGroups"] == [deviceplugins.GROUP]] == [
        {
            "apiGroups": [deviceplugins.GROUP],
            "resources": [api_of(kind).plural for kind in KINDS],
            "verbs": ["list", "watch"],
        }
    ]


def test_the_kinds_are_those_of_the_operator() -> None:
    assert [kind.__name__ for kind in KINDS] == list(models.BY_KIND)
    assert (deviceplugins.GROUP, deviceplugins.VERSION) == (models.GROUP, models.VERSION)
    plurals: dict[str, str] = {}
    for each in crds.definitions():
        names = msgspec.convert(each, dict[str, Any])["spec"]["names"]
        plurals[names["kind"]] = names["plural"]
    assert {kind.__name__: api_of(kind).plural for kind in KINDS} == {kind: plurals[kind] for kind in models.BY_KIND}


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (None, "the operator has not written a status"),
        ({"desiredNumberScheduled": 3, "numberReady": 3, "nodeNames": ["a"]}, ""),
        ({"desiredNumberScheduled": 0, "numberReady": 0}, ""),
        ({"desiredNumberScheduled": 3, "numberReady": 1}, "2 of 3 pods are not ready"),
        (status(1, 0, condition("Available", "False", "0 of 1 pods are ready")), "1 of 1 pods is not ready"),
        (status(0, 0, condition("Available", "True", "no node is selected")), ""),
        (
            status(0, 0, condition("Available", "False", "the DaemonSet does not exist yet")),
            "the DaemonSet does not exist yet",
        ),
        (
            status(2, 1, condition("NodeOverlap", "True", "b selects it"), condition("Degraded", "True", "forbidden")),
            "Degraded: forbidden; NodeOverlap: b selects it; 1 of 2 pods is not ready",
        ),
        (status(2, 2, condition("Degraded", "True", "")), "Degraded"),
        (status(2, 2, condition("DeviceClassConflict", "True", "a, b")), "DeviceClassConflict: a, b"),
        (
            status(2, 2, condition("Degraded", "False", "no errors"), condition("ImageOverridden", "True", "x")),
            "",
        ),
        (status(observedGeneration=4), "the operator has not processed the last change: observed generation 4 of 5"),
        (status(observedGeneration=5), ""),
        (status(observedGeneration=0), ""),
    ],
)
def test_problems_of_a_resource_come_from_its_conditions_pods_and_generation(
    found: dict[str, Any] | None, problem: str
) -> None:
    assert plugin(found, generation=5).problem == problem


def test_a_resource_has_numbers_of_pods_and_of_different_nodes() -> None:
    found = plugin(status(3, 2, nodeNames=["a", "b", "a"]))
    assert (found.kind, found.name, found.desired, found.ready, found.nodes) == ("GpuDevicePlugin", "gpu", 3, 2, 2)


def test_the_cache_stores_no_names_of_nodes_and_no_other_conditions() -> None:
    long = condition("Degraded", "True", "x" * 5000)
    document = {"metadata": {"name": "gpu", "labels": {"a": "b"}}, "status": status(2, 2, long)}
    resource = msgspec.convert(document, GPU)
    relevant_plugin(resource)
    assert resource.status
    assert (resource.status.nodeNames, resource.status.nodes) == (None, 2)
    assert [len(each.message or "") for each in resource.status.conditions or ()] == [512]


def test_resources_with_problems_come_first() -> None:
    good, bad, other = (DevicePlugin("A", "x"), DevicePlugin("B", "y", problem="p"), DevicePlugin("A", "a"))
    assert problems_first([good, bad, other]) == (bad, other, good)


TEXTS = st.text(max_size=3000)
JUNK = st.one_of(st.none(), st.integers(), st.floats(), TEXTS, st.lists(TEXTS, max_size=3), st.booleans())
CONDITIONS = st.lists(
    st.one_of(
        JUNK,
        st.fixed_dictionaries(
            {
                "type": st.sampled_from(["Degraded", "NodeOverlap", "Available", "x"]) | TEXTS,
                "status": st.sampled_from(["True", "False"]) | TEXTS,
            },
            optional={"message": JUNK},
        ),
    ),
    max_size=40,
)
STATUSES = st.one_of(
    JUNK,
    st.dictionaries(TEXTS, JUNK, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "desiredNumberScheduled": st.integers(),
            "numberReady": st.integers() | JUNK,
            "nodeNames": st.lists(TEXTS, max_size=9) | JUNK,
            "nodes": st.integers() | JUNK,
            "observedGeneration": st.integers() | JUNK,
            "conditions": CONDITIONS | JUNK,
        },
    ),
)


@given(STATUSES, TEXTS, st.integers() | JUNK)
def test_any_status_is_shown_within_limits_or_reported(found: object, name: str, generation: object) -> None:
    document = {"metadata": {"name": name, "generation": generation}, "status": found}
    encoded = msgspec.json.encode(document) if _encodable(document) else b"\xff"
    try:
        resource = msgspec.json.decode(encoded, type=GPU)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        shown = unreadable_plugin("GpuDevicePlugin", name, str(error))
        assert shown.problem
    else:
        relevant_plugin(resource)
        shown = device_plugin("GpuDevicePlugin", resource)
    assert len(shown.name) <= 253
    assert len(shown.problem) <= 1024
    assert all(0 <= number < 2**31 for number in (shown.desired, shown.ready, shown.nodes))


def _encodable(document: object) -> bool:
    try:
        msgspec.json.encode(document)
    except (ValueError, OverflowError, msgspec.MsgspecError):
        return False
    return True
