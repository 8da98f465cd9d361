"""Predicates: which changes pass."""

from collections.abc import Callable

import pytest
from kubekinds import Widget, WidgetSpec

from accelplane.kube.objects import Metadata
from accelplane.kube.predicates import (
    any_of,
    field_changed,
    generation_changed,
    labels_changed,
    not_,
    on_update,
)

Check = Callable[[Widget | None, Widget | None], bool]


def widget(*, size: int = 0, generation: int | None = 1, **metadata: dict[str, str]) -> Widget:
    return Widget(metadata=Metadata(name="w", generation=generation, **metadata), spec=WidgetSpec(size=size))  # pyright: ignore[reportArgumentType]


size_changed: Check = field_changed(lambda thing: thing.spec.size)
never: Check = on_update(lambda _old, _new: False)
always: Check = on_update(lambda _old, _new: True)
BUILT_IN = [
    generation_changed,
    labels_changed,
    size_changed,
    never,
    any_of(never),
    not_(labels_changed),
    not_(always),
]


@pytest.mark.parametrize("predicate", BUILT_IN)
def test_creations_and_deletions_pass_every_predicate(predicate: Check) -> None:
    assert predicate(None, widget())
    assert predicate(widget(), None)


@pytest.mark.parametrize(
    ("predicate", "new", "expected"),
    [
        (generation_changed, widget(generation=1, labels={"a": "b"}), False),
        (generation_changed, widget(generation=2), True),
        (labels_changed, widget(size=1), False),
        (labels_changed, widget(labels={"a": "b"}), True),
        (labels_changed, widget(labels={}), False),
        (size_changed, widget(generation=2), False),
        (size_changed, widget(size=1), True),
        (any_of(labels_changed, size_changed), widget(size=1), True),
        (any_of(labels_changed, size_changed), widget(generation=2), False),
        (not_(labels_changed), widget(size=1), True),
        (not_(labels_changed), widget(labels={"a": "b"}), False),
    ],
)
def test_updates_of_a_resource_are_validated(predicate: Check, new: Widget, expected: bool) -> None:
    assert predicate(widget(), new) is expected


def test_updates_of_kinds_without_generation_pass_generation_changed() -> None:
    assert generation_changed(widget(generation=None), widget(generation=None))
