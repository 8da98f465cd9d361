"""The GPU plugin: Intel GPUs behind i915 and xe, and behind /dev/dxg in Windows' Linux."""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from accelplane.devices import Allocation, Device, HealthPolicy, Resource, Skipped, Verdict
from accelplane.host import Host
from accelplane.plugins.base import DevicePlans, HealthSource, NodePods, Plugin, PodAllocator, Watch
from accelplane.plugins.gpu.config import GpuConfig
from accelplane.plugins.gpu.driverhealth import reports_health, verdicts
from accelplane.plugins.gpu.scan import AFFINITY_MASK, CDI_KIND, MONITORING_ID, Scope, scan, wsl_devices
from accelplane.plugins.policies import preferred_ids

if TYPE_CHECKING:
    from accelplane.plugins.gpu.health import LevelZeroSource
    from accelplane.plugins.gpu.labels import ResourceLabels


class GpuPlugin(Plugin[GpuConfig]):
    """Publishes `gpu.intel.com/i915`, `/xe`, `/dxg` and the monitoring resources."""

    namespace = "gpu.intel.com"
    exclusive_namespace = True
    cdi_kinds = (CDI_KIND,)
    label_file = "/etc/kubernetes/node-feature-discovery/features.d/intel-gpu-resources.txt"

    def __init__(self, config: GpuConfig | None = None) -> None:
        super().__init__(config)
        self._health: HealthSource | None = None
        self._wsl: LevelZeroSource | None = None
        if self.config.wsl or self.config.health_management or self.config.xpumd_endpoint:
            from accelplane.plugins.gpu import health  # noqa: PLC0415 - loads protobuf

            if self.config.wsl:
                self._wsl = health.LevelZeroSource(self.config)
            elif self.config.xpumd_endpoint:
                self._health = health.XpumdSource(self.config)
            else:
                self._health = health.LevelZeroSource(self.config)
        self._driver_reports = False  # whether a scan has found a driver that reports the health of its card
        self._labels: ResourceLabels | None = None
        self._indices: Sequence[int] = ()
        self._tiles_per_card = 0
        self._scope = Scope.of(self.config)
        places = self._scope.places
        if self.config.resource_labels or self.config.resource_manager:
            from accelplane.plugins.gpu import labels  # noqa: PLC0415 - memory of agents without these labels

            self._labels = labels.ResourceLabels(places.drm, os.environ)
        self.watch = (
            Watch(frozenset(("misc",)))  # /dev/dxg; its GPUs are those in the service's responses
            if self.config.wsl
            else Watch(frozenset(("drm", "pci", "mei")), (places.drm, places.dri, places.by_path))
        )

    def scan(self, host: Host) -> Iterable[Device | Resource | Skipped]:
        if self.config.wsl:
            return wsl_devices(self._indices, self.config)
        found = list(scan(host, self._scope))
        cards = {item.unit for item in found if isinstance(item, Device)}
        # For good: a card that blocks is not found, and keeps what its driver has reported.
        self._driver_reports |= any(reports_health(host, self._scope.places.drm, card) for card in cards)
        return found

    async def refresh(self, host: Host) -> None:
        if self._wsl is not None:
            self._indices = await self._wsl.indices(host)

    def labels(self, devices: Iterable[Device]) -> Mapping[str, str]:
        return {} if self._labels is None else self._labels.labels()

    async def background(self, host: Host, request_scan: Callable[[], None]) -> None:
        async with asyncio.TaskGroup() as group:
            source = self._wsl or self._health
            if source is not None:
                group.create_task(source.run(host, request_scan))
            if self._labels is not None and self.config.health_management:
                from accelplane.plugins.gpu.health import LEVELZERO_SOCKET  # noqa: PLC0415 - loads protobuf

                group.create_task(self._labels.follow_sizes(host.local(LEVELZERO_SOCKET), request_scan))

    def overrides(self, hook: str) -> bool:
        desired = {
            "health": self._health is not None or self._driver_reports,
            "prepare": self._labels is not None,
            "labels": self._labels is not None,
            "pod_allocator": self.config.resource_manager,
        }
        return super().overrides(hook) and desired.get(hook, True)

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        found = dict(await self._health.verdicts(host, devices)) if self._health is not None else {}
        if self._driver_reports:
            drm, cards = self._scope.places.drm, [device.unit for device in devices]
            for card, verdict in (await host.run(lambda host: verdicts(host, drm, cards))).items():
                known = found.get(card)
                if verdict.answer == "bad" or known is None or (known.answer == "good" and verdict.reason):
                    found[card] = verdict
        return found

    @property
    def health_policy(self) -> HealthPolicy:
        return HealthPolicy() if self._health is None else self._health.policy

    async def preferred_allocation(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int, in_use: Mapping[str, int]
    ) -> Sequence[str]:
        return preferred_ids(self.config.allocation_policy, available, must_include, size, in_use)

    def prepare(self, host: Host) -> None:
        """Reads the input of labels and affinity masks. Changes nothing on the node."""
        if self._labels is not None:
            self._labels.read(host)
        if self.config.resource_manager:
            self._count_tiles(host)

    def pod_allocator(self, pods: NodePods) -> PodAllocator:
        from accelplane.plugins.gpu.podallocator import FractionalAllocator  # noqa: PLC0415 - rarely needed

        return FractionalAllocator(pods, lambda: self._tiles_per_card)

    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Allocation:
        indices = {int(device.envs[AFFINITY_MASK]) for device in devices if AFFINITY_MASK in device.envs}
        if not indices:
            return allocation
        mask = ",".join(map(str, sorted(indices)))
        return replace(allocation, envs={**allocation.envs, AFFINITY_MASK: mask})

    def _count_tiles(self, host: Host) -> None:
        from accelplane.plugins.gpu import tiles  # noqa: PLC0415 - as above

        counts = tiles.tile_counts(host, self._scope.places.drm)
        if len(set(counts.values())) > 1:
            host.note(f"cards differ in their numbers of tiles: {counts}; affinity masks use {self._tiles_per_card}")
        self._tiles_per_card = tiles.common_tile_count(counts.values(), self._tiles_per_card)

    def readings(self, host: Host, devices: Iterable[Device]) -> DevicePlans:
        if self.config.wsl:
            return
        from accelplane.readings import gpu, pci  # noqa: PLC0415 - memory of agents without pages

        for name in dict.fromkeys(device.unit for device in devices if device.unit != MONITORING_ID):
            card = pci.canonical(host, f"{self._scope.places.drm}/{name}")
            path = pci.canonical(host, f"{card}/device")
            yield pci.plan(host, name, path, gpu.sources(host, card, path))
