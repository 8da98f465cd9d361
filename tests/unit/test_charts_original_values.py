"""Values files of the original charts, and the conventions of Helm for parent charts. `helm` renders them."""

import re
from pathlib import Path

import pytest
from charts import CHARTS, KUBE_VERSION, OPERATOR, parent_chart, rejected, run_helm, template, template_of
from manifests import Object

from accelplane.operator.models import KINDS
from accelplane.operator.settings import PLACEHOLDER

PLUGINS = {family: f"intel-device-plugins-{family}" for family in KINDS}
# Values files of the original charts 0.26 to 0.36 with everything that they set, as people have copied them.
OPERATOR_VALUES: Object = {
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "manager": {
        "image": {"hub": "intel", "tag": "", "pullPolicy": "IfNotPresent"}, "extraEnv": [], "devices": None,
    },
    "kubeRbacProxy": {
        "image": {"hub": "gcr.io", "hubRepo": "kubebuilder", "tag": "v0.14.1", "pullPolicy": "IfNotPresent"},
    },
    "privateRegistry": {"registryUrl": "", "registryUser": "", "registrySecret": ""},
    "resources": {"limits": {"cpu": "100m", "memory": "120Mi"}, "requests": {"cpu": "100m", "memory": "100Mi"}},
    "tolerations": None,
}  # fmt: skip
_IMAGE: Object = {"hub": "intel", "tag": ""}
_COMMON: Object = {"image": _IMAGE, "tolerations": None, "nodeFeatureRule": True, "logLevel": 4}
_INIT: Object = _COMMON | {"initImage": _IMAGE}
VALUES: dict[str, Object] = {
    "dlb": _INIT,
    "dsa": _INIT | {"sharedDevNum": 10, "driver": "idxd"},
    "gpu": _COMMON | {
        "initImage": {"enable": False, "hub": "intel", "tag": ""}, "sharedDevNum": 1, "resourceManager": False,
        "enableMonitoring": True, "allocationPolicy": "none", "allowIDs": "", "denyIDs": "", "bypathMode": "single",
        "monitoringMode": "single", "deployWithoutOperator": False,
    },
    "iaa": _INIT | {"sharedDevNum": 10},
    "npu": _COMMON | {"sharedDevNum": 1},
    "qat": _INIT | {"dpdkDriver": "vfio-pci", "kernelVfDrivers": ["4xxxvf", "420xxvf"], "maxNumDevices": 128},
    "sgx": _COMMON | {"enclaveLimit": 110, "provisionLimit": 110},
}  # fmt: skip


def sentence(chart: str, **values: object) -> str:
    """The message of the template that rejected the values."""
    (found,) = re.findall(r"execution error at \([^)]*\): (.*)", rejected(chart, **values))
    return found


@pytest.mark.parametrize("family", VALUES)
def test_an_original_values_file_names_no_image_of_this_release_and_is_rejected(family: str) -> None:
    expected = 'image.tag: found "" with hub "intel", which has no image of the version'
    assert sentence(PLUGINS[family], **VALUES[family]).startswith(expected)


@pytest.mark.parametrize("tag", ["0.31.1", "0.36.0"])
@pytest.mark.parametrize("family", VALUES)
def test_an_original_values_file_with_a_release_of_the_originals_renders_its_images(family: str, tag: str) -> None:
    pinned = {name: value | {"tag": tag} for name, value in VALUES[family].items() if name in ("image", "initImage")}
    (found,) = (each for each in template(PLUGINS[family], **VALUES[family] | pinned) if "Plugin" in each["kind"])
    assert found["spec"]["image"] == f"intel/intel-{family}-plugin:{tag}"
    assert found["spec"].get("initImage", f"intel/x:{tag}").startswith("intel/")
    assert found["spec"].get("initImage", f"intel/x:{tag}").endswith(f":{tag}")


def test_an_original_values_file_of_the_operator_is_rejected_or_runs_with_our_hub() -> None:
    expected = 'manager.image.hub: found "intel", a place of the Intel device plugins'
    assert sentence(OPERATOR, **OPERATOR_VALUES).startswith(expected)
    manager = OPERATOR_VALUES["manager"] | {"image": {"hub": "registry.example.com/tools", "tag": ""}}
    kinds = {each["kind"] for each in template(OPERATOR, **OPERATOR_VALUES | {"manager": manager})}
    assert "Deployment" in kinds


REJECTED = [
    (PLUGINS["gpu"], {"image": {"hub": PLACEHOLDER}}, f'image.hub: found the placeholder "{PLACEHOLDER}"'),
    (OPERATOR, {"manager": {"image": {"hub": PLACEHOLDER, "tag": "1.0.0"}}}, "manager.image.hub: found"),
    (PLUGINS["gpu"], {"image": {"hub": "docker.io/intel"}}, 'image.tag: found ""'),
    (PLUGINS["gpu"], {"image": {"hub": "mirror.example/intel", "tag": None}}, 'image.tag: found ""'),
    (PLUGINS["gpu"], {"image": {"hub": "intel", "tag": "1.0.0"}}, 'image.tag: found "1.0.0" with hub "intel"'),
    (PLUGINS["gpu"], {"image": {"hub": "intel", "tag": "0.26.0"}}, "expected 0.31.1 or newer"),
    (PLUGINS["gpu"], {"image": {"hub": "mirror.example/accelplane", "tag": "0.34.0"}}, 'image.tag: found "0.34.0"'),
    (PLUGINS["qat"], {"initImage": {"hub": "intel", "enable": True}}, 'initImage.tag: found ""'),
    (PLUGINS["gpu"], {"deployWithoutOperator": True}, "deployWithoutOperator: found true"),
    (OPERATOR, {"manager": {"image": {"hub": "mirror.example/tools", "tag": "0.34.0"}}}, "manager.image.tag: found"),
    ("accelplane", {"agent": {"image": {"hub": "intel"}}}, 'agent.image.hub: found "intel"'),
    ("accelplane", {"components": {"onload": True}, "onload": {"devicePluginImage": {"tag": "0.1.0"}}},
     'onload.devicePluginImage.tag: found "0.1.0"'),
]  # fmt: skip


