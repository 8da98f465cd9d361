"""Damaged documents of FPGA tests."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def places(found: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values in a document."""
    if path:
        yield path
    steps = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for step, inner in steps:
        yield from places(inner, (*path, step))


@st.composite
def damaged_documents(draw: st.DrawFn, good: st.SearchStrategy[Json], most: int = 2) -> Json:
    """A mostly valid document: some values are replaced or removed."""
    document = json.loads(json.dumps(draw(good)))
    for _ in range(draw(st.integers(0, most))):
        ways = list(places(document))
        if not ways:
            break
        *proxy, last = draw(st.sampled_from(ways))
        parent = document
        for step in proxy:
            parent = parent[step]
        if draw(st.booleans()):
            del parent[last]
        else:
            parent[last] = draw(JUNK)
    return document
