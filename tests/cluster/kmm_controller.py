"""A test double of Kernel Module Management (KMM), as a program: `python -m tests.cluster.kmm_controller 1`.

It reconciles each node: version labels, pods, the NodeModulesConfig of generation 2, and the labels that say which
modules are loaded. It counts nodes in the status of Modules. It does not build images, sign modules or run device
plugins. Its knobs are in the ConfigMap `KNOBS`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Literal

import msgspec

from accelplane.apiserver import AlreadyExists, NotFound
from accelplane.apiserver.ratelimit import RateLimit
from accelplane.kube.client import Client, Selection, load_config
from accelplane.kube.controller import Result
from accelplane.kube.finalizers import add_finalizer, remove_finalizer
from accelplane.kube.manager import OFF, Manager
from accelplane.kube.objects import Metadata, Request, is_terminating, request_of
from accelplane.kube.owners import owner_reference

from .kmm_decisions import (
    ACTION_LABEL,
    KERNEL_LABEL,
    LOADER,
    NAME_LABEL,
    Entry,
    Generation,
    LabelChange,
    ModuleKey,
    desired_entry,
    image_for,
    kernel_of,
    label_change,
    mapping_for,
    module_keys,
    runs_on,
    selects,
    worker_action,
)
from .kmm_kinds import ConfigMap, Knobs, Module, NewPod, Node, NodeModule, NodeModules, NodeModulesConfig, Pod
from .kmm_pods import FINALIZER, loader_pod, module_of, status_of, version_of, worker_pod

MODULE_FINALIZER = "kmm.node.kubernetes.io/module-finalizer"
KNOBS = Request("kmm-double", "kube-system")
_FAILED_POD_DELAY = 0.5


class Controller:
    """The reconciliation of nodes and Modules."""

    def __init__(self, manager: Manager, generation: Generation) -> None:
        self.generation: Generation = generation
        self.client = manager.client
        self.nodes = manager.cache(Node)
        self.modules = manager.cache(Module)
        self.pods = manager.cache(Pod, Selection(labels=NAME_LABEL))
        self.pods.add_index("node", lambda pod: [pod.spec.node_name])
        self.configs = manager.cache(NodeModulesConfig) if generation == 2 else None
        selection = Selection(namespace=KNOBS.namespace, fields=f"metadata.name={KNOBS.name}")
        self.settings = manager.cache(ConfigMap, selection)
        self._times: dict[str, float] = {}
        nodes = manager.controller("kmm-node", self.reconcile_node, workers=8, max_delay=1)
        nodes.for_object(self.nodes)
        nodes.watches(self.pods, lambda pod: [Request(pod.spec.node_name)])
        nodes.watches(self.modules, lambda _: self.nodes.requests())
        nodes.watches(self.settings, lambda _: self.nodes.requests())
        modules = manager.controller("kmm-module", self.reconcile_module, max_delay=1)
        modules.for_object(self.modules)
        modules.watches(self.nodes, lambda _: self.modules.requests(), debounce=0.2)
        if self.configs is not None:
            nodes.for_object(self.configs)
            modules.watches(self.configs, lambda _: self.modules.requests(), debounce=0.2)

    @property
    def knobs(self) -> Knobs:
        found = self.settings.get(KNOBS)
        return msgspec.json.decode(found.data["knobs"], type=Knobs) if found else Knobs()

    # Nodes

    async def reconcile_node(self, request: Request) -> Result | None:
        node = self.nodes.get(request)
        if node is None:
            for pod in self.pods.by_index("node", request.name):
                if is_terminating(pod):
                    await remove_finalizer(self.client, pod, FINALIZER)
            return None
        reconciliation = NodeReconciliation(self, node)
        await reconciliation.run()
        return Result(min(reconciliation.delays)) if reconciliation.delays else None

    def remaining(self, key: str, delay: float) -> float:
        """The rest of a delay that starts with the first call for this key."""
        if not delay:
            return 0
        now = asyncio.get_running_loop().time()
        return max(0.0, self._times.setdefault(key, now) + delay - now)

    def entry(self, module: Module, node: Node) -> Entry | None:
        """The configuration of a module for this node; None if it is not selected."""
        labels, container = node.metadata.labels or {}, module.spec.module_loader.container
        tainted = self.generation == 1 and any(taint.effect == "NoSchedule" for taint in node.spec.taints)
        if is_terminating(module) or tainted or not selects(module.spec.selector, labels):
            return None
        kernel = kernel_of(node.status.node_info.kernel_version)
        mapping = mapping_for(container.kernel_mappings, kernel)
        if mapping is None:
            return None
        key = key_of(module)
        template = mapping.container_image or container.container_image
        if mapping.build and self.remaining(f"build {key} {template} {kernel}", self.knobs.build_delay):
            return None
        removal = [mapping.in_tree_module_to_remove or container.in_tree_module_to_remove]
        removals = mapping.in_tree_modules_to_remove or container.in_tree_modules_to_remove or removal
        return Entry(
            kernel_version=kernel,
            container_image=image_for(template, kernel, key),
            image_pull_policy=container.image_pull_policy or "IfNotPresent",
            in_tree_modules_to_remove=[name for name in removals if name],
            modprobe=container.modprobe,
        )

    # Modules

    async def reconcile_module(self, request: Request) -> None:
        module = self.modules.get(request)
        if module is None:
            return
        key = key_of(module)
        if self.configs is not None:
            if is_terminating(module):
                used = any(each for config in self.configs for each in in_use(config) if each == key)
                if not used:
                    await remove_finalizer(self.client, module, MODULE_FINALIZER)
                return
            module = await add_finalizer(self.client, module, MODULE_FINALIZER)
        matching = [node for node in self.nodes if selects(module.spec.selector, node.metadata.labels or {})]
        counts = {
            "nodesMatchingSelectorNumber": len(matching),
            "desiredNumber": sum(1 for node in matching if self.entry(module, node)),
            "availableNumber": sum(1 for node in matching if key.ready in (node.metadata.labels or {})),
        }
        change = {"status": {"moduleLoader": counts}}
        await self.client.patch(Module, key.name, change, namespace=key.namespace, subresource="status")


class NodeReconciliation:
    """One reconciliation of one node. After the shortest of `delays` it has to be reconciled again."""

    def __init__(self, controller: Controller, node: Node) -> None:
        self.controller = controller
        self.client = controller.client
        self.knobs = controller.knobs
        self.node = node
        self.name = node.metadata.name or ""
        self.labels = node.metadata.labels or {}
        self.simulated = "kwok.x-k8s.io/node" in (node.metadata.annotations or {})
        self.delays: list[float] = []
        self.pods: dict[ModuleKey, list[Pod]] = {}
        for pod in controller.pods.by_index("node", self.name):
            self.pods.setdefault(pod_key(pod), []).append(pod)
        self.modules = {key_of(module): module for module in controller.modules}
        self.entries = {key: controller.entry(module, node) for key, module in self.modules.items()}

    async def run(self) -> None:
        if self.knobs.build_delay:
            self.delays.append(self.knobs.build_delay)
        changes = list[LabelChange]()
        if self.controller.configs is None:
            changes.append(LabelChange(KERNEL_LABEL, kernel_of(self.node.status.node_info.kernel_version)))
            for key in sorted({*self.modules, *self.pods, *module_keys(self.labels)}):
                changes += self._next_version_label(key, old_module=key in self.pods)
                changes += self._ready_labels_1(key)
                await self._loader(key)
        else:
            config = self.controller.configs.get(Request(self.name))
            spec, status = (modules_of(config, part) for part in ("spec", "status"))
            for key in sorted({*self.modules, *spec, *status, *module_keys(self.labels)}):
                changes += self._next_version_label(key, old_module=key.ready in self.labels)
                changes += self._ready_labels_2(key, spec, status)
            if not await self._write_spec(config, spec):
                await self._workers(spec, status)
        patch = {change.label: change.value for change in changes if self.labels.get(change.label) != change.value}
        if patch:
            await self.client.patch(Node, self.name, {"metadata": {"labels": patch}})

    def _next_version_label(self, key: ModuleKey, *, old_module: bool) -> list[LabelChange]:
        change = label_change(self.labels, key, self.controller.generation, old_module=old_module)
        return [change] if change else []

    def _loader_label(self, key: ModuleKey) -> str:
        return self.labels.get(key.label(LOADER[self.controller.generation]), "")

    def _matches(self, pattern: str, key: ModuleKey, version: str) -> bool:
        return bool(pattern) and re.search(pattern, f"{self.name} {key.namespace}/{key.name} {version}") is not None

    def _has_elapsed(self, description: str, delay: float) -> bool:
        """Whether the delay since the first call for this description has elapsed."""
        rest = self.controller.remaining(description, delay)
        if rest:
            self.delays.append(rest)
        return not rest

    # Generation 1

    def _ready_labels_1(self, key: ModuleKey) -> list[LabelChange]:
        ready = any(pod.status.ready and not is_terminating(pod) for pod in self.pods.get(key, ()))
        return [LabelChange(label, "" if ready else None) for label in (key.ready, key.old_ready)]

    async def _loader(self, key: ModuleKey) -> None:
        module, entry, label = self.modules.get(key), self.entries.get(key), self._loader_label(key)
        version = module.spec.module_loader.container.version if module else ""
        pods = self.pods.get(key, [])
        if not pods and module and entry and runs_on(version, label):
            await self._create(
                loader_pod(
                    key, self.name, version, entry,
                    owner=owner_reference(module), account=module.spec.module_loader.service_account_name,
                    host_paths=self.knobs.host_paths, simulated=self.simulated,
                )
            )  # fmt: skip
        for pod in pods:
            loaded = version_of(pod, key)
            current = entry is not None and runs_on(loaded, label)
            outdated = loaded == version and entry and pod.spec.containers[0].image != entry.container_image
            if is_terminating(pod):
                await self._finish_loader(pod, key, loaded)
            elif not current or outdated:
                await self.client.delete(Pod, pod.metadata.name or "", key.namespace, uid=pod.metadata.uid)
            else:
                await self._start_simulated(pod, key, loaded)

    async def _finish_loader(self, pod: Pod, key: ModuleKey, version: str) -> None:
        stuck = self._matches(self.knobs.stuck_unload, key, version)
        if not stuck and self._has_elapsed(
            f"unload {pod.metadata.uid}", self.knobs.unload_delay if self.simulated else 0
        ):
            await remove_finalizer(self.client, pod, FINALIZER)

    async def _start_simulated(self, pod: Pod, key: ModuleKey, version: str) -> None:
        if not self.simulated or pod.status.ready or self._matches(self.knobs.fail_load, key, version):
            return
        if self._has_elapsed(f"load {pod.metadata.uid}", self.knobs.load_delay):
            await self._set_phase(pod, "Running")

    # Generation 2

    def _ready_labels_2(
        self, key: ModuleKey, spec: dict[ModuleKey, NodeModule], status: dict[ModuleKey, NodeModule]
    ) -> list[LabelChange]:
        """As in KMM, the labels stay from the end of loading until the end of unloading."""
        version, existing = spec.get(key), status.get(key)
        if version is None and existing is None:
            return [LabelChange(key.ready, None), LabelChange(key.version_ready, None)]
        if version and existing and version.config == existing.config and existing.boot_id == self._boot:
            return [LabelChange(key.ready, ""), LabelChange(key.version_ready, existing.version or None)]
        return []

    @property
    def _boot(self) -> str:
        return self.node.status.node_info.boot_id

    async def _write_spec(self, config: NodeModulesConfig | None, spec: dict[ModuleKey, NodeModule]) -> bool:
        """Returns whether the spec of the NodeModulesConfig was written."""
        modules = list(self._desired_modules(spec))
        if modules == list(spec.values()):
            return False
        if config is None:
            new = NodeModulesConfig(
                Metadata(name=self.name, ownerReferences=[owner_reference(self.node)]), NodeModules(modules)
            )
            await self._create(new)
        else:
            await self.client.patch(NodeModulesConfig, self.name, {"spec": {"modules": msgspec.to_builtins(modules)}})
        return True

    def _desired_modules(self, spec: dict[ModuleKey, NodeModule]) -> Iterator[NodeModule]:
        for key in sorted({*self.modules, *spec}):
            module, entry, current = self.modules.get(key), self.entries.get(key), spec.get(key)
            if module is None or entry is None:
                continue
            version = module.spec.module_loader.container.version
            found = desired_entry(version, self._loader_label(key), entry, current.config if current else None)
            if found is None:
                continue
            if current and found == current.config:
                yield current
            else:
                account = module.spec.module_loader.service_account_name or "default"
                yield NodeModule(key.name, key.namespace, found, account, version)

    async def _workers(self, spec: dict[ModuleKey, NodeModule], status: dict[ModuleKey, NodeModule]) -> None:
        new_status = dict(status)
        for key in sorted({*spec, *status, *self.pods}):
            version, existing = spec.get(key), status.get(key)
            pods = self.pods.get(key, [])
            for pod in pods:
                await self._follow_worker(pod, key, new_status)
            if pods:
                continue
            action = worker_action(
                version and version.config, existing and existing.config,
                status_boot=existing.boot_id if existing else "", boot=self._boot,
            )  # fmt: skip
            if action == "Forget":
                new_status.pop(key)
            elif action:
                module = version if action == "Load" else existing
                assert module
                hosts = self.knobs.host_paths
                await self._create(worker_pod(self.name, module, action, host_paths=hosts, simulated=self.simulated))
        if new_status != status:
            modules = msgspec.to_builtins(list(new_status.values()))
            change = {"status": {"modules": modules}}
            await self.client.patch(NodeModulesConfig, self.name, change, subresource="status")

    async def _follow_worker(self, pod: Pod, key: ModuleKey, status: dict[ModuleKey, NodeModule]) -> None:
        """Writes the result of a worker pod to the status, and deletes the pod when the status has it."""
        module, loads = module_of(pod), (pod.metadata.labels or {})[ACTION_LABEL] == "Load"
        if is_terminating(pod):
            return
        phase, uid = pod.status.phase, pod.metadata.uid
        if phase not in {"Succeeded", "Failed"}:
            await self._end_simulated(pod, key, module.version, loads=loads)
        elif phase == "Succeeded" and loads and status.get(key) != self._loaded(module):
            status[key] = self._loaded(module)
        elif phase == "Succeeded" and not loads and key in status:
            del status[key]
        elif phase == "Succeeded" or self._has_elapsed(f"retry {uid}", _FAILED_POD_DELAY):
            await self.client.delete(Pod, pod.metadata.name or "", key.namespace, uid=uid)

    async def _end_simulated(self, pod: Pod, key: ModuleKey, version: str, *, loads: bool) -> None:
        delay = self.knobs.load_delay if loads else self.knobs.unload_delay
        if self.simulated and self._has_elapsed(f"worker {pod.metadata.uid}", delay):
            pattern = self.knobs.fail_load if loads else self.knobs.stuck_unload
            await self._set_phase(pod, "Failed" if self._matches(pattern, key, version) else "Succeeded")

    def _loaded(self, module: NodeModule) -> NodeModule:
        return msgspec.structs.replace(module, boot_id=self._boot)

    # Pods

    async def _create(self, thing: NewPod | NodeModulesConfig) -> None:
        with suppress(AlreadyExists):
            await self.client.create(thing)

    async def _set_phase(self, pod: Pod, phase: str) -> None:
        name, namespace = request_of(pod)
        with suppress(NotFound):
            await self.client.patch(Pod, name, status_of(phase), namespace=namespace, subresource="status")


def key_of(module: Module) -> ModuleKey:
    return ModuleKey(module.metadata.namespace or "", module.metadata.name or "")


def pod_key(pod: Pod) -> ModuleKey:
    return ModuleKey(pod.metadata.namespace or "", (pod.metadata.labels or {})[NAME_LABEL])


def modules_of(config: NodeModulesConfig | None, part: Literal["spec", "status"]) -> dict[ModuleKey, NodeModule]:
    modules: Iterable[NodeModule] = getattr(config, part).modules if config else ()
    return {ModuleKey(module.namespace, module.name): module for module in modules}


def in_use(config: NodeModulesConfig) -> set[ModuleKey]:
    return {*modules_of(config, "spec"), *modules_of(config, "status")}


async def run(generation: Generation) -> None:
    client = Client(load_config(), field_manager="kmm", rate_limit=RateLimit(500, 1000))
    manager = Manager(client, health_address=OFF, metrics_address=OFF, shutdown_delay=0)
    Controller(manager, generation)
    await manager.run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(run(2 if sys.argv[1] == "2" else 1))
