"""Arrays of JSON objects, read element by element.

Decoding a hostile array of some megabytes at once would take a hundred times its size in memory.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Raw

_SMALL: Final = 32 * 1024
_BRACKETS_PER_STEP = 1024
_BRACKET = re.compile(rb'(?:[^\[\]{}"]++|"(?:[^"\\]++|\\.)*+")*+[\[\]{}]', re.DOTALL)
_OPENING = b"{["
_SEPARATORS = b" \t\r\n,"
# An object with a longer array is larger than what etcd stores by default (1.5 MiB).
_MAX_ELEMENTS = 50_000
_ELEMENTS = msgspec.json.Decoder(list[Raw] | None)

Element = Raw | memoryview


def elements(array: Raw) -> Iterator[Element | None]:
    """The elements of an array of objects. Raises `msgspec.DecodeError`.

    Yields None about every millisecond of work on a large array: an occasion to process something else. `array` must be
    valid JSON, as `msgspec.Raw` of a decoded document is. `null` has no elements.
    """
    if len(memoryview(array)) <= _SMALL:
        yield from _ELEMENTS.decode(array) or ()
    else:
        yield from _scan(memoryview(array))


def _scan(array: memoryview) -> Iterator[Element | None]:
    if array[0] != _OPENING[1]:
        raise msgspec.ValidationError("expected `array | null`")
    depth = start = count = 0
    end = 1
    for number, bracket in enumerate(_BRACKET.finditer(array), 1):
        at = bracket.end()
        if array[at - 1] in _OPENING:
            if depth == 1:
                start = at - 1
                _check_gap(array[end:start], is_object=array[start] == _OPENING[0])
            depth += 1
        else:
            depth -= 1
            if depth == 1:
                end = at
                count += 1
                if count > _MAX_ELEMENTS:
                    raise msgspec.ValidationError(f"expected `array` of at most {_MAX_ELEMENTS} elements")
                yield array[start:end]
        if number % _BRACKETS_PER_STEP == 0:
            yield None
    _check_gap(array[end:-1], is_object=True)


def _check_gap(gap: memoryview, *, is_object: bool) -> None:
    """Raises `msgspec.DecodeError` if there are numbers, booleans or nulls between objects, or if it is an array."""
    if not is_object or bytes(gap).strip(_SEPARATORS):
        raise msgspec.ValidationError("expected an array of objects")