@pytest.mark.parametrize(("chart", "values", "expected"), REJECTED, ids=[each[2] for each in REJECTED])
def test_images_that_cannot_run_are_rejected_in_one_sentence(chart: str, values: Object, expected: str) -> None:
    assert expected in sentence(chart, **values)


@pytest.mark.parametrize("chart", [OPERATOR, "accelplane", *PLUGINS.values()])
def test_a_chart_without_a_registry_is_rejected(chart: str) -> None:
    assert PLACEHOLDER in (CHARTS / chart / "values.yaml").read_text()
    assert "expected the registry with the images of Accelplane" in run_helm(
        "template", "release", CHARTS / chart, "--kube-version", KUBE_VERSION, status=1
    )


@pytest.mark.parametrize(
    "image",
    [
        {"hub": "mirror.example/intel", "tag": "1.0.0"},
        {"hub": "mirror.example/tools", "tag": "0.34.0"},
        {"hub": "intel", "tag": "devel"},
        {"hub": "intel", "digest": f"sha256:{'a' * 64}"},
    ],
)
def test_images_that_can_exist_are_rendered(image: Object) -> None:
    (found,) = template(PLUGINS["sgx"], nodeFeatureRule=False, image=image)
    assert found["spec"]["image"].startswith(f"{image['hub']}/intel-sgx-plugin:")


# Conventions of Helm


def test_templates_of_one_name_are_the_same_in_all_charts() -> None:
    # In a parent chart the template of the chart that Helm reads last is used for all.
    for name in ("_image.tpl", "_enabled.tpl", "_digests.tpl", "_resource.tpl"):
        files = [*CHARTS.glob(f"*/templates/{name}")]
        assert len(files) >= len(PLUGINS)
        assert len({file.read_text() for file in files}) == 1
    defined = {word for file in CHARTS.glob("*/templates/*") if file.is_file()
               for word in re.findall('define "([^"]+)"', file.read_text())}  # fmt: skip
    assert defined
    assert not [word for word in defined if not word.startswith("accelplane.")]


@pytest.mark.parametrize("chart", [OPERATOR, "accelplane", *PLUGINS.values()])
def test_values_of_parent_charts_are_valid_in_all_charts(chart: str) -> None:
    names = {"nameOverride": "", "fullnameOverride": None, "global": {"imageRegistry": "mirror.example"}}
    assert template(chart, enabled=True, **names) == template(chart)
    assert "enabled: found false for the chart" in sentence(chart, enabled=False)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"nameOverride": "mine"}, "mine"),
        ({"nameOverride": "mine", "fullnameOverride": "ours"}, "ours"),
        ({"name": "theirs", "fullnameOverride": ""}, "theirs"),
    ],
)
def test_overrides_of_the_name_are_the_name_of_the_custom_resource(values: Object, name: str) -> None:
    (found,) = template(PLUGINS["gpu"], nodeFeatureRule=False, **values)
    assert found["metadata"]["name"] == name


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A chart with the operator and two of its resources, each with a condition."""
    return parent_chart(tmp_path / "parent", OPERATOR, PLUGINS["gpu"], PLUGINS["qat"])


def test_a_parent_chart_selects_its_charts_by_conditions(parent: Path) -> None:
    values = {PLUGINS["gpu"]: {"enabled": False}, PLUGINS["qat"]: {"enabled": True}}
    kinds = {each["kind"] for each in template_of(parent, **values)}
    assert {"Deployment", "CustomResourceDefinition", "QatDevicePlugin"} <= kinds
    assert "GpuDevicePlugin" not in kinds
    assert not {"Deployment", "GpuDevicePlugin"} & {
        each["kind"] for each in template_of(parent, **values | {OPERATOR: {"enabled": False}})
    }


def test_helm_creates_resources_after_the_operator_of_the_same_parent_and_deletes_them_before(parent: Path) -> None:
    found = [each["metadata"] for each in template_of(parent) if each["kind"] == "GpuDevicePlugin"]
    annotations = [each["annotations"] for each in found]
    assert {each["helm.sh/hook"]: each["helm.sh/hook-delete-policy"] for each in annotations} == {
        "post-install,post-rollback": "before-hook-creation",
        "pre-delete": "before-hook-creation,hook-succeeded",
    }
    # The next release takes the object over.
    assert {each["meta.helm.sh/release-name"] for each in annotations} == {"release"}
    assert {each["meta.helm.sh/release-namespace"] for each in annotations} == {"default"}
    assert all(each["labels"] == {"app.kubernetes.io/managed-by": "Helm"} for each in found)


def test_a_resource_of_a_parent_belongs_to_the_release_once_its_kind_is_known(parent: Path) -> None:
    known = ("--api-versions=deviceplugin.intel.com/v1/GpuDevicePlugin",)
    (found,) = (each for each in template_of(parent, *known) if each["kind"] == "GpuDevicePlugin")
    assert found["metadata"] == {"name": "gpudeviceplugin-sample"}
