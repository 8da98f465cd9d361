"""Onload on a real node: device plugin and worker as the DaemonSet of the Onload operator, without the operator.

The kernel modules and the NIC are an emulated kernel's. Containers get its sysfs by a mount of the node's /sys, which
the DaemonSet has in addition, because the sysfs of a container would be that of the machine that runs the tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from manifests import own_image

from accelplane.simulate import NicSpec, NodeSpec, OnloadSpec

from .cluster import Cluster
from .conftest import running_cluster
from .crictl import CRICTL, install_crictl, processes, require_crictl
from .emulated import EmulatedKernel, emulated, kernel_of
from .machine import wait_until
from .node import Node, NodePlan
from .objects import Object, pod
from .onload_userland import import_user_image, user_image
from .product_image import product_image

pytestmark = pytest.mark.cluster

NAMESPACE = "onload"
NAME = "onload-onload-device-plugin-ds"
GATE = "onload.amd.com/onload.onload"
RESOURCE = "amd.com/onload"
IMAGE = own_image("onload-device-plugin")
NIC = NicSpec(bdf="0000:63:10.0")
PARAMETERS = "/sys/module/onload/parameters"
SOCKET = "/var/lib/kubelet/device-plugins/sfc-deviceplugin.sock"
MAX_PODS = 20

# As the init container of the operator: a directory of its own for each version, and a link that is switched.
_INSTALL = """set -e
version=$1
mkdir -p /host/onload/versions /mnt/onload/sbin
[ -d "/host/onload/versions/$version" ] || {
    cp -a /opt/onload "/host/onload/versions/.$version"
    mv "/host/onload/versions/.$version" "/host/onload/versions/$version"
}
ln -sfn "versions/$version" /host/onload/.next
mv -T /host/onload/.next /host/onload/current
for name in usr sbin; do ln -sfn "current/$name" "/host/onload/$name"; done
cp /opt/onload/sbin/onload_cp_server /mnt/onload/sbin/
"""
_APPLICATION = """
import ctypes, os, signal, sys
library = ctypes.CDLL(None)
library.onload_version.restype = ctypes.c_char_p
nodes = sorted(name for name in os.listdir("/dev") if "onload" in name or "sfc" in name)
print("version", library.onload_version().decode(), *nodes, os.environ["LD_PRELOAD"], flush=True)
if sys.argv[1:]:
    signal.pause()
