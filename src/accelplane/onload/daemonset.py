"""The DaemonSet of the device plugin for one Onload resource.

    daemonset(onload, image)      the DaemonSet
    revision_of(daemonset)        the hash of what its pods have to be restarted for

Facts: the DaemonSet of the Onload operator 3.0.1. Differences: files are installed as `installation` says, without
hooks of the device plugin, and containers run as root explicitly.
"""

from collections.abc import Iterator

import msgspec

from accelplane.kube.ensure import digest_of
from accelplane.kube.jsontypes import Json, JsonObject, as_list, as_mapping
from accelplane.kube.objects import Metadata
from accelplane.onload.installation import SCRIPT, installation_name
from accelplane.onload.models import (
    DEFAULT_HOST_PATH,
    DEFAULT_PARAMETERS,
    Onload,
    OnloadSpec,
    PluginOptions,
    options_of,
)
from accelplane.onload.modules import names_of
from accelplane.onload.names import NAME_LABEL, PLUGIN_COMPONENT, REVISION_ANNOTATION, VERSION_LABEL, Names
from accelplane.onload.resources import DaemonSet

_KUBELET = "/var/lib/kubelet/device-plugins"
_WORKER_MOUNT: Json = {"name": "worker-volume", "mountPath": "/mnt/onload"}
# The image may have another user.
_PRIVILEGED: Json = {"privileged": True, "runAsUser": 0}


def daemonset(onload: Onload, image: str) -> DaemonSet:
    """The DaemonSet; `image` has the device plugin and the worker."""
    names = names_of(onload)
    labels = names.base_labels(PLUGIN_COMPONENT)
    pod_labels = {**labels, NAME_LABEL: names.daemonset}
    pod = _pod(onload, names, image)
    spec: JsonObject = {
        "selector": {"matchLabels": {**pod_labels}},
        "template": {
            "metadata": {"labels": {**pod_labels}, "annotations": {REVISION_ANNOTATION: _revision(pod)}},
            "spec": pod,
        },
        "updateStrategy": {"type": "OnDelete"},
    }
    metadata = Metadata(
        name=names.daemonset, namespace=names.namespace, labels={**labels, VERSION_LABEL: onload.spec.onload.version}
    )
    return DaemonSet(metadata=metadata, spec=msgspec.convert(spec, dict[str, object]))


def revision_of(made: DaemonSet) -> str:
    """The revision of the pods of a DaemonSet."""
    template = as_mapping(made.spec.get("template")) or {}
    metadata = as_mapping(template.get("metadata")) or {}
    return str((as_mapping(metadata.get("annotations")) or {}).get(REVISION_ANNOTATION, ""))


def with_selector_of(made: DaemonSet, live: DaemonSet) -> DaemonSet:
    """The DaemonSet with the selector of the existing one, which is immutable.

    Version 3.0.0 of the Go operator had a selector without the base labels. Pods that it selects stay.
    """
    selector = as_mapping(live.spec.get("selector"))
    if not selector:
        return made
    return msgspec.structs.replace(made, spec={**made.spec, "selector": dict(selector)})


def with_node_selector(made: DaemonSet, selector: object) -> DaemonSet:
    """The DaemonSet with another node selector."""
    template = dict(as_mapping(made.spec.get("template")) or {})
    template["spec"] = {**(as_mapping(template.get("spec")) or {}), "nodeSelector": selector}
    return msgspec.structs.replace(made, spec={**made.spec, "template": template})


def node_selector_of(live: DaemonSet) -> object:
    """The node selector of a DaemonSet."""
    template = as_mapping(live.spec.get("template")) or {}
    return (as_mapping(template.get("spec")) or {}).get("nodeSelector")


