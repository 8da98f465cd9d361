"""The trees of GPU, NPU and NFD rules render to the objects of the Go project's; the images have its entry points.

The tables are those of the specification in its newest form. Images have our own vendor. The overlay with fractional
resources, which newer releases removed, has its own tests. `kubectl` renders; without it the tests are skipped.
"""

import json
import shutil
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import yaml
from manifests import (
    DEPLOY,
    REPOSITORY,
    SOCKETS,
    Object,
    Volumes,
    from_fields,
    host_paths,
    in_order,
    mounts,
    own_image,
    plugin_container,
    plugin_daemonset,
    render,
    resources,
    run_kubectl,
)

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


def with_arguments(arguments: list[str]) -> Object:
    return {"args": arguments} if arguments else {}


def expected_daemonset(directory: str) -> Object:
    family, arguments, label, more, sidecar = OVERLAYS[directory]
    name = f"intel-{family}-plugin"
    own = (GPU_VOLUMES if family == "gpu" else NPU_VOLUMES) | more
    plugin: Object = {
        **plugin_container(name, own, resources(("45Mi", "40m"), ("90Mi", "100m"))),
        "env": from_fields(**(GPU_ENVIRONMENT if family == "gpu" else NPU_ENVIRONMENT)),
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
                "image": own_image("intel-gpu-levelzero"),
                "imagePullPolicy": "IfNotPresent",
                "args": sidecar[0],
                "securityContext": {
                    "privileged": True,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "resources": resources(("50Mi", "25m"), ("100Mi", "50m")),
                "volumeMounts": [socket, *mounts(sidecar[1])],
            }
        )
    return plugin_daemonset(name, {"containers": containers, "volumes": volumes}, label=label)


@pytest.mark.parametrize("directory", OVERLAYS)
def test_a_tree_renders_only_its_daemonset(directory: str) -> None:
    assert in_order(render(DEPLOY / directory)) == [in_order(expected_daemonset(directory))]


@pytest.mark.parametrize("directory", ["gpu_plugin/overlays/nfd_labeled_nodes", "npu_plugin"])
def test_the_directory_names_of_the_originals_resolve_to_the_same_trees(directory: str) -> None:
    assert render(REPOSITORY / "deployments" / directory) == render(DEPLOY / directory)


# Node feature rules: name -> (PCI classes, device ids, modules, labels, lines of the template). One of the modules must
# be present; with a plus between them, all. The names are those of loaded modules.

