"""The generic plugin: resources from configuration."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from accelplane.devices import Allocation, Device, HealthPolicy, Verdict
from accelplane.host import Host, HostError
from accelplane.host.drivers import VFIO_PCI, driver_of
from accelplane.plugins.base import Plugin, Sample, ScanResult, Watch
from accelplane.plugins.binding import Binder
from accelplane.plugins.generic.commands import Check, CommandSource
from accelplane.plugins.generic.config import GenericConfig, Path
from accelplane.plugins.generic.paths import directory_of
from accelplane.plugins.generic.pci import in_use, selected
from accelplane.plugins.generic.scan import CDI_CLASS, find, scan
from accelplane.plugins.policies import preferred_ids

_PATTERN = "*?["
_FIRST_WAIT = 0.8  # of the 1 s for new units


class GenericPlugin(Plugin[GenericConfig]):
    """Publishes the resources of the configuration, by default in the namespace `squat.ai`."""

    attribute_defaults = dict.fromkeys(
        ("kind", "name", "serial", "vendorId", "productId", "interface", "linkLayer", "nodeGuid", "firmware"), ""
    )

    def __init__(self, config: GenericConfig | None = None) -> None:
        super().__init__(config)
        self.namespace = self.config.domain
        self.cdi_kinds = (f"{self.config.domain}/{CDI_CLASS}",)  # pyright: ignore[reportAttributeAccessIssue]
        groups = list(self.config.groups)
        self.watch = Watch(
            # A scan without sysfs needs no uevents: inotify reports changes of /dev.
            directories=sorted({directory_of(path.path) for group in groups for path in group.paths if _is_plain(path)})
        )
        self._binds = [spec for group in groups for spec in group.pci if spec.bind]
        self._binder = Binder(VFIO_PCI, new_id=False)
        self._in_use: Mapping[str, str] = {}
        self._commands = CommandSource() if any(group.health for group in groups) else None
        self._allocations = Counter[str]()

    def overrides(self, hook: str) -> bool:
        needed = {
            "background": self._commands is not None,
            "health": self._commands is not None,
            "prepare": bool(self._binds),
        }
        return super().overrides(hook) and needed.get(hook, True)

    def prepare(self, host: Host) -> None:
        try:
            functions = {function.address for spec in self._binds for function in selected(host, spec)}
        except HostError:
            return  # the scan reports it, and finds the devices of other groups
        unbound = sorted(address for address in functions if driver_of(host, address) != VFIO_PCI)
        problems = {address: problem for address in unbound if (problem := in_use(host, address))}
        self._in_use = {address: f"not bound to {VFIO_PCI}: {problem}" for address, problem in problems.items()}
        addresses = [address for address in unbound if address not in problems]
        self._binder.bind(host, addresses)

    def scan(self, host: Host) -> ScanResult:
        checks: dict[str, Check] = {}
        yield from scan(host, self.config, lambda address: self._bind_problem(host, address), checks)
        if self._commands is not None:
            self._commands.set_checks(checks)

    async def background(self, host: Host, request_scan: Callable[[], None]) -> None:
        if self._commands is not None:
            await self._commands.run(request_scan)

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        return await self._commands.first_verdicts(devices, _FIRST_WAIT) if self._commands is not None else {}

    @property
    def health_policy(self) -> HealthPolicy:
        # The thresholds of a command have been applied to its results. `background` requests a check for each verdict.
        return HealthPolicy(interval=60.0, good_verdicts=1, recovery_delay=0.0)

    async def preferred_allocation(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int, in_use: Mapping[str, int]
    ) -> Sequence[str]:
        return preferred_ids(self.config.allocation_policy, available, must_include, size, in_use)

    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Allocation:
        for parts in (
            {(node.container_path, node.host_path) for device in devices for node in device.nodes},
            {(mount.container_path, mount.host_path) for device in devices for mount in device.mounts},
        ):
            twice = [place for place, count in Counter(place for place, _file in parts).items() if count > 1]
            if twice:
                files = ", ".join(sorted(file for place, file in parts if place == twice[0]))
                raise ValueError(
                    f"{twice[0]}: found {files} for this path in the container, expected one of them; request one "
                    "device of the resource, or remove mountPath"
                )
        self._allocations.update({device.resource for device in devices})
        names = dict.fromkeys(name for device in devices for name in device.envs)
        envs = {
            name: ",".join(dict.fromkeys(device.envs[name] for device in devices if device.envs.get(name)))
            for name in names
        }
        return replace(allocation, envs=envs)

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterator[Sample]:
        """The metrics of squat's generic-device-plugin."""
        numbers = Counter(device.resource for device in devices)
        for spec in self.config.devices:
            labels = {"resource": f"{self.namespace}/{spec.name}"}
            description = "The number of devices managed by this device plugin."
            yield Sample("generic_device_plugin_devices", description, labels, float(numbers[spec.name]))
        for spec in self.config.devices:
            labels = {"resource": f"{self.namespace}/{spec.name}"}
            description = "The total number of device allocations made by this device plugin."
            value = float(self._allocations[spec.name])
            yield Sample("generic_device_plugin_allocations_total", description, labels, value)

    def explain(self, host: Host) -> Mapping[str, object]:
        """The number of devices that each group of a resource has found."""
        return {
            spec.name: [
                len(find(host, spec.name, group, lambda address: self._bind_problem(host, address)).matches)
                for group in spec.groups
            ]
            for spec in self.config.devices
        }

    def _bind_problem(self, host: Host, address: str) -> str:
        """Why the function is not bound; what would prevent it if this process binds nothing."""
        return self._in_use.get(address) or self._binder.problem(host, address) or in_use(host, address)


def _is_plain(path: Path) -> bool:
    return not any(character in path.path for character in _PATTERN)
