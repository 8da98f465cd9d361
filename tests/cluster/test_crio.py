"""Nodes with CRI-O: GPUs, FPGAs and Onload, with the real CRI-O, conmon and crictl.

`make tools TOOLS="cri-o cri-tools"` compiles CRI-O and crictl. The hardware is that of the tests with containerd.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from bitstreams import INTERFACE, NLB0, NLB3
from manifests import render

from accelplane.simulate import NodeSpec, OnloadSpec

from .cluster import Cluster
from .conftest import running_cluster, sample_gpus
from .crictl import install_crictl, require_crio
from .emulated import emulated
from .fpgas import NODES, ORCHESTRATED, PORT, REGION, TEAM, Fpga, Fpgas, Installation, requesting_pod
from .machine import REPOSITORY, wait_until
from .node import Node, NodePlan
from .objects import Object, pod
from .onload_userland import import_user_image
from .product_image import product_image
from .runtimes import crio
from .settings import CRIO_SOCKET
from .test_fpga import DFL
from .test_gpu_base import RESOURCE
from .test_onload_node import GATE, IMAGE, NIC, OnloadNode, account, container_id
from .test_onload_node import NAMESPACE as ONLOAD

pytestmark = pytest.mark.cluster

FPGA = "intelfpgaplugin-system"
PLUGIN = "intel-fpga-plugin"
HOOKS = Path("/etc/containers/oci/hooks.d/intel-fpga-crihook.json")


@pytest.fixture(scope="module")
def cluster(cluster_is_possible: None) -> Iterator[Cluster]:
    """A node with CRI-O, one GPU, one FPGA and one NIC. Skips without CRI-O; fails if it is required."""
    require_crio()
    kernel = emulated(NodeSpec(nics=[NIC], onload=OnloadSpec(), fpgas=[DFL]), openable=False)
    plan = NodePlan(
        runtime=crio(),
        hardware=[sample_gpus(1), kernel, install_crictl],
        kubelet={"nodeStatusUpdateFrequency": "200ms"},
        labels={"onload": "true", GATE: "1"},
    )
    with running_cluster(plan) as cluster:
        cluster.import_image(product_image())
        yield cluster


@pytest.fixture
def node(cluster: Cluster) -> Node:
    return cluster.nodes["node-1"]


def test_the_node_reports_crio(cluster: Cluster, node: Node) -> None:
    status = (cluster.get("/api/v1/nodes/node-1") or {})["status"]
    assert status["nodeInfo"]["containerRuntimeVersion"].startswith("cri-o://1.")
    assert f"unix://{CRIO_SOCKET}" in node.path("/etc/crictl.yaml").read_text()


# GPUs


def gpu_plugin(namespace: str, mode: str) -> list[Object]:
    """The base of the plugin with this value of the option `cdi`."""
    objects = render(REPOSITORY / "deploy/gpu_plugin/base")
    for each in objects:
        each["metadata"]["namespace"] = namespace
        each["spec"]["template"]["spec"]["containers"][0]["args"] = [f"-cdi={mode}"]
    return objects


@pytest.mark.parametrize("mode", ["off", "only"])
def test_a_pod_gets_the_device_nodes_of_its_gpu(cluster: Cluster, node: Node, mode: str) -> None:
    """By the kubelet's answer alone with `off`, by CDI alone with `only`."""
    with cluster.namespace(f"gpu-{mode}") as namespace:
        cluster.apply(*gpu_plugin(namespace, mode))
        wait_until(lambda: node.allocatable(RESOURCE) == 1, "the card", 60)
        words = "find /dev/dri -maxdepth 1 -type c | sort; echo x >/dev/dri/card0 && echo written"
        cluster.apply(pod("worker", "sh", "-c", words, namespace=namespace, resources={RESOURCE: "1"}))
        cluster.wait_pod("worker", "Succeeded", namespace=namespace)
        printed = cluster.kubectl("logs", "worker", f"--namespace={namespace}").split()
        assert printed == ["/dev/dri/card0", "/dev/dri/renderD128", "written"]
        cluster.kubectl("delete", "daemonset", "--all", f"--namespace={namespace}", "--wait")
        wait_until(lambda: not node.allocatable(RESOURCE), "the end of the plugin", 60)


# FPGAs


@pytest.fixture(scope="module")
def fpgas(cluster: Cluster) -> Iterator[Fpgas]:
    with cluster.namespace(TEAM):
        instance = Fpgas(cluster, [Fpga(cluster, cluster.nodes["node-1"], DFL, PORT)])
        yield instance
        instance.uninstall()


