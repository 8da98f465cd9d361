"""The health of a plugin's units over time: runs checks, stores the states, computes when the next check is due."""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from accelplane.devices import UNHEALTHY, Device, HealthPolicy, HealthState, Phase, Verdict
from accelplane.host import Host
from accelplane.host.isolation import HostThread
from accelplane.node.health_history import HealthHistory
from accelplane.node.hook_problems import HookProblems
from accelplane.node.hook_results import checked_verdicts
from accelplane.node.loop_watchdog import watched
from accelplane.plugins import Config, Plugin

log = logging.getLogger(__name__)

_CHECK_DEADLINE = 10.0
_RECHECK_DELAY = 1.0


class HealthTracker:
    """The states by unit, in `unknown` why the last check of a unit had no result, and in `warnings` good verdicts with
    a reason.

    Checks may overlap: a verdict is dropped if a check that started later has given one, or if the unit has left since
    the check started, even if it has returned.
    """

    def __init__(self, name: str, problems: HookProblems | None = None) -> None:
        self.states: dict[str, HealthState] = {}
        self.unknown: dict[str, str] = {}
        self.warnings: dict[str, Verdict] = {}
        self.history = HealthHistory()
        self._name = name
        self._problems = problems or HookProblems(name)
        self._notes: frozenset[str] = frozenset()
        self._policy = HealthPolicy()
        self._sequence = 0
        self._reported: set[str] = set()  # units about which there was an event
        # By unit the number of the check whose verdict was applied last, or the number at which the unit was added.
        self._applied: dict[str, int] = {}

    @property
    def all_healthy(self) -> bool:
        """Whether there are units, all are healthy, and the last check of each had a result."""
        healthy = all(state.phase is Phase.HEALTHY for state in self.states.values())
        return bool(self.states) and healthy and not self.unknown

    def next_check_in(self, interval: float) -> float:
        """Seconds until the next check is due: sooner than `interval` if a state has to be confirmed."""
        now = time.monotonic()
        due = interval
        for state in self.states.values():
            if state.phase is Phase.SUSPECT:
                due = min(due, _RECHECK_DELAY)
            elif state.phase is Phase.RECOVERING:
                # A source that does not answer does not end the recovery.
                due = min(due, max(_RECHECK_DELAY, state.since + self._policy.recovery_delay - now))
        return due

    def retain(self, units: Collection[str]) -> None:
        """Adds the units that are new and forgets all others, also for the checks in progress."""
        self._sequence += 1
        for unit in self._applied.keys() - set(units):
            self._forget(unit)
        self._applied = {unit: self._applied.get(unit, self._sequence) for unit in units}

    def forget_sources(self) -> None:
        """Forgets all units but those about which there was an event, also for the checks in progress."""
        self._sequence += 1
        for unit in self._applied.keys() - self._reported:
            self._forget(unit)
            self._applied[unit] = self._sequence

    async def check(
        self,
        plugin: Plugin[Config],
        host: Host,
        devices: Iterable[Device],
        deadline: float = _CHECK_DEADLINE,
        *,
        reported: Mapping[str, Verdict] | None = None,
    ) -> None:
        """Queries the plugin for the retained units of the devices and applies the verdicts. Logs new notes in `host`.

        If the plugin fails or does not return within `deadline` seconds, the verdict is "unknown". Verdicts that the
        kernel has `reported` by events replace those of the plugin.
        """
        units = {device.unit: device for device in devices if device.unit in self._applied}
        if not units:
            return
        self._sequence += 1
        sequence = self._sequence
        answers: dict[str, Verdict]
        problems: list[str] = []
        try:
            async with asyncio.timeout(deadline):
                if not plugin.overrides("health"):
                    answers = {}
                else:
                    found, host = await self._query(plugin.health, host, tuple(units.values()))
                    answers, problems = checked_verdicts(found, units)
        except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
            timeout = isinstance(error, TimeoutError)
            problem = f"no answer within {deadline:g} s" if timeout else str(error) or type(error).__name__
            answers = dict.fromkeys(units, Verdict("unknown", problem))
        self._add_reported(answers, units, reported or {})
        self._problems.update("health", problems)
        self._log_notes(frozenset(host.notes), complete=units.keys() >= self.states.keys())
        current = [unit for unit in units if self._applied.get(unit, sequence) < sequence]
        self._applied.update(dict.fromkeys(current, sequence))
        verdicts = {unit: answers[unit] for unit in current if unit in answers}
        for unit in current:
            if unit not in verdicts:
                self._forget(unit)  # the source does not cover it
        self._log_unknown(verdicts)
        self._log_warnings(verdicts)
        self._policy = plugin.health_policy
        now = time.monotonic()
        for unit, verdict in verdicts.items():
            old = self.states.get(unit)
            new = HealthState.first(verdict, self._policy) if old is None else old.after(verdict, self._policy, now)
            self.states[unit] = new
            self.history.record(unit, old, new)
            self._log_transition(unit, old or HealthState(), new)

    async def _query(
        self, health: Callable[[Host, Sequence[Device]], Any], host: Host, devices: Sequence[Device]
    ) -> tuple[object, Host]:
        """What `Plugin.health` returns, and the host with which it was made: in a thread, unless it is a coroutine."""

        def report(problem: str) -> None:
            self._problems.update("event loop", [problem])

        if inspect.iscoroutinefunction(health):
            return await watched(self._name, "health", lambda: health(host, devices), report), host
        thread = host.thread or HostThread()
        found: object
        found, host = await thread.run(host, lambda host: health(host, devices))
        if not isinstance(found, Awaitable):
            return found, host
        # It is a function that returns a coroutine of another object.
        coroutine: Awaitable[object] = found  # pyright: ignore[reportUnknownVariableType]
        return await watched(self._name, "health", lambda: coroutine, report), host

    def apply(self, device: Device) -> Device:
        """The device with its unit's health. A device that the scan found unhealthy stays unhealthy."""
        state = self.states.get(device.unit)
        if state is None or state.usable or not device.healthy:
            return device
        return replace(device, health=UNHEALTHY, reason=state.reason or state.phase.value)

    def _add_reported(
        self, answers: dict[str, Verdict], units: Collection[str], reported: Mapping[str, Verdict]
    ) -> None:
        """A unit without other source is good as soon as its event is over."""
        for unit in units:
            if unit in reported:
                answers[unit] = reported[unit]
                self._reported.add(unit)
            elif unit in self._reported:
                answers.setdefault(unit, Verdict("good"))

    def _forget(self, unit: str) -> None:
        self._reported.discard(unit)
        self.states.pop(unit, None)
        self.unknown.pop(unit, None)
        self.warnings.pop(unit, None)
        self.history.forget(unit)

    def _log_transition(self, unit: str, old: HealthState, new: HealthState) -> None:
        if old.phase == new.phase:
            return
        bad = new.phase in (Phase.SUSPECT, Phase.UNHEALTHY)
        reason = f": {new.reason}" if new.reason else ""
        log.log(
            logging.WARNING if bad else logging.INFO, "%s: %s is %s (was %s)%s",
            self._name, unit, new.phase, old.phase, reason,
        )  # fmt: skip

    def _log_unknown(self, verdicts: Mapping[str, Verdict]) -> None:
        """Logs the units whose health is unknown, once for each reason, and those whose health is known again."""
        new: dict[str, list[str]] = {}
        known: list[str] = []
        for unit, verdict in verdicts.items():
            if verdict.answer != "unknown":
                if self.unknown.pop(unit, None) is not None:
                    known.append(unit)
            elif self.unknown.get(unit) != verdict.reason:
                self.unknown[unit] = verdict.reason
                new.setdefault(verdict.reason, []).append(unit)
        for reason, units in new.items():
            log.warning("%s: health of %s unknown: %s", self._name, ", ".join(units), reason or "no reason given")
        if known:
            log.info("%s: health of %s known again", self._name, ", ".join(known))

    def _log_warnings(self, verdicts: Mapping[str, Verdict]) -> None:
        """Logs each warning once. A check without result changes nothing."""
        for unit, verdict in verdicts.items():
            if verdict.answer == "good" and verdict.reason:
                if self.warnings.get(unit) != verdict:
                    log.warning("%s: warning of %s: %s", self._name, unit, verdict.reason)
                self.warnings[unit] = verdict
            elif verdict.answer != "unknown" and self.warnings.pop(unit, None) is not None:
                log.info("%s: the warning of %s has ended", self._name, unit)

    def _log_notes(self, notes: frozenset[str], *, complete: bool) -> None:
        """Logs new notes. A complete check also shows which notes are obsolete."""
        for note in sorted(notes - self._notes):
            log.warning("%s: %s", self._name, note)
        self._notes = notes if complete else self._notes | notes
