"""Plain-file trees of QAT devices, laid out as the kernel lays out sysfs and debugfs."""

from collections.abc import Sequence
from pathlib import Path

from trees import link, write


def pf(
    root: Path,
    address: str = "0000:6b:00.0",
    *,
    driver: str = "4xxx",
    bridge: bool = False,
    numa: int = 0,
    vfs: Sequence[int] = (),
    vf_id: str = "0x4941",
    state: str | None = "up",
    services: str | None = "sym;asym",
    dev_cfg: str | None = None,
    heartbeat: bytes | None = b"0\n\0",
) -> Path:
    """A physical function with its virtual ones, `vfs` by their numbers; returns its directory."""
    bus = address.rpartition(":")[0]
    above = root / "sys/devices" / f"pci{bus}"
    function = (above / "0000:6a:01.0" if bridge else above) / address
    write(function / "numa_node", f"{numa}\n")
    write(function / "local_cpulist", "0-3\n")
    link(root / "sys/bus/pci/devices" / address, function)
    link(function / "driver", root / "sys/bus/pci/drivers" / driver)
    link(root / "sys/bus/pci/drivers" / driver / address, function)
    for name, text in (("state", state), ("cfg_services", services)):
        if text is not None:
            write(function / "qat" / name, f"{text}\n")
    debugfs = root / "sys/kernel/debug" / f"qat_{driver}_{address}"
    if dev_cfg is not None:
        write(debugfs / "dev_cfg", dev_cfg)
    if heartbeat is not None:
        write(debugfs / "heartbeat/status", heartbeat)
    for number in vfs:
        device, place = divmod(number + 1, 8)
        virtual = vf(root, f"{bus}:{device:02x}.{place}", device_id=vf_id, above=function.parent)
        link(virtual / "physfn", function)
        link(function / f"virtfn{number}", virtual)
    return function


def vf(
    root: Path,
    address: str,
    *,
    device_id: str | None = "0x4941",
    vendor: str | None = "0x8086",
    above: Path | None = None,
    driver: str = "vfio-pci",
    noiommu: bool = False,
    uio: str | None = "uio7",
) -> Path:
    """A virtual function, as a virtual machine sees one; returns its directory. Its group is in hexadecimal digits."""
    function = (above or root / "sys/devices" / f"pci{address.rpartition(':')[0]}") / address
    group = root / "sys/kernel/iommu_groups" / str(int(address.replace(":", "").replace(".", ""), 16))
    for name, text in (("vendor", vendor), ("device", device_id)):
        if text is not None:
            write(function / name, f"{text}\n")
    if noiommu:
        write(group / "name", "vfio-noiommu\n")
    group.mkdir(parents=True, exist_ok=True)
    link(function / "iommu_group", group)
    (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
    link(function / "driver", root / "sys/bus/pci/drivers" / driver)
    if uio:
        (function / "uio" / uio).mkdir(parents=True)
    link(root / "sys/bus/pci/devices" / address, function)
    return function


def group(address: str) -> str:
    """The device node of the function's VFIO group."""
    return f"/dev/vfio/{int(address.replace(':', '').replace('.', ''), 16)}"
