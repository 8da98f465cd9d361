"""Scripts and make targets of the Onload samples: machine configuration, image builds, deployment."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from manifests import kubectl, own_image
from onloaddeployments import PART_OF, TREE, environment

# MachineConfig, section 16

MACHINE_CONFIG = TREE / "scripts/machineconfig"
IMAGE = "registry:5000/onload-module:8.1.2.26-4.18.0"


def program(directory: Path, name: str, text: str) -> None:
    file = directory / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


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
