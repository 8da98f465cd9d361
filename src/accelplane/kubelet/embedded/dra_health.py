"""The health of devices of claims, as DRA drivers report it."""

import asyncio
import time
from collections.abc import Callable

from accelplane.kubelet import drahealth_v1_pb2 as pb
from accelplane.kubelet.embedded.connection import PluginError, stream
from accelplane.kubelet.embedded.dra_plugins import DraPlugin

_TIMEOUT = 30.0
_RETRY = 5.0
_TEXTS = {pb.HEALTHY: "Healthy", pb.UNHEALTHY: "Unhealthy"}


class DraHealth:
    """The reported health by driver, pool and device."""

    def __init__(
        self, on_change: Callable[[], None], *, announced_only: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`announced_only`: a plugin that does not implement the service is not asked again."""
        self._clock = clock
        self._reports: dict[str, dict[tuple[str, str], tuple[pb.DeviceHealth, float]]] = {}
        self._on_change = on_change
        self._announced_only = announced_only

    def status(self, driver: str, pool: str, device: str) -> tuple[str, str]:
        """Healthy, Unhealthy or Unknown, and a message. Reports expire."""
        report, expires = self._reports.get(driver, {}).get((pool, device), (pb.DeviceHealth(), 0.0))
        if self._clock() > expires:
            return "Unknown", ""
        return _TEXTS.get(report.health, "Unknown"), report.message

    async def watch(self, plugin: DraPlugin) -> None:
        """Records the reports of a plugin until it is cancelled. The end of a stream discards the driver's reports."""
        request, path = pb.NodeWatchResourcesRequest(), f"/{plugin.health_service}/NodeWatchResources"
        while True:
            try:
                async for response in stream(plugin.channel, path, request, pb.NodeWatchResourcesResponse):
                    self.record(plugin.driver, response)
            except PluginError as error:
                if self._announced_only and "code = Unimplemented" in str(error):
                    return
            finally:
                self._reports.pop(plugin.driver, None)
                self._on_change()
            await asyncio.sleep(_RETRY)

    def record(self, driver: str, response: pb.NodeWatchResourcesResponse) -> None:
        """Replaces what is known of the reported devices. Others keep their health until it expires."""
        now = self._clock()
        reports = self._reports.setdefault(driver, {})
        for device in response.devices:
            timeout = device.health_check_timeout_seconds if device.health_check_timeout_seconds > 0 else _TIMEOUT
            reports[device.device.pool_name, device.device.device_name] = device, now + timeout
        self._on_change()
