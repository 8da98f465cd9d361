"""KMM, the DaemonSet controller and the kubelet on the double of the API server, for tests of the Onload operator.

`Setup.run` reacts to changes until it is cancelled: one reaction of every node per round, as small as possible, so that
the operator sees all states in between.
"""

from __future__ import annotations

import asyncio
import copy
import re
from typing import Any

from onloadresources import resource

from accelplane.kube.testing import FakeApiServer
from accelplane.onload.names import Names

Object = dict[str, Any]
WORKER = {"node-role.kubernetes.io/worker": ""}
NAMES = Names("default", "onload")
KMM_LABEL = "kmm.node.kubernetes.io/module.name"
ONLOAD = "onloads"


def node(name: str, *, ready: bool = True, **labels: str) -> Object:
    status = {
        "nodeInfo": {"kernelVersion": "5.14.0-284.el9.x86_64"},
        "conditions": [{"type": "Ready", "status": str(ready)}],
        "allocatable": {"cpu": "4"},
    }
    return {"metadata": {"name": name, "labels": {**WORKER, **labels}}, "spec": {}, "status": status}


def app(name: str, place: str, namespace: str = "apps", **labels: str) -> Object:
    """A running pod that uses Onload."""
    limits = {"amd.com/onload": "1"}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"nodeName": place, "containers": [{"name": "a", "resources": {"limits": limits, "requests": limits}}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def definition(*, in_tree_list: bool = True) -> Object:
    """The definition of KMM's Module, with the fields that the operator checks."""
    fields: Object = {"version": {}, "kernelMappings": {}, "inTreeModuleToRemove": {}}
    if in_tree_list:
        fields["inTreeModulesToRemove"] = {}
    loader = {"properties": {"container": {"properties": fields}}}
    spec: Object = {"properties": {"selector": {}, "moduleLoader": loader}}
    if in_tree_list:
        spec["properties"]["tolerations"] = {}
    schema = {"openAPIV3Schema": {"properties": {"spec": spec}}}
    return {
        "metadata": {"name": "modules.kmm.sigs.x-k8s.io"},
        "spec": {"versions": [{"name": "v1beta1", "served": True, "schema": schema}]},
    }


class Setup:
    """Simulates KMM, the kubelet and plugin pods. `broken` are versions that do not work."""

    def __init__(self, api: FakeApiServer, *, nodes: int = 2, kmm: bool = True, names: Names = NAMES) -> None:
        self.api = api
        self.names = names
        self.broken: set[str] = set()
        self.violations: list[str] = []
        self.loaded: dict[tuple[str, str], Object] = {}
        self.most_down = 0
        for index in range(nodes):
            api.put("nodes", node(f"node-{index}"))
        if kmm:
            api.put("customresourcedefinitions", definition())

    def create(self, **paths: Any) -> Object:
        """Creates the resource, or changes its spec."""
        result = resource(self.names.name, self.names.namespace, **paths)
        known = self.onload()
        result["metadata"] = {**(known["metadata"] if known else {}), **result["metadata"]}
        result["metadata"]["generation"] = (known["metadata"]["generation"] + 1) if known else 1
        if known and "status" in known:
            result["status"] = known["status"]
        return self.api.put(ONLOAD, result)

    def onload(self) -> Object | None:
        return self.api.get(ONLOAD, self.names.name, self.names.namespace)

    def delete(self) -> None:
        """Deletes the resource as a user does."""
        found = copy.deepcopy(self.onload())
        assert found
        if not found["metadata"].get("finalizers"):
            self.api.remove(ONLOAD, self.names.name, self.names.namespace)
            return
        found["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
        found["metadata"]["generation"] += 1
        self.api.put(ONLOAD, found)

    def status(self) -> Object:
        return (self.onload() or {}).get("status", {})

    def condition(self, kind: str) -> Object:
        return next((each for each in self.status().get("conditions", ()) if each["type"] == kind), {})

    def is_ready(self, version: str) -> bool:
        generation = (self.onload() or {"metadata": {}})["metadata"].get("generation")
        found, status = self.condition("Ready"), self.status()
        current = found.get("observedGeneration") == generation
        return bool(found and found["status"] == "True" and current and status["onload"]["version"] == version)

    def labels(self, name: str) -> Object:
        found = self.api.get("nodes", name)
        assert found
        return found["metadata"]["labels"]

    def versions(self) -> set[tuple[str | None, ...]]:
        """The values of the labels of the operator on all nodes."""
        return {
            tuple(each["metadata"]["labels"].get(label) for label in self.names.labels)
            for each in self.api.all("nodes")
        }

    def leftovers(self) -> list[str]:
        """All labels and annotations of nodes that belong to the resource."""
        keys = {*self.names.labels, self.names.progress_annotation}
        return [
            f"{each['metadata']['name']}: {key}"
            for each in self.api.all("nodes")
            for key in (*each["metadata"]["labels"], *(each["metadata"].get("annotations") or {}))
            if key in keys
        ]

    # Reactions of the cluster

    async def run(self) -> None:
        while True:
            changed = self.api.changed
            self.react()
            if changed is self.api.changed:
                await changed.wait()
            await asyncio.sleep(0)

    def react(self) -> None:
        for each in self.api.all("nodes"):
            self._load(each["metadata"]["name"])
            self._run_plugin(each["metadata"]["name"])
        self._count()

    def _load(self, name: str) -> None:
        """KMM 2.5: unloads first, and loads only what is not loaded."""
        names = self.names
        for module, label in ((names.module, names.module_label), (names.sfc_module, names.sfc_label)):
            labels = dict(self.labels(name))
            ready, version_ready = names.ready_label(module), names.version_ready_label(module)
            version, live = labels.get(label), self.api.get("modules", module, names.namespace)
            content = self._content(live, version, name)
            # KMM 2 reloads a module at once if its content differs although the version does not.
            differs = content is not None and self.loaded.setdefault((name, module), content) != content
            if ready in labels and (labels.get(version_ready) != version or differs):
                if apps := self.apps(name):
                    self.violations.append(f"{name}: {module} would be unloaded while {apps} run")
                    continue
                if module == names.sfc_module and names.ready_label(names.module) in labels:
                    self.violations.append(f"{name}: sfc would be unloaded before onload")
                    continue
                self._relabel(name, {ready: None, version_ready: None})
                self.loaded.pop((name, module), None)
            elif version and ready not in labels and live and self._matches(live, version, name):
                self._relabel(name, {ready: "", version_ready: version})
                if content is not None:
                    self.loaded[name, module] = content

    def _content(self, live: Object | None, version: str | None, name: str) -> Object | None:
        """What KMM would load on a node, if the version of the Module is that of the node."""
        container = (live or {"spec": {}})["spec"].get("moduleLoader", {}).get("container", {})
        kernel = (self.api.get("nodes", name) or {})["status"]["nodeInfo"]["kernelVersion"]
        mappings = (each for each in container.get("kernelMappings", ()) if re.search(each["regexp"], kernel))
        if container.get("version") != version or (mapping := next(mappings, None)) is None:
            return None
        fields = (container["modprobe"], container.get("imagePullPolicy"))
        return {"image": mapping["containerImage"], "fields": fields}

    def _matches(self, live: Object, pattern: str, name: str) -> bool:
        container = live["spec"]["moduleLoader"]["container"]
        kernel = (self.api.get("nodes", name) or {})["status"]["nodeInfo"]["kernelVersion"]
        selected = live["spec"]["selector"].items() <= self.labels(name).items()
        mapped = any(re.search(each["regexp"], kernel) for each in container["kernelMappings"])
        return container["version"] == pattern and selected and mapped and pattern not in self.broken

    def _run_plugin(self, name: str) -> None:
        """The DaemonSet controller makes and deletes the plugin pod; the kubelet runs it."""
        live = self.api.get("daemonsets", self.names.daemonset, self.names.namespace)
        pod_name = f"plugin-{name}"
        pod = self.api.get("pods", pod_name, self.names.namespace)
        labels = self.labels(name)
        gate = labels.get(self.names.gate_label)
        selected = live is not None and gate is not None
        if live is not None:
            selected = selected and live["spec"]["template"]["spec"]["nodeSelector"].items() <= labels.items()
        if pod is None and selected and live is not None:
            template = copy.deepcopy(live["spec"]["template"])
            metadata = {**template["metadata"], "name": pod_name, "namespace": self.names.namespace}
            spec = {"nodeName": name, "containers": []}
            self.api.put("pods", {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})
        elif pod is not None and not selected:
            self._advertise(name, "0")
            self.api.remove("pods", pod_name, self.names.namespace)
        elif pod is not None and pod["status"]["phase"] == "Pending" and gate not in self.broken:
            conditions = [{"type": "Ready", "status": "True"}]
            self.api.put("pods", {**pod, "status": {"phase": "Running", "conditions": conditions}})
            self._advertise(name, "100")

    def _advertise(self, name: str, amount: str) -> None:
        found = copy.deepcopy(self.api.get("nodes", name))
        assert found
        found["status"]["allocatable"]["amd.com/onload"] = amount
        self.api.put("nodes", found)

    def _relabel(self, name: str, changes: dict[str, str | None]) -> None:
        found = copy.deepcopy(self.api.get("nodes", name))
        assert found
        labels = {**found["metadata"]["labels"], **changes}
        found["metadata"]["labels"] = {key: value for key, value in labels.items() if value is not None}
        self.api.put("nodes", found)

    def _count(self) -> None:
        prefix = self.names.progress_annotation
        annotations = [each["metadata"].get("annotations") or {} for each in self.api.all("nodes")]
        down = sum('"upgrade":true' in each.get(prefix, "") for each in annotations)
        self.most_down = max(self.most_down, down)

    def apps(self, place: str) -> list[str]:
        return [
            each["metadata"]["name"]
            for each in self.api.all("pods")
            if each["spec"].get("nodeName") == place and each["metadata"]["namespace"] == "apps"
        ]
