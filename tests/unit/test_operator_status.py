"""What is told of a custom resource: its status, its overlaps with others, and the dry run."""

import re
from typing import Any

import msgspec
import pytest
import yaml
from customresources import SAMPLES, plugin, resource

from accelplane.cli.operator_render import main
from accelplane.operator import models
from accelplane.operator.dryrun import NotRendered, rendered
from accelplane.operator.images import Replacement
from accelplane.operator.models import ObjectReference
from accelplane.operator.overlap import Overlap, overlaps_of, told
from accelplane.operator.settings import ImagePolicy, Settings
from accelplane.operator.status import Observed, SeenDaemonSet, node_names, patch, status

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
ALWAYS = ["Available", "Progressing", "Degraded", "ImageOverridden", "ProvisioningConfigMissing", "NodeOverlap"]


def seen(wanted: int = 2, ready: int = 2, updated: int = 2, *, uid: str = "d-1", generation: int = 1) -> SeenDaemonSet:
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
            "desiredNumberScheduled": wanted,
            "numberReady": ready,
            "updatedNumberScheduled": updated,
            "observedGeneration": 1,
        },
    }
    return msgspec.convert(daemonset, SeenDaemonSet)


def told_of(found: models.Status) -> dict[str, str]:
    return {each.type: each.status for each in found.conditions}


def said(found: models.Status, condition: str) -> str:
    (message,) = [each.message for each in found.conditions if each.type == condition]
    return message


GPU = plugin("gpu", metadata={"generation": 3})


def test_the_four_fields_are_as_ever() -> None:
    found = status(GPU, Observed(daemonset=seen(3, 1), nodes=("b", "", "a", "b")), NOW)
    written: Any = patch(found)["status"]
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
    written: Any = patch(status(GPU, Observed(), NOW))["status"]
    assert (written["desiredNumberScheduled"], written["numberReady"]) == (0, 0)
    assert written["controlledDaemonSet"] is None
    assert written["nodeNames"] is None


def test_the_reference_changes_with_the_daemonset_and_not_with_its_versions() -> None:
    before = msgspec.structs.replace(GPU, status=status(GPU, Observed(daemonset=seen()), NOW))
    newer = seen()
    newer = msgspec.structs.replace(newer, metadata=msgspec.structs.replace(newer.metadata, resource_version="9"))
    same = status(before, Observed(daemonset=newer), LATER)
    assert same == before.status
    other = status(before, Observed(daemonset=seen(uid="d-2")), LATER)
    assert isinstance(other.controlled_daemon_set, ObjectReference)
    assert other.controlled_daemon_set.uid == "d-2"


@pytest.mark.parametrize(
    ("observed", "available", "progressing", "words"),
    [
        (Observed(), "False", "True", "no DaemonSet yet"),
        (Observed(failure="refused"), "False", "False", "no DaemonSet yet"),
        (Observed(daemonset=seen()), "True", "False", "2 of 2 pods are ready, 2 as asked for"),
        (Observed(daemonset=seen(ready=1)), "False", "True", "1 of 2 pods are ready"),
        (Observed(daemonset=seen(updated=1)), "True", "True", "1 as asked for"),
        (Observed(daemonset=seen(0, 0, 0)), "True", "False", "no node is selected"),
        (Observed(daemonset=seen(generation=2)), "False", "True", "has not looked yet"),
    ],
)
def test_progress_is_told_as_it_is(observed: Observed, available: str, progressing: str, words: str) -> None:
    found = status(GPU, observed, NOW)
    assert (told_of(found)["Available"], told_of(found)["Progressing"]) == (available, progressing)
    assert words in said(found, "Available")


OVERLAP = Overlap("GpuDevicePlugin", "mine", "other", ("n1", "n2"))


@pytest.mark.parametrize(
    ("observed", "condition", "words"),
    [
        ({"failure": "DaemonSet x: forbidden"}, "Degraded", "DaemonSet x: forbidden"),
        ({"malformed": "sharedDevNum: no number"}, "Degraded", "sharedDevNum: no number"),
        (
            {"replaced": [Replacement("image", "a:1", "b:2", "A_SHA")]}, "ImageOverridden",
            "image a:1 is replaced by b:2, as A_SHA of the operator says",
        ),
        ({"config_missing": True}, "ProvisioningConfigMissing", "ConfigMap cfg, named by provisioningConfig, is not"),
        ({"overlaps": [OVERLAP]}, "NodeOverlap", "GpuDevicePlugin other selects nodes n1, n2 as well"),
    ],
)  # fmt: skip
def test_what_needs_a_look_is_told_and_nothing_else(observed: dict[str, Any], condition: str, words: str) -> None:
    mine = plugin("dsa", provisioningConfig="cfg")
    found = status(mine, Observed(daemonset=seen(), **observed), NOW)
    assert [*told_of(found)] == ALWAYS
    assert {name for name, value in told_of(found).items() if value == "True"} == {"Available", condition}
    assert words in said(found, condition)


