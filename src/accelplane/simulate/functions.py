"""What the kernel shows of one PCI function: its directory, the class devices below it, and the links that lead there.

Each step is one function that writes through the device's journal; `tree` calls them in the kernel's order.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from accelplane.simulate.journal import Journal, Numbers, TreeError
from accelplane.simulate.specs import GpuSpec, Model

_DRM, _ACCEL, _MEI = 226, 261, 237  # the last is one of those that the kernel gives out as it likes
_CPUS_PER_NODE = 8


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One card or accelerator that is plugged in. Paths are the node's own, without the root.

    `path` is the PCI function's directory, `class_path` the device's own below it, `nodes` its files under `/dev`.
    `physical` names the card whose virtual function it is, if it is one.
    """

    name: str
    kind: Literal["gpu", "npu"]
    bdf: str
    driver: str
    numa_node: int
    path: str
    class_path: str
    nodes: tuple[str, ...]
    physical: str = ""


class ClassDevice(msgspec.Struct, frozen=True):
    """A device of a class, below the one that it belongs to. Without numbers it has no node."""

    path: str
    subsystem: str
    numbers: Numbers | None = None
    node: str = ""
    devtype: str = ""


def drm_minors(device: SimulatedDevice) -> list[ClassDevice]:
    """The card and its render node."""
    index = int(device.name.removeprefix("card"))
    # 64 cards have the old minors, later ones share the space after the render nodes'.
    minors = (index, 128 + index) if index < 64 else (192 + 2 * (index - 64), 193 + 2 * (index - 64))
    return [
        ClassDevice(f"{device.path}/drm/{os.path.basename(node)}", "drm", Numbers(_DRM, minor), node, "drm_minor")
        for node, minor in zip(device.nodes, minors, strict=True)
    ]


def connectors(device: SimulatedDevice, outputs: Sequence[str]) -> list[ClassDevice]:
    """The card's sockets for displays."""
    return [
        ClassDevice(f"{device.class_path}/{device.name}-{output}", "drm", devtype="drm_connector") for output in outputs
    ]


def accel_minor(device: SimulatedDevice) -> ClassDevice:
    """The NPU's only one."""
    minor = int(device.name.removeprefix("accel"))
    return ClassDevice(device.class_path, "accel", Numbers(_ACCEL, minor), device.nodes[0], "accel_minor")


def mei_device(device: SimulatedDevice, number: int) -> ClassDevice:
    """The firmware's interface, on an auxiliary device that the kernel numbers by the function's place on its bus."""
    domain, bus, place = device.bdf.split(":")
    slot, function = place.split(".")
    place_number = int(domain, 16) << 16 | int(bus, 16) << 8 | int(slot, 16) << 3 | int(function)
    path = f"{device.path}/{device.driver}.mei-gscfi.{place_number}/mei/mei{number}"
    return ClassDevice(path, "mei", Numbers(_MEI, number), f"/dev/mei{number}")


def make_function(journal: Journal, device: SimulatedDevice, model: Model, more: Mapping[str, str]) -> None:
    """The function's own directory with its attributes."""
    attributes = pci_attributes(device.bdf, model, device.numa_node, device.driver)
    journal.directory(device.path, {**attributes, **more})
    journal.link(f"{device.path}/subsystem", "/sys/bus/pci")
    journal.link(f"{device.path}/driver", f"/sys/bus/pci/drivers/{device.driver}")


def make_class_device(journal: Journal, made: ClassDevice, more: Mapping[str, str] | None = None) -> None:
    """A class device's directory; nobody is led there yet."""
    lines: list[str] = []
    files: dict[str, str] = dict(more or {})
    if made.numbers:
        lines = [f"MAJOR={made.numbers.major}", f"MINOR={made.numbers.minor}", f"DEVNAME={made.node[len('/dev/') :]}"]
        files["dev"] = str(made.numbers)
    if made.devtype:
        lines.append(f"DEVTYPE={made.devtype}")
    journal.directory(made.path, {**files, "uevent": "\n".join(lines)})
    parent = os.path.dirname(made.path)
    if os.path.basename(parent) == made.subsystem:
        # Below a device of another kind a class's devices have a directory of their own. The kernel writes this link
        # up to the directory that holds the parent and down to it again; its last part is the PCI address.
        owner = os.path.dirname(parent)
        journal.link_as(f"{made.path}/device", f"../../../{os.path.basename(owner)}")
    else:
        journal.link_as(f"{made.path}/device", f"../../{os.path.basename(parent)}")
    journal.link(f"{made.path}/subsystem", f"/sys/class/{made.subsystem}")


