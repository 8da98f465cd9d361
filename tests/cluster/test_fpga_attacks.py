"""Pods that try to have the port of another pod programmed, or their own with a function that was not granted.

The runtime is containerd, which starts the hook by CDI.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bitstreams import INTERFACE, NLB0, NLB3
from manifests import render

from accelplane.fpga.ids import region_type
from accelplane.simulate import NodeSpec
from accelplane.simulate.offload import FpgaSpec

from .conftest import running_cluster
from .emulated import kernel_of
from .fpgas import NODES, ORCHESTRATED, PORT, REGION, TEAM, Fpga, Fpgas, Installation, bitstream, plan, requesting_pod
from .machine import REPOSITORY
from .product_image import product_image

pytestmark = pytest.mark.cluster

OTHER = "ce48969398f05f33946d560708be108a"
CARDS = [
    FpgaSpec(bdf="0000:63:00.0", interface=INTERFACE, afus=[NLB0]),
    FpgaSpec(bdf="0000:67:00.0", interface=OTHER, afus=[NLB0]),
]
OTHER_REGION = f"fpga.intel.com/{region_type(OTHER)}"
OTHER_NLB3 = "fpga.intel.com/arria10.dcp1.0-nlb3-orchestrated"
# The pair of a ConfigMap after the pair of the webhook, and the first one for a container without a function.
SECOND = {"FPGA_REGIONS": "2", "FPGA_REGION_2": OTHER, "FPGA_AFU_2": NLB3}
FIRST = {"FPGA_REGIONS": "1", "FPGA_REGION_1": INTERFACE, "FPGA_AFU_1": NLB3}


@pytest.fixture(scope="module")
def fpga(cluster_is_possible: None) -> Iterator[Fpga]:
    """A node with two cards of different regions in mode region. Both bitstreams are installed for both."""
    with running_cluster(plan("node-1", NodeSpec(fpgas=CARDS))) as cluster, cluster.namespace(TEAM):
        cluster.import_image(product_image())
        instance = Fpga(cluster, cluster.nodes["node-1"], CARDS[0], PORT)
        objects = render(REPOSITORY / "deploy/fpga_plugin/overlays/region")
        installation = Installation("intelfpgaplugin-system", "intel-fpga-plugin", objects)
        Fpgas(cluster, [instance]).install(installation, {"node-1": [REGION, OTHER_REGION]})
        for interface in (INTERFACE, OTHER):
            instance.install(NLB3, interface)
        yield instance


@pytest.fixture
def ports(fpga: Fpga) -> dict[str, str]:
    """The path of the AFU ID of each region's port, which has NLB0."""
    names = {INTERFACE: "dfl-port.0", OTHER: "dfl-port.1"}
    for interface, name in names.items():
        path = fpga.write("/root/bitstream.gbs", bitstream(NLB0, interface))
        fpga.tool("-b", path, "-d", name, "pr")
    found = fpga.node.run("sh", "-c", "ls -d /sys/class/fpga_region/*/dfl-port.*").stdout.split()
    return {interface: f"{path}/afu_id" for interface, name in names.items() for path in found if path.endswith(name)}


def afus(fpga: Fpga, ports: dict[str, str]) -> list[str]:
    return [kernel_of(fpga.node).read(path).strip() for path in ports.values()]


def with_variables(fpga: Fpga, manifest: dict[str, Any], variables: dict[str, str]) -> None:
    """Creates the pod with these variables by envFrom."""
    name = manifest["metadata"]["name"]
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": TEAM}, "data": variables}
    manifest["spec"]["containers"][0]["envFrom"] = [{"configMapRef": {"name": name}}]
    fpga.cluster.apply(config, manifest)


@pytest.mark.parametrize("privileged", [False, True], ids=["usual", "privileged"])
def test_variables_of_env_from_program_neither_another_port_nor_another_function(
    fpga: Fpga, ports: dict[str, str], privileged: bool
) -> None:
    name = "second-privileged" if privileged else "second"
    attacker = requesting_pod(name, ORCHESTRATED[NLB3], securityContext={"privileged": privileged})
    with_variables(fpga, attacker, SECOND)
    fpga.expect_start_error(name, "AFUs requested: 2 (up to FPGA_REGION_2), granted by the FPGA admission webhook: 1")
    assert afus(fpga, ports) == [NLB0, NLB0]


def test_a_region_without_a_function_is_not_programmed_by_variables_of_env_from(
    fpga: Fpga, ports: dict[str, str]
) -> None:
    with_variables(fpga, requesting_pod("first", REGION), FIRST)
    fpga.expect_start_error(
        "first", "AFUs requested: 1 (up to FPGA_REGION_1), granted by the FPGA admission webhook: 0"
    )
    assert afus(fpga, ports) == [NLB0, NLB0]


def test_a_privileged_container_gets_only_its_allocated_port_programmed(fpga: Fpga, ports: dict[str, str]) -> None:
    fpga.cluster.apply(requesting_pod("all", OTHER_NLB3, "sh", "-c", NODES, securityContext={"privileged": True}))
    assert {"/dev/dfl-port.0", "/dev/dfl-port.1"} <= set(fpga.output_of("all"))
    assert afus(fpga, ports) == [NLB0, NLB3]


def test_a_pod_without_review_gets_only_its_allocated_port_programmed(fpga: Fpga, ports: dict[str, str]) -> None:
    """All variables are of the pod's author, as if the webhook were absent, and the container has all devices."""
    configuration = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    found: Any = fpga.cluster.get(configuration)
    saved = [each for each in found["items"] if "fpga" in each["metadata"]["name"]]
    for each in saved:
        fpga.cluster.kubectl("delete", "mutatingwebhookconfiguration", each["metadata"]["name"])
    attacker = requesting_pod("unreviewed", REGION, securityContext={"privileged": True})
    variables = {"FPGA_REGIONS": "1", "FPGA_REGION_1": OTHER, "FPGA_AFU_1": NLB3}
    attacker["spec"]["containers"][0]["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    fpga.cluster.apply(attacker)
    fpga.expect_start_error("unreviewed", f"FPGA_REGION_1: found no port of region {OTHER} in the container")
    assert afus(fpga, ports) == [NLB0, NLB0]