def test_of_a_config_map_that_may_not_be_seen_nothing_is_claimed() -> None:
    found = status(plugin("dsa", provisioningConfig="cfg"), Observed(daemonset=seen(), config_missing=None), NOW)
    assert told_of(found)["ProvisioningConfigMissing"] == "Unknown"
    assert "ConfigMap cfg, named by provisioningConfig, cannot be looked at" in said(found, "ProvisioningConfigMissing")


def test_every_condition_has_a_reason_for_programs() -> None:
    overlaps, replaced = [OVERLAP], [Replacement("image", "a:1", "b:2")]
    observed = Observed(failure="x", config_missing=True, overlaps=overlaps, replaced=replaced)
    found = status(plugin("dsa", provisioningConfig="cfg"), observed, NOW)
    assert [each.reason for each in found.conditions] == [
        "NoDaemonSet", "NoDaemonSet", "WriteRefused", "ImageReplaced", "ConfigMapNotFound", "SameNodesSelected",
    ]  # fmt: skip
    assert {each.reason for each in status(GPU, Observed(daemonset=seen()), NOW).conditions} == {
        "PodsReady", "Complete", "AsExpected",
    }  # fmt: skip


def test_the_images_that_run_are_told_where_they_are_others() -> None:
    replaced = [Replacement("image", "a:1", "b:2"), Replacement("initImage", "c:1", "d:2")]
    found = status(GPU, Observed(daemonset=seen(), replaced=replaced), NOW)
    assert (found.effective_image, found.effective_init_image) == ("b:2", "d:2")


def test_a_time_is_that_of_the_last_change() -> None:
    before = status(GPU, Observed(daemonset=seen()), NOW)
    after = status(msgspec.structs.replace(GPU, status=before), Observed(daemonset=seen(ready=1)), LATER)
    changed = {each.type for each in after.conditions if each.last_transition_time == LATER}
    assert changed == {"Available", "Progressing"}


def test_a_condition_of_somebody_else_stays() -> None:
    before = status(GPU, Observed(daemonset=seen()), NOW)
    foreign = msgspec.structs.replace(before.conditions[0], type="example.com/Approved")
    before = msgspec.structs.replace(before, conditions=(foreign, *before.conditions))
    after = status(msgspec.structs.replace(GPU, status=before), Observed(daemonset=seen()), LATER)
    assert after.conditions[-1] == foreign
    assert len(after.conditions) == len(ALWAYS) + 1


def test_nodes_are_sorted_and_pods_without_one_left_out() -> None:
    assert node_names(["n10", "", "n2", "n10"]) == ("n10", "n2")


# Overlaps

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
def test_two_of_a_kind_meet_where_both_select(
    family: str, first: dict[str, str], second: dict[str, str], shared: tuple[str, ...]
) -> None:
    one, two = plugin(family, "one", nodeSelector=first), plugin(family, "two", nodeSelector=second)
    expected = [Overlap(models.KINDS[family].__name__, "one", "two", shared)] if shared else []
    assert overlaps_of(one, [one, two], NODES) == overlaps_of(two, [one, two], NODES) == expected


def test_of_a_resource_that_changes_the_new_selector_counts() -> None:
    before, after = (plugin("gpu", "one", nodeSelector={"a": value}) for value in ("1", "2"))
    others = [before, plugin("gpu", "two", nodeSelector={"b": "1"}), plugin("gpu", "three", nodeSelector={"b": "1"})]
    assert [each.other("one") for each in overlaps_of(before, others, NODES)] == ["three", "two"]
    assert overlaps_of(after, others, NODES) == []


def test_an_overlap_is_told_to_both_with_a_few_of_the_nodes() -> None:
    found = Overlap("GpuDevicePlugin", "one", "two", ("a", "b", "c", "d", "e"))
    assert told(found, "one").startswith("GpuDevicePlugin two selects nodes a, b, c and 2 more as well")
    assert told(found, "two").startswith("GpuDevicePlugin one selects")
    assert "selects node a as well" in told(Overlap("GpuDevicePlugin", "one", "two", ("a",)), "one")


# The dry run


def test_the_samples_are_rendered() -> None:
    text = "---\n".join(file.read_text() for file in sorted(SAMPLES.glob("*deviceplugin.yaml")))
    made = list(yaml.safe_load_all(rendered(text, Settings(namespace="here"))))
    assert [each["metadata"]["name"] for each in made] == [
        f"intel-{family}-plugin-{family}deviceplugin-sample" for family in models.KINDS
    ]
    assert {each["metadata"]["namespace"] for each in made} == {"here"}


