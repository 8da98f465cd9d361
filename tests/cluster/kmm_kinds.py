"""The kinds that the double of Kernel Module Management reads, with the fields that it reads."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from accelplane.kube.objects import ApiInfo, GlobalResource, Metadata, NamespacedResource, api

from .kmm_decisions import Entry, KernelMapping, Modprobe
from .kmm_definitions import GROUP, VERSION


class NodeInfo(msgspec.Struct, frozen=True, rename="camel"):
    kernel_version: str = ""
    boot_id: str = msgspec.field(default="", name="bootID")


class NodeStatus(msgspec.Struct, frozen=True, rename="camel"):
    node_info: NodeInfo = NodeInfo()


class Taint(msgspec.Struct, frozen=True):
    key: str = ""
    effect: str = ""


class NodeSpec(msgspec.Struct, frozen=True):
    taints: list[Taint] = []


class Node(GlobalResource, msgspec.Struct):
    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()
    _api_info: ClassVar[ApiInfo] = api("", "v1", "Node", "nodes")


class PodCondition(msgspec.Struct, frozen=True):
    type: str
    status: str


class PodStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    conditions: list[PodCondition] = []

    @property
    def ready(self) -> bool:
        return any(each.type == "Ready" and each.status == "True" for each in self.conditions)


class Container(msgspec.Struct, frozen=True):
    image: str = ""


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""
    containers: list[Container] = []


class Pod(NamespacedResource, msgspec.Struct):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()
    _api_info: ClassVar[ApiInfo] = api("", "v1", "Pod", "pods")


class NewPod(NamespacedResource, msgspec.Struct):
    metadata: Metadata
    spec: dict[str, object]
    _api_info: ClassVar[ApiInfo] = api("", "v1", "Pod", "pods")


class LoaderContainer(msgspec.Struct, rename="camel"):
    kernel_mappings: list[KernelMapping]
    modprobe: Modprobe
    version: str = ""
    container_image: str = ""
    image_pull_policy: str = ""
    in_tree_module_to_remove: str = ""
    in_tree_modules_to_remove: list[str] = []


class Loader(msgspec.Struct, rename="camel"):
    container: LoaderContainer
    service_account_name: str = ""


class ModuleSpec(msgspec.Struct, rename="camel"):
    selector: dict[str, str]
    module_loader: Loader


class Module(NamespacedResource, msgspec.Struct):
    metadata: Metadata
    spec: ModuleSpec
    _api_info: ClassVar[ApiInfo] = api(GROUP, VERSION, "Module", "modules")


class NodeModule(msgspec.Struct, rename="camel", omit_defaults=True):
    """An entry of the spec or status of a NodeModulesConfig."""

    name: str
    namespace: str
    config: Entry
    service_account_name: str = "default"
    version: str = ""
    boot_id: str = ""


class NodeModules(msgspec.Struct, frozen=True):
    modules: list[NodeModule] = []


class NodeModulesConfig(GlobalResource, msgspec.Struct):
    metadata: Metadata
    spec: NodeModules = NodeModules()
    status: NodeModules = NodeModules()
    _api_info: ClassVar[ApiInfo] = api(GROUP, VERSION, "NodeModulesConfig", "nodemodulesconfigs")


class ConfigMap(NamespacedResource, msgspec.Struct):
    metadata: Metadata
    data: dict[str, str] = {}
    _api_info: ClassVar[ApiInfo] = api("", "v1", "ConfigMap", "configmaps")


class Knobs(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The settings of the double. Patterns are searched in `NODE NAMESPACE/MODULE VERSION`. Times in seconds."""

    build_delay: float = 0
    load_delay: float = 0
    unload_delay: float = 0
    fail_load: str = ""
    stuck_unload: str = ""
    # Directories of the node that the pods need in order to run modprobe.
    host_paths: list[str] = []
