"""Health of a plugin's units over time: verdicts asked for, states kept, who is asked again and when."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from accelplane.devices import UNHEALTHY, Device, HealthState, Phase, Verdict
from accelplane.host import Host
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

log = logging.getLogger(__name__)

ASK_DEADLINE = 10.0
_CONFIRM_AFTER = 1.0


class HealthTracker:
    """States by unit name, and in `unknown` why the last question about a unit had no answer. Units that leave are
    forgotten."""

    def __init__(self, name: str) -> None:
        self.states: dict[str, HealthState] = {}
        self.unknown: dict[str, str] = {}
        self._name = name
        self._notes: frozenset[str] = frozenset()
        self._kept: Collection[str] | None = None

    @property
    def unsettled(self) -> bool:
        """Whether some unit awaits a second verdict, which should not take as long as a first one."""
        return any(not state.settled for state in self.states.values())

    def next_check_in(self, interval: float) -> float:
        """Seconds until the plugin should be asked again."""
        return min(_CONFIRM_AFTER, interval) if self.unsettled else interval

    def retain(self, units: Collection[str]) -> None:
        """Forgets every unit but `units`, also those that a question under way is about."""
        self._kept = units
        for unit in self.states.keys() - set(units):
            self._forget(unit)

    async def check(
        self, plugin: Plugin[Config], host: Host, devices: Iterable[Device], deadline: float = ASK_DEADLINE
    ) -> None:
        """Asks the plugin about the devices' units and moves their states. Notes in `host`, a new one, are logged.

        A plugin that fails or does not answer within `deadline` seconds gives the verdict "unknown".
        """
        units = {device.unit: device for device in devices}
        policy = plugin.health_policy
        everybody = units.keys() >= self.states.keys()
        try:
            async with asyncio.timeout(deadline):
                answers = msgspec.convert(await plugin.health(host, tuple(units.values())), dict[str, Verdict])
            verdicts = {unit: answers[unit] for unit in units if unit in answers}
            for unit in units.keys() - verdicts.keys():
                self._forget(unit)  # not judged at all, unless by a failure before
        except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
            timeout = isinstance(error, TimeoutError)
            problem = f"no answer within {deadline:g} s" if timeout else str(error) or type(error).__name__
            verdicts = dict.fromkeys(units, Verdict("unknown", problem))
        self._tell_unknown(verdicts)
        self._tell_notes(frozenset(host.notes), everybody=everybody)
        for unit, verdict in verdicts.items():
            if self._kept is not None and unit not in self._kept:
                continue  # it left while the question was asked
            old = self.states.get(unit)
            new = HealthState.first(verdict, policy) if old is None else old.after(verdict, policy)
            self.states[unit] = new
            self._tell(unit, old or HealthState(), new)

    def apply(self, device: Device) -> Device:
        """The device with its unit's health; one that the scan itself found unhealthy stays so."""
        state = self.states.get(device.unit)
        if state is None or state.usable or not device.healthy:
            return device
        return replace(device, health=UNHEALTHY, reason=state.reason or state.phase.value)

    def _forget(self, unit: str) -> None:
        self.states.pop(unit, None)
        self.unknown.pop(unit, None)

    def _tell(self, unit: str, old: HealthState, new: HealthState) -> None:
        if old.phase == new.phase:
            return
        bad = new.phase in (Phase.SUSPECT, Phase.UNHEALTHY)
        reason = f": {new.reason}" if new.reason else ""
        log.log(
            logging.WARNING if bad else logging.INFO, "%s: %s is %s (was %s)%s",
            self._name, unit, new.phase, old.phase, reason,
        )  # fmt: skip

    def _tell_unknown(self, verdicts: Mapping[str, Verdict]) -> None:
        """Says of whom nothing is known, once for each reason, and of whom something is again."""
        news: dict[str, list[str]] = {}
        known: list[str] = []
        for unit, verdict in verdicts.items():
            if verdict.answer != "unknown":
                if self.unknown.pop(unit, None) is not None:
                    known.append(unit)
            elif self.unknown.get(unit) != verdict.reason:
                self.unknown[unit] = verdict.reason
                news.setdefault(verdict.reason, []).append(unit)
        for reason, units in news.items():
            log.warning("%s: health of %s unknown: %s", self._name, ", ".join(units), reason or "no reason given")
        if known:
            log.info("%s: health of %s known again", self._name, ", ".join(known))

    def _tell_notes(self, notes: frozenset[str], *, everybody: bool) -> None:
        """Logs what is odd when it is new; a question about everybody tells what is over."""
        for note in sorted(notes - self._notes):
            log.warning("%s: %s", self._name, note)
        self._notes = notes if everybody else self._notes | notes
