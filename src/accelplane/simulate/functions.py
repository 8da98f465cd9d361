"""The sysfs files of one PCI function: its directory, its class devices, and the links to them.

Each function performs one step and writes through the journal of the device. `tree` calls them in the kernel's order.
"""

import os
from collections.abc import Mapping
from typing import Literal

import msgspec

from accelplane.simulate.journal import Journal, Numbers, TreeError
from accelplane.simulate.specs import GpuSpec, Model

_DRM, _ACCEL, _MEI = 226, 261, 237  # the last one is dynamically allocated by the kernel
_CPUS_PER_NODE = 8


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One card or accelerator that is plugged in. Paths do not contain the root of the tree.

    `path` is the directory of the PCI function, `class_path` that of the class device, `nodes` are the device nodes.
    `physical` names the card of the physical function if the device is a virtual function.
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
    """A class device below its parent, with its attributes. Without `numbers` it has no device node."""

    path: str
    subsystem: str
    numbers: Numbers | None = None
    node: str = ""
    devtype: str = ""
    files: Mapping[str, str] = {}


def drm_minors(device: SimulatedDevice, files: Mapping[str, str]) -> list[ClassDevice]:
    """Returns the primary node, which has the files, and the render node of a card."""
    index = int(device.name.removeprefix("card"))
    # The first 64 cards have fixed minors. Later ones use the range after the render nodes.
    minors = (index, 128 + index) if index < 64 else (192 + 2 * (index - 64), 193 + 2 * (index - 64))
    return [
        ClassDevice(f"{device.path}/drm/{os.path.basename(node)}", "drm", Numbers(_DRM, minor), node, "drm_minor", more)
        for node, minor, more in zip(device.nodes, minors, (files, {}), strict=True)
    ]


def connector(device: SimulatedDevice, output: str) -> ClassDevice:
    files = {"status": "disconnected", "enabled": "disabled"}
    return ClassDevice(f"{device.class_path}/{device.name}-{output}", "drm", devtype="drm_connector", files=files)


def accel_minor(device: SimulatedDevice) -> ClassDevice:
    minor = int(device.name.removeprefix("accel"))
    return ClassDevice(device.class_path, "accel", Numbers(_ACCEL, minor), device.nodes[0], "accel_minor")


def mei_device(device: SimulatedDevice, number: int) -> ClassDevice:
    """Returns the MEI device, below an auxiliary device whose number the kernel derives from the PCI address."""
    domain, bus, place = device.bdf.split(":")
    slot, function = place.split(".")
    place_number = int(domain, 16) << 16 | int(bus, 16) << 8 | int(slot, 16) << 3 | int(function)
    path = f"{device.path}/{device.driver}.mei-gscfi.{place_number}/mei/mei{number}"
    files = {"kind": "gscfi"}
    return ClassDevice(path, "mei", Numbers(_MEI, number), f"/dev/mei{number}", files=files)


def make_function(
    journal: Journal, path: str, model: Model, numa_node: int, *, driver: str, files: Mapping[str, str]
) -> None:
    """Creates the directory of a function with its attributes."""
    fields = {"DRIVER": driver, **pci_uevent(os.path.basename(path), model)}
    journal.directory(path, {**pci_attributes(model, numa_node), "uevent": _join_fields(fields), **files})
    journal.link(f"{path}/subsystem", "/sys/bus/pci")


