"""Labels, history and rollbacks: what the nodes of an Onload resource should get."""

from typing import Any

import msgspec
import pytest
from onloadcluster import plugin_pod, progress, working
from onloadresources import MAPPING, onload

from accelplane.onload.children import Existing
from accelplane.onload.daemonset import daemonset
from accelplane.onload.models import DevicePluginStatus, Onload, OnloadStatus, Revision, Status
from accelplane.onload.modules import KmmApi, module, sfc_module
from accelplane.onload.observed import NodeView
from accelplane.onload.rollout import (
    MAX_HISTORY,
    Outcome,
    Rollout,
    known_history,
    plan_rollout,
    record_outcome,
    with_revision,
)

Object = dict[str, Any]
VERSION = "8.1.2.26"
V2 = KmmApi(in_tree_list=True, tolerations=True)
KERNEL = "5.14.0-284.el9.x86_64"
NOTHING = Existing(None, None, None)
BUILD = {"dockerfileConfigMap": {"name": "recipe"}}


def mapped(image: str, regexp: str = MAPPING["regexp"], **more: Any) -> Object:
    return {"regexp": regexp, "kernelModuleImage": image, **more}


def spec(version: str = VERSION, image: str = "one", *, rollback: bool = False, **paths: Any) -> Onload:
    fields = {"onload__version": version, "onload__kernelMappings": [mapped(image)], **paths}
    return onload(**fields, **({"upgrade__autoRollback": True} if rollback else {}))


def node(name: str, label: str, **more: Any) -> NodeView:
    pod = msgspec.structs.replace(plugin_pod(), user_image=spec().spec.onload.user_image)
    return msgspec.structs.replace(working(name, label, kernel=KERNEL, plugins=(pod,)), **more)


class History:
    """The history of one resource over several changes of its spec. `nodes` may be replaced between them."""

    def __init__(self, *nodes: NodeView) -> None:
        self.entries: tuple[Revision, ...] = ()
        self.nodes = nodes
        self.existing = NOTHING

    def plan(self, resource: Onload) -> Rollout:
        status = Status(onload=OnloadStatus(history=self.entries), device_plugin=DevicePluginStatus())
        resource = msgspec.structs.replace(resource, status=status)
        history = known_history(resource, self.existing, self.nodes)
        return plan_rollout(resource, history, self.nodes)

    def apply(self, resource: Onload, outcome: Outcome = "progressing") -> str:
        """The label that the nodes get. The Modules get it too."""
        rollout = self.plan(resource)
        self.entries = record_outcome(rollout, outcome, "now")
        live = module(with_revision(resource, rollout.target), rollout.target.label, V2)
        self.existing = Existing(live, None, daemonset(resource, "plugin:1"))
        return rollout.target.label

    def states(self) -> list[tuple[str, str]]:
        return [(each.label, each.state) for each in self.entries]


# Labels


@pytest.mark.parametrize(
    ("paths", "is_same"),
    [
        ({}, True),
        ({"onload__imagePullPolicy": "Always"}, True),
        ({"onload__kernelMappings": [mapped("one"), mapped("one", "appended")]}, True),
        ({"onload__kernelMappings": [mapped("two", "^6\\."), mapped("one")]}, True),
        ({"onload__kernelMappings": [mapped("one", build=BUILD)]}, True),
        ({"onload__kernelMappings": [mapped("one", sfc={})]}, True),
        ({"onload__kernelMappings": [mapped("two", "^5\\."), mapped("one")]}, False),
        ({"onload__kernelMappings": [mapped("two")]}, False),
        ({"onload__moduleParameters": {"onload": ["a=1"]}}, False),
    ],
)
def test_a_change_of_the_modules_that_nodes_have_gets_another_label(paths: Object, is_same: bool) -> None:
    history = History(node("a", VERSION))
    assert history.apply(spec(), "complete") == VERSION
    label = history.apply(spec(**paths))
    assert (label == VERSION) == is_same
    assert label.startswith(VERSION)
    assert history.apply(spec(**paths)) == label


