"""Pods that try to have the port of another pod programmed, or their own with a function that was not granted.

The runtimes are containerd, which starts the hook by CDI, and CRI-O, which starts it by hooks.d or by CDI. Each test
runs with each of them. Demos, as legitimate pods, run beside the attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml
from bitstreams import NLB0, NLB3
from manifests import render

from accelplane.fpga.ids import af_type
from accelplane.simulate import NodeSpec

from .conftest import running_cluster
from .crictl import require_crio
from .fpga_attacks import (
    ATTACKED,
    ATTACKED_CARDS,
    DEMO_IMAGE,
    FIRST,
    IMAGE,
    IMAGES,
    OTHER,
    PERMISSIVE,
    SECOND,
    Attack,
    install_losetup,
    with_permissive_handler,
)
from .fpgas import ORCHESTRATED, PORT, REGION, TEAM, WITH, Fpga, Fpgas, Installation, plan
from .machine import REPOSITORY
from .product_image import product_image
from .runtimes import CONTAINERD, Runtime, crio

pytestmark = [pytest.mark.cluster, pytest.mark.by_turns]

OTHER_NLB3 = "fpga.intel.com/arria10.dcp1.0-nlb3-orchestrated"
PRIVILEGED = {"securityContext": {"privileged": True}}


def _crio() -> Runtime:
    require_crio()
    return crio()


# The runtime, and the overlay whose plugin configures how it starts the hook.
WAYS: dict[str, tuple[Callable[[], Runtime], str]] = {
    "containerd-cdi": (lambda: CONTAINERD, "region"),
    "crio-hooks.d": (_crio, "region-hooks.d"),
    "crio-cdi": (_crio, "region"),
}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def attacked(cluster_is_possible: None, way: str) -> Iterator[Attack]:
    """A node with three cards in mode region, all bitstreams for them, and the victim."""
    runtime, overlay = WAYS[way]
    node = plan("node-1", NodeSpec(fpgas=ATTACKED_CARDS))
    node = replace(node, runtime=with_permissive_handler(runtime()), hardware=[*node.hardware, install_losetup])
    with running_cluster(node) as cluster, cluster.namespace(TEAM):
        cluster.import_image(product_image())
        fpga = Fpga(cluster, cluster.nodes["node-1"], ATTACKED_CARDS[0], PORT)
        objects = render(REPOSITORY / f"deploy/fpga_plugin/overlays/{overlay}")
        installation = Installation("intelfpgaplugin-system", "intel-fpga-plugin", objects)
        Fpgas(cluster, [fpga]).install(installation, {"node-1": ATTACKED})
        yield Attack(fpga)


@pytest.fixture
def attack(attacked: Attack) -> Iterator[Attack]:
    yield attacked
    attacked.reset()


def granted(requested: int, number: int) -> str:
    return (
        f"AFUs requested: {requested} (up to FPGA_REGION_{requested}), granted by the FPGA admission webhook: {number} "
    )


# Variables


@pytest.mark.parametrize("privileged", [{}, PRIVILEGED], ids=["usual", "privileged"])
@pytest.mark.parametrize("source", ["image", "envFrom"])
def test_a_second_pair_programs_neither_another_port_nor_another_function(
    attack: Attack, source: str, privileged: dict[str, Any]
) -> None:
    image = IMAGES["second"] if source == "image" else IMAGE
    manifest = attack.pod("second", ORCHESTRATED[NLB3], image=image, **privileged)
    if source == "envFrom":
        attack.with_env_from(manifest, SECOND)
    attack.cluster.apply(manifest)
    attack.expect_rejection("second", granted(2, 1))


@pytest.mark.parametrize("source", ["image", "envFrom"])
def test_a_region_without_a_function_is_not_programmed(attack: Attack, way: str, source: str) -> None:
    manifest = attack.pod("first", REGION, image=IMAGES["first"] if source == "image" else IMAGE)
    if source == "envFrom":
        attack.with_env_from(manifest, FIRST)
    attack.cluster.apply(manifest)
    # containerd keeps variables of the image for which the pod has another value.
    both = (way, source) == ("containerd-cdi", "image")
    words = "variable 'FPGA_REGIONS' is set to '1' and to '0'; expected one value" if both else granted(1, 0)
    attack.expect_rejection("first", words)


# Devices


def test_block_volumes_with_names_of_ports_are_not_programmed(attack: Attack) -> None:
    """They are at other paths, at that of the victim's port, and below a link of the image to /dev."""
    manifest = attack.pod("blocks", ORCHESTRATED[NLB3])
    paths = (f"/x/{attack.victim}", f"/dev/y/{attack.victim}", f"/y/{attack.own}", f"/dev/{attack.victim}")
    attack.with_block_volumes(manifest, *paths)
    attack.cluster.apply(manifest)
    assert attack.fpga.output_of("blocks") == [attack.own, NLB3]
    assert attack.programmed() == {attack.own: NLB3}


