"""Arrays of JSON objects, read element by element."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from accelplane.kube.jsonarray import elements

# Longer than what is decoded at once.
PADDING = {"padding": 'x"{[,\\' * 10_000}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\{}[],: \u00e9', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.lists(st.dictionaries(st.text(alphabet='ab"\\{}[]', max_size=4), VALUES, max_size=3), max_size=6)


def read(text: str) -> list[Any]:
    return [json.loads(bytes(each)) for each in elements(Raw(text.encode())) if each is not None]


@pytest.mark.parametrize("large", [False, True])
@given(OBJECTS, st.sampled_from([None, 1]), st.booleans())
def test_the_elements_equal_those_of_the_array(
    large: bool, objects: list[Any], indent: int | None, ascii_only: bool
) -> None:
    expected = [*objects, PADDING, *objects] if large else objects
    assert read(json.dumps(expected, indent=indent, ensure_ascii=ascii_only)) == expected


@pytest.mark.parametrize("value", [1, True, None, "text", [], [{}]])
def test_a_large_array_has_objects_only(value: Any) -> None:
    for array in ([value, PADDING], [PADDING, value], [PADDING, value, PADDING]):
        with pytest.raises(msgspec.DecodeError):
            read(json.dumps(array))


@pytest.mark.parametrize("value", ["text", {}, 7, True, "x" * 100_000, {"a": "x" * 100_000}])
def test_a_value_that_is_not_an_array_is_an_error(value: Any) -> None:
    with pytest.raises(msgspec.DecodeError):
        read(json.dumps(value))


def test_an_array_that_is_too_long_is_an_error() -> None:
    read(f"[{'{},' * 49_999}{{}}]")
    with pytest.raises(msgspec.ValidationError, match="at most 50000 elements"):
        read(f"[{'{},' * 50_000}{{}}]")


def test_null_arrays_are_empty() -> None:
    assert read("null") == []


def test_a_large_array_is_read_in_steps() -> None:
    found = list(elements(Raw(b"[%b{}]" % (b"{}," * 20_000))))
    assert len(found) - found.count(None) == 20_001
    assert found.count(None) >= 20
