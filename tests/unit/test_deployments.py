"""The kustomize trees render to the objects that users of the Go plugins have, field by field.

The tables are the specification's, in its newest form, but for the image: the organisation is ours, and overlays for
what newer releases removed (fractional resources) are not there. `kubectl` renders; without one the tests are skipped.
"""

import json
import os
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.build import assets
from cluster.product_image import image_configs

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
Object = dict[str, Any]

# The Level-Zero service is a program of its own issue; the manifests that need it are there for images of others.
BUILT_ELSEWHERE = {"accelplane/intel-gpu-levelzero:devel"}


@cache
def kubectl() -> str:
    found = assets().find("kubectl")
    if not found:
        pytest.skip("no kubectl to render kustomizations with: make kube, or put one in PATH")
    return str(found)


def run_kubectl(*words: str | Path, text: str = "") -> str:
    done = subprocess.run([kubectl(), *words], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(directory: Path) -> list[Object]:
    return list(yaml.safe_load_all(rendered_text(directory)))


@cache
def rendered_text(directory: Path) -> str:
    return run_kubectl("kustomize", directory)


def in_order(value: Any) -> Any:
    """With lists of named things in the order of their names, which no one depends on."""
    if isinstance(value, dict):
        return {key: in_order(each) for key, each in value.items()}
    if isinstance(value, list):
        ordered = [in_order(each) for each in value]
        named = all(isinstance(each, dict) and "name" in each for each in ordered)
        return sorted(ordered, key=lambda each: each["name"]) if named else ordered
    return value


# Pods: volume -> (path, mode or None for read-write, type). A mount is at the same path in the container.
Volumes = dict[str, tuple[str, str, str]]

SOCKETS: Volumes = {"kubeletsockets": ("/var/lib/kubelet/device-plugins", "rw", "")}
GPU_VOLUMES: Volumes = {
    "devfs": ("/dev/dri", "ro", ""),
    "sysfsdrm": ("/sys/class/drm", "ro", ""),
    "cdipath": ("/var/run/cdi", "rw", "DirectoryOrCreate"),
    **SOCKETS,
}
NPU_VOLUMES: Volumes = {
    "devfs": ("/dev/accel", "ro", ""),
    "sysfsaccel": ("/sys/class/accel", "ro", ""),
    **SOCKETS,
}
GPU_ENVIRONMENT = {"NODE_NAME": "spec.nodeName", "HOST_IP": "status.hostIP"}
NPU_ENVIRONMENT = {"NODE_NAME": "spec.nodeName"}
LEVELZERO_SOCKET = "levelzerosocket"

ARC = (
    "0x56a6,0x56a5,0x56a1,0x56a0,0x5694,0x5693,0x5692,0x5691,0x5690,0x56b3,0x56b2,0x56a4,0x56a3,0x5697,0x5696,0x5695,"
    "0x56b1,0x56b0,0x56a2,0x56ba,0x56bc,0x56bd,0x56bb"
)

# Directory: family, arguments, node label, further volumes of the plugin, the sidecar's (arguments, volumes) if any.
OVERLAYS: dict[str, tuple[str, list[str], str, Volumes, tuple[list[str], Volumes] | None]] = {
    "gpu_plugin": ("gpu", [], "", {}, None),
    "gpu_plugin/base": ("gpu", [], "", {}, None),
    "gpu_plugin/overlays/nfd_labeled_nodes": ("gpu", ["-enable-monitoring", "-v=2"], "gpu", {}, None),
    "gpu_plugin/overlays/monitoring_shared-dev_nfd": (
        "gpu", ["-shared-dev-num=30", "-enable-monitoring", "-v=2"], "gpu", {}, None,
    ),
    "gpu_plugin/overlays/levelzero": ("gpu", [], "", {}, (["-v=2"], {})),
    "gpu_plugin/overlays/health": ("gpu", ["-health-management"], "", {}, (["-v=2"], {})),
    "gpu_plugin/overlays/wsl": (
        "gpu", ["-wsl"], "", {"devdxg": ("/dev/dxg", "rw", "CharDevice")},
        (["-v=2", "-wsl"], {"wsllib": ("/usr/lib/wsl", "rw", "DirectoryOrCreate")}),
    ),
    "gpu_plugin/overlays/allowlist-arc": ("gpu", ["-v=4", f"-allow-ids={ARC}"], "", {}, None),
    "gpu_plugin/overlays/xpumd": (
        "gpu", ["-xpumd-endpoint=/run/xpumd/intelxpuinfo.sock", "-enable-monitoring"], "",
        {"xpumdsocket": ("/run/xpumd", "ro", "DirectoryOrCreate")}, None,
    ),
    "npu_plugin": ("npu", [], "", {}, None),
    "npu_plugin/base": ("npu", [], "", {}, None),
    "npu_plugin/overlays/nfd_labeled_nodes": ("npu", ["-v=4"], "npu", {}, None),
}  # fmt: skip


def mounts(volumes: Volumes) -> list[Object]:
    return [
        {"name": name, "mountPath": path} | ({"readOnly": True} if mode == "ro" else {})
        for name, (path, mode, _) in volumes.items()
    ]


def host_paths(volumes: Volumes) -> list[Object]:
    return [
        {"name": name, "hostPath": {"path": path} | ({"type": kind} if kind else {})}
        for name, (path, _, kind) in volumes.items()
    ]


def with_arguments(arguments: list[str]) -> Object:
    return {"args": arguments} if arguments else {}


def expected_daemonset(directory: str) -> Object:
    family, arguments, label, more, sidecar = OVERLAYS[directory]
    name = f"intel-{family}-plugin"
    own = (GPU_VOLUMES if family == "gpu" else NPU_VOLUMES) | more
    environment = GPU_ENVIRONMENT if family == "gpu" else NPU_ENVIRONMENT
    plugin: Object = {
        "name": name,
        "image": f"accelplane/{name}:devel",
        "imagePullPolicy": "IfNotPresent",
        "env": [
            {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}} for variable, path in environment.items()
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seLinuxOptions": {"type": "container_device_plugin_t"},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "resources": {"requests": {"memory": "45Mi", "cpu": "40m"}, "limits": {"memory": "90Mi", "cpu": "100m"}},
        "volumeMounts": mounts(own),
        **with_arguments(arguments),
    }
    containers, volumes = [plugin], host_paths(own)
    if sidecar:
        socket = {"name": LEVELZERO_SOCKET, "mountPath": "/var/lib/levelzero"}
        plugin["volumeMounts"].append(socket)
        volumes += [*host_paths(sidecar[1]), {"name": LEVELZERO_SOCKET, "emptyDir": {}}]
        containers.append(
            {
                "name": "intel-gpu-levelzero",
                "image": "accelplane/intel-gpu-levelzero:devel",
                "imagePullPolicy": "IfNotPresent",
                "args": sidecar[0],
                "securityContext": {
                    "privileged": True,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "resources": {
                    "requests": {"memory": "50Mi", "cpu": "25m"},
                    "limits": {"memory": "100Mi", "cpu": "50m"},
                },
                "volumeMounts": [socket, *mounts(sidecar[1])],
            }
        )
    selector = {"kubernetes.io/arch": "amd64"}
    if label:
        selector[f"intel.feature.node.kubernetes.io/{label}"] = "true"
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"nodeSelector": selector, "containers": containers, "volumes": volumes},
            },
        },
    }


