"""Sample overlays, build recipes, profile and pods for Onload."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from manifests import Object, one, overlay, render
from onloaddeployments import PART_OF, REGISTRY, SAMPLES, by_name, labelled
from onloadresources import DEFAULTS

from accelplane.kube.schemas import violations
from accelplane.onload import crds
from accelplane.onload.models import Onload
from accelplane.onload.validation import verdict

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


# Pods of sfnettest in the Onload operator 3.0.1, file client-server.yaml: the name, its policy, node and command.
TEST_PODS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("server", "Always", "compute-0", {}),
    ("client", "Never", "compute-1", {"command": ["/bin/sh", "-c", "--"], "args": ["sleep infinity"]}),
]


@pytest.mark.parametrize(("name", "policy", "node", "command"), TEST_PODS)
def test_pods_of_sfnettest_need_no_privilege_and_can_be_applied_to_those_of_the_original(
    name: str, policy: str, node: str, command: dict[str, Any]
) -> None:
    """The fields of an existing pod are immutable, apart from its labels, annotations and image."""
    found = by_name(render(SAMPLES / "sfnettest"))
    assert by_name([*yaml.safe_load_all((SAMPLES / "sfnettest/client-server.yaml").read_text())]) == found
    assert {*found} == {("Pod", "onload-sfnettest-server"), ("Pod", "onload-sfnettest-client")}
    pod = found["Pod", f"onload-sfnettest-{name}"]
    assert pod["metadata"]["namespace"] == "default"
    assert pod["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "ipvlan-bond0"}
    assert pod["metadata"]["labels"] == {
        "app.kubernetes.io/part-of": "sfnettest",
        "app.kubernetes.io/component": name,
    }
    container = {
        "name": f"onload-sfnettest-{name}",
        "image": "docker.io/onload/sfnettest:1.6.0-rc2",
        "resources": {"limits": {"amd.com/onload": 1}},
        "envFrom": [{"configMapRef": {"name": "onload-latency-profile"}}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    assert pod["spec"] == {
        "restartPolicy": policy,
        "nodeName": node,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container | command],
    }


def test_files_of_the_samples_have_the_names_of_the_original() -> None:
    for name in ("sfnettest/client-server.yaml", "sfptpd/base/daemonset.yaml", "profiles/latency.yaml"):
        assert (SAMPLES / name).is_file()


@pytest.mark.parametrize("name", ["example-bond0", "link-local-peer-bond0", "system-clock"])
def test_sfptpd_is_one_privileged_daemonset_with_a_configuration(name: str) -> None:
    found = by_name(render(SAMPLES / "sfptpd/overlays" / name))
    daemonset = found["DaemonSet", "sfptpd"]
    (settings,) = (each for each in found.values() if each["kind"] == "ConfigMap")
    assert {kind for kind, _ in found} == {
        *("Namespace", "ServiceAccount", "Role", "RoleBinding", "DaemonSet", "ConfigMap"),
    }
    assert {each["metadata"].get("namespace", "sfptpd") for each in found.values()} == {"sfptpd"}
    # The selector of the Onload operator 3.0.1: that of an existing DaemonSet is immutable.
    assert daemonset["spec"]["selector"] == {"matchLabels": {"name": "sfptpd"}}
    assert daemonset["spec"]["template"]["metadata"]["labels"] == {"name": "sfptpd"}
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
        "volumeMounts": [{"name": "etc-sfptpd", "mountPath": "/etc/sfptpd"}],
    }
    assert pod["volumes"] == [{"name": "etc-sfptpd", "configMap": {"name": settings["metadata"]["name"]}}]
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