I_LABEL, G_LABEL = "intel.feature.node.kubernetes.io", "gpu.intel.com"
NPU_IDS = "7e4c 643e ad1d 7d1d b03e fd3e d71d"
QAT_IDS = "37c8 4940 4942 4944 4946 4948"
MAX_IDS = "0bda 0bd5 0bd9 0bdb 0bd7 0bd6 0bd0"
ARC_IDS = ARC.replace("0x", "").replace(",", " ")
COUNT = [f"{G_LABEL}/device.count=3"]
COUNTS = [("56a0", 2), ("56c1", 1)]
RULES: dict[str, dict[str, tuple[str, str, str, dict[str, str], list[str]]]] = {
    "intel-dp-devices": {
        "intel.dlb": ("0b40", "2710", "dlb2", {f"{I_LABEL}/dlb": "true"}, []),
        "intel.dsa": ("0880", "0b25 11fb 1212", "idxd", {f"{I_LABEL}/dsa": "true"}, []),
        "intel.fpga-arria10": ("1200", "09c4", "dfl_pci intel_fpga_pci", {f"{I_LABEL}/fpga-arria10": "true"}, []),
        "intel.gpu": ("0300 0380", "", "i915 xe", {f"{I_LABEL}/gpu": "true"}, []),
        "intel.iaa": ("0880", "0cfe 1216", "idxd", {f"{I_LABEL}/iaa": "true"}, []),
        "intel.qat": ("0b40", QAT_IDS, "intel_qat+vfio_pci", {f"{I_LABEL}/qat": "true"}, []),
        "intel.npu": ("1200", NPU_IDS, "intel_vpu", {f"{I_LABEL}/npu": "true"}, []),
    },
    "intel-gpu-platform-labeling": {
        "intel.gpu.generic.deviceid": (
            "0300 0380", "", "", {},
            [f"{G_LABEL}/device-id.{each}.present=true" for each in ("0300-56a0", "0380-56c1", "0300-56a0")],
        ),
        "intel.gpu.generic.count.300": (
            "0300", "", "", {}, [f"{G_LABEL}/device-id.0300-{model}.count={count}" for model, count in COUNTS],
        ),
        "intel.gpu.generic.count.380": (
            "0380", "", "", {}, [f"{G_LABEL}/device-id.0380-{model}.count={count}" for model, count in COUNTS],
        ),
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
# Rules without PCI devices and modules.
OTHER_RULES: dict[str, list[Object]] = {
    "intel-dp-devices": [
        {
            "name": "intel.sgx",
            "labels": {f"{I_LABEL}/sgx": "true"},
            "extendedResources": {"sgx.intel.com/epc": "@cpu.security.sgx.epc"},
            "matchFeatures": [
                {"feature": "cpu.cpuid", "matchExpressions": {"SGX": {"op": "Exists"}, "SGXLC": {"op": "Exists"}}},
                {"feature": "cpu.security", "matchExpressions": {"sgx.enabled": {"op": "IsTrue"}}},
                {"feature": "kernel.config", "matchExpressions": {"X86_SGX": {"op": "Exists"}}},
            ],
        }
    ],
    "intel-gpu-platform-labeling": [
        {
            "name": "intel.gpu.fractionalresources",
            "extendedResources": {
                f"{G_LABEL}/{name}": f"@local.label.{G_LABEL}/{name}" for name in ("millicores", "memory.max", "tiles")
            },
            "matchFeatures": [
                {
                    "feature": "local.label",
                    "matchExpressions": {
                        f"{G_LABEL}/{name}": {"op": "Exists"} for name in ("millicores", "memory.max", "tiles")
                    },
                }
            ],
        }
    ],
}
# The matched devices in the context of a rule's template.
MATCHED = [{"class": card[:4], "device": card[5:]} for card in ("0300-56a0", "0380-56c1", "0300-56a0")]
# Built-in modules have the names of their files. These differ from the names of loaded modules.
FILES = {"dfl_pci": "dfl-pci", "intel_fpga_pci": "intel-fpga-pci", "vfio_pci": "vfio-pci"}


def expected_rule(name: str, classes: str, ids: str, modules: str, labels: dict[str, str]) -> Object:
    expressions = {"vendor": {"op": "In", "value": ["8086"]}, "class": {"op": "In", "value": classes.split()}}
    if ids:
        expressions["device"] = {"op": "In", "value": ids.split()}
    rule: Object = {"name": name, "matchFeatures": [{"feature": "pci.device", "matchExpressions": expressions}]}
    if labels:
        rule["labels"] = labels
    if modules:
        rule["matchAny"] = [each for wanted in modules.split() for each in alternatives(wanted.split("+"))]
    return rule


def alternatives(names: list[str]) -> list[Object]:
    """All combinations of loaded and built-in modules."""
    found: list[Object] = []
    for states in product(("loaded", "enabled"), repeat=len(names)):
        features: dict[str, Object] = {}
        for state, module in zip(states, names, strict=True):
            name = module if state == "loaded" else FILES.get(module, module)
            features.setdefault(f"kernel.{state}module", {})[name] = {"op": "Exists"}
        terms = [{"feature": feature, "matchExpressions": each} for feature, each in features.items()]
        found.append({"matchFeatures": terms})
    return found


@pytest.mark.parametrize(
    ("directory", "group", "namespace"),
    [
        ("node-feature-rules", "nfd.k8s-sigs.io", None),
        ("node-feature-rules-openshift", "nfd.openshift.io", "openshift-nfd"),
    ],
)
def test_the_node_feature_rules_are_those_of_the_tables(directory: str, group: str, namespace: str | None) -> None:
    rendered = {each["metadata"]["name"]: each for each in render(DEPLOY / "nfd/overlays" / directory)}
    assert set(rendered) == set(RULES)
    for name, rules in RULES.items():
        assert rendered[name]["apiVersion"] == f"{group}/v1alpha1"
        assert rendered[name]["kind"] == "NodeFeatureRule"
        assert rendered[name]["metadata"].get("namespace") == namespace
        written = {rule["name"]: rule for rule in rendered[name]["spec"]["rules"]}
        assert len(written) == len(rendered[name]["spec"]["rules"])
        others = [written.pop(rule["name"]) for rule in OTHER_RULES[name]]
        assert others == OTHER_RULES[name]
        assert list(written) == list(rules)
        for rule, (classes, ids, modules, labels, template) in zip(written.values(), rules.values(), strict=True):
            assert list(dict.fromkeys(expand(rule.pop("labelsTemplate", "")))) == list(dict.fromkeys(template))
            assert rule == expected_rule(rule["name"], classes, ids, modules, labels)


@cache
def expand(template: str) -> list[str]:
    """The lines of a Go template. kubectl expands it."""
    if not template:
        return []
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "pci": {"device": MATCHED}}
    words = ["label", "--local", "--filename=-", "x=y", f"--output=go-template={template}"]
    return [line.strip() for line in run_kubectl(*words, text=json.dumps(document)).splitlines() if line.strip()]


def test_the_nfd_worker_gets_our_configuration(tmp_path: Path) -> None:
    """A stand-in replaces NFD's own tree, which is in another repository."""
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


XPU_MANAGER: Object = {
    "containers": [
        {"name": "xpumd", "image": "intel/xpumanager"},
        {
            "name": "python-exporter",
            "image": "intel/xpumanager",
            "command": ["gunicorn", "--bind", "0.0.0.0:29999", "xpum_rest_main:main()"],
            "startupProbe": {"httpGet": {"path": "/metrics", "port": "metrics"}, "failureThreshold": 10},
            "livenessProbe": {"httpGet": {"path": "/healtz", "port": "metrics"}},
            "volumeMounts": [{"name": "sockdir", "mountPath": "/tmp"}],
        },
    ],
    "volumes": [{"name": "sockdir", "emptyDir": {}}],
}


def xpu_manager(overlay: str, directory: Path) -> dict[str, Object]:
    """The DaemonSet of an overlay by its kind, and the other objects by name. A stand-in replaces XPU Manager."""
    tree = directory / "xpumanager_sidecar"
    shutil.copytree(DEPLOY / "xpumanager_sidecar", tree)
    own = tree / "base/kustomization.yaml"
    document = yaml.safe_load(own.read_text())
    (remote,) = document["resources"]
    assert remote.endswith("/intel/xpumanager/deployment/kubernetes/daemonset/base?ref=V1.2.38")
    own.write_text(yaml.safe_dump(document | {"resources": ["daemonset.json"]}))
    labels = {"app": "intel-xpumanager"}
    template = {"metadata": {"labels": labels}, "spec": XPU_MANAGER}
    daemonset = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "intel-xpumanager", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }
    (tree / "base/daemonset.json").write_text(json.dumps(daemonset))
    objects = render(tree / "overlays" / overlay)
    assert {each["metadata"]["namespace"] for each in objects} == {"monitoring"}
    found = {each["kind"] if each["kind"] == "DaemonSet" else each["metadata"]["name"]: each for each in objects}
    assert len(found) == len(objects)
    return found


