"""The manifests of Onload: the tables of the specification, samples that are valid, scripts and make targets.

`kubectl` renders. Programs that are not part of this project (podman, oc, butane, kubectl apply) are replaced by
scripts that record their arguments.
"""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import yaml
from manifests import DEPLOY, RBAC, Object, in_order, one, own_image, render, role
from onloaddeployments import CONFIG, PART_OF, REGISTRY, SAMPLES, by_name, labelled

from accelplane.cli import onloadoperator
from accelplane.cli.goflags import parse, with_defaults
from accelplane.onload import crds, names
from accelplane.onload.program import LEASE
from accelplane.onload.webhooks import PATH

NAMESPACE, PREFIX = "onload-operator-system", "onload-operator-"
CONTROL_PLANE = {"control-plane": "controller-manager"}
ACCOUNT = (NAMESPACE, f"{PREFIX}controller-manager")


# The installation, section 13

DEFAULT_OBJECTS = {
    ("Namespace", NAMESPACE),
    ("CustomResourceDefinition", "onloads.onload.amd.com"),
    ("ServiceAccount", f"{PREFIX}controller-manager"),
    ("Role", f"{PREFIX}leader-election-role"),
    ("RoleBinding", f"{PREFIX}leader-election-rolebinding"),
    ("ClusterRole", f"{PREFIX}manager-role"),
    ("ClusterRoleBinding", f"{PREFIX}manager-rolebinding"),
    ("Deployment", f"{PREFIX}controller-manager"),
}
WEBHOOK_OBJECTS = {
    ("Service", f"{PREFIX}webhook-service"),
    ("ValidatingWebhookConfiguration", f"{PREFIX}validating-webhook-configuration"),
    *((kind, f"{PREFIX}own-certificate") for kind in ("Secret", "Role", "RoleBinding")),
    *((kind, f"{PREFIX}own-certificate") for kind in ("ClusterRole", "ClusterRoleBinding")),
}
CERT_MANAGER_OBJECTS = {
    *(each for each in WEBHOOK_OBJECTS if each[1] != f"{PREFIX}own-certificate"),
    *(("Issuer", f"{PREFIX}{name}") for name in ("selfsigned-issuer", "ca-issuer")),
    *(("Certificate", f"{PREFIX}{name}") for name in ("ca-cert", "serving-cert")),
}
METRICS_OBJECTS = {
    ("Service", f"{PREFIX}controller-manager-metrics-service"),
    ("ClusterRole", f"{PREFIX}metrics-reader"),
    ("ClusterRole", f"{PREFIX}proxy-role"),
    ("ClusterRoleBinding", f"{PREFIX}proxy-rolebinding"),
}
INSTALLATIONS = {
    "default": DEFAULT_OBJECTS,
    "samples/default-clusterlocal": DEFAULT_OBJECTS,
    "default-with-webhook": DEFAULT_OBJECTS | WEBHOOK_OBJECTS,
    "default-with-metrics": DEFAULT_OBJECTS | WEBHOOK_OBJECTS | METRICS_OBJECTS,
    "default-with-certmanager": DEFAULT_OBJECTS | CERT_MANAGER_OBJECTS,
}


@pytest.mark.parametrize("tree", INSTALLATIONS)
def test_an_installation_has_exactly_these_labelled_objects(tree: str) -> None:
    found = by_name(render(CONFIG / tree))
    assert {*found} == INSTALLATIONS[tree]
    for each in found.values():
        assert each["metadata"]["labels"].items() >= PART_OF.items()
        assert each["metadata"].get("namespace", NAMESPACE) == NAMESPACE


def probe(path: str, delay: int, period: int) -> Object:
    return {"httpGet": {"path": path, "port": 8081}, "initialDelaySeconds": delay, "periodSeconds": period}