def test_a_mapping_that_nodes_use_is_not_removed_under_their_label() -> None:
    both = [mapped("one", "^5\\."), mapped("two", "^6\\.")]
    history = History(node("a", VERSION))
    history.apply(spec(onload__kernelMappings=both), "complete")
    assert history.apply(spec(onload__kernelMappings=both[:1])) == VERSION
    history.apply(spec(onload__kernelMappings=both))
    history.nodes = (*history.nodes, node("b", VERSION, kernel="6.1"))
    assert history.apply(spec(onload__kernelMappings=both[:1])) != VERSION


def test_sfc_of_one_mapping_is_not_removed_under_the_label_of_nodes_that_use_it() -> None:
    both = [mapped("one", "^5\\.", sfc={}), mapped("two", "^6\\.", sfc={})]
    history = History(node("a", VERSION, sfc=VERSION))
    history.apply(spec(onload__kernelMappings=both), "complete")
    assert history.apply(spec(onload__kernelMappings=[mapped("one", "^5\\."), both[1]])) != VERSION


def test_a_label_is_not_used_again_for_other_content_while_nodes_have_it() -> None:
    """8.1 with one image, 8.2, and 8.1 with another image, before a node has left the first 8.1."""
    history = History(node("a", "8.1"), node("b", "8.1"))
    assert history.apply(spec("8.1", "one"), "complete") == "8.1"
    assert history.apply(spec("8.2", "two")) == "8.2"
    label = history.apply(spec("8.1", "three"))
    assert label not in {"8.1", "8.2"}
    contents = {each.label: each.kernel_mappings[0].kernel_module_image for each in history.entries}
    assert contents == {label: "three", "8.2": "two", "8.1": "one"}


@pytest.mark.parametrize("recorded", [True, False], ids=["status", "lost status"])
def test_a_revert_to_content_that_nodes_have_gets_their_label(recorded: bool) -> None:
    history = History(node("a", "8.1"), node("b", "8.1"))
    history.apply(spec("8.1", "one"), "complete")
    changed = history.apply(spec("8.1", "two"))
    assert changed != "8.1"
    if recorded:
        assert history.apply(spec("8.1", "one")) == "8.1"
        assert history.apply(spec("8.1", "two")) == changed
    else:
        history.entries = ()
        assert history.apply(spec("8.1", "one")) not in {"8.1", changed}, "what 8.1 stands for is not known"


SIX = "6.1.0-1.el10.x86_64"


@pytest.mark.parametrize(
    ("paths", "node_changes", "is_kept"),
    [
        ({}, {}, True),
        ({"onload__userImage": "user:2"}, {}, True),
        ({}, {"gate": None}, True),
        ({}, {"progress": progress("x"), "gate": None}, True),
        ({}, {"module_loaded": False, "module_loaded_version": None}, True),
        ({}, {"progress": progress("x"), "module_loaded": False}, False),
        ({}, {"gate": None, "module_loaded": False}, False),
        ({}, {"module_loaded_version": "other"}, False),
        ({}, {"module": None}, False),
        ({}, {"gate": "other"}, False),
        ({}, {"sfc": VERSION}, False),
        ({}, {"kernel": SIX}, False),
        ({}, {"kernel": "4.18"}, False),
        ({"onload__version": "8.2"}, {}, False),
        ({"onload__moduleParameters": {"onload": ["a=1"]}}, {}, False),
        ({"onload__kernelMappings": [mapped("one", "^5", sfc={}), mapped("three", "^6")]}, {}, False),
        ({"onload__kernelMappings": [mapped("other", "^5"), mapped("three", "^6")]}, {}, False),
        ({"onload__kernelMappings": [mapped("three", "^6")]}, {}, False),
    ],
)
def test_a_change_for_another_kernel_keeps_the_label_of_a_node(
    paths: Object, node_changes: Object, is_kept: bool
) -> None:
    kernels = [mapped("one", "^5"), mapped("two", "^6")]
    history = History(node("five", VERSION), node("six", VERSION, kernel=SIX))
    assert history.apply(spec(onload__kernelMappings=kernels), "complete") == VERSION
    history.nodes = (msgspec.structs.replace(history.nodes[0], **node_changes), history.nodes[1])
    changed = {"onload__kernelMappings": [mapped("one", "^5"), mapped("three", "^6")]}
    rollout = history.plan(spec(**(changed | paths)))
    assert rollout.target.label != VERSION
    assert rollout.keeps == ({"five": VERSION} if is_kept else {})


