"""Small plugins for tests with configurable devices and failures."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from accelplane.devices import Device, DeviceNode, HealthPolicy, Resource, Skipped, Verdict
from accelplane.host import Host
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

GADGET = "example.com/gadget"


def gadget(key: str, **fields: object) -> Device:
    """A device of the resource `gadget` with one node; `fields` are more of `Device`'s own."""
    options = {"resource": "gadget", "nodes": (DeviceNode(f"/dev/{key}"),), "topology": None, **fields}
    return Device(id=key, **options)  # type: ignore[arg-type]


def gadgets(*keys: str) -> list[Device]:
    return [gadget(key) for key in keys]


class Table(Plugin[Config]):
    """Returns `found`; raises it if it is an exception, calls it if it is a function."""

    namespace = "example.com"

    def __init__(
        self, found: Iterable[Device | Resource | Skipped] | Exception | Callable[[], Iterable[Device]] = ()
    ) -> None:
        super().__init__()
        self.found = found

    def scan(self, host: Host) -> Iterable[Device | Resource | Skipped]:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found() if callable(self.found) else list(self.found)


class Other(Table):
    """A second family."""

    namespace = "other.example.com"


class Shelf(Plugin[Config]):
    """A device for each entry of `/dev/shelf`; the resource is the part of its name before the dash."""

    namespace = "shelf.example.com"

    def scan(self, host: Host) -> Iterable[Device]:
        if not host.exists("/dev/shelf"):
            return
        for name in host.names("/dev/shelf"):
            yield Device(resource=name.partition("-")[0], id=name, nodes=(DeviceNode(f"/dev/shelf/{name}"),))


class WithHealth(Table):
    """Returns `verdicts` by unit, or raises the exception among them; `checks` has the units of each call."""

    def __init__(self, found: Iterable[Device], policy: HealthPolicy | None = None) -> None:
        super().__init__(found)
        self.verdicts: dict[str, Verdict | Exception] = {}
        self.checks: list[tuple[str, ...]] = []
        self.policy = policy or HealthPolicy(recovery_delay=0.1)

    @property
    def health_policy(self) -> HealthPolicy:
        return self.policy

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        self.checks.append(tuple(device.unit for device in devices))
        for verdict in self.verdicts.values():
            if isinstance(verdict, Exception):
                raise verdict
        return {
            device.unit: verdict for device in devices if isinstance(verdict := self.verdicts.get(device.unit), Verdict)
        }


class Slow(Table):
    """A scan that takes `seconds`."""

    seconds = 0.05

    def scan(self, host: Host) -> Iterable[Device | Resource | Skipped]:
        time.sleep(self.seconds)
        return super().scan(host)
