"""The health sources of GPUs: the Level-Zero service and xpumd.

The Level-Zero service returns readings, which are evaluated here: memory, bus and SoC must be ok and no temperature
above its limit. A card that became unhealthy by its temperature must cool by a margin below the limit, or its state
would follow the load. xpumd evaluates by itself.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from accelplane.devices import Cause, Device, HealthPolicy, Verdict
from accelplane.gpuservices.levelzero import LevelZero, LevelZeroError, Readings
from accelplane.gpuservices.xpumd import Xpumd
from accelplane.host import Host
from accelplane.plugins.base import ScanError
from accelplane.plugins.gpu.config import GpuConfig
from accelplane.plugins.gpu.scan import MONITORING_ID

LEVELZERO_SOCKET = "/var/lib/levelzero/server.sock"
WSL_RETRY, WSL_INTERVAL = 3.0, 5.0

# ze_result_t of the Level-Zero specification: the device is not usable, regardless of the rest of the response.
_FATAL: Mapping[int, Cause] = {0x70000001: "gone", 0x70000006: "wedged"}  # DEVICE_LOST, DEVICE_REQUIRES_RESET
_PART_CAUSES: Mapping[str, Cause] = {"memory": "memory", "bus": "bus", "SoC": "firmware"}
# The service could not query the driver, which is not initialized, hangs or has crashed: the state is unknown.
_NOT_ASKED = frozenset((0x78000001, 0x70020000))  # UNINITIALIZED, DEPENDENCY_UNAVAILABLE

_LEVELZERO_INTERVAL = 4.5  # a failing card is Unhealthy within 5 s


class TemperatureLimit(NamedTuple):
    """The limit of one sensor in degrees Celsius; an overheated card must cool to `recovered`."""

    sensor: str
    limit: float
    recovered: float


def temperature_limits(config: GpuConfig) -> tuple[TemperatureLimit, ...]:
    return tuple(
        TemperatureLimit(sensor, float(limit), limit - config.temperature_margin)
        for sensor, limit in (
            ("global", config.temp_limit),
            ("gpu", config.gpu_temp_limit),
            ("memory", config.memory_temp_limit),
        )
    )


class TemperatureState(NamedTuple):
    """The sensors of one card that are too hot: a description of each, and the number of such readings in a row."""

    problems: tuple[str, ...] = ()
    streaks: Mapping[str, int] = {}

    def after(
        self, temperatures: Sequence[float], limits: Sequence[TemperatureLimit], bad_verdicts: int
    ) -> "TemperatureState":
        """The state after one more reading of each sensor, in the order of the limits.

        After `bad_verdicts` hot readings in a row a sensor must cool by its margin. A failed sensor reads -999, which
        is below every limit.
        """
        problems: list[str] = []
        streaks: dict[str, int] = {}
        for (sensor, limit, recovered), temperature in zip(limits, temperatures, strict=True):
            streak = self.streaks.get(sensor, 0)
            bound = recovered if streak >= bad_verdicts else limit
            if temperature > bound:
                streaks[sensor] = streak + 1
                relation = f"above {limit:g}" if temperature > limit else f"not yet down to {bound:g}"
                problems.append(f"{sensor} temperature {temperature:.1f} °C {relation}")
        return TemperatureState(tuple(problems), streaks)


class LevelZeroSource:
    """The Level-Zero service: the health of cards, and in WSL mode which GPUs there are."""

    def __init__(self, config: GpuConfig) -> None:
        self.policy = HealthPolicy(
            interval=_LEVELZERO_INTERVAL, bad_verdicts=config.health_bad_verdicts, fail_closed=config.health_fail_closed
        )
        self._limits = temperature_limits(config)
        self._temperatures: dict[str, TemperatureState] = {}
        self._indices: Sequence[int] = ()  # of the last response
        self._queried = asyncio.Event()  # whether `indices` was called
        self._client: LevelZero | None = None

    async def verdicts(self, host: Host, devices: Sequence[Device]) -> dict[str, Verdict]:
        """By card name. All cards are queried concurrently, so that one that hangs does not delay the others."""
        cards = _pci_addresses(devices)
        bdfs = [bdf for bdf in cards.values() if bdf]
        readings = dict(zip(bdfs, await self._connect(host).readings(bdfs), strict=True))
        return {
            name: self._verdict(host, name, bdf, readings[bdf]) if bdf else _no_address(name)
            for name, bdf in cards.items()
        }

    async def indices(self, host: Host) -> Sequence[int]:
        """The Level-Zero indices of Intel's GPUs. Raises `ScanError`. `run` requests more scans from then on."""
        self._queried.set()
        self._indices = ()
        try:
            self._indices = await self._connect(host).indices()
        except LevelZeroError as error:
            raise ScanError(str(error)) from error
        return self._indices

    async def run(self, host: Host, request_scan: Callable[[], None]) -> None:
        """Requests a scan every `WSL_INTERVAL` seconds once `indices` was called, every `WSL_RETRY` without indices.

        The service sends no notifications. Closes the connection at the end.
        """
        client = self._connect(host, reopen=True)
        try:
            await self._queried.wait()
            while True:
                await asyncio.sleep(WSL_INTERVAL if self._indices else WSL_RETRY)
                request_scan()
        finally:
            client.close()

    def _connect(self, host: Host, *, reopen: bool = False) -> LevelZero:
        if self._client is None or (reopen and self._client.closed):
            self._client = LevelZero(host.local(LEVELZERO_SOCKET))
        return self._client

    def _verdict(self, host: Host, name: str, bdf: str, readings: Readings) -> Verdict:
        """A problem in one response counts although the other call failed."""
        problems = [f"{part} not ok" for part in readings.failed_parts]
        causes: list[Cause] = [_PART_CAUSES[part] for part in readings.failed_parts]
        unknown = readings.problem
        if readings.temperatures is not None:
            state = self._temperatures.get(bdf, TemperatureState()).after(
                readings.temperatures, self._limits, self.policy.bad_verdicts
            )
            self._temperatures[bdf] = state
            problems += state.problems
            if state.problems:
                causes.append("temperature")
        for error in readings.errors:
            if error.code in _FATAL:
                problems.append(str(error))
                causes.append(_FATAL[error.code])
            elif error.code in _NOT_ASKED:
                unknown = unknown or f"the Level-Zero service: {error}"
            else:
                host.note(f"{name}: the Level-Zero service could not read everything: {error}")
        if problems:
            return Verdict("bad", ", ".join(problems), causes[0])
        return Verdict("unknown", unknown) if unknown else Verdict("good")


