"""Positions of values in YAML text, and replacements at these positions.

PyYAML reports the position of every node. A replacement keeps the quotes of the value that it replaces.
"""

from collections.abc import Iterable, Iterator

import msgspec
import yaml

MAX_TEXT = 8 * 1024 * 1024
MAX_DEPTH = 100
# Of YAML in literal blocks of YAML.
MAX_BLOCKS = 10

# libyaml is ten times faster. It is missing in some builds of PyYAML.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class EditError(ValueError):
    """A text that cannot be edited. The message has the found value and the remedy."""


class Replacement(msgspec.Struct, frozen=True, order=True):
    """The text between two positions, and the text that replaces it."""

    start: int
    end: int
    text: str


def documents(text: str) -> tuple[yaml.Node, ...]:
    """The root nodes of the documents of a YAML text. Raises `EditError` if it is not YAML."""
    if len(text) > MAX_TEXT:
        raise EditError(f"found {len(text)} characters, expected at most {MAX_TEXT}")
    if text.startswith("\ufeff"):
        raise EditError("found a byte order mark, expected UTF-8 without one; remove it")
    try:
        _check_depth(text)
        return tuple(yaml.compose_all(text, _LOADER))
    except EditError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise EditError(f"found invalid YAML: {' '.join(str(error).split())[:300]}") from error


def _check_depth(text: str) -> None:
    """Raises `EditError` for deeply nested values, for which libyaml's recursive composer exhausts the stack."""
    depth = 0
    for event in yaml.parse(text, _LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise EditError(f"found more than {MAX_DEPTH} nested values")


def nodes(root: yaml.Node) -> Iterator[tuple[str, yaml.Node, yaml.MappingNode | None]]:
    """All nodes below and including `root` once: the key of each, and the mapping that contains it."""
    seen: set[int] = set()
    pending: list[tuple[str, yaml.Node, yaml.MappingNode | None]] = [("", root, None)]
    while pending:
        key, node, parent = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield key, node, parent
        if isinstance(node, yaml.MappingNode):
            pending.extend((str(name.value), value, node) for name, value in reversed(pairs(node)))
        elif isinstance(node, yaml.SequenceNode):
            pending.extend((key, value, parent) for value in reversed(items(node)))


def pairs(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """The keys and values of a mapping."""
    return list(node.value)


def items(node: yaml.Node | None) -> list[yaml.Node]:
    """The items of a sequence; of other nodes none."""
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """The value of a key in a mapping; None if there is none."""
    if isinstance(node, yaml.MappingNode):
        return next((value for name, value in pairs(node) if name.value == key), None)
    return None


def string(node: yaml.Node | None) -> str:
    """The text of a scalar; of other nodes the empty string."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""


def replacement_of(node: yaml.ScalarNode, value: str) -> Replacement:
    """The replacement of a scalar on one line by a string, in the style of the scalar."""
    if node.style in {"|", ">"} or node.start_mark.line != node.end_mark.line:
        raise EditError(f"line {line_of(node)}: found {string(node)!a} in a block, expected a value on one line")
    return Replacement(node.start_mark.index, node.end_mark.index, _quoted(value, node.style))


def line_of(node: yaml.Node) -> int:
    """The number of the line where a node begins."""
    return int(node.start_mark.line) + 1


def inserted_line(text: str, after: yaml.Node, column: int, line: str) -> Replacement:
    """A new line below the one where `after` ends."""
    end = text.find("\n", after.end_mark.index)
    position = len(text) if end < 0 else end
    newline = "\r\n" if text[:position].endswith("\r") else "\n"
    position -= len(newline) - 1
    return Replacement(position, position, f"{newline}{' ' * column}{line}")


def removed_line(text: str, node: yaml.Node) -> Replacement:
    """The removal of all lines of a node, which must be alone on them."""
    start = text.rfind("\n", 0, node.start_mark.index) + 1
    end = text.find("\n", node.end_mark.index)
    return Replacement(start, len(text) if end < 0 else end + 1, "")


def apply(text: str, replacements: Iterable[Replacement]) -> str:
    """The text with all replacements. They must not overlap."""
    parts: list[str] = []
    position = 0
    for each in sorted(set(replacements)):
        if each.start < position:
            raise EditError("found two different values for the same place")
        parts += [text[position : each.start], each.text]
        position = each.end
    return "".join([*parts, text[position:]])


def _quoted(value: str, style: str | None) -> str:
    if style == "'":
        return f"'{value}'"
    if style == '"':
        return f'"{value}"'
    try:
        plain = yaml.safe_load(value) == value
    except yaml.YAMLError:
        plain = False
    return value if plain else f'"{value}"'
