"""The Helm charts with the names of the originals render to the objects of the kustomizations. `helm` renders them."""

import base64
import json
from typing import Any

import pytest
import yaml
from charts import CHARTS, HUB, OPERATOR, hook_objects, in_hub, read, rejected, template
from manifests import DEPLOY, Object, flag_values, in_order, render

import accelplane
from accelplane.cli.operator import FLAGS, options
from accelplane.operator.dryrun import render_text
from accelplane.operator.models import KINDS
from accelplane.operator.settings import Settings
from release.olm.products import PLUGIN_IMAGES

NAMESPACE = "inteldeviceplugins-system"
PLUGINS = {family: f"intel-device-plugins-{family}" for family in KINDS}
NAMES = [OPERATOR, *PLUGINS.values()]
# The kinds with a rule for labels of nodes: not those whose devices are not known.
LABELLED = [family for family in KINDS if family != "generic"]
CERT_MANAGER: Object = {"certificate": {"source": "cert-manager"}}
KEEP = {"helm.sh/resource-policy": "keep"}


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): in_order(each) for each in objects}
    assert len(found) == len(objects)
    return found


def custom_resource(family: str, **values: object) -> Object:
    """The custom resource that a plugin chart renders. The operator accepts it."""
    rules: Object = {"nodeFeatureRule": False} if family in LABELLED else {}
    (found,) = template(PLUGINS[family], **rules, **values)
    render_text(json.dumps(found), Settings())
    return found


def deployment(**values: object) -> Object:
    (found,) = (each for each in template(OPERATOR, NAMESPACE, **values) if each["kind"] == "Deployment")
    return found["spec"]["template"]["spec"]


# Files of the charts, without Helm


@pytest.mark.parametrize("chart", NAMES)
def test_a_chart_has_the_version_of_the_product(chart: str) -> None:
    found = read(chart, "Chart.yaml")
    assert (found["name"], found["version"], found["appVersion"]) == (chart, *[accelplane.__version__] * 2)


def test_the_definitions_of_the_chart_are_those_of_the_kustomization() -> None:
    bases = DEPLOY / "operator" / "crd" / "bases"
    copies = CHARTS / OPERATOR / "files" / "crds"
    assert {file.name: file.read_text() for file in copies.iterdir()} == {
        file.name: file.read_text() for file in bases.iterdir()
    }


def test_the_rules_of_the_charts_are_those_of_the_kustomization() -> None:
    found: dict[str, list[Object]] = {}
    for family in LABELLED:
        text = (CHARTS / PLUGINS[family] / "files" / "node-feature-rules.yaml").read_text()
        for each in yaml.load_all(text, yaml.CSafeLoader):
            found[each["metadata"]["name"]] = each["spec"]["rules"]
    expected = {
        each["metadata"]["name"]: each["spec"]["rules"] for each in render(DEPLOY / "nfd/overlays/node-feature-rules")
    }
    assert found.pop("intel-gpu-platform-labeling") == expected.pop("intel-gpu-platform-labeling")
    devices = [rule for rules in found.values() for rule in rules]
    assert in_order(devices) == in_order(expected.pop("intel-dp-devices"))
    assert not expected
    families = {family: "fpga-arria10" if family == "fpga" else family for family in LABELLED}
    assert {*found} == {f"intel-dp-{name}-device" for name in families.values()}


def paths(values: Any, prefix: str = "") -> set[str]:
    """The keys of values, with dots; free maps and lists are leaves."""
    if not isinstance(values, dict) or not values or prefix in ("nodeSelector.", "namespace.labels.", "resources."):
        return {prefix.removesuffix(".")}
    return {path for key, each in values.items() for path in paths(each, f"{prefix}{key}.")}


def schema_paths(schema: Any, prefix: str = "") -> set[str]:
    if "properties" not in schema or prefix == "resources.":
        return {prefix.removesuffix(".")}
    return {path for key, each in schema["properties"].items() for path in schema_paths(each, f"{prefix}{key}.")}


@pytest.mark.parametrize("chart", NAMES)
def test_the_schema_has_the_keys_of_the_values(chart: str) -> None:
    schema = json.loads((CHARTS / chart / "values.schema.json").read_text())
    others = {path for path in schema_paths(schema) if path.startswith("manager.devices.")}
    # Values of every parent chart, of old charts, and keys whose default is an empty map.
    others |= {"global", "enabled", "nameOverride", "fullnameOverride", "kubeRbacProxy", "deployWithoutOperator"}
    others |= {"updateStrategy.type", "updateStrategy.rollingUpdate"}
    assert schema_paths(schema) - others == paths(read(chart, "values.yaml")) - {"manager.devices", "updateStrategy"}


# The operator


