"""What a plugin is.

A plugin subclasses `Plugin`, names its `namespace` and writes `scan`: a plain function from the host to its devices.
Called twice on the same tree it returns equal results; it knows no clock, no network and no kubelet. Everything else
has a default here. The agent calls the hooks; a plugin never calls the agent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeAlias, TypeVar, get_args

import msgspec

from accelplane.devices import Allocation, Device, HealthPolicy, Resource, Skipped, Verdict, natural
from accelplane.host import Host


class Config(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """Base of a plugin's options, each declared once as a typed field with a default.

    From the fields come the command-line flags (`shared_dev_num` is `-shared-dev-num`), the keys of the agent's YAML
    file and the help: the `description` of an `Annotated[..., msgspec.Meta(description=...)]`. Fields of other types
    than str, int, float and bool can be set in YAML only. What must hold between fields is checked in `__post_init__`,
    which raises `ValueError`.
    """

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """From the plain values of a YAML mapping. Raises `msgspec.ValidationError` naming the key and its fault."""
        return msgspec.convert(options, cls)


ConfigT_co = TypeVar("ConfigT_co", bound=Config, covariant=True)

# What a scan yields.
Found: TypeAlias = Iterable[Device | Resource | Skipped]


class ScanError(Exception):
    """Raised by a scan that could not see: the devices found last stay advertised while it is tried again."""


class Sample(msgspec.Struct, frozen=True):
    """One reading for the metrics page: `name` ends in its unit, `_total` for counters (Prometheus naming)."""

    name: str
    help: str
    labels: Mapping[str, str]
    value: float


class Watch(msgspec.Struct, frozen=True):
    """What makes the agent look again, besides everything that the last scan read through its `Host`.

    `subsystems` of uevents that matter, all of them when empty; `directories` to watch for entries that come and go.
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


class Plugin(Generic[ConfigT_co]):
    """Base class of plugins. Subclasses set `namespace`, write `scan`, and override hooks where the default won't do.

    `class TpuPlugin(Plugin[TpuConfig])` has its options in a `TpuConfig`; an option that is called `namespace` is the
    namespace. A plugin object lives as long as its configuration: when that changes the agent makes a new one.
    """

    namespace: str
    config_type: ClassVar[type[Config]] = Config
    watch: Watch = Watch()
    # Seconds that a device which vanished stays in the kubelet's list, unhealthy; for ever with `math.inf`.
    linger: ClassVar[float] = 1.0
    # Kinds whose CDI files are this plugin's own: those without a device are removed when no pod uses them.
    cdi_kinds: ClassVar[Sequence[str]] = ()

    def __init__(self, config: ConfigT_co | None = None) -> None:
        self.config: ConfigT_co = config if config is not None else self.config_type()  # pyright: ignore[reportAttributeAccessIssue]
        chosen = getattr(self.config, "namespace", None)
        if isinstance(chosen, str):
            self.namespace = chosen

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in vars(cls).get("__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, Config):
                    cls.config_type = argument

    def scan(self, host: Host) -> Found:
        """Everything this family has on the host, now. Raises `ScanError` or `HostError` when it cannot see."""
        raise NotImplementedError

    def socket_name(self, resource: str) -> str:
        """The file name of a resource's socket in the kubelet's directory."""
        return f"{self.namespace}-{resource}.sock"

    # What follows is called only where a subclass overrides it.

    async def refresh(self, host: Host) -> None:
        """Called before each scan: asks services for what files don't tell, for `scan` to use. Has 5 s.

        Whatever it raises counts as a failed scan.
        """

    def prepare(self, host: Host) -> None:
        """Called before each scan, in its thread: brings the hardware into the state that `scan` is to find.

        The one hook that changes the node (`Host.write`, `bind`). What is right already must stay untouched, and what
        cannot be had is for `scan` to tell of. What a later scan has to know of this one is remembered here, too.
        Whatever it raises counts as a failed scan. Nobody calls it where the node is only looked at (`-once`,
        `accelplane inspect`).
        """

    async def background(self, host: Host, request_scan: Callable[[], None]) -> None:
        """Runs beside the agent as long as the plugin does, for services that tell by themselves.

        `request_scan()` requests a scan and a health check.
        """

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        """Verdicts by unit name, asked for one device of each unit; units left out are not judged. Has 10 s."""
        return {}

    @property
    def health_policy(self) -> HealthPolicy:
        """How verdicts become health."""
        return HealthPolicy()

    async def preferred_allocation(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int
    ) -> Sequence[str]:
        """The ids that a container asking for `size` devices gets best; both lists are in natural order."""
        raise NotImplementedError

    async def allocate(self, devices: Sequence[Device]) -> Allocation | None:
        """Replaces the framework's answer for one container; None asks for it after all. An error fails the pod."""
        return None

    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Allocation:
        """Last word on the framework's answer for one container. An error fails the pod."""
        return allocation

    async def pre_start(self, devices: Sequence[Device]) -> None:
        """Called before each start of a container that holds the devices, has 30 s. An error fails the start."""

    def labels(self, devices: Iterable[Device]) -> Mapping[str, str]:
        """Node labels for NFD's local source, as `key: value`."""
        return {}

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterable[Sample]:
        """Readings for the metrics page, taken when it is asked for."""
        return ()

    def explain(self, host: Host) -> Mapping[str, object]:
        """What helps people to understand what was found or why it was not, as plain values by name.

        Called once at the start, for the log, and by `-check`; in a thread. It may take longer than a scan.
        """
        return {}

    def overrides(self, hook: str) -> bool:
        """Whether this plugin brings its own `hook`."""
        return getattr(type(self), hook) is not getattr(Plugin, hook)


def by_unit(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """Devices grouped by the physical unit behind them, units and devices in natural order."""
    groups: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda device: (natural(device.unit), natural(device.id))):
        groups.setdefault(device.unit, []).append(device)
    return groups