def make_bus_links(journal: Journal, device: SimulatedDevice) -> None:
    """The function among those of the bus and of its driver."""
    journal.link(f"/sys/bus/pci/devices/{device.bdf}", device.path)
    journal.link(f"/sys/bus/pci/drivers/{device.driver}/{device.bdf}", device.path)


def make_class_links(journal: Journal, made: ClassDevice) -> None:
    """The ways to a class device by its number and by its name."""
    if made.numbers:
        journal.link(f"/sys/dev/char/{made.numbers}", made.path)
    journal.link(f"/sys/class/{made.subsystem}/{os.path.basename(made.path)}", made.path)


def make_node(journal: Journal, made: ClassDevice) -> None:
    """The class device's file under `/dev`."""
    if made.numbers:
        journal.node(made.node, made.numbers)


def make_by_path(journal: Journal, device: SimulatedDevice) -> None:
    """udev's links to the DRM nodes."""
    for node, kind in zip(device.nodes, ("card", "render"), strict=True):
        journal.link(f"/dev/dri/by-path/pci-{device.bdf}-{kind}", node)


def pci_attributes(bdf: str, model: Model, numa_node: int, driver: str) -> dict[str, str]:
    """The attributes that every PCI function has."""
    first = max(numa_node, 0) * _CPUS_PER_NODE
    device, cls = model.device_id[2:].upper(), model.pci_class[2:].upper()
    alias = f"pci:v00008086d0000{device}sv00008086sd00000000bc{cls[:2]}sc{cls[2:4]}i{cls[4:]}"
    uevent = {
        "DRIVER": driver,
        "PCI_CLASS": cls.lstrip("0"),
        "PCI_ID": f"8086:{device}",
        "PCI_SUBSYS_ID": "8086:0000",
        "PCI_SLOT_NAME": bdf,
        "MODALIAS": alias,
    }
    return {
        "vendor": "0x8086",
        "device": model.device_id,
        "class": model.pci_class,
        "subsystem_vendor": "0x8086",
        "subsystem_device": "0x0000",
        "revision": "0x08",
        "enable": "1",
        "numa_node": str(numa_node),
        "local_cpulist": f"{first}-{first + _CPUS_PER_NODE - 1}",
        "modalias": alias,
        "uevent": "\n".join(f"{key}={value}" for key, value in uevent.items()),
    }


def function_tiles(spec: GpuSpec) -> dict[str, str]:
    """The xe driver shows tiles and memory below the PCI function."""
    files: dict[str, str] = {}
    if spec.driver == "xe":
        for tile in range(spec.tiles):
            files[f"tile{tile}/gt{tile}/freq0/max_freq"] = "2400"
            if spec.memory:
                files[f"tile{tile}/physical_vram_size_bytes"] = f"0x{spec.memory:016x}"
    return files


def card_tiles(spec: GpuSpec) -> dict[str, str]:
    """The i915 driver shows tiles and memory below the card."""
    files: dict[str, str] = {}
    if spec.driver == "i915":
        files |= {f"gt/gt{tile}/id": str(tile) for tile in range(spec.tiles)}
        if spec.memory:
            files["lmem_total_bytes"] = str(spec.memory)
    return files


def virtual_address(physical: str, number: int) -> str:
    """The address of a virtual function: the places on the bus after the physical one."""
    bus, _colon, place = physical.rpartition(":")
    slot, _dot, function = place.partition(".")
    routing = (int(slot, 16) << 3 | int(function)) + 1 + number
    if routing > 0xFF:
        raise TreeError(f"{physical}: no place for virtual function {number} on its bus")
    return f"{bus}:{routing >> 3:02x}.{routing & 7}"
