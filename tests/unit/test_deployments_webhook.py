"""The trees of the SGX pod webhook render to the objects that users of the Go webhook have, field by field.

The tables are the specification's. Beyond them are a readiness probe, a namespace that admits restricted pods only, no
token where nothing is asked of the API, and the overlay that needs no cert-manager. `kubectl` renders.
"""

import pytest
from manifests import DEPLOY, Object, own_image, render, resources

from accelplane.cli.goflags import parse
from accelplane.cli.sgxwebhook import FLAGS

TREE = DEPLOY / "sgx_admissionwebhook"
CERT_MANAGER = "overlays/default-with-certmanager"
OWN_CERTIFICATES = "overlays/default-with-own-certificates"
LABELS = {"control-plane": "controller-manager"}
# What the trees below the overlays call things, for the overlays to fill in.
PLACEHOLDERS = ("system", "")
NAMES = ("intelsgxwebhook-system", "intelsgxwebhook-")
RBAC = "rbac.authorization.k8s.io"


def namespace(namespace: str) -> Object:
    labels = {**LABELS, "pod-security.kubernetes.io/enforce": "restricted"}
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
POD = {
    "automountServiceAccountToken": False,
    "terminationGracePeriodSeconds": 10,
    "containers": [CONTAINER],
    "volumes": [{"name": "cert", "secret": {"secretName": "webhook-server-cert", "defaultMode": 420}}],
}


def deployment(namespace: str, prefix: str, pod: Object = POD) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"{prefix}webhook", "namespace": namespace, "labels": LABELS},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": LABELS},
            "template": {"metadata": {"labels": LABELS}, "spec": pod},
        },
    }


def certificates(namespace: str, prefix: str) -> list[Object]:
    host = f"{prefix}webhook-service.{namespace}.svc"
    issuer = f"{prefix}selfsigned-issuer"
    spec = {
        "dnsNames": [host, f"{host}.cluster.local"],
        "issuerRef": {"kind": "Issuer", "name": issuer},
        "secretName": "webhook-server-cert",
    }
    return [
        {
            "apiVersion": "cert-manager.io/v1",
            "kind": "Issuer",
            "metadata": {"name": issuer, "namespace": namespace},
            "spec": {"selfSigned": {}},
        },
        {
            "apiVersion": "cert-manager.io/v1",
            "kind": "Certificate",
            "metadata": {"name": f"{prefix}serving-cert", "namespace": namespace},
            "spec": spec,
        },
    ]


def own_certificates(namespace: str, prefix: str) -> list[Object]:
    """A Secret to fill, an account, and its rights."""
    name, account = f"{prefix}own-certificate", f"{prefix}webhook"
    inside, outside = {"name": name, "namespace": namespace}, {"name": name}
    objects: list[Object] = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": inside, "type": "Opaque"},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": namespace}},
    ]
    for role, metadata, group, kinds, named in (
        ("Role", inside, "", "secrets", name),
        (
            "ClusterRole",
            outside,
            "admissionregistration.k8s.io",
            "mutatingwebhookconfigurations",
            f"{prefix}mutating-webhook-configuration",
        ),
    ):
        rule = {"apiGroups": [group], "resources": [kinds], "resourceNames": [named], "verbs": ["get", "patch"]}
        subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
        objects += [
            {"apiVersion": f"{RBAC}/v1", "kind": role, "metadata": metadata, "rules": [rule]},
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": f"{role}Binding",
                "metadata": metadata,
                "roleRef": {"apiGroup": RBAC, "kind": role, "name": name},
                "subjects": [subject],
            },
        ]
    return objects


# The volume of the certificate goes; its lists stay, and are empty.
POD_WITH_OWN_CERTIFICATE = {
    "automountServiceAccountToken": True,
    "serviceAccountName": "intelsgxwebhook-webhook",
    "terminationGracePeriodSeconds": 10,
    "containers": [
        CONTAINER
        | {
            "args": ["-v=1", "-certificate-secret=intelsgxwebhook-own-certificate"],
            "resources": resources(("40Mi", "100m"), ("60Mi", "100m")),
            "volumeMounts": [],
        }
    ],
    "volumes": [],
}

BASE = [deployment(*PLACEHOLDERS), service(*PLACEHOLDERS), configuration(*PLACEHOLDERS)]
TREES = {
    "manager": [deployment(*PLACEHOLDERS)],
    "webhook": [service(*PLACEHOLDERS), configuration(*PLACEHOLDERS)],
    "certmanager": certificates(*PLACEHOLDERS),
    ".": BASE,
    "base": BASE,
    "default": [namespace("system"), *BASE],
    CERT_MANAGER: [
        namespace("intelsgxwebhook-system"),
        deployment(*NAMES),
        service(*NAMES),
        configuration(*NAMES, inject_from="intelsgxwebhook-system/intelsgxwebhook-serving-cert"),
        *certificates(*NAMES),
    ],
    OWN_CERTIFICATES: [
        namespace("intelsgxwebhook-system"),
        deployment(*NAMES, POD_WITH_OWN_CERTIFICATE),
        service(*NAMES),
        configuration(*NAMES),
        *own_certificates(*NAMES),
    ],
}


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


@pytest.mark.parametrize("directory", TREES)
def test_a_tree_of_the_webhook_renders_to_its_objects_and_nothing_else(directory: str) -> None:
    assert by_name(render(TREE / directory)) == by_name(TREES[directory])


def test_every_tree_of_the_webhook_is_in_the_table() -> None:
    there = {str(file.parent.relative_to(TREE)) for file in TREE.rglob("kustomization.yaml")}
    assert there == {*TREES}


@pytest.mark.parametrize("directory", [CERT_MANAGER, OWN_CERTIFICATES])
def test_the_program_is_told_names_that_are_there(directory: str) -> None:
    found = by_name(render(TREE / directory))
    (container,) = found["Deployment", "intelsgxwebhook-webhook"]["spec"]["template"]["spec"]["containers"]
    given, others = parse(FLAGS, container["args"])
    assert others == []
    values = {flag.name: flag.default for flag in FLAGS} | given
    assert ("Service", values["service"]) in found
    assert ("MutatingWebhookConfiguration", values["webhook-configuration"]) in found
    if directory == OWN_CERTIFICATES:
        assert ("Secret", values["certificate-secret"]) in found
    else:
        (mount,) = container["volumeMounts"]
        assert (values["certificate-secret"], values["cert-dir"]) == ("", mount["mountPath"])


def test_nfds_overlay_is_the_plugin_on_labelled_nodes_and_the_webhook() -> None:
    (plugin,) = render(DEPLOY / "sgx_plugin/base")
    plugin["spec"]["template"]["spec"]["nodeSelector"] = {
        "kubernetes.io/arch": "amd64",
        "intel.feature.node.kubernetes.io/sgx": "true",
    }
    assert by_name(render(DEPLOY / "sgx_plugin/overlays/epc-nfd")) == by_name([plugin, *TREES[CERT_MANAGER]])