def sidecar(*arguments: str, more: list[Object]) -> Object:
    return {
        "name": "xelink-sidecar",
        "image": own_image("intel-xpumanager-sidecar"),
        "imagePullPolicy": "IfNotPresent",
        "args": ["-v=2", *arguments],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsUser": 0,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [*more, {"name": "features-d", "mountPath": FEATURES}],
    }


FEATURES = "/etc/kubernetes/node-feature-discovery/features.d/"
FEATURES_VOLUME: Object = {"name": "features-d", "hostPath": {"path": FEATURES, "type": "DirectoryOrCreate"}}


def test_the_xe_link_sidecar_runs_beside_xpu_manager(tmp_path: Path) -> None:
    found = xpu_manager("http", tmp_path)
    assert set(found) == {"DaemonSet"}
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    assert in_order(pod["containers"]) == in_order([*XPU_MANAGER["containers"], sidecar(more=[])])
    assert in_order(pod["volumes"]) == in_order([*XPU_MANAGER["volumes"], FEATURES_VOLUME])


def test_with_cert_manager_the_metrics_of_xpu_manager_are_encrypted(tmp_path: Path) -> None:
    found = xpu_manager("cert-manager", tmp_path)
    specs = {name: each["spec"] for name, each in found.items() if each["apiVersion"] == "cert-manager.io/v1"}
    assert specs == {
        "selfsigned-issuer": {"selfSigned": {}},
        "ca-cert": {
            "commonName": "xpum-ca",
            "duration": "87600h",
            "isCA": True,
            "issuerRef": {"kind": "Issuer", "name": "selfsigned-issuer"},
            "privateKey": {"algorithm": "ECDSA", "rotationPolicy": "Never", "size": 256},
            "secretName": "xpum-ca-cert",
        },
        "ca-issuer": {"ca": {"secretName": "xpum-ca-cert"}},
        "serving-cert": {
            "ipAddresses": ["127.0.0.1"],
            "issuerRef": {"kind": "Issuer", "name": "ca-issuer"},
            "privateKey": {"rotationPolicy": "Always"},
            "secretName": "xpum-server-cert",
        },
    }
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    xpumd, exporter = XPU_MANAGER["containers"]
    mount = {"name": "xpum-cert", "mountPath": "/cert", "readOnly": True}
    containers = {each["name"]: each for each in pod["containers"]}
    assert containers["xpumd"] == xpumd
    assert in_order(containers["xelink-sidecar"]) == in_order(sidecar("--cert=/cert/ca.crt", more=[mount]))
    command = containers["python-exporter"].pop("command")
    assert {"--keyfile=/cert/tls.key", "--certfile=/cert/tls.crt"} < {*command}
    assert command[:3] == exporter["command"][:3]
    assert command[-1] == exporter["command"][-1]
    assert in_order(containers["python-exporter"]) == in_order(
        {
            **{key: value for key, value in exporter.items() if key != "command"},
            **{
                probe: exporter[probe] | {"httpGet": exporter[probe]["httpGet"] | {"scheme": "HTTPS"}}
                for probe in ("startupProbe", "livenessProbe")
            },
            "volumeMounts": [mount, *exporter["volumeMounts"]],
        }
    )
    secret = {"name": "xpum-cert", "secret": {"secretName": "xpum-server-cert"}}
    assert in_order(pod["volumes"]) == in_order([*XPU_MANAGER["volumes"], FEATURES_VOLUME, secret])


@pytest.mark.parametrize("tree", ["gpu_pytorch_demo", "gpu_tensorflow_test"])
def test_a_training_demo_finds_its_code(tree: str) -> None:
    objects = {each["kind"]: each for each in render(DEPLOY / tree)}
    pod, code = objects["Pod"], objects["ConfigMap"]
    assert pod["metadata"]["name"] == "training-pod"
    (container,) = pod["spec"]["containers"]
    assert container["name"] == "testcontainer"
    assert container["resources"] == {"limits": {"gpu.intel.com/i915": 1}}
    assert container["volumeMounts"] == [{"name": "code", "mountPath": "/code"}]
    assert pod["spec"]["volumes"] == [{"name": "code", "configMap": {"name": code["metadata"]["name"]}}]
    assert code["metadata"]["name"].startswith("training-code-")
    script = container["command"][-1].removeprefix("/code/")
    compile(code["data"][script], script, "exec")
