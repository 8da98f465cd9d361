"""The kubelet's health streams: each message is the complete list of a driver's devices.

The kubelet regards a report as outdated after 30 s, from 1.35 after the time limit that the report has. So the list is
repeated while a stream is open, and only then.
"""

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from accelplane import rpc
from accelplane.dra.model import DeviceHealth
from accelplane.dra.registration_policy import Version
from accelplane.kubelet import drahealth_v1_pb2 as pb
from accelplane.kubelet.notifier import Notifier

_INTERVAL, _LONG_INTERVAL, _TIMEOUT = 10.0, 120.0, 300  # seconds
_VERSIONS = ("v1", "v1alpha1")


class HealthStreams:
    """Answers NodeWatchResources with the devices of `health`, again after each notification of `changed`."""

    def __init__(
        self,
        pool: str,
        health: Callable[[], Sequence[DeviceHealth]],
        changed: Notifier,
        kubelet_version: Callable[[], Version | None],
    ) -> None:
        self._pool = pool
        self._health = health
        self._changed = changed
        self._version = kubelet_version
        self.open = 0

    def methods(self) -> Mapping[str, rpc.Method]:
        method = rpc.streaming(pb.NodeWatchResourcesRequest, pb.NodeWatchResourcesResponse, self._watch)
        return {f"/{version}.DRAResourceHealth/NodeWatchResources": method for version in _VERSIONS}

    async def _watch(
        self, _request: pb.NodeWatchResourcesRequest
    ) -> AsyncGenerator[pb.NodeWatchResourcesResponse, None]:
        self.open += 1
        try:
            while True:
                count = self._changed.count
                version = self._version()
                timed = version is not None and version >= (1, 35)
                yield self._message(_TIMEOUT if timed else 0)
                if self._changed.count == count:
                    await self._changed.wait(_LONG_INTERVAL if timed else _INTERVAL)
        finally:
            self.open -= 1

    def _message(self, timeout: int) -> pb.NodeWatchResourcesResponse:
        now = int(time.time())
        return pb.NodeWatchResourcesResponse(
            devices=[
                pb.DeviceHealth(
                    device=pb.DeviceIdentifier(pool_name=self._pool, device_name=each.device),
                    health=pb.HealthStatus.Value(each.health),
                    last_updated_time=now,
                    health_check_timeout_seconds=timeout,
                    message=each.message,
                )
                for each in self._health()
            ]
        )
