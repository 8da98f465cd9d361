"""The health of a device as a state machine: verdicts of a health source in, the health for the kubelet out.

    healthy --bad--> suspect --bad, `bad_verdicts` in a row--> unhealthy --good--> recovering --good--> healthy
                        `--good--> healthy                         ^------bad----------'

A suspect device is advertised as Healthy, a recovering one as Unhealthy. Detection is not delayed: by default one bad
verdict makes a device unhealthy. Recovery is: a recovering device is healthy after `good_verdicts` in a row and not
before `recovery_delay`, so that a device that alternates stays Unhealthy. An unknown verdict (the source did not
respond) changes nothing, unless the policy is to fail closed; then it counts as bad.
"""

from enum import StrEnum
from typing import Literal

from msgspec import Struct


class Phase(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    RECOVERING = "recovering"


# Why a device is not healthy, as a label of metrics: texts differ each time.
Cause = Literal[
    "temperature", "memory", "bus", "link", "firmware", "heartbeat", "wedged", "pci-recovery", "driver", "gone",
    "queue-disabled", "programming", "crashed", "scan", "no-answer", "runtime", "other",
]  # fmt: skip


class Verdict(Struct, frozen=True):
    """The result of one check: `good`, `bad`, or `unknown` if the source could not determine it, with the reason.

    `cause` is the kind of the reason. A good verdict with a reason is a warning: pages show it, and the device stays
    healthy.
    """

    answer: Literal["good", "bad", "unknown"]
    reason: str = ""
    cause: Cause = "other"


class HealthPolicy(Struct, frozen=True, kw_only=True):
    """How often devices are checked and how verdicts become health. Times are in seconds.

    `interval` is the time between checks unless the user sets one. A device recovers after `good_verdicts` in a row, of
    which the last comes at least `recovery_delay` after the first.
    """

    interval: float = 30.0
    bad_verdicts: int = 1
    good_verdicts: int = 2
    recovery_delay: float = 3.0
    fail_closed: bool = False


class HealthState(Struct, frozen=True):
    """The phase of a device, its reason, and the verdicts in a row that confirm the phase: number and first time."""

    phase: Phase = Phase.HEALTHY
    reason: str = ""
    streak: int = 0
    since: float = 0.0
    cause: Cause = "other"

    @property
    def usable(self) -> bool:
        """Whether the device is advertised as Healthy."""
        return self.phase in (Phase.HEALTHY, Phase.SUSPECT)

    @classmethod
    def first(cls, verdict: Verdict, policy: HealthPolicy) -> "HealthState":
        """The state of a new device: one bad verdict makes it unhealthy, whatever the policy."""
        return cls().after(verdict, HealthPolicy(fail_closed=policy.fail_closed), 0.0)

    def after(self, verdict: Verdict, policy: HealthPolicy, now: float) -> "HealthState":
        """The state after one more verdict; `now` is a monotonic time."""
        answer, cause = verdict.answer, verdict.cause
        if answer == "unknown":
            if not policy.fail_closed:
                return self
            answer, cause = "bad", "no-answer"
        streak = self.streak + 1
        if answer == "bad":
            if self.phase is Phase.UNHEALTHY and (self.cause != "no-answer" or cause == "no-answer"):
                return self  # keeps the first reason: readings differ each time and would be logged each time
            if self.usable and streak < policy.bad_verdicts:
                return HealthState(Phase.SUSPECT, verdict.reason, streak, cause=cause)
            return HealthState(Phase.UNHEALTHY, verdict.reason, cause=cause)
        since = self.since if self.phase is Phase.RECOVERING else now
        if self.usable or (streak >= policy.good_verdicts and now - since >= policy.recovery_delay):
            return HealthState()
        return HealthState(Phase.RECOVERING, self.reason, streak, since, self.cause)