def expected_objects(tree: str) -> dict[tuple[str, str], Object]:
    found = by_name(in_hub(render(DEPLOY / "operator" / tree)))
    del found["Namespace", NAMESPACE]
    for (kind, _), each in found.items():
        if kind == "CustomResourceDefinition":
            annotations = each["metadata"].get("annotations", {})
            each["metadata"]["annotations"] = annotations | KEEP
        if kind.startswith("ValidatingAdmissionPolicy"):
            del each["metadata"]["namespace"]  # kubectl's kustomize sets it, and the API server ignores it
        if kind == "Deployment":
            pod = each["spec"]["template"]["spec"]
            pod["nodeSelector"] = {"kubernetes.io/arch": "amd64"}
            pod["containers"][0]["args"].append(f"--image-vendor={HUB}")
            # The kustomization removes the items of these lists, not the lists.
            for owner, key in ((pod, "volumes"), (pod["containers"][0], "volumeMounts")):
                if not owner[key]:
                    del owner[key]
    return found


@pytest.mark.parametrize(
    ("tree", "values"),
    [
        ("default", {}),
        ("overlays/default-with-certmanager", CERT_MANAGER),
        ("overlays/dra", {"manager": {"dra": True}}),
        ("overlays/dra-webhook", {"manager": {"dra": True, "draWebhook": True}}),
    ],
    ids=["own", "certmanager", "dra", "dra-webhook"],
)
def test_the_operator_chart_renders_the_objects_of_the_kustomization(tree: str, values: Object) -> None:
    found, expected = by_name(template(OPERATOR, NAMESPACE, **values)), expected_objects(tree)
    assert {*found} == {*expected}
    for name, each in expected.items():
        assert found[name] == each, name


def test_all_references_follow_the_namespace_of_the_release() -> None:
    for values in ({}, CERT_MANAGER):
        objects = template(OPERATOR, "elsewhere", **values)
        assert NAMESPACE not in json.dumps(objects)
        assert {each["metadata"].get("namespace", "elsewhere") for each in objects} == {"elsewhere"}


def test_a_managed_namespace_is_that_of_the_kustomization_and_survives_the_release() -> None:
    found = by_name(template(OPERATOR, NAMESPACE, namespace={"manage": True}))["Namespace", NAMESPACE]
    expected = by_name(render(DEPLOY / "operator" / "default"))["Namespace", NAMESPACE]
    assert found["metadata"].pop("annotations") == KEEP
    assert found == expected


def test_definitions_can_be_installed_by_other_means_or_be_deleted_with_the_release() -> None:
    kinds = {each["kind"] for each in template(OPERATOR, crds={"install": False})}
    assert "CustomResourceDefinition" not in kinds
    definitions = [each for each in template(OPERATOR, crds={"keep": False}) if each["kind"].startswith("CustomRes")]
    assert len(definitions) == 11
    assert not any(KEEP.items() <= each["metadata"].get("annotations", {}).items() for each in definitions)


def test_values_of_the_original_operator_chart_are_valid() -> None:
    pod = deployment(
        manager={
            "image": {"hub": "registry.example.com:5000/tools", "tag": "1.2.0"},
            "devices": {"gpu": True, "qat": False},
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "proxy.example.com"}],
        },
        kubeRbacProxy={"image": {"hub": "quay.io", "hubRepo": "brancz", "tag": "v0.18.1", "pullPolicy": "Always"}},
        controllerExtraArgs="- --v={{ add 1 1 }}\n",
        tolerations=[{"operator": "Exists"}],
        nodeSelector={"kubernetes.io/arch": "amd64", "zone": "a"},
    )
    (container,) = pod["containers"]
    assert container["image"] == "registry.example.com:5000/tools/intel-deviceplugin-operator:1.2.0"
    assert {"name": "HTTPS_PROXY", "value": "proxy.example.com"} in container["env"]
    assert container["args"][-2:] == ["--devices=gpu", "--v=2"]
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64", "zone": "a"}


def test_images_that_the_operator_fills_in_and_pins_are_of_the_hub_of_its_own_image() -> None:
    (container,) = deployment(manager={"image": {"hub": "mirror.example/a"}})["containers"]
    environment = {each["name"]: each.get("value", "") for each in container["env"]}
    chosen = options(flag_values(FLAGS, container), environment)
    related = {value for name, value in environment.items() if name.startswith("RELATED_IMAGE_")}
    assert {chosen.settings.images.reference(name) for name in PLUGIN_IMAGES} == related
    assert f"mirror.example/a/intel-gpu-plugin:{accelplane.__version__}" in related
    # The operator of another version may not know the option.
    (other,) = deployment(manager={"image": {"hub": "mirror.example/a", "tag": "1.2.0"}})["containers"]
    assert not any("image-vendor" in word for word in other["args"])


