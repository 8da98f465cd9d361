"""Conditions: what a controller says of an object, in the form that `kubectl wait --for=condition=…` understands."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from .models import Condition


def condition(
    kind: str, holds: bool | None, reason: str, message: str = "", *, generation: int | None = None
) -> Condition:
    """A condition as of now; `holds` is None when nobody knows."""
    status = "Unknown" if holds is None else str(holds)
    now = datetime.now(UTC).replace(microsecond=0)
    return Condition(
        type=kind, status=status, reason=reason, message=message, observedGeneration=generation, lastTransitionTime=now
    )


def with_conditions(known: Sequence[Condition] | None, new: Iterable[Condition]) -> list[Condition]:
    """`known` with each of `new` in the place of the one of its type.

    A condition whose status is what it was keeps the time of its last change. So, when nothing is new, the result
    equals `known`, and there is nothing to write.
    """
    result = {each.type: each for each in known or ()}
    for each in new:
        before = result.get(each.type)
        since = before.lastTransitionTime if before and before.status == each.status else each.lastTransitionTime
        result[each.type] = Condition(
            type=each.type,
            status=each.status,
            reason=each.reason,
            message=each.message,
            observedGeneration=each.observedGeneration,
            lastTransitionTime=since,
        )
    return list(result.values())


def find_condition(known: Sequence[Condition] | None, kind: str) -> Condition | None:
    return next((each for each in known or () if each.type == kind), None)
