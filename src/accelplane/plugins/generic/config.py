"""Options of the generic plugin. Resources have the format of squat's generic-device-plugin, with further fields.

The same types are the format of the flag `--device`, of the agent's file and of the custom resource
`GenericDevicePlugin`, so their names are in camel case.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from accelplane.devices.names import check_resource_name
from accelplane.host import pci_address
from accelplane.plugins.base import Config
from accelplane.plugins.cdi_mode import CDI_MODES
from accelplane.plugins.options import AllocationPolicy, CdiMode, check_choice
from accelplane.plugins.policies import POLICIES

DEFAULT_DOMAIN = "squat.ai"
# Beyond these the configuration is rejected, or devices are skipped.
MAX_COUNT = 10_000
MAX_DEVICES = 10_000  # IDs of one resource
MAX_CHECKED = 256  # devices with a command
MAX_DEVICE_TEXT = 64 * 1024  # of a flag --device; the kernel allows 128 KiB for an argument

# Values that depend on the device, in variables and commands.
PLACEHOLDERS = ("address", "name", "path", "serial")

_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z]+)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")

HexId = Annotated[str, Meta(pattern="^(0x)?[0-9a-fA-F]{1,4}$", max_length=6)]
FilePath = Annotated[str, Meta(max_length=4096)]


class Path(Config, frozen=True, rename="camel", omit_defaults=True):
    """Files of the host by a pattern, and how a container gets one of them."""

    path: Annotated[
        FilePath,
        Meta(description="Absolute path on the node. *, ? and [...] match within one name. Required."),
    ]
    mount_path: Annotated[FilePath, Meta(description="Path in the container. The path on the node when not set.")] = ""
    type: Annotated[
        Literal["Device", "Mount"],
        Meta(description="Device (a device node or a directory with device nodes) or Mount. Device when not set."),
    ] = "Device"
    permissions: Annotated[
        str,
        Meta(
            pattern="^[rwm]{0,3}$",
            description="What the container may do with a device: r (read), w (write), m (mknod). mrw when not set.",
        ),
    ] = ""
    read_only: Annotated[bool, Meta(description="Whether a Mount is read-only.")] = False
    limit: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Number of devices of the group that can have the same file, if other paths have more files. "
            "1 when not set.",
        ),
    ] = 1
    optional: Annotated[
        bool, Meta(description="Whether devices exist without this file. Otherwise each device has one of each path.")
    ] = False

    def __post_init__(self) -> None:
        _check_path("path", self.path.strip())
        if self.mount_path:
            _check_path("mountPath", self.mount_path.strip())


class Usb(Config, frozen=True, rename="camel", omit_defaults=True):
    """USB devices by their descriptors."""

    vendor: Annotated[HexId, Meta(description="Vendor ID in hexadecimal digits, for example 1a86. Required.")]
    product: Annotated[
        HexId, Meta(description="Product ID in hexadecimal digits. All products of the vendor when not set.")
    ] = "0"
    serial: Annotated[str, Meta(max_length=256, description="Serial number. Any serial number when not set.")] = ""
    subsystems: Annotated[
        tuple[str, ...],
        Meta(
            max_length=16,
            description="Kernel subsystems, for example tty or video4linux, whose device nodes of the USB device the "
            "container gets. The node below /dev/bus/usb when not set.",
        ),
    ] = ()
    separate: Annotated[
        bool,
        Meta(description="Whether each USB device that matches is a device. Otherwise all of them are one device."),
    ] = False

    def __post_init__(self) -> None:
        _check_words("subsystems", self.subsystems)


class Pci(Config, frozen=True, rename="camel", omit_defaults=True):
    """PCI functions for user-space drivers: those bound to vfio-pci."""

    vendor: Annotated[HexId, Meta(description="Vendor ID in hexadecimal digits, for example 8086. Required.")]
    device: Annotated[HexId, Meta(description="Device ID in hexadecimal digits. Required.")]
    addresses: Annotated[
        tuple[str, ...],
        Meta(
            max_length=256,
            description="PCI addresses of the only functions, for example 0000:3b:00.0. All when not set.",
        ),
    ] = ()
    bind: Annotated[
        bool,
        Meta(
            description="Whether the plugin binds the functions to vfio-pci. Functions with a network interface that "
            "is up, a disk or virtual functions are not bound. The plugin needs write access to /sys."
        ),
    ] = False
    iommufd: Annotated[bool, Meta(description="Whether containers get the device nodes of IOMMUFD too.")] = False

    def __post_init__(self) -> None:
        for address in self.addresses:
            if not pci_address(address):
                raise ValueError(f"addresses: found {address!a}, expected a PCI address such as 0000:3b:00.0")


class Rdma(Config, frozen=True, rename="camel", omit_defaults=True):
    """RDMA devices. All conditions must apply; without any, all RDMA devices match."""

    names: Annotated[
        tuple[str, ...],
        Meta(max_length=64, description="Names of RDMA devices, for example mlx5_0 or mlx5_*. All when not set."),
    ] = ()
    interfaces: Annotated[
        tuple[str, ...],
        Meta(max_length=64, description="Names of their network interfaces, for example ens1f0. All when not set."),
    ] = ()
    vendor: Annotated[HexId, Meta(description="PCI vendor ID in hexadecimal digits. All when not set.")] = "0"
    device: Annotated[HexId, Meta(description="PCI device ID in hexadecimal digits. All when not set.")] = "0"
    link_layer: Annotated[
        Literal["", "InfiniBand", "Ethernet"],
        Meta(description="Link layer of the first port: InfiniBand or Ethernet (RoCE, iWARP). All when not set."),
    ] = ""
    umad: Annotated[
        bool, Meta(description="Whether containers get the nodes umad and issm too, for subnet management.")
    ] = False


class BindMount(Config, frozen=True, rename="camel", omit_defaults=True):
    """A file or directory of the node that containers with a device of the group get."""

    path: Annotated[FilePath, Meta(description="Absolute path on the node. Required.")]
    mount_path: Annotated[FilePath, Meta(description="Path in the container. The path on the node when not set.")] = ""
    read_only: Annotated[bool, Meta(description="Whether the mount is read-only. true when not set.")] = True

    def __post_init__(self) -> None:
        _check_path("path", self.path)
        if self.mount_path:
            _check_path("mountPath", self.mount_path)


class HealthCommand(Config, frozen=True, rename="camel", omit_defaults=True):
    """A command that determines the health of a device, with the fields of a probe of Kubernetes."""

    command: Annotated[
        tuple[Annotated[str, Meta(max_length=4096)], ...],
        Meta(
            min_length=1,
            max_length=64,
            description="Program and arguments. Status 0 is healthy. {path}, {name}, {serial} and {address} are "
            "replaced. Required.",
        ),
    ]
    period_seconds: Annotated[int, Meta(ge=1, le=3600, description="Seconds between two checks. 30 when not set.")] = 30
    timeout_seconds: Annotated[
        int, Meta(ge=1, le=60, description="Seconds after which the command is killed and has failed. 5 when not set.")
    ] = 5
    failure_threshold: Annotated[
        int, Meta(ge=1, le=100, description="Failures in a row that make a device unhealthy. 1 when not set.")
    ] = 1
    success_threshold: Annotated[
        int, Meta(ge=1, le=100, description="Successes in a row after which a device is healthy again. 1 when not set.")
    ] = 1

    def __post_init__(self) -> None:
        if not self.command[0].startswith("/"):
            raise ValueError(f"command: found the program {self.command[0][:80]!a}, expected an absolute path")
        for argument in self.command:
            _check_text("command", argument)


class Group(Config, frozen=True, rename="camel", omit_defaults=True):
    """Devices that are found in one way: exactly one of `paths`, `usb`, `pci` and `rdma` is set."""

    paths: Annotated[
        tuple[Path, ...],
        Meta(max_length=64, description="Files of one device: it has one match of each path, in the order of matches."),
    ] = ()
    usb: Annotated[tuple[Usb, ...], Meta(max_length=64, description="USB devices.")] = ()
    pci: Annotated[tuple[Pci, ...], Meta(max_length=64, description="PCI functions behind vfio-pci.")] = ()
    rdma: Annotated[tuple[Rdma, ...], Meta(max_length=64, description="RDMA devices.")] = ()
    count: Annotated[
        int,
        Meta(
            ge=0, le=MAX_COUNT, description="Number of containers that can share a device of the group. 1 when not set."
        ),
    ] = 1
    mounts: Annotated[
        tuple[BindMount, ...], Meta(max_length=64, description="Files and directories that containers get as well.")
    ] = ()
    env: Annotated[
        Mapping[str, Annotated[str, Meta(max_length=4096)]],
        Meta(
            max_length=64,
            description="Environment variables. {path}, {name}, {serial} and {address} are replaced. With several "
            "devices in a container, values are separated by commas.",
        ),
    ] = {}
    numa_nodes: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=1023)], ...] | None,
        Meta(description="NUMA nodes of the devices, none if empty. Those of the hardware when not set."),
    ] = None
    health: Annotated[
        HealthCommand | None,
        Meta(description="Command that checks each device. Devices are healthy while they exist when not set."),
    ] = None

    def __post_init__(self) -> None:
        given = [name for name in ("paths", "usb", "pci", "rdma") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"found {found}, expected one of paths, usb, pci and rdma in a group")
        if self.paths and all(path.optional for path in self.paths):
            raise ValueError("paths: all are optional, expected one that is not")
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"env: found the name {name[:80]!a}, expected letters, digits and _")
            _check_text(f"env.{name}", value)

    @property
    def shares(self) -> int:
        """`count`, whose 0 means 1."""
        return self.count or 1


class DeviceSpec(Config, frozen=True, rename="camel", omit_defaults=True):
    """A resource with the devices of its groups."""

    name: Annotated[str, Meta(max_length=64, description="Name of the resource, the part after the slash. Required.")]
    groups: Annotated[tuple[Group, ...], Meta(max_length=256, description="Groups of devices. Required.")]


Devices: TypeAlias = Annotated[
    tuple[DeviceSpec, ...], Meta(max_length=64, description="Resources of the plugin, each with its devices.")
]


class GenericConfig(Config, frozen=True, kw_only=True):
    """Options of the plugin; `devices` can be set in YAML only."""

    domain: Annotated[str, Meta(description="part of the resource names before the slash")] = DEFAULT_DOMAIN
    devices: Devices = ()
    allocation_policy: AllocationPolicy = "none"
    cdi: CdiMode = "auto"

    def __post_init__(self) -> None:
        check_choice("allocation-policy", self.allocation_policy, POLICIES)
        check_choice("cdi", self.cdi, CDI_MODES)
        if self.cdi in ("all", "only") and not self.domain[:1].isalpha():
            raise ValueError(f"domain: found {self.domain!a}, expected a letter first because CDI names begin with it")
        check_resource_name(self.domain, "any")
        names: set[str] = set()
        for spec in self.devices:
            check_resource_name(self.domain, spec.name)
            if spec.name in names:
                raise ValueError(f"devices: found the name {spec.name!a} twice, expected one entry with all groups")
            names.add(spec.name)

    @property
    def groups(self) -> Iterator[Group]:
        """The groups of all resources."""
        return itertools.chain.from_iterable(spec.groups for spec in self.devices)


def binds(devices: Sequence[DeviceSpec]) -> bool:
    """Whether PCI functions are bound to vfio-pci, which writes to /sys."""
    return any(each.bind for spec in devices for group in spec.groups for each in group.pci)


def normal_id(text: str) -> str:
    """An ID as sysfs of USB has it: `1a86`. Empty for 0, which stands for any."""
    number = int(text, 16)
    return f"{number:04x}" if number else ""


def expand(text: str, values: Mapping[str, str]) -> str:
    """The text with the values of its placeholders."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def _check_path(field: str, path: str) -> None:
    if not path.startswith("/") or path.strip("/") == "":
        raise ValueError(f"{field}: found {path[:120]!a}, expected an absolute path below /")
    if not {".", ".."}.isdisjoint(path.split("/")):
        raise ValueError(f"{field}: found {path[:120]!a}, expected a path without . and ..")
    if _CONTROL.search(path):
        raise ValueError(f"{field}: found {path[:120]!a}, expected a path without control characters")


def _check_text(field: str, text: str) -> None:
    if "\x00" in text:
        raise ValueError(f"{field}: found {text[:120]!a}, expected a text without null bytes")
    for name in _PLACEHOLDER.findall(text):
        if name not in PLACEHOLDERS:
            known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
            raise ValueError(f"{field}: found the placeholder {{{name}}}, expected one of {known}")


def _check_words(field: str, words: Sequence[str]) -> None:
    for word in words:
        if not _WORD.fullmatch(word) or word in (".", ".."):
            raise ValueError(f"{field}: found {word[:80]!a}, expected a name of letters, digits, _, - and .")
