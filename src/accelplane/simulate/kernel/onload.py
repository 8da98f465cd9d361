"""Solarflare NICs and Onload: the network driver sfc, the modules of Onload, their device nodes and parameters.

Facts: Documentation/ABI/testing/sysfs-class-net and sysfs-module; kernel/module/main.c (errnos of loading and
unloading); OpenOnload's documentation of the control plane server (when the module starts it, and its arguments).
"""

import errno
from collections.abc import Mapping
from functools import partial

from accelplane.simulate.journal import Numbers
from accelplane.simulate.kernel.core import Core
from accelplane.simulate.kernel.model import Attribute, oserror, stored_value, variable
from accelplane.simulate.kernel.numbers import boolean, number
from accelplane.simulate.kernel.pci import PciBus, PciDriver, PciFunction
from accelplane.simulate.kernel.usermode import Usermode
from accelplane.simulate.offload import NicSpec

VENDOR = "0x1924"

_MAX_TEXT = 1024  # characters of a text parameter (kernel/params.c)
_DEFAULT_SERVER = "/sbin/onload_cp_server"
_MAJOR = 235  # assigned dynamically by the kernel
_NODES = ("onload", "onload_epoll", "sfc_char")
_MODULES = ("sfc_resource", "sfc_char", "onload")
_unsigned = partial(number, most=2**31 - 1)


class SfcDriver(PciDriver):
    """`sfc`, with one network interface per function."""

    name = "sfc"
    module = "sfc"
    vendor = VENDOR
    ids = ("0903", "0923", "0a03", "0b03", "1a03", "1b03")

    def __init__(self, bus: PciBus) -> None:
        super().__init__(bus)
        self.specs: dict[str, NicSpec] = {}
        self._interfaces: dict[str, str] = {}

    def probe(self, device: PciFunction) -> None:
        spec = self.specs.get(device.name)
        name = spec.interface if spec is not None and spec.interface else self.core.unused_name("sfc")
        if self.core.tree.has(f"/sys/class/net/{name}"):
            raise oserror(errno.EEXIST, device.path)
        self._interfaces[device.name] = name
        index = 100 + len(self._interfaces)
        path = f"{device.path}/net/{name}"
        attributes = {
            "address": f"00:0f:53:00:00:{index % 256:02x}",
            "ifindex": index,
            "mtu": 1500,
            "operstate": "up",
            "speed": 25000,
            "type": 1,
        }
        self.core.tree.directory(path, attributes)
        self.core.add_class_device(path, "net", parent=device.path, INTERFACE=name, IFINDEX=str(index))

    def release(self, device: PciFunction) -> None:
        self.core.remove_class_device(f"{device.path}/net/{self._interfaces.pop(device.name)}")
        self.core.tree.remove(f"{device.path}/net")


class Onload:
    """The modules of Onload, which are loaded and unloaded together."""

    def __init__(self, core: Core, sfc: SfcDriver, usermode: Usermode) -> None:
        self.core = core
        self.usermode = usermode
        self._sfc = sfc
        self._path = ""
        self._arguments = ""
        self._spawns = True
        self._served: set[str] = set()
        self.loaded = False

    def load(self) -> None:
        """Raises `OSError`: EEXIST, or ENOENT without the symbols of sfc."""
        if self.loaded:
            raise oserror(errno.EEXIST, "onload")
        if not self._sfc.loaded:
            raise oserror(errno.ENOENT, "onload")
        self.loaded = True
        self._path = self._arguments = ""
        self._spawns = True
        for module in _MODULES[:-1]:
            self.core.add_module(module)
        for minor, name in enumerate(_NODES):
            self.core.add_class_device(f"/sys/devices/virtual/misc/{name}", "misc", Numbers(_MAJOR, minor), name)
        self.core.add_module("onload", self._parameters())

    def unload(self) -> None:
        """Raises `OSError` EBUSY while an application has a device node open."""
        if any(self.core.users[name] for name in _NODES):
            raise oserror(errno.EBUSY, "onload")
        self.loaded = False
        self._served.clear()
        self.core.remove_module("onload")
        for name in _NODES:
            self.core.remove_class_device(f"/sys/devices/virtual/misc/{name}")
        for module in reversed(_MODULES[:-1]):
            self.core.remove_module(module)

    def create_stack(self, network_namespace: str = "") -> None:
        """An application creates a stack in a network namespace: its file, empty for that of the host.

        Raises `OSError` ENODEV without the module.
        """
        if not self.loaded:
            raise oserror(errno.ENODEV, "onload")
        if network_namespace not in self._served:
            self._start_server(network_namespace)

    def _parameters(self) -> Mapping[str, Attribute | str]:
        return {
            "cplane_server_path": self._server_parameter("_path"),
            "cplane_server_params": self._server_parameter("_arguments"),
            "cplane_spawn_server": variable(self, "_spawns", boolean, show=lambda spawns: "Y" if spawns else "N"),
            "cplane_init_timeout": stored_value(10, _unsigned),
            "cplane_server_grace_timeout": stored_value(30, _unsigned),
            "cplane_server_uid": stored_value(0, _unsigned),
            "cplane_server_gid": stored_value(0, _unsigned),
        }

    def _server_parameter(self, field: str) -> Attribute:
        """A text whose change restarts the server of the initial namespace, unless applications use it."""

        def write(text: str) -> None:
            before, after = getattr(self, field), _text(text)
            setattr(self, field, after)
            if after != before and not any(self.core.users[name] for name in _NODES):
                self._start_server("")

        return Attribute(read=lambda: getattr(self, field), write=write)

    def _start_server(self, network_namespace: str) -> None:
        if not self._spawns:
            return
        self._served.add(network_namespace)
        where = ("--network-namespace-file", network_namespace) if network_namespace else ()
        self.usermode.start((self._path or _DEFAULT_SERVER, *self._arguments.split(), "--daemonise", *where))


def _text(text: str) -> str:
    if len(text) > _MAX_TEXT:
        raise oserror(errno.ENOSPC)
    return text.strip()
