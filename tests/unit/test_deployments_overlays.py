"""Overlays with a prefix and a namespace: all references between objects resolve, and the namespace admits all pods."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from manifests import APPARMOR, DEPLOY, UNCONFINED, Object, flag_values, overlay, render, trees, write_overlay
from podsecurity import ENFORCE, pod_template, violations

from accelplane.cli import fpgawebhook, operator, sgxwebhook
from accelplane.cli.goflags import Flag
from accelplane.operator.daemonsets.dra import account_of
from accelplane.operator.models import KINDS as FAMILIES

OWN_CERTIFICATE = [
    "operator/default",
    "operator/device/qat",
    "operator/device/fpga",
    "fpga_admissionwebhook/default",
    "fpga_plugin/overlays/region",
    "sgx_admissionwebhook/overlays/default-with-own-certificates",
    "sgx_admissionwebhook/overlays/fail-closed",
    "onload/config/default-with-webhook",
    "onload/config/default-with-metrics",
]
CERT_MANAGER = [
    "operator/overlays/default-with-certmanager",
    "fpga_admissionwebhook/overlays/default-with-certmanager",
    "sgx_admissionwebhook/overlays/default-with-certmanager",
    "sgx_plugin/overlays/epc-nfd",
    "onload/config/default-with-certmanager",
]
OTHERS = [
    "operator/overlays/ocp",
    "sgx_plugin/overlays/epc-register",
    "operator/overlays/dra",
    "operator/overlays/dra-webhook",
    "accelplane_node/overlays/dra",
    "accelplane_node/overlays/fpga",
    "accelplane_node/overlays/clients",
    "gpu_plugin/overlays/dra",
    "fpga_plugin/overlays/dra",
    "labels",
    "gpu_plugin/overlays/fractional_resources",
    "onload/config/default",
    "onload/config/samples/onload/overlays/pre-built",
]
RENAMED = {"namePrefix": "x-", "nameSuffix": "-y", "namespace": "elsewhere"}
# Objects that programs create, under names that no overlay changes.
CREATED = {
    ("ServiceAccount", "gpu-manager-sa"),
    ("ClusterRoleBinding", "gpu-manager-rolebinding"),
    ("Lease", "d1c7b6d5.intel.com"),
    ("Lease", "daabde26.amd.com"),
    ("CustomResourceDefinition", "modules.kmm.sigs.x-k8s.io"),
    ("SecurityContextConstraints", "privileged"),
    *(
        each
        for family in FAMILIES
        for name in (account_of(family, status=False), account_of(family, status=True))
        for each in (
            ("ServiceAccount", name),
            ("ClusterRoleBinding", name),
            ("ClusterRoleBinding", f"{name}-drivers"),
            ("ClusterRole", f"{name}-drivers"),
        )
    ),
}
KINDS = {
    "secrets": "Secret",
    "customresourcedefinitions": "CustomResourceDefinition",
    "serviceaccounts": "ServiceAccount",
    "clusterroles": "ClusterRole",
    "clusterrolebindings": "ClusterRoleBinding",
    "leases": "Lease",
    "mutatingwebhookconfigurations": "MutatingWebhookConfiguration",
    "validatingwebhookconfigurations": "ValidatingWebhookConfiguration",
    "securitycontextconstraints": "SecurityContextConstraints",
}
Reference = tuple[str, str, str]


def references(document: Object) -> Iterator[Reference]:
    """Kind, namespace and name of each object that this one refers to."""
    namespace = document["metadata"].get("namespace", "")
    for hook in document.get("webhooks", ()):
        service = hook["clientConfig"]["service"]
        yield "Service", service["namespace"], service["name"]
    if "roleRef" in document:
        kind = document["roleRef"]["kind"]
        yield kind, namespace if kind == "Role" else "", document["roleRef"]["name"]
    if document["kind"] == "ValidatingAdmissionPolicyBinding":
        yield "ValidatingAdmissionPolicy", namespace, document["spec"]["policyName"]
    for subject in document.get("subjects", ()):
        yield subject["kind"], subject["namespace"], subject["name"]
    for rule in document.get("rules", ()):
        for resource in rule.get("resources", ()):
            for name in () if resource.endswith("/driver") else rule.get("resourceNames", ()):
                yield KINDS[resource], namespace, name
    template = pod_template(document)
    if template:
        yield from _pod_references(namespace, template["spec"])


def _pod_references(namespace: str, spec: Object) -> Iterator[Reference]:
    yield "ServiceAccount", namespace, spec.get("serviceAccountName", "default")
    for volume in spec.get("volumes", ()):
        if "configMap" in volume and not volume["configMap"].get("optional"):
            yield "ConfigMap", namespace, volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", namespace, volume["secret"]["secretName"]


def certificates(objects: list[Object]) -> Iterator[Reference]:
    """The Secrets that cert-manager and OpenShift create, and the accounts that every namespace has."""
    for each in objects:
        namespace = each["metadata"].get("namespace", "")
        if each["kind"] == "Certificate":
            yield "Secret", namespace, each["spec"]["secretName"]
        serving = each["metadata"].get("annotations", {}).get("service.beta.openshift.io/serving-cert-secret-name")
        if serving:
            yield "Secret", namespace, serving
        yield "ServiceAccount", namespace, "default"


def check_references(objects: list[Object]) -> None:
    existing = {(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in objects}
    assert len(existing) == len(objects)
    existing |= {*certificates(objects)}
    for document in objects:
        for kind, namespace, name in references(document):
            # Roles name objects without saying which namespace they are in.
            namespaces = {namespace, ""} if "Role" in document["kind"] else {namespace}
            assert (kind, name) in CREATED or any((kind, each, name) in existing for each in namespaces), (
                document["kind"], document["metadata"], kind, namespace, name,
            )  # fmt: skip


def check_programs(objects: list[Object]) -> None:
    """Programs with a webhook get the names of their objects, and the Services select their pods."""
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    for deployment in (each for each in objects if each["kind"] == "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        for variable, kind in {
            "CERTIFICATE_SECRET": "Secret",
            "WEBHOOK_SERVICE": "Service",
            "MUTATING_WEBHOOK_CONFIGURATION": "MutatingWebhookConfiguration",
            "VALIDATING_WEBHOOK_CONFIGURATION": "ValidatingWebhookConfiguration",
            "PLUGIN_SERVICE_ACCOUNT": "ServiceAccount",
            "GPU_MANAGER_ROLE": "ClusterRole",
            "DRA_ROLE": "ClusterRole",
            "DRA_STATUS_ROLE": "ClusterRole",
        }.items():
            if variable in environment:
                assert (kind, environment.pop(variable)) in names
        others = {name for name in environment if not name.startswith("RELATED_IMAGE_")}
        assert others <= {"HEALTH_PROBE_BIND_ADDRESS", "DEVICE_PLUGIN_IMG"}
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        for service in (each for each in objects if each["kind"] == "Service"):
            assert service["spec"]["selector"].items() <= labels.items()
            assert service["metadata"]["namespace"] == deployment["metadata"]["namespace"]


def check_pods_are_admitted(objects: list[Object]) -> None:
    levels = {
        each["metadata"]["name"]: each["metadata"].get("labels", {}).get(ENFORCE, "privileged")
        for each in objects
        if each["kind"] == "Namespace"
    }
    for document in objects:
        template = pod_template(document)
        if template:
            level = levels.get(document["metadata"].get("namespace", ""), "privileged")
            assert violations(level, template) == [], document["metadata"]


@pytest.mark.parametrize("tree", [*OWN_CERTIFICATE, *OTHERS])
def test_references_resolve_in_an_overlay_with_prefix_suffix_and_namespace(tree: str, tmp_path: Path) -> None:
    objects = overlay(tmp_path, resources=[f"deploy/{tree}"], **RENAMED)
    check_references(objects)
    check_programs(objects)
    check_pods_are_admitted(objects)
    assert {each["metadata"]["namespace"] for each in objects if "namespace" in each["metadata"]} == {"elsewhere"}


def test_the_operator_for_openshift_can_have_the_component_for_claims(tmp_path: Path) -> None:
    objects = overlay(
        tmp_path,
        resources=["deploy/operator/overlays/ocp"],
        components=["deploy/operator/components/dra"],
        namespace="elsewhere",
    )
    check_references(objects)
    check_programs(objects)


@pytest.mark.parametrize("tree", CERT_MANAGER)
def test_cert_manager_gets_the_names_of_an_overlay_with_the_component(tree: str, tmp_path: Path) -> None:
    (tmp_path / "renamed").mkdir()
    write_overlay(tmp_path / "renamed", resources=[f"deploy/{tree}"], **RENAMED)
    objects = overlay(tmp_path, resources=["renamed"], components=["deploy/components/certmanager-references"])
    check_references(objects)
    check_programs(objects)
    check_pods_are_admitted(objects)
    check_certificate(objects)
    assert {each["metadata"]["namespace"] for each in objects if "namespace" in each["metadata"]} == {"elsewhere"}


def check_certificate(objects: list[Object]) -> None:
    """The leaf is for the Service, and of the authority that the self-signed Issuer signs."""
    issuers = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Issuer"}
    certificates = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Certificate"}
    (leaf,) = (each for each in certificates.values() if not each["spec"].get("isCA"))
    (authority,) = (each for each in certificates.values() if each["spec"].get("isCA"))
    (service,) = {hook["clientConfig"]["service"]["name"] for each in objects for hook in each.get("webhooks", ())}
    namespace = leaf["metadata"]["namespace"]
    host = f"{service}.{namespace}.svc"
    assert leaf["spec"]["dnsNames"] == [host, f"{host}.cluster.local"]
    assert issuers[leaf["spec"]["issuerRef"]["name"]] == {"ca": {"secretName": authority["spec"]["secretName"]}}
    assert issuers[authority["spec"]["issuerRef"]["name"]] == {"selfSigned": {}}
    injected = f"{namespace}/{leaf['metadata']['name']}"
    for each in objects:
        if "webhooks" in each:
            assert each["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": injected}


@pytest.mark.parametrize("tree", CERT_MANAGER)
def test_cert_manager_gets_the_names_of_a_tree(tree: str) -> None:
    check_certificate(render(DEPLOY / tree))


@pytest.mark.parametrize("tree", trees())
def test_the_namespace_of_a_tree_admits_its_pods(tree: str) -> None:
    check_pods_are_admitted(render(DEPLOY / tree))


def test_a_container_without_apparmor_has_both_the_annotation_and_the_field() -> None:
    found = 0
    for tree in trees():
        for template in filter(None, map(pod_template, render(DEPLOY / tree))):
            annotations = template.get("metadata", {}).get("annotations", {})
            annotated = {name.removeprefix(APPARMOR) for name in annotations if name.startswith(APPARMOR)}
            containers = [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]
            profiles = {each["name"]: each.get("securityContext", {}).get("appArmorProfile") for each in containers}
            assert annotated == {name for name, profile in profiles.items() if profile == UNCONFINED}, tree
            found += len(annotated)
    assert found > 5


@pytest.mark.parametrize(
    ("tree", "flags"),
    [
        ("operator/default", operator.FLAGS),
        ("fpga_admissionwebhook/default", fpgawebhook.FLAGS),
        ("sgx_admissionwebhook/overlays/default-with-own-certificates", sgxwebhook.FLAGS),
    ],
)
def test_replaced_arguments_change_neither_the_certificate_nor_the_probes(
    tree: str, flags: Sequence[Flag], tmp_path: Path
) -> None:
    """The originals' overlays for one device replace the arguments, and so do users' overlays."""
    patch = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["-v=4"]}]
    fields = {"patches": [{"target": {"kind": "Deployment"}, "patch": json.dumps(patch)}]}
    objects = overlay(tmp_path, resources=[f"deploy/{tree}"], **fields)
    check_programs(objects)
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["-v=4"]
    values = flag_values(flags, container)
    assert [values["certificate-secret"]] == [each["metadata"]["name"] for each in objects if each["kind"] == "Secret"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probed = container["readinessProbe"]["httpGet"]["port"]
    served = {values["port"], int(str(values.get("health-probe-bind-address", "0")).removeprefix(":"))}
    assert ports.get(probed, probed) in served


def test_the_readme_names_trees() -> None:
    text = (DEPLOY / "README.md").read_text()
    named = {each for each in re.findall(r"`(?:kubectl apply -k )?([a-z_]+(?:/[a-z_-]+)*)`", text) if each != "af"}
    assert len(named) > 10
    assert named <= {*trees()}
