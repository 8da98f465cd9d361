"""JSON of values with names that are no UTF-8 text."""

import json

from msgspec import Struct

from accelplane import jsontext


class Name(Struct, rename="camel"):
    device_name: str


def test_other_values_are_encoded_as_by_msgspec() -> None:
    assert jsontext.encode({"a": [Name("größer")]}) == '{"a":[{"deviceName":"größer"}]}'.encode()


def test_characters_that_control_a_terminal_are_escaped_in_lines_for_readers() -> None:
    name = "a\x00\x1b[2J\x7f\x85\x9b2J\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069größer"
    found = jsontext.indented({name: [name]})
    assert json.loads(found) == {name: [name]}
    assert all(line.isprintable() for line in found.split("\n"))
    assert found.count("größer") == 2


def test_names_that_are_no_utf_8_text_have_question_marks() -> None:
    found = jsontext.indented({"card\udcff": [Name("m\udcfe0")]})
    assert json.loads(found) == {"card?": [{"deviceName": "m?0"}]}
    assert found.startswith('{\n  "card?"')
