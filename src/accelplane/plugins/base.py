"""The base class of plugins.

A plugin subclasses `Plugin`, sets `namespace` and implements `scan`: a function from the host to its devices. Two calls
on the same file tree return equal results: a scan depends on no clock, no network and no kubelet. All other hooks have
defaults. The agent calls the hooks; a plugin never calls the agent.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeAlias, TypeVar, get_args

import msgspec

from accelplane.devices import Allocation, Attribute, Device, HealthPolicy, Resource, Skipped, Verdict
from accelplane.host import Host

if TYPE_CHECKING:
    from accelplane.readings import DevicePlan


class Config(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """Base class of a plugin's options. Each option is a typed field with a default.

    The fields define the command-line flags (`shared_dev_num` is `-shared-dev-num`), the keys of the agent's YAML file
    and the help: the `description` of an `Annotated[..., msgspec.Meta(description=...)]`. Fields of types other than
    str, int, float and bool can be set in YAML only. `__post_init__` validates; it raises `ValueError`.
    """

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Returns the options of a YAML mapping. Raises `msgspec.ValidationError` that names the invalid key."""
        return msgspec.convert(options, cls)


ConfigT_co = TypeVar("ConfigT_co", bound=Config, covariant=True)

ScanResult: TypeAlias = Iterable[Device | Resource | Skipped]
DevicePlans: TypeAlias = "Iterable[DevicePlan]"


class ScanError(Exception):
    """Raised if a scan cannot read the host. The last devices stay advertised while the agent retries."""


class Sample(msgspec.Struct, frozen=True):
    """One sample of the metrics page. `name` ends in the unit, or in `_total` for counters (Prometheus naming)."""

    name: str
    help: str
    labels: Mapping[str, str]
    value: float


class Watch(msgspec.Struct, frozen=True):
    """The triggers of a scan, in addition to changes of the directories that the last scan read through its `Host`.

    `subsystems` are those of uevents, all if empty. `directories` are watched for new and removed entries.
    """

    subsystems: frozenset[str] = frozenset()
    directories: Sequence[str] = ()