def test_a_node_with_sfc_keeps_its_label_if_sfc_stays_the_same() -> None:
    kernels = [mapped("one", "^5", sfc={}), mapped("two", "^6")]
    history = History(node("five", VERSION, sfc=VERSION), node("six", VERSION, kernel=SIX))
    history.apply(spec(onload__kernelMappings=kernels), "complete")
    changed = {"onload__kernelMappings": [mapped("one", "^5", sfc={}), mapped("three", "^6")]}
    assert history.plan(spec(**changed)).keeps == {"five": VERSION}
    parameters = {"onload__moduleParameters": {"sfc": ["a=1"]}}
    assert history.plan(spec(**changed, **parameters)).keeps == {}


def test_nodes_with_another_label_of_the_same_modules_keep_it_at_a_revert() -> None:
    """An appended mapping gets a label if no node has that of the content before yet."""
    history = History(node("a", VERSION), node("b", VERSION))
    history.apply(spec(image="one"), "complete")
    before = history.apply(spec(image="two"))
    appended = history.apply(spec(onload__kernelMappings=[mapped("two"), mapped("x", "^7")]))
    assert len({VERSION, before, appended}) == 3
    history.nodes = (node("a", appended), node("b", VERSION))
    rollout = history.plan(spec(image="two"))
    assert (rollout.target.label, rollout.keeps) == (before, {"a": appended})


def test_the_pull_policy_of_a_label_stays_because_kmm_would_reload_the_modules() -> None:
    history = History(node("a", "8.1"))
    history.apply(spec("8.1", onload__imagePullPolicy="Always"), "complete")
    history.apply(spec("8.2", onload__imagePullPolicy="IfNotPresent"))
    back = history.plan(spec("8.1", onload__imagePullPolicy="IfNotPresent"))
    assert (back.target.label, back.target.image_pull_policy) == ("8.1", "Always")


@pytest.mark.parametrize("version", ["1" * 55, "1" * 63])
def test_a_label_with_a_suffix_has_at_most_63_characters(version: str) -> None:
    history = History(node("a", version))
    history.apply(spec(version), "complete")
    label = history.apply(spec(version, "two"))
    assert label != version
    assert len(label) <= 63


def test_without_kmm_the_label_is_the_version() -> None:
    history = History(node("a", VERSION))
    history.apply(spec(), "complete")
    external = onload(onload__kernelMappings=[], onload__moduleManagement="External")
    assert history.apply(external, "complete") == VERSION
    assert history.apply(spec()) == VERSION
    assert history.apply(spec(image="two")) != VERSION


# Earlier releases


def test_entries_of_earlier_releases_get_labels() -> None:
    history = History(node("a", VERSION))
    history.apply(spec(), "complete")
    suffixed = history.apply(spec(image="two"))
    history.nodes = (node("a", suffixed), node("b", VERSION))
    old = [msgspec.structs.replace(each, label="", digest="", image_pull_policy="") for each in history.entries]
    before, history.entries = history.entries, tuple(old)
    assert history.apply(spec(image="two")) == suffixed
    assert [(each.label, each.digest) for each in history.entries] == [(each.label, each.digest) for each in before]


@pytest.mark.parametrize("sfc", [False, True])
def test_modules_of_the_go_operator_are_the_first_entry(sfc: bool) -> None:
    history = History(node("a", "8.1", sfc="8.1" if sfc else None))
    old = spec(
        "8.1", onload__userImage="user:1", onload__kernelMappings=[mapped("one", **({"sfc": {}} if sfc else {}))]
    )
    history.existing = Existing(
        module(old, "8.1", V2), sfc_module(old, "8.1", V2) if sfc else None, daemonset(old, "plugin:1")
    )
    assert history.plan(old).target.label == "8.1"
    assert history.apply(spec("8.2", "two")) == "8.2"
    (_, adopted) = history.entries
    assert (adopted.version, adopted.label, adopted.user_image) == ("8.1", "8.1", "user:1")
    assert adopted.kernel_mappings == old.spec.onload.kernel_mappings
    assert history.apply(old) == "8.1"
    assert history.apply(spec("8.1", "three")) not in {"8.1", "8.2"}


# History


