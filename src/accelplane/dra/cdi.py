"""The CDI file of a claim: one file for each claim and driver, with device nodes by number.

A device of the claim is the CDI device `<uid>-<device>` with nodes and mounts; each request is the CDI device
`<uid>-r<number>` with the environment. The names depend on nothing else, so they are the same whenever the claim is
prepared, and no other claim has them. Facts: Container Device Interface 0.5.0.
"""

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from accelplane.descriptors import read_limited
from accelplane.devices import CdiDevice, CdiHook, CdiMount, CdiNode, DeviceNode, Mount
from accelplane.devices.cdi import document
from accelplane.dra import durable
from accelplane.dra.journal import CdiFile
from accelplane.host import Host, Missing, Unreadable
from accelplane.host.devicenodes import nodes_behind

MAX_FILE = 1024 * 1024
_MODE = 0o644
_YAML_FIELD = re.compile(r"""^[ -]*["']?(kind|name)["']?: *["']?([^"'\s]+)["']? *$""", re.MULTILINE)
_NO_NAME = re.compile(r"[^A-Za-z0-9]+")


class Edits(Struct, frozen=True, kw_only=True):
    """What a container gets with a device, apart from variables. `gids` are groups of the nodes."""

    nodes: Sequence[CdiNode] = ()
    mounts: Sequence[CdiMount] = ()
    hooks: Sequence[CdiHook] = ()
    gids: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.nodes or self.mounts or self.hooks)


def kind(driver: str) -> str:
    return f"k8s.{driver}/claim"


def file_name(driver: str, uid: str) -> str:
    return f"k8s.{driver}-claim_{uid}.json"


def device_name(uid: str, device: str, share_id: str, *, admin: bool) -> str:
    return "-".join((uid, device, *((share_id[:8],) if share_id else ()), *(("admin",) if admin else ())))


def request_name(uid: str, number: int) -> str:
    return f"{uid}-r{number}"


def names_of(driver: str, uid: str) -> str:
    """What the qualified names of the claim's CDI devices begin with."""
    return f"{kind(driver)}={uid}-"


def unique_variable(driver: str, uid: str, number: int) -> str:
    """A variable that no other claim of a container sets."""
    return f"ACCELPLANE_{_NO_NAME.sub('_', driver).upper()}_{_NO_NAME.sub('_', uid[:8]).upper()}_{number}"


def edits(nodes: Iterable[DeviceNode], mounts: Iterable[Mount], devices: Iterable[CdiDevice]) -> Edits:
    """The files of an allocation, with the content of CDI devices that it names. Node numbers are not read yet."""
    found: dict[CdiNode, None] = {}
    bound: dict[CdiMount, None] = {}
    hooks: dict[CdiHook, None] = {}
    for node in nodes:
        found[CdiNode(node.container_path, node.host_path, node.permissions)] = None
    for mount in mounts:
        options = ("bind", "ro" if mount.read_only else "rw")
        bound[CdiMount(mount.host_path, mount.container_path, "none", options)] = None
    for device in devices:
        found.update(dict.fromkeys(device.nodes))
        bound.update(dict.fromkeys(device.mounts))
        hooks.update(dict.fromkeys(device.hooks))
    return Edits(nodes=tuple(found), mounts=tuple(bound), hooks=tuple(hooks))


def with_numbers(host: Host, found: Edits, *, groups: bool) -> Edits:
    """The edits with type and numbers of the device nodes as they are now, and with their groups if requested.

    Links and directories are replaced by the device nodes behind them. Raises `HostError` if a node is missing.
    """
    nodes = tuple([_numbered(host, each) for node in found.nodes for each in _behind(host, node)])
    statuses = [host.status(node.host_path) for node in nodes] if groups else []
    gids = {status.st_gid for status in statuses if status is not None}
    return replace(found, nodes=nodes, gids=tuple(sorted(gids - {0})))


def changed_node(host: Host, files: Iterable[CdiFile]) -> str:
    """Why a device node of the files is not what it was when they were written, empty if all are the same."""
    for node in _nodes(files):
        recorded = node.type, node.major, node.minor
        try:
            now = _numbered(host, node)
        except (Missing, Unreadable) as error:
            return str(error)
        if (now.type, now.major, now.minor) != recorded:
            return f"{node.host_path}: has other numbers than before"
    return ""


def claim_file(driver: str, uid: str, devices: Mapping[str, Edits], requests: Sequence[Mapping[str, str]]) -> CdiFile:
    """The file with `devices` by their CDI names, and the variables of each request. Raises `CdiError`."""
    found = [_device(kind(driver), name, each) for name, each in devices.items() if each]
    found += [
        CdiDevice(kind=kind(driver), name=request_name(uid, number),
                  env=[f"{name}={value}" for name, value in sorted(envs.items())])
        for number, envs in enumerate(requests)
        if envs
    ]  # fmt: skip
    return CdiFile(file_name(driver, uid), document(found))


