"""The status of a custom resource and its conditions."""

from typing import Any

import msgspec
import pytest
from customresources import plugin

from accelplane.kube.differences import Difference
from accelplane.kube.driftbackoff import FieldConflict
from accelplane.operator import models
from accelplane.operator.images import Replacement
from accelplane.operator.models import ObjectReference
from accelplane.operator.overlap import Overlap
from accelplane.operator.status import Observation, SeenDaemonSet, new_class_conflict, node_names, status

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
ALWAYS = [
    "Available",
    "Progressing",
    "Degraded",
    "ImageOverridden",
    "ProvisioningConfigMissing",
    "OriginalImage",
    "UnsupportedFields",
    "NodeOverlap",
]


def observed_daemonset(
    desired: int = 2, ready: int = 2, updated: int = 2, *, uid: str = "d-1", generation: int = 1, observed: int = 1
) -> SeenDaemonSet:
    daemonset = {
        "metadata": {
            "name": "intel-gpu-plugin-mine",
            "namespace": "plugins",
            "uid": uid,
            "resourceVersion": "7",
            "generation": generation,
        },
        "spec": {},
        "status": {
            "desiredNumberScheduled": desired,
            "numberReady": ready,
            "updatedNumberScheduled": updated,
            "observedGeneration": observed,
        },
    }
    return msgspec.convert(daemonset, SeenDaemonSet)


def reported(found: models.Status) -> dict[str, str]:
    return {each.type: each.status for each in found.conditions}


def condition_of(found: models.Status, condition: str) -> str:
    (message,) = [each.message for each in found.conditions if each.type == condition]
    return message


GPU = plugin("gpu", metadata={"generation": 3})


def test_the_four_fields_of_the_original_are_unchanged() -> None:
    found = status(GPU, Observation(daemonset=observed_daemonset(3, 1), nodes=("b", "", "a", "b")), NOW)
    written: Any = msgspec.json.decode(msgspec.json.encode(found))
    assert written["desiredNumberScheduled"] == 3
    assert written["numberReady"] == 1
    assert written["nodeNames"] == ["a", "b"]
    assert written["controlledDaemonSet"] == {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "namespace": "plugins",
        "name": "intel-gpu-plugin-mine",
        "uid": "d-1",
        "resourceVersion": "7",
    }
    assert written["observedGeneration"] == 3


def test_a_status_without_a_daemonset_has_both_numbers_too() -> None:
    written: Any = msgspec.json.decode(msgspec.json.encode(status(GPU, Observation(), NOW)))
    assert (written["desiredNumberScheduled"], written["numberReady"]) == (0, 0)
    assert {"controlledDaemonSet", "nodeNames"} & written.keys() == set()


def test_the_owner_reference_changes_with_the_daemonset_but_not_with_its_versions() -> None:
    before = msgspec.structs.replace(GPU, status=status(GPU, Observation(daemonset=observed_daemonset()), NOW))
    newer = observed_daemonset()
    newer = msgspec.structs.replace(newer, metadata=msgspec.structs.replace(newer.metadata, resource_version="9"))
    same = status(before, Observation(daemonset=newer), LATER)
    assert same == before.status
    other = status(before, Observation(daemonset=observed_daemonset(uid="d-2")), LATER)
    assert isinstance(other.controlled_daemon_set, ObjectReference)
    assert other.controlled_daemon_set.uid == "d-2"


@pytest.mark.parametrize(
    ("observed", "available", "progressing", "words"),
    [
        (Observation(), "False", "True", "does not exist yet"),
        (Observation(failure="refused"), "False", "False", "does not exist yet"),
        (Observation(daemonset=observed_daemonset()), "True", "False", "2 of 2 pods are ready, 2 are updated"),
        (Observation(daemonset=observed_daemonset(ready=1)), "False", "True", "1 of 2 pods are ready"),
        (Observation(daemonset=observed_daemonset(updated=1)), "True", "True", "1 are updated"),
        (Observation(daemonset=observed_daemonset(0, 0, 0)), "True", "False", "no node is selected"),
        (Observation(daemonset=observed_daemonset(generation=2)), "True", "True", "2 of 2 pods are ready"),
        (Observation(daemonset=observed_daemonset(ready=1, generation=2)), "False", "True", "1 of 2 pods are ready"),
        (
            Observation(daemonset=observed_daemonset(0, 0, 0, observed=0)),
            "False",
            "True",
            "has not processed the DaemonSet yet",
        ),
    ],
)
def test_progress_is_reported(observed: Observation, available: str, progressing: str, words: str) -> None:
    found = status(GPU, observed, NOW)
    assert (reported(found)["Available"], reported(found)["Progressing"]) == (available, progressing)
    assert words in condition_of(found, "Available")


