"""The pods of Kernel Module Management: loader pods of KMM 1.1, and worker pods of KMM 2.x.

On a node of kwok, the double sets the status of these pods itself: kwok skips pods with the annotation `MANAGED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from accelplane.kube.objects import Metadata, OwnerReference

from .kmm_decisions import (
    ACTION_LABEL,
    KERNEL_LABEL,
    LOADER,
    LOADER_ROLE,
    NAME_LABEL,
    ROLE_LABEL,
    Entry,
    ModuleKey,
    WorkerAction,
    load_script,
    pod_name,
    unload_script,
)
from .kmm_kinds import NewPod, NodeModule, Pod

FINALIZER = "kmm.node.kubernetes.io/node-labeler"
CONFIG = "kmm.node.kubernetes.io/worker-config"
MANAGED = {"kwok.x-k8s.io/status": "custom"}
_TOLERATE_ALL = [{"operator": "Exists"}]


def loader_pod(
    key: ModuleKey,
    node: str,
    version: str,
    entry: Entry,
    *,
    owner: OwnerReference,
    account: str,
    host_paths: Sequence[str],
    simulated: bool,
) -> NewPod:
    """A pod of KMM 1.1, which loads the module when it starts and unloads it when it ends."""
    labels = {
        NAME_LABEL: key.name,
        ROLE_LABEL: LOADER_ROLE,
        KERNEL_LABEL: entry.kernel_version,
        **({key.label(LOADER[1]): version} if version else {}),
    }
    hooks = {"postStart": _shell(load_script(entry)), "preStop": _shell(unload_script(entry))}
    container = _container(LOADER_ROLE, entry, host_paths)
    container |= {
        # Ends on SIGTERM, without the whole grace period.
        "command": _shell("trap exit TERM; sleep infinity & wait"),
        "lifecycle": {name: {"exec": {"command": command}} for name, command in hooks.items()},
    }
    metadata = _metadata(key, pod_name(key, node, version), labels, {}, simulated=simulated)
    metadata.finalizers = [FINALIZER]
    metadata.ownerReferences = [owner]
    return NewPod(metadata, _spec(node, container, account, host_paths, simulated=simulated))


def worker_pod(
    node: str, module: NodeModule, action: WorkerAction, *, host_paths: Sequence[str], simulated: bool
) -> NewPod:
    """A pod of KMM 2.x, which loads or unloads the module and exits."""
    key = ModuleKey(module.namespace, module.name)
    parts = {"name": "kmm", "component": "worker", "part-of": "kmm"}
    labels = {f"app.kubernetes.io/{name}": value for name, value in parts.items()}
    labels |= {NAME_LABEL: module.name, ACTION_LABEL: action}
    script = load_script(module.config) if action == "Load" else unload_script(module.config)
    container = _container("worker", module.config, host_paths) | {"command": _shell(script)}
    annotations = {CONFIG: msgspec.json.encode(module).decode()}
    metadata = _metadata(key, f"kmm-worker-{node}-{module.name}", labels, annotations, simulated=simulated)
    spec = _spec(node, container, module.service_account_name, host_paths, simulated=simulated)
    return NewPod(metadata, spec | {"restartPolicy": "Never"})


def version_of(pod: Pod, key: ModuleKey) -> str:
    """The version of the module of a loader pod."""
    return (pod.metadata.labels or {}).get(key.label(LOADER[1]), "")


def module_of(pod: Pod) -> NodeModule:
    """The module that a worker pod loads or unloads."""
    return msgspec.json.decode((pod.metadata.annotations or {})[CONFIG], type=NodeModule)


def status_of(phase: str) -> dict[str, Any]:
    """The status of a pod of a kwok node."""
    ready = "True" if phase == "Running" else "False"
    return {"status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]}}


def _metadata(
    key: ModuleKey, name: str, labels: dict[str, str], annotations: Mapping[str, str], *, simulated: bool
) -> Metadata:
    all_annotations = {**annotations, **(MANAGED if simulated else {})}
    return Metadata(name=name, namespace=key.namespace, labels=labels, annotations=all_annotations)


def _container(name: str, entry: Entry, host_paths: Sequence[str]) -> dict[str, object]:
    return {
        "name": name,
        "image": entry.container_image,
        "imagePullPolicy": entry.image_pull_policy,
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": f"host-{index}", "mountPath": path} for index, path in enumerate(host_paths)],
    }


def _spec(
    node: str, container: dict[str, object], account: str, host_paths: Sequence[str], *, simulated: bool
) -> dict[str, object]:
    return {
        "nodeName": node,
        "containers": [container],
        "serviceAccountName": account or "default",
        "tolerations": _TOLERATE_ALL,
        "terminationGracePeriodSeconds": 0 if simulated else 30,
        "volumes": [{"name": f"host-{index}", "hostPath": {"path": path}} for index, path in enumerate(host_paths)],
    }


def _shell(script: str) -> list[str]:
    return ["sh", "-c", script]
