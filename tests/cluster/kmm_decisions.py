"""The decisions of Kernel Module Management (KMM) that other controllers can observe, as pure functions.

Two generations exist. KMM 1.1 runs a loader pod on each node for as long as the module is loaded. KMM 2.x writes a
NodeModulesConfig for each node, and worker pods load or unload a module and exit. Both follow the same version labels
of nodes. Source: section 17 of the specification of the Onload operator.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

DESIRED = "kmm.node.kubernetes.io/version-module"
LOADER = {1: "beta.kmm.node.kubernetes.io/version-module-loader", 2: "beta.kmm.node.kubernetes.io/version-worker-pod"}
DEVICE_PLUGIN = "beta.kmm.node.kubernetes.io/version-device-plugin"
KERNEL_LABEL = "kmm.node.kubernetes.io/kernel-version.full"
NAME_LABEL = "kmm.node.kubernetes.io/module.name"
ROLE_LABEL = "kmm.node.kubernetes.io/role"
ACTION_LABEL = "kmm.node.kubernetes.io/worker-action"
LOADER_ROLE = "module-loader"

Generation = Literal[1, 2]
WorkerAction = Literal["Load", "Unload"]


class ModuleKey(NamedTuple):
    namespace: str
    name: str

    def label(self, prefix: str) -> str:
        return f"{prefix}.{self.namespace}.{self.name}"

    @property
    def ready(self) -> str:
        return f"kmm.node.kubernetes.io/{self.namespace}.{self.name}.ready"

    @property
    def version_ready(self) -> str:
        return f"kmm.node.kubernetes.io/{self.namespace}.{self.name}.version.ready"

    @property
    def old_ready(self) -> str:
        """A second label of KMM 1.1, without the namespace."""
        return f"kmm.node.kubernetes.io/{self.name}.ready"


class LabelChange(NamedTuple):
    """A label of a node to set, or to remove if the value is None."""

    label: str
    value: str | None


class KernelMapping(msgspec.Struct, frozen=True, rename="camel"):
    """An entry of `kernelMappings`."""

    regexp: str = ""
    literal: str = ""
    container_image: str = ""
    build: dict[str, object] | None = None
    in_tree_module_to_remove: str = ""
    in_tree_modules_to_remove: list[str] = []


class Modprobe(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    module_name: str = ""
    dir_name: str = "/opt"
    parameters: list[str] = []


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The configuration to load a module on a node: `config` of NodeModulesConfig."""

    kernel_version: str
    container_image: str
    image_pull_policy: str = "IfNotPresent"
    in_tree_modules_to_remove: list[str] = []
    modprobe: Modprobe = Modprobe()


def module_keys(labels: Mapping[str, str]) -> set[ModuleKey]:
    """The modules that version labels of a node name. Namespace and name are the last two parts of the label."""
    prefixes = (DESIRED, *LOADER.values(), DEVICE_PLUGIN)
    found = set[ModuleKey]()
    for label in labels:
        if any(label.startswith(f"{prefix}.") for prefix in prefixes):
            *_, namespace, name = label.split(".")
            found.add(ModuleKey(namespace, name))
    return found


def label_change(
    labels: Mapping[str, str], key: ModuleKey, generation: Generation, *, old_module: bool, plugin_pod: bool = False
) -> LabelChange | None:
    """The next change of the version labels of a node for one module, if any.

    `old_module` is true while a module of an earlier version may be loaded, `plugin_pod` while a device plugin of KMM
    runs there. A label with an empty value counts as missing.
    """
    names = [key.label(prefix) for prefix in (DESIRED, LOADER[generation], DEVICE_PLUGIN)]
    desired, loader, plugin = (labels.get(name, "") for name in names)
    if loader and loader != desired:
        if plugin:
            return LabelChange(names[2], None) if plugin != desired else None
        return None if not desired and plugin_pod else LabelChange(names[1], None)
    if desired and not plugin:
        if loader:
            return LabelChange(names[2], desired)
        return None if old_module else LabelChange(names[1], desired)
    return None


def kernel_of(kernel_version: str) -> str:
    return kernel_version.removesuffix("+")


def mapping_for(mappings: Iterable[KernelMapping], kernel: str) -> KernelMapping | None:
    """The first mapping for this kernel."""
    for mapping in mappings:
        if (mapping.literal and mapping.literal == kernel) or (mapping.regexp and re.search(mapping.regexp, kernel)):
            return mapping
    return None


def image_for(template: str, kernel: str, key: ModuleKey) -> str:
    """The image of a mapping, with its variables replaced."""
    version = kernel.partition("-")[0]
    parts = [*version.split("."), "", ""]
    values = {
        "KERNEL_FULL_VERSION": kernel,
        "KERNEL_VERSION": kernel,
        "KERNEL_XYZ": version,
        "KERNEL_X": parts[0],
        "KERNEL_Y": parts[1],
        "KERNEL_Z": parts[2],
        "MOD_NAME": key.name,
        "MOD_NAMESPACE": key.namespace,
    }
    return re.sub(r"\$\{?([A-Z_]+)\}?", lambda match: values.get(match[1], match[0]), template)


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(label) == value for label, value in selector.items())


def runs_on(version: str, label: str) -> bool:
    """Whether a module of this version belongs on a node with this loader label."""
    return not version or version == label


def desired_entry(version: str, label: str, entry: Entry, current: Entry | None) -> Entry | None:
    """The entry of a module in the spec of a NodeModulesConfig. It is unchanged while the label has another version."""
    if runs_on(version, label):
        return entry
    return current if label else None


def worker_action(
    spec: Entry | None, status: Entry | None, *, status_boot: str, boot: str
) -> WorkerAction | Literal["Forget"] | None:
    """The action of a worker pod for one module of a node. `Forget` removes a status from before a reboot."""
    if spec is None:
        if status is None:
            return None
        return "Unload" if status_boot == boot else "Forget"
    if status is None or status_boot != boot:
        return "Load"
    if spec == status:
        return None
    return "Unload" if spec.kernel_version == status.kernel_version else "Load"


def load_script(entry: Entry) -> str:
    """The shell command that loads a module."""
    probe = entry.modprobe
    removals = [f"modprobe -r -d {probe.dir_name} {name}" for name in entry.in_tree_modules_to_remove]
    load = " ".join(["modprobe", "-v", "-d", probe.dir_name, probe.module_name, *probe.parameters])
    return " && ".join([*removals, load])


def unload_script(entry: Entry) -> str:
    """The shell command that unloads a module."""
    return f"modprobe -rv -d {entry.modprobe.dir_name} {entry.modprobe.module_name}"


def pod_name(key: ModuleKey, node: str, version: str) -> str:
    """The name of a loader pod: the same for the same arguments, so that no node gets two."""
    digest = hashlib.sha256(f"{node}\0{version}".encode()).hexdigest()[:10]
    return f"{key.name}-{digest}"