def test_the_private_registry_is_used_for_the_operator_and_all_plugins() -> None:
    registry = {"registryUrl": "registry.example.com", "registryUser": "user", "registrySecret": "password"}
    objects = by_name(template(OPERATOR, NAMESPACE, privateRegistry=registry, imagePullSecrets=[{"name": "other"}]))
    name = "release-operator-private-registry"
    secret = objects["Secret", name]
    assert secret["type"] == "kubernetes.io/dockerconfigjson"
    document = json.loads(base64.b64decode(secret["data"][".dockerconfigjson"]))
    auth = base64.b64encode(b"user:password").decode()
    entry = {"username": "user", "password": "password", "auth": auth}
    assert document == {"auths": {"registry.example.com": entry}}
    pod = objects["Deployment", "inteldeviceplugins-controller-manager"]["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "other"}, {"name": name}]
    assert {"name": "DEVICEPLUGIN_SECRET", "value": name} in pod["containers"][0]["env"]


def test_pod_settings_of_the_operator_are_in_its_pod() -> None:
    digest = f"sha256:{'a' * 64}"
    pod = deployment(
        manager={"image": {"digest": digest, "pullPolicy": "Always"}},
        priorityClassName="system-cluster-critical",
        affinity={"podAntiAffinity": {}},
        resources={"limits": {"cpu": "1"}},
    )
    assert pod["priorityClassName"] == "system-cluster-critical"
    assert pod["affinity"] == {"podAntiAffinity": {}}
    (container,) = pod["containers"]
    assert container["image"] == f"{HUB}/intel-deviceplugin-operator:{accelplane.__version__}@{digest}"
    assert container["imagePullPolicy"] == "Always"
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "120Mi"}


def test_helm_test_connects_to_the_service_of_the_webhooks() -> None:
    (pod,) = hook_objects(OPERATOR, "elsewhere")
    (container,) = pod["spec"]["containers"]
    compile(container["command"][-1], "webhook", "exec")
    # The variable that the kubelet sets for the Service.
    names = {each["metadata"]["name"] for each in template(OPERATOR, "elsewhere") if each["kind"] == "Service"}
    variables = {f"{name.upper().replace('-', '_')}_SERVICE_HOST" for name in names}
    assert any(f'os.environ["{variable}"]' in container["command"][-1] for variable in variables)
    assert pod["metadata"]["namespace"] == "elsewhere"


# The plugins

# Defaults of the charts of the originals that differ from the samples.
DEFAULTS: dict[str, Object] = {
    "gpu": {
        "sharedDevNum": 1, "logLevel": 2, "preferredAllocationPolicy": "none", "bypathMode": "single",
        "monitoringMode": "single",
    },
    "npu": {"logLevel": 2},
    "dsa": {"driver": "idxd"},
    "qat": {"maxNumDevices": 128},
}  # fmt: skip


@pytest.mark.parametrize("family", KINDS)
def test_a_plugin_chart_renders_the_sample_with_the_defaults_of_the_original(family: str) -> None:
    samples = by_name(in_hub(render(DEPLOY / "operator" / "samples")))
    expected = samples[KINDS[family].__name__, f"{family}deviceplugin-sample"]
    if family not in LABELLED:
        del expected["spec"]["nodeSelector"]  # nothing sets the label
    assert custom_resource(family) == expected | {"spec": expected["spec"] | DEFAULTS.get(family, {})}


@pytest.mark.parametrize("family", LABELLED)
def test_a_plugin_chart_renders_its_rules(family: str) -> None:
    file = CHARTS / PLUGINS[family] / "files" / "node-feature-rules.yaml"
    found = [each for each in template(PLUGINS[family]) if each["kind"] == "NodeFeatureRule"]
    assert found == [*yaml.load_all(file.read_text(), yaml.CSafeLoader)]