def test_lists_are_looked_into_and_other_objects_passed_over() -> None:
    items = [resource("npu"), {"apiVersion": "v1", "kind": "ConfigMap"}]
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": items})
    (made,) = yaml.safe_load_all(rendered(text, Settings(images=ImagePolicy(target="0.36.0"))))
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "intel/intel-npu-plugin:0.36.0"


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"spec": None}, {}),
        ({"spec": {"tolerations": None, "image": None}}, {}),
        (
            {"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": None}}},
            {"updateStrategy": {"type": "OnDelete"}},
        ),
    ],
)
def test_a_null_is_as_good_as_nothing(given: dict[str, Any], same: dict[str, Any]) -> None:
    found, expected = resource("gpu") | given, resource("gpu", **same)
    assert rendered(yaml.safe_dump(found), Settings()) == rendered(yaml.safe_dump(expected), Settings())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no resource"),
        ("kind: ConfigMap", "there is no resource"),
        ("- 1", "there is no resource"),
        ("a: [", "no YAML"),
        ("a: &a [1]\nb: [*a, *a]", "aliases"),
        ("? {a: 1}\n: 2", "no YAML"),
        (yaml.safe_dump(resource("gpu", sharedDevNum=0)), "mine: spec.sharedDevNum is 0, expected 1 or more"),
        (yaml.safe_dump(resource("gpu", sharedDevNum="3")), "spec.sharedDevNum is '3', expected a whole number"),
        (yaml.safe_dump(resource("gpu", sharedDevNum=1.5)), "spec.sharedDevNum is 1.5, expected a whole number"),
        (
            yaml.safe_dump(resource("gpu", sharedDevNumber=3)),
            "spec.sharedDevNumber is no field, expected one of allowIDs",
        ),
        (
            yaml.safe_dump(resource("gpu", enableMonitoring="on")),
            "spec.enableMonitoring is 'on', expected true or false",
        ),
        (
            yaml.safe_dump(resource("gpu", preferredAllocationPolicy="best")),
            "spec.preferredAllocationPolicy is 'best', expected one of balanced, none, packed",
        ),
        (yaml.safe_dump(resource("gpu", tolerations={})), "spec.tolerations is {}, expected a list"),
        (yaml.safe_dump(resource("gpu", tolerations=[{"key": 1}])), "spec.tolerations[0].key is 1, expected a text"),
        (yaml.safe_dump(resource("gpu", imagePullSecrets=[{}])), "spec.imagePullSecrets[0].name is missing"),
        (yaml.safe_dump(resource("gpu", nodeSelector={"a": True})), "spec.nodeSelector.a is True, expected a text"),
        (yaml.safe_dump(resource("gpu", resources={"limits": {"cpu": 0.5}})), "spec.resources.limits.cpu is 0.5"),
        (yaml.safe_dump(resource("gpu") | {"spec": []}), "GpuDevicePlugin mine: spec is [], expected an object"),
        (yaml.safe_dump(resource("gpu") | {"metadata": {}}), "GpuDevicePlugin without a name: metadata.name is None"),
        (yaml.safe_dump(resource("gpu", "A/b")), "metadata.name is 'A/b', expected a name"),
        (yaml.safe_dump(resource("gpu") | {"apiVersion": "deviceplugin.intel.com/v2"}), "deviceplugin.intel.com/v2"),
        ("apiVersion: deviceplugin.intel.com/v1\nmetadata: {name: mine}", "object mine: found"),
        (yaml.safe_dump(resource("gpu", image="x:1")), "GpuDevicePlugin mine: invalid resource: image"),
        (yaml.safe_dump(resource("gpu") | {"kind": "TpuDevicePlugin"}), "TpuDevicePlugin mine: found"),
        ("#" * (1024 * 1024 + 1), "more than 1048576 bytes"),
    ],
)
def test_what_cannot_be_rendered_is_told_by_name(text: str, words: str) -> None:
    with pytest.raises(NotRendered, match=re.escape(words)):
        rendered(text, Settings())


def test_the_command_shows_the_daemonsets_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(SAMPLES / "deviceplugin_v1_sgxdeviceplugin.yaml")
    assert main(["--deviceplugin-namespace=here", file]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["metadata"]["namespace"] == "here"


def test_the_command_says_what_is_wrong_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(SAMPLES / "mappings-collection.yaml")
    assert main([file]) == 1
    assert capsys.readouterr().err == f"{file}: there is no resource of deviceplugin.intel.com/v1\n"
    assert main(["/nowhere"]) == 1