def expected_deployment() -> Object:
    labels = PART_OF | CONTROL_PLANE
    expressions = [
        {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]},
        {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]},
    ]
    required = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    container = {
        "name": "manager",
        "image": own_image("onload-operator"),
        "command": ["/manager"],
        "args": ["--leader-elect"],
        "env": [{"name": "DEVICE_PLUGIN_IMG", "value": own_image("onload-device-plugin")}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "livenessProbe": probe("/healthz", 15, 20),
        "readinessProbe": probe("/readyz", 5, 10),
        "resources": {
            "limits": {"cpu": "500m", "memory": "128Mi"},
            "requests": {"cpu": "10m", "memory": "64Mi"},
        },
    }
    pod = {
        "serviceAccountName": f"{PREFIX}controller-manager",
        "terminationGracePeriodSeconds": 10,
        "securityContext": {"runAsNonRoot": True},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
        "containers": [container],
    }
    annotations = {"kubectl.kubernetes.io/default-container": "manager"}
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod},
    }
    return labelled(one("apps/v1", "Deployment", f"{PREFIX}controller-manager", NAMESPACE, spec=spec), **CONTROL_PLANE)


def test_the_deployment_is_that_of_the_original() -> None:
    found = by_name(render(CONFIG / "default"))
    assert in_order(found["Deployment", f"{PREFIX}controller-manager"]) == in_order(expected_deployment())


def test_the_other_objects_are_those_of_the_original() -> None:
    found = by_name(render(CONFIG / "default"))
    assert found["Namespace", NAMESPACE] == labelled(one("v1", "Namespace", NAMESPACE))
    account = one("v1", "ServiceAccount", f"{PREFIX}controller-manager", NAMESPACE)
    assert found["ServiceAccount", f"{PREFIX}controller-manager"] == labelled(account)
    for kind, stem in (("Role", "leader-election"), ("ClusterRole", "manager")):
        both = (f"{PREFIX}{stem}-role", f"{PREFIX}{stem}-rolebinding")
        own, binding = (found[kind, both[0]], found[f"{kind}Binding", both[1]])
        assert [own, binding] == [labelled(each) for each in role(kind, both, own["rules"], ACCOUNT)]
    definition = found["CustomResourceDefinition", "onloads.onload.amd.com"]
    assert definition == labelled(json.loads(msgspec.json.encode(crds.onload_definition())))