def make_class_device(journal: Journal, class_device: ClassDevice) -> None:
    """Creates the directory of a class device, without links to it."""
    fields: dict[str, str] = {}
    files = dict(class_device.files)
    if class_device.numbers:
        major, minor = map(str, class_device.numbers)
        fields = {"MAJOR": major, "MINOR": minor, "DEVNAME": class_device.node.removeprefix("/dev/")}
        files["dev"] = str(class_device.numbers)
    if class_device.devtype:
        fields["DEVTYPE"] = class_device.devtype
    journal.directory(class_device.path, {**files, "uevent": _join_fields(fields)})
    parent = os.path.dirname(class_device.path)
    if os.path.basename(parent) == class_device.subsystem:
        # Class devices below a device of another kind are in a directory with the name of the class. The kernel
        # writes this link relative to the parent's directory; its last component is the PCI address.
        owner = os.path.dirname(parent)
        journal.link_as(f"{class_device.path}/device", f"../../../{os.path.basename(owner)}")
    else:
        journal.link_as(f"{class_device.path}/device", f"../../{os.path.basename(parent)}")
    journal.link(f"{class_device.path}/subsystem", f"/sys/class/{class_device.subsystem}")


def make_class_links(journal: Journal, class_device: ClassDevice) -> None:
    """Links a class device by number and by name."""
    if class_device.numbers:
        journal.link(f"/sys/dev/char/{class_device.numbers}", class_device.path)
    journal.link(f"/sys/class/{class_device.subsystem}/{os.path.basename(class_device.path)}", class_device.path)


def _join_fields(fields: Mapping[str, str]) -> str:
    return "\n".join(f"{key}={value}" for key, value in fields.items())


def pci_uevent(bdf: str, model: Model) -> dict[str, str]:
    """Returns the fields of the uevents of a PCI function, without the driver."""
    device, cls, vendor = (text[2:].upper() for text in (model.device_id, model.pci_class, model.vendor))
    return {
        "PCI_CLASS": cls.lstrip("0"),
        "PCI_ID": f"{vendor}:{device}",
        "PCI_SUBSYS_ID": f"{vendor}:0000",
        "PCI_SLOT_NAME": bdf,
        "MODALIAS": f"pci:v0000{vendor}d0000{device}sv0000{vendor}sd00000000bc{cls[:2]}sc{cls[2:4]}i{cls[4:]}",
    }


def pci_attributes(model: Model, numa_node: int) -> dict[str, str]:
    """Returns the attributes of a PCI function, except `uevent`."""
    first = max(numa_node, 0) * _CPUS_PER_NODE
    return {
        "vendor": model.vendor,
        "device": model.device_id,
        "class": model.pci_class,
        "subsystem_vendor": model.vendor,
        "subsystem_device": "0x0000",
        "revision": "0x08",
        "enable": "1",
        "numa_node": str(numa_node),
        "local_cpulist": f"{first}-{first + _CPUS_PER_NODE - 1}",
        "modalias": pci_uevent("", model)["MODALIAS"],
    }


def function_tiles(spec: GpuSpec) -> dict[str, str]:
    """Returns the attributes of tiles and memory that xe creates below the PCI function."""
    files: dict[str, str] = {}
    if spec.driver == "xe":
        for tile in range(spec.tiles):
            files[f"tile{tile}/gt{tile}/freq0/max_freq"] = "2400"
            if spec.memory:
                files[f"tile{tile}/physical_vram_size_bytes"] = f"0x{spec.memory:016x}"
    return files


def card_tiles(spec: GpuSpec) -> dict[str, str]:
    """Returns the attributes of tiles and memory that i915 creates below the card."""
    files: dict[str, str] = {}
    if spec.driver == "i915":
        files |= {f"gt/gt{tile}/id": str(tile) for tile in range(spec.tiles)}
        if spec.memory:
            files["lmem_total_bytes"] = str(spec.memory)
    return files


def virtual_address(physical: str, number: int) -> str:
    """Returns the address of a virtual function: the routing IDs after that of the physical function."""
    bus, _colon, place = physical.rpartition(":")
    slot, _dot, function = place.partition(".")
    routing = (int(slot, 16) << 3 | int(function)) + 1 + number
    if routing > 0xFF:
        raise TreeError(f"{physical}: no address left on the bus for virtual function {number}")
    return f"{bus}:{routing >> 3:02x}.{routing & 7}"
