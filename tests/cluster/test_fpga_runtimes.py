"""FPGAs on a node with a container runtime without CDI: supported modes, and no container without programming.

The containerd is Debian's. Other runtimes were tested manually; see docs/fpga.md.
"""

from __future__ import annotations

import http
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from bitstreams import NLB0, NLB3
from manifests import render

from accelplane.simulate import NodeSpec

from .build import OLD_CONTAINERD, assets
from .conftest import running_cluster
from .fpgas import (
    ORCHESTRATED,
    PORT,
    PREPROGRAMMED,
    REGION,
    TEAM,
    WITH,
    Fpga,
    Fpgas,
    Installation,
    plan,
    requesting_pod,
)
from .machine import REPOSITORY, wait_until
from .product_image import product_image
from .runtimes import Runtime, containerd_1
from .test_fpga import DFL, developer

pytestmark = pytest.mark.cluster

NAMESPACE = "intelfpgaplugin-system"
APP = "intel-fpga-plugin"


@pytest.fixture(scope="module")
def programs(cluster_is_possible: None) -> Runtime:
    """That containerd. Skips the test without it; fails it if a cluster is required."""
    directory = assets().old_containerd
    if not directory.is_dir():
        problem = f"no containerd {OLD_CONTAINERD} in {directory}; make kube gets it from Debian, or says why not"
        if os.environ.get("ACCELPLANE_CLUSTER") == "required":
            pytest.fail(problem)
        pytest.skip(problem)
    return containerd_1(directory)


@pytest.fixture(scope="module")
def fpga(programs: Runtime) -> Iterator[Fpga]:
    """A node with it and one card, in mode regiondevel."""
    node = replace(plan("node-1", NodeSpec(fpgas=[DFL])), runtime=programs)
    with running_cluster(node) as cluster, cluster.namespace(TEAM):
        cluster.import_image(product_image())
        instance = Fpga(cluster, cluster.nodes["node-1"], DFL, PORT)
        objects = render(REPOSITORY / "deploy/fpga_plugin/overlays/regiondevel")
        Fpgas(cluster, [instance]).install(Installation(NAMESPACE, APP, objects), {"node-1": [REGION]})
        yield instance


@pytest.fixture
def regions(fpga: Fpga) -> Iterator[Fpga]:
    """The same in mode region: the card exists and is not allocatable."""
    annotation = "fpga.intel.com/device-plugin-mode"
    fpga.cluster.kubectl("annotate", "node", fpga.node.name, f"{annotation}=region")
    wait_until(lambda: fpga.node.allocatable(REGION) == 0, f"{REGION}: not allocatable", 60)
    yield fpga
    fpga.cluster.kubectl("annotate", "node", fpga.node.name, f"{annotation}-")
    fpga.wait_for_allocatable(REGION)


@contextmanager
def restart_plugin_with(fpga: Fpga, *flags: str) -> Iterator[None]:
    """Recreates the plugin's pod with these flags."""
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/intelfpgaplugin-{APP}"

    def tell(words: Sequence[str]) -> None:
        change = {"spec": {"template": {"spec": {"containers": [{"name": APP, "args": list(words)}]}}}}
        kind = "application/strategic-merge-patch+json"
        status, answer = fpga.cluster.request("PATCH", path, change, content=kind)
        assert status == http.HTTPStatus.OK, answer

    found = fpga.cluster.get(path)
    assert found
    (before,) = found["spec"]["template"]["spec"]["containers"]
    tell(flags)
    try:
        yield
    finally:
        tell(before["args"])


def test_a_function_programmed_before_is_allocated_to_a_pod(fpga: Fpga) -> None:
    assert fpga.node.run("containerd", "--version").stdout.split()[2].startswith(f"{OLD_CONTAINERD}.")
    fpga.program(NLB3)
    with fpga.mode("af", WITH[NLB3]):
        fpga.cluster.apply(requesting_pod("preprogrammed", PREPROGRAMMED[NLB3]))
        assert fpga.output_of("preprogrammed") == [NLB3, "/dev/dfl-port.0"]


def test_a_pod_programs_its_region_itself(fpga: Fpga) -> None:
    fpga.program(NLB0)
    fpga.cluster.apply(developer(fpga))
    assert fpga.output_of("developer") == ["/dev/dfl-fme.0", "/dev/dfl-port.0", NLB0, NLB3]


def test_regions_without_a_programming_hook_are_not_allocated_and_the_reason_is_reported(regions: Fpga) -> None:
    regions.cluster.apply(requesting_pod("waits", ORCHESTRATED[NLB3]))
    pod = ("pod", "waits", f"--namespace={TEAM}")
    expected = f"Insufficient {REGION}"
    wait_until(lambda: expected in regions.cluster.kubectl("describe", *pod), "the pod: pending", 60)
    plugin = (f"--namespace={NAMESPACE}", f"--selector=app={APP}", "--tail=-1")
    reason = f"dfl-fme.0 is unhealthy: the container runtime 'containerd://{OLD_CONTAINERD}."
    wait_until(lambda: reason in regions.cluster.kubectl("logs", *plugin), "the reason in the log of the plugin", 60)
    regions.cluster.kubectl("delete", *pod)


def test_a_container_of_a_runtime_without_cdi_has_no_port(regions: Fpga) -> None:
    # Without a Node object, the plugin knows neither its runtime nor a mode.
    with restart_plugin_with(regions, "-mode=region", "-cdi=only", "-node-name="):
        regions.wait_for_allocatable(REGION)
        regions.program(NLB0)
        regions.install(NLB3)
        regions.cluster.apply(requesting_pod("without", ORCHESTRATED[NLB3]))
        assert regions.output_of("without") == [NLB0]
