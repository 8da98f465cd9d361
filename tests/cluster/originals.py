"""The FPGA manifests of the Go implementation, v0.31.1, unchanged except for the images.

Rights, arguments, mounts and limits are the original's. The objects that cert-manager would create exist. The webhook's
account may only read the mappings; it does not have the original's rights on leases.
"""

from __future__ import annotations

from manifests import SOCKETS, Object, Volumes, from_fields, host_paths, mounts, own_image, plugin_daemonset, resources

from .cluster import Cluster
from .trees import encoded, tls_secret

NAMESPACE, PREFIX = "intelfpgaplugin-system", "intelfpgaplugin-"
_CONTROLLER = {"control-plane": "controller-manager"}
_HOST = f"{PREFIX}webhook-service.{NAMESPACE}.svc"
_VOLUMES: Volumes = {
    "devfs": ("/dev", "ro", ""),
    "sysfs": ("/sys/class", "ro", ""),
    "cdidir": ("/var/run/cdi", "rw", "DirectoryOrCreate"),
    **SOCKETS,
}
_PROGRAMS: Volumes = {"intel-fpga-sw": ("/opt/intel/fpga-sw", "rw", "DirectoryOrCreate")}
_CLOSED = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
_ID = {"type": "string", "pattern": "^[0-9a-f]{8,32}$"}


def fpga_originals(cluster: Cluster, mode: str) -> list[Object]:
    """Overlay `af` or `region`, or one for `regiondevel` made likewise."""
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": _CONTROLLER}},
        _definition("AcceleratorFunction", "af", {"afuId": {**_ID, "pattern": "^[0-9a-f]{8,40}$"}, "interfaceId": _ID,
                                                  "mode": {"type": "string", "pattern": "^af|region$"}}),
        _definition("FpgaRegion", "fpga", {"interfaceId": _ID}),
        *_role_objects("node-getter", "get-nodes", "", ["nodes"], ["get"]),
        *_role_objects("manager-role", "manager-rolebinding", "fpga.intel.com", ["acceleratorfunctions", "fpgaregions"],
                  ["get", "list", "watch"]),
        tls_secret(NAMESPACE, "webhook-server-cert", cluster.server_certificate(_HOST, _HOST)),
        _plugin(mode),
        _webhook(),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"{PREFIX}webhook-service", "namespace": NAMESPACE},
            "spec": {"selector": _CONTROLLER, "ports": [{"port": 443, "targetPort": 9443}]},
        },
        _configuration(cluster.authority),
    ]  # fmt: skip


def _definition(kind: str, short: str, fields: Object) -> Object:
    singular = kind.lower()
    names = {"kind": kind, "listKind": f"{kind}List", "plural": f"{singular}s", "singular": singular}
    spec = {"type": "object", "properties": fields, "required": sorted(fields)}
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": spec,
        "status": {"type": "object"},
    }
    schema = {"type": "object", "properties": properties, "required": ["spec"]}
    version = {"name": "v2", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    group = {"group": "fpga.intel.com", "scope": "Namespaced", "names": {**names, "shortNames": [short]}}
    metadata = {"name": f"{singular}s.fpga.intel.com"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": metadata,
        "spec": {**group, "versions": [version]},
    }


def _role_objects(role: str, binding: str, group: str, kinds: list[str], verbs: list[str]) -> list[Object]:
    """A role for all of the cluster, of the namespace's default account."""
    api = "rbac.authorization.k8s.io"
    role, binding = f"{PREFIX}{role}", f"{PREFIX}{binding}"
    return [
        {
            "apiVersion": f"{api}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": role},
            "rules": [{"apiGroups": [group], "resources": kinds, "verbs": verbs}],
        },
        {
            "apiVersion": f"{api}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": binding},
            "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}],
        },
    ]


def _plugin(mode: str) -> Object:
    init = {
        "name": "intel-fpga-initcontainer",
        "image": own_image("intel-fpga-initcontainer"),
        "imagePullPolicy": "IfNotPresent",
        "securityContext": _CLOSED,
        "volumeMounts": mounts(_PROGRAMS),
    }
    container = {
        "name": "intel-fpga-plugin",
        "image": own_image("intel-fpga-plugin"),
        "imagePullPolicy": "IfNotPresent",
        "env": from_fields(NODE_NAME="spec.nodeName"),
        "args": [f"-mode={mode}"],
        "terminationMessagePath": "/tmp/termination-log",
        "securityContext": _CLOSED,
        "resources": resources(("30Mi", "80m"), ("60Mi", "160m")),
        "volumeMounts": mounts(_VOLUMES),
    }
    pod = {"initContainers": [init], "containers": [container], "volumes": host_paths(_VOLUMES | _PROGRAMS)}
    daemonset = plugin_daemonset("intel-fpga-plugin", pod)
    daemonset["metadata"].update(name=f"{PREFIX}intel-fpga-plugin", namespace=NAMESPACE)
    return daemonset


def _webhook() -> Object:
    container = {
        "name": "manager",
        "image": own_image("intel-fpga-admissionwebhook"),
        "imagePullPolicy": "IfNotPresent",
        "args": ["-v=1"],
        "ports": [{"name": "webhook-server", "containerPort": 9443, "protocol": "TCP"}],
        "securityContext": {
            **_CLOSED,
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "resources": resources(("20Mi", "100m"), ("30Mi", "100m")),
        "volumeMounts": [{"name": "cert", "mountPath": "/tmp/k8s-webhook-server/serving-certs", "readOnly": True}],
    }
    volume = {"name": "cert", "secret": {"secretName": "webhook-server-cert", "defaultMode": 0o644}}
    pod = {"terminationGracePeriodSeconds": 10, "containers": [container], "volumes": [volume]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"{PREFIX}webhook", "namespace": NAMESPACE, "labels": _CONTROLLER},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": _CONTROLLER},
            "template": {"metadata": {"labels": _CONTROLLER}, "spec": pod},
        },
    }


def _configuration(authority: bytes) -> Object:
    service = {"name": f"{PREFIX}webhook-service", "namespace": NAMESPACE, "path": "/pods"}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    hook = {
        "name": "fpga.mutator.webhooks.intel.com",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"service": service, "caBundle": encoded(authority)},
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "rules": [rule],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {
            "name": f"{PREFIX}mutating-webhook-configuration",
            "annotations": {"cert-manager.io/inject-ca-from": f"{NAMESPACE}/{PREFIX}serving-cert"},
        },
        "webhooks": [hook],
    }
