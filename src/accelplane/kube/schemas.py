"""Validation of objects against structural schemas without an API server.

The API server validates custom resources against the schema of their definition before it calls webhooks. Like the API
server, this module treats null as an absent field.
"""

import json
import re
from collections.abc import Iterator, Mapping

from accelplane.kube.jsontypes import Json, JsonObject

_LONGEST_SHOWN = 80


def violations(value: Json, schema: JsonObject, path: str = "") -> Iterator[str]:
    """Yields one message per violation: the field, the value found and the value expected."""
    if value is None:
        return
    match schema.get("type"):
        case "object":
            yield from _object(value, schema, path)
        case "array":
            yield from _array(value, schema, path)
        case "string":
            yield from _text(value, schema, path)
        case "integer":
            yield from _number(value, schema, path)
        case "boolean" if not isinstance(value, bool):
            yield _message(path, value, "true or false")
        case _ if schema.get("x-kubernetes-int-or-string") and not _is_int_or_string(value):
            quoted = f'; write "{json.dumps(value)}"' if isinstance(value, float) else ""
            yield _message(path, value, f"an integer or a string{quoted}")
        case _:
            return


def _object(value: Json, schema: JsonObject, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _message(path, value, "an object")
        return
    known, others = schema.get("properties"), schema.get("additionalProperties")
    fields: Mapping[str, Json] = known if isinstance(known, dict) else {}
    for name, each in value.items():
        inner = fields.get(name, others)
        if isinstance(inner, dict):
            yield from violations(each, inner, f"{path}.{name}" if path else name)
        elif fields:
            yield f"{path}.{name}".removeprefix(".") + f" is an unknown field, expected one of {', '.join(fields)}"
    if isinstance(most := schema.get("maxProperties"), int) and len(value) > most:
        yield f"{path} has {len(value)} entries, expected at most {most}"
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if value.get(str(name)) is None:
            yield f"{path}.{name}".removeprefix(".") + " is missing"


def _array(value: Json, schema: JsonObject, path: str) -> Iterator[str]:
    items, least, most = schema.get("items"), schema.get("minItems"), schema.get("maxItems")
    if not isinstance(value, list):
        words = re.findall(r"[^\s,;]+", value) if isinstance(value, str) else []
        yield _message(path, value, f"a list; write [{', '.join(words)}]" if words else "a list")
    elif isinstance(most, int) and len(value) > most:
        yield f"{path} has {len(value)} items, expected at most {most}"
    elif isinstance(least, int) and len(value) < least:
        yield f"{path} has {len(value)} items, expected at least {least}"
    elif isinstance(items, dict):
        for position, each in enumerate(value):
            yield from violations(each, items, f"{path}[{position}]")


def _text(value: Json, schema: JsonObject, path: str) -> Iterator[str]:
    choices, pattern, longest = schema.get("enum"), schema.get("pattern"), schema.get("maxLength")
    if isinstance(choices, list) and value not in choices:
        yield _message(path, value, f"one of {', '.join(map(str, choices))}")
    elif not isinstance(value, str):
        # YAML reads unquoted words such as true, and numbers, as other types.
        scalar = isinstance(value, bool | int | float)
        yield _message(path, value, f'a string; write "{json.dumps(value)}"' if scalar else "a string")
    elif isinstance(pattern, str) and not re.search(pattern, value):
        yield _message(path, value, f"a string that matches {pattern}")
    elif isinstance(longest, int) and len(value) > longest:
        yield _message(path, value, f"at most {longest} characters, found {len(value)}")


def _number(value: Json, schema: JsonObject, path: str) -> Iterator[str]:
    least, most = schema.get("minimum"), schema.get("maximum")
    if isinstance(value, bool) or not isinstance(value, int):
        yield _message(path, value, "an integer")
    elif isinstance(least, int) and value < least:
        yield _message(path, value, f"{least} or more")
    elif isinstance(most, int) and value > most:
        yield _message(path, value, f"{most} or less")


def _is_int_or_string(value: Json) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _message(path: str, value: Json, expected: str) -> str:
    shown = json.dumps(value) if isinstance(value, bool) else ascii(value)
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{shown[:_LONGEST_SHOWN]}..."
    return f"{path or 'the object'} is {shown}, expected {expected}"
