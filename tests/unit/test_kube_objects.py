"""Objects, owners and conditions: the pure parts of the controller runtime."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from lightkube.models.apps_v1 import DaemonSetSpec
from lightkube.models.core_v1 import PodTemplateSpec
from lightkube.models.meta_v1 import LabelSelector, ManagedFieldsEntry, ObjectMeta
from lightkube.resources.apps_v1 import DaemonSet
from lightkube.resources.core_v1 import ConfigMap, Node, Pod

from accelplane.kube.client import path_of
from accelplane.kube.conditions import Condition, condition, find_condition, merge_conditions, with_transition_times
from accelplane.kube.jsonpatch import pointer
from accelplane.kube.objects import Object, OwnerReference, Request, document_of, micro_time, request_of, trim
from accelplane.kube.owners import controller_of, is_controlled_by, owner_reference, owner_request


def daemon_set(uid: str | None) -> DaemonSet:
    labels = {"app": "plugin"}
    template = PodTemplateSpec(metadata=ObjectMeta(labels=labels))
    spec = DaemonSetSpec(selector=LabelSelector(matchLabels=labels), template=template)
    return DaemonSet(metadata=ObjectMeta(name="plugin", namespace="kube-system", uid=uid), spec=spec)


SET = daemon_set("u-1")


@pytest.mark.parametrize(
    ("kind", "namespace", "name", "subresource", "path"),
    [
        (Pod, "", "", "", "/api/v1/pods"),
        (Pod, "a", "", "", "/api/v1/namespaces/a/pods"),
        (Pod, "a", "p", "", "/api/v1/namespaces/a/pods/p"),
        (DaemonSet, "a", "d", "status", "/apis/apps/v1/namespaces/a/daemonsets/d/status"),
        (Node, "", "n", "", "/api/v1/nodes/n"),
        (Node, "ignored", "n", "", "/api/v1/nodes/n"),
    ],
)
def test_objects_have_the_paths_of_the_api(
    kind: type[Object], namespace: str, name: str, subresource: str, path: str
) -> None:
    assert path_of(kind, namespace, name, subresource) == path


@pytest.mark.parametrize(("namespace", "name"), [("", "p"), ("a", "../secrets/x"), ("a/b", "p"), ("..", "p")])
def test_invalid_names_have_no_path(namespace: str, name: str) -> None:
    with pytest.raises(ValueError, match="Pod"):
        path_of(Pod, namespace, name)


def test_a_document_has_its_kind_and_only_set_fields() -> None:
    instance = ConfigMap(metadata=ObjectMeta(name="a", namespace="b"), data={"c": ""})
    expected = {"metadata": {"name": "a", "namespace": "b"}, "data": {"c": ""}}
    assert document_of(instance) == {"apiVersion": "v1", "kind": "ConfigMap", **expected}


def test_an_object_without_a_name_has_no_key() -> None:
    assert request_of(SET) == Request("plugin", "kube-system")
    with pytest.raises(ValueError, match=r"Pod: has no metadata\.name"):
        request_of(Pod())


def test_trimming_takes_the_managed_fields() -> None:
    pod = Pod(metadata=ObjectMeta(name="a", managedFields=[ManagedFieldsEntry(manager="x")]))
    trim(pod)
    assert pod.metadata
    assert pod.metadata.managedFields is None


def test_an_owner_is_found_by_its_objects() -> None:
    pod = Pod(metadata=ObjectMeta(name="p", namespace="kube-system", ownerReferences=[owner_reference(SET)]))
    assert owner_request(pod, DaemonSet) == Request("plugin", "kube-system")
    assert is_controlled_by(pod, SET)
    assert not is_controlled_by(pod, daemon_set("u-2"))
    assert controller_of(Pod(metadata=ObjectMeta(name="p"))) is None


@pytest.mark.parametrize(
    ("api_version", "kind", "controller", "found"),
    [
        ("apps/v1", "DaemonSet", True, True),
        ("apps/v1beta2", "DaemonSet", True, True),
        ("apps/v1", "DaemonSet", False, False),
        ("apps/v1", "DaemonSet", None, False),
        ("apps/v1", "ReplicaSet", True, False),
        ("other/v1", "DaemonSet", True, False),
        ("v1", "DaemonSet", True, False),
        ("apps/", "DaemonSet", True, False),
    ],
)
def test_an_owner_is_matched_by_group_and_kind_for_any_version(
    api_version: str, kind: str, controller: bool | None, found: bool
) -> None:
    reference = OwnerReference(apiVersion=api_version, kind=kind, name="plugin", uid="u", controller=controller)
    pod = Pod(metadata=ObjectMeta(name="p", namespace="n", ownerReferences=[reference]))
    assert owner_request(pod, DaemonSet) == (Request("plugin", "n") if found else None)


def test_the_owner_of_a_namespaced_object_may_have_no_namespace() -> None:
    node = Node(metadata=ObjectMeta(name="n", uid="u"))
    pod = Pod(metadata=ObjectMeta(name="p", namespace="x", ownerReferences=[owner_reference(node)]))
    assert owner_request(pod, Node) == Request("n")


def test_an_object_without_uid_cannot_own() -> None:
    with pytest.raises(ValueError, match=r"DaemonSet plugin: has no metadata\.uid"):
        owner_reference(daemon_set(None))


def at(moment: int, kind: str, status: Any, reason: str = "R") -> Condition:
    time = f"2026-01-01T00:00:{moment:02}Z"
    return Condition(type=kind, status=status, reason=reason, message="", last_transition_time=time)


def test_a_condition_keeps_its_transition_time_while_its_status_stays() -> None:
    known = [at(1, "Ready", "True"), at(1, "Other", "False")]
    assert merge_conditions(known, [at(9, "Ready", "True", "New")]) == (at(1, "Ready", "True", "New"), known[1])
    assert merge_conditions(known, [at(9, "Ready", "False")]) == (at(9, "Ready", "False"), known[1])
    assert merge_conditions(None, [at(9, "Ready", "False")]) == (at(9, "Ready", "False"),)
    assert with_transition_times(known, [at(9, "Ready", "True")]) == (known[0],)


def test_unchanged_conditions_are_equal() -> None:
    known = merge_conditions(None, [condition("Ready", True, "Done", generation=1, now="before")])
    assert merge_conditions(known, [condition("Ready", True, "Done", generation=1)]) == known


def test_a_message_has_the_length_that_the_api_allows() -> None:
    assert len(condition("Ready", True, "Done", "x" * 40000).message) == 32768


@pytest.mark.parametrize(("holds", "status"), [(True, "True"), (False, "False"), (None, "Unknown")])
def test_the_status_of_a_condition_is_true_false_or_unknown(holds: bool | None, status: str) -> None:
    result = condition("Ready", holds, "Why", "because")
    found = find_condition([result], "Ready")
    assert found is result
    assert found.status == status
    assert find_condition(None, "Ready") is None


def test_a_full_second_is_written_with_its_microseconds() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    assert msgspec.json.encode(micro_time(moment)) == b'"2026-01-01T00:00:00.000001Z"'


@pytest.mark.parametrize(
    ("words", "text"), [(("a", 0), "/a/0"), (("a/b", "m~n"), "/a~1b/m~0n"), (("~1",), "/~01"), ((), "")]
)
def test_a_json_pointer_escapes_slash_and_tilde(words: tuple[str | int, ...], text: str) -> None:
    assert pointer(*words) == text