CONFLICT = FieldConflict(Difference(("spec", "image"), "a", "b"), 3, ("kubectl",))
OVERLAP = Overlap("GpuDevicePlugin", "mine", "other", ("n1", "n2"))


@pytest.mark.parametrize(
    ("observed", "condition", "words"),
    [
        ({"failure": "DaemonSet x: forbidden"}, "Degraded", "DaemonSet x: forbidden"),
        ({"failure": "x has the name", "failure_reason": "NameConflict"}, "Degraded", "x has the name"),
        ({"conflicts": [CONFLICT]}, "Degraded", 'spec.image: found "a", expected "b": changed by kubectl'),
        ({"malformed": "sharedDevNum: no number"}, "Degraded", "sharedDevNum: no number"),
        (
            {"replaced": [Replacement("image", "a:1", "b:2", "A_SHA")]}, "ImageOverridden",
            "image a:1 is replaced by b:2 from A_SHA of the operator",
        ),
        ({"config_missing": True}, "ProvisioningConfigMissing", "ConfigMap cfg (provisioningConfig) does not exist"),
        ({"original_images": "image is x:1, set y:2"}, "OriginalImage", "image is x:1, set y:2"),
        ({"unsupported": ["a needs b", "c needs d"]}, "UnsupportedFields", "a needs b; c needs d"),
        ({"overlaps": [OVERLAP]}, "NodeOverlap", "GpuDevicePlugin other also selects nodes n1, n2"),
    ],
)  # fmt: skip
def test_only_problems_are_reported(observed: dict[str, Any], condition: str, words: str) -> None:
    first = plugin("dsa", metadata={"generation": 2}, provisioningConfig="cfg")
    found = status(first, Observation(daemonset=observed_daemonset(), **observed), NOW)
    assert [*reported(found)] == ALWAYS
    assert {name for name, value in reported(found).items() if value == "True"} == {"Available", condition}
    assert words in condition_of(found, condition)


def test_a_forbidden_config_map_is_not_reported_as_missing() -> None:
    found = status(
        plugin("dsa", provisioningConfig="cfg"), Observation(daemonset=observed_daemonset(), config_missing=None), NOW
    )
    assert reported(found)["ProvisioningConfigMissing"] == "Unknown"
    assert "ConfigMap cfg (provisioningConfig) cannot be read" in condition_of(found, "ProvisioningConfigMissing")


@pytest.mark.parametrize("found", [(), ("a, b have x", "c, d have y")])
def test_conflicts_of_device_classes_are_a_condition_where_classes_matter(found: tuple[str, ...]) -> None:
    assert [*reported(status(GPU, Observation(), NOW))] == ALWAYS
    observed = Observation(class_conflicts=found)
    after = status(GPU, observed, NOW)
    assert [*reported(after)] == [*ALWAYS, "DeviceClassConflict"]
    assert reported(after)["DeviceClassConflict"] == str(bool(found))
    # An event is recorded for conflicts that the status does not have yet.
    text = "; ".join(found)
    assert new_class_conflict(GPU, observed) == text
    assert not text or condition_of(after, "DeviceClassConflict") == text
    assert new_class_conflict(msgspec.structs.replace(GPU, status=after), observed) == ""


def test_every_condition_has_a_reason_for_programs() -> None:
    overlaps, replaced = [OVERLAP], [Replacement("image", "a:1", "b:2")]
    observed = Observation(
        failure="x", config_missing=True, overlaps=overlaps, replaced=replaced, original_images="x", unsupported=["y"]
    )
    found = status(plugin("dsa", provisioningConfig="cfg"), observed, NOW)
    assert [each.reason for each in found.conditions] == [
        "NoDaemonSet", "NoDaemonSet", "WriteRejected", "ImageReplaced", "ConfigMapNotFound", "ImageOfGoProject",
        "ImageTooOld", "SameNodesSelected",
    ]  # fmt: skip
    assert {each.reason for each in status(GPU, Observation(daemonset=observed_daemonset()), NOW).conditions} == {
        "PodsReady", "Complete", "AsExpected",
    }  # fmt: skip