def inherited_file(name: str, found: Edits) -> CdiFile | None:
    """The file with a device that has the qualified name that another driver gave it, None if it gives nothing.

    Raises `CdiError`.
    """
    kind_, _, device = name.partition("=")
    if not found:
        return None
    return CdiFile(f"{kind_.replace('/', '-')}_{device}-accelplane.json", document([_device(kind_, device, found)]))


class CdiDirectory:
    """The directory with the files of claims of one driver. Methods block and raise `OSError`."""

    def __init__(self, directory: str, driver: str) -> None:
        self.directory = directory
        self._driver = driver

    def ensure(self, file: CdiFile) -> bool:
        """Writes the file unless it has this content, or another file defines the same device of another driver.

        Returns whether it was written.
        """
        try:
            same = read_limited(f"{self.directory}/{file.name}", MAX_FILE, follow=False) == _encode(file)
        except OSError:
            same = False
        if same or (file.content.get("kind") != kind(self._driver) and self._defined_elsewhere(file)):
            return False
        os.makedirs(self.directory, mode=0o755, exist_ok=True)
        durable.write(f"{self.directory}/{file.name}", _encode(file), _MODE)
        return True

    def claim_devices(self, uid: str) -> Mapping[str, Sequence[str]]:
        """The paths of the device nodes of each CDI device in the file of a claim, by its name without the UID.

        Empty if the file does not exist or is not valid.
        """
        try:
            data = read_limited(f"{self.directory}/{file_name(self._driver, uid)}", MAX_FILE, follow=False)
            devices = msgspec.json.decode(data, type=_File).devices
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        return {
            each.name.removeprefix(f"{uid}-"): [node.path for node in each.container_edits.device_nodes]
            for each in devices
        }

    def has(self, name: str) -> bool:
        return os.path.lexists(f"{self.directory}/{name}")

    def remove(self, name: str) -> None:
        if os.path.isdir(self.directory):
            durable.remove(f"{self.directory}/{name}")

    def remove_temporary(self) -> None:
        if os.path.isdir(self.directory):
            durable.remove_temporary(self.directory, file_name(self._driver, "").removesuffix(".json"))

    def _defined_elsewhere(self, file: CdiFile) -> bool:
        """Whether another file defines the first device of this one."""
        own = msgspec.convert(file.content, _Spec)
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return False
        for name in names:
            if name != file.name and name.endswith((".json", ".yaml")):
                spec = _read_spec(f"{self.directory}/{name}")
                if spec.kind == own.kind and any(device.name == own.devices[0].name for device in spec.devices):
                    return True
        return False


class _Named(Struct, frozen=True):
    name: str


class _Spec(Struct, frozen=True):
    kind: str = ""
    devices: Sequence[_Named] = ()


def _read_spec(path: str) -> _Spec:
    """The kind and the devices of another program's file, none if it is no CDI file.

    The lines of YAML suffice: programs write these files, with one field in a line.
    """
    try:
        data = read_limited(path, MAX_FILE)
        if path.endswith(".json"):
            return msgspec.json.decode(data, type=_Spec)
        fields = [match.groups() for match in _YAML_FIELD.finditer(data.decode())]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Spec()
    kinds = [value for name, value in fields if name == "kind"]
    return _Spec(next(iter(kinds), ""), [_Named(value) for name, value in fields if name == "name"])


class _FileEdits(Struct, rename="camel"):
    device_nodes: list[CdiNode] = []


class _FileDevice(Struct, rename="camel"):
    name: str = ""
    container_edits: _FileEdits = msgspec.field(default_factory=_FileEdits)


class _File(Struct):
    devices: list[_FileDevice] = []


def _device(kind_: str, name: str, found: Edits) -> CdiDevice:
    return CdiDevice(kind=kind_, name=name, nodes=found.nodes, mounts=found.mounts, hooks=found.hooks, gids=found.gids)


def _nodes(files: Iterable[CdiFile]) -> list[CdiNode]:
    return [
        node
        for file in files
        for device in msgspec.convert(file.content, _File).devices
        for node in device.container_edits.device_nodes
    ]


def _encode(file: CdiFile) -> bytes:
    content: Mapping[str, Any] = file.content
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def _behind(host: Host, node: CdiNode) -> list[CdiNode]:
    """The node itself if there is no device node behind it. Raises `HostError`."""
    found = nodes_behind(host, node.host_path)
    return [replace(node, path=node.path + below, host_path=real) for below, real in found.items()] or [node]


def _numbered(host: Host, node: CdiNode) -> CdiNode:
    """Raises `Missing`, or `Unreadable` for another file than a device node."""
    status = host.status(node.host_path)
    if status is None:
        raise Missing(node.host_path, "does not exist")
    if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        number = status.st_rdev
        kind_ = "c" if stat.S_ISCHR(status.st_mode) else "b"
        return replace(node, type=kind_, major=os.major(number), minor=os.minor(number))
    if host.is_plain_stand_in(status):
        unset: UnsetType = UNSET
        return replace(node, type=unset, major=unset, minor=unset)
    raise Unreadable(node.host_path, "not a device node")
