"""The driver core: devices and drivers of a bus, their bindings, sysfs entries and uevents.

Facts: the kernel's drivers/base/bus.c, dd.c and core.c (which errno a write to `bind` or `unbind` gets), devtmpfs, and
udev's rule that makes `/dev/char/M:m`.
"""

import errno
import posixpath
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from accelplane.host.uevent import Uevent
from accelplane.simulate.journal import Numbers
from accelplane.simulate.kernel.model import Attribute, DeviceNode, Tree, command, oserror, variable


class _ClassDevice(NamedTuple):
    """A device of a class: the fields of its uevents, and its entries in sysfs."""

    subsystem: str
    fields: Mapping[str, str]
    entries: Sequence[str]


class Core:
    """The base of all parts of the kernel: files, uevents, device nodes, and users of devices."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.users = Counter[str]()  # of devices, queues and VFIO groups: `0000:61:00.1`, `wq0.0`, `vfio/12`
        self.listen: Callable[[Uevent], None] | None = None
        self.udev_paused = False
        self._pending_links: dict[str, str] = {}
        self._class_devices: dict[str, _ClassDevice] = {}
        self.tree.directory("/dev/char")

    def send_uevent(self, action: str, path: str, subsystem: str, **fields: str) -> None:
        """Sends a uevent about the sysfs directory."""
        if self.listen:
            self.listen(Uevent(action, path.removeprefix("/sys"), subsystem, fields))

    def add_class_device(
        self,
        path: str,
        subsystem: str,
        numbers: Numbers | None = None,
        node: str = "",
        *,
        parent: str = "",
        bus: bool = False,
        **fields: str,
    ) -> None:
        """Adds a device: its directory, links to it, its node below `/dev`, the uevent, and udev's link.

        `parent` is the target of its `device` link, `fields` are additional fields of its uevents.
        """
        home = f"/sys/bus/{subsystem}" if bus else f"/sys/class/{subsystem}"
        links = [f"{home}/devices/{posixpath.basename(path)}" if bus else f"{home}/{posixpath.basename(path)}"]
        if numbers:
            links.append(f"/sys/dev/char/{numbers}")
            fields |= {"MAJOR": str(numbers.major), "MINOR": str(numbers.minor), "DEVNAME": node}
            self.tree.directory(path, {"dev": str(numbers)})
        text = "\n".join(f"{key}={value}" for key, value in fields.items())
        self.tree.directory(path, {"uevent": Attribute(text, mode=0o644)})
        self.tree.link(f"{path}/subsystem", home)
        if parent:
            self.tree.link(f"{path}/device", parent)
        for link in links:
            self.tree.link(link, path)
        if numbers:
            self.tree.put(f"/dev/{node}", DeviceNode(numbers))
        self.send_uevent("add", path, subsystem, **fields)
        self._class_devices[path] = _ClassDevice(subsystem, fields, (*links, path))
        if numbers:
            self._pending_links[f"/dev/char/{numbers}"] = f"/dev/{node}"
        if not self.udev_paused:
            self.create_pending_links()

    def remove_class_device(self, path: str) -> None:
        subsystem, fields, entries = self._class_devices.pop(path)
        for entry in entries:
            self.tree.remove(entry)
        if "DEVNAME" in fields:
            udev_link = f"/dev/char/{fields['MAJOR']}:{fields['MINOR']}"
            self._pending_links.pop(udev_link, None)
            self.tree.remove(udev_link)
            self.tree.remove(f"/dev/{fields['DEVNAME']}")
            self.tree.prune(posixpath.dirname(f"/dev/{fields['DEVNAME']}"))
        self.send_uevent("remove", path, subsystem, **fields)

    def unused_name(self, prefix: str) -> str:
        """The first name with the prefix that no class device and no directory above one has."""
        used = {part for path in self._class_devices for part in path.split("/")}
        return next(name for index in range(len(used) + 1) if (name := f"{prefix}{index}") not in used)

    def create_pending_links(self) -> None:
        while self._pending_links:
            link, node = self._pending_links.popitem()
            self.tree.link(link, node)

    def add_module(self, name: str, parameters: Mapping[str, Attribute | str] | None = None) -> None:
        """Adds `/sys/module/<name>` of a loaded module."""
        path = f"/sys/module/{name}"
        self.tree.directory(path, {"initstate": "live", "refcnt": "0"})
        self.tree.directory(f"{path}/parameters", parameters)
        self.send_uevent("add", path, "module")

    def remove_module(self, name: str) -> None:
        self.tree.remove(f"/sys/module/{name}")
        self.send_uevent("remove", f"/sys/module/{name}", "module")


@dataclass(eq=False)
class Device:
    """A device on a bus, with a sysfs directory; `bound_to` names its driver."""

    core: Core
    name: str
    path: str
    bound_to: str = field(default="", init=False)

    def fields(self) -> dict[str, str]:
        """The fields of its uevents and its `uevent` file, without the driver."""
        return {}

    def uevent_fields(self) -> dict[str, str]:
        return ({"DRIVER": self.bound_to} if self.bound_to else {}) | self.fields()

    def uevent_text(self) -> str:
        """The content of its `uevent` file."""
        return "\n".join(f"{key}={value}" for key, value in self.uevent_fields().items())


D = TypeVar("D", bound=Device)


class Driver(Generic[D]):
    """A driver of a bus, whose module is `module`."""

    name: str
    module: str

    def attributes(self) -> Mapping[str, Attribute]:
        """The files of its directory in addition to `bind` and `unbind`."""
        return {}

    def matches(self, device: D) -> bool:
        """Whether the driver can be probed on the device."""
        raise NotImplementedError

    def probe(self, device: D) -> None:
        """Binds the device. If it raises `OSError`, nothing is changed."""
        raise NotImplementedError

    def busy(self, device: D) -> bool:
        """Whether a process uses the device. A real driver would wait for it before unbinding."""
        return False

    def release(self, device: D) -> None:
        """Unbinds the device."""
        raise NotImplementedError


class Bus(Generic[D]):
    """A bus with `/sys/bus/<name>`."""

    def __init__(self, core: Core, name: str) -> None:
        self.core = core
        self.name = name
        self.path = f"/sys/bus/{name}"
        self.devices: dict[str, D] = {}
        self.drivers: dict[str, Driver[D]] = {}
        self.autoprobe = True
        core.tree.directory(f"{self.path}/devices")
        core.tree.directory(f"{self.path}/drivers")
        core.tree.directory(
            self.path,
            {
                "drivers_probe": command(lambda text: self.attach(self._find(text))),
                "drivers_autoprobe": variable(self, "autoprobe", lambda text: not text.startswith("0")),
            },
        )

    def register(self, driver: Driver[D]) -> None:
        """Adds a driver, and binds it to matching devices without a driver. Raises `OSError` EEXIST."""
        if driver.name in self.drivers:
            raise oserror(errno.EEXIST, driver.name)
        self.drivers[driver.name] = driver
        path = f"{self.path}/drivers/{driver.name}"
        self.core.tree.directory(
            path,
            {
                "bind": command(lambda text: self._bind(driver, text)),
                "unbind": command(lambda text: self._unbind(driver, text)),
                "uevent": command(lambda _text: None),
                **driver.attributes(),
            },
        )
        self.core.tree.link(f"{path}/module", f"/sys/module/{driver.module}")
        self.core.tree.directory(f"/sys/module/{driver.module}/drivers")
        self.core.tree.link(f"/sys/module/{driver.module}/drivers/{self.name}:{driver.name}", path)
        self.core.send_uevent("add", path, "drivers")
        self.attach_all(driver)

    def unregister(self, driver: Driver[D]) -> None:
        """Unbinds a driver from all devices and removes it. If it raises `OSError` EBUSY, nothing is changed."""
        bound_devices = [device for device in self.devices.values() if device.bound_to == driver.name]
        for device in bound_devices:
            if driver.busy(device):
                raise oserror(errno.EBUSY, device.path)
        for device in bound_devices:
            self.detach(device)
        del self.drivers[driver.name]
        path = f"{self.path}/drivers/{driver.name}"
        self.core.tree.remove(f"/sys/module/{driver.module}/drivers/{self.name}:{driver.name}")
        self.core.tree.remove(path)
        self.core.send_uevent("remove", path, "drivers")

    def add(self, device: D) -> None:
        """Adds a device whose directory exists to the bus, and probes drivers."""
        self.devices[device.name] = device
        self.core.tree.directory(
            device.path,
            {"uevent": Attribute(read=device.uevent_text, write=lambda text: self._synthetic(device, text))},
        )
        self.core.tree.link(f"{device.path}/subsystem", self.path)
        self.core.tree.link(f"{self.path}/devices/{device.name}", device.path)
        self._send_uevent("add", device)
        if self.autoprobe:
            self.attach(device)

    def remove(self, device: D) -> None:
        """Unbinds and removes a device. Raises `OSError` EBUSY where the kernel would wait."""
        self.detach(device)
        del self.devices[device.name]
        self.core.tree.remove(f"{self.path}/devices/{device.name}")
        self.core.tree.remove(device.path)
        self._send_uevent("remove", device)

    def attach(self, device: D) -> None:
        """Binds the device to the first driver whose probe succeeds, if any."""
        for driver in list(self.drivers.values()):
            self._try_probe(driver, device)

    def attach_all(self, driver: Driver[D]) -> None:
        """Probes the driver on every device without a driver."""
        for device in list(self.devices.values()):
            if self.autoprobe:
                self._try_probe(driver, device)

    def probe(self, driver: Driver[D], device: D) -> None:
        """Binds the device to the driver. Raises `OSError` EBUSY if it has one, or the error of the driver."""
        if device.bound_to:
            raise oserror(errno.EBUSY, device.path)
        driver_path = f"{self.path}/drivers/{driver.name}"
        device.bound_to = driver.name
        self.core.tree.link(f"{device.path}/driver", driver_path)
        self.core.tree.link(f"{driver_path}/{device.name}", device.path)
        try:
            driver.probe(device)
        except OSError:
            self._unlink(device)
            raise
        self._send_uevent("bind", device)

    def detach(self, device: D) -> None:
        """Unbinds the device, if it has a driver. Raises `OSError` EBUSY where the kernel would wait."""
        driver = self.drivers.get(device.bound_to)
        if driver is None:
            return
        if driver.busy(device):
            raise oserror(errno.EBUSY, device.path)
        driver.release(device)
        self._unlink(device)
        self._send_uevent("unbind", device)

    def _try_probe(self, driver: Driver[D], device: D) -> None:
        if not device.bound_to and driver.matches(device):
            with suppress(OSError):
                self.probe(driver, device)

    def _unlink(self, device: D) -> None:
        self.core.tree.remove(f"{self.path}/drivers/{device.bound_to}/{device.name}")
        self.core.tree.remove(f"{device.path}/driver")
        device.bound_to = ""

    def _send_uevent(self, action: str, device: D) -> None:
        self.core.send_uevent(action, device.path, self.name, **device.uevent_fields())

    def _find(self, text: str) -> D:
        """The device of the written name. Raises `OSError` ENODEV."""
        # Only one trailing newline is ignored (lib/string_helpers.c, sysfs_streq).
        device = self.devices.get(text.removesuffix("\n"))
        if device is None:
            raise oserror(errno.ENODEV)
        return device

    def _bind(self, driver: Driver[D], text: str) -> None:
        device = self._find(text)
        if not driver.matches(device):
            raise oserror(errno.ENODEV)
        self.probe(driver, device)

    def _unbind(self, driver: Driver[D], text: str) -> None:
        device = self._find(text)
        if device.bound_to != driver.name:
            raise oserror(errno.ENODEV)
        self.detach(device)

    def _synthetic(self, device: D, text: str) -> None:
        action = text.partition(" ")[0].strip()
        if action not in ("add", "remove", "change", "move", "online", "offline", "bind", "unbind"):
            raise oserror(errno.EINVAL)
        self._send_uevent(action, device)