"""


def daemonset(version: str) -> Object:
    """The DaemonSet of the operator for this version of the userland."""
    base = {
        "app.kubernetes.io/managed-by": "onload-operator",
        "app.kubernetes.io/part-of": "onload",
        "app.kubernetes.io/instance": "onload-onload-onload",
        "app.kubernetes.io/component": "device-plugin",
    }
    labels = {**base, "onload.amd.com/name": NAME}
    privileged = {"privileged": True, "runAsUser": 0}
    emulated_sysfs = {"name": "sys", "mountPath": "/sys"}
    worker_volume = {"name": "worker-volume", "mountPath": "/mnt/onload"}
    init: Object = {
        "name": "init",
        "image": user_image(version),
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", _INSTALL],
        "args": ["init", version],
        "securityContext": privileged,
        "volumeMounts": [{"name": "host-onload", "mountPath": "/host/onload"}, worker_volume],
    }
    plugin: Object = {
        "name": "device-plugin",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "args": [
            f"-maxPods={MAX_PODS}", "-setPreload=true", "-mountOnload=false", "-hostOnloadPath=/opt/onload/",
            "-baseMountPath=/opt/onload", "-binMountPath=/usr/bin", "-libMountPath=/usr/lib64",
        ],
        "securityContext": privileged,
        "lifecycle": {
            # As in the Go operator. The image has neither program, so the files of running pods are kept.
            "postStart": {"exec": {"command": ["/bin/sh", "-c", "chcon -Rt container_file_t /opt/onload || echo no"]}},
            "preStop": {"exec": {"command": ["/bin/sh", "-c", "rm -r /opt/onload"]}},
        },
        "volumeMounts": [
            {"name": "kubelet-socket", "mountPath": "/var/lib/kubelet/device-plugins"},
            {"name": "host-onload", "mountPath": "/opt/onload/"},
            emulated_sysfs,
        ],
    }  # fmt: skip
    worker: Object = {
        "name": "onload-worker",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["onload-worker"],
        "securityContext": privileged,
        "volumeMounts": [worker_volume, emulated_sysfs],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "CONTAINER_NAME", "value": "onload-worker"},
            {"name": "ONLOAD_CP_SERVER_PATH", "value": "/mnt/onload/sbin/onload_cp_server"},
            {"name": "ONLOAD_CP_SERVER_PARAMS", "value": "-K"},
        ],
    }
    gate = {"matchExpressions": [{"key": GATE, "operator": "Exists"}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [gate]}}
    spec: Object = {
        "serviceAccountName": "onload",
        "hostNetwork": True,
        "hostPID": True,
        "hostIPC": True,
        "nodeSelector": {"onload": "true"},
        "affinity": {"nodeAffinity": required},
        "volumes": [
            {"name": "kubelet-socket", "hostPath": {"path": "/var/lib/kubelet/device-plugins", "type": "Directory"}},
            {"name": "host-onload", "hostPath": {"path": "/opt/onload/", "type": "DirectoryOrCreate"}},
            {"name": "worker-volume", "emptyDir": {"sizeLimit": "8Mi"}},
            {"name": "sys", "hostPath": {"path": "/sys"}},
        ],
        "initContainers": [init],
        "containers": [plugin, worker],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": {**base, "onload.amd.com/version": version}},
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "OnDelete"},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def account() -> list[Object]:
    """The service account, which may read the pods of its namespace."""
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]
    names = {"name": "onload", "namespace": NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "onload"}
    subject = {"kind": "ServiceAccount", **names}
    api = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": names},
        {"apiVersion": api, "kind": "Role", "metadata": names, "rules": rules},
        {"apiVersion": api, "kind": "RoleBinding", "metadata": names, "roleRef": role, "subjects": [subject]},
    ]


def application(name: str, *, stays: bool = False) -> Object:
    """A pod with Onload that prints the version of the library which is loaded into it."""
    words = ("stays",) if stays else ()
    command = ("/usr/bin/python3.11", "-c", _APPLICATION, *words)
    restart = "Always" if stays else "Never"
    return pod(
        name, *command, image=IMAGE, namespace=NAMESPACE, resources={RESOURCE: 1, "memory": "100Mi"}, restart=restart
    )


class OnloadNode:
    """The node, and the pod of the DaemonSet on it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.node = cluster.nodes["node-1"]

    @property
    def kernel(self) -> EmulatedKernel:
        return kernel_of(self.node)

    @property
    def amounts(self) -> tuple[str | None, str | None]:
        """Capacity and allocatable."""
        status = (self.cluster.get("/api/v1/nodes/node-1") or {"status": {}})["status"]
        return status.get("capacity", {}).get(RESOURCE), status.get("allocatable", {}).get(RESOURCE)

    def wait_healthy(self, *, healthy: bool = True) -> None:
        expected = (str(MAX_PODS), str(MAX_PODS if healthy else 0))
        wait_until(lambda: self.amounts == expected, f"node-1: {expected} of {RESOURCE}", 60, hint=self.log())

    @property
    def plugin_pod(self) -> Object | None:
        found = self.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=onload.amd.com%2Fname%3D{NAME}")
        pods = [each for each in (found or {"items": []})["items"] if "deletionTimestamp" not in each["metadata"]]
        return pods[0] if pods else None

    def status(self, container: str) -> Object:
        statuses = (self.plugin_pod or {"status": {}})["status"].get("containerStatuses", [])
        return next((each for each in statuses if each["name"] == container), {})

    def log(self) -> str:
        words = ("-n", NAMESPACE, f"--selector=onload.amd.com/name={NAME}", "--all-containers", "--prefix")
        return self.cluster.kubectl("logs", *words, check=False)[-4000:]

    def parameters(self) -> tuple[str, str]:
        path, arguments = (self.kernel.read(f"{PARAMETERS}/cplane_server_{name}") for name in ("path", "params"))
        return path.strip(), arguments.strip()

    @property
    def wanted_parameters(self) -> tuple[str, str]:
        id_ = container_id(self.status("onload-worker"))
        return CRICTL, f"exec {id_} /mnt/onload/sbin/onload_cp_server -K"

    def wait_parameters(self) -> None:
        def applied() -> bool:
            try:
                return self.parameters() == self.wanted_parameters
            except OSError:  # the module is not loaded
                return False

        wait_until(applied, "the parameters of the worker", 60, hint=self.log())

    def deploy(self, version: str) -> None:
        """Applies the DaemonSet and waits until its pod is a new one that works."""
        before = self.plugin_pod
        self.cluster.apply(daemonset(version))
        if before:
            self.cluster.kubectl("delete", "pod", "-n", NAMESPACE, before["metadata"]["name"])
        wait_until(lambda: self.status("onload-worker").get("ready"), "the worker: ready", 60)
        self.wait_healthy()
        self.wait_parameters()

    def version(self, name: str) -> list[str]:
        """What the application has printed last."""
        wait_until(
            lambda: "version" in self.cluster.kubectl("logs", "-n", NAMESPACE, name, check=False), f"log of {name}", 30
        )
        lines = self.cluster.kubectl("logs", "-n", NAMESPACE, name).splitlines()
        assert any(line.endswith("preloaded") for line in lines)
        return [line for line in lines if line.startswith("version ")][-1].split()[1:]

    def run(self, name: str, *, stays: bool = False) -> list[str]:
        self.cluster.apply(application(name, stays=stays))
        self.cluster.wait_pod(name, "Running" if stays else "Succeeded", namespace=NAMESPACE)
        return self.version(name)

    def records(self) -> list[list[str]]:
        """What the control plane servers in the worker's container have written: namespace and arguments."""
        uid = (self.plugin_pod or {"metadata": {"uid": "none"}})["metadata"]["uid"]
        volume = self.node.path(f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/worker-volume")
        return [path.read_text().splitlines() for path in volume.glob("server.*") if path.suffix != ".new"]

    def check_control_plane(self) -> None:
        """An application creates a stack in its network namespace. Asserts where the kernel started the server."""
        self.run("application", stays=True)
        (status,) = (self.cluster.pod("application", NAMESPACE) or {})["status"]["containerStatuses"]
        namespace = f"/proc/{processes(self.node, container_id(status))[0]}/ns/net"
        self.kernel.do("stack", network_namespace=namespace)
        expected = [_inode(self.node, namespace), "-K", "--daemonise", "--network-namespace-file", namespace]
        wait_until(
            lambda: expected in self.records(), f"a record of the server: {expected}", hint=self.kernel.do("calls")
        )
        # The first one was started when the worker wrote its path, in the network namespace of the node.
        assert [_inode(self.node, "/proc/1/ns/net"), "-K", "--daemonise"] in self.records()
        worker = container_id(self.status("onload-worker"))
        wait_until(lambda: self.last_call()["status"] == 0, "the end of crictl", hint=self.kernel.do("calls"))
        assert self.last_call()["argv"][:3] == [CRICTL, "exec", worker]
        commands = [self.node.path(f"/proc/{each}/cmdline").read_text() for each in processes(self.node, worker)]
        assert any("\0--network-namespace-file\0" in each for each in commands)

    def last_call(self) -> Object:
        """The last program that the kernel has started."""
        return json.loads(self.kernel.do("calls"))[-1]


@pytest.fixture(scope="module")
def onload(cluster_is_possible: None) -> Iterator[OnloadNode]:
    plan = NodePlan(
        hardware=[emulated(NodeSpec(nics=[NIC], onload=OnloadSpec())), install_crictl],
        kubelet={"nodeStatusUpdateFrequency": "200ms"},
        labels={"onload": "true", GATE: "1"},
    )
    with running_cluster(plan) as cluster, cluster.namespace(NAMESPACE):
        cluster.import_image(product_image())
        for version in ("1", "2"):
            import_user_image(cluster, version)
        cluster.apply(*account())
        node = OnloadNode(cluster)
        node.deploy("1")
        yield node


def test_a_pod_runs_with_the_library_preloaded(onload: OnloadNode) -> None:
    library = "/opt/onload/usr/lib64/libonload.so"
    assert onload.run("preloaded") == ["1", "onload", "onload_epoll", "sfc_char", library]


def test_the_kernel_starts_the_control_plane_in_the_container_of_the_worker(onload: OnloadNode) -> None:
    onload.check_control_plane()


def test_the_kernel_starts_the_real_crictl(onload: OnloadNode) -> None:
    """Without it, the other tests of this file use a script."""
    require_crictl()
    version = onload.node.run(CRICTL, "version").stdout
    assert "RuntimeName:  containerd" in version


def test_a_reloaded_module_is_healthy_again_and_has_the_parameters(onload: OnloadNode) -> None:
    onload.kernel.do("unload", module="onload")
    onload.wait_healthy(healthy=False)
    onload.kernel.do("load", module="onload", first_time=True)
    onload.wait_healthy()
    onload.wait_parameters()
    assert [onload.status(name)["restartCount"] for name in ("device-plugin", "onload-worker")] == [0, 0]


def test_devices_are_unhealthy_while_the_nic_is_gone(onload: OnloadNode) -> None:
    assert NIC.bdf
    onload.kernel.unplug(NIC.bdf)
    onload.wait_healthy(healthy=False)
    onload.kernel.plug(NIC)
    onload.wait_healthy()


def test_devices_are_unhealthy_while_a_device_node_is_gone(onload: OnloadNode) -> None:
    node = onload.node.path("/dev/onload_epoll")
    status = os.lstat(node)
    os.unlink(node)
    onload.wait_healthy(healthy=False)
    os.mknod(node, status.st_mode, status.st_rdev)
    onload.wait_healthy()


def test_a_killed_worker_sets_the_parameters_for_its_next_container(onload: OnloadNode) -> None:
    former = container_id(onload.status("onload-worker"))
    ctr = onload.cluster.assets.program("ctr")
    onload.node.run(ctr, "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", former)
    wait_until(lambda: onload.status("onload-worker").get("restartCount") == 1, "the worker: restarted", 60)
    onload.wait_parameters()
    assert former not in onload.parameters()[1]


def test_a_restarted_kubelet_gets_the_devices_again(onload: OnloadNode) -> None:
    before = _changed(onload.node.path(SOCKET))
    onload.node.kubelet.restart()
    wait_until(lambda: _changed(onload.node.path(SOCKET)) > before, "another socket of the plugin", 60)
    onload.wait_healthy()
    assert onload.run("after-restart")[0] == "1"


def test_new_pods_get_the_new_version_and_running_pods_keep_theirs(onload: OnloadNode) -> None:
    assert onload.run("keeps", stays=True)[0] == "1"
    onload.deploy("2")
    assert onload.run("new")[0] == "2"
    onload.cluster.kill_container("keeps", namespace=NAMESPACE)
    wait_until(lambda: _restarts(onload.cluster, "keeps") == 1, "the container: restarted", 60)
    assert onload.version("keeps")[0] == "1"


def test_the_parameters_are_restored_when_the_worker_ends(onload: OnloadNode) -> None:
    onload.cluster.kubectl("delete", "daemonset", "-n", NAMESPACE, NAME)
    wait_until(lambda: onload.parameters() == ("", ""), "the parameters: restored", 60)


def test_the_worker_needs_no_privileges_with_mounts_of_its_files(onload: OnloadNode) -> None:
    worker = pod("worker", "onload-worker", image=IMAGE, namespace=NAMESPACE, host_paths=["/sys/module", "/dev"])
    worker["spec"]["serviceAccountName"] = "onload"
    (container,) = worker["spec"]["containers"]
    container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    variables = {"POD_NAME": "worker", "POD_NAMESPACE": NAMESPACE, "CONTAINER_NAME": "main"}
    variables |= {"ONLOAD_CP_SERVER_PATH": "/server", "ONLOAD_CRICTL_PATH": "/somewhere/crictl"}
    container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    onload.cluster.apply(worker)
    wait_until(lambda: onload.parameters()[0] == "/somewhere/crictl", "the parameters: written", 60)
    status = (onload.cluster.pod("worker", NAMESPACE) or {})["status"]["containerStatuses"][0]
    assert onload.parameters()[1] == f"exec {container_id(status)} /server"


def container_id(status: Object) -> str:
    """The ID in a container's status, without the name of the runtime."""
    return status.get("containerID", "").rpartition("//")[2]


def _inode(node: Node, path: str) -> str:
    return str(node.path(path).stat().st_ino)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_ctime_ns
    except OSError:
        return 0


def _restarts(cluster: Cluster, name: str) -> int:
    found = cluster.pod(name, NAMESPACE) or {"status": {}}
    statuses = found["status"].get("containerStatuses", [])
    return statuses[0]["restartCount"] if statuses and statuses[0].get("started") else 0
