"""What a structural schema does not allow of an object, in words.

The API server holds custom resources to the schemas of `crds`, and does so before any webhook; this is for those who
ask no API server. A null counts as absent, as there.
"""

import re
from collections.abc import Iterator, Mapping

from accelplane.operator.jsontypes import Json, JsonObject

_LONGEST_SHOWN = 80


def violations(value: Json, schema: JsonObject, path: str = "") -> Iterator[str]:
    """What is wrong with a value, each with its field, what was found there and what is expected."""
    if value is None:
        return
    match schema.get("type"):
        case "object":
            yield from _object(value, schema, path)
        case "array":
            items = schema.get("items")
            if not isinstance(value, list):
                yield _told(path, value, "a list")
            elif isinstance(items, dict):
                for position, each in enumerate(value):
                    yield from violations(each, items, f"{path}[{position}]")
        case "string":
            yield from _text(value, schema, path)
        case "integer":
            yield from _number(value, schema, path)
        case "boolean" if not isinstance(value, bool):
            yield _told(path, value, "true or false")
        case _ if schema.get("x-kubernetes-int-or-string") and not _is_int_or_string(value):
            yield _told(path, value, "a number or a text")
        case _:
            return


def _object(value: Json, schema: JsonObject, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _told(path, value, "an object")
        return
    known, others = schema.get("properties"), schema.get("additionalProperties")
    fields: Mapping[str, Json] = known if isinstance(known, dict) else {}
    for name, each in value.items():
        inner = fields.get(name, others)
        if isinstance(inner, dict):
            yield from violations(each, inner, f"{path}.{name}" if path else name)
        elif fields:
            yield f"{path}.{name}".removeprefix(".") + f" is no field, expected one of {', '.join(fields)}"
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if value.get(str(name)) is None:
            yield f"{path}.{name}".removeprefix(".") + " is missing"


def _text(value: Json, schema: JsonObject, path: str) -> Iterator[str]:
    choices, pattern = schema.get("enum"), schema.get("pattern")
    if isinstance(choices, list) and value not in choices:
        yield _told(path, value, f"one of {', '.join(map(str, choices))}")
    elif not isinstance(value, str):
        yield _told(path, value, "a text")
    elif isinstance(pattern, str) and not re.search(pattern, value):
        yield _told(path, value, f"a match of {pattern}")


def _number(value: Json, schema: JsonObject, path: str) -> Iterator[str]:
    least = schema.get("minimum")
    if isinstance(value, bool) or not isinstance(value, int):
        yield _told(path, value, "a whole number")
    elif isinstance(least, int) and value < least:
        yield _told(path, value, f"{least} or more")


def _is_int_or_string(value: Json) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _told(path: str, value: Json, expected: str) -> str:
    shown = ascii(value)
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{shown[:_LONGEST_SHOWN]}..."
    return f"{path or 'the object'} is {shown}, expected {expected}"