def test_the_program_accepts_its_arguments_and_gets_the_names_of_its_objects() -> None:
    for tree in ("default", "default-with-webhook", "default-with-metrics", "default-with-certmanager"):
        found = by_name(render(CONFIG / tree))
        (container,) = found["Deployment", f"{PREFIX}controller-manager"]["spec"]["template"]["spec"]["containers"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        values, others = parse(onloadoperator.FLAGS, container["args"])
        chosen = onloadoperator.options(with_defaults(onloadoperator.FLAGS, values, environment), environment)
        assert others == []
        assert chosen.image == own_image("onload-device-plugin")
        assert chosen.leader_elect
        if tree == "default":
            assert chosen.certificate is None
            continue
        assert chosen.certificate is not None
        if tree == "default-with-certmanager":
            (mount,) = container["volumeMounts"]
            assert (chosen.certificate.directory, chosen.certificate.secret) == (mount["mountPath"], "")
            continue
        assert ("Secret", chosen.certificate.secret) in found
        assert ("Service", chosen.certificate.service) in found
        for kind, (name,) in chosen.certificate.configurations.items():
            assert (kind, name) in found
        assert (chosen.metrics_secure, chosen.metrics_address) == (
            (True, ":8443") if tree == "default-with-metrics" else (False, ":8080")
        )


def test_cert_manager_issues_the_certificate_that_the_program_reads() -> None:
    found = by_name(render(CONFIG / "default-with-certmanager"))
    (volume,) = found["Deployment", f"{PREFIX}controller-manager"]["spec"]["template"]["spec"]["volumes"]
    certificate = found["Certificate", f"{PREFIX}serving-cert"]["spec"]
    assert volume["secret"]["secretName"] == certificate["secretName"]
    service = f"{PREFIX}webhook-service.{NAMESPACE}.svc"
    assert certificate["dnsNames"] == [service, f"{service}.cluster.local"]
    issuer = found["Issuer", certificate["issuerRef"]["name"]]
    authority = found["Certificate", f"{PREFIX}ca-cert"]["spec"]
    assert issuer["spec"]["ca"]["secretName"] == authority["secretName"]
    assert ("Issuer", authority["issuerRef"]["name"]) in found
    annotations = found["ValidatingWebhookConfiguration", f"{PREFIX}validating-webhook-configuration"]["metadata"]
    assert annotations["annotations"] == {"cert-manager.io/inject-ca-from": f"{NAMESPACE}/{PREFIX}serving-cert"}


def test_the_lease_of_the_role_is_that_of_the_program() -> None:
    rules = by_name(render(CONFIG / "default"))["Role", f"{PREFIX}leader-election-role"]["rules"]
    assert [rule.get("resourceNames") for rule in rules] == [None, [LEASE]]


def test_the_webhook_is_called_for_onload_resources() -> None:
    found = by_name(render(CONFIG / "default-with-webhook"))
    (hook,) = found["ValidatingWebhookConfiguration", f"{PREFIX}validating-webhook-configuration"]["webhooks"]
    assert hook["clientConfig"] == {
        "service": {"name": f"{PREFIX}webhook-service", "namespace": NAMESPACE, "path": PATH}
    }
    assert (hook["failurePolicy"], hook["sideEffects"]) == ("Fail", "None")
    (rule,) = hook["rules"]
    assert rule == {
        "apiGroups": [names.GROUP],
        "apiVersions": [names.VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["onloads"],
    }
    labels = found["Deployment", f"{PREFIX}controller-manager"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service", f"{PREFIX}webhook-service"]["spec"]["selector"].items() <= labels.items()
    (container,) = found["Deployment", f"{PREFIX}controller-manager"]["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "webhook-server", "containerPort": 9443, "protocol": "TCP"}]


def test_the_monitor_selects_the_metrics_service() -> None:
    (monitor,) = render(CONFIG / "prometheus")
    service = by_name(render(CONFIG / "default-with-metrics"))["Service", f"{PREFIX}controller-manager-metrics-service"]
    assert monitor["metadata"]["name"] == f"{PREFIX}controller-manager-metrics-monitor"
    assert monitor["metadata"]["namespace"] == NAMESPACE
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"] == [
        {
            "path": "/metrics",
            "port": "https",
            "scheme": "https",
            "bearerTokenFile": "/var/run/secrets/kubernetes.io/serviceaccount/token",
            "tlsConfig": {"insecureSkipVerify": True},
        }
    ]
    assert service["spec"]["ports"] == [{"name": "https", "port": 8443, "targetPort": 8443, "protocol": "TCP"}]


@pytest.mark.parametrize(
    ("name", "verbs"), [("editor", "create delete get list patch update watch"), ("viewer", "get list watch")]
)
def test_roles_for_users_are_in_no_tree(name: str, verbs: str) -> None:
    found = yaml.safe_load((CONFIG / f"rbac/onload_{name}_role.yaml").read_text())
    assert found == labelled(
        one(
            f"{RBAC}/v1",
            "ClusterRole",
            f"onload-{name}-role",
            rules=[
                {"apiGroups": ["onload.amd.com"], "resources": ["onloads"], "verbs": verbs.split()},
                {"apiGroups": ["onload.amd.com"], "resources": ["onloads/status"], "verbs": ["get"]},
            ],
        )
    )
    assert ("ClusterRole", f"{PREFIX}onload-{name}-role") not in by_name(render(CONFIG / "default-with-metrics"))


@pytest.mark.memory
def test_images_can_be_replaced_where_the_original_replaces_them(tmp_path: Path) -> None:
    """`kustomize edit set image` in config/manager, and `images` of an overlay."""
    shutil.copytree(DEPLOY, tmp_path / "tree")
    file = tmp_path / "tree/onload/config/manager/kustomization.yaml"
    document = yaml.safe_load(file.read_text())
    assert [each["name"] for each in document["images"]] == ["controller", "deviceplugin"]
    document["images"] = [
        {"name": name, "newName": f"mine/{name}", "newTag": "7"} for name in ("controller", "deviceplugin")
    ]
    file.write_text(yaml.safe_dump(document))
    assert images_of(render(tmp_path / "tree/onload/config/default")) == ("mine/controller:7", "mine/deviceplugin:7")
    assert images_of(render(SAMPLES / "default-clusterlocal")) == (
        f"{REGISTRY}/onload-operator:3.0",
        f"{REGISTRY}/onload-device-plugin:3.0",
    )


def images_of(objects: list[Object]) -> tuple[str, str]:
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container["image"], container["env"][0]["value"]
