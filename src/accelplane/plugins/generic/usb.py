"""USB devices in sysfs: their descriptors, their node below /dev/bus/usb, and the nodes of their interfaces.

Kernel document: Documentation/ABI/stable/sysfs-bus-usb. A device is named by its bus and the ports that lead to it,
such as 1-4.2, which is the same after a reboot.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from accelplane.devices import Attribute, DeviceNode, Skipped
from accelplane.host import Host, HostError
from accelplane.plugins.generic.config import Group, Usb, normal_id
from accelplane.plugins.generic.match import Found, Match, joined, printable

DEVICES = "/sys/bus/usb/devices"

_NAME = re.compile(r"usb[0-9]{1,5}|[0-9]{1,5}-[0-9]{1,3}(\.[0-9]{1,3}){0,6}")
_NUMBER = re.compile(r"[0-9]{1,3}")
# The kernel names nodes in directories with a slash: snd/pcmC0D0c.
_PART = r"[A-Za-z0-9_.:-]*[A-Za-z0-9]"
_DEVNAME = re.compile(rf"^DEVNAME=({_PART}(?:/{_PART})*)$", re.MULTILINE)
_MAX_DEPTH = 16


class UsbDevice(Struct, frozen=True):
    """A USB device: its name (`1-4.2`), its directory without links, and its descriptors."""

    name: str
    path: str
    vendor: str
    product: str
    serial: str
    model: str
    node: str

    @property
    def part(self) -> str:
        """The name of the device as a part of the PCI function of its controller."""
        return f"usb{self.name}"

    @property
    def attributes(self) -> dict[str, Attribute]:
        found = {"kind": "usb", "vendor-id": self.vendor, "product-id": self.product}
        return {**found, **{key: text for key, text in (("serial", self.serial), ("product", self.model)) if text}}


def find(host: Host, name: str, group: Group) -> Found:
    """The matches of a group of USB devices: one for all that are not `separate`, and one for each that is."""
    skipped: list[Skipped] = []
    together: list[tuple[UsbDevice, list[DeviceNode]]] = []
    matches: list[Match] = []
    present = list(_present(host, {spec.vendor for spec in group.usb}))
    for spec in group.usb:
        found = [each for each in present if _fits(spec, each)]
        if not found:
            skipped.append(Skipped(f"{name}: USB {_text_of(spec)}", "no such USB device"))
        for device in found:
            nodes = _nodes(host, spec, device)
            if missing := [node.host_path for node in nodes if not host.exists(node.host_path)]:
                skipped.append(Skipped(device.name, f"{missing[0]} does not exist", warning=True))
            elif not nodes:
                problem = f"has no device node of {', '.join(spec.subsystems)}"
                skipped.append(Skipped(device.name, problem, warning=True))
            elif spec.separate:
                matches.append(_match([(device, nodes)]))
            else:
                together.append((device, nodes))
    if together:
        only_bus = not any(spec.subsystems for spec in group.usb)
        matches.append(_match(together, hashed=only_bus))
    return Found(matches, skipped)


def usb_device_of(host: Host, path: str) -> UsbDevice | None:
    """The USB device that has the sysfs device, None if none has."""
    for _ in range(_MAX_DEPTH):
        name = path.rpartition("/")[2]
        if _NAME.fullmatch(name):
            return _read(host, name, path)
        path = path.rpartition("/")[0]
        if not path:
            break
    return None


def _present(host: Host, vendors: Iterable[str]) -> Iterator[UsbDevice]:
    wanted = {normal_id(vendor) for vendor in vendors}
    for name, path in host.class_devices("usb", bus=True):
        if _NAME.fullmatch(name) and host.text_or_empty(f"{path}/idVendor").lower() in wanted:
            try:
                real = host.resolve(path)
            except HostError as error:
                host.note(f"USB device {name} skipped: {error}")
                continue
            if device := _read(host, name, real):
                yield device


def _read(host: Host, name: str, path: str) -> UsbDevice | None:
    """The device in a directory, None if the directory has no descriptors."""
    vendor, product, bus, number = (
        host.text_or_empty(f"{path}/{file}").lower() for file in ("idVendor", "idProduct", "busnum", "devnum")
    )
    if not (vendor and product and _NUMBER.fullmatch(bus) and _NUMBER.fullmatch(number)):
        return None
    serial, model = (printable(host.text_or_empty(f"{path}/{file}")) for file in ("serial", "product"))
    return UsbDevice(name, path, vendor, product, serial, model, f"/dev/bus/usb/{int(bus):03d}/{int(number):03d}")


def _fits(spec: Usb, device: UsbDevice) -> bool:
    return (
        device.vendor == normal_id(spec.vendor)
        and normal_id(spec.product) in ("", device.product)
        and spec.serial in ("", device.serial)
    )


def _text_of(spec: Usb) -> str:
    product = normal_id(spec.product) or "*"
    return f"{normal_id(spec.vendor)}:{product}" + (f" with the serial number {spec.serial!a}" if spec.serial else "")


def _nodes(host: Host, spec: Usb, device: UsbDevice) -> list[DeviceNode]:
    """The nodes that the container gets, without those of USB devices behind a hub."""
    if not spec.subsystems:
        return [DeviceNode(device.node)]
    found: list[DeviceNode] = []
    for subsystem in spec.subsystems:
        for entry in host.class_devices(subsystem):
            try:
                path = host.resolve(entry.path)
            except HostError:
                continue
            if path.startswith(f"{device.path}/"):
                owner = usb_device_of(host, path)
                name = _DEVNAME.search(host.text_or_empty(f"{path}/uevent"))
                if owner is not None and owner.name == device.name and name:
                    found.append(DeviceNode(f"/dev/{name[1]}"))
    return found


def _match(members: Sequence[tuple[UsbDevice, Sequence[DeviceNode]]], *, hashed: bool = False) -> Match:
    nodes = tuple(dict.fromkeys(node for _device, nodes in members for node in nodes))
    devices = list({device.name: device for device, _nodes in members}.values())
    first = devices[0]
    values: Mapping[str, str] = {
        "path": nodes[0].host_path,
        "containerPath": nodes[0].container_path,
        "name": first.name,
        "serial": ",".join(dict.fromkeys(device.serial for device in devices if device.serial)),
        "address": "",
    }
    alone = len(devices) == 1
    return Match(
        unit=joined([device.name for device in devices]),
        hashed="".join(node.host_path for node in nodes) if hashed else "",
        nodes=nodes,
        path=first.path,
        part=joined([device.part for device in devices]),
        attributes=first.attributes if alone else {"kind": "usb"},
        values=values,
    )
