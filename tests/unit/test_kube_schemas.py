"""Validation against structural schemas: one line per violation, with the value found and the value expected."""

from typing import Any

import pytest

from accelplane.kube.schemas import violations

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "mode": {"type": "string", "enum": ["a", "b"]},
        "id": {"type": "string", "pattern": "^x"},
        "count": {"type": "integer", "minimum": 1},
        "on": {"type": "boolean"},
        "names": {"type": "array", "maxItems": 2, "items": {"type": "string"}},
        "share": {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True},
    },
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "x" * 6}, "name is 'xxxxxx', expected at most 5 characters, found 6"),
        ({"name": None}, "name is missing"),
        ({"labels": {"a": True}}, 'labels.a is true, expected a string; write "true"'),
        ({"labels": {"a": 1.5}}, 'labels.a is 1.5, expected a string; write "1.5"'),
        ({"labels": {"a": []}}, "labels.a is [], expected a string"),
        ({"labels": "a"}, "labels is 'a', expected an object"),
        ({"mode": "c"}, "mode is 'c', expected one of a, b"),
        ({"id": "y"}, "id is 'y', expected a string that matches ^x"),
        ({"count": 0}, "count is 0, expected 1 or more"),
        ({"count": True}, "count is true, expected an integer"),
        ({"on": "yes"}, "on is 'yes', expected true or false"),
        ({"names": ["a", "b", "c"]}, "names has 3 items, expected at most 2"),
        ({"names": ["a", 2]}, 'names[1] is 2, expected a string; write "2"'),
        ({"names": "a"}, "names is 'a', expected a list; write [a]"),
        ({"names": "a, b"}, "names is 'a, b', expected a list; write [a, b]"),
        ({"names": 1}, "names is 1, expected a list"),
        ({"share": 0.1}, 'share is 0.1, expected an integer or a string; write "0.1"'),
        ({"share": False}, "share is false, expected an integer or a string"),
        ({"other": 1}, "other is an unknown field, expected one of name, labels, mode, id, count, on, names, share"),
    ],
)
def test_a_violation_names_the_field_and_what_is_expected(fields: dict[str, Any], expected: str) -> None:
    assert [*violations({"name": "a", **fields}, SCHEMA)] == [expected]


def test_a_valid_object_has_no_violations() -> None:
    valid = {"name": "x" * 5, "labels": {"a": ""}, "mode": "b", "id": "x", "count": 1, "names": ["a", "b"], "on": None}
    assert [*violations({**valid, "share": "10%"}, SCHEMA)] == []
    assert [*violations({**valid, "share": 1}, SCHEMA)] == []


def test_a_long_value_is_shortened() -> None:
    (found,) = violations({"name": "a", "mode": "c" * 1000}, SCHEMA)
    assert len(found) < 130
