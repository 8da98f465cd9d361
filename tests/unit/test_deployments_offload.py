"""The trees of QAT, DSA, IAA, DLB and SGX render to the objects of the Go project's trees.

The tables are those of the specification. Where releases differ, the trees have the form of the newest, and keep parts
that it has removed: the AppArmor annotation for QAT and the NFD hook for SGX. `kubectl` renders.
"""

import json
import re

import msgspec
import pytest
import yaml
from manifests import (
    APPARMOR,
    DEPLOY,
    SOCKETS,
    UNCONFINED,
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
)

NODE_NAME = from_fields(NODE_NAME="spec.nodeName")


class Base(msgspec.Struct, frozen=True):
    """The DaemonSet fields of a family: volumes besides that of the sockets, memory and CPU, and further fields."""

    volumes: Volumes
    requests: tuple[str, str]
    limits: tuple[str, str]
    container: Object
    selinux: bool = True


BASES = {
    "qat": Base(
        {
            "devdir": ("/dev/vfio", "ro", ""),
            "debugfsdir": ("/sys/kernel/debug", "ro", ""),
            "pcidir": ("/sys/bus/pci", "rw", ""),
        },
        ("15Mi", "70m"), ("30Mi", "140m"), {"env": NODE_NAME},
    ),
    "dsa": Base(
        {
            "devfs": ("/dev/dsa", "ro", ""),
            "chardevs": ("/dev/char", "ro", ""),
            "sysfs": ("/sys/bus/dsa", "ro", ""),
        },
        ("25Mi", "50m"), ("50Mi", "100m"), {"env": NODE_NAME},
    ),
    "iaa": Base(
        {
            "devfs": ("/dev/iax", "ro", ""),
            "chardevs": ("/dev/char", "ro", ""),
            "sysfs": ("/sys/bus/dsa/devices", "ro", ""),
        },
        ("25Mi", "60m"), ("50Mi", "120m"), {"env": NODE_NAME},
    ),
    "dlb": Base(
        {"devfs": ("/dev", "ro", ""), "sysfs": ("/sys/class/dlb2", "ro", "")},
        ("15Mi", "40m"), ("30Mi", "100m"), {"env": NODE_NAME, "terminationMessagePath": "/tmp/termination-log"},
        selinux=False,
    ),
    "sgx": Base(
        {
            "sgx-enclave": ("/dev/sgx_enclave", "ro", "CharDevice"),
            "sgx-provision": ("/dev/sgx_provision", "ro", "CharDevice"),
            "cdipath": ("/var/run/cdi", "rw", "DirectoryOrCreate"),
        },
        ("15Mi", "40m"), ("30Mi", "100m"), {},
    ),
}  # fmt: skip


class Overlay(msgspec.Struct, frozen=True):
    """The additions of an overlay to the DaemonSet of its family."""

    family: str
    arguments: list[str] = []
    suffix: str = ""
    volumes: Volumes = {}
    init: Object = {}
    init_volumes: Volumes = {}
    # Name -> (path in the container, volume).
    other_volumes: dict[str, tuple[str, Object]] = {}


def config_map(name: str, **more: object) -> Object:
    return {"configMap": {"name": name, **more}}


SCRATCH = {"scratch": ("/idxd-init/scratch", {"emptyDir": {}})}
DSA_SYSFS: Volumes = {
    "sys-bus-dsa": ("/sys/bus/dsa", "rw", ""),
    "sys-bus-pci": ("/sys/bus/pci", "rw", ""),
    "sys-devices": ("/sys/devices", "rw", ""),
}
IAA_SYSFS = {name: volume for name, volume in DSA_SYSFS.items() if name != "sys-bus-pci"}
PRIVILEGED = {"privileged": True, "readOnlyRootFilesystem": True}
IDXD_SECURITY = {**PRIVILEGED, "seLinuxOptions": {"type": "container_device_plugin_init_t"}}
CONFINED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
IDXD_IMAGE = own_image("intel-idxd-config-initcontainer")
QAT_INIT = {
    "init": {
        "name": "intel-qat-initcontainer",
        "image": own_image("intel-qat-initcontainer"),
        "env": NODE_NAME,
        "securityContext": PRIVILEGED,
    },
    "init_volumes": {"sysfs": ("/sys", "rw", "")},
    "other_volumes": {"qat-config": ("/qat-init/conf", config_map("qat-config", optional=True, defaultMode=0o440))},
}
NFD = "/etc/kubernetes/node-feature-discovery"