@pytest.mark.parametrize("directory", OVERLAYS)
def test_a_tree_renders_to_its_daemonset_and_nothing_else(directory: str) -> None:
    assert in_order(render(DEPLOY / directory)) == [in_order(expected_daemonset(directory))]


def test_every_kustomization_is_in_a_table() -> None:
    there = {str(file.parent.relative_to(DEPLOY)) for file in DEPLOY.rglob("kustomization.yaml")}
    plugins = {directory for directory in there if directory.startswith(("gpu_plugin", "npu_plugin"))}
    assert plugins == set(OVERLAYS)
    assert there - plugins == {"nfd", "nfd/base", "nfd/overlays/node-feature-rules", "gpu_pytorch_demo"}


@pytest.mark.parametrize("directory", ["gpu_plugin/overlays/nfd_labeled_nodes", "npu_plugin"])
def test_the_folders_of_the_originals_lead_to_the_same(directory: str) -> None:
    assert render(REPOSITORY / "deployments" / directory) == render(DEPLOY / directory)


# Node feature rules: name -> (PCI classes, device ids, modules of which one is enough, labels, lines of the template)

I_LABEL, G_LABEL = "intel.feature.node.kubernetes.io", "gpu.intel.com"
NPU_IDS = "7e4c 643e ad1d 7d1d b03e fd3e d71d"
MAX_IDS = "0bda 0bd5 0bd9 0bdb 0bd7 0bd6 0bd0"
ARC_IDS = ARC.replace("0x", "").replace(",", " ")
COUNT = [f"{G_LABEL}/device.count=2"]
RULES: dict[str, dict[str, tuple[str, str, str, dict[str, str], list[str]]]] = {
    "intel-dp-devices": {
        "intel.gpu": ("0300 0380", "", "i915 xe", {f"{I_LABEL}/gpu": "true"}, []),
        "intel.npu": ("1200", NPU_IDS, "intel_vpu", {f"{I_LABEL}/npu": "true"}, []),
    },
    "intel-gpu-platform-labeling": {
        "intel.gpu.generic.deviceid": (
            "0300 0380", "", "", {},
            [f"{G_LABEL}/device-id.0300-56a0.present=true", f"{G_LABEL}/device-id.0380-56c1.present=true"],
        ),
        "intel.gpu.generic.count.300": ("0300", "", "", {}, [f"{G_LABEL}/device-id.0300-56a0.count=2"]),
        "intel.gpu.generic.count.380": ("0380", "", "", {}, [f"{G_LABEL}/device-id.0380-56a0.count=2"]),
        "intel.gpu.max.1100": ("0380", "0bda", "", {f"{G_LABEL}/product": "Max_1100"}, COUNT),
        "intel.gpu.max.1550": ("0380", "0bd5", "", {f"{G_LABEL}/product": "Max_1550"}, COUNT),
        "intel.gpu.max.series": ("0380", MAX_IDS, "", {f"{G_LABEL}/family": "Max_Series"}, []),
        "intel.gpu.flex.170": (
            "0380", "56c0", "", {f"{G_LABEL}/family": "Flex_Series", f"{G_LABEL}/product": "Flex_170"}, COUNT,
        ),
        "intel.gpu.flex.140": (
            "0380", "56c1", "", {f"{G_LABEL}/family": "Flex_Series", f"{G_LABEL}/product": "Flex_140"}, COUNT,
        ),
        "intel.gpu.a.series": ("0300", ARC_IDS, "", {f"{G_LABEL}/family": "A_Series"}, []),
    },
}  # fmt: skip
# The devices that matched, as a rule's template sees them.
MATCHED = [{"class": "0300", "device": "56a0"}, {"class": "0380", "device": "56c1"}]


