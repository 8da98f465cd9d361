"""Health as a small state machine. Sources give verdicts, the machine turns them into what the kubelet is told.

    healthy --bad--> suspect --bad, often enough--> unhealthy --good--> recovering --good, often enough--> healthy
                        `--good--> healthy             ^------bad----------'

A suspect device is still advertised as healthy and a recovering one still as unhealthy, so that one odd reading
neither takes a device away nor gives a broken one back. An unknown verdict (the source did not answer) moves nothing,
unless the policy is to fail closed; then it counts as a bad one.
"""

from enum import StrEnum
from typing import Literal

from msgspec import Struct


class Phase(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    RECOVERING = "recovering"


class Verdict(Struct, frozen=True):
    """One reading: `good`, `bad`, or `unknown` when the source could not say, with the reason in words."""

    answer: Literal["good", "bad", "unknown"]
    reason: str = ""


class HealthPolicy(Struct, frozen=True, kw_only=True):
    """How many equal verdicts in a row decide, and what no answer means."""

    bad_verdicts: int = 2
    good_verdicts: int = 2
    fail_closed: bool = False
    interval: float = 30.0


class HealthState(Struct, frozen=True):
    """Where a device stands, why, and how many verdicts in a row have pointed the way it is going."""

    phase: Phase = Phase.HEALTHY
    reason: str = ""
    streak: int = 0

    @property
    def usable(self) -> bool:
        """Whether the kubelet may hand the device out."""
        return self.phase in (Phase.HEALTHY, Phase.SUSPECT)

    @property
    def settled(self) -> bool:
        """Whether no verdict is awaited to confirm or refute the last one."""
        return self.phase in (Phase.HEALTHY, Phase.UNHEALTHY)

    @classmethod
    def first(cls, verdict: Verdict, policy: HealthPolicy) -> "HealthState":
        """The state of a device that was never judged before: it has no good name that one reading could not undo."""
        return cls().after(verdict, HealthPolicy(bad_verdicts=1, fail_closed=policy.fail_closed))

    def after(self, verdict: Verdict, policy: HealthPolicy) -> "HealthState":
        """The state that follows from one more verdict."""
        answer = verdict.answer
        if answer == "unknown":
            if not policy.fail_closed:
                return self
            answer = "bad"
        if answer == "bad":
            if self.phase is Phase.UNHEALTHY:
                return self  # with the reason why it fell: later readings differ each time and would be news each time
            if self.phase is Phase.RECOVERING:
                return HealthState(Phase.UNHEALTHY, verdict.reason)
            streak = self.streak + 1
            if streak >= policy.bad_verdicts:
                return HealthState(Phase.UNHEALTHY, verdict.reason)
            return HealthState(Phase.SUSPECT, verdict.reason, streak)
        if self.usable:
            return HealthState()
        streak = self.streak + 1
        if streak >= policy.good_verdicts:
            return HealthState()
        return HealthState(Phase.RECOVERING, self.reason, streak)
