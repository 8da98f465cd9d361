"""HTML as a tree of elements.

A tree is rendered to text, where every text and attribute is escaped, so values from a cluster cannot become markup.
"""

from collections.abc import Mapping

from msgspec import Struct

_VOID = frozenset(("br", "hr", "input", "link", "meta"))
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})
# Characters that change the direction of the text after them, so that it reads as something else.
_DIRECTIONS = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
# The children of an element with this attribute have a key each, and are updated while the page is open.
LIVE = "data-live"
KEY = "data-key"


class Element(Struct, frozen=True):
    """An element. An attribute without a value has an empty text."""

    tag: str
    attributes: Mapping[str, str]
    children: tuple["Element | str", ...] = ()


def element(tag: str, *children: "Element | str | None", **attributes: "str | int | bool | None") -> Element:
    """Makes an element. Children that are None are left out, as are attributes that are None or False.

    In names of attributes `_` stands for `-`, and a `_` at the end is removed.
    """
    attribute_texts = {
        name.rstrip("_").replace("_", "-"): "" if value is True else str(value)
        for name, value in attributes.items()
        if value is not None and value is not False
    }
    return Element(tag, attribute_texts, tuple(child for child in children if child is not None))


def live(container: Element, name: str) -> Element:
    """The container as a block of this name, whose children have keys."""
    return Element(container.tag, {**container.attributes, LIVE: name}, container.children)


def keyed(child: Element, key: str) -> Element:
    """An element of a block."""
    return Element(child.tag, {**child.attributes, KEY: key}, child.children)


def escape(text: str) -> str:
    """Text for an element or for an attribute in double quotes. Lone surrogates become `?`."""
    escaped = text.translate(_ESCAPES)
    return escaped if escaped.isascii() else escaped.encode("utf-8", "replace").decode()


def render(tree: "Element | str") -> str:
    """The text of a tree."""
    parts: list[str] = []
    _render(tree, parts)
    return "".join(parts)


def count(tree: "Element | str") -> int:
    """The number of elements."""
    return 0 if isinstance(tree, str) else 1 + sum(count(child) for child in tree.children)


def _render(tree: "Element | str", parts: list[str]) -> None:
    if isinstance(tree, str):
        parts.append(escape(tree if tree.isascii() else tree.translate(_DIRECTIONS)))
        return
    parts.append(f"<{tree.tag}")
    parts.extend(f' {name}="{escape(value)}"' if value else f" {name}" for name, value in tree.attributes.items())
    parts.append(">")
    if tree.tag in _VOID:
        return
    for child in tree.children:
        _render(child, parts)
    parts.append(f"</{tree.tag}>")