def expected_rule(name: str, classes: str, ids: str, modules: str, labels: dict[str, str]) -> Object:
    expressions = {"vendor": {"op": "In", "value": ["8086"]}, "class": {"op": "In", "value": classes.split()}}
    if ids:
        expressions["device"] = {"op": "In", "value": ids.split()}
    rule: Object = {"name": name, "matchFeatures": [{"feature": "pci.device", "matchExpressions": expressions}]}
    if labels:
        rule["labels"] = labels
    if modules:
        rule["matchAny"] = [
            {"matchFeatures": [{"feature": f"kernel.{state}module", "matchExpressions": {module: {"op": "Exists"}}}]}
            for module in modules.split()
            for state in ("loaded", "enabled")
        ]
    return rule


def test_the_node_feature_rules_are_those_of_the_table() -> None:
    rendered = {each["metadata"]["name"]: each for each in render(DEPLOY / "nfd/overlays/node-feature-rules")}
    assert set(rendered) == set(RULES)
    for name, rules in RULES.items():
        assert rendered[name]["apiVersion"] == "nfd.k8s-sigs.io/v1alpha1"
        assert rendered[name]["kind"] == "NodeFeatureRule"
        written = rendered[name]["spec"]["rules"]
        assert [rule["name"] for rule in written] == list(rules)
        for rule, (classes, ids, modules, labels, template) in zip(written, rules.values(), strict=True):
            assert expand(rule.pop("labelsTemplate", "")) == template
            assert rule == expected_rule(rule["name"], classes, ids, modules, labels)


def expand(template: str) -> list[str]:
    """The lines of a Go template, expanded by the genuine thing: kubectl prints an object through any."""
    if not template:
        return []
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "pci": {"device": MATCHED}}
    words = ["label", "--local", "--filename=-", "x=y", f"--output=go-template={template}"]
    return [line.strip() for line in run_kubectl(*words, text=json.dumps(document)).splitlines() if line.strip()]


