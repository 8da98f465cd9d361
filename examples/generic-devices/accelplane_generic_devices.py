"""Publishes device nodes of the host by path pattern: serial ports, cameras, sound cards, /dev/fuse, KVM.

A complete third-party plugin for Accelplane: options with defaults and validation, sharing, NUMA nodes, hot-plug. The
options are in the YAML file of the agent under `plugins.device-nodes`; README.md explains them.
"""

from typing import Annotated, Literal

from accelplane.plugins import Config, Device, DeviceNode, Host, Meta, Mount, Plugin, ScanResult


class Path(Config, frozen=True):
    """A pattern of files on the host with `*`, `?` and `[…]`, and how a container gets one of them."""

    path: str
    mount_path: str = ""
    type: Literal["Device", "Mount"] = "Device"
    permissions: Annotated[str, Meta(pattern="^[rwm]+$")] = "rw"
    limit: Annotated[int, Meta(ge=1)] = 1
    optional: bool = False


class Group(Config, frozen=True):
    """The paths of devices: a device has one match of each path, in the order of the matches."""

    paths: list[Path]
    count: Annotated[int, Meta(ge=1)] = 1


class GenericConfig(Config, frozen=True):
    """The groups of each resource, by its name: pods request `<namespace>/<name>`."""

    namespace: str = "generic.example.com"
    devices: dict[str, list[Group]] = {}  # noqa: RUF012 - msgspec gives each value one of its own


class GenericPlugin(Plugin[GenericConfig]):
    """Publishes the matches as devices."""

    def scan(self, host: Host) -> ScanResult:
        for name, group in ((name, group) for name, groups in self.config.devices.items() for group in groups):
            found = [(path, [*host.glob(path.path)] * path.limit) for path in group.paths]
            columns = [[(path, file) for file in files] for path, files in found if files or not path.optional]
            for row in zip(*columns, strict=False):
                nodes = [DeviceNode(at, p.mount_path or at, p.permissions) for p, at in row if p.type == "Device"]
                mounts = [Mount(at, p.mount_path or at, "w" not in p.permissions) for p, at in row if p.type == "Mount"]
                device = Device(resource=name, id="+".join(at for _, at in row), nodes=nodes, mounts=mounts)
                yield from device.shared(group.count)
