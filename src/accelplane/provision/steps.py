"""From what a device is to what it should be: look, write what differs, look again.

A family's planner is a plain function from the host to a `Plan`: what would have to be written now. It is asked
before anything is written, and again afterwards, since some steps become possible only when others have taken effect
(functions must exist before they can be bound); a device is done when its planner finds nothing left to write. So a
second run changes nothing, and an attribute that took a write without effect is found out. A device that cannot be
finished is put back to where it was.
"""

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from accelplane.host import Host, HostError

_ROUNDS = 10
_PATIENCE, _PAUSE = 2.0, 0.05

State = Literal["as wanted", "to do", "changed", "left alone", "failed", "put back"]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One write. `what` tells people ("services dc -> sym;asym"), once where several steps in a row say the same.

    `undo` is the path and text that take it back. Steps that name a `part` of the device (one of its functions) are
    taken back without the rest when one of them fails, and the rest goes on. `explain` knows more than the kernel's
    error says: it is asked when the write was refused, or had no effect. A device is skipped if its first step fails
    with one of the errors in `skip_on`.
    """

    what: str
    path: str
    text: str
    undo: tuple[str, str] | None = None
    part: str = ""
    explain: Callable[[Host, HostError], str] | None = None
    skip_on: Sequence[int] = (errno.EBUSY,)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one device needs now.

    `later` tells of steps that cannot be planned yet; `refusal` says why the device must be left alone as it is, and
    then nothing is written; `failure` says what is wrong with it so that it can never be as wanted. `notes` say what
    is not as wanted and stays so, and why, without keeping the rest. `now` describes the device for people, by
    property.

    `back` plans the way back to what this plan found, instead of the steps' `undo`, where it takes more than to write
    the old texts in the opposite order: the kernel forgets what a queue was told when the queue is disabled.
    """

    device: str
    now: dict[str, str] = {}
    steps: Sequence[Step] = ()
    later: Sequence[str] = ()
    notes: Sequence[str] = ()
    refusal: str = ""
    failure: str = ""
    back: "Planner | None" = None