def installed(fpgas: Fpgas, overlay: str) -> Fpga:
    """The node, on which this overlay is installed."""
    objects = render(REPOSITORY / f"deploy/fpga_plugin/overlays/{overlay}")
    fpgas.install(Installation(FPGA, PLUGIN, objects), {"node-1": [REGION]})
    return fpgas.nodes[0]


def check_programming(fpga: Fpga, name: str) -> None:
    """A container does not start without its bitstream, and starts after it was installed."""
    fpga.program(NLB0)
    fpga.clear_store()
    fpga.cluster.apply(requesting_pod(name, ORCHESTRATED[NLB3]))
    fpga.wait_for_event(name, f"FPGA_AFU_1 in dfl-port.0: no bitstream for AFU {NLB3} in region {INTERFACE}")
    # CRI-O runs the hook when it creates the container, not when it starts it: the kubelet tries again.
    status = (fpga.cluster.pod(name, TEAM) or {})["status"]
    assert (status["phase"], fpga.afu) == ("Pending", NLB0)
    fpga.install(NLB3)
    assert fpga.output_of(name) == [NLB3, "/dev/dfl-port.0"]
    assert fpga.afu == NLB3


def test_the_fpga_hook_runs_by_cdi(fpgas: Fpgas, node: Node) -> None:
    fpga = installed(fpgas, "region")
    assert not os.path.lexists(node.path(HOOKS))
    check_programming(fpga, "by-cdi")


def test_the_fpga_hook_runs_by_hooks_d(fpgas: Fpgas, node: Node) -> None:
    fpga = installed(fpgas, "region-hooks.d")
    assert node.path(HOOKS).is_symlink()
    check_programming(fpga, "by-hooks-d")
    # The hook runs for containers with the annotation only.
    fpga.cluster.apply(pod("other", "sh", "-c", NODES, namespace=TEAM))
    assert fpga.output_of("other") == []


# Onload


@pytest.fixture(scope="module")
def onload(cluster: Cluster) -> Iterator[OnloadNode]:
    with cluster.namespace(ONLOAD):
        import_user_image(cluster, "1")
        cluster.apply(*account())
        node = OnloadNode(cluster)
        node.deploy("1")
        yield node
        cluster.kubectl("delete", "daemonset", "--all", f"--namespace={ONLOAD}", "--wait")


def test_a_pod_runs_with_the_onload_library_preloaded(onload: OnloadNode) -> None:
    library = "/opt/onload/usr/lib64/libonload.so"
    assert onload.run("preloaded") == ["1", "onload", "onload_epoll", "sfc_char", library]


def test_the_kernel_starts_the_control_plane_by_crictl_in_the_container_of_the_worker(onload: OnloadNode) -> None:
    onload.check_control_plane()


def test_the_worker_finds_its_container_in_its_cgroup_without_rights_at_the_api(onload: OnloadNode) -> None:
    onload.cluster.kubectl("delete", "daemonset", "--all", f"--namespace={ONLOAD}", "--wait")
    wait_until(lambda: onload.parameters() == ("", ""), "the parameters: restored", 60)
    onload.cluster.apply(worker_without_rights(["/sys/module", "/dev"]))

    def written() -> bool:
        return onload.parameters()[0] == "/somewhere/crictl"

    wait_until(written, "the parameters: written", 60)
    onload.cluster.wait_pod("worker", "Running", namespace=ONLOAD)
    status = (onload.cluster.pod("worker", ONLOAD) or {})["status"]["containerStatuses"][0]
    assert onload.parameters()[1] == f"exec {container_id(status)} /server"
    log = onload.cluster.kubectl("logs", "worker", f"--namespace={ONLOAD}")
    assert f"container ID {container_id(status)} is from /proc/self/cgroup" in log


def worker_without_rights(paths: Sequence[str]) -> Object:
    """A pod with the worker, whose service account has no rights."""
    worker = pod("worker", "onload-worker", image=IMAGE, namespace=ONLOAD, host_paths=paths)
    (container,) = worker["spec"]["containers"]
    container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    variables = {"POD_NAME": "worker", "POD_NAMESPACE": ONLOAD, "CONTAINER_NAME": "main"}
    variables |= {"ONLOAD_CP_SERVER_PATH": "/server", "ONLOAD_CRICTL_PATH": "/somewhere/crictl"}
    container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    return worker