def entries(*found: tuple[str, str]) -> tuple[Revision, ...]:
    history = History()
    for version, _ in reversed(found):
        history.apply(spec(version))
    states: Any = [state for _, state in found]
    pairs = zip(history.entries, states, strict=True)
    return tuple(msgspec.structs.replace(each, state=state, time="t") for each, state in pairs)


@pytest.mark.parametrize(
    ("before", "outcome", "after"),
    [
        ([], "progressing", [("2", "Progressing")]),
        ([], "complete", [("2", "Verified")]),
        ([("1", "Verified")], "progressing", [("2", "Progressing"), ("1", "Verified")]),
        ([("2", "Progressing"), ("1", "Verified")], "failed", [("2", "Failed"), ("1", "Verified")]),
        ([("2", "Progressing"), ("1", "Progressing")], "failed", [("2", "Progressing"), ("1", "Progressing")]),
        ([("2", "Failed"), ("1", "Verified")], "complete", [("2", "Failed"), ("1", "Verified")]),
        ([("1", "Verified"), ("2", "Failed")], "progressing", [("2", "Progressing"), ("1", "Verified")]),
        ([("2", "Verified"), ("1", "Verified")], "failed", [("2", "Verified"), ("1", "Verified")]),
    ],
)
def test_outcomes_are_recorded_in_the_history(
    before: list[tuple[str, str]], outcome: Outcome, after: list[tuple[str, str]]
) -> None:
    history = History()
    history.entries = entries(*before)
    history.apply(spec("2", rollback=True), outcome)
    assert history.states() == after


def test_without_rollback_nothing_fails() -> None:
    history = History()
    history.entries = entries(("2", "Progressing"), ("1", "Verified"))
    history.apply(spec("2"), "failed")
    assert history.states()[0] == ("2", "Progressing")


def test_a_history_that_does_not_change_keeps_its_times() -> None:
    history = History()
    history.entries = before = entries(("2", "Verified"), ("1", "Verified"))
    history.apply(spec("2"), "complete")
    assert history.entries == before


def test_the_history_is_short_and_keeps_verified_and_used_versions() -> None:
    history = History()
    for number in range(1, 10):
        history.nodes = (node("a", "v2"),) if number > 2 else ()
        history.apply(spec(f"v{number}"), "complete" if number == 1 else "progressing")
    labels = [each.label for each in history.entries]
    assert labels == ["v9", "v8", "v7", "v6", "v5", "v2", "v1"]
    assert len(labels) == MAX_HISTORY + 2


# Rollback


def moved(name: str, label: str, verified: str, **more: Any) -> NodeView:
    """A node whose change to a label is under way."""
    return node(name, label, progress=progress(label, upgrade=True, verified=verified), plugins=(), **more)


def test_each_node_returns_to_what_it_was_verified_on() -> None:
    """One node was held, so 8.2 was never complete. 8.3 fails: nodes with 8.2 do not get 8.1."""
    history = History(node("a", "8.1"), node("b", "8.1"))
    history.apply(spec("8.1", rollback=True), "complete")
    history.apply(spec("8.2", rollback=True))
    history.nodes = (node("a", "8.2"), node("b", "8.1", held=True))
    failing = spec("8.3", rollback=True)
    assert history.apply(failing) == "8.3"
    history.nodes = (moved("a", "8.3", "8.2"), node("b", "8.1"), node("c", "8.2"), NodeView(name="d", kernel=KERNEL))
    history.apply(failing, "failed")
    rollout = history.plan(failing)
    assert rollout.rolls_back
    assert rollout.target.label == "8.2"
    assert rollout.others == {"b": "8.1"}
    assert history.states()[0] == ("8.3", "Failed")


def test_a_node_that_returns_to_an_older_version_follows_after_the_others() -> None:
    history = History(node("a", "8.1"), node("b", "8.1"))
    history.apply(spec("8.1", rollback=True), "complete")
    history.apply(spec("8.2", rollback=True))
    failing = spec("8.3", rollback=True)
    history.apply(failing)
    history.nodes = (moved("a", "8.3", "8.2"), moved("b", "8.3", "8.1"))
    history.apply(failing, "failed")
    rollout = history.plan(failing)
    assert (rollout.target.label, rollout.others) == ("8.2", {"b": "8.1"})
    history.nodes = (node("a", "8.2"), history.nodes[1])
    rollout = history.plan(failing)
    assert (rollout.target.label, rollout.others) == ("8.1", {"a": "8.2"})
    history.nodes = (msgspec.structs.replace(history.nodes[0], ready=False, progress=progress("8.2")), node("b", "8.1"))
    assert history.plan(failing).rolls_back


