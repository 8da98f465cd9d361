"""Messages for options of a wrong form: where, what was found, what is expected."""

from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.node.option_messages import option_message
from accelplane.plugins import Config


class Board(Config, frozen=True, kw_only=True):
    name: str = ""


class Options(Config, frozen=True, kw_only=True):
    count: int = 1
    limit: float = 0.0
    boards: tuple[Board, ...] = ()


class Limited(Config, frozen=True, kw_only=True):
    count: Annotated[int, msgspec.Meta(ge=1)] = 1


def message(source: str, options: object) -> str:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(options, Options)
    return option_message(source, caught.value, Options)


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        ("plugins.tpu", {"count": "x"}, "plugins.tpu.count: found a string, expected an integer"),
        ("plugins.tpu", {"limit": [1]}, "plugins.tpu.limit: found a list, expected a number"),
        (
            "plugins.tpu",
            {"size": 1},
            "plugins.tpu: found the unknown option 'size', expected one of count, limit, boards",
        ),
        ("plugins.tpu", {"boards": [{"id": 1}]}, "plugins.tpu.boards[0]: found the unknown option 'id'"),
        ("plugins.tpu", [], "plugins.tpu: found a list, expected a mapping"),
        ("a.yaml: ", {"count": None}, "a.yaml: count: found nothing, expected an integer"),
        ("a.yaml: ", 7, "a.yaml: found an integer, expected a mapping"),
        ("-", {"count": "x"}, "-count: found a string, expected an integer"),
        ("", {"count": "x"}, "count: found a string, expected an integer"),
    ],
)
def test_a_message_has_the_path_the_found_and_the_expected_value(source: str, options: object, expected: str) -> None:
    assert message(source, options).startswith(expected)


def test_a_limit_of_an_option_is_in_the_message() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"count": 0}, Limited)
    assert option_message("plugins.tpu", caught.value, Limited) == "plugins.tpu.count: expected an integer >= 1"


def test_the_text_of_a_plugins_own_check_is_unchanged() -> None:
    assert option_message("plugins.tpu", ValueError("count is 3, expected 1")) == "plugins.tpu: count is 3, expected 1"


@given(st.text(), st.dictionaries(st.text(), st.none() | st.integers() | st.text()))
def test_every_invalid_mapping_has_a_message(source: str, options: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({**options, "size": 1}, Options)
    assert ", expected " in option_message(source, caught.value, Options)
