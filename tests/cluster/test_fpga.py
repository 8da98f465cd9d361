"""FPGAs from a pod's wish to the function in the region: webhook, plugin, kubelet, containerd with CDI, hook, card.

All of it is what users deploy but for the cards, which are an emulated kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from bitstreams import INTERFACE, NLB0, NLB3
from manifests import render

from accelplane.simulate import NodeSpec
from accelplane.simulate.offload import FpgaSpec

from .conftest import running_cluster
from .emulated import IOCTLS
from .fpgas import (
    CARDS,
    ORCHESTRATED,
    PORT,
    PREPROGRAMMED,
    REGION,
    SOFTWARE,
    STORE,
    TEAM,
    WITH,
    Fpga,
    Fpgas,
    Installation,
    asking,
    bitstream,
    plan,
)
from .machine import REPOSITORY, wait_until
from .product_image import product_image

pytestmark = pytest.mark.cluster

TREE = REPOSITORY / "deploy/fpga_plugin/overlays/region"
PLUGIN_IMAGE = "accelplane/intel-fpga-plugin:devel"

DFL = FpgaSpec(bdf="0000:63:00.0", interface=INTERFACE, afus=[NLB0])


@cache
def documented() -> Installation:
    """What docs/accelerators.md and docs/fpga-webhook.md say."""
    return Installation("intelfpgaplugin-system", "intel-fpga-plugin", render(TREE))


@pytest.fixture(scope="module")
def fpgas(cluster_is_possible: None) -> Iterator[Fpgas]:
    """A node with a card that is programmed with NLB0; nothing is in its store."""
    with running_cluster(plan("node-1", NodeSpec(fpgas=[DFL]))) as cluster, cluster.namespace(TEAM):
        cluster.import_image(product_image())
        yield Fpgas(cluster, [Fpga(cluster, cluster.nodes["node-1"], DFL, PORT)])


@pytest.fixture
def fpga(fpgas: Fpgas) -> Fpga:
    """The node, in mode region."""
    (node,) = fpgas.nodes
    fpgas.install(documented(), {node: [REGION]})
    return node


def test_the_function_that_a_pod_asks_for_by_name_is_programmed_before_it_starts(fpga: Fpga) -> None:
    fpga.program(NLB0)
    fpga.install(NLB3)
    fpga.cluster.apply(asking("programmed", ORCHESTRATED[NLB3]))
    assert fpga.ran("programmed") == [NLB3, "/dev/dfl-port.0"]
    assert fpga.afu == NLB3


def test_a_function_that_is_in_the_region_already_needs_no_bitstream(fpga: Fpga) -> None:
    fpga.program(NLB3)
    fpga.empty_the_store()
    fpga.cluster.apply(asking("there-already", ORCHESTRATED[NLB3]))
    assert fpga.ran("there-already") == [NLB3, "/dev/dfl-port.0"]


PLACE = STORE / INTERFACE / f"{NLB0}.gbs"
OTHER = "ce48969398f05f33946d560708be108a"
WRONG = {
    "missing": (None, f"no bitstream for AFU {NLB0} in region {INTERFACE}: neither {PLACE} nor"),
    "renamed": (
        bitstream(NLB3),
        f"{PLACE}: is the bitstream of {NLB3} by its content, expected {NLB0};",
    ),
    "other-card": (
        bitstream(NLB0, OTHER),
        f"{PLACE}: made for regions with interface id {OTHER}, that of dfl-port.0 is {INTERFACE}",
    ),
    "torn": (bitstream(NLB0)[:40], f"{PLACE}: ends within its metadata, is the file complete?"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_without_the_right_bitstream_the_container_does_not_start(fpga: Fpga, wrong: str) -> None:
    content, told = WRONG[wrong]
    fpga.program(NLB3)
    fpga.empty_the_store()
    if content is not None:
        fpga.write(PLACE, content)
    fpga.cluster.apply(asking(wrong, ORCHESTRATED[NLB0]))
    fpga.refused(wrong, f"FPGA_AFU_1 in dfl-port.0: {told}")
    assert fpga.afu == NLB3


def test_the_container_starts_once_the_bitstream_is_installed(fpga: Fpga) -> None:
    fpga.program(NLB0)
    fpga.empty_the_store()
    fpga.cluster.apply(asking("tries-again", ORCHESTRATED[NLB3], restart="OnFailure"))
    fpga.wait_told("tries-again", f"FPGA_AFU_1 in dfl-port.0: no bitstream for AFU {NLB3} in region {INTERFACE}")
    fpga.install(NLB3)
    assert fpga.ran("tries-again") == [NLB3, "/dev/dfl-port.0"]


def test_when_the_card_refuses_to_be_programmed_the_container_does_not_start(fpga: Fpga) -> None:
    fpga.program(NLB3)
    fpga.install(NLB0)
    fpga.card(outcomes=["EIO"])
    fpga.cluster.apply(asking("refused", ORCHESTRATED[NLB0]))
    fpga.refused("refused", "FPGA_AFU_1 in dfl-port.0: /dev/dfl-fme.0: programming failed: Input/output error (EIO)")
    # Nothing stays behind: the next one can have it.
    fpga.cluster.apply(asking("not-refused", ORCHESTRATED[NLB0]))
    assert fpga.ran("not-refused") == [NLB0, "/dev/dfl-port.0"]


def test_pods_that_race_for_a_region_have_it_one_after_the_other(fpga: Fpga) -> None:
    for afu in (NLB0, NLB3):
        fpga.install(afu)
    look = f"cat {PORT}/afu_id"
    looks = ("sh", "-c", f"{look}; sleep 1; {look}")
    racers = {"race-0": NLB0, "race-3": NLB3}
    fpga.cluster.apply(*(asking(name, ORCHESTRATED[afu], *looks) for name, afu in racers.items()))
    assert {name: fpga.ran(name) for name in racers} == {name: [afu, afu] for name, afu in racers.items()}


def test_a_hook_waits_for_whoever_programs_the_card(fpga: Fpga) -> None:
    fpga.program(NLB0)
    fpga.install(NLB3)
    fpga.card(outcomes=["hang"])
    path = fpga.write("/root/other.gbs", bitstream(NLB0))
    with fpga.tool_running("-b", path, "-d", "dfl-port.0", "pr") as tool:
        wait_until(fpga.is_busy, "the card: being programmed", 60)
        fpga.cluster.apply(asking("patient", ORCHESTRATED[NLB3]))
        wait_until(fpga.hook_runs, "the hook: running", 60)
        fpga.card(go_on=True)
        assert tool.wait(60) == 0
    assert fpga.ran("patient") == [NLB3, "/dev/dfl-port.0"]


def test_a_function_that_is_programmed_by_somebody_is_offered_in_place_of_the_other(fpga: Fpga) -> None:
    fpga.program(NLB0)
    with fpga.mode("af", WITH[NLB0]):
        fpga.program(NLB3)
        fpga.wait_offered(WITH[NLB3])
        fpga.cluster.apply(asking("preprogrammed", PREPROGRAMMED[NLB3]), asking("gone", PREPROGRAMMED[NLB0]))
        assert fpga.ran("preprogrammed") == [NLB3, "/dev/dfl-port.0"]
        # It waits until somebody programs that again.
        seen = fpga.cluster.pod("gone", TEAM)
        assert seen
        assert seen["status"]["phase"] == "Pending"
        fpga.program(NLB0)
        assert fpga.ran("gone") == [NLB0, "/dev/dfl-port.0"]
        fpga.wait_offered(WITH[NLB0])


# Supervision is for the emulated card's sake; the tool is the one that hosts have.
DEVELOPER = """
import pathlib, sys
from accelplane.simulate.seccomp import run
afu = pathlib.Path(sys.argv[1])
print(*sorted(pathlib.Path("/dev").glob("dfl-*")), afu.read_text(), flush=True)
status = run(sys.argv[3:], sys.argv[2])
print(afu.read_text())
sys.exit(status)
"""


def test_a_pod_programs_its_region_itself(fpga: Fpga) -> None:
    fpga.program(NLB0)
    path = fpga.write("/opt/team/nlb3.gbs", bitstream(NLB3))
    tool = (str(SOFTWARE / "fpga_tool"), "-b", str(path), "-d", "dfl-port.0", "-q", "pr")
    more: dict[str, Any] = {
        "image": PLUGIN_IMAGE,
        "host_paths": (IOCTLS, str(SOFTWARE), str(path.parent)),
        "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}},
    }
    with fpga.mode("regiondevel", REGION):
        words = ("python3.11", "-c", DEVELOPER, f"{PORT}/afu_id", IOCTLS, *tool)
        fpga.cluster.apply(asking("developer", CARDS, *words, **more))
        assert fpga.ran("developer") == ["/dev/dfl-fme.0", "/dev/dfl-port.0", NLB0, NLB3]
