"""The calls of the API that each account makes, and the calls that the API server's double recorded.

Roles grant what is in this table: `tests/unit/test_deployments_calls.py` compares all manifests and charts. Tests of
the programs with the double compare the recorded calls: labels, epchook, fleet, Onload, the operator and the FPGA
webhook make all of them and no others, the other programs no others.
"""

import re
from collections.abc import Iterable
from typing import Protocol

# Group, resource and verb.
Call = tuple[str, str, str]

_PATH = re.compile(
    r"/apis?/(?:(?P<group>[^/]+\.[^/]+|apps)/)?v\w+/(?:namespaces/[^/]+/)?(?P<resource>[a-z]+)(?P<rest>.*)"
)
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Recorded(Protocol):
    """A request to a double."""

    @property
    def method(self) -> str: ...

    @property
    def path(self) -> str: ...


def recorded(requests: Iterable[Recorded]) -> set[Call]:
    """The calls of requests to a double. Requests of discovery are no calls: every account may make them."""
    found: set[Call] = set()
    for request in requests:
        path, _, query = request.path.partition("?")
        parts = _PATH.fullmatch(path)
        if parts is None:
            continue
        _, name, *sub = (parts["rest"] or "/").split("/")
        verb = _VERBS[request.method]
        if verb == "get" and not name:
            verb = "watch" if "watch=" in query or getattr(request, "watch", False) else "list"
        found.add((parts["group"] or "", "/".join([parts["resource"], *sub]), verb))
    return found


def calls(group: str, resources: str, verbs: str) -> set[Call]:
    """All verbs on all resources; both are separated by spaces."""
    return {(group, resource, verb) for resource in resources.split() for verb in verbs.split()}


_PLUGIN_KINDS = " ".join(
    f"{family}deviceplugins" for family in ("dlb", "dsa", "fpga", "generic", "gpu", "iaa", "npu", "qat", "sgx")
)
# TokenReview and SubjectAccessReview for clients of pages: `authorized`.
REVIEWS = calls("authentication.k8s.io", "tokenreviews", "create") | calls(
    "authorization.k8s.io", "subjectaccessreviews", "create"
)
# `kube.leader`.
LEADER = calls("coordination.k8s.io", "leases", "create get update")
# `kube.events`: a repeated Event is patched.
EVENTS = calls("events.k8s.io", "events", "create patch")
# `kube.trust` and `kube.truststore`: the program's own certificate, and the authority in its webhook configuration.
OWN_CERTIFICATE = calls("", "secrets", "get list patch watch")
MUTATING = calls("admissionregistration.k8s.io", "mutatingwebhookconfigurations", "get list patch watch")
VALIDATING = calls("admissionregistration.k8s.io", "validatingwebhookconfigurations", "get list patch watch")
# `kube.truststore` creates the Secret again if it was deleted; trees with cert-manager do not.
SECRET_AGAIN = calls("", "secrets", "create")
# `admission.mappings`, `admission.mapping_controller`, `admission.pending`.
FPGA_NAMES = (
    calls("fpga.intel.com", "acceleratorfunctions fpgaregions", "list watch")
    | calls("fpga.intel.com", "acceleratorfunctions/status fpgaregions/status", "patch")
    | calls("", "nodes pods", "list watch")
    | EVENTS
)
# OpenShift's admission needs it for pods of the account; it is no call.
OPENSHIFT = calls("security.openshift.io", "securitycontextconstraints", "use")