class XpumdSource:
    """xpumd, which sends the health of devices when it changes."""

    def __init__(self, config: GpuConfig) -> None:
        self.policy = HealthPolicy(bad_verdicts=config.health_bad_verdicts, fail_closed=config.health_fail_closed)
        self._client = Xpumd(config.xpumd_endpoint)

    async def verdicts(self, host: Host, devices: Sequence[Device]) -> dict[str, Verdict]:
        """By card name, from the last messages."""
        return {name: self._verdict(name, bdf) for name, bdf in _pci_addresses(devices).items()}

    async def run(self, host: Host, request_scan: Callable[[], None]) -> None:
        await self._client.run(request_scan)

    def _verdict(self, name: str, bdf: str) -> Verdict:
        if not bdf:
            return _no_address(name)
        if self._client.problem:
            return Verdict("unknown", self._client.problem)
        state = self._client.states.get(bdf)
        if state is None:
            return Verdict("unknown", f"no health data available yet: {bdf}")
        return Verdict("bad", state) if state else Verdict("good")


def _pci_addresses(devices: Sequence[Device]) -> dict[str, str]:
    """PCI addresses by card name, empty if there is none. The monitoring device has no health."""
    return {device.unit: device.text("bdf") for device in devices if device.id != MONITORING_ID}


def _no_address(name: str) -> Verdict:
    return Verdict("unknown", f"{name} has no PCI address to query")
