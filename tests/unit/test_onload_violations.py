"""The invariants that the cluster tests of the Onload operator check during an upgrade."""

from typing import Any

import pytest
from cluster.kmm_decisions import DESIRED
from cluster.onload_lab import MODULE, NAMES, NEW, OLD, SFC, violations
from cluster.recording import Event

LABEL, SFC_LABEL, GATE = MODULE.label(DESIRED), SFC.label(DESIRED), NAMES.gate_label
COMPLETE = {LABEL: OLD, SFC_LABEL: OLD, GATE: OLD}


class Recording:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def node(self, name: str, **labels: str) -> None:
        self._add("Node", {"metadata": {"name": name, "labels": labels}})

    def pod(self, name: str, node: str, *, phase: str = "Running", deleted: bool = False, **labels: str) -> None:
        container = {"resources": {} if labels else {"requests": {"amd.com/onload": "1"}}}
        spec = {"nodeName": node, "containers": [container]}
        metadata = {"name": name, "namespace": "apps", "uid": f"uid-of-{name}", "labels": labels}
        state = {"waiting" if phase == "Pending" else "running": {}}
        status = {"phase": phase, "containerStatuses": [{"state": state}]}
        self._add("Pod", {"metadata": metadata, "spec": spec, "status": status}, deleted=deleted)

    def _add(self, kind: str, thing: dict[str, Any], *, deleted: bool = False) -> None:
        self.events.append(Event(len(self.events), kind, deleted, thing))


@pytest.fixture
def recording() -> Recording:
    instance = Recording()
    for name in ("a", "b"):
        instance.node(name)
        instance.node(name, **{LABEL: OLD})
        instance.node(name, **COMPLETE)
    instance.pod("app", "a")
    instance.pod("plugin", "a", **{"onload.amd.com/name": NAMES.daemonset})
    return instance


def test_an_upgrade_in_order_is_accepted(recording: Recording) -> None:
    recording.node("a", **{LABEL: OLD, SFC_LABEL: OLD})
    recording.pod("plugin", "a", deleted=True, **{"onload.amd.com/name": NAMES.daemonset})
    recording.pod("app", "a", deleted=True)
    recording.node("a", **{SFC_LABEL: OLD})
    recording.node("a")
    recording.node("a", **{LABEL: NEW, SFC_LABEL: NEW})
    recording.node("a", **{LABEL: NEW, SFC_LABEL: NEW, GATE: NEW})
    recording.node("b", **{LABEL: OLD, SFC_LABEL: OLD})
    assert violations(recording.events) == []


def test_finished_pods_are_accepted(recording: Recording) -> None:
    recording.pod("plugin", "a", deleted=True, **{"onload.amd.com/name": NAMES.daemonset})
    recording.pod("app", "a", phase="Succeeded")
    recording.node("a")
    assert violations(recording.events) == []


def test_pods_of_which_no_container_ran_are_accepted(recording: Recording) -> None:
    """The kubelet has not rejected them yet."""
    recording.pod("plugin", "a", deleted=True, **{"onload.amd.com/name": NAMES.daemonset})
    recording.pod("app", "a", deleted=True)
    recording.pod("assigned", "a", phase="Pending")
    recording.node("a")
    assert violations(recording.events) == []


@pytest.mark.parametrize(("deleted", "existing"), [("app", ["plugin"]), ("plugin", ["app"]), ("", ["app", "plugin"])])
def test_a_pod_on_the_node_is_a_violation(recording: Recording, deleted: str, existing: list[str]) -> None:
    if deleted == "app":
        recording.pod("app", "a", deleted=True)
    elif deleted:
        recording.pod("plugin", "a", deleted=True, **{"onload.amd.com/name": NAMES.daemonset})
    recording.node("a", **{LABEL: OLD})
    (found,) = violations(recording.events)
    assert "a lost" in found
    assert f"had {existing}" in found


def test_a_version_that_changes_without_a_gap_is_a_violation(recording: Recording) -> None:
    recording.node("b", **{**COMPLETE, LABEL: NEW})
    assert any("without unloading" in each for each in violations(recording.events))


def test_too_many_nodes_at_a_time_are_a_violation(recording: Recording) -> None:
    for name in ("a", "b"):
        recording.node(name, **{LABEL: OLD, SFC_LABEL: OLD})
    assert violations(recording.events) == ["9: ['a', 'b'] are changed at a time"]
    assert violations(recording.events, most=2) == []
