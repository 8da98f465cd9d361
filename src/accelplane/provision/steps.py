"""Reconciliation of one device: compare it with its desired state, write the difference, compare again.

A family's planner is a plain function from the host to a `Plan`: the writes that are needed now. It is called before
anything is written, and again afterwards, because some steps become possible only after others (functions must exist
before they can be bound). A device is finished when its planner returns no steps. So a second run writes nothing, and a
write without effect is found. A device that cannot be finished is rolled back.
"""

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from accelplane.host import Host, HostError

_ROUNDS = 10
_EFFECT_TIMEOUT, _POLL_INTERVAL = 2.0, 0.05

State = Literal["unchanged", "pending", "applied", "skipped", "failed", "rolled back"]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One write. `what` describes it ("services dc -> sym;asym"); steps in a row with the same text are shown once.

    `undo` is the path and text that revert it. Steps of one `part` of the device (one of its functions) are reverted
    alone if one of them fails, and the other parts continue. `explain` adds a cause to the kernel's error, and to a
    write without effect. A device is skipped if its first step fails with one of the errors in `skip_on`.
    """

    what: str
    path: str
    text: str
    undo: tuple[str, str] | None = None
    part: str = ""
    explain: Callable[[Host, HostError], str] | None = None
    skip_on: Sequence[int] = (errno.EBUSY,)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that one device needs.

    `later` describes steps that cannot be planned yet. With a `skip_reason` nothing is written, and with a `failure`
    the device can never reach its desired state. `notes` are differences that remain, and why, and keep no step from
    being written. `now` describes the device, by property.

    `rollback` plans the way back to what this plan found. It replaces the steps' `undo` where the old texts in reverse
    order are not enough: the kernel forgets the configuration of a queue that is disabled.
    """

    device: str
    now: dict[str, str] = {}
    steps: Sequence[Step] = ()
    later: Sequence[str] = ()
    notes: Sequence[str] = ()
    skip_reason: str = ""
    failure: str = ""
    rollback: "Planner | None" = None


