"""The GPU plugin: Intel GPUs behind i915 and xe, and behind /dev/dxg in Windows' Linux."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from accelplane.devices import Allocation, Device, HealthPolicy, Resource, Skipped, Verdict
from accelplane.host import Host
from accelplane.plugins.base import Plugin, ScanError, Watch
from accelplane.plugins.gpu.config import GpuConfig
from accelplane.plugins.gpu.health import LevelZeroJudge, xpumd_verdicts
from accelplane.plugins.gpu.scan import AFFINITY_MASK, CDI_KIND, Scope, scan, wsl_devices
from accelplane.plugins.policies import preferred

if TYPE_CHECKING:
    from accelplane.sidecars.levelzero import LevelZero
    from accelplane.sidecars.xpumd import Xpumd

LEVELZERO_SOCKET = "/var/lib/levelzero/server.sock"


class GpuPlugin(Plugin[GpuConfig]):
    """Publishes `gpu.intel.com/i915`, `/xe`, `/dxg` and the monitoring resources."""

    namespace = "gpu.intel.com"
    owns_namespace = True
    config_type = GpuConfig
    cdi_kinds = (CDI_KIND,)

    def __init__(self, config: GpuConfig | None = None) -> None:
        super().__init__(config)
        self._judge = LevelZeroJudge(self.config)
        self._indices: Sequence[int] = ()
        self._levelzero: LevelZero | None = None
        self._xpumd: Xpumd | None = None
        self._scope = Scope.of(self.config)
        places = self._scope.places
        self.watch = (
            Watch(frozenset(("misc",)))  # /dev/dxg; GPUs behind it come and go with the service's answers
            if self.config.wsl
            else Watch(frozenset(("drm", "pci", "mei")), (places.drm, places.dri, places.by_path))
        )

    def scan(self, host: Host) -> Iterable[Device | Resource | Skipped]:
        return wsl_devices(self._indices, self.config) if self.config.wsl else scan(host, self._scope)

    async def refresh(self, host: Host) -> None:
        if not self.config.wsl:
            return
        from accelplane.sidecars.levelzero import LevelZeroError  # noqa: PLC0415 gRPC is loaded only when it is used

        try:
            self._indices = await self._ask_levelzero(host).indices()
        except LevelZeroError as error:
            raise ScanError(str(error)) from error

    async def background(self, host: Host, request_scan: Callable[[], None]) -> None:
        config = self.config
        try:
            if config.xpumd_endpoint:
                await self._ask_xpumd().follow(request_scan)
            elif config.health_management or config.wsl:
                await self._ask_levelzero(host).follow(request_scan)
        finally:
            self._close()

    def overrides(self, hook: str) -> bool:
        # Without a service to ask nobody need wake to ask it.
        asks = self.config.xpumd_endpoint or self.config.health_management
        return super().overrides(hook) and (hook != "health" or bool(asks))

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        if self.config.xpumd_endpoint:
            return xpumd_verdicts(self._ask_xpumd(), devices)
        if self.config.health_management:
            return await self._judge.verdicts(self._ask_levelzero(host), devices, host.note)
        return {}

    @property
    def health_policy(self) -> HealthPolicy:
        return HealthPolicy(bad_verdicts=self.config.health_bad_verdicts, fail_closed=self.config.health_fail_closed)

    async def preferred_allocation(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int, in_use: Mapping[str, int]
    ) -> Sequence[str]:
        return preferred(self.config.allocation_policy, available, must_include, size, in_use)

    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Allocation:
        indices = {int(device.envs[AFFINITY_MASK]) for device in devices if AFFINITY_MASK in device.envs}
        if not indices:
            return allocation
        mask = ",".join(map(str, sorted(indices)))
        return replace(allocation, envs={**allocation.envs, AFFINITY_MASK: mask})

    def _ask_levelzero(self, host: Host) -> "LevelZero":
        if self._levelzero is None:
            from accelplane.sidecars.levelzero import LevelZero  # noqa: PLC0415 gRPC is loaded only when it is used

            self._levelzero = LevelZero(host.local(LEVELZERO_SOCKET))
        return self._levelzero

    def _ask_xpumd(self) -> "Xpumd":
        if self._xpumd is None:
            from accelplane.sidecars.xpumd import Xpumd  # noqa: PLC0415 gRPC is loaded only when it is used

            self._xpumd = Xpumd(self.config.xpumd_endpoint)
        return self._xpumd

    def _close(self) -> None:
        for service in (self._levelzero, self._xpumd):
            if service is not None:
                service.close()
        self._levelzero = self._xpumd = None
