"""Names, labels and annotations of the Onload operator. They are contracts with clusters, scripts and KMM.

Facts: version 3.0.1 of the Onload operator, the label names of Kernel Module Management (KMM) 1.1 and 2.x.
"""

from typing import NamedTuple

GROUP, VERSION = "onload.amd.com", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
RESOURCE = "amd.com/onload"
FINALIZER = f"{GROUP}/node-labels"

VERSION_LABEL = f"{GROUP}/version"
NAME_LABEL = f"{GROUP}/name"
VERIFY_LABEL = f"{GROUP}/verify"
# The kubelet sets it on pods of its manifest directory.
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
# An annotation of nodes: no upgrade starts on a node that has it, unless its value is "false".
HOLD_ANNOTATION = f"{GROUP}/hold"
# Hash of the written fields of an owned object, and hash of the fields whose change requires a restart of plugin pods.
HASH_ANNOTATION = f"{GROUP}/applied-hash"
REVISION_ANNOTATION = f"{GROUP}/revision"
# On a DaemonSet of the Go operator: the revision that counts for its pods, which have no annotation.
ADOPTED_ANNOTATION = f"{GROUP}/adopted-revision"

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "onload-operator"
MODULE_COMPONENT, PLUGIN_COMPONENT = "module", "device-plugin"

KMM_GROUP, KMM_VERSION = "kmm.sigs.x-k8s.io", "v1beta1"
KMM_POD_LABEL = "kmm.node.kubernetes.io/module.name"
KMM_VERSION_PREFIX = "kmm.node.kubernetes.io/version-module."
_KMM_PREFIX = "kmm.node.kubernetes.io/"

# KMM limits the length of label keys: namespace and name of a Module have 39 characters together.
_MODULE_SUFFIX = "-module"
_MAX_LENGTH = 39
MAX_NAMES = _MAX_LENGTH - len(_MODULE_SUFFIX)


class Names(NamedTuple):
    """The names that belong to one Onload resource."""

    namespace: str
    name: str

    @property
    def module(self) -> str:
        """The Module of `onload`."""
        return f"{self.name}{_MODULE_SUFFIX}"

    @property
    def sfc_module(self) -> str:
        """The Module of `sfc`, the network driver."""
        return f"{self.name}-sfcmod"

    @property
    def daemonset(self) -> str:
        return f"{self.name}-onload-device-plugin-ds"

    @property
    def module_label(self) -> str:
        """Label of nodes for KMM: the version of `onload` that the node should have."""
        return f"{KMM_VERSION_PREFIX}{self.namespace}.{self.module}"

    @property
    def sfc_label(self) -> str:
        """Label of nodes for KMM: the version of `sfc` that the node should have."""
        return f"{KMM_VERSION_PREFIX}{self.namespace}.{self.sfc_module}"

    @property
    def gate_label(self) -> str:
        """Label of nodes on which the device plugin runs."""
        return f"{GROUP}/{self.namespace}.{self.name}"

    @property
    def labels(self) -> tuple[str, str, str]:
        """All labels that the operator sets on nodes, in the order of their removal."""
        return self.module_label, self.sfc_label, self.gate_label

    @property
    def progress_annotation(self) -> str:
        """Annotation of nodes with the progress of the step that is under way there."""
        return f"{GROUP}/{self.namespace}.{self.name}"

    def ready_label(self, module: str) -> str:
        """Label that KMM sets on a node while a module is loaded."""
        return f"{_KMM_PREFIX}{self.namespace}.{module}.ready"

    def version_ready_label(self, module: str) -> str:
        """Label of KMM 2.5 and later with the version that is loaded."""
        return f"{_KMM_PREFIX}{self.namespace}.{module}.version.ready"

    def base_labels(self, component: str) -> dict[str, str]:
        """The labels of all objects that the operator creates."""
        return {
            MANAGED_BY_LABEL: MANAGED_BY,
            "app.kubernetes.io/part-of": "onload",
            "app.kubernetes.io/instance": f"onload-{self.namespace}-{self.name}",
            "app.kubernetes.io/component": component,
        }


def too_long(names: Names) -> str:
    """The error message if the names are too long, otherwise empty."""
    found = len(names.name) + len(names.namespace)
    if found <= MAX_NAMES:
        return ""
    return (
        f"Combined length of Onload name and namespace is too long: found {found} characters, expected at most "
        f"{MAX_NAMES}; choose shorter names"
    )


def has_dots(names: Names) -> str:
    """The error message if the name has dots, otherwise empty.

    Admission only warns, as existing resources may have such names. The operator does not reconcile them.
    """
    if "." not in names.name:
        return ""
    return (
        f"metadata.name is {names.name}, expected a name without dots: KMM and the operator find the namespace and the "
        "name in labels by their dots; the resource has no effect; create one of another name"
    )


def owner_of_label(key: str) -> Names | None:
    """The Onload resource that a label of a node belongs to, by its key; None for labels of others.

    A key with more than one dot in its last part cannot be assigned to a namespace and a name.
    """
    for prefix, suffixes in ((KMM_VERSION_PREFIX, (_MODULE_SUFFIX, "-sfcmod")), (f"{GROUP}/", ("",))):
        if not key.startswith(prefix):
            continue
        namespace, dot, name = key.removeprefix(prefix).partition(".")
        suffix = next((each for each in suffixes if name.endswith(each)), None)
        if dot and namespace and suffix is not None and name.removesuffix(suffix) and "." not in name:
            return Names(namespace, name.removesuffix(suffix))
    return None
