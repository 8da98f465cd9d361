"""A host as plain files, laid out as the kernel lays out sysfs and udev lays out /dev.

Kernel documents: Documentation/ABI/testing/sysfs-bus-pci, Documentation/ABI/stable/sysfs-bus-usb,
Documentation/driver-api/vfio.rst.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from accelplane.host import Host


class Tree:
    """The file system of a host below the directory `root`. Paths in arguments and results are those of the host.

    Devices can be added and removed while an agent runs: what makes a device visible is created last.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        for directory in ("/sys/class", "/sys/bus", "/dev"):
            self.local(directory).mkdir(parents=True, exist_ok=True)

    @property
    def host(self) -> Host:
        """A new `Host` of this tree, for `Plugin.scan`."""
        return Host(str(self.root))

    def local(self, path: str) -> Path:
        """The file on this machine. Raises `ValueError` if `path` is not absolute."""
        if not path.startswith("/"):
            raise ValueError(f"{path}: found a relative path, expected an absolute one of the host")
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str = "") -> None:
        """Creates or replaces a file, with its directories."""
        local = self.local(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_text(text)

    def link(self, path: str, target: str) -> None:
        """Creates or replaces a symbolic link to a path of the host, relative as the kernel makes it."""
        local = self.local(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        local.unlink(missing_ok=True)
        local.symlink_to(os.path.relpath(self.local(target), local.parent))

    def remove(self, path: str) -> None:
        """Removes a file, a link or a directory with its content."""
        local = self.local(path)
        if local.is_dir() and not local.is_symlink():
            shutil.rmtree(local)
        else:
            local.unlink()

    def pci(
        self,
        address: str,
        *,
        vendor: str,
        device: str,
        cls: str = "0x120000",
        driver: str = "",
        numa: int = 0,
        iommu_group: int | None = None,
        attributes: Mapping[str, str] = {},
    ) -> str:
        """Adds a PCI function, by default a processing accelerator. Returns its directory.

        `vendor`, `device` and `cls` are hexadecimal with `0x`. `attributes` are further files by name, or other values.
        """
        path = f"/sys/devices/pci{address[:-8]}:00/{address}"
        known = {
            "vendor": vendor, "device": device, "class": cls, "numa_node": str(numa), "local_cpulist": "0-7",
        }  # fmt: skip
        self._attributes(path, {**known, **attributes})
        if driver:
            self.local(f"/sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            self.link(f"{path}/driver", f"/sys/bus/pci/drivers/{driver}")
        if iommu_group is not None:
            group = f"/sys/kernel/iommu_groups/{iommu_group}"
            self.link(f"{group}/devices/{address}", path)
            self.link(f"{path}/iommu_group", group)
        self.link(f"/sys/bus/pci/devices/{address}", path)
        return path

    def usb(
        self,
        port: str,
        *,
        vendor: str,
        product: str,
        serial: str = "",
        numa: int = 0,
        attributes: Mapping[str, str] = {},
    ) -> str:
        """Adds a USB device at a port such as `1-2` (bus 1), with its device node. Returns its directory.

        `vendor` and `product` are four hexadecimal digits.
        """
        bus = int(port.partition("-")[0])
        controller = f"/sys/devices/pci0000:00/0000:00:14.{bus % 8}"
        self._attributes(controller, {"numa_node": str(numa), "local_cpulist": "0-7"})
        path = f"{controller}/usb{bus}/{port}"
        nodes = self.local(f"/dev/bus/usb/{bus:03}")
        number = len(os.listdir(nodes)) + 1 if nodes.is_dir() else 1
        known = {"idVendor": vendor, "idProduct": product, "busnum": str(bus), "devnum": str(number)}
        self._attributes(path, {**known, **({"serial": serial} if serial else {}), **attributes})
        self.node(f"/dev/bus/usb/{bus:03}/{number:03}")
        self.link(f"/sys/bus/usb/devices/{port}", path)
        return path

    def class_device(
        self, cls: str, name: str, *, parent: str = "", node: str | None = "", attributes: Mapping[str, str] = {}
    ) -> str:
        """Adds a device of `/sys/class/<cls>`. Returns its directory, below that of its `parent` if it has one.

        Its device node is `/dev/<name>`, or `node`, or none if that is None.
        """
        path = f"{parent or '/sys/devices/virtual'}/{cls}/{name}"
        self._attributes(path, attributes)
        if parent:
            self.link(f"{path}/device", parent)
        if node is not None:
            self.node(node or f"/dev/{name}")
        self.link(f"/sys/class/{cls}/{name}", path)
        return path

    def node(self, path: str) -> None:
        """Adds a device node: below a root other than `/` a plain file represents one."""
        self.write(path)

    def _attributes(self, path: str, attributes: Mapping[str, str]) -> None:
        self.local(path).mkdir(parents=True, exist_ok=True)
        for name, text in attributes.items():
            self.write(f"{path}/{name}", f"{text}\n")