def test_a_node_on_which_the_failed_version_was_verified_keeps_it() -> None:
    history = History(node("a", "8.1"), node("b", "8.1"))
    history.apply(spec("8.1", rollback=True), "complete")
    failing = spec("8.2", rollback=True)
    history.apply(failing)
    history.nodes = (node("a", "8.2"), moved("b", "8.2", "8.1"))
    history.apply(failing, "failed")
    rollout = history.plan(failing)
    assert (rollout.target.label, rollout.others) == ("8.1", {"a": "8.2"})


def test_a_failed_revert_with_a_suffix_returns_to_the_suffixed_label() -> None:
    history = History(node("a", "8.1"))
    history.apply(spec("8.1", "one", rollback=True), "complete")
    suffixed = history.apply(spec("8.1", "two", rollback=True), "complete")
    failing = spec("8.2", "three", rollback=True)
    history.apply(failing)
    history.nodes = (moved("a", "8.2", suffixed), node("b", suffixed))
    history.apply(failing, "failed")
    rollout = history.plan(failing)
    assert (rollout.target.label, rollout.others) == (suffixed, {})
    assert with_revision(failing, rollout.target).spec.onload.kernel_mappings[0].kernel_module_image == "two"


def test_a_failed_userland_image_returns_to_the_one_of_the_node() -> None:
    history = History(node("a", "8.1"))
    good = spec("8.1", rollback=True)
    history.apply(good, "complete")
    bad = spec("8.1", rollback=True, onload__userImage="bad")
    image = good.spec.onload.user_image
    history.nodes = (
        node("a", "8.1", progress=progress("8.1", upgrade=True, verified="8.1", user_image=image), plugins=()),
    )
    history.apply(bad, "failed")
    assert history.plan(bad).target.user_image == image
    corrected = spec("8.1", rollback=True, onload__userImage="corrected")
    assert history.plan(corrected).target.user_image == "corrected"


def test_a_node_that_kept_its_label_returns_to_it_with_the_userland_that_it_had() -> None:
    def mappings(image: str) -> Object:
        return {"onload__kernelMappings": [mapped("one", "^5"), mapped(image, "^6")], "rollback": True}

    history = History(node("five", VERSION), node("six", VERSION, kernel=SIX))
    history.apply(spec(**mappings("two")), "complete")
    label = history.apply(spec(onload__userImage="user:2", **mappings("three")), "complete")
    pod = msgspec.structs.replace(plugin_pod(), user_image="user:2")
    history.nodes = (node("five", VERSION, plugins=(pod,)), node("six", label, kernel=SIX, plugins=(pod,)))
    failing = spec("8.3", onload__userImage="user:3", **mappings("four"))
    history.apply(failing)
    began = progress("8.3", upgrade=True, verified=VERSION, user_image="user:2")
    history.nodes = (node("five", "8.3", progress=began, plugins=()), history.nodes[1])
    history.apply(failing, "failed")
    rollout = history.plan(failing)
    assert (rollout.target.label, rollout.target.user_image, rollout.others) == (VERSION, "user:2", {"six": label})


def test_a_rollback_restores_the_parameters_of_the_modules() -> None:
    history = History(node("a", VERSION))
    history.apply(spec(rollback=True), "complete")
    changed = spec(rollback=True, onload__moduleParameters={"onload": ["unknown=1"]})
    history.apply(changed, "failed")
    assert [each.state for each in history.entries] == ["Failed", "Verified"]
    rollout = history.plan(changed)
    assert with_revision(changed, rollout.target).spec.onload.module_parameters is None


def test_progress_of_earlier_releases_returns_to_the_last_verified_version() -> None:
    history = History()
    history.apply(spec("8.1", rollback=True), "complete")
    failing = spec("8.2", rollback=True)
    history.apply(failing)
    history.nodes = (moved("a", "8.2", ""),)
    history.apply(failing, "failed")
    assert history.plan(failing).target.label == "8.1"
