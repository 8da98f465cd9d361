"""The tree with the resource manager of the GPU plugin renders to the objects of release 0.31.1 of the original."""

from typing import Any

from manifests import DEPLOY, RBAC, REPOSITORY, SOCKETS, Object, Volumes, host_paths, in_order, mounts, render

from accelplane.cli.goflags import flags_of, parse
from accelplane.plugins.gpu import GpuConfig

TREE = "gpu_plugin/overlays/fractional_resources"
FEATURES = "/etc/kubernetes/node-feature-discovery/features.d/"
VOLUMES: Volumes = {
    "devfs": ("/dev/dri", "ro", ""),
    "sysfsdrm": ("/sys/class/drm", "ro", ""),
    "cdipath": ("/var/run/cdi", "rw", "DirectoryOrCreate"),
    **SOCKETS,
    # The original mounts the certificate writable.
    "kubeletcrt": ("/var/lib/kubelet/pki/kubelet.crt", "ro", "FileOrCreate"),
    "nfd-features": (FEATURES, "rw", "DirectoryOrCreate"),
    "sysfsdevices": ("/sys/devices", "ro", ""),
    "podresources": ("/var/lib/kubelet/pod-resources", "rw", ""),
}


def objects() -> dict[str, Object]:
    return {each["kind"]: each for each in render(DEPLOY / TREE)}


def test_the_daemonset_is_the_base_with_the_account_the_files_and_the_flags() -> None:
    (base,) = render(DEPLOY / "gpu_plugin")
    spec: dict[str, Any] = base["spec"]["template"]["spec"]
    spec["serviceAccountName"] = "gpu-manager-sa"
    spec["nodeSelector"]["intel.feature.node.kubernetes.io/gpu"] = "true"
    spec["volumes"] = host_paths(VOLUMES)
    (container,) = spec["containers"]
    container["args"] = ["-shared-dev-num=300", "-resource-manager", "-enable-monitoring"]
    container["volumeMounts"] = mounts(VOLUMES)
    assert in_order(objects()["DaemonSet"]) == in_order(base)


def test_the_account_may_list_pods_at_the_kubelet_and_at_the_api_server() -> None:
    found = objects()
    assert set(found) == {"DaemonSet", "ServiceAccount", "ClusterRole", "ClusterRoleBinding"}
    assert found["ServiceAccount"]["metadata"] == {"name": "gpu-manager-sa"}
    assert found["ClusterRole"]["metadata"] == {"name": "gpu-manager-role"}
    assert found["ClusterRole"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes/pods"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    assert found["ClusterRoleBinding"]["metadata"] == {"name": "gpu-manager-rolebinding"}
    assert found["ClusterRoleBinding"]["roleRef"] == {
        "apiGroup": RBAC,
        "kind": "ClusterRole",
        "name": "gpu-manager-role",
    }
    assert found["ClusterRoleBinding"]["subjects"] == [
        {"kind": "ServiceAccount", "name": "gpu-manager-sa", "namespace": "default"}
    ]


def test_the_arguments_are_valid_options_of_the_plugin() -> None:
    (container,) = objects()["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    options, remaining = parse(flags_of(GpuConfig), container["args"])
    config = GpuConfig.of(options)
    assert remaining == []
    assert (config.resource_manager, config.shared_dev_num, config.enable_monitoring) == (True, 300, True)


def test_the_directory_name_of_the_original_resolves_to_the_same_tree() -> None:
    assert render(REPOSITORY / "deployments" / TREE) == render(DEPLOY / TREE)
