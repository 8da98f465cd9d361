"""Plain-file trees of USB and RDMA devices as the kernel lays them out, and scans of the generic plugin."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trees import link, write

from accelplane.devices import Inventory
from accelplane.host import Host
from accelplane.node.scan_loop import scan
from accelplane.plugins.generic import GenericConfig, GenericPlugin

CONTROLLER = "sys/devices/pci0000:00/0000:00:14.0"


def usb(
    root: Path,
    name: str,
    ids: str = "1a86:7523",
    *,
    number: int = 5,
    serial: str = "",
    product: str = "",
    above: str = "usb1",
    nodes: Mapping[str, str] | None = None,
) -> Path:
    """A USB device with its node. `nodes` maps device nodes below /dev (`video0`) to their subsystem."""
    write(root / CONTROLLER / "numa_node", "0\n")
    write(root / CONTROLLER / "local_cpulist", "0-3\n")
    path = root / CONTROLLER / above / name
    vendor, _, product_id = ids.partition(":")
    texts = {"idVendor": vendor, "idProduct": product_id, "busnum": "1", "devnum": str(number)}
    for file, text in {**texts, "serial": serial, "product": product}.items():
        if text:
            write(path / file, f"{text}\n")
    link(root / "sys/bus/usb/devices" / name, path)
    write(root / f"dev/bus/usb/001/{number:03d}", "")
    for node, subsystem in (nodes or {}).items():
        entry = path / f"{name}:1.0" / subsystem / node.rpartition("/")[2]
        write(entry / "uevent", f"MAJOR=81\nMINOR=0\nDEVNAME={node}\n")
        link(root / "sys/class" / subsystem / entry.name, entry)
        write(root / "dev" / node, "")
    return path


def rdma(
    root: Path, number: int = 0, *, address: str = "0000:3b:00.0", layer: str = "Ethernet", interface: str = "ens1f0"
) -> Path:
    """An RDMA device `mlx5_<number>` with its nodes."""
    function = root / "sys/devices/pci0000:3a" / address
    name = f"mlx5_{number}"
    ids = {"vendor": "0x15b3", "device": "0x101d", "class": "0x020000", "numa_node": "1", "local_cpulist": "4-7"}
    for file, text in ids.items():
        write(function / file, f"{text}\n")
    (function / "net" / interface).mkdir(parents=True)
    link(root / "sys/bus/pci/devices" / address, function)
    device = function / "infiniband" / name
    write(device / "ports/1/link_layer", f"{layer}\n")
    write(device / "node_guid", "b859:9f03:00c1:7b2e\n")
    link(device / "device", function)
    link(root / "sys/class/infiniband" / name, device)
    for subsystem, entry in (
        ("infiniband_verbs", f"uverbs{number}"),
        ("infiniband_mad", f"umad{number}"),
        ("infiniband_mad", f"issm{number}"),
    ):
        write(function / subsystem / entry / "ibdev", f"{name}\n")
        link(root / "sys/class" / subsystem / entry, function / subsystem / entry)
        write(root / "dev/infiniband" / entry, "")
    write(root / "dev/infiniband/rdma_cm", "")
    return function


def plugin(*groups: Mapping[str, object], **options: object) -> GenericPlugin:
    """A plugin with the resource `thing` of these groups."""
    return GenericPlugin(GenericConfig.of({"devices": [{"name": "thing", "groups": groups}], **options}))


def found(root: Path, *groups: Mapping[str, object], **options: Any) -> Inventory:
    """The devices and skipped files of a scan."""
    return scan(plugin(*groups, **options), Host(root))


def files(inventory: Inventory) -> list[list[str]]:
    """The paths on the node of each device, sorted."""
    return sorted([part.host_path for part in (*device.nodes, *device.mounts)] for device in inventory)


def digest(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def reasons(inventory: Inventory) -> Sequence[str]:
    return [f"{skipped.subject}: {skipped.reason}" for skipped in inventory.skipped]
