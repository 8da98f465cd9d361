"""The objects that releases 3.0.0 and 3.0.1 of the Go operator create for the resource of `onload_lab.onload`.

Source: sections 4, 6, 7 and 20 of the specification of the Onload operator.
"""

from __future__ import annotations

from typing import Any, Literal

from .kmm_decisions import DESIRED
from .objects import Object
from .onload_lab import MODULE, NAMES, NAMESPACE, PLUGIN_IMAGE, SELECTOR, SFC, user_image

Release = Literal["3.0.0", "3.0.1"]

_PATH = "/opt/onload/"
_INIT = """set -e;
cp -TRv /opt/onload /host/onload;
mkdir -p /mnt/onload/sbin/;
cp -v /opt/onload/sbin/onload_cp_server /mnt/onload/sbin/;
"""
_PRIVILEGED = {"privileged": True}
_FLAGS = (
    "-maxPods=100", "-setPreload=true", "-mountOnload=false", f"-hostOnloadPath={_PATH}", "-baseMountPath=/opt/onload",
    "-binMountPath=/usr/bin", "-libMountPath=/usr/lib64",
)  # fmt: skip


def node_labels(version: str) -> dict[str, str]:
    """The labels of a node after the installation."""
    return dict.fromkeys([MODULE.label(DESIRED), SFC.label(DESIRED), NAMES.gate_label], version)


def objects(resource: Object, release: Release) -> list[tuple[str, Object]]:
    """Modules and DaemonSet for a resource that the API server has, each with the path to create it."""
    version = resource["spec"]["onload"]["version"]
    image = resource["spec"]["onload"]["kernelMappings"][0]["kernelModuleImage"]
    owner = {
        "apiVersion": "onload.amd.com/v1alpha1",
        "kind": "Onload",
        "name": resource["metadata"]["name"],
        "uid": resource["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    modules = f"/apis/kmm.sigs.x-k8s.io/v1beta1/namespaces/{NAMESPACE}/modules"
    manifests = [
        (modules, _module(NAMES.module, "onload", version, image, release)),
        (modules, _module(NAMES.sfc_module, "sfc", version, image, release)),
        (f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets", _daemonset(version, release)),
    ]
    for _, each in manifests:
        each["metadata"] |= {"namespace": NAMESPACE, "ownerReferences": [owner]}
    return manifests


def _labels(component: str, release: Release) -> dict[str, str]:
    return {} if release == "3.0.0" else NAMES.base_labels(component)


def _module(name: str, module: str, version: str, image: str, release: Release) -> Object:
    container: Object = {
        "modprobe": {"moduleName": module, "parameters": ["--first-time"]},
        "version": version,
        "kernelMappings": [{"regexp": ".*", "containerImage": image}],
    }
    if module == "sfc":
        container["inTreeModuleToRemove"] = "sfc"
    return {
        "apiVersion": "kmm.sigs.x-k8s.io/v1beta1",
        "kind": "Module",
        "metadata": {"name": name, "labels": _labels("module", release)},
        "spec": {"selector": SELECTOR, "moduleLoader": {"serviceAccountName": "onload", "container": container}},
    }


def _daemonset(version: str, release: Release) -> Object:
    name = NAMES.daemonset
    base = _labels("device-plugin", release)
    pod_labels = {**base, "onload.amd.com/name": name}
    version_label = "onload-version" if release == "3.0.0" else "onload.amd.com/version"
    gate = {"matchExpressions": [{"key": NAMES.gate_label, "operator": "Exists"}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [gate]}}
    init: Object = {
        "name": f"{NAMES.name}-onload-device-plugin-init" if release == "3.0.0" else "init",
        "image": user_image(version),
        "command": ["/bin/sh", "-c", _INIT],
        "securityContext": _PRIVILEGED,
        "volumeMounts": [
            {"name": "host-onload", "mountPath": "/host/onload"},
            {"name": "worker-volume", "mountPath": "/mnt/onload"},
        ],
    }
    pod: Object = {
        "serviceAccountName": "onload",
        "hostNetwork": True,
        "hostPID": True,
        "hostIPC": True,
        "nodeSelector": SELECTOR,
        "affinity": {"nodeAffinity": required},
        "volumes": [
            {"name": "kubelet-socket", "hostPath": {"path": "/var/lib/kubelet/device-plugins", "type": "Directory"}},
            {"name": "host-onload", "hostPath": {"path": _PATH, "type": "DirectoryOrCreate"}},
            {"name": "worker-volume", "emptyDir": {"sizeLimit": "8Mi"}},
        ],
        "initContainers": [init],
        "containers": [_plugin(), _worker(release)],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "labels": {**base, version_label: version}},
        "spec": {
            "selector": {"matchLabels": pod_labels},
            "updateStrategy": {"type": "OnDelete"},
            "template": {"metadata": {"labels": pod_labels}, "spec": pod},
        },
    }


def _plugin() -> Object:
    relabel = f"chcon --type container_file_t --recursive {_PATH} || echo 'cannot set the SELinux type'"
    return {
        "name": "device-plugin",
        "image": PLUGIN_IMAGE,
        "args": [*_FLAGS],
        "securityContext": _PRIVILEGED,
        "lifecycle": {
            "postStart": {"exec": {"command": ["/bin/sh", "-c", relabel]}},
            "preStop": {"exec": {"command": ["/bin/sh", "-c", f"rm -r {_PATH}"]}},
        },
        "volumeMounts": [
            {"name": "kubelet-socket", "mountPath": "/var/lib/kubelet/device-plugins"},
            {"name": "host-onload", "mountPath": _PATH},
        ],
    }


def _worker(release: Release) -> Object:
    environment: list[dict[str, Any]] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "CONTAINER_NAME", "value": "onload-worker"},
        {"name": "ONLOAD_CP_SERVER_PATH", "value": "/mnt/onload/sbin/onload_cp_server"},
    ]
    if release != "3.0.0":
        environment.append({"name": "ONLOAD_CP_SERVER_PARAMS", "value": "-K"})
    return {
        "name": "onload-worker",
        "image": PLUGIN_IMAGE,
        "command": ["onload-worker"],
        "securityContext": _PRIVILEGED,
        "volumeMounts": [{"name": "worker-volume", "mountPath": "/mnt/onload"}],
        "env": environment,
    }
