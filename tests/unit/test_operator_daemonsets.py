"""The DaemonSet of a custom resource: skeletons of the manifests, other fields of the specification."""

from typing import Any

import pytest
import yaml
from customresources import plugin, sample
from hypothesis import given
from hypothesis import strategies as st
from manifests import (
    DEPLOY,
    Object,
    Volumes,
    from_fields,
    host_paths,
    in_order,
    mounts,
    own_image,
    plugin_container,
    plugin_daemonset,
    resources,
)

from accelplane.operator import models
from accelplane.operator.daemonsets import PROVISIONING_ANNOTATION, provisioning_hash, render, skeleton
from accelplane.operator.settings import ImagePolicy, Settings
from accelplane.plugins.qat.models import MODELS

SETTINGS = Settings(namespace="plugins")
REGISTRY, OTHER_REGISTRY = "registry-of-all", "registry-of-mine"
NFD = "/etc/kubernetes/node-feature-discovery"


def render_pod(family: str, *, settings: Settings = SETTINGS, provisioning: str = "", **more: Any) -> Object:
    return render(plugin(family, **more), settings, provisioning=provisioning).as_object()


def pod(family: str, **more: Any) -> Object:
    return render_pod(family, **more)["spec"]["template"]["spec"]


def arguments(family: str, **spec: Any) -> str:
    return " ".join(pod(family, **spec)["containers"][0]["args"])


# Skeletons


@pytest.mark.parametrize("family", sorted(set(models.KINDS) - {"fpga"}))
def test_a_skeleton_is_the_plain_manifest(family: str) -> None:
    name = f"intel-{family}-plugin"
    manifest = yaml.safe_load((DEPLOY / f"{family}_plugin" / "base" / f"{name}.yaml").read_text())
    for metadata in (manifest["metadata"], manifest["spec"]["template"]["metadata"]):
        # The AppArmor profile of the QAT manifest is never set by a resource.
        metadata.pop("annotations", None)
    for container in manifest["spec"]["template"]["spec"]["containers"]:
        container["securityContext"].pop("appArmorProfile", None)
        if family == "generic":
            container.pop("args")  # an example of devices
    assert skeleton(family, own_image(name)).as_object() == manifest


FPGA_VOLUMES: Volumes = {
    "devfs": ("/dev", "ro", ""),
    "sysfs": ("/sys/class", "ro", ""),
    "kubeletsockets": ("/var/lib/kubelet/device-plugins", "rw", ""),
    "cdidir": ("/var/run/cdi", "rw", "DirectoryOrCreate"),
    "fpga-records": ("/run/accelplane-fpga", "ro", "DirectoryOrCreate"),
}


def test_fpgas_skeleton_is_that_of_the_table() -> None:
    name = "intel-fpga-plugin"
    container = {
        **plugin_container(name, FPGA_VOLUMES, resources(("30Mi", "80m"), ("60Mi", "160m"))),
        "env": from_fields(NODE_NAME="spec.nodeName"),
        "terminationMessagePath": "/tmp/termination-log",
    }
    expected = plugin_daemonset(name, {"containers": [container], "volumes": host_paths(FPGA_VOLUMES)})
    assert in_order(skeleton("fpga", own_image(name)).as_object()) == in_order(expected)


