"""Plain-file trees of GPUs and NPUs, laid out as the kernel lays out sysfs and udev lays out /dev."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from accelplane.host import Host

# A host, and a function that returns its path of a file.
PathInHost = tuple[Host, Callable[[str], str]]


def write(path: Path, text: str | bytes) -> Path:
    """A file with its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def link(path: Path, target: str | Path) -> Path:
    """A symbolic link with its directories; a `Path` as target becomes relative, as the kernel writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent) if isinstance(target, Path) else target)
    return path


def rename_often(directory: Path, times: int) -> None:
    """Makes two inotify events each time, faster than any other way."""
    names = (str(write(directory / "noise", "")), str(directory / "more noise"))
    for number in range(times):
        os.rename(names[number % 2], names[1 - number % 2])


def gpu_card(
    root: Path,
    index: int,
    *,
    driver: str | None = "i915",
    vendor: str = "0x8086",
    device_id: str | None = "0x56c0",
    address: str | None = None,
    numa: int = 0,
    nodes: Sequence[str] | None = None,
    by_path: bool = True,
    vfs: str | None = None,
    physfn: bool = False,
    mei: Sequence[str] = (),
) -> Path:
    """`/sys/class/drm/card<index>` and all around it; returns the directory of its PCI function."""
    name = f"card{index}"
    address = address or f"0000:{index + 3:02x}:00.0"
    nodes = (name, f"renderD{128 + index}") if nodes is None else nodes
    function = root / "sys/devices" / f"pci{address[:-8]}:00" / address
    write(function / "vendor", vendor + "\n")
    write(function / "numa_node", f"{numa}\n")
    write(function / "local_cpulist", "0-3\n")
    if device_id is not None:
        write(function / "device", device_id + "\n")
    if driver is not None:
        link(function / "driver", root / "sys/bus/pci/drivers" / driver)
    if vfs is not None:
        write(function / "sriov_numvfs", vfs + "\n")
    if physfn:
        (function.parent / "0000:ff:00.0").mkdir(exist_ok=True)
        link(function / "physfn", function.parent / "0000:ff:00.0")
    for node in dict.fromkeys((name, *nodes)):
        (function / "drm" / node).mkdir(parents=True)
    link(function / "drm" / name / "device", f"../../../{address}")
    link(root / "sys/class/drm" / name, function / "drm" / name)
    for number, entry in enumerate(mei):
        (function / f"{driver}.mei-gscfi.{number}" / "mei" / entry).mkdir(parents=True)
    for node in nodes:
        write(root / "dev/dri" / node, "")
    if by_path:
        for node in nodes:
            kind = "render" if node.startswith("renderD") else "card"
            link(root / "dev/dri/by-path" / f"pci-{address}-{kind}", f"../{node}")
    return function


def npu(
    root: Path,
    index: int,
    *,
    vendor: str = "0x8086",
    device_id: str = "0x7e4c",
    numa: int = 0,
    node: bool = True,
    busy_us: int | None = None,
) -> Path:
    """`/sys/class/accel/accel<index>` and all around it; returns the directory of its PCI function."""
    name = f"accel{index}"
    function = root / "sys/devices/pci0000:00" / f"0000:00:{11 + index:02x}.0"
    write(function / "vendor", vendor + "\n")
    write(function / "device", device_id + "\n")
    write(function / "numa_node", f"{numa}\n")
    write(function / "local_cpulist", "0-3\n")
    if busy_us is not None:
        write(function / "npu_busy_time_us", f"{busy_us}\n")
    link(function / "driver", root / "sys/bus/pci/drivers/intel_vpu")
    (function / "accel" / name).mkdir(parents=True)
    link(function / "accel" / name / "device", f"../../../{function.name}")
    link(root / "sys/class/accel" / name, function / "accel" / name)
    if node:
        write(root / "dev/accel" / name, "")
    return function
