"""JSON of values that may have names of files that are no UTF-8 text."""

import msgspec

from accelplane.controls import escape_json


def encode(value: object) -> bytes:
    """The JSON of what msgspec can encode, with `?` for lone surrogates: names that are no UTF-8 text have them."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        import json  # noqa: PLC0415 - memory of agents without such names

        return json.dumps(msgspec.to_builtins(value), ensure_ascii=False).encode(errors="replace")


def indented(value: object) -> str:
    """As `encode`, in lines for readers, with escape sequences for characters that control a terminal."""
    return escape_json(msgspec.json.format(encode(value), indent=2).decode())
