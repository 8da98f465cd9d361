"""JSON of values with names that are no UTF-8 text."""

import json

from msgspec import Struct

from accelplane import jsontext


class Name(Struct, rename="camel"):
    device_name: str


def test_other_values_are_encoded_as_by_msgspec() -> None:
    assert jsontext.encode({"a": [Name("größer")]}) == '{"a":[{"deviceName":"größer"}]}'.encode()


def test_names_that_are_no_utf_8_text_have_question_marks() -> None:
    found = jsontext.indented({"card\udcff": [Name("m\udcfe0")]})
    assert json.loads(found) == {"card?": [{"deviceName": "m?0"}]}
    assert found.startswith('{\n  "card?"')
