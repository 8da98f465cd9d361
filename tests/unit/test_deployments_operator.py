"""The trees of the operator render to the objects that users of Go's operator have, and give no rights that it had not.

The tables are the specification's: names and prefix of the release of 2024, metrics and levels of Pod Security of the
newest. Beyond them are certificates of the operator's own, an account of the plugins without rights and without token,
roles for the plugins' namespace instead of all, and `device/…` with nothing of other kinds. `kubectl` renders.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from manifests import DEPLOY, Object, own_image, render, resources, run_kubectl

from accelplane.cli.goflags import parse
from accelplane.cli.operator import FLAGS
from accelplane.operator.models import KINDS

TREE = DEPLOY / "operator"
DEFAULT, CERT_MANAGER, OCP = "default", "overlays/default-with-certmanager", "overlays/ocp"
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


def placed(kind: str, objects: Iterable[Object]) -> set[tuple[str, str]]:
    """Names and namespaces of a kind."""
    return {
        (each["metadata"]["name"], each["metadata"].get("namespace", "")) for each in objects if each["kind"] == kind
    }


# What there is

# Kind -> names without their prefix.
COMMON = {
    "ServiceAccount": "controller-manager plugins",
    "Role": "leader-election-role manager-role plugins-scc-role",
    "RoleBinding": "leader-election-rolebinding manager-rolebinding plugins-scc-rolebinding",
    "ClusterRole": "fpga-names-role manager-role metrics-reader proxy-role",
    "ClusterRoleBinding": "fpga-names-rolebinding manager-rolebinding proxy-rolebinding",
    "Service": "webhook-service",
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
METRICS = {"Service": "controller-manager-metrics-service"}
EVENTS = {"Role": "events-role", "RoleBinding": "events-rolebinding"}
OWN_CERTIFICATE: dict[str, str] = dict.fromkeys(
    ("Secret", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"), "own-certificate"
)
VARIANTS: dict[str, list[dict[str, str]]] = {
    DEFAULT: [COMMON, GPU_MANAGER, METRICS, EVENTS, OWN_CERTIFICATE],
    CERT_MANAGER: [
        COMMON, GPU_MANAGER, METRICS, EVENTS, {"Issuer": "selfsigned-issuer", "Certificate": "serving-cert"},
    ],
    OCP: [COMMON, {"ClusterRole": "events-role", "ClusterRoleBinding": "events-rolebinding"}],
}  # fmt: skip


@pytest.mark.parametrize("directory", VARIANTS)
def test_an_installation_is_these_objects_and_no_others(directory: str) -> None:
    prefix = OCP_NAMES[1] if directory == OCP else PREFIX
    wanted = {
        (kind, f"{prefix}{name}")
        for part in VARIANTS[directory]
        for kind, text in part.items()
        for name in text.split()
    }
    definitions = {f"{names(family)[1]}.deviceplugin.intel.com" for family in KINDS} | {*MAPPINGS}
    wanted |= {("CustomResourceDefinition", name) for name in definitions}
    if directory != OCP:
        wanted.add(("Namespace", NAMESPACE))
    assert {*by_name(render(TREE / directory))} == wanted


@pytest.mark.parametrize("directory", [DEFAULT, CERT_MANAGER])
def test_everything_is_in_the_operators_namespace_but_the_right_to_write_events(directory: str) -> None:
    elsewhere = {
        (each["kind"], each["metadata"]["name"])
        for each in render(TREE / directory)
        if each["metadata"].get("namespace", NAMESPACE) != NAMESPACE
    }
    assert elsewhere == {("Role", f"{PREFIX}events-role"), ("RoleBinding", f"{PREFIX}events-rolebinding")}


def test_every_tree_that_can_be_applied_renders() -> None:
    for file in TREE.rglob("kustomization.yaml"):
        if yaml.safe_load(file.read_text())["kind"] == "Kustomization":
            assert render(file.parent), file


def test_what_a_bundle_is_made_from_is_the_installation_and_the_samples() -> None:
    wanted = by_name(render(TREE / DEFAULT)) | by_name(render(TREE / "samples"))
    assert by_name(render(TREE / "manifests")) == wanted


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
    f"--plugin-service-account={PREFIX}plugins",
]
OWN = f"--certificate-secret={PREFIX}own-certificate"
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
    "env": [{"name": "DEVICEPLUGIN_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
    "ports": [{"name": "webhook-server", "containerPort": 9443, "protocol": "TCP"}],
    "livenessProbe": probe("/healthz", 15, 20),
    "readinessProbe": probe("/readyz", 5, 10),
    "securityContext": SECURITY,
    "resources": resources(("100Mi", "100m"), ("120Mi", "100m")),
    "volumeMounts": [{"name": "cert", "mountPath": CERTIFICATES, "readOnly": True}],
}
VOLUMES = [{"name": "cert", "secret": {"secretName": "webhook-server-cert", "defaultMode": 0o644}}]
# What an installation has otherwise: of the container, and of the pod.
CONTAINERS: dict[str, Object] = {
    DEFAULT: {"args": [*ARGUMENTS, OWN], "volumeMounts": []},
    CERT_MANAGER: {},
    OCP: {
        "args": [*ARGUMENTS[:4], f"--plugin-service-account={OCP_NAMES[1]}plugins"],
        "securityContext": {name: value for name, value in SECURITY.items() if name != "runAsUser"},
    },
    **{
        directory: {"args": [*ARGUMENTS, OWN, f"--devices={family}"], "volumeMounts": []}
        for directory, family in DEVICES.items()
    },
}


@pytest.mark.parametrize("directory", CONTAINERS)
def test_the_operator_runs_as_the_originals_do(directory: str) -> None:
    namespace, prefix = OCP_NAMES if directory == OCP else (NAMESPACE, PREFIX)
    container = CONTAINER | CONTAINERS[directory]
    pod = {
        "serviceAccountName": f"{prefix}controller-manager",
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
        "volumes": VOLUMES if container["volumeMounts"] else [],
    }
    metadata = {"name": f"{prefix}controller-manager", "namespace": namespace, "labels": LABELS}
    template = {"metadata": {"labels": LABELS}, "spec": pod}
    spec = {"replicas": 1, "selector": {"matchLabels": LABELS}, "template": template}
    wanted = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
    assert operator_of(directory) == wanted


@pytest.mark.parametrize("directory", VARIANTS)
def test_the_program_is_told_names_that_are_there(directory: str) -> None:
    found = by_name(render(TREE / directory))
    (container,) = operator_of(directory)["spec"]["template"]["spec"]["containers"]
    given, others = parse(FLAGS, container["args"])
    assert others == []
    values = {flag.name: flag.default for flag in FLAGS} | given
    assert ("ServiceAccount", values["plugin-service-account"]) in found
    if directory == DEFAULT:
        assert ("Secret", values["certificate-secret"]) in found
        for kind in ("Mutating", "Validating"):
            assert (
                f"{kind}WebhookConfiguration",
                f"{values['name-prefix']}{kind.lower()}-webhook-configuration",
            ) in found
        assert ("Service", f"{values['name-prefix']}webhook-service") in found
    else:
        (mount,) = container["volumeMounts"]
        assert (values["certificate-secret"], values["cert-dir"]) == ("", mount["mountPath"])


def test_the_services_lead_to_webhooks_and_metrics() -> None:
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
        "rules": [rule],
    }


def webhooks(families: Iterable[str]) -> dict[str, list[Object]]:
    """The entries of the two configurations for these families."""
    found: dict[str, list[Object]] = {"Mutating": [], "Validating": []}
    for family in families:
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
        if family in families:
            hook = webhook(f"{family}.mutator.webhooks.intel.com", path, pods, "Ignore", again=family == "sgx")
            found["Mutating"].append(hook)
    if "fpga" in families:
        # More than the original's: it warns, and refuses nothing.
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
def test_the_api_server_asks_about_every_kind_that_is_managed_and_about_no_other(directory: str) -> None:
    objects = by_name(render(TREE / directory))
    annotations = {"cert-manager.io/inject-ca-from": f"{NAMESPACE}/{PREFIX}serving-cert"}
    families = [DEVICES[directory]] if directory in DEVICES else [*KINDS]
    for configuration, entries in webhooks(families).items():
        kind, name = f"{configuration}WebhookConfiguration", f"{PREFIX}{configuration.lower()}-webhook-configuration"
        metadata: Object = {"name": name} | ({"annotations": annotations} if directory == CERT_MANAGER else {})
        wanted = {"apiVersion": ADMISSION, "kind": kind, "metadata": metadata, "webhooks": entries}
        assert objects[kind, name] == wanted


@pytest.mark.parametrize("directory", DEVICES)
def test_an_installation_for_one_kind_defines_no_other(directory: str) -> None:
    family = DEVICES[directory]
    found = {name for kind, name in by_name(render(TREE / directory)) if kind == "CustomResourceDefinition"}
    assert found == {f"{names(family)[1]}.deviceplugin.intel.com", *(MAPPINGS if family == "fpga" else ())}


def test_cert_manager_is_asked_for_a_certificate_of_the_service() -> None:
    found = by_name(render(TREE / CERT_MANAGER))
    host = f"{PREFIX}webhook-service.{NAMESPACE}.svc"
    assert found["Certificate", f"{PREFIX}serving-cert"]["spec"] == {
        "dnsNames": [host, f"{host}.cluster.local"],
        "issuerRef": {"kind": "Issuer", "name": f"{PREFIX}selfsigned-issuer"},
        "privateKey": {"rotationPolicy": "Always"},
        "secretName": "webhook-server-cert",
    }
    assert found["Issuer", f"{PREFIX}selfsigned-issuer"]["spec"] == {"selfSigned": {}}


def test_on_openshift_the_certificate_is_the_service_cas() -> None:
    found = by_name(render(TREE / OCP))
    annotation = "service.beta.openshift.io"
    service = found["Service", f"{OCP_NAMES[1]}webhook-service"]["metadata"]["annotations"]
    assert service == {f"{annotation}/serving-cert-secret-name": "webhook-server-cert"}
    for kind in ("Mutating", "Validating"):
        name = f"{OCP_NAMES[1]}{kind.lower()}-webhook-configuration"
        metadata = found[f"{kind}WebhookConfiguration", name]["metadata"]
        assert metadata == {"name": name, "annotations": {f"{annotation}/inject-cabundle": "true"}}


def test_on_openshift_the_namespace_is_the_callers(tmp_path: Path) -> None:
    overlay = os.path.relpath(TREE / OCP, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(f"namespace: mine\nresources: [{overlay}]\n")
    objects = list(yaml.safe_load_all(run_kubectl("kustomize", tmp_path)))
    assert {each["metadata"].get("namespace", "mine") for each in objects} == {"mine"}
    assert {subject["namespace"] for each in objects for subject in each.get("subjects", ())} == {"mine"}
    for each in objects:
        for hook in each.get("webhooks", ()):
            assert hook["clientConfig"]["service"]["namespace"] == "mine"


# Rights


class Grant(NamedTuple):
    """One thing that an account may do: in the whole cluster, in its own namespace (`.`), or in another one."""

    where: str
    group: str
    resource: str
    name: str
    verb: str


def grants(where: str, group: str, resources: Iterable[str], verbs: str, named: Iterable[str] = ("",)) -> set[Grant]:
    return {
        Grant(where, group, resource, name, verb) for resource in resources for name in named for verb in verbs.split()
    }


def granted(objects: list[Object], account: str) -> set[Grant]:
    """What the roles of a tree grant to an account of it."""
    roles = {(each["kind"], each["metadata"]["name"]): each for each in objects if each["kind"].endswith("Role")}
    found: set[Grant] = set()
    for binding in objects:
        if not binding["kind"].endswith("RoleBinding"):
            continue
        (subject,) = binding["subjects"]
        if (subject["kind"], subject["name"]) != ("ServiceAccount", account):
            continue
        namespace = binding["metadata"].get("namespace", "")
        where = "." if namespace == subject["namespace"] else namespace
        for rule in roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]["rules"]:
            for group in rule["apiGroups"]:
                named = rule.get("resourceNames", [""])
                found |= grants(where, group, rule["resources"], " ".join(rule["verbs"]), named)
    return found


PLURALS = [names(family)[1] for family in KINDS]
RBAC = "rbac.authorization.k8s.io"
# The specification's: of the manager's role, the leader's and the proxy's, all of them the account's of everything.
ORIGINAL = set[Grant]().union(
    grants("", "", ["nodes/proxy"], "get list"),
    grants("", "", ["pods"], "get list watch"),
    grants("", "", ["serviceaccounts"], "create delete get list watch"),
    grants("", "apps", ["daemonsets"], "create delete get list patch update watch"),
    grants("", "coordination.k8s.io", ["leases"], "create"),
    grants("", "coordination.k8s.io", ["leases"], "get update", ["d1c7b6d5.intel.com"]),
    grants("", "deviceplugin.intel.com", PLURALS, "create delete get list patch update watch"),
    grants("", "deviceplugin.intel.com", [f"{plural}/finalizers" for plural in PLURALS], "update"),
    grants("", "deviceplugin.intel.com", [f"{plural}/status" for plural in PLURALS], "get patch update"),
    grants("", "fpga.intel.com", ["acceleratorfunctions", "fpgaregions"], "get list watch"),
    grants("", RBAC, ["clusterrolebindings"], "create delete get list watch"),
    grants("", "security.openshift.io", ["securitycontextconstraints"], "use"),
    grants(".", "", ["configmaps"], "get list watch create update patch delete"),
    grants(".", "coordination.k8s.io", ["leases"], "get list watch create update patch delete"),
    grants(".", "", ["events"], "create patch"),
    grants("", "authentication.k8s.io", ["tokenreviews"], "create"),
    grants("", "authorization.k8s.io", ["subjectaccessreviews"], "create"),
)

# What is more. To bind one role, instead of having what is in it (all that nodes' kubelets tell) in order to give it.
BIND = grants("", RBAC, ["clusterroles"], "bind", [f"{PREFIX}gpu-manager-role"])
# To tell what happens: events of objects without a namespace are in this one, and of the newer group.
TELL = grants("default", "events.k8s.io", ["events"], "create patch")
TELL_ANYWHERE = grants("", "events.k8s.io", ["events"], "create patch")
# To keep a certificate, and to have the API server trust it.
CERTIFY = grants(".", "", ["secrets"], "get list patch watch", [f"{PREFIX}own-certificate"]).union(
    grants(".", "", ["secrets"], "create"),
    *(
        grants(
            "", "admissionregistration.k8s.io", [f"{kind}webhookconfigurations"], "get list patch watch",
            [f"{PREFIX}{kind}-webhook-configuration"],
        )
        for kind in ("mutating", "validating")
    )
)  # fmt: skip
# To know which nodes selectors mean.
SEE_NODES = grants("", "", ["nodes"], "list watch")
# To tell who may have an FPGA by a name, how many nodes have it, and why a pod waits for ever.
TELL_OF_FPGAS = (
    grants("", "fpga.intel.com", ["acceleratorfunctions/status", "fpgaregions/status"], "patch")
    | SEE_NODES
    | TELL_ANYWHERE
)
MORE = {
    DEFAULT: BIND | TELL | CERTIFY | TELL_OF_FPGAS,
    CERT_MANAGER: BIND | TELL | TELL_OF_FPGAS,
    OCP: TELL_OF_FPGAS,
    **dict.fromkeys(DEVICES, BIND | TELL | CERTIFY),
    "device/fpga": BIND | TELL | CERTIFY | TELL_OF_FPGAS,
    "overlays/node-overlaps": SEE_NODES,
}


def is_within(grant: Grant, others: set[Grant]) -> bool:
    wider = (grant._replace(where=where, name=name) for where in {grant.where, ""} for name in {grant.name, ""})
    return any(each in others for each in wider)


@pytest.mark.parametrize("directory", MORE)
def test_the_operator_may_do_what_the_original_may_and_what_is_listed(directory: str) -> None:
    prefix = OCP_NAMES[1] if directory == OCP else PREFIX
    found = granted(render(TREE / directory), f"{prefix}controller-manager")
    assert found
    assert {each for each in found if not is_within(each, ORIGINAL)} == MORE[directory]


# A binding's role cannot be changed, nor what a Deployment selects.
ORIGINAL_BINDINGS = {
    ("RoleBinding", "leader-election-rolebinding"): ("Role", "leader-election-role"),
    ("ClusterRoleBinding", "manager-rolebinding"): ("ClusterRole", "manager-role"),
    ("ClusterRoleBinding", "proxy-rolebinding"): ("ClusterRole", "proxy-role"),
}


def test_it_can_be_applied_over_the_original() -> None:
    found = by_name(render(TREE / DEFAULT))
    for (kind, name), (role_kind, role) in ORIGINAL_BINDINGS.items():
        reference = found[kind, f"{PREFIX}{name}"]["roleRef"]
        assert reference == {"apiGroup": RBAC, "kind": role_kind, "name": f"{PREFIX}{role}"}
    assert operator_of(DEFAULT)["spec"]["selector"] == {"matchLabels": LABELS}


@pytest.mark.parametrize("directory", [DEFAULT, "device/qat"])
def test_rights_that_the_original_has_and_nobody_needs_are_gone(directory: str) -> None:
    found = granted(render(TREE / directory), f"{PREFIX}controller-manager")
    for grant in (
        Grant("", "", "nodes/proxy", "", "get"),
        # Pods that wait for an FPGA may be anywhere.
        *([] if directory == DEFAULT else [Grant("", "", "pods", "", "list")]),
        Grant("", "", "serviceaccounts", "", "create"),
        Grant("", "apps", "daemonsets", "", "patch"),
        Grant("", "security.openshift.io", "securitycontextconstraints", "privileged", "use"),
        Grant("", RBAC, "clusterrolebindings", "", "delete"),
        Grant("", "deviceplugin.intel.com", "gpudeviceplugins", "", "delete"),
        Grant(".", "", "configmaps", "", "update"),
    ):
        assert is_within(grant, ORIGINAL)
        assert not is_within(grant, found)


def test_what_is_given_to_the_gpu_plugins_resource_manager_is_the_originals() -> None:
    role = by_name(render(TREE / DEFAULT))["ClusterRole", f"{PREFIX}gpu-manager-role"]
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["nodes/proxy"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]


@pytest.mark.parametrize("directory", VARIANTS)
def test_plugins_have_no_rights_and_no_token(directory: str) -> None:
    prefix = OCP_NAMES[1] if directory == OCP else PREFIX
    objects = render(TREE / directory)
    account = by_name(objects)["ServiceAccount", f"{prefix}plugins"]
    assert account["automountServiceAccountToken"] is False
    # OpenShift's leave to have host paths.
    use = grants(".", "security.openshift.io", ["securitycontextconstraints"], "use", ["privileged"])
    assert granted(objects, f"{prefix}plugins") == use


@pytest.mark.parametrize("directory", VARIANTS)
def test_nobody_else_is_given_anything(directory: str) -> None:
    objects = render(TREE / directory)
    accounts = placed("ServiceAccount", objects)
    for each in objects:
        for subject in each.get("subjects", ()):
            assert (subject["name"], subject["namespace"]) in accounts


def test_who_may_read_metrics_is_who_is_given_this_role() -> None:
    role = by_name(render(TREE / DEFAULT))["ClusterRole", f"{PREFIX}metrics-reader"]
    assert role["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
