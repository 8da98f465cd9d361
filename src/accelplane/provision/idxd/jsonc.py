"""JSON with comments (`#`, `//`, `/* */`) and trailing commas.

Everything else is strict (RFC 8259). Every value has its line, for error messages.
"""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from accelplane.provision.config import ConfigError, quote

_MAX_DEPTH = 16
_MAX_DIGITS = 20

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\n]+ | (?://|\#)[^\n]* | /\*.*?\*/)
    | (?P<string>"(?:[^"\\\x00-\x1f] | \\(?:["\\/bfnrt] | u[0-9a-fA-F]{4}))*")
    | (?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)
    | (?P<word>true|false|null)
    | (?P<mark>[\[\]{}:,])
    """,
    re.VERBOSE | re.DOTALL,
)

Plain: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"


class Value(NamedTuple):
    """A value and the line on which it begins."""

    plain: Plain
    line: int

    def __str__(self) -> str:
        """For messages."""
        if isinstance(self.plain, list):
            return "a list"
        if isinstance(self.plain, dict):
            return "an object"
        return quote(self.plain) if isinstance(self.plain, str) else json.dumps(self.plain)


class _Token(NamedTuple):
    kind: str
    text: str
    line: int

    def __str__(self) -> str:
        return quote(self.text) if self.text else "the end of the file"


def parse(text: str, file: str) -> Value:
    """Parses the text. Raises `ConfigError` with the line and the name `file`."""
    reader = _Reader(text, file)
    value = reader.value(0)
    if (after := reader.take()).text:
        raise ConfigError(file, after.line, str(after), "the end of the file")
    return value


class _Reader:
    """A recursive-descent parser with one token of lookahead."""

    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._tokens = _tokens(text, file)
        self._next = next(self._tokens)

    def take(self) -> _Token:
        token = self._next
        if token.text:
            self._next = next(self._tokens)
        return token

    def value(self, depth: int) -> Value:
        token = self.take()
        if token.text in ("[", "{") and depth == _MAX_DEPTH:
            raise ConfigError(self._file, token.line, f"more than {_MAX_DEPTH} nested brackets", "fewer")
        if token.text == "[":
            return Value(self._list(depth), token.line)
        if token.text == "{":
            return Value(self._object(depth), token.line)
        if token.kind == "number" and len(token.text) > _MAX_DIGITS:
            raise ConfigError(self._file, token.line, str(token), f"a number of at most {_MAX_DIGITS} characters")
        if token.kind in ("string", "number", "word"):
            return Value(json.loads(token.text), token.line)
        raise ConfigError(self._file, token.line, str(token), "a value")

    def _list(self, depth: int) -> list[Value]:
        values: list[Value] = []
        while not self._closes("]"):
            values.append(self.value(depth + 1))
            self._comma_or("]")
        return values

    def _object(self, depth: int) -> dict[str, Value]:
        """Of members with the same name the last one is used, as by most JSON parsers."""
        members: dict[str, Value] = {}
        while not self._closes("}"):
            name = self.take()
            if name.kind != "string":
                raise ConfigError(self._file, name.line, str(name), "the name of a member, in quotes, or }")
            colon = self.take()
            if colon.text != ":":
                raise ConfigError(self._file, colon.line, str(colon), f"a colon after {name}")
            members[json.loads(name.text)] = self.value(depth + 1)
            self._comma_or("}")
        return members

    def _closes(self, bracket: str) -> bool:
        if self._next.text != bracket:
            return False
        self.take()
        return True

    def _comma_or(self, bracket: str) -> None:
        if self._next.text == ",":
            self.take()
        elif self._next.text != bracket:
            raise ConfigError(self._file, self._next.line, str(self._next), f"a comma or {bracket}")


def _tokens(text: str, file: str) -> Iterator[_Token]:
    """The tokens, and a last one without text."""
    place, line = 0, 1
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise ConfigError(file, line, quote(text[place : place + 20]), "JSON")
        if found.lastgroup != "space":
            yield _Token(found.lastgroup or "", found[0], line)
        line += found[0].count("\n")
        place = found.end()
    yield _Token("end", "", line)
