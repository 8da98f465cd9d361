"""The operator's trees render to the objects of the Go operator's trees.

The tables are those of the specification: names and prefix of release 0.31.1, metrics and Pod Security levels of the
newest release. Additions are the operator's own certificate, an account without rights and token for the plugins, and
Roles instead of ClusterRoles for the operator's namespace. `kubectl` renders.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from manifests import (
    DEPLOY,
    Object,
    certificate_request,
    flag_values,
    from_fields,
    in_order,
    object_names,
    own_image,
    render,
    resources,
    run_kubectl,
)
from webhookconditions import match_conditions

from accelplane.cli.operator import FLAGS, options
from accelplane.operator.models import KINDS
from accelplane.operator.settings import variable_of
from release.olm.products import PLUGIN_IMAGES

TREE = DEPLOY / "operator"
DEFAULT, CERT_MANAGER, OCP = "default", "overlays/default-with-certmanager", "overlays/ocp"
WITH_DRA = "overlays/dra"
DEVICES = {f"device/{family}": family for family in KINDS}
NAMESPACE, PREFIX = "inteldeviceplugins-system", "inteldeviceplugins-"
OCP_NAMES = ("system", "intel-deviceplugins-")
CONTROL_PLANE = {"control-plane": "controller-manager"}
LABELS = {**CONTROL_PLANE, "manager": "intel-deviceplugin-operator"}
MAPPINGS = ("acceleratorfunctions.fpga.intel.com", "fpgaregions.fpga.intel.com")
ADMISSION = "admissionregistration.k8s.io/v1"
CERTIFICATES = "/tmp/k8s-webhook-server/serving-certs"


def names(family: str) -> tuple[str, str]:
    """Lower-case kind, and plural."""
    kind = KINDS[family].__name__.lower()
    return kind, f"{kind}s"


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


def operator_of(directory: str) -> Object:
    """The Deployment of a tree."""
    (found,) = (each for each in render(TREE / directory) if each["kind"] == "Deployment")
    return found


def names_of_kind(kind: str, objects: Iterable[Object]) -> set[tuple[str, str]]:
    """Names and namespaces of a kind."""
    return {
        (each["metadata"]["name"], each["metadata"].get("namespace", "")) for each in objects if each["kind"] == kind
    }


# Objects

# Kind -> names without their prefix.
COMMON = {
    "ServiceAccount": "controller-manager plugins",
    "Role": "leader-election-role manager-role plugins-scc-role",
    "RoleBinding": "leader-election-rolebinding manager-rolebinding plugins-scc-rolebinding",
    "ClusterRole": "events-role fpga-names-role manager-role metrics-reader proxy-role",
    "ClusterRoleBinding": "events-rolebinding fpga-names-rolebinding manager-rolebinding proxy-rolebinding",
    "Service": "webhook-service controller-manager-metrics-service",
    "Deployment": "controller-manager",
    "MutatingWebhookConfiguration": "mutating-webhook-configuration",
    "ValidatingWebhookConfiguration": "validating-webhook-configuration",
}
GPU_MANAGER = {
    "Role": "gpu-manager-binder-role",
    "RoleBinding": "gpu-manager-binder-rolebinding",
    "ClusterRole": "gpu-manager-role gpu-manager-binder-role",
    "ClusterRoleBinding": "gpu-manager-binder-rolebinding",
}
POLICIES = tuple(f"accelplane-dra-{what}-operator" for what in ("claims", "events", "slices"))
DRA = {
    "Role": "dra-binder-role",
    "RoleBinding": "dra-binder-rolebinding",
    "ClusterRole": "dra-role dra-status-role dra-binder-role dra-classes-role",
    "ClusterRoleBinding": "dra-binder-rolebinding dra-classes-rolebinding",
    "ValidatingAdmissionPolicy": " ".join(POLICIES),
    "ValidatingAdmissionPolicyBinding": " ".join(POLICIES),
}
OWN_CERTIFICATE: dict[str, str] = dict.fromkeys(
    ("Secret", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"), "own-certificate"
)
OF_CERT_MANAGER = {"Issuer": "selfsigned-issuer ca-issuer", "Certificate": "ca-cert serving-cert"}
VARIANTS: dict[str, list[dict[str, str]]] = {
    DEFAULT: [COMMON, GPU_MANAGER, OWN_CERTIFICATE],
    CERT_MANAGER: [COMMON, GPU_MANAGER, OF_CERT_MANAGER],
    OCP: [COMMON, GPU_MANAGER],
    WITH_DRA: [COMMON, GPU_MANAGER, OWN_CERTIFICATE, DRA],
}


@pytest.mark.parametrize("directory", VARIANTS)
def test_an_installation_has_exactly_these_objects(directory: str) -> None:
    prefix = OCP_NAMES[1] if directory == OCP else PREFIX
    expected = {
        (kind, f"{prefix}{name}")
        for part in VARIANTS[directory]
        for kind, text in part.items()
        for name in text.split()
    }
    definitions = {f"{names(family)[1]}.deviceplugin.intel.com" for family in KINDS} | {*MAPPINGS}
    expected |= {("CustomResourceDefinition", name) for name in definitions}
    if directory != OCP:
        expected.add(("Namespace", NAMESPACE))
    assert {*by_name(render(TREE / directory))} == expected


@pytest.mark.parametrize("directory", [DEFAULT, CERT_MANAGER])
def test_all_namespaced_objects_are_in_the_operators_namespace(directory: str) -> None:
    assert {each["metadata"].get("namespace", NAMESPACE) for each in render(TREE / directory)} == {NAMESPACE}


def test_every_tree_that_can_be_applied_renders() -> None:
    for file in TREE.rglob("kustomization.yaml"):
        if yaml.safe_load(file.read_text())["kind"] == "Kustomization":
            assert render(file.parent), file


def test_manifests_are_the_installation_and_the_samples() -> None:
    expected = by_name(render(TREE / DEFAULT)) | by_name(render(TREE / "samples"))
    assert by_name(render(TREE / "manifests")) == expected


def test_the_namespace_admits_the_plugins() -> None:
    levels = {f"pod-security.kubernetes.io/{mode}": "privileged" for mode in ("enforce", "audit", "warn")}
    (found,) = (each for each in render(TREE / DEFAULT) if each["kind"] == "Namespace")
    assert found["metadata"] == {"name": NAMESPACE, "labels": {**LABELS, **levels}}


# The operator's pod

ARGUMENTS = [
    "--metrics-secure",
    "--metrics-bind-address=:8443",
    "--health-probe-bind-address=:8081",
    "--leader-elect",
]


def environment(prefix: str, *, own_certificate: bool = False) -> list[Object]:
    own_names = {
        "VALIDATING_WEBHOOK_CONFIGURATION": f"{prefix}validating-webhook-configuration",
        "PLUGIN_SERVICE_ACCOUNT": f"{prefix}plugins",
        "GPU_MANAGER_ROLE": f"{prefix}gpu-manager-role",
    }
    return [
        *from_fields(DEVICEPLUGIN_NAMESPACE="metadata.namespace"),
        *object_names(prefix, own_certificate=own_certificate),
        *({"name": variable, "value": value} for variable, value in own_names.items()),
        *({"name": f"RELATED_IMAGE_{variable_of(name)[:-4]}", "value": own_image(name)} for name in PLUGIN_IMAGES),
    ]


SECURITY: Object = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def probe(path: str, delay: int, period: int) -> Object:
    return {"httpGet": {"path": path, "port": 8081}, "initialDelaySeconds": delay, "periodSeconds": period}


CONTAINER: Object = {
    "name": "manager",
    "image": own_image("intel-deviceplugin-operator"),
    "imagePullPolicy": "IfNotPresent",
    "args": ARGUMENTS,
    "env": environment(PREFIX),
    "ports": [{"name": "webhook-server", "containerPort": 9443, "protocol": "TCP"}],
    "livenessProbe": probe("/healthz", 15, 20),
    "readinessProbe": probe("/readyz", 5, 10),
    "securityContext": SECURITY,
    "resources": resources(("100Mi", "100m"), ("120Mi", "100m")),
    "volumeMounts": [{"name": "cert", "mountPath": CERTIFICATES, "readOnly": True}],
}
VOLUMES = [{"name": "cert", "secret": {"secretName": "webhook-server-cert", "defaultMode": 0o644}}]
ROLES = ("DRA", "DRA_STATUS")
# Differences of an installation.
OWN_CERTIFICATES: Object = {"env": environment(PREFIX, own_certificate=True), "volumeMounts": []}
CONTAINERS: dict[str, Object] = {
    DEFAULT: OWN_CERTIFICATES,
    CERT_MANAGER: {},
    WITH_DRA: OWN_CERTIFICATES
    | {
        "env": [
            *environment(PREFIX, own_certificate=True),
            *({"name": f"{name}_ROLE", "value": f"{PREFIX}{name.lower().replace('_', '-')}-role"} for name in ROLES),
        ]
    },
    OCP: {
        "env": environment(OCP_NAMES[1]),
        "securityContext": {name: value for name, value in SECURITY.items() if name != "runAsUser"},
    },
    **{
        directory: OWN_CERTIFICATES | {"args": [*ARGUMENTS, f"--devices={family}"]}
        for directory, family in DEVICES.items()
    },
}


@pytest.mark.parametrize("directory", CONTAINERS)
def test_the_pod_of_the_operator_is_that_of_the_original(directory: str) -> None:
    namespace, prefix = OCP_NAMES if directory == OCP else (NAMESPACE, PREFIX)
    container = CONTAINER | CONTAINERS[directory]
    pod = {
        "serviceAccountName": f"{prefix}controller-manager",
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
        "volumes": VOLUMES if container["volumeMounts"] else [],
        **({} if container["volumeMounts"] else {"automountServiceAccountToken": True}),
    }
    metadata = {"name": f"{prefix}controller-manager", "namespace": namespace, "labels": LABELS}
    template = {"metadata": {"labels": LABELS}, "spec": pod}
    spec = {"replicas": 1, "selector": {"matchLabels": LABELS}, "template": template}
    expected = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
    assert in_order(operator_of(directory)) == in_order(expected)


@pytest.mark.parametrize("directory", VARIANTS)
def test_the_names_that_the_program_gets_are_those_of_its_objects(directory: str) -> None:
    found = by_name(render(TREE / directory))
    (container,) = operator_of(directory)["spec"]["template"]["spec"]["containers"]
    values = flag_values(FLAGS, container)
    chosen = options(values, {each["name"]: each.get("value", "") for each in container["env"]})
    assert ("ServiceAccount", chosen.settings.service_account) in found
    assert ("ClusterRole", chosen.settings.gpu_manager_role) in found
    assert ("Service", chosen.certificate.service) in found
    for kind, (name,) in chosen.certificate.configurations.items():
        assert (kind, name) in found
    roles = (chosen.settings.dra_role, chosen.settings.dra_status_role)
    assert all(("ClusterRole", role) in found for role in roles) if directory == WITH_DRA else roles == ("", "")
    if directory in (DEFAULT, WITH_DRA):
        assert ("Secret", chosen.certificate.secret) in found
    else:
        (mount,) = container["volumeMounts"]
        assert (chosen.certificate.secret, chosen.certificate.directory) == ("", mount["mountPath"])


def test_the_services_select_webhooks_and_metrics() -> None:
    found = by_name(render(TREE / DEFAULT))
    webhooks = found["Service", f"{PREFIX}webhook-service"]["spec"]
    assert webhooks == {"selector": CONTROL_PLANE, "ports": [{"port": 443, "targetPort": 9443, "protocol": "TCP"}]}
    metrics = found["Service", f"{PREFIX}controller-manager-metrics-service"]
    port = {"name": "https", "port": 8443, "targetPort": 8443, "protocol": "TCP"}
    assert metrics["spec"] == {"selector": CONTROL_PLANE, "ports": [port]}
    assert metrics["metadata"]["labels"] == CONTROL_PLANE


# Webhooks


def webhook(name: str, path: str, rule: Object, policy: str, *, again: bool = False) -> Object:
    service = {"name": f"{PREFIX}webhook-service", "namespace": NAMESPACE, "path": path}
    return {
        "name": name,
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"service": service},
        "failurePolicy": policy,
        **({"reinvocationPolicy": "IfNeeded"} if again else {}),
        "sideEffects": "None",
        # A hanging replica must not delay other pods, and those by less than the default of 10 s.
        **(
            {"matchConditions": match_conditions(name.partition(".")[0]), "timeoutSeconds": 5}
            if rule["resources"] == ["pods"]
            else {}
        ),
        "rules": [rule],
    }


def webhooks(pod_families: Iterable[str]) -> dict[str, list[Object]]:
    """The entries of the two configurations, with the webhooks for pods of these families only."""
    found: dict[str, list[Object]] = {"Mutating": [], "Validating": []}
    for family in KINDS:
        kind, plural = names(family)
        rule = {
            "apiGroups": ["deviceplugin.intel.com"],
            "apiVersions": ["v1"],
            "operations": ["CREATE", "UPDATE"],
            "resources": [plural],
        }
        for configuration, verb in (("Mutating", "mutate"), ("Validating", "validate")):
            again = (family, verb) == ("sgx", "mutate")
            path = f"/{verb}-deviceplugin-intel-com-v1-{kind}"
            found[configuration].append(webhook(f"{verb[0]}{kind}.kb.io", path, rule, "Fail", again=again))
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    for family, path in (("fpga", "/pods"), ("sgx", "/mutate--v1-pod")):
        if family in pod_families:
            hook = webhook(f"{family}.mutator.webhooks.intel.com", path, pods, "Ignore", again=family == "sgx")
            found["Mutating"].append(hook)
    if "fpga" in pod_families:
        # Not in the original. It returns warnings only.
        functions = {
            "apiGroups": ["fpga.intel.com"],
            "apiVersions": ["v2"],
            "operations": ["CREATE", "UPDATE"],
            "resources": ["acceleratorfunctions"],
        }
        path = "/validate-fpga-intel-com-v2-acceleratorfunction"
        found["Validating"].append(webhook("vacceleratorfunction.kb.io", path, functions, "Ignore"))
    return found


@pytest.mark.parametrize("directory", [DEFAULT, CERT_MANAGER, *DEVICES])
def test_webhooks_cover_every_kind_and_the_pods_of_managed_families(directory: str) -> None:
    objects = by_name(render(TREE / directory))
    annotations = {"cert-manager.io/inject-ca-from": f"{NAMESPACE}/{PREFIX}serving-cert"}
    for configuration, entries in webhooks([DEVICES[directory]] if directory in DEVICES else KINDS).items():
        kind, name = f"{configuration}WebhookConfiguration", f"{PREFIX}{configuration.lower()}-webhook-configuration"
        metadata: Object = {"name": name} | ({"annotations": annotations} if directory == CERT_MANAGER else {})
        expected = {"apiVersion": ADMISSION, "kind": kind, "metadata": metadata, "webhooks": entries}
        assert objects[kind, name] == expected


@pytest.mark.parametrize("directory", DEVICES)
def test_an_installation_for_one_kind_keeps_all_other_objects(directory: str) -> None:
    """A GitOps tool with pruning would delete missing objects, and with a CRD all objects of its kind."""
    removed = {*by_name(render(TREE / DEFAULT))} - {*by_name(render(TREE / directory))}
    fpga = {("ClusterRole", f"{PREFIX}fpga-names-role"), ("ClusterRoleBinding", f"{PREFIX}fpga-names-rolebinding")}
    gpu = {
        (scope + kind, f"{PREFIX}gpu-manager-binder-{kind.lower()}")
        for scope in ("", "Cluster")
        for kind in ("Role", "RoleBinding")
    }
    assert removed == (set() if directory == "device/fpga" else fpga) | (set() if directory == "device/gpu" else gpu)


def test_the_certificate_of_cert_manager_is_of_an_authority_and_for_the_service() -> None:
    found = by_name(render(TREE / CERT_MANAGER))
    expected = by_name(certificate_request(NAMESPACE, PREFIX))
    assert {name: each for name, each in found.items() if name[0] in ("Certificate", "Issuer")} == expected


def test_the_root_of_the_tree_is_the_default_and_no_second_installation() -> None:
    assert render(TREE) == render(TREE / DEFAULT)


def test_on_openshift_the_service_ca_issues_the_certificate() -> None:
    found = by_name(render(TREE / OCP))
    annotation = "service.beta.openshift.io"
    service = found["Service", f"{OCP_NAMES[1]}webhook-service"]["metadata"]["annotations"]
    assert service == {f"{annotation}/serving-cert-secret-name": "webhook-server-cert"}
    for kind in ("Mutating", "Validating"):
        name = f"{OCP_NAMES[1]}{kind.lower()}-webhook-configuration"
        metadata = found[f"{kind}WebhookConfiguration", name]["metadata"]
        assert metadata == {"name": name, "annotations": {f"{annotation}/inject-cabundle": "true"}}


def test_on_openshift_the_overlay_of_the_user_sets_the_namespace(tmp_path: Path) -> None:
    overlay = os.path.relpath(TREE / OCP, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(f"namespace: mine\nresources: [{overlay}]\n")
    objects = list(yaml.load_all(run_kubectl("kustomize", tmp_path), yaml.CSafeLoader))
    assert {each["metadata"].get("namespace", "mine") for each in objects} == {"mine"}
    assert {subject["namespace"] for each in objects for subject in each.get("subjects", ())} == {"mine"}
    for each in objects:
        for hook in each.get("webhooks", ()):
            assert hook["clientConfig"]["service"]["namespace"] == "mine"


# roleRef of a binding and selector of a Deployment are immutable.
ORIGINAL_BINDINGS = {
    ("RoleBinding", "leader-election-rolebinding"): ("Role", "leader-election-role"),
    ("ClusterRoleBinding", "manager-rolebinding"): ("ClusterRole", "manager-role"),
    ("ClusterRoleBinding", "proxy-rolebinding"): ("ClusterRole", "proxy-role"),
}


def test_immutable_fields_are_those_of_the_original() -> None:
    found = by_name(render(TREE / DEFAULT))
    for (kind, name), (role_kind, role) in ORIGINAL_BINDINGS.items():
        reference = found[kind, f"{PREFIX}{name}"]["roleRef"]
        assert reference == {"apiGroup": "rbac.authorization.k8s.io", "kind": role_kind, "name": f"{PREFIX}{role}"}
    assert operator_of(DEFAULT)["spec"]["selector"] == {"matchLabels": LABELS}
