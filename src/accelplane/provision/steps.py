"""From what a device is to what it should be: look, write what differs, look again.

A family's planner is a plain function from the host to a `Plan`: what would have to be written now. It is asked
before anything is written, and again afterwards, since some steps become possible only when others have taken effect
(functions must exist before they can be bound); a device is done when its planner finds nothing left to write. So a
second run changes nothing, and an attribute that took a write without effect is found out. A device that cannot be
finished is put back to where it was.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from accelplane.host import Host, HostError

_ROUNDS = 10
_PATIENCE, _PAUSE = 2.0, 0.05

State = Literal["as wanted", "to do", "changed", "left alone", "failed", "put back"]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One write. `what` tells people ("services dc -> sym;asym"); `undo` is the path and text that take it back."""

    what: str
    path: str
    text: str
    undo: tuple[str, str] | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one device needs now.

    `later` tells of steps that cannot be planned yet; `refusal` says why the device must be left alone as it is, and
    then nothing is written; `failure` says what is wrong with it so that it can never be as wanted. `now` describes
    the device for people, by property.
    """

    device: str
    now: dict[str, str] = {}
    steps: Sequence[Step] = ()
    later: Sequence[str] = ()
    refusal: str = ""
    failure: str = ""


Planner: TypeAlias = Callable[[Host], Plan]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one device: its `state`, the steps that were taken (or, to do, would be), and why not the rest."""

    device: str
    state: State
    steps: Sequence[str] = ()
    reason: str = ""
    now: dict[str, str] = {}

    @property
    def failed(self) -> bool:
        return self.state in ("failed", "put back")


def planned(root: str, planners: Iterable[Planner]) -> Iterator[Outcome]:
    """What `apply` would do first, device by device; nothing is written."""
    for planner in planners:
        plan = planner(Host(root))
        yield _without_writing(plan) or Outcome(
            device=plan.device, state="to do", steps=[*(step.what for step in plan.steps), *plan.later], now=plan.now
        )


def apply(root: str, planners: Iterable[Planner]) -> Iterator[Outcome]:
    """Brings the devices into their states, one after the other; what fails with one does not keep the others."""
    for planner in planners:
        yield _apply_one(root, planner)


def _apply_one(root: str, planner: Planner) -> Outcome:
    taken: list[Step] = []
    plan = planner(Host(root))
    for _round in range(_ROUNDS):
        if (ended := _without_writing(plan)) is not None:
            if not taken:
                return ended
            if ended.state == "as wanted":
                return msgspec.structs.replace(ended, state="changed", steps=[step.what for step in taken])
            return _put_back(root, plan.device, taken, ended.reason)
        if stuck := [step for step in plan.steps if step in taken]:
            return _put_back(root, plan.device, taken, f"{stuck[0].path}: took {stuck[0].text!a}, to no effect")
        for step in plan.steps:
            try:
                Host(root).write(step.path, step.text)
            except HostError as error:
                return _put_back(root, plan.device, taken, f"{step.what}: {error}")
            taken.append(step)
        plan = _settled(root, planner, taken)
    return _put_back(root, plan.device, taken, f"not as wanted after {_ROUNDS} rounds of writing")


def _settled(root: str, planner: Planner, taken: Sequence[Step]) -> Plan:
    """The plan of now; of a device that was written to, once it no longer asks for what was written just now."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        plan = planner(Host(root))
        if not any(step in taken for step in plan.steps) or time.monotonic() > deadline:
            return plan
        time.sleep(_PAUSE)


def _without_writing(plan: Plan) -> Outcome | None:
    """The outcome where there is nothing to write."""
    if plan.failure:
        return Outcome(device=plan.device, state="failed", reason=plan.failure, now=plan.now)
    if plan.refusal:
        return Outcome(device=plan.device, state="left alone", reason=plan.refusal, now=plan.now)
    if not plan.steps:
        return Outcome(device=plan.device, state="as wanted", now=plan.now)
    return None


def _put_back(root: str, device: str, taken: Sequence[Step], reason: str) -> Outcome:
    """Undoes the steps that can be undone, the last one first; what cannot be undone is told."""
    problems: list[str] = []
    for step in reversed(taken):
        if step.undo is None:
            continue
        try:
            Host(root).write(*step.undo)
        except HostError as error:
            problems.append(str(error))
    if problems:
        reason = f"{reason}; and could not be put back: {'; '.join(problems)}"
    state: State = "put back" if taken and not problems else "failed"
    return Outcome(device=device, state=state, steps=[step.what for step in taken], reason=reason)
