"""CDI devices as values: the content of specification files, and their validation.

Facts: the Container Device Interface specification 0.5.0, and 0.7.0 for additional groups.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field, json, to_builtins
from msgspec.structs import force_setattr

VERSION = "0.5.0"
# The first version with additionalGids.
GIDS_VERSION = "0.7.0"

_VENDOR_OR_CLASS = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_HOOKS = frozenset(("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"))


class CdiError(ValueError):
    """An invalid CDI device. It is not written."""


class CdiNode(Struct, frozen=True, rename="camel"):
    """A device node that the container runtime creates.

    Without a type and numbers the runtime reads those of `host_path` when it starts a container.
    """

    path: str
    host_path: str
    permissions: str = "rw"
    type: Literal["b", "c"] | UnsetType = UNSET
    major: int | UnsetType = UNSET
    minor: int | UnsetType = UNSET


class CdiMount(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A mount with `type` and `options` as in mount(8). `host_path` is its source, or a word such as `tmpfs`."""

    host_path: str
    container_path: str
    type: str = ""
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        force_setattr(self, "options", tuple(self.options))


class CdiHook(Struct, frozen=True, omit_defaults=True):
    """A program on the host that the container runtime runs as the named OCI hook, with a timeout in seconds."""

    name: str = field(name="hookName")
    path: str
    args: Sequence[str] = ()
    env: Sequence[str] = ()
    timeout: int | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "args", tuple(self.args))
        force_setattr(self, "env", tuple(self.env))


class CdiDevice(Struct, frozen=True, kw_only=True):
    """One CDI device. `kind` is `vendor/class`. A device of a plugin has its own file, `file_name`."""

    kind: str
    name: str
    nodes: Sequence[CdiNode] = ()
    mounts: Sequence[CdiMount] = ()
    hooks: Sequence[CdiHook] = ()
    env: Sequence[str] = ()
    gids: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "mounts", "hooks", "env", "gids"):
            force_setattr(self, name, tuple(getattr(self, name)))

    @property
    def qualified_name(self) -> str:
        return f"{self.kind}={self.name}"

    @property
    def file_name(self) -> str:
        return f"{self.kind.replace('/', '-')}-{self.name}.yaml"

    @property
    def indispensable(self) -> bool:
        """Whether an Allocate response does not suffice: it has no hooks and only mounts of the host's file systems."""
        return bool(self.hooks) or any(not mount.host_path.startswith("/") for mount in self.mounts)

    @property
    def edits(self) -> dict[str, object]:
        """The changes of the container. Keys are in alphabetical order, empty lists are omitted."""
        lists = {
            "additionalGids": self.gids, "deviceNodes": self.nodes, "env": self.env, "hooks": self.hooks,
            "mounts": self.mounts,
        }  # fmt: skip
        return to_builtins({key: entries for key, entries in lists.items() if entries}, order="sorted")

    def check(self) -> None:
        """Raises `CdiError` with the device and the violated rule."""
        vendor, slash, cls = self.kind.partition("/")
        if not slash or not _VENDOR_OR_CLASS.fullmatch(vendor) or not _VENDOR_OR_CLASS.fullmatch(cls):
            raise CdiError(f"CDI kind {self.kind!a}: expected vendor/class of letters, digits and [_.-]")
        if "." in cls:
            raise CdiError(
                f"CDI kind {self.kind!a}: found a dot in the class, which needs CDI 0.6.0; files have version {VERSION}"
            )
        if not _DEVICE.fullmatch(self.name):
            raise CdiError(
                f"CDI device name {self.name!a}: expected letters, digits and [_.:-], alphanumeric at both ends"
            )
        if not (self.nodes or self.mounts or self.hooks or self.env):
            raise CdiError(
                f"CDI device {self.qualified_name} has no container edits, expected nodes, mounts, hooks or env"
            )
        problem = next(self._problems(), None)
        if problem:
            raise CdiError(f"CDI device {self.qualified_name}: {problem}")

    def _problems(self) -> Iterator[str]:
        try:
            json.encode(self)
        except UnicodeEncodeError as error:
            yield f"{error.object!a} is not UTF-8 text"
        for entry in self.env:
            if "=" not in entry or entry.startswith("="):
                yield f"environment entry {entry!a} expected NAME=value"
        for node in self.nodes:
            yield from _node_problems(node)
        for mount in self.mounts:
            if not mount.host_path or not mount.container_path:
                yield f"mount {mount.host_path!a} to {mount.container_path!a}: expected two paths"
        for hook in self.hooks:
            if hook.name not in _HOOKS:
                yield f"hook name is {hook.name!a}, expected one of {', '.join(sorted(_HOOKS))}"
            if not hook.path:
                yield f"hook {hook.name} has an empty path"


def _node_problems(node: CdiNode) -> Iterator[str]:
    if not node.path:
        yield "a device node has an empty path"
    if set(node.permissions) - set("rwm"):
        yield f"device node {node.path}: permissions are {node.permissions!a}, expected letters of r, w, m"
    numbers = [number for number in (node.major, node.minor) if not isinstance(number, UnsetType)]
    if len(numbers) != (0 if node.type is UNSET else 2) or any(number < 0 for number in numbers):
        yield f"device node {node.path}: expected type, major and minor, with numbers from 0, or none of them"


def document(devices: Sequence[CdiDevice]) -> dict[str, object]:
    """The content of a file with the devices, which have the same kind. Raises `CdiError`."""
    kinds, names = {device.kind for device in devices}, [device.name for device in devices]
    if len(kinds) != 1 or len(set(names)) < len(names):
        found = ", ".join(ascii(device.qualified_name) for device in devices)
        raise CdiError(f"CDI file with {found or 'no device'}: expected devices of one kind with different names")
    for device in devices:
        device.check()
    return {
        "cdiVersion": GIDS_VERSION if any(device.gids for device in devices) else VERSION,
        "containerEdits": {},
        "devices": [{"containerEdits": device.edits, "name": device.name} for device in devices],
        "kind": kinds.pop(),
    }