def test_running_images_are_reported_if_they_differ() -> None:
    replaced = [Replacement("image", "a:1", "b:2"), Replacement("initImage", "c:1", "d:2")]
    found = status(GPU, Observation(daemonset=observed_daemonset(), replaced=replaced), NOW)
    assert (found.effective_image, found.effective_init_image) == ("b:2", "d:2")


def test_a_time_is_that_of_the_last_change() -> None:
    before = status(GPU, Observation(daemonset=observed_daemonset()), NOW)
    after = status(
        msgspec.structs.replace(GPU, status=before), Observation(daemonset=observed_daemonset(ready=1)), LATER
    )
    changed = {each.type for each in after.conditions if each.last_transition_time == LATER}
    assert changed == {"Available", "Progressing"}


def test_conditions_of_others_are_not_written() -> None:
    before = status(GPU, Observation(daemonset=observed_daemonset()), NOW)
    foreign = msgspec.structs.replace(before.conditions[0], type="example.com/Approved")
    before = msgspec.structs.replace(before, conditions=(foreign, *before.conditions))
    after = status(msgspec.structs.replace(GPU, status=before), Observation(daemonset=observed_daemonset()), LATER)
    assert after.conditions == before.conditions[1:]


def test_nodes_are_sorted_and_pods_without_a_node_are_omitted() -> None:
    assert node_names(["n10", "", "n2", "n10"]) == ("n10", "n2")


def available(found: models.Status) -> tuple[str, int]:
    (condition,) = [each for each in found.conditions if each.type == "Available"]
    return condition.status, condition.observed_generation


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (Observation(daemonset=observed_daemonset(generation=2)), ("True", 2)),
        (Observation(daemonset=observed_daemonset(generation=2, observed=2, updated=1)), ("True", 2)),
        (Observation(daemonset=observed_daemonset(), failure="rejected"), ("True", 2)),
        (Observation(daemonset=observed_daemonset(), malformed="no number"), ("True", 2)),
        (Observation(daemonset=observed_daemonset(), outdated=True), ("True", 2)),
        (Observation(daemonset=observed_daemonset(generation=2, observed=2, ready=1)), ("False", 3)),
        (Observation(daemonset=observed_daemonset(generation=2, observed=2)), ("True", 3)),
    ],
)
def test_available_has_the_generation_of_an_edit_when_its_pods_are_ready(
    observed: Observation, expected: tuple[str, int]
) -> None:
    """`kubectl wait` ignores a condition whose generation is older than that of the resource."""
    earlier = plugin("gpu", metadata={"generation": 2})
    before = status(earlier, Observation(daemonset=observed_daemonset()), NOW)
    assert available(before) == ("True", 2)
    found = status(msgspec.structs.replace(GPU, status=before), observed, LATER)
    assert (available(found), found.observed_generation) == (expected, 3)


def test_a_first_generation_is_not_available_while_adopted_pods_are_replaced() -> None:
    """A generation of 0 is omitted, so `kubectl wait` would take the generation of the status."""
    first = plugin("gpu", metadata={"generation": 1})
    found = status(first, Observation(daemonset=observed_daemonset(updated=1)), NOW)
    assert available(found) == ("False", 1)


def test_a_daemonset_that_is_not_observed_stays_in_the_status_after_a_failure() -> None:
    before = status(GPU, Observation(daemonset=observed_daemonset()), NOW)
    resource = msgspec.structs.replace(GPU, status=before)
    assert status(resource, Observation(failure="x"), LATER).controlled_daemon_set == before.controlled_daemon_set
    assert status(resource, Observation(), LATER).controlled_daemon_set is None


@pytest.mark.parametrize(("manager", "ready", "named"), [(True, 1, True), (True, 2, False), (False, 1, False)])
def test_pods_of_a_resource_manager_that_are_not_ready_have_the_paths_that_a_node_needs(
    manager: bool, ready: int, named: bool
) -> None:
    resource = plugin("gpu", resourceManager=manager, sharedDevNum=2)
    found = status(resource, Observation(daemonset=observed_daemonset(ready=ready)), NOW)
    for condition in ("Available", "Progressing"):
        assert (
            "on nodes without /var/lib/kubelet/pki or with a read-only /etc" in condition_of(found, condition)
        ) is named
