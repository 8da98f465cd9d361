"""Differences between a desired object and that of the API server, and their managers."""

import copy
from typing import Any

import pytest

from accelplane.kube.differences import Difference, Item, differences, managers_of, with_found


def lines(desired: Any, found: Any) -> list[str]:
    return [str(each) for each in differences(desired, found)]


@pytest.mark.parametrize(
    ("desired", "found"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1, "added": 2}, "status": {}}),
        ({"a": None}, {}),
        ({"a": "", "b": [], "c": ()}, {"b": None}),
        ({"a": ("x", "y")}, {"a": ["x", "y"]}),
        ({"tolerations": [{"key": "a", "effect": "b"}]}, {"tolerations": [{"effect": "b", "key": "a"}]}),
        ({"limits": {"cpu": "1000m"}}, {"limits": {"cpu": "1"}}),
        ({"containers": [{"name": "a"}]}, {"containers": [{"name": "mesh"}, {"name": "a", "image": "x"}]}),
        ({"volumes": [{"name": "a", "emptyDir": {}}]}, {"volumes": [{"name": "a", "emptyDir": {}}]}),
    ],
)
def test_objects_that_the_api_server_treats_as_equal_have_no_difference(desired: Any, found: Any) -> None:
    assert lines(desired, found) == []


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("conditions", "type"),
        ("containers", "name"),
        ("env", "name"),
        ("imagePullSecrets", "name"),
        ("initContainers", "name"),
        ("ownerReferences", "uid"),
        ("volumeDevices", "devicePath"),
        ("volumeMounts", "mountPath"),
        ("volumes", "name"),
    ],
)
def test_items_of_associative_lists_are_compared_by_their_key(field: str, key: str) -> None:
    found = {field: [{key: "added", "x": 1}, {key: "a", "x": 1}]}
    assert lines({field: [{key: "a", "x": 1}]}, found) == []
    assert lines({field: [{key: "a", "x": 2}]}, found) == [f"{field}.a.x: found 1, expected 2"]


@pytest.mark.parametrize(
    ("desired", "found", "expected"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b: found 2, expected 1"),
        ({"a": {"b": 1}}, {"a": {}}, "a.b: missing, expected 1"),
        ({"a": ""}, {"a": "b"}, 'a: found "b", expected ""'),
        ({"a": False}, {}, "a: missing, expected false"),
        ({"a": {"b": 1}}, {"a": None}, 'a: missing, expected {"b":1}'),
        ({"a": {"b": 1}}, {"a": []}, 'a: found [], expected {"b":1}'),
        ({"args": ["x"]}, {"args": ["x", "y"]}, 'args: found ["x","y"], expected ["x"]'),
        (
            {"nodeSelector": {"a": "b"}}, {"nodeSelector": {"a": "b", "c/d": "e"}},
            'nodeSelector[c/d]: found "e", expected none',
        ),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "2"}}, 'limits.cpu: found "2", expected "1"'),
        (
            {"containers": [{"name": "a", "image": "x"}]}, {"containers": [{"name": "a", "image": "y"}]},
            'containers.a.image: found "y", expected "x"',
        ),
        (
            {"volumes": [{"name": "a", "emptyDir": {}}]}, {"volumes": [{"name": "a"}]},
            "volumes.a.emptyDir: missing, expected {}",
        ),
        ({"env": [{"name": "A"}]}, {"env": []}, 'env.A: missing, expected {"name":"A"}'),
        ({"a": "x" * 200}, {"a": 1}, f'a: found 1, expected "{"x" * 79}...'),
    ],
)  # fmt: skip
def test_a_difference_has_the_field_the_value_found_and_the_value_expected(
    desired: Any, found: Any, expected: str
) -> None:
    assert lines(desired, found) == [expected]


FIELDS = {
    "f:spec": {
        "f:containers": {'k:{"name":"a"}': {".": {}, "f:image": {}}},
        "f:nodeSelector": {},
        "f:replicas": {},
    }
}


@pytest.mark.parametrize(
    ("path", "is_owned"),
    [
        (("spec", "replicas"), True),
        (("spec", "containers", Item("name", "a"), "image"), True),
        (("spec", "containers", Item("name", "a")), True),
        (("spec", "containers", Item("name", "b"), "image"), False),
        (("spec", "containers", Item("name", "a"), "args"), False),
        (("spec", "nodeSelector", "x"), True),
        (("metadata",), False),
    ],
)
def test_the_manager_of_a_field_is_found_in_the_managed_fields(path: Any, is_owned: bool) -> None:
    entries = [{"manager": "someone", "fieldsV1": FIELDS}, {"manager": "other", "fieldsV1": {}}, {"manager": "third"}]
    assert managers_of(Difference(path), entries) == (("someone",) if is_owned else ())


def test_a_document_with_the_found_values_leaves_only_the_other_differences() -> None:
    desired: dict[str, object] = {
        "metadata": {"labels": {"a": "1", "b": "2"}},
        "spec": {"nodeSelector": {"a": "1"}, "containers": [{"name": "x", "image": "i:1"}, {"name": "y"}], "size": 1},
    }
    found: dict[str, object] = {
        "metadata": {"labels": {"b": "3"}},
        "spec": {"nodeSelector": {"a": "1", "c": "1"}, "containers": [{"name": "x", "image": "i:2"}], "size": 2},
    }
    before = copy.deepcopy(desired)
    *some, last = differences(desired, found)
    assert [each.field for each in (*some, last)] == [
        "metadata.labels.a", "metadata.labels.b", "spec.nodeSelector.c", "spec.containers.x.image",
        "spec.containers.y", "spec.size",
    ]  # fmt: skip
    assert differences(with_found(desired, some), found) == (last,)
    assert differences(with_found(desired, [*some, last]), found) == ()
    assert desired == before
