"""Health of a plugin's units over time: verdicts asked for, states kept, who is asked again and when."""

import asyncio
import logging
from collections.abc import Collection, Iterable

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
    """States by unit name. Units that leave are forgotten."""

    def __init__(self, name: str) -> None:
        self.states: dict[str, HealthState] = {}
        self._name = name
        self._source_problem = ""

    @property
    def unsettled(self) -> bool:
        """Whether some unit awaits a second verdict, which should not take as long as a first one."""
        return any(not state.settled for state in self.states.values())

    def next_look(self, interval: float) -> float:
        """Seconds until the plugin should be asked again."""
        return min(_CONFIRM_AFTER, interval) if self.unsettled else interval

    def keep(self, units: Collection[str]) -> None:
        """Forgets every unit but `units`."""
        for unit in self.states.keys() - set(units):
            del self.states[unit]

    async def judge(
        self, plugin: Plugin[Config], host: Host, devices: Iterable[Device], deadline: float = ASK_DEADLINE
    ) -> None:
        """Asks the plugin about the devices' units and moves their states.

        A plugin that fails or does not answer within `deadline` seconds gives the verdict "unknown".
        """
        units = {device.unit: device for device in devices}
        policy = plugin.health_policy
        try:
            async with asyncio.timeout(deadline):
                verdicts = msgspec.convert(await plugin.health(host, tuple(units.values())), dict[str, Verdict])
            self._complain("")
        except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
            problem = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                problem = f"no answer within {deadline:g} s"
            self._complain(problem)
            verdicts = dict.fromkeys(units, Verdict("unknown", f"health unknown: {problem}"))
        for unit, verdict in verdicts.items():
            if unit not in units:
                continue
            old = self.states.get(unit)
            new = HealthState.first(verdict, policy) if old is None else old.after(verdict, policy)
            self.states[unit] = new
            self._tell(unit, old or HealthState(), new)

    def applied(self, device: Device) -> Device:
        """The device with its unit's health; one that the scan itself found unhealthy stays so."""
        state = self.states.get(device.unit)
        if state is None or state.usable or not device.healthy:
            return device
        return replace(device, health=UNHEALTHY, reason=state.reason or state.phase.value)

    def _tell(self, unit: str, old: HealthState, new: HealthState) -> None:
        if old.phase == new.phase:
            return
        bad = new.phase in (Phase.SUSPECT, Phase.UNHEALTHY)
        reason = f": {new.reason}" if new.reason else ""
        log.log(
            logging.WARNING if bad else logging.INFO, "%s: %s is %s (was %s)%s",
            self._name, unit, new.phase, old.phase, reason,
        )  # fmt: skip

    def _complain(self, problem: str) -> None:
        if problem != self._source_problem:
            self._source_problem = problem
            if problem:
                log.warning("%s: health unknown: %s", self._name, problem)
            else:
                log.info("%s: the health source answers again", self._name)
