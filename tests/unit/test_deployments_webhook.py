"""The trees of the SGX pod webhook render to the objects of the Go project's trees.

The tables are those of the specification. Additions are a readiness probe, Pod Security level restricted, an account
without token, and the overlay with the own certificate. `kubectl` renders.
"""

import pytest
from manifests import (
    DEPLOY,
    Object,
    certificate_request,
    flag_values,
    object_names,
    one,
    own_certificate,
    own_image,
    render,
    resources,
)
from webhookconditions import match_conditions

from accelplane.cli.sgxwebhook import FLAGS

TREE = DEPLOY / "sgx_admissionwebhook"
CERT_MANAGER = "overlays/default-with-certmanager"
OWN_CERTIFICATES = "overlays/default-with-own-certificates"
POLICIES = "overlays/admission-policies"
LABELS = {"control-plane": "controller-manager"}
# Namespace and prefix. Trees below the overlays have placeholders.
PLACEHOLDERS = ("system", "")
NAMES = ("intelsgxwebhook-system", "intelsgxwebhook-")


def namespace(namespace: str, level: str = "restricted") -> Object:
    labels = {**LABELS, "pod-security.kubernetes.io/enforce": level}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}


def service(namespace: str, prefix: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{prefix}webhook-service", "namespace": namespace},
        "spec": {"selector": LABELS, "ports": [{"port": 443, "targetPort": 9443, "protocol": "TCP"}]},
    }


def configuration(namespace: str, prefix: str, *, inject_from: str = "") -> Object:
    webhook = {
        "name": "sgx.mutator.webhooks.intel.com",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {
            "service": {"name": f"{prefix}webhook-service", "namespace": namespace, "path": "/mutate--v1-pod"}
        },
        "failurePolicy": "Ignore",
        "reinvocationPolicy": "IfNeeded",
        "sideEffects": "None",
        "matchConditions": match_conditions("sgx"),
        "timeoutSeconds": 5,
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
    }
    metadata: Object = {"name": f"{prefix}mutating-webhook-configuration"}
    if inject_from:
        metadata["annotations"] = {"cert-manager.io/inject-ca-from": inject_from}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": metadata,
        "webhooks": [webhook],
    }


CONTAINER = {
    "name": "manager",
    "image": own_image("intel-sgx-admissionwebhook"),
    "imagePullPolicy": "IfNotPresent",
    "args": ["-v=1"],
    "ports": [{"name": "webhook-server", "containerPort": 9443, "protocol": "TCP"}],
    "readinessProbe": {
        "httpGet": {"path": "/readyz", "port": "webhook-server", "scheme": "HTTPS"},
        "initialDelaySeconds": 1,
        "periodSeconds": 10,
    },
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    },
    "resources": resources(("20Mi", "100m"), ("30Mi", "100m")),
    "volumeMounts": [{"name": "cert", "mountPath": "/tmp/k8s-webhook-server/serving-certs", "readOnly": True}],
}
VOLUMES = [{"name": "cert", "secret": {"secretName": "webhook-server-cert", "defaultMode": 420}}]
# Issuing certificates needs memory. The patch leaves empty lists.
WITH_OWN_CERTIFICATE: Object = {"resources": resources(("40Mi", "100m"), ("60Mi", "100m")), "volumeMounts": []}


def manager(namespace: str, prefix: str, *, with_own_certificate: bool = False) -> list[Object]:
    """The Deployment and its account."""
    variables = object_names(prefix, own_certificate=with_own_certificate)
    pod = {
        "serviceAccountName": f"{prefix}webhook",
        "automountServiceAccountToken": with_own_certificate,
        "terminationGracePeriodSeconds": 10,
        "containers": [CONTAINER | {"env": variables} | (WITH_OWN_CERTIFICATE if with_own_certificate else {})],
        "volumes": [] if with_own_certificate else VOLUMES,
    }
    deployment = one("apps/v1", "Deployment", f"{prefix}webhook", namespace)
    deployment["metadata"]["labels"] = LABELS
    deployment["spec"] = {
        "replicas": 1,
        "selector": {"matchLabels": LABELS},
        "template": {"metadata": {"labels": LABELS}, "spec": pod},
    }
    return [one("v1", "ServiceAccount", f"{prefix}webhook", namespace), deployment]