def _pod(onload: Onload, names: Names, image: str) -> JsonObject:
    spec, path = onload.spec, onload.spec.device_plugin.host_onload_path or DEFAULT_HOST_PATH
    expression: Json = {"key": names.gate_label, "operator": "Exists"}
    terms: Json = [{"matchExpressions": [expression]}]
    pod: JsonObject = {
        "serviceAccountName": spec.service_account_name,
        "hostNetwork": True,
        "hostPID": True,
        "hostIPC": True,
        "nodeSelector": {**spec.selector},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}},
        "volumes": [
            {"name": "kubelet-socket", "hostPath": {"path": _KUBELET, "type": "Directory"}},
            {"name": "host-onload", "hostPath": {"path": path, "type": "DirectoryOrCreate"}},
            {"name": "worker-volume", "emptyDir": {"sizeLimit": "8Mi"}},
        ],
        "initContainers": [_init(spec.onload)],
        "containers": [_device_plugin(onload, image, path), _worker(onload, image)],
    }
    if spec.tolerations:
        pod["tolerations"] = [*msgspec.to_builtins(spec.tolerations)]
    if spec.image_pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": spec.image_pull_secret.name}]
    return pod


def _init(spec: OnloadSpec) -> JsonObject:
    container: JsonObject = {
        "name": "init",
        "image": spec.user_image,
        "command": ["/bin/sh", "-c", SCRIPT],
        "args": ["init", installation_name(spec.version, spec.user_image)],
        "securityContext": _PRIVILEGED,
        "volumeMounts": [{"name": "host-onload", "mountPath": "/host/onload"}, _WORKER_MOUNT],
    }
    return _with_policy(container, spec.image_pull_policy)


def _device_plugin(onload: Onload, image: str, path: str) -> JsonObject:
    container: JsonObject = {
        "name": "device-plugin",
        "image": image,
        "args": [*_arguments(options_of(onload.spec.device_plugin))],
        "securityContext": _PRIVILEGED,
        "volumeMounts": [
            {"name": "kubelet-socket", "mountPath": _KUBELET},
            {"name": "host-onload", "mountPath": path},
        ],
    }
    return _with_policy(container, onload.spec.device_plugin.image_pull_policy)


def _arguments(options: PluginOptions) -> Iterator[str]:
    values: tuple[tuple[str, int | str | bool | None], ...] = (
        ("maxPods", options.max_pods),
        ("setPreload", options.set_preload),
        ("mountOnload", options.mount_onload),
        ("hostOnloadPath", options.host_onload_path),
        ("baseMountPath", options.base_mount_path),
        ("binMountPath", options.bin_mount_path),
        ("libMountPath", options.lib_mount_path),
    )
    for flag, value in values:
        if value is not None:
            yield f"-{flag}={str(value).lower() if isinstance(value, bool) else value}"


def _worker(onload: Onload, image: str) -> JsonObject:
    plane = onload.spec.onload.control_plane
    parameters = plane.parameters if plane is not None else None
    words = DEFAULT_PARAMETERS if parameters is None else parameters
    container: JsonObject = {
        "name": "onload-worker",
        "image": image,
        "command": ["onload-worker"],
        "securityContext": _PRIVILEGED,
        "volumeMounts": [_WORKER_MOUNT],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "CONTAINER_NAME", "value": "onload-worker"},
            {"name": "ONLOAD_CP_SERVER_PATH", "value": "/mnt/onload/sbin/onload_cp_server"},
            {"name": "ONLOAD_CP_SERVER_PARAMS", "value": " ".join(words)},
        ],
    }
    return _with_policy(container, onload.spec.device_plugin.image_pull_policy)


def _with_policy(container: JsonObject, policy: str) -> JsonObject:
    return {**container, "imagePullPolicy": policy} if policy else container


def _revision(pod: JsonObject) -> str:
    """The hash of images, options and paths. Pull policies, accounts and selectors do not concern running pods."""
    containers = [
        {key: value for key, value in container.items() if key != "imagePullPolicy"}
        for field in ("initContainers", "containers")
        for each in as_list(pod[field]) or ()
        if (container := as_mapping(each)) is not None
    ]
    return digest_of({"containers": containers, "volumes": pod["volumes"]})
