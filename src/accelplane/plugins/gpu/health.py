"""Verdicts on cards, from what the Level-Zero service or xpumd say of them.

Level-Zero gives readings, judged here: memory, bus and SoC must be well, and no temperature above its limit. A card
that overheated long enough to be given up must cool by a margin below the limit first, else it would come and go with
the load. xpumd judges by itself.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from accelplane.devices import Device, Verdict
from accelplane.plugins.gpu.config import GpuConfig
from accelplane.plugins.gpu.scan import MONITORING_ID

if TYPE_CHECKING:
    from accelplane.sidecars.levelzero import LevelZero
    from accelplane.sidecars.xpumd import Xpumd

# ze_result_t of the Level-Zero specification: the device is not usable, whatever else the answer says.
_FATAL = frozenset((0x70000001, 0x70000006))  # DEVICE_LOST, DEVICE_REQUIRES_RESET

# The agent gives 10 s for all cards. They are asked one after the other, because the service may not stand more.
# One card takes up to 4 s, so that the last one must have been begun by then.
_BUDGET = 5.5


class Limit(NamedTuple):
    """Of one sensor, in degrees Celsius: good up to `highest`; once given up, good again from `cooled` down."""

    sensor: str
    highest: float
    cooled: float


def limits_of(config: GpuConfig) -> tuple[Limit, ...]:
    return tuple(
        Limit(sensor, float(highest), highest - config.temperature_margin)
        for sensor, highest in (
            ("global", config.temp_limit),
            ("gpu", config.gpu_temp_limit),
            ("memory", config.memory_temp_limit),
        )
    )


class Heat(NamedTuple):
    """How hot one card is: what is wrong, in words, and for how many readings in a row each sensor has been too hot."""

    complaints: tuple[str, ...] = ()
    streaks: Mapping[str, int] = {}

    def after(self, temperatures: Sequence[float], limits: Sequence[Limit], enough: int) -> "Heat":
        """The heat that follows from one more reading of each sensor, in the order of the limits.

        After `enough` hot readings in a row a sensor must cool by its margin. One that failed reads -999, which is
        below every limit.
        """
        complaints: list[str] = []
        streaks: dict[str, int] = {}
        for (sensor, highest, cooled), temperature in zip(limits, temperatures, strict=True):
            streak = self.streaks.get(sensor, 0)
            bound = cooled if streak >= enough else highest
            if temperature > bound:
                streaks[sensor] = streak + 1
                where = f"above {highest:g}" if temperature > highest else f"not yet down to {bound:g}"
                complaints.append(f"{sensor} temperature {temperature:.1f} °C {where}")
        return Heat(tuple(complaints), streaks)


class LevelZeroJudge:
    """Asks the Level-Zero service about cards, and remembers which of them run hot."""

    def __init__(self, config: GpuConfig) -> None:
        self._limits = limits_of(config)
        self._enough = config.health_bad_verdicts
        self._heat: dict[str, Heat] = {}
        self._silent: set[str] = set()

    async def verdicts(
        self,
        service: "LevelZero",
        devices: Sequence[Device],
        note: Callable[[str], None],
        budget: float = _BUDGET,
    ) -> dict[str, Verdict]:
        """By card name. One that hangs does not keep the others from being judged: next time it is asked last."""
        cards = _cards(devices)
        clock = asyncio.get_running_loop().time
        deadline = clock() + budget
        found: dict[str, Verdict] = {}
        for name in sorted(cards, key=self._silent.__contains__):
            if not cards[name]:
                found[name] = _nameless(name)
            elif clock() > deadline:
                found[name] = Verdict("unknown", "the Level-Zero service took too long for other cards")
            else:
                found[name] = await self._verdict(service, name, cards[name], note)
        # Others may have been asked about before: newcomers are judged apart.
        self._silent.difference_update(cards)
        self._silent.update(name for name, verdict in found.items() if verdict.answer == "unknown")
        return found

    async def _verdict(self, service: "LevelZero", name: str, bdf: str, note: Callable[[str], None]) -> Verdict:
        from accelplane.sidecars.levelzero import LevelZeroError  # noqa: PLC0415 gRPC is loaded only when it is used

        try:
            condition = await service.condition(bdf)
            broken = [
                f"{part} not ok"
                for part, ok in (("memory", condition.memory), ("bus", condition.bus), ("SoC", condition.soc))
                if not ok
            ]
            if condition.fault.code in _FATAL:
                broken.append(str(condition.fault))
            if broken:
                return Verdict("bad", ", ".join(broken))
            temperatures = await service.temperatures(bdf)
        except LevelZeroError as error:
            return Verdict("unknown", str(error))
        for fault in dict.fromkeys((condition.fault, temperatures.fault)):
            if fault.code:
                note(f"{name}: the Level-Zero service could not read everything: {fault}")
        if temperatures.fault.code in _FATAL:
            return Verdict("bad", str(temperatures.fault))
        overall, gpu, memory, _fault = temperatures
        heat = self._heat.get(bdf, Heat()).after((overall, gpu, memory), self._limits, self._enough)
        self._heat[bdf] = heat
        return Verdict("bad", ", ".join(heat.complaints)) if heat.complaints else Verdict("good")


def xpumd_verdicts(service: "Xpumd", devices: Sequence[Device]) -> dict[str, Verdict]:
    """By card name, from what xpumd told last."""
    found: dict[str, Verdict] = {}
    for name, bdf in _cards(devices).items():
        state = service.states.get(bdf)
        if not bdf:
            found[name] = _nameless(name)
        elif service.problem:
            found[name] = Verdict("unknown", service.problem)
        elif state is None:
            found[name] = Verdict("unknown", f"no health data available yet: {bdf}")
        else:
            found[name] = Verdict("bad", state) if state else Verdict("good")
    return found


def _cards(devices: Sequence[Device]) -> dict[str, str]:
    """PCI addresses by card name, empty where there is none. What monitors all cards is always well."""
    return {device.unit: device.attributes.get("bdf", "") for device in devices if device.id != MONITORING_ID}


def _nameless(name: str) -> Verdict:
    return Verdict("unknown", f"{name} has no PCI address to ask for")
