"""The result of one complete scan of a plugin."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from accelplane.devices.device import Device, Resource, Skipped
from accelplane.devices.names import natural


class Inventory(Struct, frozen=True):
    """Devices by resource name (without namespace) and ID, both in natural order, and the skipped hardware."""

    resources: Mapping[str, Mapping[str, Device]] = {}
    skipped: tuple[Skipped, ...] = ()

    @classmethod
    def of(cls, found: Iterable[Device | Resource | Skipped]) -> "Inventory":
        """The inventory of a scan whose devices are valid."""
        resources: dict[str, dict[str, Device]] = {}
        skipped: list[Skipped] = []
        for item in found:
            match item:
                case Device():
                    resources.setdefault(item.resource, {})[item.id] = item
                case Resource():
                    resources.setdefault(item.name, {})
                case Skipped():
                    skipped.append(item)
        return cls(_sort(resources), tuple(skipped))

    def __iter__(self) -> Iterator[Device]:
        for devices in self.resources.values():
            yield from devices.values()

    def __len__(self) -> int:
        return sum(len(devices) for devices in self.resources.values())

    def with_devices(self, devices: Iterable[Device]) -> "Inventory":
        """Returns a copy with the given devices, which replace those with the same ID."""
        resources = {name: dict(known) for name, known in self.resources.items()}
        for device in devices:
            resources.setdefault(device.resource, {})[device.id] = device
        old = self.resources
        equal = len(old) == len(resources) and all(len(old[name]) == len(known) for name, known in resources.items())
        return replace(self, resources=resources if equal else _sort(resources))


def _sort(resources: Mapping[str, Mapping[str, Device]]) -> dict[str, dict[str, Device]]:
    return {
        name: {key: resources[name][key] for key in sorted(resources[name], key=natural)}
        for name in sorted(resources, key=natural)
    }
