"""CDI devices as values: the content of specification files, and their validation.

Facts: the Container Device Interface specification 0.5.0.
"""

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct, field, json, to_builtins
from msgspec.structs import force_setattr

VERSION = "0.5.0"

_VENDOR_OR_CLASS = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_HOOKS = frozenset(("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"))


class CdiError(ValueError):
    """An invalid CDI device. It is not written."""


class CdiNode(Struct, frozen=True, rename="camel"):
    """A device node that the container runtime creates."""

    path: str
    host_path: str
    permissions: str = "rw"


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
    """One CDI device, which has its own file. `kind` is `vendor/class`."""

    kind: str
    name: str
    nodes: Sequence[CdiNode] = ()
    mounts: Sequence[CdiMount] = ()
    hooks: Sequence[CdiHook] = ()
    env: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "mounts", "hooks", "env"):
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

    def document(self) -> dict[str, object]:
        """Returns the content of the file. Keys are in alphabetical order, empty lists are omitted."""
        lists = {"deviceNodes": self.nodes, "env": self.env, "hooks": self.hooks, "mounts": self.mounts}
        edits = to_builtins({key: entries for key, entries in lists.items() if entries}, order="sorted")
        return {
            "cdiVersion": VERSION,
            "containerEdits": {},
            "devices": [{"containerEdits": edits, "name": self.name}],
            "kind": self.kind,
        }

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
            if not node.path:
                yield "a device node has an empty path"
            if set(node.permissions) - set("rwm"):
                yield f"device node {node.path}: permissions are {node.permissions!a}, expected letters of r, w, m"
        for mount in self.mounts:
            if not mount.host_path or not mount.container_path:
                yield f"mount {mount.host_path!a} to {mount.container_path!a}: expected two paths"
        for hook in self.hooks:
            if hook.name not in _HOOKS:
                yield f"hook name is {hook.name!a}, expected one of {', '.join(sorted(_HOOKS))}"
            if not hook.path:
                yield f"hook {hook.name} has an empty path"
