"""The result of one complete scan of a plugin."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from accelplane.devices.device import HEALTHY, UNHEALTHY, Device, Resource, Skipped
from accelplane.devices.names import check_device_id, check_resource_name, natural
from accelplane.devices.unit import ATTRIBUTE_TYPES


class Inventory(Struct, frozen=True):
    """Devices by resource name (without namespace) and ID, both in natural order, and the skipped hardware."""

    resources: Mapping[str, Mapping[str, Device]] = {}
    skipped: tuple[Skipped, ...] = ()

    @classmethod
    def of(cls, namespace: str, found: Iterable[Device | Resource | Skipped]) -> "Inventory":
        """The inventory of a scan.

        A device with a name that a kubelet would refuse, with the ID of an earlier one that differs, or with another
        invalid value, becomes `Skipped`.
        """
        resources: dict[str, dict[str, Device]] = {}
        skipped: list[Skipped] = []
        for item in found:
            if isinstance(item, Skipped):
                skipped.append(item)
                continue
            if not isinstance(item, (Device, Resource)):  # pyright: ignore[reportUnnecessaryIsInstance]
                reason = "scan yielded it, expected a Device, Resource or Skipped"
                skipped.append(Skipped(ascii(item)[:82], reason, warning=True))
                continue
            resource = item.name if isinstance(item, Resource) else item.resource
            try:
                if resource not in resources:
                    check_resource_name(namespace, resource)
                if isinstance(item, Device):
                    check_device_id(item.id)
                    _check_values(item)
                    earlier = resources.get(resource, {}).get(item.id)
                    if earlier is not None and earlier != item:
                        raise ValueError(f"scan yielded two devices with this id of the resource {resource}")
            except (ValueError, TypeError) as error:
                subject = item.name if isinstance(item, Resource) else item.id
                skipped.append(Skipped(ascii(subject)[:82], str(error), warning=True))
                continue
            devices = resources.setdefault(resource, {})
            if isinstance(item, Device):
                devices[item.id] = item
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


def _check_values(device: Device) -> None:
    """Raises `ValueError` that names the field: plugins of third parties are not type-checked."""
    if device.health not in (HEALTHY, UNHEALTHY):
        raise ValueError(f"health is {device.health!a}, expected {HEALTHY!r} or {UNHEALTHY!r}")
    topology = device.topology if isinstance(device.topology, tuple) else ()
    if invalid := [node for node in topology if type(node) is not int or node < 0]:
        raise ValueError(f"topology has {invalid[0]!a}, expected numbers of NUMA nodes; None if there is none")
    for field, value in (("reason", device.reason), ("unit", device.unit), ("part", device.part)):
        if type(value) is not str:
            raise ValueError(f"{field} is {value!a}, expected a text")
    if device.path is not None and type(device.path) is not str:
        raise ValueError(f"path is {device.path!a}, expected a directory of sysfs; None if there are several")
    for name, value in device.attributes.items():
        if type(name) is not str or type(value) not in ATTRIBUTE_TYPES:
            raise ValueError(f"attribute {name!a} is {value!a}, expected a text, number, bool or Version")
    for name, value in device.capacities.items():
        if type(name) is not str or type(value) is not int or value < 0:
            raise ValueError(f"capacity {name!a} is {value!a}, expected a number from 0")


def _sort(resources: Mapping[str, Mapping[str, Device]]) -> dict[str, dict[str, Device]]:
    return {
        name: {key: resources[name][key] for key in sorted(resources[name], key=natural)}
        for name in sorted(resources, key=natural)
    }