OVERLAYS = {
    **{f"{family}_plugin/base": Overlay(family) for family in BASES},
    **{f"{family}_plugin": Overlay(family) for family in BASES if family != "sgx"},
    "qat_plugin/overlays/debug": Overlay("qat", ["-v=4"], "-debug"),
    "qat_plugin/overlays/qat_initcontainer": Overlay("qat", **QAT_INIT),
    "qat_plugin/overlays/e2e": Overlay("qat", ["-v=4"], "-e2e", **QAT_INIT),
    "dsa_plugin/overlays/dsa_initcontainer": Overlay(
        "dsa",
        init={
            "name": "intel-idxd-config-initcontainer",
            "image": IDXD_IMAGE,
            "env": NODE_NAME,
            "securityContext": IDXD_SECURITY,
        },
        init_volumes=DSA_SYSFS,
        other_volumes={
            "intel-dsa-config-volume": ("/idxd-init/conf", config_map("intel-dsa-config")),
            **SCRATCH,
        },
    ),
    "dsa_plugin/overlays/dsa_vfio_initcontainer": Overlay(
        "dsa",
        ["-driver=vfio-pci"],
        volumes={"devfs-vfio": ("/dev/vfio", "rw", "")},
        init={
            "name": "intel-idxd-config-initcontainer",
            "image": IDXD_IMAGE,
            "env": [*NODE_NAME, {"name": "DSA_DRIVER", "value": "vfio-pci"}],
            "securityContext": IDXD_SECURITY,
        },
        init_volumes=DSA_SYSFS,
        other_volumes=SCRATCH,
    ),
    "iaa_plugin/overlays/iaa_initcontainer": Overlay(
        "iaa",
        init={
            "name": "intel-iaa-initcontainer",
            "image": IDXD_IMAGE,
            "env": [*NODE_NAME, {"name": "DEVICE_TYPE", "value": "iaa"}],
            "securityContext": IDXD_SECURITY,
        },
        init_volumes=IAA_SYSFS,
        other_volumes={
            "intel-iaa-config-volume": ("/idxd-init/conf", config_map("intel-iaa-config")),
            **SCRATCH,
        },
    ),
    "dlb_plugin/overlays/dlb_initcontainer": Overlay(
        "dlb",
        init={
            "name": "intel-dlb-initcontainer",
            "image": own_image("intel-dlb-initcontainer"),
            "securityContext": PRIVILEGED,
        },
        init_volumes={
            "sysfs-driver-dlb2": ("/sys/bus/pci/drivers/dlb2", "rw", ""),
            "sysfs-devices": ("/sys/devices", "rw", ""),
        },
    ),
    "sgx_plugin/overlays/epc-hook-initcontainer": Overlay(
        "sgx",
        init={
            "name": "intel-sgx-initcontainer",
            "image": own_image("intel-sgx-initcontainer"),
            "securityContext": CONFINED,
        },
        init_volumes={
            "nfd-features": (f"{NFD}/source.d/", "rw", "DirectoryOrCreate"),
            "nfd-feature-files": (f"{NFD}/features.d/", "rw", "DirectoryOrCreate"),
        },
    ),
}
OTHERS = {
    "sgx_plugin/overlays/epc-register",
    "qat_dpdk_app", "qat_dpdk_app/crypto-perf", "qat_dpdk_app/compress-perf",
    "sgx_aesmd", "sgx_aesmd/base",
    "sgx_enclave_apps", "sgx_enclave_apps/base",
    "sgx_enclave_apps/overlays/sgx_ecdsa_aesmd_quote", "sgx_enclave_apps/overlays/sgx_ecdsa_inproc_quote",
}  # fmt: skip
TESTED_ELSEWHERE = (
    "accelplane_", "components", "dra", "fleet", "fpga_", "generic_", "gpu_", "labels", "monitoring", "npu_", "nfd",
    "onload", "operator", "sgx_admissionwebhook", "sgx_plugin/overlays/epc-nfd", "xpumanager_",
)  # fmt: skip


