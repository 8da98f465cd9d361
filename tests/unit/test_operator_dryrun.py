"""The dry run: custom resources of a file, rendered without a cluster."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from customresources import SAMPLES, resource

from accelplane.cli.operator_render import main
from accelplane.operator import models
from accelplane.operator.dryrun import RenderError, render_text
from accelplane.operator.settings import PLACEHOLDER, RELEASE, ImagePolicy, Settings


def test_the_samples_are_rendered() -> None:
    text = "---\n".join(file.read_text() for file in sorted(SAMPLES.glob("*deviceplugin.yaml")))
    result = list(yaml.safe_load_all(render_text(text, Settings(namespace="here")).text))
    assert [each["metadata"]["name"] for each in result] == [
        f"intel-{family}-plugin-{family}deviceplugin-sample" for family in models.KINDS
    ]
    assert {each["metadata"]["namespace"] for each in result} == {"here"}


def test_items_of_lists_are_rendered_and_other_objects_ignored() -> None:
    items = [resource("npu"), {"apiVersion": "v1", "kind": "ConfigMap"}]
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": items})
    (instance,) = yaml.safe_load_all(render_text(text, Settings(images=ImagePolicy(target="1.2.0"))).text)
    (container,) = instance["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"{PLACEHOLDER}/intel-npu-plugin:1.2.0"


@pytest.mark.parametrize(
    ("document", "same"),
    [
        ({"spec": None}, {}),
        ({"spec": {"tolerations": None, "image": None}}, {}),
        (
            {"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": None}}},
            {"updateStrategy": {"type": "OnDelete"}},
        ),
    ],
)
def test_null_fields_are_unset(document: dict[str, Any], same: dict[str, Any]) -> None:
    found, expected = resource("gpu") | document, resource("gpu", **same)
    assert render_text(yaml.safe_dump(found), Settings()).text == render_text(yaml.safe_dump(expected), Settings()).text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found no custom resource"),
        ("kind: ConfigMap", "found no custom resource"),
        ("- 1", "found no custom resource"),
        ("a: [", "no YAML"),
        ("a: &a [1]\nb: [*a, *a]", "aliases"),
        ("? {a: 1}\n: 2", "no YAML"),
        (yaml.safe_dump(resource("gpu", sharedDevNum=0)), "mine: spec.sharedDevNum is 0, expected 1 or more"),
        (yaml.safe_dump(resource("gpu", sharedDevNum="3")), "spec.sharedDevNum is '3', expected an integer"),
        (yaml.safe_dump(resource("gpu", sharedDevNum=1.5)), "spec.sharedDevNum is 1.5, expected an integer"),
        (
            yaml.safe_dump(resource("gpu", sharedDevNumber=3)),
            "spec.sharedDevNumber is an unknown field, expected one of allowIDs",
        ),
        (
            yaml.safe_dump(resource("gpu", enableMonitoring="on")),
            "spec.enableMonitoring is 'on', expected true or false",
        ),
        (
            yaml.safe_dump(resource("gpu", preferredAllocationPolicy="best")),
            "spec.preferredAllocationPolicy is 'best', expected one of balanced, none, packed",
        ),
        (yaml.safe_dump(resource("gpu", tolerations={})), "spec.tolerations is {}, expected a list"),
        (
            yaml.safe_dump(resource("gpu", tolerations=[{"key": 1}])),
            'spec.tolerations[0].key is 1, expected a string; write "1"',
        ),
        (yaml.safe_dump(resource("gpu", imagePullSecrets=[{}])), "spec.imagePullSecrets[0].name is missing"),
        (
            yaml.safe_dump(resource("gpu", nodeSelector={"a": True})),
            'spec.nodeSelector.a is true, expected a string; write "true"',
        ),
        (yaml.safe_dump(resource("gpu", resources={"limits": {"cpu": 0.5}})), "spec.resources.limits.cpu is 0.5"),
        (yaml.safe_dump(resource("gpu") | {"spec": []}), "GpuDevicePlugin mine: spec is [], expected an object"),
        (yaml.safe_dump(resource("gpu") | {"metadata": {}}), "GpuDevicePlugin without a name: metadata.name is None"),
        (yaml.safe_dump(resource("gpu", "A/b")), "metadata.name is 'A/b', expected a name"),
        (
            yaml.safe_dump(resource("gpu") | {"apiVersion": "deviceplugin.intel.com/v2"}),
            "GpuDevicePlugin mine: apiVersion is 'deviceplugin.intel.com/v2', expected deviceplugin.intel.com/v1",
        ),
        (
            yaml.safe_dump(resource("gpu") | {"apiVersion": "deviceplugins.intel.com/v1"}),
            "GpuDevicePlugin mine: apiVersion is 'deviceplugins.intel.com/v1', expected deviceplugin.intel.com/v1",
        ),
        (
            yaml.safe_dump(resource("gpu") | {"kind": "GPUDevicePlugin"}),
            "GPUDevicePlugin mine: kind is 'GPUDevicePlugin', expected GpuDevicePlugin",
        ),
        (
            "apiVersion: deviceplugin.intel.com/v1\nmetadata: {name: mine}",
            "object mine: kind is None, expected one of Dlb",
        ),
        (yaml.safe_dump(resource("gpu", image="x:1")), f"set image to {PLACEHOLDER}/intel-gpu-plugin:{RELEASE}"),
        (
            yaml.safe_dump(resource("gpu") | {"kind": "TpuDevicePlugin"}),
            "TpuDevicePlugin mine: kind is 'TpuDevicePlugin', expected one of",
        ),
        ("#" * (1024 * 1024 + 1), "has 1048577 bytes, expected at most 1048576"),
    ],
)
def test_an_error_has_one_line_with_the_resource_and_what_is_expected(text: str, words: str) -> None:
    with pytest.raises(RenderError, match=re.escape(words)) as raised:
        render_text(text, Settings())
    assert "\n" not in str(raised.value)


def test_the_command_prints_the_daemonsets_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(SAMPLES / "deviceplugin_v1_sgxdeviceplugin.yaml")
    assert main(["--deviceplugin-namespace=here", file]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["metadata"]["namespace"] == "here"


def test_the_command_prints_warnings_of_admission_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.yaml"
    file.write_text(yaml.safe_dump(resource("gpu", image="intel/intel-gpu-plugin:0.31.1", allowIDs="0x56c0")))
    assert main([str(file)]) == 0
    result = capsys.readouterr()
    assert result.err == (
        f"{file}: warning: GpuDevicePlugin mine: allowIDs 0x56c0 needs image version 0.34.0 or newer, found "
        f"'intel/intel-gpu-plugin:0.31.1'; set image to {PLACEHOLDER}/intel-gpu-plugin:{RELEASE}\n"
    )
    assert yaml.safe_load(result.out)["kind"] == "DaemonSet"


def test_the_command_reports_errors_with_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(SAMPLES / "mappings-collection.yaml")
    assert main([file]) == 1
    assert (
        capsys.readouterr().err
        == f"{file}: found no custom resource, expected one with apiVersion deviceplugin.intel.com/v1\n"
    )
    assert main(["/nowhere"]) == 1
