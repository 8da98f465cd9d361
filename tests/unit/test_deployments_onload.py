"""The manifests of Onload: the tables of the specification, samples that are valid, scripts and make targets.

`kubectl` renders. Programs that are not part of this project (podman, oc, butane, kubectl apply) are replaced by
scripts that record their arguments.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from manifests import DEPLOY, RBAC, Object, in_order, kubectl, one, overlay, own_image, render, role
from onloadresources import DEFAULTS

from accelplane.cli import onloadoperator
from accelplane.cli.goflags import parse, with_defaults
from accelplane.kube.schemas import violations
from accelplane.onload import crds, names
from accelplane.onload.models import Onload
from accelplane.onload.program import LEASE
from accelplane.onload.validation import verdict
from accelplane.onload.webhooks import PATH

TREE = DEPLOY / "onload"
CONFIG, SAMPLES = TREE / "config", TREE / "config" / "samples"
NAMESPACE, PREFIX = "onload-operator-system", "onload-operator-"
PART_OF = {"app.kubernetes.io/part-of": "onload"}
CONTROL_PLANE = {"control-plane": "controller-manager"}
ACCOUNT = (NAMESPACE, f"{PREFIX}controller-manager")
REGISTRY = "image-registry.openshift-image-registry.svc:5000/onload-clusterlocal"


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


def labelled(document: Object, **more: str) -> Object:
    return document | {"metadata": document["metadata"] | {"labels": PART_OF | more}}


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


# Onload resources, section 14

BASE_OBJECTS = {
    ("ServiceAccount", "onload-operator-sa"),
    ("Role", "onload-operator-role"),
    ("RoleBinding", "onload-operator-rb"),
    ("Onload", "onload"),
}
BUILDER_OBJECTS = {("Namespace", "onload-clusterlocal"), ("RoleBinding", "system:image-builder")}
OVERLAYS = ["in-cluster-build-ocp", "in-cluster-build-ocp-clusterlocal", "pre-built", "external-modules"]
PUBLIC = "docker.io/onload"


def onload_of(overlay: str) -> Object:
    return by_name(render(SAMPLES / "onload/overlays" / overlay))["Onload", "onload"]


def build(source: str, config_map: str) -> Object:
    arguments = [
        {"name": "ONLOAD_BUILD_PARAMS", "value": ""},
        {"name": "ONLOAD_SOURCE", "value": f"{source}/onload-source:8.1.2.26"},
    ]
    return {"build": {"buildArgs": arguments, "dockerfileConfigMap": {"name": config_map}}}


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_has_the_labelled_objects_of_the_base_and_its_own(name: str) -> None:
    objects = by_name(render(SAMPLES / "onload/overlays" / name))
    maps = {key for key in objects if key[0] == "ConfigMap"}
    builds = name.startswith("in-cluster")
    assert {*objects} - maps == BASE_OBJECTS | (BUILDER_OBJECTS if builds else set())
    assert len(maps) == int(builds)
    for each in objects.values():
        assert each["metadata"]["labels"] == PART_OF
    if builds:
        (recipe,) = maps
        assert re.fullmatch("onload-module-dockerfile-[a-z0-9]{10}", recipe[1])
        assert [*objects[recipe]["data"]] == ["dockerfile"]
        binding = objects["RoleBinding", "system:image-builder"]
        assert binding["metadata"]["namespace"] == "onload-clusterlocal"
        assert binding["roleRef"]["name"] == "system:image-builder"
        assert [(each["kind"], each["name"]) for each in binding["subjects"]] == [("Group", "system:serviceaccounts")]


def test_the_base_has_the_account_and_its_rights() -> None:
    objects = by_name(render(SAMPLES / "onload/base"))
    assert {*objects} == BASE_OBJECTS
    assert objects["Role", "onload-operator-role"]["rules"] == [
        {
            "apiGroups": ["security.openshift.io"],
            "resources": ["securitycontextconstraints"],
            "resourceNames": ["privileged"],
            "verbs": ["use"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
    ]
    assert objects["Onload", "onload"]["spec"] == {
        "onload": {"kernelMappings": [], "userImage": "onload/onload-user", "imagePullPolicy": "IfNotPresent"},
        "devicePlugin": {"imagePullPolicy": "IfNotPresent"},
        "selector": {"node-role.kubernetes.io/worker": ""},
        "serviceAccountName": "onload-operator-sa",
    }


def test_an_overlay_with_a_namespace_updates_the_subject_of_the_binding(tmp_path: Path) -> None:
    objects = by_name(overlay(tmp_path, resources=["deploy/onload/config/samples/onload/base"], namespace="mine"))
    (subject,) = objects["RoleBinding", "onload-operator-rb"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "onload-operator-sa", "namespace": "mine"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_resource_of_an_overlay_is_that_of_the_table(name: str) -> None:
    found = onload_of(name)["spec"]["onload"]
    mapping: Object = {"regexp": r"^.*\.x86_64$"}
    own = REGISTRY if name.endswith("clusterlocal") else PUBLIC
    match name:
        case "in-cluster-build-ocp" | "in-cluster-build-ocp-clusterlocal":
            (recipe,) = (
                key for kind, key in by_name(render(SAMPLES / "onload/overlays" / name)) if kind == "ConfigMap"
            )
            mapping |= {"kernelModuleImage": f"{REGISTRY}/onload-module:8.1.2.26-${{KERNEL_FULL_VERSION}}"}
            mapping |= build(own, recipe) | ({} if name.endswith("clusterlocal") else {"sfc": {}})
        case _:
            kernel = "4.18.0-372.49.1.el8_6.x86_64"
            mapping = {"regexp": kernel, "kernelModuleImage": f"{REGISTRY}/onload-module:8.1.2.26-{kernel}", "sfc": {}}
    external = name == "external-modules"
    assert found == {
        "imagePullPolicy": "IfNotPresent",
        "kernelMappings": [] if external else [mapping],
        "userImage": f"{own}/onload-user:8.1.2.26-ubi8",
        "version": "8.1.2.26",
        **({"moduleManagement": "External"} if external else {}),
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_resource_of_an_overlay_passes_schema_and_webhook(name: str) -> None:
    document = onload_of(name)
    assert [*violations(document, crds.schema())] == []
    document["spec"]["devicePlugin"] = DEFAULTS | document["spec"]["devicePlugin"]
    document["metadata"] |= {"namespace": "default"}
    found = verdict(msgspec.convert(document, Onload))
    assert (found.refusal, found.warnings) == ("", ())


def test_commented_options_of_the_base_are_fields_with_defaults() -> None:
    text = (SAMPLES / "onload/base/onload.yaml").read_text()
    commented = dict(re.findall(r"^    # (\w+): (\S+)", text, re.MULTILINE))
    properties: Any = crds.schema()["properties"]
    fields = properties["spec"]["properties"]["devicePlugin"]["properties"]
    assert {*commented} <= {*fields}
    for name, value in commented.items():
        assert yaml.safe_load(value) == DEFAULTS["libMounthPath" if name == "libMountPath" else name]


# Build arguments, and those with a default.
RECIPES = {
    "dtk-ubi": (
        {"DTK_AUTO", "ONLOAD_SOURCE", "UBI_BASE", "ONLOAD_BUILD_PARAMS", "KERNEL_FULL_VERSION"},
        {"ONLOAD_SOURCE": "onload-source", "UBI_BASE": "registry.access.redhat.com/ubi9/ubi-minimal:9.2"},
    ),
    "dtk-only": (
        {"DTK_AUTO", "ONLOAD_SOURCE", "ONLOAD_BUILD_PARAMS", "KERNEL_FULL_VERSION"},
        {"ONLOAD_SOURCE": "onload-source"},
    ),
    "mkdist-direct": (
        {"DTK_AUTO", "UBI_BASE", "ONLOAD_LOCATION", "ONLOAD_BUILD_PARAMS", "KERNEL_FULL_VERSION"},
        {"UBI_BASE": "registry.access.redhat.com/ubi9/ubi-minimal:9.2"},
    ),
    "ubuntu": (
        {"UBUNTU_IMAGE", "ONLOAD_SOURCE", "ONLOAD_BUILD_PARAMS", "KERNEL_FULL_VERSION"},
        {"ONLOAD_SOURCE": "onload-source", "UBUNTU_IMAGE": "docker.io/library/ubuntu:22.04"},
    ),
}


@pytest.mark.parametrize("variant", RECIPES)
def test_a_recipe_is_one_config_map_with_the_build_arguments_of_the_table(variant: str) -> None:
    (found,) = render(SAMPLES / "onload/onload-module" / variant)
    assert found["metadata"]["name"].startswith("onload-module-dockerfile-")
    assert found["metadata"]["labels"] == PART_OF
    text = found["data"]["dockerfile"]
    arguments = re.findall(r"^ARG (\w+)(?:=(\S+))?$", text, re.MULTILINE)
    assert ({name for name, _ in arguments}, {name: value for name, value in arguments if value}) == RECIPES[variant]
    for command in (
        'scripts/onload_build --kernel --kernelver "${KERNEL_FULL_VERSION}" ${ONLOAD_BUILD_PARAMS}',
        'scripts/onload_install --nobuild --kernelfiles --kernelver "${KERNEL_FULL_VERSION}"',
        'depmod "${KERNEL_FULL_VERSION}"',
    ):
        assert command in text
    assert re.search(r'ln -s "/lib/modules/\$\{KERNEL_FULL_VERSION\}/kernel" "[^"]*/kernel"', text)
    # An argument before the first stage is not visible in a stage, and one of a stage not in others.
    for stage in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]:
        body = stage.partition("\n")[2]
        commands = re.sub(r"^(ARG|#).*$", "", body, flags=re.MULTILINE)
        assert {*re.findall(r"\$\{([A-Z_]+)\}", commands)} <= {*re.findall(r"^ARG (\w+)", body, re.MULTILINE)}


# Other samples, section 15


def test_the_profile_has_the_settings_of_the_table() -> None:
    (found,) = render(SAMPLES / "profiles")
    assert found == labelled(
        one(
            "v1",
            "ConfigMap",
            "onload-latency-profile",
            data={
                "EF_POLL_USEC": "100000",
                "EF_TCP_FASTSTART_INIT": "0",
                "EF_TCP_FASTSTART_IDLE": "0",
                "EF_NONAGLE_INFLIGHT_MAX": "65535",
            },
        )
    )


def test_the_test_pods_need_no_privilege() -> None:
    found = by_name(render(SAMPLES / "sfnettest"))
    assert {*found} == {("Pod", "onload-sfnettest-server"), ("Pod", "onload-sfnettest-client")}
    for name, policy, node in (("server", "Always", "compute-0"), ("client", "Never", "compute-1")):
        pod = found["Pod", f"onload-sfnettest-{name}"]
        assert pod["metadata"]["namespace"] == "default"
        assert pod["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "ipvlan-bond0"}
        spec = pod["spec"]
        assert (spec["restartPolicy"], spec["nodeSelector"]) == (policy, {"kubernetes.io/hostname": node})
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        (container,) = spec["containers"]
        assert container["resources"] == {"limits": {"amd.com/onload": 1}}
        assert container["envFrom"] == [{"configMapRef": {"name": "onload-latency-profile"}}]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container.get("command") == (["sleep", "infinity"] if name == "client" else None)


@pytest.mark.parametrize("name", ["example-bond0", "link-local-peer-bond0", "system-clock"])
def test_sfptpd_is_one_privileged_daemonset_with_a_configuration(name: str) -> None:
    found = by_name(render(SAMPLES / "sfptpd/overlays" / name))
    daemonset = found["DaemonSet", "sfptpd"]
    (settings,) = (each for each in found.values() if each["kind"] == "ConfigMap")
    assert {kind for kind, _ in found} == {
        *("Namespace", "ServiceAccount", "Role", "RoleBinding", "DaemonSet", "ConfigMap"),
    }
    assert {each["metadata"].get("namespace", "sfptpd") for each in found.values()} == {"sfptpd"}
    pod = daemonset["spec"]["template"]["spec"]
    ptp = {"node-role.kubernetes.io/ptp": ""} if name == "example-bond0" else {}
    assert pod["nodeSelector"] == {"node-role.kubernetes.io/worker": ""} | ptp
    assert pod["hostNetwork"] is True
    (container,) = pod["containers"]
    assert container == {
        "name": "sfptpd",
        "image": "onload/sfptpd:stable",
        "imagePullPolicy": "Always",
        "args": ["-f", "/etc/sfptpd/sfptpd.cfg"],
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/sfptpd"}],
    }
    assert pod["volumes"] == [{"name": "config", "configMap": {"name": settings["metadata"]["name"]}}]
    assert settings["metadata"]["name"].startswith("sfptpd-config-")
    text = settings["data"]["sfptpd.cfg"]
    sections = {*re.findall(r"^\[(\w+)\]$", text, re.MULTILINE)} - {"general"}
    assert sections == {*re.findall(r"^sync_module \w+ (\w+)$", text, re.MULTILINE)}
    (subject,) = found["RoleBinding", "sfptpd"]["subjects"]
    assert subject["namespace"] == "sfptpd"


def test_networks_for_pods_are_those_of_the_table() -> None:
    found = by_name(render(SAMPLES / "nads"))
    for kind, mode, network in (("ipvlan", None, "198.19.0.0/16"), ("macvlan", "bridge", "198.18.0.0/16")):
        config = json.loads(found["NetworkAttachmentDefinition", f"{kind}-bond0"]["spec"]["config"])
        assert (config["cniVersion"], config["type"], config["master"]) == ("0.3.1", kind, "bond0")
        assert config.get("mode") == mode
        assert config["ipam"] == {"type": "whereabouts", "range": network}


@pytest.mark.parametrize(
    ("tree", "group"), [("nfd", "nfd.k8s-sigs.io"), ("nfd-openshift", "nfd.openshift.io")], ids=["nfd", "openshift"]
)
def test_the_rule_labels_nodes_with_a_solarflare_adapter(tree: str, group: str) -> None:
    (rule,) = render(SAMPLES / tree)
    assert rule["apiVersion"] == f"{group}/v1alpha1"
    (each,) = rule["spec"]["rules"]
    assert each["labels"] == {"feature.node.kubernetes.io/pci-1924.present": "true"}
    expressions = {"vendor": {"op": "In", "value": ["1924"]}, "class": {"op": "In", "value": ["0200"]}}
    assert each["matchFeatures"] == [{"feature": "pci.device", "matchExpressions": expressions}]
    label = onload_of("external-modules")["spec"]["selector"]
    assert label == each["labels"]


# MachineConfig, section 16

MACHINE_CONFIG = TREE / "scripts/machineconfig"
IMAGE = "registry:5000/onload-module:8.1.2.26-4.18.0"


def program(directory: Path, name: str, text: str) -> None:
    file = directory / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def environment(programs: Path) -> dict[str, str]:
    return os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}


def scripts() -> list[Path]:
    shebang = (file for file in TREE.rglob("*") if file.is_file() and file.read_bytes().startswith(b"#!"))
    return sorted(shebang)


def test_scripts_are_executable_and_bash_reads_them() -> None:
    found = scripts()
    assert {file.name for file in found} == {
        *("create_machine_config.sh", "profile_to_configmap.sh", "dtk-release-vars", "onload-source-vars"),
    }
    for file in found:
        assert os.access(file, os.X_OK)
        subprocess.run(["bash", "-n", file], check=True)


@pytest.fixture
def machine_config(tmp_path: Path) -> Path:
    """A copy of the scripts, which write beside themselves, and a butane that copies."""
    shutil.copytree(MACHINE_CONFIG, tmp_path / "scripts")
    program(tmp_path, "butane", '[ "$*" = --strict ] && cat')
    return tmp_path / "scripts"


def create(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [directory / "create_machine_config.sh", *words]
    return subprocess.run(command, env=environment(directory.parent), capture_output=True, text=True, check=False)


def test_a_machine_config_has_the_units_and_scripts_of_the_table(machine_config: Path) -> None:
    assert create(machine_config, "4.12.0", IMAGE, "worker").returncode == 0
    text = (machine_config / "output/99-sfc-machineconfig.yaml").read_text()
    assert "SED_" not in text
    found = yaml.safe_load(text)
    assert (found["variant"], found["version"]) == ("openshift", "4.12.0")
    assert found["metadata"] == {
        "name": "99-sfc-machineconfig",
        "labels": {"machineconfiguration.openshift.io/role": "worker", **PART_OF},
    }
    units = {unit["name"]: unit for unit in found["systemd"]["units"]}
    assert units.pop("crio-wipe.service") == {"name": "crio-wipe.service", "enabled": False, "mask": True}
    files = {file["path"]: file for file in found["storage"]["files"]}
    for name, order, timeout, path in (
        ("sfc-replace-kernel-module.service", "Before=network-pre.target", 60, "sfc-replace-kernel-module.sh"),
        ("sfc-pull-image.service", "After=network-online.target", 900, "sfc-pull-kernel-module-image.sh"),
    ):
        unit = units.pop(name)
        lines = unit["contents"].splitlines()
        assert unit["enabled"] is True
        assert {order, "Type=oneshot", f"TimeoutStartSec={timeout}", f"Environment=ONLOAD_MODULE_IMAGE={IMAGE}"} <= {
            *lines
        }
        assert f"ExecStart=/usr/local/bin/{path}" in lines
        file = files.pop(f"/usr/local/bin/{path}")
        assert (file["mode"], file["user"]) == (0o755, {"name": "root"})
    assert units == files == {}


@pytest.mark.parametrize(
    "words",
    [
        [], ["4.12.0", IMAGE], ["4.12", IMAGE, "worker"], ["4.12.0", "a|b", "worker"], ["4.12.0", "a&b", "worker"],
        ["4.12.0", "", "worker"], ["4.12.0", IMAGE, "a/b"], ["4.12.0", "a\nb", "worker"],
    ],
)  # fmt: skip
def test_wrong_arguments_create_no_machine_config(machine_config: Path, words: list[str]) -> None:
    result = create(machine_config, *words)
    assert result.returncode == 1
    assert result.stderr
    assert not (machine_config / "output/99-sfc-machineconfig.yaml").exists()


def test_a_failing_butane_leaves_the_old_machine_config(machine_config: Path) -> None:
    assert create(machine_config, "4.12.0", IMAGE, "worker").returncode == 0
    old = (machine_config / "output/99-sfc-machineconfig.yaml").read_text()
    program(machine_config.parent, "butane", "exit 1")
    assert create(machine_config, "4.13.0", IMAGE, "worker").returncode != 0
    assert {file.name for file in (machine_config / "output").iterdir()} == {"99-sfc-machineconfig.yaml"}
    assert (machine_config / "output/99-sfc-machineconfig.yaml").read_text() == old


def on_node(tmp_path: Path, script: str, podman: str) -> list[str]:
    """The calls of podman and systemctl by a script of the MachineConfig."""
    found = yaml.safe_load((MACHINE_CONFIG / "99-sfc-machineconfig.bu").read_text())
    (text,) = (file["contents"]["inline"] for file in found["storage"]["files"] if file["path"].endswith(script))
    log = tmp_path / "log"
    program(tmp_path, "podman", f'echo "podman $*" >>{log}\n{podman}')
    program(tmp_path, "systemctl", f'echo "systemctl $*" >>{log}')
    program(tmp_path, "uname", "echo 4.18.0")
    result = subprocess.run(
        ["bash", "-c", text],
        env=environment(tmp_path) | {"ONLOAD_MODULE_IMAGE": "image"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return log.read_text().splitlines()


PULL, REPLACE = "sfc-pull-kernel-module-image.sh", "sfc-replace-kernel-module.sh"
EXISTS, PULLED = "podman image exists image", "podman pull --authfile /var/lib/kubelet/config.json image"
RUN = (
    "podman run --rm --privileged --volume /lib/modules/4.18.0/kernel:/opt/lib/modules/4.18.0/kernel "
    "--entrypoint modprobe image"
)
REPLACED = [EXISTS, f"{RUN} -rd /opt sfc sfc_driverlink", f"{RUN} -d /opt sfc"]


@pytest.mark.parametrize(
    ("script", "podman", "calls"),
    [
        (PULL, "true", [EXISTS]),
        (PULL, "[ $1 = pull ]", [EXISTS, PULLED, "systemctl reboot"]),
        (PULL, "false", [EXISTS, PULLED]),
        (REPLACE, "true", REPLACED),
        (REPLACE, "[ $1 = image ]", REPLACED),
        (REPLACE, "false", [EXISTS]),
    ],
)
def test_the_scripts_of_a_node_make_the_expected_calls(
    tmp_path: Path, script: str, podman: str, calls: list[str]
) -> None:
    assert on_node(tmp_path, script, podman) == calls


# Module images outside of a cluster

RELEASE = '{ "KERNEL_VERSION": "4.18.0-372", "RT_KERNEL_VERSION": "4.18.0-rt", "RHEL_VERSION": "8.6" }'


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--kernel-version", "dtk"], "4.18.0-372"),
        (["--env", "dtk"], 'KERNEL_VERSION="4.18.0-372"\nRT_KERNEL_VERSION="4.18.0-rt"\nRHEL_VERSION="8.6"'),
        (["--json", "dtk"], RELEASE),
        (["--kernel-version"], None),
        (["--other", "dtk"], None),
    ],
)
def test_dtk_release_vars_prints_the_variables_of_the_release(
    tmp_path: Path, words: list[str], output: str | None
) -> None:
    program(
        tmp_path,
        "podman",
        f'[ "$*" = "run --rm --entrypoint cat dtk /etc/driver-toolkit-release.json" ] || exit 1\necho \'{RELEASE}\'',
    )
    result = subprocess.run(
        [TREE / "build/onload-module/dtk-release-vars", *words],
        env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout.strip()) == ((0, output) if output else (1, ""))


@pytest.mark.parametrize(
    ("label", "present", "status"), [("8.1.2.26", "true", 0), ("8.1.2.26", "false", 0), ("<no value>", "true", 1)]
)
def test_onload_source_vars_prints_the_variables_of_the_source(
    tmp_path: Path, label: str, present: str, status: int
) -> None:
    program(
        tmp_path,
        "podman",
        f'echo "$*" >>{tmp_path}/log\n'
        f'case "$*" in "pull "*) echo pulled ;; *--format*) echo "{label}" ;; *) {present} ;; esac',
    )
    result = subprocess.run(
        [TREE / "build/onload-module/onload-source-vars", "--onload-version", "source:1"],
        env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (status, "" if status else f"{label}\n")
    assert ("pull source:1" in (tmp_path / "log").read_text()) == (present == "false")


def make(tmp_path: Path, *words: str) -> str:
    """The calls of programs by make."""
    log = tmp_path / "calls"
    for name in ("podman", "docker", "oc", "opm"):
        program(
            tmp_path,
            name,
            f'echo "{name} $*" >>{log}\n'
            'case "$*" in *driver-toolkit) echo dtk:1 ;; *json) '
            f"echo '{RELEASE}' ;; *--format*) echo 8.1.2.26 ;; esac",
        )
    program(
        tmp_path,
        "kubectl",
        f'[ "$1" != kustomize ] || exec {kubectl()} "$@"\necho "kubectl $*" >>{log}\n'
        f"[ ${{!#}} != - ] || grep -E '^ +(value|image|- image): ..*:' >>{log}",
    )
    result = subprocess.run(
        ["make", "--directory", TREE, *words], env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return log.read_text()


def test_a_module_image_is_built_with_values_of_the_images(tmp_path: Path) -> None:
    calls = make(tmp_path, "onload-module-dtk", "OCP_VERSION=4.12.0", "REGISTRY=mine")
    assert "oc adm release info 4.12.0 --image-for=driver-toolkit" in calls
    line = calls.splitlines()[-1]
    assert line.startswith("podman build ")
    for word in (
        "--tag mine/onload-module:8.1.2.26-4.18.0-372",
        "--build-arg DTK_AUTO=dtk:1",
        "--build-arg KERNEL_FULL_VERSION=4.18.0-372",
        "--build-arg ONLOAD_SOURCE=mine/onload-source:latest",
    ):
        assert word in line


def test_make_deploys_with_the_given_images(tmp_path: Path) -> None:
    calls = make(tmp_path, "deploy", "IMG=reg:5000/a/op:7", "DEVICE_IMG=reg:5000/b/dp:8")
    assert "kubectl apply --filename -" in calls
    assert {each.split()[-1] for each in calls.splitlines()[1:]} == {"reg:5000/a/op:7", "reg:5000/b/dp:8"}
    calls = make(tmp_path, "undeploy", "ignore-not-found=true")
    deleted = [line for line in calls.splitlines() if line.startswith("kubectl delete")]
    assert deleted == [
        "kubectl delete onloads.onload.amd.com --all --all-namespaces",
        "kubectl delete --ignore-not-found=true --filename -",
    ]


@pytest.mark.parametrize(
    ("target", "call"),
    [
        ("docker-build", "docker build --file deploy/images/Containerfile --target onload-operator "),
        ("docker-push", f"docker push {own_image('onload-operator')}"),
        (
            "device-plugin-docker-build",
            "docker build --file deploy/images/Containerfile --target onload-device-plugin ",
        ),
        ("device-plugin-docker-push", f"docker push {own_image('onload-device-plugin')}"),
        ("install", "kubectl apply --kustomize "),
        (
            "uninstall",
            "kubectl get customresourcedefinition onloads.onload.amd.com\nkubectl delete onloads.onload.amd.com ",
        ),
        ("bundle-push", f"docker push {own_image('onload-operator').replace(':', '-bundle:v')}"),
        ("catalog-push", f"docker push {own_image('onload-operator').replace(':', '-catalog:v')}"),
        ("sfc-mc-deploy", "kubectl apply --filename "),
        ("sfc-mc-undeploy", "kubectl delete --ignore-not-found=false --filename "),
    ],
)
def test_make_targets_of_the_original(tmp_path: Path, target: str, call: str) -> None:
    assert make(tmp_path, target).startswith(call)


def test_make_builds_bundle_and_catalog_for_olm(tmp_path: Path) -> None:
    bundles = tmp_path / "bundles"
    assert make(tmp_path, "bundle-build", "BUNDLE_IMG=reg/b:1", f"BUNDLES={bundles}") == (
        f"docker build --file {bundles}/onload-operator/bundle.Dockerfile --tag reg/b:1 {bundles}/onload-operator\n"
    )
    calls = make(
        tmp_path, "catalog-build", "BUNDLE_IMGS=reg/b:1,reg/b:2", "CATALOG_IMG=reg/c:2", "CATALOG_BASE_IMG=reg/c:1"
    )
    assert calls.splitlines()[-1] == (
        "opm index add --container-tool docker --mode semver --tag reg/c:2 --bundles reg/b:1,reg/b:2 "
        "--from-index reg/c:1"
    )


def test_the_makefile_has_the_targets_of_the_original() -> None:
    text = (TREE / "Makefile").read_text()
    targets = {name for line in re.findall(r"^([a-z][a-z -]*):", text, re.MULTILINE) for name in line.split()}
    assert targets >= {
        *("build", "docker-build", "docker-push", "device-plugin-build", "worker-build", "device-plugin-docker-build"),
        *("device-plugin-docker-push", "sfc-mc-docker-build", "sfc-mc-build", "sfc-mc-deploy", "sfc-mc-undeploy"),
        *("bundle", "bundle-build", "bundle-push", "catalog-build", "catalog-push"),
        *("install", "uninstall", "deploy", "undeploy", "onload-module-dtk", "manifests", "generate"),
    }