def expected_daemonset(overlay: Overlay) -> Object:
    base, name = BASES[overlay.family], f"intel-{overlay.family}-plugin"
    volumes = base.volumes | SOCKETS | overlay.volumes
    container = {
        **plugin_container(name, volumes, resources(base.requests, base.limits), selinux=base.selinux),
        **base.container,
        **({"args": overlay.arguments} if overlay.arguments else {}),
    }
    others = [{"name": each, **volume} for each, (_, volume) in overlay.other_volumes.items()]
    pod: Object = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [*host_paths(volumes | overlay.init_volumes), *others],
    }
    if overlay.init:
        paths = [{"name": each, "mountPath": path} for each, (path, _) in overlay.other_volumes.items()]
        pod["initContainers"] = [{**overlay.init, "volumeMounts": [*mounts(overlay.init_volumes), *paths]}]
    expected = plugin_daemonset(name, pod)
    expected["metadata"]["name"] += overlay.suffix
    if overlay.family == "qat":
        container["securityContext"]["appArmorProfile"] = UNCONFINED
        annotations = {f"{APPARMOR}{name}": "unconfined"}
        expected["metadata"]["annotations"] = expected["spec"]["template"]["metadata"]["annotations"] = annotations
    return expected


@pytest.mark.parametrize("directory", OVERLAYS)
def test_a_tree_renders_only_its_daemonset(directory: str) -> None:
    assert in_order(render(DEPLOY / directory)) == [in_order(expected_daemonset(OVERLAYS[directory]))]


def test_every_kustomization_is_in_a_table() -> None:
    existing = {str(file.parent.relative_to(DEPLOY)) for file in DEPLOY.rglob("kustomization.yaml")}
    tested = {each for each in existing if each.startswith(TESTED_ELSEWHERE) or "/overlays/dra" in each}
    assert existing - tested == {*OVERLAYS, *OTHERS}


def test_sgx_has_no_kustomization_of_the_whole_family() -> None:
    assert not (DEPLOY / "sgx_plugin/kustomization.yaml").exists()


def test_the_manifest_for_qat_kernel_mode_is_beside_the_base() -> None:
    (daemonset,) = yaml.safe_load_all((DEPLOY / "qat_plugin/base/intel-qat-kernel-plugin.yaml").read_text())
    volumes: Volumes = {"devfs": ("/dev", "rw", ""), "etcdir": ("/etc", "ro", ""), **SOCKETS}
    container = {
        "name": "intel-qat-kernel-plugin",
        "image": own_image("intel-qat-plugin"),
        "imagePullPolicy": "IfNotPresent",
        "args": ["-mode", "kernel"],
        "securityContext": PRIVILEGED,
        "terminationMessagePath": "/tmp/termination-log",
        "volumeMounts": mounts(volumes),
    }
    pod = {"automountServiceAccountToken": False, "containers": [container], "volumes": host_paths(volumes)}
    assert daemonset == plugin_daemonset("intel-qat-kernel-plugin", pod)


# Examples of the ConfigMaps that the overlays of DSA and IAA require.


def idxd_profile(device: str, groups: Object, queue: Object) -> list[Object]:
    letter = device[:3]
    return [
        {
            "dev": f"{letter}X",
            **({"read_buffer_limit": 0} if letter == "dsa" else {}),
            "groups": [
                {
                    "dev": f"groupX.{number}",
                    **groups,
                    "grouped_workqueues": [
                        {"dev": f"wqX.{number}", "group_id": number, **queue, "name": f"{queue['name']}X{number}"}
                    ],
                    "grouped_engines": [{"dev": f"engineX.{number}", "group_id": number}],
                }
                for number in range(4)
            ],
        }
    ]