BASE = [*manager(*PLACEHOLDERS), service(*PLACEHOLDERS), configuration(*PLACEHOLDERS)]
INSTALLATION = [
    namespace("intelsgxwebhook-system"),
    *manager(*NAMES, with_own_certificate=True),
    service(*NAMES),
    configuration(*NAMES),
    *own_certificate(*NAMES),
]
TREES = {
    "manager": manager(*PLACEHOLDERS),
    "webhook": [service(*PLACEHOLDERS), configuration(*PLACEHOLDERS)],
    "certmanager": certificate_request(*PLACEHOLDERS),
    # The original has the objects of base here.
    ".": INSTALLATION,
    "base": BASE,
    "default": [namespace("system"), *BASE],
    CERT_MANAGER: [
        namespace("intelsgxwebhook-system"),
        *manager(*NAMES),
        service(*NAMES),
        configuration(*NAMES, inject_from="intelsgxwebhook-system/intelsgxwebhook-serving-cert"),
        *certificate_request(*NAMES),
    ],
    OWN_CERTIFICATES: INSTALLATION,
}


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


@pytest.mark.parametrize("directory", TREES)
def test_a_tree_of_the_webhook_renders_only_its_objects(directory: str) -> None:
    assert by_name(render(TREE / directory)) == by_name(TREES[directory])


def test_every_tree_of_the_webhook_is_in_the_table() -> None:
    existing = {str(file.parent.relative_to(TREE)) for file in TREE.rglob("kustomization.yaml")}
    # The first step of the overlay above it, the policies, which are compared with the webhook on a cluster, and the
    # webhook that rejects pods while it is away.
    assert existing == {*TREES, f"{CERT_MANAGER}/installation", POLICIES, "overlays/fail-closed"}


def test_both_policies_have_the_same_options_and_see_the_same_containers() -> None:
    found = [each["spec"] for each in render(TREE / POLICIES) if each["kind"].endswith("Policy")]
    mutating, validating = ([variable["name"] for variable in spec["variables"]] for spec in found)
    assert mutating[:5] == ["aesmdName", "aesmdSocketDir", "aesmdVolume", "aesmdSidecarWithoutEpc", "epcWholePages"]
    shared = mutating[: mutating.index("total") + 1]
    assert shared == validating[: len(shared)]
    assert found[0]["variables"][: len(shared)] == found[1]["variables"][: len(shared)]
    assert found[0]["matchConstraints"] == found[1]["matchConstraints"]


@pytest.mark.parametrize("directory", [CERT_MANAGER, OWN_CERTIFICATES])
def test_the_names_that_the_program_gets_are_those_of_its_objects(directory: str) -> None:
    found = by_name(render(TREE / directory))
    (container,) = found["Deployment", "intelsgxwebhook-webhook"]["spec"]["template"]["spec"]["containers"]
    values = flag_values(FLAGS, container)
    assert ("Service", values["service"]) in found
    assert ("MutatingWebhookConfiguration", values["webhook-configuration"]) in found
    if directory == OWN_CERTIFICATES:
        assert ("Secret", values["certificate-secret"]) in found
    else:
        (mount,) = container["volumeMounts"]
        assert (values["certificate-secret"], values["cert-dir"]) == ("", mount["mountPath"])


def test_the_nfd_overlay_is_the_plugin_on_labelled_nodes_and_the_webhook() -> None:
    (plugin,) = render(DEPLOY / "sgx_plugin/base")
    plugin["spec"]["template"]["spec"]["nodeSelector"] = {
        "kubernetes.io/arch": "amd64",
        "intel.feature.node.kubernetes.io/sgx": "true",
    }
    admitting = namespace("intelsgxwebhook-system", "privileged")
    expected = by_name(TREES[CERT_MANAGER]) | by_name([plugin, admitting])
    assert by_name(render(DEPLOY / "sgx_plugin/overlays/epc-nfd")) == expected


def test_labelled_pods_are_rejected_while_the_webhook_is_not_reachable() -> None:
    (found,) = (
        each
        for each in render(DEPLOY / "sgx_admissionwebhook/overlays/fail-closed")
        if each["kind"] == "MutatingWebhookConfiguration"
    )
    open_, closed = found["webhooks"]
    assert (open_["failurePolicy"], closed["failurePolicy"]) == ("Ignore", "Fail")
    # Each pod is reviewed by one of them.
    (expression,) = open_["objectSelector"]["matchExpressions"]
    assert {expression["key"]: expression["values"]} == {
        key: [value] for key, value in closed["objectSelector"]["matchLabels"].items()
    }
    assert expression["operator"] == "NotIn"
    for key in ("clientConfig", "rules", "reinvocationPolicy", "sideEffects", "admissionReviewVersions"):
        assert open_[key] == closed[key]
