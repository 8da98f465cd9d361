"""Predicates: which changes of an object cause a reconciliation.

A predicate is a function `(old, new) -> bool`, as the subscribers of a cache: `old` is None for an object that was
created, `new` is None for one that was deleted. The predicates of this module accept all creations and deletions and
decide about updates.

    ready = field_changed(lambda node: node.spec.unschedulable)
    controller.watches(nodes, owners, predicate=any_of(labels_changed, ready), debounce=1)
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from .objects import HasIdentity, Object

T = TypeVar("T")

Predicate = Callable[[T | None, T | None], bool]


class LabelledMetadata(HasIdentity, Protocol):
    """Metadata with labels."""

    @property
    def labels(self) -> Mapping[str, str] | None: ...


class HasLabels(Protocol):
    """An object with labels."""

    @property
    def metadata(self) -> LabelledMetadata | None: ...


def on_update(changed: Callable[[T, T], bool]) -> Predicate[T]:
    """Accepts updates for which `changed(old, new)` is true."""

    def predicate(old: T | None, new: T | None) -> bool:
        return old is None or new is None or changed(old, new)

    return predicate


def field_changed(select: Callable[[T], object]) -> Predicate[T]:
    """Accepts updates that change the value of `select(object)`."""
    return on_update(lambda old, new: select(old) != select(new))


def generation_changed(old: Object | None, new: Object | None) -> bool:
    """Accepts updates of the spec, which the API server counts in `metadata.generation`.

    All updates of a kind without generation (Node, Pod, ConfigMap) are accepted.
    """
    before, after = (each.metadata.generation if each and each.metadata else None for each in (old, new))
    return old is None or new is None or before is None or before != after


def labels_changed(old: HasLabels | None, new: HasLabels | None) -> bool:
    """Accepts updates of the labels."""
    return old is None or new is None or _labels(old) != _labels(new)


def any_of(*predicates: Predicate[T]) -> Predicate[T]:
    """Accepts events that at least one predicate accepts."""
    return lambda old, new: any(predicate(old, new) for predicate in predicates)


def not_(predicate: Predicate[T]) -> Predicate[T]:
    """Accepts the updates that `predicate` does not accept, and all creations and deletions."""
    return on_update(lambda old, new: not predicate(old, new))


def _labels(thing: HasLabels) -> Mapping[str, str]:
    return (thing.metadata.labels if thing.metadata else None) or {}
