"""Recipes of the images: entry points, labels and the build script."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

from cluster.product_image import image_configs, recipe
from manifests import DEPLOY, REPOSITORY, own_image

import accelplane
from accelplane.operator.settings import PLACEHOLDER, Settings

# Images: name -> entry point

IMAGES = {
    "accelplane": "accelplane",
    "intel-gpu-plugin": "intel_gpu_device_plugin",
    "intel-npu-plugin": "intel_npu_device_plugin",
    "intel-gpu-fakedev": "intel_gpu_fakedev",
    "intel-gpu-levelzero": "intel_gpu_levelzero",
    "intel-xpumanager-sidecar": "intel_xpumanager_sidecar",
    "intel-qat-plugin": "intel_qat_device_plugin",
    "intel-dsa-plugin": "intel_dsa_device_plugin",
    "intel-iaa-plugin": "intel_iaa_device_plugin",
    "intel-dlb-plugin": "intel_dlb_device_plugin",
    "intel-sgx-plugin": "intel_sgx_device_plugin",
    "intel-fpga-plugin": "intel_fpga_device_plugin",
    "intel-generic-plugin": "generic-device-plugin",
    "onload-device-plugin": "onload-device-plugin",
    "intel-qat-initcontainer": "qat-init.sh",
    "intel-idxd-config-initcontainer": "idxd-init.sh",
    "intel-dlb-initcontainer": "dlb-init.sh",
    "intel-gpu-initcontainer": "gpu-init.sh",
    "intel-sgx-initcontainer": "sgx-init.sh",
    "intel-fpga-initcontainer": "accelplane-fpga-init",
    "intel-sgx-admissionwebhook": "intel_sgx_admissionwebhook",
    "intel-fpga-admissionwebhook": "intel_fpga_admissionwebhook",
    "intel-deviceplugin-operator": "intel_deviceplugin_operator",
    "onload-operator": "onload-operator",
    "accelplane-fleet": "accelplane",
}
# Commands that are not started by their own path.
ENTRY_POINTS = {"onload-operator": "/manager", "onload-device-plugin": "/usr/bin/onload-device-plugin"}
# Commands below that of the entry point.
SUBCOMMANDS = {"accelplane-fleet": ["fleet"]}
USERS = {
    "onload-operator": "1001",
    **dict.fromkeys(("intel-sgx-admissionwebhook", "intel-fpga-admissionwebhook"), "65532:65532"),
    **dict.fromkeys(("intel-deviceplugin-operator", "accelplane-fleet"), "65532:65532"),
}
# Init programs use relative paths.
WORKING_DIRECTORIES = {"intel-qat-initcontainer": "/qat-init", "intel-idxd-config-initcontainer": "/idxd-init"}


def test_every_image_has_its_entry_point_and_labels() -> None:
    configs = image_configs()
    assert {name: config.entrypoint for name, config in configs.items()} == {
        own_image(name): [ENTRY_POINTS.get(name, f"/usr/local/bin/{command}"), *SUBCOMMANDS.get(name, [])]
        for name, command in IMAGES.items()
    }
    for name, config in configs.items():
        assert {"vendor", "version", "release", "name", "summary", "description"} <= set(config.labels)
        assert config.labels["name"] == name.removeprefix(f"{PLACEHOLDER}/").removesuffix(f":{accelplane.__version__}")
        assert config.working_directory == WORKING_DIRECTORIES.get(config.labels["name"], "/")
        assert config.user == USERS.get(config.labels["name"], "")


def test_no_image_of_a_clone_is_in_a_registry_of_others() -> None:
    """All references of our images have the placeholder, or the host of an example."""
    names = "|".join(sorted(IMAGES, key=len, reverse=True))
    reference = re.compile(rf"([\w.:/-]*/|(?<![\w./-]))accelplane/(?:{names})(?=[:@\"'`\s])")
    hosts: dict[str, str] = {}
    for directory in ("deploy", "demo", "docs", "README.md"):
        found = REPOSITORY / directory
        for file in [found, *found.rglob("*")]:
            if file.suffix in (".yaml", ".md", ".json", "") and file.is_file() and "decisions" not in file.parts:
                hosts |= {each[1]: str(file) for each in reference.finditer(file.read_text())}
    expected = PLACEHOLDER.removesuffix("accelplane")
    assert expected in hosts
    assert {host: file for host, file in hosts.items() if host != expected and ".example" not in host} == {}


def test_the_builders_and_the_operator_name_the_registry_of_the_manifests() -> None:
    assert recipe("images").ORGANISATION == PLACEHOLDER
    assert f"REG-{PLACEHOLDER.removesuffix('accelplane')}" in (DEPLOY / "images/build").read_text()
    assert Settings().images.vendor == PLACEHOLDER


def test_every_entry_point_is_a_script_of_the_package() -> None:
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert {*IMAGES.values(), "intel-sgx-epchook", "intel-gpu-nfdhook"} - set(scripts) == set()


def test_the_build_script_builds_every_image_with_the_installed_builder(tmp_path: Path) -> None:
    builder = tmp_path / "podman"
    builder.write_text('#!/bin/sh\necho "$@"\n')
    builder.chmod(0o755)
    environment = os.environ | {"BUILDER": str(builder), "TAG": "v1.2.3", "ORG": "ours", "REG": "mirror/"}
    command = [DEPLOY / "images/build"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in IMAGES:
        assert any(f"--target {name} --build-arg TAG=1.2.3 --tag mirror/ours/{name}:1.2.3" in line for line in result)
    one = subprocess.run(
        [*command, "intel-npu-plugin", "--", "--pull"], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split()[0] for line in one] == ["build", "images"]
    assert one[0].endswith("--pull .")