@pytest.mark.parametrize("family", models.KINDS)
def test_a_daemonset_is_named_placed_and_owned(family: str) -> None:
    kind = models.KINDS[family].__name__
    daemonset = render_pod(family, metadata={"uid": "u-1"})
    assert (daemonset["apiVersion"], daemonset["kind"]) == ("apps/v1", "DaemonSet")
    assert daemonset["metadata"] == {
        "name": f"intel-{family}-plugin-mine",
        "namespace": "plugins",
        "labels": {"app": f"intel-{family}-plugin"},
        "ownerReferences": [
            {
                "apiVersion": "deviceplugin.intel.com/v1",
                "kind": kind,
                "name": "mine",
                "uid": "u-1",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    labels = {"app": f"intel-{family}-plugin"}
    assert daemonset["spec"]["selector"] == {"matchLabels": labels}
    assert daemonset["spec"]["template"]["metadata"] == {"labels": labels}


# Arguments


@pytest.mark.parametrize(
    ("family", "spec", "expected"),
    [
        ("dlb", {}, "-v 0"),
        ("dlb", {"logLevel": 4}, "-v 4"),
        ("dsa", {}, "-v 0 -driver idxd -shared-dev-num 1"),
        ("dsa", {"driver": "vfio-pci", "sharedDevNum": 10}, "-v 0 -driver vfio-pci -shared-dev-num 10"),
        # The argument is omitted by default, because older releases reject it.
        ("dsa", {"image": "intel/intel-dsa-plugin:0.31.1"}, "-v 0 -shared-dev-num 1"),
        ("dsa", {"image": "a:1/intel-dsa-plugin:0.36.0"}, "-v 0 -driver idxd -shared-dev-num 1"),
        ("dsa", {"image": "intel/intel-dsa-plugin:devel"}, "-v 0 -driver idxd -shared-dev-num 1"),
        (
            "dsa", {"image": "intel/intel-dsa-plugin:0.34.0", "driver": "vfio-pci"},
            "-v 0 -driver vfio-pci -shared-dev-num 1",
        ),
        ("iaa", {"logLevel": 2}, "-v 2 -shared-dev-num 1"),
        ("iaa", {"sharedDevNum": 10}, "-v 0 -shared-dev-num 10"),
        ("npu", {"sharedDevNum": 3}, "-v 0 -shared-dev-num 3"),
        ("fpga", {}, "-v 0 -mode af"),
        ("fpga", {"mode": "regiondevel"}, "-v 0 -mode regiondevel"),
        (
            "generic", {},
            """-v 0 --listen= --device {"name":"fuse","groups":[{"paths":[{"path":"/dev/fuse"}]}]}""",
        ),
        (
            "generic",
            {
                "domain": "a.example", "preferredAllocationPolicy": "packed", "cdi": "all",
                "devices": [
                    {"name": "sdr", "groups": [{"count": 2, "usb": [{"vendor": "0bda", "separate": True}]}]},
                    {"name": "nic", "groups": [{"rdma": [{}], "env": {"A": "{name}"}, "numaNodes": []}]},
                ],
            },
            ("-v 0 --listen= --domain a.example --allocation-policy packed --cdi all "
             """--device {"name":"sdr","groups":[{"usb":[{"vendor":"0bda","separate":true}],"count":2}]} """
             """--device {"name":"nic","groups":[{"rdma":[{}],"env":{"A":"{name}"},"numaNodes":[]}]}"""),
        ),
        ("gpu", {}, "-v 0 -shared-dev-num 1 -allocation-policy none"),
        ("gpu", {"monitoringMode": "split"}, "-v 0 -shared-dev-num 1 -allocation-policy none"),
        ("gpu", {"enableMonitoring": True}, "-v 0 -enable-monitoring -shared-dev-num 1 -allocation-policy none"),
        (
            "gpu",
            {
                "logLevel": 4,
                "enableMonitoring": True,
                "monitoringMode": "split",
                "sharedDevNum": 10,
                "resourceManager": True,
                "preferredAllocationPolicy": "packed",
                "allowIDs": "0x56c0",
                "denyIDs": "0x56c1",
                "bypathMode": "all",
            },
            ("-v 4 -enable-monitoring -monitoring-mode=split -shared-dev-num 10 -resource-manager "
             "-allocation-policy packed -allow-ids 0x56c0 -deny-ids 0x56c1 -bypath all"),
        ),
        (
            "gpu", {"healthManagement": True},
            "-v 0 -shared-dev-num 1 -allocation-policy none -health-management",
        ),
        (
            "gpu", {"xpumdEndpoint": "/run/xpumd/a.sock"},
            "-v 0 -shared-dev-num 1 -allocation-policy none -xpumd-endpoint=/run/xpumd/a.sock",
        ),
        ("qat", {}, "-v 0 -dpdk-driver vfio-pci -kernel-vf-drivers c6xxvf,4xxxvf -max-num-devices 32"),
        (
            "qat",
            {
                "logLevel": 1,
                "dpdkDriver": "igb_uio",
                "kernelVfDrivers": ["4xxxvf", "420xxvf"],
                "maxNumDevices": 128,
                "preferredAllocationPolicy": "balanced",
            },
            ("-v 1 -dpdk-driver igb_uio -kernel-vf-drivers 4xxxvf,420xxvf -max-num-devices 128 "
             "-allocation-policy balanced"),
        ),
        ("sgx", {}, "-v 0 -enclave-limit 1 -provision-limit 1"),
        (
            "sgx", {"enclaveLimit": 110, "provisionLimit": 20, "dcapInfraResources": True},
            "-v 0 -enclave-limit 110 -provision-limit 20 -dcap-infra-resources",
        ),
    ],
)  # fmt: skip
def test_the_arguments_are_those_of_the_table(family: str, spec: dict[str, Any], expected: str) -> None:
    assert arguments(family, **spec) == expected


# Init containers: image -> name, mounts (name, path, type), environment, privileged, SELinux

INITS: dict[str, tuple[str, str, Volumes, dict[str, str], bool, bool]] = {
    "dlb": (
        "intel-dlb-initcontainer", "enable-vfs",
        {
            "sysfs-devices": ("/sys/devices", "rw", "DirectoryOrCreate"),
            "sysfs-driver-dlb2": ("/sys/bus/pci/drivers/dlb2", "rw", "DirectoryOrCreate"),
        },
        {}, True, False,
    ),
    "dsa": (
        "intel-idxd-config-initcontainer", "intel-idxd-config-initcontainer",
        {
            "sys-bus-dsa": ("/sys/bus/dsa", "rw", ""),
            "sys-bus-pci": ("/sys/bus/pci", "rw", ""),
            "sys-devices": ("/sys/devices", "rw", ""),
        },
        {"DEVICE_TYPE": "dsa", "DSA_DRIVER": "idxd"}, True, True,
    ),
    "iaa": (
        "intel-idxd-config-initcontainer", "intel-iaa-initcontainer",
        {"sys-bus-dsa": ("/sys/bus/dsa", "rw", ""), "sys-devices": ("/sys/devices", "rw", "")},
        {"DEVICE_TYPE": "iaa"}, True, True,
    ),
    "fpga": (
        "intel-fpga-initcontainer", "intel-fpga-initcontainer",
        {"intel-fpga-sw": ("/opt/intel/fpga-sw", "rw", "DirectoryOrCreate")}, {}, False, False,
    ),
    "gpu": (
        "intel-gpu-initcontainer", "intel-gpu-initcontainer",
        {"nfd-sources": (f"{NFD}/source.d/", "rw", "DirectoryOrCreate")}, {}, False, True,
    ),
    "qat": (
        "intel-qat-initcontainer", "intel-qat-initcontainer",
        {"sysfs": ("/sys", "rw", "DirectoryOrCreate")}, {"ENABLED_QAT_PF_PCIIDS": "37c8 4940 4942 4944"}, True, True,
    ),
    "sgx": (
        "intel-sgx-initcontainer", "intel-sgx-initcontainer",
        {"nfd-features": (f"{NFD}/source.d/", "rw", "DirectoryOrCreate")}, {}, False, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", INITS)
def test_an_init_container_is_that_of_the_table(family: str) -> None:
    image, name, volumes, environment, privileged, selinux = INITS[family]
    security: Object = {"readOnlyRootFilesystem": True}
    if privileged:
        security["privileged"] = True
    if family == "fpga":
        security["allowPrivilegeEscalation"] = False
    if selinux:
        security["seLinuxOptions"] = {"type": "container_device_plugin_init_t"}
    expected: Object = {
        "name": name,
        "image": f"any/{image}:1.0.0",
        "imagePullPolicy": "IfNotPresent",
        "securityContext": security,
        "volumeMounts": mounts(volumes),
    }
    env = [{"name": key, "value": value} for key, value in environment.items()]
    if family in ("dsa", "iaa", "qat"):
        env += from_fields(NODE_NAME="spec.nodeName")
    if env:
        expected["env"] = env
    further = [{"name": "scratch", "emptyDir": {}}] if family in ("dsa", "iaa") else []
    if further:
        expected["volumeMounts"].append({"name": "scratch", "mountPath": "/idxd-init/scratch"})

    with_init = pod(family, initImage=f"any/{image}:1.0.0")

    assert in_order(with_init["initContainers"]) == in_order([expected])
    plain = skeleton(family, "x").as_object()["spec"]["template"]["spec"]
    assert in_order(with_init["volumes"]) == in_order([*plain["volumes"], *host_paths(volumes), *further])


def test_all_containers_have_the_digests_that_are_known_for_their_tags() -> None:
    names = ("intel-gpu-plugin", "intel-gpu-levelzero", "intel-gpu-initcontainer")
    known = {own_image(name): f"sha256:{index}" for index, name in enumerate(names)}
    found = pod(
        "gpu",
        settings=Settings(images=ImagePolicy(digests=known)),
        healthManagement=True,
        initImage=own_image("intel-gpu-initcontainer"),
    )
    used = [each["image"] for each in (*found["containers"], *found["initContainers"])]
    assert used == [f"{reference}@{digest}" for reference, digest in known.items()]
    other = pod("gpu", settings=Settings(images=ImagePolicy(digests=known)), image="mirror/intel-gpu-plugin:1.0.0")
    assert other["containers"][0]["image"] == "mirror/intel-gpu-plugin:1.0.0"


@pytest.mark.parametrize("family", sorted(set(models.KINDS) - {"fpga"}))
def test_without_an_init_image_there_is_no_init_container(family: str) -> None:
    assert "initContainers" not in pod(family, image="x:1")
    plain = skeleton(family, "x").as_object()["spec"]["template"]["spec"]
    assert pod(family)["volumes"] == plain["volumes"]


def test_an_fpga_plugin_gets_a_non_default_resource_naming() -> None:
    (container,) = pod("fpga", settings=Settings(fpga_naming="legacy63"))["containers"]
    assert container["args"] == ["-v", "0", "-mode", "af", "-resource-naming", "legacy63"]


def test_fpga_always_has_an_init_container_between_its_volumes() -> None:
    settings = Settings(images=ImagePolicy(vendor="mirror", target="1.1.0"))
    assert pod("fpga", settings=settings)["initContainers"][0]["image"] == "mirror/intel-fpga-initcontainer:1.1.0"
    names = [volume["name"] for volume in pod("fpga")["volumes"]]
    assert names == ["devfs", "sysfs", "kubeletsockets", "fpga-records", "intel-fpga-sw", "cdidir"]


@pytest.mark.parametrize(
    ("family", "volume", "path", "source"),
    [
        ("dsa", "intel-dsa-config-volume", "/idxd-init/conf", {"name": "mine"}),
        ("iaa", "intel-iaa-config-volume", "/idxd-init/conf", {"name": "mine"}),
        ("qat", "intel-qat-config-volume", "/qat-init/conf", {"name": "mine", "defaultMode": 288}),
    ],
)
def test_a_provisioning_config_is_mounted_and_its_hash_is_an_annotation_of_the_pods(
    family: str, volume: str, path: str, source: Object
) -> None:
    spec = {"initImage": "any/x:1.0.0", "provisioningConfig": "mine"}
    found = pod(family, **spec)
    assert found["volumes"][-1] == {"name": volume, "configMap": source}
    assert found["initContainers"][0]["volumeMounts"][-1] == {"name": volume, "mountPath": path}
    first, second = (provisioning_hash({"a.conf": text}) for text in ("x", "y"))
    marked = render_pod(family, provisioning=first, **spec)["spec"]["template"]["metadata"]["annotations"]
    assert marked == {PROVISIONING_ANNOTATION: first}
    assert first != second


def test_the_hash_of_a_config_is_of_its_content_alone() -> None:
    assert provisioning_hash({"a": "1", "b": "2"}) == provisioning_hash({"b": "2", "a": "1"}, {})
    assert provisioning_hash({"a": "1"}) != provisioning_hash({}, {"a": "1"})


def test_every_qat_driver_has_its_devices_in_the_init_containers_environment() -> None:
    drivers = ["dh895xccvf", "c3xxxvf", "c6xxvf", "d15xxvf", "4xxxvf", "420xxvf", "c4xxxvf", "6xxxvf"]
    ids = "0434 0435 19e2 37c8 6f54 4940 4942 4944 4946 18a0 4948"
    assert {*drivers} == {model.vf_driver for model in MODELS}
    (container,) = pod("qat", initImage="x:1", kernelVfDrivers=drivers)["initContainers"]
    assert container["env"][0] == {"name": "ENABLED_QAT_PF_PCIIDS", "value": ids}


# Other fields of a resource


@pytest.mark.parametrize("bind", [False, True])
def test_sysfs_is_writable_only_for_a_plugin_that_binds_functions(bind: bool) -> None:
    pci = {"vendor": "8086", "device": "1572", "bind": bind}
    (container,) = pod("generic", devices=[{"name": "nic", "groups": [{"pci": [pci]}]}])["containers"]
    (sysfs,) = (each for each in container["volumeMounts"] if each["name"] == "sysfs")
    assert sysfs.get("readOnly", False) != bind
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("family", models.KINDS)
def test_a_node_selector_replaces_the_architecture(family: str) -> None:
    architecture = {"kubernetes.io/arch": "amd64"}
    assert pod(family)["nodeSelector"] == ({"kubernetes.io/os": "linux"} if family == "generic" else architecture)
    # IAA always requires it.
    assert pod(family, nodeSelector={"a": "b"})["nodeSelector"] == {"a": "b"} | (
        architecture if family == "iaa" else {}
    )


@pytest.mark.parametrize("family", models.KINDS)
def test_tolerations_are_copied_as_they_are(family: str) -> None:
    tolerations = [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}]
    assert pod(family, tolerations=tolerations)["tolerations"] == tolerations
    assert "tolerations" not in pod(family, tolerations=[])


@pytest.mark.parametrize("family", models.KINDS)
def test_common_fields_of_every_kind_are_applied(family: str) -> None:
    settings = Settings(pull_secret=REGISTRY, service_account="plugins")
    strategy = {"type": "OnDelete"}
    amount = {"limits": {"memory": "1Gi"}}
    daemonset = render_pod(
        family,
        settings=settings,
        image="x:1",
        initImage="y:1",
        imagePullPolicy="Always",
        imagePullSecrets=[{"name": OTHER_REGISTRY}, {"name": REGISTRY}],
        priorityClassName="high",
        resources=amount,
        updateStrategy=strategy,
        podAnnotations={"a": "b"},
    )
    assert daemonset["spec"]["updateStrategy"] == strategy
    assert daemonset["spec"]["template"]["metadata"]["annotations"] == {"a": "b"}
    assert "annotations" not in daemonset["metadata"]
    found = daemonset["spec"]["template"]["spec"]
    assert found["imagePullSecrets"] == [{"name": REGISTRY}, {"name": OTHER_REGISTRY}]
    assert found["priorityClassName"] == "high"
    assert found["serviceAccountName"] == "plugins"
    assert found["automountServiceAccountToken"] is False
    assert found["containers"][0]["resources"] == amount
    assert found["containers"][0]["image"] == "x:1"
    containers = [*found["containers"], *found.get("initContainers", [])]
    assert {each["imagePullPolicy"] for each in containers} == {"Always"}


def test_an_unset_image_is_the_default() -> None:
    settings = Settings(images=ImagePolicy(vendor="mirror.example/ours", target="1.1.0"))
    assert pod("npu", settings=settings)["containers"][0]["image"] == "mirror.example/ours/intel-npu-plugin:1.1.0"


def test_only_qats_annotations_are_copied_and_never_kubectls() -> None:
    apparmor = {"container.apparmor.security.beta.kubernetes.io/intel-qat-plugin": "unconfined"}
    kept = apparmor | {"a.example/b": "c", "argocd.argoproj.io/tracking-id": "x"}
    annotations = kept | {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
    for family in models.KINDS:
        daemonset = render_pod(family, metadata={"annotations": annotations}, podAnnotations={"d": "e"})
        assert daemonset["metadata"].get("annotations", {}) == (kept if family == "qat" else {})
        # Others would replace the pods at each change.
        for_pods = apparmor if family == "qat" else {}
        assert daemonset["spec"]["template"]["metadata"]["annotations"] == for_pods | {"d": "e"}


def test_the_resource_manager_gets_what_it_needs() -> None:
    found = pod("gpu", resourceManager=True, settings=Settings(service_account="plugins"))
    volumes: Volumes = {
        "podresources": ("/var/lib/kubelet/pod-resources", "rw", "DirectoryOrCreate"),
        "kubeletcrt": ("/var/lib/kubelet/pki/kubelet.crt", "ro", "FileOrCreate"),
        "nfd-features": (f"{NFD}/features.d/", "rw", "DirectoryOrCreate"),
        "sysfsdevices": ("/sys/devices", "ro", "Directory"),
    }
    assert found["serviceAccountName"] == "gpu-manager-sa"
    assert "automountServiceAccountToken" not in found
    assert found["containers"][0]["volumeMounts"][4:] == mounts(volumes)
    assert found["volumes"][4:] == host_paths(volumes)


def test_dsa_devices_of_vfio_are_mounted() -> None:
    found = pod("dsa", driver="vfio-pci", initImage="x:1")
    assert found["containers"][0]["volumeMounts"][0] == {"name": "devfs", "mountPath": "/dev/vfio", "readOnly": True}
    assert found["volumes"][0] == {"name": "devfs", "hostPath": {"path": "/dev/vfio"}}
    assert {"name": "DSA_DRIVER", "value": "vfio-pci"} in found["initContainers"][0]["env"]


@pytest.mark.parametrize("overlay", ["levelzero", "health", "xpumd"])
def test_overlays_of_gpus_have_equivalent_fields(overlay: str) -> None:
    spec: dict[str, Any] = {
        "levelzero": {"levelZeroImage": own_image("intel-gpu-levelzero")},
        "health": {"healthManagement": True},
        "xpumd": {"xpumdEndpoint": "/run/xpumd/intelxpuinfo.sock"},
    }[overlay]
    found = pod("gpu", **spec)
    base = "xpumd" if overlay == "xpumd" else "levelzero"
    patch = yaml.safe_load((DEPLOY / "gpu_plugin" / "overlays" / base / f"{base}.yaml").read_text())
    expected = patch["spec"]["template"]["spec"]
    own, *sidecars = expected["containers"]
    assert found["volumes"][4:] == expected["volumes"]
    assert found["containers"][0]["volumeMounts"][4:] == own["volumeMounts"]
    assert found["containers"][1:] == sidecars
    assert ("-health-management" in found["containers"][0]["args"]) == (overlay == "health")


def test_health_management_brings_the_usual_level_zero_image() -> None:
    settings = Settings(images=ImagePolicy(vendor="ours", target="0.36.0"))
    assert (
        pod("gpu", healthManagement=True, settings=settings)["containers"][1]["image"]
        == "ours/intel-gpu-levelzero:0.36.0"
    )


@pytest.mark.parametrize("family", models.KINDS)
def test_a_sample_creates_a_daemonset(family: str) -> None:
    resource = models.decode(sample(family))
    found = render(resource, SETTINGS).as_object()
    assert found["metadata"]["name"] == f"intel-{family}-plugin-{family}deviceplugin-sample"  # type: ignore[index]
    assert render(resource, SETTINGS).as_object() == found


@given(st.sampled_from(sorted(models.KINDS)), st.text(max_size=20), st.text(max_size=20))
def test_every_volume_is_mounted_and_every_mount_has_its_volume(family: str, init: str, config: str) -> None:
    found = pod(family, initImage=init, provisioningConfig=config)
    mounted = {
        mount["name"]
        for container in (*found["containers"], *found.get("initContainers", []))
        for mount in container["volumeMounts"]
    }
    names = [volume["name"] for volume in found["volumes"]]
    assert sorted(names) == sorted(mounted)