@pytest.mark.parametrize("family", KINDS)
def test_pod_settings_reach_the_custom_resource(family: str) -> None:
    values: Object = {
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "system-node-critical",
        "resources": {"limits": {"memory": "64Mi"}},
        "updateStrategy": {"type": "OnDelete"},
        "podAnnotations": {"example.com/a": "b"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "nodeSelector": {"zone": "a"},
        "logLevel": 1,
    }
    found = custom_resource(family, name="mine", annotations={"example.com/c": "d"}, **values)
    assert found["metadata"] == {"name": "mine", "annotations": {"example.com/c": "d"}}
    selector = {"zone": "a", **custom_resource(family)["spec"].get("nodeSelector", {})}
    assert {key: found["spec"][key] for key in values} == values | {"nodeSelector": selector}


FUSE = [{"name": "fuse", "groups": [{"count": 10, "paths": [{"path": "/dev/fuse"}]}]}]
VALUES: dict[str, tuple[Object, Object]] = {
    "dlb": ({"initImage": {"enable": False}}, {}),
    "dsa": ({"driver": "vfio-pci", "initImage": None}, {"driver": "vfio-pci"}),
    "fpga": ({"mode": "af"}, {"mode": "af"}),
    "gpu": (
        {
            "initImage": {"enable": True, "hub": "intel", "tag": "0.34.0"}, "sharedDevNum": 4,
            "enableMonitoring": False, "allocationPolicy": "balanced", "allowIDs": "0x56c0", "bypathMode": "all",
            "monitoringMode": "split",
        },
        {
            "initImage": "intel/intel-gpu-initcontainer:0.34.0", "sharedDevNum": 4,
            "preferredAllocationPolicy": "balanced", "allowIDs": "0x56c0", "bypathMode": "all",
            "monitoringMode": "split",
        },
    ),
    "generic": (
        {"domain": None, "devices": FUSE, "preferredAllocationPolicy": "packed", "cdi": "off"},
        {"devices": FUSE, "preferredAllocationPolicy": "packed", "cdi": "off"},
    ),
    "iaa": ({"sharedDevNum": 2, "provisioningConfig": "iaa"}, {"sharedDevNum": 2, "provisioningConfig": "iaa"}),
    "npu": ({"sharedDevNum": 3}, {"sharedDevNum": 3}),
    "qat": (
        {"kernelVfDrivers": ["6xxxvf"], "maxNumDevices": 7, "dpdkDriver": "igb_uio", "allocationPolicy": "packed"},
        {"kernelVfDrivers": ["6xxxvf"], "maxNumDevices": 7, "dpdkDriver": "igb_uio",
         "preferredAllocationPolicy": "packed"},
    ),
    "sgx": ({"enclaveLimit": 5, "provisionLimit": 6}, {"enclaveLimit": 5, "provisionLimit": 6}),
}  # fmt: skip


@pytest.mark.parametrize("family", VALUES)
def test_values_become_fields_of_the_custom_resource(family: str) -> None:
    values, expected = VALUES[family]
    spec = custom_resource(family, **values)["spec"]
    assert {key: spec[key] for key in expected} == expected
    unset = {"initImage", "enableMonitoring"} - {*expected}
    if family in ("dlb", "dsa", "gpu"):
        assert not unset & {*spec}


@pytest.mark.parametrize("family", KINDS)
def test_a_plugin_image_can_be_pinned_by_digest(family: str) -> None:
    digest = f"sha256:{'b' * 64}"
    found = custom_resource(family, image={"digest": digest})
    assert found["spec"]["image"] == f"{HUB}/intel-{family}-plugin:{accelplane.__version__}@{digest}"


@pytest.mark.parametrize("family", KINDS)
def test_null_tolerations_of_old_values_files_are_valid(family: str) -> None:
    assert "tolerations" not in custom_resource(family, tolerations=None)["spec"]


@pytest.mark.parametrize(
    ("chart", "values", "word"),
    [
        (OPERATOR, {"manger": {}}, "manger"),
        (OPERATOR, {"certificate": {"source": "other"}}, "certificate"),
        (OPERATOR, {"manager": {"image": {"digest": "sha256:1"}}}, "digest"),
        (OPERATOR, {"manager": {"devices": {"tpu": True}}}, "tpu"),
        (OPERATOR, {"controllerExtraArgs": "--v=2"}, 'controllerExtraArgs: found "--v=2", expected YAML list items'),
        # As a number, 1.10 is 1.1.
        (OPERATOR, {"manager": {"image": {"tag": 1.1}}}, "tag"),
        (PLUGINS["qat"], {"initImage": {"tag": 1.1}}, "tag"),
        (PLUGINS["generic"], {"devices": []}, "devices"),
        (PLUGINS["generic"], {"devices": [{"name": "a", "paths": []}]}, "devices"),
        (PLUGINS["gpu"], {"name": "Mine_"}, "name"),
        (PLUGINS["gpu"], {"sharedDevNum": 0}, "sharedDevNum"),
        (PLUGINS["gpu"], {"allocationPolicy": "random"}, "allocationPolicy"),
        (PLUGINS["qat"], {"kernelVfDrivers": ["8xxxvf"]}, "kernelVfDrivers"),
        (PLUGINS["sgx"], {"tolerations": [{"operator": "Never"}]}, "tolerations"),
        (PLUGINS["dsa"], {"nodeFeatureRule": "true"}, "nodeFeatureRule"),
    ],
)
def test_invalid_values_are_rejected_with_their_key(chart: str, values: Object, word: str) -> None:
    assert word in rejected(chart, **values)


def test_every_chart_has_notes() -> None:
    for chart in NAMES:
        assert "kubectl" in (CHARTS / chart / "templates" / "NOTES.txt").read_text()