def test_block_volumes_do_not_count_as_ports_for_further_functions(attack: Attack) -> None:
    manifest = attack.pod("counted", REGION, FIRST | SECOND | {"FPGA_REGIONS": "2"})
    attack.with_block_volumes(manifest, f"/dev/{attack.victim}", f"/x/{attack.victim}")
    with attack.without_review():
        attack.cluster.apply(manifest)
    ports = f"FPGA ports of the container: 1 ({attack.own}); expected at least as many; allocated: {attack.own}"
    attack.expect_rejection("counted", f"AFUs requested: 2 (up to FPGA_REGION_2), {ports}")


def test_a_privileged_container_gets_only_its_allocated_port_programmed(attack: Attack) -> None:
    attack.cluster.apply(attack.pod("all", ORCHESTRATED[NLB3], **PRIVILEGED))
    assert {"dfl-port.0", "dfl-port.1", "dfl-port.2"} <= set(attack.fpga.output_of("all"))
    assert attack.programmed() == {attack.own: NLB3}


@pytest.mark.parametrize("handler", ["", PERMISSIVE], ids=["usual", "permissive"])
def test_a_pod_without_review_gets_no_other_port_by_annotations(attack: Attack, handler: str) -> None:
    """The container has all devices, and the handler of its runtime class copies its annotations."""
    variables = {"FPGA_REGIONS": "1", "FPGA_REGION_1": OTHER, "FPGA_AFU_1": NLB3}
    manifest = attack.pod("forged", REGION, variables, **PRIVILEGED)
    manifest["metadata"]["annotations"] = attack.forged_annotations("dfl-port.2")
    if handler:
        manifest["spec"]["runtimeClassName"] = handler
    with attack.without_review():
        attack.cluster.apply(manifest)
    attack.expect_rejection("forged", f"FPGA_REGION_1: found no port of region {OTHER} in the container")


@pytest.mark.parametrize("handler", ["", PERMISSIVE], ids=["usual", "permissive"])
def test_a_pod_without_a_request_gets_no_port_by_annotations(attack: Attack, way: str, handler: str) -> None:
    manifest = attack.pod("unallocated", variables=FIRST)
    manifest["metadata"]["annotations"] = attack.forged_annotations(attack.victim)
    if handler:
        manifest["spec"]["runtimeClassName"] = handler
    attack.cluster.apply(manifest)
    if way == "crio-hooks.d":
        attack.expect_rejection("unallocated", "no record of allocated ports: ")
        return
    # CRI-O adds the device for this handler, as its configuration permits. Its function is unchanged.
    added = [attack.victim, NLB0] if handler and way == "crio-cdi" else []
    assert attack.fpga.output_of("unallocated") == added
    assert attack.programmed() == {}


# Legitimate pods


def test_a_pod_with_another_runtime_class_gets_its_function(attack: Attack) -> None:
    manifest = attack.pod("classed", ORCHESTRATED[NLB3])
    manifest["spec"]["runtimeClassName"] = PERMISSIVE
    attack.cluster.apply(manifest)
    assert attack.fpga.output_of("classed") == [attack.own, NLB3]


def test_a_pod_with_functions_for_two_regions_gets_both(attack: Attack) -> None:
    manifest = attack.pod("both", ORCHESTRATED[NLB3])
    manifest["spec"]["containers"][0]["resources"]["limits"][OTHER_NLB3] = "1"
    attack.cluster.apply(manifest)
    assert attack.fpga.output_of("both") == [attack.own, NLB3, "dfl-port.2", NLB3]
    assert attack.programmed() == {attack.own: NLB3, "dfl-port.2": NLB3}


def demo(name: str) -> dict[str, Any]:
    """A demo of the original in the team's namespace, without huge pages, which the nodes of the tests do not have."""
    document = yaml.safe_load((REPOSITORY / f"demo/{name}.yaml").read_text())
    document["metadata"]["namespace"] = TEAM
    template = document["spec"].get("template", document)
    (container,) = template["spec"]["containers"]
    assert f"docker.io/{container['image']}" == DEMO_IMAGE
    del container["resources"]["limits"]["hugepages-2Mi"]
    return document


def test_the_demo_of_mode_region_gets_its_function(attack: Attack) -> None:
    attack.cluster.apply(demo("test-fpga-orchestrated"))
    assert attack.fpga.output_of("test-fpga-orchestrated") == [attack.own, NLB3]
    assert attack.programmed() == {attack.own: NLB3}


def test_the_demos_of_mode_af_get_the_port_with_their_function(attack: Attack) -> None:
    attack.program(attack.own, NLB3)
    with attack.fpga.mode("af", WITH[NLB0], WITH[NLB3], f"fpga.intel.com/{af_type(OTHER, NLB0)}"):
        attack.cluster.apply(demo("test-fpga-preprogrammed"), demo("intelfpga-job"))
        assert attack.fpga.output_of("test-fpga-preprogrammed") == [attack.own, NLB3]
        job = ("job/intelfpga-demo-job", f"--namespace={TEAM}")
        attack.cluster.kubectl("wait", "--for=condition=Complete", "--timeout=60s", *job)
        assert attack.cluster.kubectl("logs", *job).split() == [attack.victim, NLB0]
    assert attack.programmed() == {attack.own: NLB3}
