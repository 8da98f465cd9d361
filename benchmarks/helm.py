"""From `helm install` of the chart `accelplane` with its defaults until the first device is allocatable.

The cluster is that of the tests, with a kubelet that has the upstream's times. The node knows the images already.
"""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Result, Scale, median
from tests.cluster.build import ClusterError, tool
from tests.cluster.cluster import Cluster, why_unavailable
from tests.cluster.hardware import plug_sample_gpu
from tests.cluster.machine import REPOSITORY, wait_until
from tests.cluster.node import Node, NodePlan
from tests.cluster.product_image import product_image

CHART = REPOSITORY / "deploy/charts/accelplane"
_NAMESPACE = "accelplane"
_RESOURCE = "gpu.intel.com/i915"
_TIMEOUT = 120.0
# The harness has shorter times, for its tests.
_UPSTREAM = {"nodeStatusUpdateFrequency": "10s", "nodeStatusReportFrequency": "5m", "nodeLeaseDurationSeconds": 40}


def measure(scale: Scale) -> Result:
    if problem := why_unavailable():
        return Result(skipped=problem)
    if not tool("helm").exists():
        return Result(skipped="no helm: make kube")
    try:
        archive = product_image()
    except ClusterError as error:
        return Result(skipped=str(error))
    commands: list[float] = []
    devices: list[float] = []
    # The lease of the node is renewed less often than the harness expects.
    with Cluster.running([NodePlan(hardware=[_gpu], kubelet=_UPSTREAM)], silence=60) as cluster:
        cluster.import_image(archive)
        (node,) = cluster.nodes.values()
        with tempfile.TemporaryDirectory() as directory, cluster.namespace(_NAMESPACE):
            for _ in range(scale.of(5, 1)):
                command, device = _installed(cluster, node, Path(directory))
                commands.append(command)
                devices.append(device)
    return Result(
        figures=(
            median("helm install until the first device is allocatable", devices, "s", budget=20.0),
            median("of it the command helm install", commands, "s"),
        ),
        notes=(
            "chart accelplane with its defaults; images on the node; the kubelet updates the status every 10 s",
            "each installation follows the removal of the one before it",
        ),
    )


def _gpu(node: Node) -> None:
    with tempfile.TemporaryDirectory() as tree:
        plug_sample_gpu(node, Path(tree), cards=1)


def _installed(cluster: Cluster, node: Node, directory: Path) -> tuple[float, float]:
    """Seconds until the command has ended, and until a device is allocatable. Removes the release."""
    start = time.monotonic()
    _helm(cluster, directory, "install", "accelplane", str(CHART))
    command = time.monotonic() - start
    wait_until(lambda: node.allocatable(_RESOURCE), f"{_RESOURCE}: allocatable", _TIMEOUT)
    device = time.monotonic() - start
    _helm(cluster, directory, "uninstall", "accelplane", "--wait")
    wait_until(lambda: not node.allocatable(_RESOURCE), f"{_RESOURCE}: not allocatable", _TIMEOUT)
    wait_until(lambda: not _pods(cluster), "the pods: deleted", _TIMEOUT)
    return command, device


def _pods(cluster: Cluster) -> object:
    return json.loads(cluster.kubectl("get", "pods", f"--namespace={_NAMESPACE}", "--output=json"))["items"]


def _helm(cluster: Cluster, directory: Path, *words: str) -> None:
    homes = {f"HELM_{name}_HOME": str(directory / name) for name in ("CACHE", "CONFIG", "DATA")}
    environment = {**os.environ, **homes, "KUBECONFIG": str(cluster.kubeconfig)}
    subprocess.run(
        [tool("helm"), f"--namespace={_NAMESPACE}", *words], env=environment, check=True, capture_output=True
    )
