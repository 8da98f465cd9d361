"""An installation of the Onload operator on kwok nodes: its resources, operators as processes, and checks.

`Lab.problems(version)` returns the differences to a cluster with the complete version on all nodes. `violations`
returns violations of the invariants of an upgrade.
"""

from __future__ import annotations

import http
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from accelplane.onload.names import RESOURCE, Names

from .cluster import Cluster
from .kmm import Kmm
from .kmm_decisions import ACTION_LABEL, DESIRED, LOADER, LOADER_ROLE, ROLE_LABEL, Generation, ModuleKey
from .large_cluster import NODE_GRACE_PERIOD
from .machine import REPOSITORY, wait_until
from .objects import Object
from .recording import Event, states

TREE = REPOSITORY / "deploy" / "onload"
OPERATOR_NAMESPACE = "onload-operator-system"
ACCOUNT = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/serviceaccounts/onload-operator-controller-manager"
NAMESPACE = "apps"
SELECTOR = {"example.com/onload": "true"}
PLUGIN_IMAGE = "example.com/onload-device-plugin:1"
OLD, NEW, BAD = "8.1.0", "8.2.0", "9.0.0"
NAMES = Names(NAMESPACE, "onload")
MODULE, SFC = ModuleKey(NAMESPACE, NAMES.module), ModuleKey(NAMESPACE, NAMES.sfc_module)
_MERGE = "application/merge-patch+json"


def onload(version: str = OLD, *, name: str = "onload", sfc: bool = True, **spec: Any) -> Object:
    """A resource; more keywords are fields of its spec."""
    mapping: Object = {"regexp": ".*", "kernelModuleImage": f"example.com/onload-module:{version}"}
    if sfc:
        mapping["sfc"] = {}
    return {
        "apiVersion": "onload.amd.com/v1alpha1",
        "kind": "Onload",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "onload": {"kernelMappings": [mapping], "userImage": user_image(version), "version": version},
            "devicePlugin": {},
            "selector": SELECTOR,
            "serviceAccountName": "onload",
            **spec,
            "upgrade": {"verify": {"minReadySeconds": 0}, **spec.get("upgrade", {})},
        },
    }


def user_image(version: str) -> str:
    return f"example.com/onload-user:{version}"