LABELS = calls("", "nodes", "get watch patch") | calls("", "nodes/status", "patch")
EPC_REGISTER = calls("", "nodes", "get watch") | calls("", "nodes/status", "patch")
FLEET = (
    calls("", "nodes pods", "list watch")
    | calls("deviceplugin.intel.com", _PLUGIN_KINDS, "list watch")
    | calls("resource.k8s.io", "deviceclasses resourceclaims", "list watch")
)
FPGA_NODE = calls("", "nodes", "get watch")
# `dra.publisher`, `dra.preparer`, `dra.devicestatus`, `dra.events` and `node.dra.observednode`. Owner of the slices is
# the Node.
DRA = (
    calls("resource.k8s.io", "resourceslices", "create delete list update watch")
    | calls("resource.k8s.io", "resourceclaims", "get")
    | calls("resource.k8s.io", "deviceclasses", "list")
    | calls("", "nodes", "get")
    | calls("events.k8s.io", "events", "create")
    # Checked by the admission policies.
    | calls("resource.k8s.io", "resourceslices/driver", "publish")
)
# `operator.shared`
GPU_MANAGER = calls("", "serviceaccounts", "create delete get") | calls(
    "rbac.authorization.k8s.io", "clusterrolebindings", "create delete get"
)
# `operator.classcontroller`, with DRA only
DEVICE_CLASSES = calls("resource.k8s.io", "deviceclasses", "create delete get list patch watch")
DRIVER_ROLES = calls("rbac.authorization.k8s.io", "clusterroles", "create delete get update")
# Checked by the API server when a binding is created.
BIND = calls("rbac.authorization.k8s.io", "clusterroles", "bind")
# Checked when a role that grants them is created.
DRIVER_RIGHTS = calls("resource.k8s.io", "resourceslices/driver", "publish") | calls(
    "resource.k8s.io", "resourceclaims/driver", "associated-node:update"
)
OPERATOR = (
    calls("deviceplugin.intel.com", _PLUGIN_KINDS, "get list patch watch")
    | calls("deviceplugin.intel.com", _PLUGIN_KINDS.replace("plugins", "plugins/status"), "patch")
    | calls("apps", "daemonsets", "create delete get list patch watch")
    | calls("", "nodes", "list watch")  # `operator.overlap`
    | calls("", "configmaps", "list watch")  # configurations that restart plugin pods
    | DEVICE_CLASSES | GPU_MANAGER | DRIVER_ROLES | FPGA_NAMES | LEADER | EVENTS | REVIEWS
)  # fmt: skip
# Checked by the API server for requests that the program makes for other objects.
OPERATOR_IMPLIED = (
    BIND
    | DRIVER_RIGHTS
    | calls("deviceplugin.intel.com", _PLUGIN_KINDS.replace("plugins", "plugins/finalizers"), "update")
)
ONLOAD = (
    calls("onload.amd.com", "onloads", "get list patch watch")
    | calls("onload.amd.com", "onloads/status", "patch")
    | calls("apps", "daemonsets", "create get list patch watch")
    | calls("kmm.sigs.x-k8s.io", "modules", "create delete get list patch watch")
    | calls("", "nodes", "list patch watch")
    | calls("", "pods", "create delete list watch")  # probes are created
    | calls("", "pods/eviction", "create")
    | calls("apiextensions.k8s.io", "customresourcedefinitions", "get")
    | LEADER | EVENTS
)  # fmt: skip
ONLOAD_IMPLIED = calls("onload.amd.com", "onloads/finalizers", "update")

# The first directory of the tree and the account, without the prefix of the installation -> what roles have to grant.
ACCOUNTS: dict[tuple[str, str], set[Call]] = {
    ("accelplane_node", "accelplane-node"): FPGA_NODE | REVIEWS | DRA,
    ("dra", "accelplane-dra"): DRA - calls("resource.k8s.io", "resourceslices/driver", "publish"),
    # Paths are those of the agents' pages.
    ("fleet", "accelplane-fleet"): FLEET | REVIEWS | calls("", "/api/v1/* /status", "get"),
    ("fleet", "accelplane-fleet-viewer"): calls("", "/fleet", "get"),
    ("fpga_admissionwebhook", "webhook"): FPGA_NAMES | OWN_CERTIFICATE | MUTATING,
    ("fpga_plugin", "webhook"): FPGA_NAMES | OWN_CERTIFICATE | MUTATING,
    ("fpga_plugin", "default"): FPGA_NODE,
    ("fpga_plugin", "accelplane-dra"): FPGA_NODE | DRA,
    **{
        (f"{family}_plugin", "accelplane-dra"): DRA
        for family in ("dlb", "dsa", "generic", "gpu", "iaa", "npu", "qat", "sgx")
    },
    # `node.pods`: the kubelet authorizes its list of pods as `nodes/pods`.
    ("gpu_plugin", "gpu-manager-sa"): calls("", "nodes/pods", "get") | calls("", "pods", "list"),
    ("labels", "accelplane-labels"): LABELS,
    ("onload", "controller-manager"): (ONLOAD | ONLOAD_IMPLIED | REVIEWS | OWN_CERTIFICATE | SECRET_AGAIN | VALIDATING),
    # `sidecars.onload.container_id`.
    ("onload", "onload-operator-sa"): calls("", "pods", "get") | OPENSHIFT,
    ("onload", "sfptpd"): OPENSHIFT,
    ("operator", "controller-manager"): (
        OPERATOR | OPERATOR_IMPLIED | OWN_CERTIFICATE | SECRET_AGAIN | MUTATING | VALIDATING
    ),
    ("operator", "plugins"): OPENSHIFT,
    ("sgx_admissionwebhook", "webhook"): OWN_CERTIFICATE | MUTATING,
    ("sgx_plugin", "sgx-plugin"): EPC_REGISTER,
}