DSA_GROUP = {"read_buffers_reserved": 0, "use_read_buffer_limit": 0, "read_buffers_allowed": 8}
DSA_QUEUE = {
    "mode": "dedicated", "size": 16, "priority": 10, "block_on_fault": 1, "type": "user", "name": "app",
    "threshold": 15,
}  # fmt: skip
IAA_QUEUE = {
    "mode": "dedicated", "size": 16, "priority": 10, "max_transfer_size": 4194304, "type": "user", "name": "iax",
    "driver_name": "user",
}  # fmt: skip
PROFILES = {
    "dsa": {
        "dsa.conf": idxd_profile("dsa", DSA_GROUP, DSA_QUEUE),
        "dsa-node1.conf": idxd_profile("dsa", DSA_GROUP, {**DSA_QUEUE, "mode": "shared", "driver_name": "user"}),
    },
    "iaa": {"iaa.conf": idxd_profile("iax", {}, IAA_QUEUE), "iaa-node1.conf": idxd_profile("iax", {}, IAA_QUEUE)},
}


@pytest.mark.parametrize("family", PROFILES)
def test_an_example_configuration_is_beside_an_overlay(family: str) -> None:
    directory = DEPLOY / f"{family}_plugin/overlays/{family}_initcontainer"
    example = yaml.safe_load((directory / f"{family}-config.yaml").read_text())
    assert (example["apiVersion"], example["kind"]) == ("v1", "ConfigMap")
    assert example["metadata"] == {"name": f"intel-{family}-config", "namespace": "inteldeviceplugins-system"}
    assert {name: json.loads(text) for name, text in example["data"].items()} == PROFILES[family]
    # The member that selects an object comes first.
    for text in example["data"].values():
        assert all(opened.startswith('"dev"') for opened in re.findall(r"\{\s*(\S+)", text))


# SGX without NFD.


def test_the_daemonset_that_registers_epc_does_not_depend_on_its_own_label() -> None:
    found = {
        (each["kind"], each["metadata"]["name"]): each for each in render(DEPLOY / "sgx_plugin/overlays/epc-register")
    }
    plugin = expected_daemonset(Overlay("sgx"))
    plugin["metadata"]["namespace"] = "kube-system"
    plugin["spec"]["template"]["spec"]["nodeSelector"]["sgx.intel.com/capable"] = "true"
    assert in_order(found.pop(("DaemonSet", "intel-sgx-plugin"))) == in_order(plugin)
    labels = {"app": "sgx-node-init"}
    container = {
        "name": "sgx-node-init",
        "image": own_image("intel-sgx-initcontainer"),
        "command": ["/usr/local/bin/sgx-sw/intel-sgx-epchook", "-register", "-node-label", "-daemon"],
        "env": NODE_NAME,
        "securityContext": CONFINED,
        "resources": resources(("30Mi", "10m"), ("60Mi", "100m")),
    }
    pod = {
        "serviceAccountName": "sgx-plugin",
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container],
    }
    assert found.pop(("DaemonSet", "sgx-node-init")) == {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "sgx-node-init", "labels": labels, "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}},
    }
    rules = [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "watch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    ]
    account = {"kind": "ServiceAccount", "name": "sgx-plugin", "namespace": "kube-system"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "sgx-plugin"}
    assert found.pop(("ServiceAccount", "sgx-plugin"))["metadata"]["namespace"] == "kube-system"
    assert found.pop(("ClusterRole", "sgx-plugin"))["rules"] == rules
    binding = found.pop(("ClusterRoleBinding", "sgx-plugin"))
    assert (binding["roleRef"], binding["subjects"]) == (role, [account])
    assert {kind for kind, _ in found} == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