def application(replicas: int, name: str = "app", *, budget: int | str | None = None) -> list[Object]:
    """A Deployment whose pods use Onload, with a PodDisruptionBudget (`maxUnavailable`) if set."""
    labels = {"app": name}
    container = {"name": "app", "image": "example.com/app", "resources": {"limits": {RESOURCE: "1"}}}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    pod: Object = {"containers": [container], "topologySpreadConstraints": [spread]}
    metadata = {"name": name, "namespace": NAMESPACE}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    manifests: list[Object] = [{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}]
    if budget is not None:
        limits = {"selector": {"matchLabels": labels}, "maxUnavailable": budget}
        manifests.append(
            {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": limits}
        )
    return manifests


class Operator:
    """An operator as a process of this computer, with the rights of its service account and no others."""

    def __init__(self, directory: Path, kubeconfig: str, *flags: str, **environment: str) -> None:
        self.log = directory / "onload-operator.log"
        self._kubeconfig = directory / "onload-operator.kubeconfig"
        self._kubeconfig.write_text(kubeconfig)
        self._flags = flags
        self._environment = {**os.environ, "DEVICE_PLUGIN_IMG": PLUGIN_IMAGE, **environment}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", "from accelplane.cli.onloadoperator import main; raise SystemExit(main())"]
        flags = [f"--kubeconfig={self._kubeconfig}", "--health-probe-bind-address=0", "--metrics-bind-address=0"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *flags, *self._flags],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """Ends it as Kubernetes does."""
        assert self.process
        assert self.process.poll() is None, self.text()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.text()
        self.process = None

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


class Lab:
    """The cluster, with the rights of an administrator and of the operator."""

    def __init__(self, cluster: Cluster, kmm: Kmm, directory: Path) -> None:
        self.cluster = cluster
        self.kmm = kmm
        self.directory = directory

    # Operators

    @contextmanager
    def operator(self, *flags: str, **environment: str) -> Iterator[Operator]:
        """A running operator, which must not fail until the block ends."""
        with self.process(*flags, **environment) as running:
            running.start()
            yield running
            running.stop()
        assert "Traceback" not in running.text(), running.text()
        assert "forbidden" not in running.text(), running.text()

    @contextmanager
    def process(self, *flags: str, **environment: str) -> Iterator[Operator]:
        """An operator that is not started yet, and ends with the block."""
        running = Operator(self.directory, self.operator_kubeconfig(), *flags, **environment)
        try:
            yield running
        finally:
            running.kill()

    def operator_kubeconfig(self) -> str:
        """A kubeconfig with a token of the operator's service account."""
        code, answer = self.cluster.request("POST", f"{ACCOUNT}/token", {"spec": {"expirationSeconds": 7200}})
        assert code == http.HTTPStatus.CREATED, answer
        config = json.loads(self.cluster.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": answer["status"]["token"]}
        config["contexts"][0]["context"]["namespace"] = OPERATOR_NAMESPACE
        return json.dumps(config)

    # Objects

    @staticmethod
    def path(name: str = "onload") -> str:
        return f"/apis/onload.amd.com/v1alpha1/namespaces/{NAMESPACE}/onloads/{name}".rstrip("/")

    def create(self, manifest: Object) -> Object:
        code, answer = self.cluster.request("POST", self.path(""), manifest)
        assert code == http.HTTPStatus.CREATED, answer
        return answer

    def edit(self, change: Object, name: str = "onload") -> Object:
        """A merge patch of the spec."""
        return self.patch(self.path(name), {"spec": change})

    def upgrade(self, version: str, *, sfc: bool = True, **upgrade: Any) -> None:
        change: Object = {"onload": onload(version, sfc=sfc)["spec"]["onload"]}
        self.edit({**change, **({"upgrade": upgrade} if upgrade else {})})

    def delete(self, name: str = "onload") -> None:
        self.cluster.request("DELETE", self.path(name))

    def patch(self, path: str, change: Object) -> Object:
        code, answer = self.cluster.request("PATCH", path, change, content=_MERGE)
        assert code == http.HTTPStatus.OK, answer
        return answer

    def resource(self, name: str = "onload") -> Object:
        return self.cluster.get(self.path(name)) or {}

    def status(self) -> Object:
        return self.resource().get("status", {})

    def condition(self, kind: str) -> Object:
        """A condition of the current generation; empty without one."""
        found = self.resource()
        generation = found.get("metadata", {}).get("generation")
        for each in found.get("status", {}).get("conditions", []):
            if each["type"] == kind and each.get("observedGeneration") == generation:
                return each
        return {}

    def wait_condition(self, kind: str, status: str, reason: str = "", timeout: float = 60) -> Object:
        def holds() -> bool:
            found = self.condition(kind)
            return found.get("status") == status and reason in found["reason"]

        try:
            wait_until(holds, f"condition {kind}={status} {reason}", timeout)
        except Exception as error:
            error.add_note(json.dumps(self.status(), indent=1))
            raise
        return self.condition(kind)

    def items(self, path: str) -> list[Object]:
        return (self.cluster.get(path) or {"items": []})["items"]

    def nodes(self) -> dict[str, Object]:
        """The nodes that the selector of `onload` matches."""
        pairs = ",".join(f"{key}={value}" for key, value in SELECTOR.items())
        found = self.items(f"/api/v1/nodes?labelSelector={pairs}")
        return {each["metadata"]["name"]: each for each in found}

    def label(self, node: str, labels: Mapping[str, str | None]) -> None:
        self.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": dict(labels)}})

    def annotate(self, node: str, annotations: Mapping[str, str | None]) -> None:
        self.patch(f"/api/v1/nodes/{node}", {"metadata": {"annotations": dict(annotations)}})

    def version_labels(self) -> dict[str, str]:
        """The desired version of onload, by node."""
        key = MODULE.label(DESIRED)
        return {name: each["metadata"]["labels"].get(key, "") for name, each in self.nodes().items()}

    def plugins(self) -> dict[str, Object]:
        """The pods of the device plugin by node."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=onload.amd.com/name%3D{NAMES.daemonset}"
        return {each["spec"].get("nodeName", ""): each for each in self.items(path)}

    def app_pods(self) -> list[Object]:
        return [each for each in self.items(f"/api/v1/namespaces/{NAMESPACE}/pods") if uses_onload(each)]

    def available(self, name: str = "app") -> int:
        found = self.cluster.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{name}") or {"status": {}}
        return found["status"].get("availableReplicas", 0)

    # Checks

    def problems(self, version: str, *, sfc: bool = True, only: Sequence[str] = ()) -> list[str]:
        """The differences to a cluster with the version on all nodes, or on the given ones."""
        plugins, found = self.plugins(), list[str]()
        modules = [MODULE, SFC] if sfc else [MODULE]
        for name, node in self.nodes().items():
            if only and name not in only:
                continue
            labels = node["metadata"]["labels"]
            expected = {NAMES.gate_label: version}
            for key in modules:
                expected |= {
                    key.label(DESIRED): version,
                    key.label(LOADER[self.kmm.generation]): version,
                    key.ready: "",
                }
            found += [
                f"{name}: {key}={labels.get(key)}, expected {value}"
                for key, value in expected.items()
                if labels.get(key) != value
            ]
            if not sfc and SFC.label(DESIRED) in labels:
                found.append(f"{name}: has {SFC.label(DESIRED)}")
            plugin = plugins.get(name)
            if plugin is None or not is_ready(plugin):
                found.append(f"{name}: has no ready pod of the device plugin")
            elif plugin["spec"]["initContainers"][0]["image"] != user_image(version):
                found.append(f"{name}: its pod has {plugin['spec']['initContainers'][0]['image']}")
        names = {each["metadata"]["name"]: each for each in self.kmm.modules()}
        if {*names} != {key.name for key in modules}:
            found.append(f"modules {sorted(names)}")
        found += [
            f"{name}: not {version}"
            for name, each in names.items()
            if each["spec"]["moduleLoader"]["container"]["version"] != version
        ]
        return found

    def wait_complete(self, version: str, *, sfc: bool = True, timeout: float = 90) -> None:
        """Waits until the status reports a complete version."""
        self.wait(lambda: not self.problems(version, sfc=sfc), f"{version} on all nodes", timeout)
        self.wait_condition("Ready", "True")

    def wait(self, condition: Any, description: str, timeout: float = 60) -> None:
        try:
            wait_until(condition, description, timeout, every=0.1)
        except Exception as error:
            error.add_note("\n".join(self.problems(str(self.status().get("onload", {}).get("version")))))
            error.add_note(json.dumps(self.status(), indent=1))
            raise

    def clear(self) -> None:
        """Deletes the resources and their objects. Needs a running operator."""
        for each in self.items(self.path("")):
            self.delete(each["metadata"]["name"])
        for plural in ("apps/v1/deployments", "policy/v1/poddisruptionbudgets"):
            group, _, name = plural.rpartition("/")
            self.cluster.request("DELETE", f"/apis/{group}/namespaces/{NAMESPACE}/{name}")
        self.wait(lambda: not self.items(self.path("")), "resources: gone")
        self.wait(lambda: not self.kmm.modules(), "Modules: gone")
        self.wait(lambda: not self.items(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets"), "DaemonSets: deleted")
        self.wait(lambda: not self.plugins() and not self.app_pods(), "pods: gone")
        self.wait(lambda: not self.leftovers(), "labels of nodes: gone")

    def progress(self) -> list[str]:
        """The nodes with an annotation for a change that is under way."""
        return [name for name, each in self.nodes().items() if NAMES.progress_annotation in annotations_of(each)]

    def leftovers(self) -> list[str]:
        """Labels and annotations of nodes that belong to a resource."""
        return [
            f"{node['metadata']['name']}: {key}"
            for node in self.items("/api/v1/nodes")
            for key in (*node["metadata"].get("labels", {}), *node["metadata"].get("annotations", {}))
            if f"{NAMESPACE}.onload" in key
        ]


def annotations_of(thing: Object) -> Mapping[str, str]:
    return thing["metadata"].get("annotations", {})


def uses_onload(pod: Object) -> bool:
    containers = pod["spec"]["containers"]
    return any(RESOURCE in each.get("resources", {}).get("requests", {}) for each in containers)


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def violations(events: Sequence[Event], *, most: int = 1) -> list[str]:
    """Violations: a module is unloaded under a pod, or more than `most` nodes are changed at a time.

    KMM unloads a module after the removal of its label. So the label is removed when no pod on the node uses Onload
    and no pod of the device plugin exists. A pod of which no container ever runs, because the device plugin is gone,
    uses nothing. The installation on a new node is not a change.
    """
    found: list[str] = []
    keys = [key.label(DESIRED) for key in (MODULE, SFC)]
    changing: set[str] = set()
    upgradable: set[str] = set()
    started = _started(events)
    for event, before, objects in states(events):
        if event.kind != "Node" or before is None or event.deleted:
            continue
        name, old, new = event.name, before["metadata"]["labels"], event.thing["metadata"]["labels"]
        pods = [each for (kind, *_), each in objects.items() if kind == "Pod" and each["spec"].get("nodeName") == name]
        users = [each for each in pods if _blocks_unload(each) and each["metadata"]["uid"] in started]
        removed = [key for key in keys if key in old and old[key] != new.get(key)]
        if removed and users:
            names = [each["metadata"]["name"] for each in users]
            found.append(f"{event.version}: {name} lost {removed} while it had {names}")
        found += [f"{event.version}: {name} changed {key} without unloading" for key in removed if key in new]
        complete = keys[0] in new and NAMES.gate_label in new and new[keys[0]] == new[NAMES.gate_label]
        if complete:
            upgradable.add(name)
            changing.discard(name)
        elif name in upgradable:
            changing.add(name)
        if len(changing) > most:
            found.append(f"{event.version}: {sorted(changing)} are changed at a time")
    return found


def unloads_under_pods(events: Sequence[Event]) -> list[str]:
    """Pods of KMM that unload a module on a node where pods use Onload, also without a change of its labels."""
    found: list[str] = []
    started = _started(events)
    for event, _, objects in states(events):
        metadata = event.thing["metadata"]
        labels = metadata.get("labels", {})
        ends = labels.get(ROLE_LABEL) == LOADER_ROLE and "deletionTimestamp" in metadata
        if event.kind != "Pod" or event.deleted or not (ends or labels.get(ACTION_LABEL) == "Unload"):
            continue
        node = event.thing["spec"]["nodeName"]
        pods = [each for (kind, *_), each in objects.items() if kind == "Pod" and each["spec"].get("nodeName") == node]
        users = [each for each in pods if uses_onload(each) and each["metadata"]["uid"] in started]
        names = [each["metadata"]["name"] for each in users if _blocks_unload(each)]
        if names:
            found.append(f"{event.version}: {event.name} unloads a module on {node} while it has {names}")
    return found


def _started(events: Sequence[Event]) -> set[str]:
    """The UIDs of pods that have run a container.

    Until a kubelet has updated the status of its node, the scheduler assigns pods to it that it cannot give devices:
    the kubelet rejects them, or they are evicted before.
    """
    return {
        event.thing["metadata"]["uid"]
        for event in events
        if event.kind == "Pod"
        for container in event.thing.get("status", {}).get("containerStatuses", ())
        if {"running", "terminated"} & container.get("state", {}).keys()
    }


def _blocks_unload(pod: Object) -> bool:
    finished = pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}
    plugin = pod["metadata"].get("labels", {}).get("onload.amd.com/name") == NAMES.daemonset
    return not finished and (plugin or uses_onload(pod))


@contextmanager
def running_lab(directory: Path, generation: Generation, *, nodes: int = 3) -> Iterator[Lab]:
    """A control plane with the operator's definitions and rights, KMM and kwok nodes, without an operator."""
    with Cluster.running([], silence=NODE_GRACE_PERIOD) as cluster:
        cluster.create_namespace(NAMESPACE)
        install_definitions(cluster)
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "onload", "namespace": NAMESPACE}}
        cluster.apply(account)
        environment = {"KUBECONFIG": "/etc/kubernetes/admin.conf", "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "tests.cluster.onload_devices"]
        cluster.control.add_daemon("onload-devices", command, environment=environment).start()
        kmm = Kmm(cluster, generation)
        kmm.install()
        cluster.start_kwok()
        cluster.add_kwok_nodes(nodes, prefix="node", labels=SELECTOR)
        yield Lab(cluster, kmm, directory)


def install_definitions(cluster: Cluster) -> None:
    """Applies the tree `deploy/onload`, except for the operator itself."""
    documents = yaml.safe_load_all(cluster.kubectl("kustomize", TREE / "config" / "default"))
    cluster.apply(*(each for each in documents if each["kind"] != "Deployment"))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd/onloads.onload.amd.com")