Planner: TypeAlias = Callable[[Host], Plan]
_Look: TypeAlias = Callable[[], Host]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one device: its `state`, the steps that were taken (or, to do, would be), and why not the rest."""

    device: str
    state: State
    steps: Sequence[str] = ()
    reason: str = ""
    notes: Sequence[str] = ()
    now: dict[str, str] = {}

    @property
    def failed(self) -> bool:
        return self.state in ("failed", "put back")


def planned(root: str, planners: Iterable[Planner], *, host: Callable[[str], Host] = Host) -> Iterator[Outcome]:
    """What `apply` would do first, device by device; nothing is written."""
    for planner in planners:
        plan = planner(host(root))
        yield _without_writing(plan) or Outcome(
            device=plan.device, state="to do", steps=[*_told(plan.steps), *plan.later], notes=plan.notes, now=plan.now
        )


def apply(
    root: str, planners: Iterable[Planner], *, patience: float = _PATIENCE, host: Callable[[str], Host] = Host
) -> Iterator[Outcome]:
    """Brings the devices into their states, one after the other; what fails with one does not keep the others.

    An attribute has `patience` seconds to show what was written to it.
    """
    for planner in planners:
        yield _apply_one(partial(host, root), planner, patience)


def _apply_one(look: _Look, planner: Planner, patience: float) -> Outcome:
    taken: list[Step] = []
    given_up: dict[str, tuple[str, str]] = {}  # parts: in which step, and why
    plan = planner(look())
    back = plan.back
    for _round in range(_ROUNDS):
        plan = msgspec.structs.replace(plan, steps=[step for step in plan.steps if step.part not in given_up])
        if (ended := _without_writing(plan)) is not None:
            return _ended(look, planner, ended, taken, given_up, back=back)
        overtaken: set[str] = set()  # parts that somebody else, such as the plugin, is bringing along
        for step in plan.steps:
            if step.part in given_up or step.part in overtaken:
                continue
            if _is_among(step, taken):
                problem = _explained(look, step, HostError(step.path, f"took {step.text!a}, to no effect"))
            else:
                try:
                    look().write(step.path, step.text)
                except HostError as error:
                    if error.errno in step.skip_on and not taken and not step.part:
                        use = "in use: " if error.errno == errno.EBUSY else ""
                        reason = f"{use}{step.what}: {_explained(look, step, error)}"
                        return _outcome(plan, "left alone", reason=reason)
                    problem = f"{step.what}: {_explained(look, step, error)}"
                    if step.part and not _is_among(step, planner(look()).steps):
                        overtaken.add(step.part)
                        continue
                else:
                    taken.append(step)
                    continue
            if not step.part:
                return _put_back(look, planner, taken, problem, back=back)
            given_up[step.part] = step.what, "; ".join((problem, *_undone(look, taken, step.part)))
        plan = _settled(look, planner, taken, patience)
    return _put_back(look, planner, taken, f"not as wanted after {_ROUNDS} rounds of writing", back=back)


def _settled(look: _Look, planner: Planner, taken: Sequence[Step], patience: float) -> Plan:
    """The plan of now; of a device that was written to, once it no longer asks for what was written just now."""
    deadline = time.monotonic() + patience
    while True:
        plan = planner(look())
        if not any(_is_among(step, taken) for step in plan.steps) or time.monotonic() > deadline:
            return plan
        time.sleep(_PAUSE)


def _is_among(step: Step, steps: Sequence[Step]) -> bool:
    """Whether the same is written in one of the steps."""
    return any((step.path, step.text) == (one.path, one.text) for one in steps)


def _without_writing(plan: Plan) -> Outcome | None:
    """The outcome where there is nothing to write."""
    if plan.failure:
        return _outcome(plan, "failed", reason=plan.failure)
    if plan.refusal:
        return _outcome(plan, "left alone", reason=plan.refusal)
    if not plan.steps:
        return _outcome(plan, "left alone" if plan.notes else "as wanted")
    return None


def _ended(
    look: _Look,
    planner: Planner,
    ended: Outcome,
    taken: list[Step],
    given_up: Mapping[str, tuple[str, str]],
    *,
    back: Planner | None,
) -> Outcome:
    """The outcome where nothing is left to write, in view of what was written before."""
    if given_up:
        by_step: dict[str, list[str]] = {}
        for what, why in given_up.values():
            by_step.setdefault(what, []).append(why)
        reasons = [f"{first}; likewise {len(more)} more" if more else first for first, *more in by_step.values()]
        return msgspec.structs.replace(ended, state="failed", steps=_told(taken), reason="; ".join(reasons))
    if not taken:
        return ended
    if ended.reason:
        return _put_back(look, planner, taken, ended.reason, back=back)
    return msgspec.structs.replace(ended, state="changed", steps=_told(taken))


def _put_back(look: _Look, planner: Planner, taken: list[Step], reason: str, *, back: Planner | None) -> Outcome:
    """Takes the way back, else undoes the steps, the last one first; tells what could not be put back."""
    told = _told(taken)
    problems = _undone(look, taken) if back is None or not taken else _led_back(look, back)
    state: State = "put back" if told and not problems else "failed"
    return _outcome(planner(look()), state, steps=told, reason="; ".join((reason, *problems)))


def _undone(look: _Look, taken: list[Step], part: str = "") -> list[str]:
    """Takes back, and out of `taken`, the steps of a part, or all; returns what could not be taken back."""
    problems: list[str] = []
    for step in reversed(taken.copy()):
        if part in ("", step.part):
            taken.remove(step)
            if step.undo is None:
                problems.append(f"and stays: {step.what}")
                continue
            try:
                look().write(*step.undo)
            except HostError as error:
                problems.append(f"and could not be put back: {error}")
    return problems


def _led_back(look: _Look, back: Planner) -> list[str]:
    """Writes what `back` plans until it plans no more; returns what is still not as it was.

    What is refused is tried again: there is nothing to lose.
    """
    taken: list[Step] = []
    problems: dict[str, str] = {}
    for _round in range(_ROUNDS):
        plan = _settled(look, back, taken, _PATIENCE)
        steps = [step for step in plan.steps if not _is_among(step, taken)]
        if not steps:
            problems = {step.path: f"{step.path}: took {step.text!a}, to no effect" for step in plan.steps}
            if reason := plan.failure or plan.refusal:
                problems[plan.device] = reason
            break
        problems = {}
        for step in steps:
            try:
                look().write(step.path, step.text)
            except HostError as error:
                problems[step.path] = _explained(look, step, error)
            else:
                taken.append(step)
    return [f"and could not be put back: {problem}" for problem in problems.values()]


def _explained(look: _Look, step: Step, error: HostError) -> str:
    explanation = step.explain(look(), error) if step.explain else ""
    return f"{error}; {explanation}" if explanation else str(error)


def _told(steps: Iterable[Step]) -> list[str]:
    return list(dict.fromkeys(step.what for step in steps))


def _outcome(plan: Plan, state: State, *, steps: Sequence[str] = (), reason: str = "") -> Outcome:
    return Outcome(device=plan.device, state=state, steps=steps, reason=reason, notes=plan.notes, now=plan.now)
