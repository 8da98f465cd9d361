"""Conditions of a status, in the form that `kubectl wait --for=condition=…` understands.

new = [condition("Ready", True, "PodsReady", "2 of 2 pods are ready", generation=3)]
status.conditions = merge_conditions(status.conditions, new)
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_MAX_MESSAGE = 32768


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A `meta/v1` Condition."""

    type: Annotated[str, Meta(max_length=316, description="Type of the condition, for example Available.")]
    status: Annotated[Literal["True", "False", "Unknown"], Meta(description="True, False or Unknown.")]
    reason: Annotated[str, Meta(max_length=1024, description="Reason for the status as one word, for programs.")]
    message: Annotated[str, Meta(max_length=_MAX_MESSAGE, description="Reason for the status as text, for people.")]
    last_transition_time: Annotated[
        str, Meta(description="Time of the last change of the status.", extra_json_schema={"format": "date-time"})
    ]
    observed_generation: Annotated[
        int,
        Meta(ge=0, description="Generation that was observed.", extra_json_schema={"format": "int64"}),
    ] = 0


def condition(
    type: str,  # noqa: A002 the field's name
    holds: bool | None,
    reason: str,
    message: str = "",
    *,
    generation: int | None = None,
    now: str = "",
) -> Condition:
    """A condition that changes now. `holds` is None if that is unknown; `now` is a time as the API writes it."""
    return Condition(
        type=type,
        status="Unknown" if holds is None else "True" if holds else "False",
        reason=reason,
        message=message[:_MAX_MESSAGE],
        observed_generation=generation or 0,
        last_transition_time=now or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def merge_conditions(known: Sequence[Condition] | None, new: Iterable[Condition]) -> tuple[Condition, ...]:
    """`new`, and those of `known` that have other types.

    A condition whose status does not change keeps its transition time. So if nothing changes, the conditions are equal.
    """
    merged = with_transition_times(known, new)
    types = {each.type for each in merged}
    return (*merged, *(each for each in known or () if each.type not in types))


def with_transition_times(known: Sequence[Condition] | None, new: Iterable[Condition]) -> tuple[Condition, ...]:
    """`new`, with the transition times of `known` where the status does not change: for a server-side apply."""
    before = {each.type: each for each in known or ()}
    return tuple(_continued(before.get(each.type), each) for each in new)


def find_condition(known: Sequence[Condition] | None, type: str) -> Condition | None:  # noqa: A002 the field's name
    """The condition of a type."""
    return next((each for each in known or () if each.type == type), None)


def _continued(before: Condition | None, new: Condition) -> Condition:
    if before is None or before.status != new.status:
        return new
    return msgspec.structs.replace(new, last_transition_time=before.last_transition_time)