class HealthSource(Protocol):
    """A service or a set of files that shows the health of devices. A plugin delegates its hooks to it."""

    policy: HealthPolicy

    async def verdicts(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        """As `Plugin.health`."""
        ...

    async def run(self, host: Host, request_scan: Callable[[], None]) -> None:
        """Follows the service until cancelled, then closes the connection. As `Plugin.background`."""
        ...


T = TypeVar("T")


class PodsError(Exception):
    """Raised by `NodePods` if neither the kubelet nor the API server could be read; the message has the sources."""


class NodePods(Protocol):
    """The pods of this node, for a plugin that allocates devices as the pod says. Methods raise `PodsError`."""

    async def pods(self, project: Callable[[memoryview], T | None]) -> list[T]:
        """The results of `project` for the JSON of each pod, except None.

        A pod is skipped if `project` raises `msgspec.MsgspecError` or `ValueError`.
        """
        ...

    async def holders(self, resources: Collection[str]) -> Mapping[tuple[str, str], int]:
        """The number of containers that hold devices of the resources, for each pod by namespace and name.

        It includes pods without devices.
        """
        ...


class PodAllocator(Protocol):
    """Allocates devices as the pods of the node say. The kubelet's calls do not name the pod that they are for.

    It never fails a pod: where it has no answer, the default method applies.
    """

    async def preferred_allocation(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """As the kubelet's GetPreferredAllocation, for one container; empty without an answer."""
        ...

    async def allocate(self, ids: Sequence[str], devices: Callable[[], Mapping[str, Device]]) -> Allocation | None:
        """The allocation of one container, or None for the default method.

        `devices` returns those listed now. Devices may be unhealthy.
        """
        ...

    async def run(self) -> None:
        """Runs as a task for the lifetime of the plugin."""
        ...


class Plugin(Generic[ConfigT_co]):
    """Base class of plugins. Subclasses set `namespace`, implement `scan` and override other hooks if needed.

    `class TpuPlugin(Plugin[TpuConfig])` has its options in a `TpuConfig`; an option with the name `namespace` replaces
    the attribute. When the configuration changes the agent creates a new plugin object.
    """

    namespace: str
    config_type: ClassVar[type[Config]] = Config
    watch: Watch = Watch()
    # Seconds that a device which vanished stays listed as Unhealthy at least; with `math.inf` until it is back.
    # It stays listed longer while a container holds it.
    removal_delay: ClassVar[float] = 1.0
    # Whether no other plugin on a node serves resources of this namespace. IDs that containers hold then stay listed
    # after an agent restart even if the resource has no device left.
    exclusive_namespace: ClassVar[bool] = False
    # Kinds of CDI files that the agent removes when their device was removed and no pod uses them.
    cdi_kinds: ClassVar[Sequence[str]] = ()

    # Attributes and capacities that every device of the plugin has in ResourceSlices (DRA), with the value for a device
    # without it: a selector that reads a missing one ends the scheduling of a pod. At most 20, with names as those of
    # units: `serialNumber` for the attribute `serial-number`.
    attribute_defaults: ClassVar[Mapping[str, Attribute]] = {}
    capacity_defaults: ClassVar[Mapping[str, int]] = {}

    # The file of `labels`, which other programs know by this name. Without one the labels are published only if the
    # agent has a directory for them, in which the file then gets this base name, or a name of its own.
    label_file: ClassVar[str] = ""

    def __init__(self, config: ConfigT_co | None = None) -> None:
        self.config: ConfigT_co = config if config is not None else self.config_type()  # pyright: ignore[reportAttributeAccessIssue]
        namespace = getattr(self.config, "namespace", None)
        if isinstance(namespace, str):
            self.namespace = namespace

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in vars(cls).get("__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, Config):
                    cls.config_type = argument

    def scan(self, host: Host) -> ScanResult:
        """Yields the current devices of the host. Raises `ScanError` or `HostError` if it cannot read them."""
        raise NotImplementedError

    def socket_name(self, resource: str) -> str:
        """Returns the file name of a resource's socket in the kubelet's device plugin directory."""
        return f"{self.namespace}-{resource}.sock"

    # The agent calls the following hooks only if a subclass overrides them.

    async def refresh(self, host: Host) -> None:
        """Called before each scan: queries services whose answers `scan` needs. The deadline is 5 s.

        Any exception counts as a failed scan.
        """

    def prepare(self, host: Host) -> None:
        """Called before each scan, in its thread: configures the hardware, and stores state for later scans.

        This is the only hook that changes the node (`Host.write`, `bind`). It must not write what is already
        configured. Devices that it cannot configure are reported by `scan`. Any exception counts as a failed scan.
        Read-only commands (`-once`, `accelplane inspect`) do not call it.
        """

    async def background(self, host: Host, request_scan: Callable[[], None]) -> None:
        """Runs as a task for the lifetime of the plugin, for services that send notifications.

        `request_scan()` requests a scan and a health check.
        """

    def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict] | Awaitable[Mapping[str, Verdict]]:
        """Returns verdicts by unit. `devices` has one device of each unit. The deadline is 10 s.

        Called in a thread, unless it is a coroutine function (`async def`), which asks a service with asyncio.
        The health of units without a verdict does not change.
        """
        return {}

    def all_healthy(self, host: Host, devices: Sequence[Device]) -> bool:
        """Returns whether the devices are certainly healthy. It may block.

        If overridden, it is called in a thread in place of `health` while all units are healthy, at the same interval.
        `devices` has one device of each unit. After False `health` is called, which decides; it is also called once a
        minute, maybe at the same time.
        """
        return False

    @property
    def health_policy(self) -> HealthPolicy:
        """The number of verdicts that change the health."""
        return HealthPolicy()

    async def preferred_allocation(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int, in_use: Mapping[str, int]
    ) -> Sequence[str]:
        """Returns the `size` ids that a container should get; `ValueError` refuses with its text.

        `available` and `must_include` are in the order of the inventory, whatever the order of the kubelet's request.
        `in_use` maps a unit to the number of its healthy ids that are allocated: listed, but not available.
        `accelplane.plugins.policies.preferred_ids` implements the usual policies.
        """
        raise NotImplementedError

    async def allocate(self, devices: Sequence[Device]) -> Allocation | None:
        """Returns the allocation of one container, or None for the default. An exception fails the pod.

        Called again, like `post_allocate`, if a device was replaced by another one of the same ID during the call.
        """
        return None

    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Allocation:
        """Returns the final allocation of one container, given the default one. An exception fails the pod."""
        return allocation

    def pod_allocator(self, pods: NodePods) -> PodAllocator:
        """Returns an allocator that replaces the hooks above for the calls that it handles."""
        raise NotImplementedError

    async def pre_start(self, devices: Sequence[Device]) -> None:
        """Called before each start of a container that holds the devices. The deadline is 30 s.

        An exception fails the start.
        """

    def labels(self, devices: Iterable[Device]) -> Mapping[str, str]:
        """Returns node labels for the local source of NFD."""
        return {}

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterable[Sample]:
        """Returns samples for the metrics page. Called for each request of the page."""
        return ()

    def readings(self, host: Host, devices: Iterable[Device]) -> DevicePlans:
        """Returns the sources that the metrics pages read for each physical device.

        Called in a thread, before the first request of a page after a scan. It lists directories and reads no values.
        """
        return ()

    def explain(self, host: Host) -> Mapping[str, object]:
        """Returns plain values by name that explain why devices are present or missing.

        Called in a thread, once at the start (for the log) and by `-check`. It may take longer than a scan.
        """
        return {}

    def overrides(self, hook: str) -> bool:
        """Whether this plugin overrides the hook."""
        return getattr(type(self), hook) is not getattr(Plugin, hook)
