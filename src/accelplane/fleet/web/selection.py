"""Which devices of which nodes a query selects: the one filter of lists, downloads and groups."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from accelplane.report.inventory import Holder, ReportedUnit

from ..families import family_of
from .query import Query
from .summaries import Summary, states_of

_MAX_TERMS = 16


class SelectorError(ValueError):
    """A label selector that cannot be read."""


class Term(Struct, frozen=True):
    """A requirement of a label selector: `value` is required, or not allowed if `negated`; without one any is."""

    key: str
    value: str | None
    negated: bool

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels of a node fulfil the requirement; as kubectl, `!=` accepts nodes without the label."""
        found = self.key in labels if self.value is None else labels.get(self.key) == self.value
        return found is not self.negated


class Selection:
    """The filters of a query. `visible` returns whether names in a namespace may be seen. Raises `SelectorError`."""

    def __init__(self, query: Query, visible: Callable[[str], bool]) -> None:
        self._query = query
        self._visible = visible
        self._terms = selector_terms(query.labels)
        self._states = frozenset(query.state.split(",")) - {""}
        self._text = query.text.casefold()
        self._is_holder = _holder_filter(query.holder.casefold())

    def units(self, each: Summary) -> Sequence[ReportedUnit]:
        """The selected devices of a node."""
        query, node = self._query, each.node
        if not self._has_node(each):
            return ()
        text = "" if self._text in node.name.casefold() else self._text
        states = self._states if self._states.isdisjoint(each.node_states) else frozenset[str]()
        if states and states.isdisjoint(each.states):
            return ()
        if not (text or states or query.family or query.plugin or query.model or query.holder):
            return node.units
        return [unit for unit in node.units if self._has(unit, text, states)]

    def selects(self, each: Summary) -> bool:
        """Whether a node is selected of which no device is: its own facts match, and it has no such devices."""
        query, node = self._query, each.node
        if not self._has_node(each) or query.model or query.plugin:
            return False
        family = query.family
        if any(not family or family in families_of(unit) for unit in node.units):
            return False
        return (
            (not family or any(family in (each.name, family_of(each.name)) for each in node.resources))
            and (not self._states or not self._states.isdisjoint(each.node_states))
            and self._text in node.name.casefold()
            and (not query.holder or self._held(node.holders))
        )

    def _has_node(self, each: Summary) -> bool:
        return self._query.node in ("", each.node.name) and all(term.matches(each.node.labels) for term in self._terms)

    def _has(self, unit: ReportedUnit, text: str, states: frozenset[str]) -> bool:
        query = self._query
        return (
            (not states or not states.isdisjoint(states_of(unit)))
            and (not query.plugin or query.plugin == unit.plugin)
            and (not query.model or query.model == unit.model)
            and (not query.family or query.family in families_of(unit))
            and (not text or has_text(unit, text))
            and (not query.holder or self._held(unit.holders))
        )

    def _held(self, holders: Sequence[Holder]) -> bool:
        return any(self._is_holder(holder) and self._visible(holder.namespace) for holder in holders)


def has_text(unit: ReportedUnit, text: str) -> bool:
    """Whether a text of the device has this part, which is in lower case."""
    parts = (unit.unit, unit.device, unit.bdf, unit.model, unit.reason, unit.text)
    return any(text in part.casefold() for part in parts)


def families_of(unit: ReportedUnit) -> Iterator[str]:
    """The values of the family filter that select a device: families and resources."""
    yield unit.plugin
    yield from unit.ids
    yield from (family_of(name) for name in unit.ids)


def selector_terms(text: str) -> tuple[Term, ...]:
    """The requirements `key=value`, `key!=value`, `key` and `!key`, separated by commas. Raises `SelectorError`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(words) > _MAX_TERMS:
        raise SelectorError(f"labels: found {len(words)} requirements, expected at most {_MAX_TERMS}")
    return tuple(_term(word) for word in words)


def _holder_filter(text: str) -> Callable[[Holder], bool]:
    """A name before a `/` is complete: `a/` is the namespace a, `a/b/` its pod b, and `a/b` its pods that begin with b.

    Any other text is a part of the names.
    """
    namespace, separator, rest = text.partition("/")
    pod, end, _ = rest.partition("/")

    def matches(holder: Holder) -> bool:
        if not separator:
            return text in f"{holder.namespace}/{holder.pod}".casefold()
        name = holder.pod.casefold()
        return holder.namespace.casefold() == namespace and (name == pod if end else name.startswith(pod))

    return matches


def _term(word: str) -> Term:
    """Raises `SelectorError`."""
    key, operator, value = word.partition("=")
    negated = key.endswith("!") or (not operator and key.startswith("!"))
    key = key.strip("!").strip()
    value = value.removeprefix("=").strip()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", key) or not re.fullmatch(r"[A-Za-z0-9._-]*", value):
        raise SelectorError(f"labels: found {word!a}, expected key=value, key!=value, key or !key")
    return Term(key, value if operator else None, negated)
