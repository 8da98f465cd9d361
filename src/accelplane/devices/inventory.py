"""An inventory is one complete scan of one plugin; the difference of two inventories is what publishers act on."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from accelplane.devices.device import Device, Resource, Skipped
from accelplane.devices.names import (
    DeviceIdError,
    ResourceNameError,
    check_device_id,
    check_resource_name,
    natural,
)


class Inventory(Struct, frozen=True):
    """Resource name (without namespace) to device id to device, both in natural order, and what was passed over."""

    resources: Mapping[str, Mapping[str, Device]] = {}
    skipped: tuple[Skipped, ...] = ()

    @classmethod
    def of(cls, namespace: str, found: Iterable[Device | Resource | Skipped]) -> "Inventory":
        """Sorts what a scan found. Names that a kubelet would refuse become `Skipped`; of two devices with one id
        the later one stays."""
        resources: dict[str, dict[str, Device]] = {}
        skipped: list[Skipped] = []
        for item in found:
            if isinstance(item, Skipped):
                skipped.append(item)
                continue
            resource = item.name if isinstance(item, Resource) else item.resource
            try:
                if resource not in resources:
                    check_resource_name(namespace, resource)
                if isinstance(item, Device):
                    check_device_id(item.id)
            except (ResourceNameError, DeviceIdError) as error:
                subject = item.name if isinstance(item, Resource) else item.id
                skipped.append(Skipped(ascii(subject[:80]), str(error), warning=True))
                continue
            devices = resources.setdefault(resource, {})
            if isinstance(item, Device):
                devices[item.id] = item
        return cls(_ordered(resources), tuple(skipped))

    def __iter__(self) -> Iterator[Device]:
        for devices in self.resources.values():
            yield from devices.values()

    def __len__(self) -> int:
        return sum(len(devices) for devices in self.resources.values())

    def replaced(self, devices: Iterable[Device]) -> "Inventory":
        """This inventory with the given devices added or put in the place of those with the same id."""
        resources = {name: dict(known) for name, known in self.resources.items()}
        for device in devices:
            resources.setdefault(device.resource, {})[device.id] = device
        return replace(self, resources=_ordered(resources) if _grown(self.resources, resources) else resources)


class Changes(Struct, frozen=True):
    """What differs between two inventories, per resource: complete lists for added and updated, names for removed."""

    added: Mapping[str, Mapping[str, Device]]
    updated: Mapping[str, Mapping[str, Device]]
    removed: frozenset[str]

    @classmethod
    def between(cls, old: Inventory, new: Inventory) -> "Changes":
        """Equality is over every field of every device; one changed field makes its whole resource updated."""
        before, after = old.resources, new.resources
        return cls(
            added={name: after[name] for name in after.keys() - before.keys()},
            updated={name: after[name] for name in after.keys() & before.keys() if after[name] != before[name]},
            removed=frozenset(before.keys() - after.keys()),
        )

    def __bool__(self) -> bool:
        return bool(self.added or self.updated or self.removed)


def _ordered(resources: Mapping[str, Mapping[str, Device]]) -> dict[str, dict[str, Device]]:
    return {
        name: {key: resources[name][key] for key in sorted(resources[name], key=natural)}
        for name in sorted(resources, key=natural)
    }


def _grown(old: Mapping[str, Mapping[str, Device]], new: Mapping[str, Mapping[str, Device]]) -> bool:
    return len(old) != len(new) or any(len(old[name]) != len(new[name]) for name in new)
