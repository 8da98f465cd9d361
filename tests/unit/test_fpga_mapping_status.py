"""Statuses of names for FPGAs, and problems of pods whose names were not replaced."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.admission.fpga_allocatable import fpgas_only
from accelplane.admission.mapping_status import MappingStatus, status_before, status_of
from accelplane.admission.mappings import AcceleratorFunction, FpgaRegion, Names, names_of
from accelplane.admission.pending import PendingPod, Problem, keep_requests, problem_of
from accelplane.kube.kinds import Node, NodeStatus

I = "69528db6eb31577a8c3668f9faa081f6"  # noqa: E741 - as in the documents
X = "d8424dc4a4a3c413f89e433683f9040b"
AF = "fpga.intel.com/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs"
REGION = f"fpga.intel.com/region-{I}"
MAPPINGS = (AcceleratorFunction, FpgaRegion)

Mapped = AcceleratorFunction | FpgaRegion


def read(kind: type[Mapped], name: str, spec: Mapping[str, str], status: object = None, generation: int = 3) -> Mapped:
    metadata = {"name": name, "namespace": "n", "generation": generation}
    document = {"metadata": metadata, "spec": spec} | ({"status": status} if status is not None else {})
    return msgspec.json.decode(json.dumps(document), type=kind)


def function(name: str, mode: str = "region", afu: str = X, **more: Any) -> Mapped:
    return read(AcceleratorFunction, name, {"afuId": afu, "interfaceId": I, "mode": mode}, **more)


def region(name: str, **more: Any) -> Mapped:
    return read(FpgaRegion, name, {"interfaceId": I}, **more)


def named_mappings(*things: Mapped) -> Names:
    return names_of(
        [each for each in things if isinstance(each, AcceleratorFunction)],
        [each for each in things if isinstance(each, FpgaRegion)],
    )


def compute_status(thing: Mapped, *others: Mapped, node_counts: Mapping[str, int] | None = None) -> MappingStatus:
    return status_of(thing, named_mappings(thing, *others), node_counts)


def condition_texts(status: MappingStatus) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in status.conditions}


def message(status: MappingStatus, kind: str) -> str:
    return next(each.message for each in status.conditions if each.type == kind)


@pytest.mark.parametrize(
    ("thing", "resource"), [(function("a", "af"), AF), (function("a"), REGION), (region("a"), REGION)],
    ids=["af", "region", "FpgaRegion"],
)  # fmt: skip
def test_a_status_has_the_resource_and_the_number_of_nodes(thing: Mapped, resource: str) -> None:
    found = compute_status(thing, node_counts={resource: 2, "fpga.intel.com/other": 5})
    assert (found.resource, found.nodes, found.observed_generation, found.fault) == (resource, 2, 3, None)
    assert condition_texts(found) == {"Accepted": ("True", "Resolved"), "Ready": ("True", "Offered")}
    assert message(found, "Ready") == f"2 nodes offer {resource}"
    assert {each.observed_generation for each in found.conditions} == {3}


@pytest.mark.parametrize(
    ("node_counts", "nodes", "ready"), [({}, 0, ("False", "NoNode")), (None, None, ("Unknown", "NodesNotKnown"))]
)
def test_a_name_without_nodes_is_accepted_and_not_ready(
    node_counts: Mapping[str, int] | None, nodes: int | None, ready: tuple[str, str]
) -> None:
    found = compute_status(region("a"), node_counts=node_counts)
    assert (found.resource, found.nodes) == (REGION, nodes)
    assert condition_texts(found) == {"Accepted": ("True", "Resolved"), "Ready": ready}


@pytest.mark.parametrize(
    ("thing", "others", "reason", "words"),
    [
        (function("a"), [region("a")], "NameConflict", "an AcceleratorFunction and a FpgaRegion of the name 'a'"),
        (region("a"), [function("a", "af")], "NameConflict", "an AcceleratorFunction and a FpgaRegion of the name 'a'"),
        (function("a", "afx"), [], "UnknownMode", "spec.mode: 'afx': expected one of af, region"),
        (function("a", "af", afu="123456789"), [], "UnusableId", "expected an even number"),
        (function("a", "region", afu="123"), [], "UnusableId", "expected 8 to 40 hexadecimal digits"),
        (read(FpgaRegion, "a", {}), [], "UnusableId", "expected at least 3 lower-case hexadecimal digits"),
        (read(AcceleratorFunction, "a", {"mode": "af"}), [], "UnusableId", "interface id ''"),
        (region("a" * 64), [], "NameTooLong", "its name has 64 characters, expected at most 63"),
    ],
    ids=["function twice", "region twice", "mode", "odd", "short", "nothing", "of 2020", "long"],
)
def test_a_mapping_without_target_is_not_accepted_with_a_reason(
    thing: Mapped, others: list[Mapped], reason: str, words: str
) -> None:
    found = compute_status(thing, *others, node_counts={REGION: 1, AF: 1})
    assert (found.resource, found.nodes) == ("", None)
    assert condition_texts(found) == {"Accepted": ("False", reason), "Ready": ("False", reason)}
    assert words in message(found, "Accepted")
    assert found.fault
    assert found.fault.reason == reason


def written(status: MappingStatus) -> Any:
    return json.loads(msgspec.json.encode(status))


def test_the_transition_time_changes_only_with_the_status_of_the_condition() -> None:
    then = "2026-01-01T00:00:00Z"
    first = written(compute_status(region("a"), node_counts={REGION: 1}))
    for each in first["conditions"]:
        each["lastTransitionTime"] = then
    first["conditions"].append({"type": "Theirs", "status": "True", "reason": "R", "message": "m",
                                "lastTransitionTime": then})  # fmt: skip
    again = region("a", status=first)
    assert compute_status(again, node_counts={REGION: 1}) == status_before(again)
    changed = {each["type"]: each for each in written(compute_status(again, node_counts={}))["conditions"]}
    assert changed["Accepted"]["lastTransitionTime"] == then
    assert "Theirs" not in changed, "a server-side apply would own it"
    assert changed["Ready"]["lastTransitionTime"] != then


def test_fields_without_a_value_are_not_applied() -> None:
    assert "resource" not in written(compute_status(function("a", "odd")))
    assert "nodes" not in written(compute_status(region("a")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["conditions", "nodes", "resource", "type", "status", "reason", "message",
                         "lastTransitionTime", "observedGeneration"]) | st.text(max_size=5), inner, max_size=5),
    max_leaves=8,
)  # fmt: skip


@given(JSON, st.sampled_from(["af", "region", "odd"]), st.text(max_size=45), st.booleans())
def test_any_status_and_ids_result_in_a_stable_status(status: object, mode: str, afu: str, conflicting: bool) -> None:
    others = [region("a")] if conflicting else []
    first = compute_status(function("a", mode, afu, status=status), *others, node_counts={REGION: 1})
    assert {"Accepted", "Ready"} <= {*condition_texts(first)}
    again = function("a", mode, afu, status=written(first))
    assert compute_status(again, *others, node_counts={REGION: 1}) == status_before(again) == first


def test_only_the_fpgas_of_a_node_are_stored() -> None:
    document = {
        "metadata": {"name": "node", "uid": "u", "annotations": {"a": "b"}, "managedFields": [{}]},
        "status": {"allocatable": {"cpu": "8", REGION: "2", "gpu.intel.com/i915": "1"}, "images": [{"names": ["i"]}]},
    }
    node = msgspec.json.decode(json.dumps(document), type=Node)
    fpgas_only(node)
    assert (node.status, node.metadata.annotations) == (NodeStatus(allocatable={REGION: "2"}), None)


# Pods


def waiting(*asks: str, field: str = "containers") -> PendingPod:
    limits = {name if "/" in name else f"fpga.intel.com/{name}": "1" for name in asks}
    container = {"name": "c", "resources": {"limits": {"cpu": "1", **limits}, "requests": limits}, "env": [{}]}
    document = {"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {field: [{"name": "o"}, container]}}
    pod = msgspec.json.decode(json.dumps(document), type=PendingPod)
    keep_requests(pod)
    return pod


NAMES = named_mappings(function("a"), function("twice"), region("twice"))


@pytest.mark.parametrize("field", ["containers", "initContainers"])
@pytest.mark.parametrize("name", ["a", "twice"])
@pytest.mark.parametrize("nodes_known", [True, False])
def test_the_problem_of_a_pod_is_a_name_that_was_not_replaced(field: str, name: str, nodes_known: bool) -> None:
    found = problem_of(waiting(name, field=field), NAMES, (lambda _name: False) if nodes_known else None)
    assert found
    assert found.reason == "FpgaNameNotReplaced"
    assert found.note.startswith(f"'fpga.intel.com/{name}': found a name of namespace n")
    assert "delete the pod and create it again when the webhook runs" in found.note


def test_the_problem_of_a_pod_is_an_unknown_name() -> None:
    found = problem_of(waiting("other", REGION), NAMES, lambda _name: False)
    assert found
    assert found.reason == "FpgaNameUnknown"
    assert found.note.startswith(
        "'fpga.intel.com/other': no node has this resource, and namespace n has no AcceleratorFunction"
    )


@pytest.mark.parametrize(
    ("pod", "listed"),
    [
        (waiting(REGION), lambda _name: False),
        (waiting("other"), None),
        (waiting("other"), lambda name: name == "fpga.intel.com/other"),
        (waiting("a"), lambda name: name == "fpga.intel.com/a"),
        (waiting("gpu.intel.com/i915"), lambda _name: False),
    ],
    ids=["its region", "nodes not known", "of a node", "a node's own name", "a GPU"],
)
def test_a_pod_that_can_be_scheduled_has_no_problem(pod: PendingPod, listed: Any) -> None:
    assert problem_of(pod, NAMES, listed) is None


@given(st.lists(st.text(max_size=300), max_size=4))
def test_the_note_for_any_request_is_one_short_line(asks: list[str]) -> None:
    found = problem_of(waiting(*asks), NAMES, lambda _name: False)
    assert isinstance(found, Problem | None)
    if found:
        assert len(found.note.encode()) < 1024
        assert found.note.isprintable()