def test_nfd_itself_gets_our_workers_configuration(tmp_path: Path) -> None:
    """With a stand-in for NFD's own tree, which lies elsewhere: same namespace, same name of the ConfigMap."""
    tree = tmp_path / "nfd"
    shutil.copytree(DEPLOY / "nfd", tree)
    own = tree / "base/kustomization.yaml"
    document = yaml.safe_load(own.read_text())
    (remote,) = document["resources"]
    assert remote.endswith("/node-feature-discovery/deployment/overlays/default?ref=v0.17.1")
    own.write_text(yaml.safe_dump(document | {"resources": ["stand-in"]}))
    (tree / "base/stand-in").mkdir()
    pod = {"volumes": [{"name": "conf", "configMap": {"name": "nfd-worker-conf"}}]}
    worker = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "nfd-worker"}, "spec": pod}
    generator = {"name": "nfd-worker-conf", "literals": ["nfd-worker.conf=their own"]}
    stand_in = {"namespace": "node-feature-discovery", "resources": ["pod.json"], "configMapGenerator": [generator]}
    (tree / "base/stand-in/pod.json").write_text(json.dumps(worker))
    (tree / "base/stand-in/kustomization.yaml").write_text(json.dumps(stand_in))

    objects = {each["kind"]: each for each in render(tree)}

    settings = objects["ConfigMap"]
    assert yaml.safe_load(settings["data"]["nfd-worker.conf"]) == {"core": {"labelSources": ["local"]}}
    assert settings["metadata"]["namespace"] == "node-feature-discovery"
    assert objects["Pod"]["spec"]["volumes"][0]["configMap"]["name"] == settings["metadata"]["name"]


# Demos: file -> kind, name, resource, image, further fields of the object's spec

DEMOS = {
    "intelgpu-job.yaml": ("intelgpu-demo-job", "gpu.intel.com/i915", "intel/intel-opencl-icd:devel", None),
    "intelgpu-job-wsl.yaml": ("intelgpu-demo-job", "gpu.intel.com/dxg", "intel/intel-opencl-icd:devel", None),
    "intel-npu-workload.yaml": ("npu-workload", "npu.intel.com/accel", "intel/intel-npu-demo:devel", 4),
}


@pytest.mark.parametrize("file", DEMOS)
def test_a_demo_asks_for_one_device(file: str) -> None:
    name, resource, image, backoff = DEMOS[file]
    job = yaml.safe_load((REPOSITORY / "demos" / file).read_text())
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("batch/v1", "Job", name)
    assert job["spec"].get("backoffLimit") == backoff
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == image
    assert container["resources"] == {"limits": {resource: 1}}


def test_the_training_demo_finds_its_code() -> None:
    objects = {each["kind"]: each for each in render(DEPLOY / "gpu_pytorch_demo")}
    pod, code = objects["Pod"], objects["ConfigMap"]
    assert pod["metadata"]["name"] == "training-pod"
    (container,) = pod["spec"]["containers"]
    assert container["name"] == "testcontainer"
    assert container["resources"] == {"limits": {"gpu.intel.com/i915": 1}}
    assert container["volumeMounts"] == [{"name": "code", "mountPath": "/code"}]
    assert pod["spec"]["volumes"] == [{"name": "code", "configMap": {"name": code["metadata"]["name"]}}]
    assert code["metadata"]["name"].startswith("training-code-")
    assert container["command"][-1].removeprefix("/code/") in code["data"]


# Images: name -> entry point

IMAGES = {
    "accelplane": "accelplane",
    "intel-gpu-plugin": "intel_gpu_device_plugin",
    "intel-npu-plugin": "intel_npu_device_plugin",
    "intel-gpu-fakedev": "intel_gpu_fakedev",
}


def test_every_image_has_its_entry_point_and_says_what_it_is() -> None:
    configs = image_configs()
    assert {name: config.entrypoint for name, config in configs.items()} == {
        f"accelplane/{name}:devel": [f"/usr/local/bin/{command}"] for name, command in IMAGES.items()
    }
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(IMAGES.values()) <= set(scripts)
    for name, config in configs.items():
        assert {"vendor", "version", "release", "name", "summary", "description"} <= set(config.labels)
        assert config.labels["name"] == name.removeprefix("accelplane/").removesuffix(":devel")
        assert not config.user


def test_manifests_name_images_that_are_built() -> None:
    used = {
        container["image"]
        for directory in OVERLAYS
        for each in render(DEPLOY / directory)
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    assert used - set(image_configs()) == BUILT_ELSEWHERE


def test_the_build_script_makes_every_image_with_the_builder_there_is(tmp_path: Path) -> None:
    builder = tmp_path / "podman"
    builder.write_text('#!/bin/sh\necho "$@"\n')
    builder.chmod(0o755)
    environment = os.environ | {"BUILDER": str(builder), "TAG": "v1.2.3", "ORG": "ours", "REG": "mirror/"}
    command = [DEPLOY / "images/build"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in IMAGES:
        assert any(f"--target {name} --build-arg TAG=1.2.3 --tag mirror/ours/{name}:1.2.3" in line for line in made)
    one = subprocess.run(
        [*command, "intel-npu-plugin", "--", "--pull"], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split()[0] for line in one] == ["build", "images"]
    assert one[0].endswith("--pull .")