Planner: TypeAlias = Callable[[Host], Plan]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one device: its `state`, the steps that were (or, pending, would be) written, and the reason."""

    device: str
    state: State
    steps: Sequence[str] = ()
    reason: str = ""
    notes: Sequence[str] = ()
    now: dict[str, str] = {}

    @property
    def failed(self) -> bool:
        return self.state in ("failed", "rolled back")


def preview(root: str, planners: Iterable[Planner], *, host: Callable[[str], Host] = Host) -> Iterator[Outcome]:
    """The steps of `apply` for each device. Writes nothing."""
    for planner in planners:
        plan = planner(host(root))
        steps = [*_descriptions(plan.steps), *plan.later]
        yield _outcome_without_steps(plan) or _outcome(plan, "pending", steps=steps)


def apply(
    root: str, planners: Iterable[Planner], *, timeout: float = _EFFECT_TIMEOUT, host: Callable[[str], Host] = Host
) -> Iterator[Outcome]:
    """Reconciles the devices one after the other; an error of one does not affect the others.

    `timeout` is how long an attribute may take to show what was written to it, in seconds.
    """
    for planner in planners:
        yield _Application(partial(host, root), planner, timeout).run()


class _Application:
    """The reconciliation of one device."""

    def __init__(self, new_host: Callable[[], Host], planner: Planner, timeout: float) -> None:
        self._new_host = new_host
        self._planner = planner
        self._timeout = timeout
        self._rollback_planner: Planner | None = None
        self._written: list[Step] = []
        self._failed_parts: dict[str, tuple[str, str]] = {}  # by part: the step and the problem

    def run(self) -> Outcome:
        plan = self._planner(self._new_host())
        self._rollback_planner = plan.rollback
        for _round in range(_ROUNDS):
            steps = [step for step in plan.steps if step.part not in self._failed_parts]
            plan = msgspec.structs.replace(plan, steps=steps)
            if (ended := _outcome_without_steps(plan)) is not None:
                return self._finish(ended)
            finished_elsewhere: set[str] = set()  # parts that another process, such as the plugin, sets up as well
            for step in plan.steps:
                if step.part in self._failed_parts or step.part in finished_elsewhere:
                    continue
                if _contains(self._written, step):
                    problem = self._explain(step, HostError(step.path, f"writing {step.text!a} had no effect"))
                else:
                    try:
                        self._new_host().write(step.path, step.text)
                    except HostError as error:
                        if error.errno in step.skip_on and not self._written and not step.part:
                            use = "in use: " if error.errno == errno.EBUSY else ""
                            reason = f"{use}{step.what}: {self._explain(step, error)}"
                            return _outcome(plan, "skipped", reason=reason)
                        problem = f"{step.what}: {self._explain(step, error)}"
                        if step.part and not _contains(self._planner(self._new_host()).steps, step):
                            finished_elsewhere.add(step.part)
                            continue
                    else:
                        self._written.append(step)
                        continue
                if not step.part:
                    return self._abort(problem)
                self._failed_parts[step.part] = step.what, "; ".join((problem, *self._undo(step.part)))
            plan = self._wait_for_effect(self._planner, self._written)
        return self._abort(f"desired state not reached after {_ROUNDS} rounds of writes")

    def _wait_for_effect(self, planner: Planner, written: Sequence[Step]) -> Plan:
        """The next plan, once it no longer contains steps that are written, or after the timeout."""
        deadline = time.monotonic() + self._timeout
        while True:
            plan = planner(self._new_host())
            if not any(_contains(written, step) for step in plan.steps) or time.monotonic() > deadline:
                return plan
            time.sleep(_POLL_INTERVAL)

    def _finish(self, ended: Outcome) -> Outcome:
        """The outcome if no steps are left, given those that were written."""
        steps = _descriptions(self._written)
        if self._failed_parts:
            by_step: dict[str, list[str]] = {}
            for what, why in self._failed_parts.values():
                by_step.setdefault(what, []).append(why)
            reasons = [f"{first}; and {len(more)} more like it" if more else first for first, *more in by_step.values()]
            return msgspec.structs.replace(ended, state="failed", steps=steps, reason="; ".join(reasons))
        if not steps:
            return ended
        if ended.reason:
            return self._abort(ended.reason)
        return msgspec.structs.replace(ended, state="applied", steps=steps)

    def _abort(self, reason: str) -> Outcome:
        """Rolls back, by the plan's `rollback` or in reverse order; the reason includes errors of the rollback."""
        steps = _descriptions(self._written)
        problems = (
            self._undo() if self._rollback_planner is None or not steps else self._rollback(self._rollback_planner)
        )
        state: State = "rolled back" if steps and not problems else "failed"
        return _outcome(self._planner(self._new_host()), state, steps=steps, reason="; ".join((reason, *problems)))

    def _undo(self, part: str = "") -> list[str]:
        """Reverts the steps of a part, or all, which are then no longer written; returns the problems."""
        problems: list[str] = []
        for step in reversed(self._written.copy()):
            if part in ("", step.part):
                self._written.remove(step)
                if step.undo is None:
                    problems.append(f"not rolled back: {step.what}")
                    continue
                try:
                    self._new_host().write(*step.undo)
                except HostError as error:
                    problems.append(f"rollback failed: {error}")
        return problems

    def _rollback(self, planner: Planner) -> list[str]:
        """Writes the steps of `planner` until it returns none; returns the problems. Failed writes are retried."""
        written: list[Step] = []
        problems: dict[str, str] = {}
        for _round in range(_ROUNDS):
            plan = self._wait_for_effect(planner, written)
            steps = [step for step in plan.steps if not _contains(written, step)]
            if not steps:
                problems = {step.path: f"{step.path}: writing {step.text!a} had no effect" for step in plan.steps}
                if reason := plan.failure or plan.skip_reason:
                    problems[plan.device] = reason
                break
            problems = {}
            for step in steps:
                try:
                    self._new_host().write(step.path, step.text)
                except HostError as error:
                    problems[step.path] = self._explain(step, error)
                else:
                    written.append(step)
        return [f"rollback failed: {problem}" for problem in problems.values()]

    def _explain(self, step: Step, error: HostError) -> str:
        explanation = step.explain(self._new_host(), error) if step.explain else ""
        return f"{error}; {explanation}" if explanation else str(error)


def _contains(steps: Sequence[Step], step: Step) -> bool:
    """Whether one of the steps writes the same."""
    return any((step.path, step.text) == (one.path, one.text) for one in steps)


def _outcome_without_steps(plan: Plan) -> Outcome | None:
    """The outcome of a plan that writes nothing, else None."""
    if plan.failure:
        return _outcome(plan, "failed", reason=plan.failure)
    if plan.skip_reason:
        return _outcome(plan, "skipped", reason=plan.skip_reason)
    if not plan.steps:
        return _outcome(plan, "skipped" if plan.notes else "unchanged")
    return None


def _descriptions(steps: Iterable[Step]) -> list[str]:
    return list(dict.fromkeys(step.what for step in steps))


def _outcome(plan: Plan, state: State, *, steps: Sequence[str] = (), reason: str = "") -> Outcome:
    return Outcome(device=plan.device, state=state, steps=steps, reason=reason, notes=plan.notes, now=plan.now)
