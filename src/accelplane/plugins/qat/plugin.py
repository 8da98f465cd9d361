"""The QAT plugin: virtual functions for user-space drivers (dpdk mode), or instances in the kernel (kernel mode)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from accelplane.devices import Allocation, Device, HealthPolicy, Verdict, natural
from accelplane.host import Host, HostError
from accelplane.plugins.base import DevicePlans, Plugin, Sample, ScanResult, Watch
from accelplane.plugins.binding import Binder
from accelplane.plugins.policies import preferred_ids
from accelplane.plugins.qat import kernelmode
from accelplane.plugins.qat.config import QatConfig
from accelplane.plugins.qat.health import HeartbeatSource
from accelplane.plugins.qat.scan import Discovery, Pf, debugfs, discover, scan
from accelplane.plugins.vfio import number_variables


class QatPlugin(Plugin[QatConfig]):
    """Publishes `qat.intel.com/cy`, `/dc`, `/sym`, `/asym-dc`, `/generic` and so on."""

    namespace = "qat.intel.com"
    exclusive_namespace = True
    watch = Watch(frozenset(("pci", "drivers")))

    def __init__(self, config: QatConfig | None = None) -> None:
        super().__init__(config)
        self._kernel_mode = self.config.mode == "kernel"
        self._status = ""
        self._binder = Binder(
            self.config.dpdk_driver,
            new_id=self.config.new_id != "never",
            ids=self.config.vf_ids if self.config.new_id == "always" else (),
        )
        self._prepared: tuple[Host, Discovery] | None = None  # read by `prepare` for the next scan
        self._heartbeat = HeartbeatSource()
        self._unknown: Mapping[str, bool] = {}

    async def refresh(self, host: Host) -> None:
        if self._kernel_mode:
            self._status = await kernelmode.status()

    def prepare(self, host: Host) -> None:
        if not self._kernel_mode:
            found = discover(host, self.config)
            self._binder.bind(host, [vf.address for vf in found.vfs])
            self._prepared = host, found

    def scan(self, host: Host) -> ScanResult:
        self._heartbeat.reopen()
        if self._kernel_mode:
            return kernelmode.scan(host, self._status)
        (prepared, found), self._prepared = self._prepared or (None, None), None
        if prepared is not host or found is None:
            found = discover(host, self.config)
        return scan(host, self.config, found, partial(self._binder.problem, host))

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        verdicts = await self._heartbeat.verdicts(host, devices)
        self._unknown = {**self._unknown, **{unit: verdict.answer == "unknown" for unit, verdict in verdicts.items()}}
        return verdicts

    def all_healthy(self, host: Host, devices: Sequence[Device]) -> bool:
        return self._heartbeat.all_good(host, devices)

    def overrides(self, hook: str) -> bool:
        return super().overrides(hook) and (hook not in ("health", "all_healthy") or not self._kernel_mode)

    @property
    def health_policy(self) -> HealthPolicy:
        return self._heartbeat.policy

    async def preferred_allocation(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int, in_use: Mapping[str, int]
    ) -> Sequence[str]:
        return preferred_ids(self.config.allocation_policy, available, must_include, size, in_use)

    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Allocation:
        if self._kernel_mode:
            return kernelmode.renumber_sections(allocation)
        return number_variables("QAT", devices, allocation)

    def readings(self, host: Host, devices: Iterable[Device]) -> DevicePlans:
        from accelplane.readings import pci, qat  # noqa: PLC0415 - memory of agents without pages

        for unit in dict.fromkeys(device.unit for device in devices):
            path = pci.directory(unit)
            if not host.exists(path):
                continue  # virtual functions in a virtual machine: their device is not visible
            path = pci.canonical(host, path)
            try:
                tables = debugfs(host, Pf(unit, pci.directory(unit)))
            except HostError:
                tables = ""
            yield pci.plan(host, unit, path, qat.sources(host, path, tables), {"function": "pf"})

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterator[Sample]:
        if self._kernel_mode:
            return
        vfs = Counter((device.unit, device.resource) for device in devices)
        for (unit, resource), count in sorted(vfs.items(), key=lambda item: (natural(item[0][0]), item[0][1])):
            labels = {"device": unit, "resource": resource}
            yield Sample("qat_virtual_functions", "Virtual functions published of a QAT device", labels, float(count))
        for unit in sorted({unit for unit, _resource in vfs} & self._unknown.keys(), key=natural):
            description = "1 while the health of a QAT device is unknown"
            yield Sample("qat_health_unknown", description, {"device": unit}, float(self._unknown[unit]))
