"""FPGAs from the request of a pod to the programmed region: webhook, plugin, kubelet, containerd with CDI, hook, card.

All parts are those that users deploy, except for the cards, which are emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from bitstreams import INTERFACE, NLB0, NLB3
from manifests import own_image, render

from accelplane.fpga.ids import region_type
from accelplane.simulate import NodeSpec
from accelplane.simulate.offload import FpgaSpec

from . import originals
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
    bitstream,
    plan,
    requesting_pod,
)
from .machine import REPOSITORY, wait_until
from .objects import Object
from .product_image import product_image
from .settings import BUSYBOX_IMAGE

pytestmark = pytest.mark.cluster

DEMO_IMAGE = "intel/opae-nlb-demo:devel"
PLUGIN_IMAGE = own_image("intel-fpga-plugin")

DFL = FpgaSpec(bdf="0000:63:00.0", interface=INTERFACE, afus=[NLB0])
# The mapping of the other driver, after the first one there is a second region.
D5005 = "bfac4d851ee856fe8c95865ce1bbaa2d"
OTHER = "ce48969398f05f33946d560708be108a"
OPAE = FpgaSpec(driver="opae", bdf="0000:63:00.0", interface=D5005, afus=[NLB0, NLB0])
SECOND = FpgaSpec(driver="opae", bdf="0000:67:00.0", interface=OTHER, afus=[NLB3])
OPAE_PORTS = [
    "/sys/class/fpga/intel-fpga-dev.0/intel-fpga-port.0",
    "/sys/class/fpga/intel-fpga-dev.0/intel-fpga-port.1",
    "/sys/class/fpga/intel-fpga-dev.1/intel-fpga-port.2",
]
OFFERED = {"node-1": [REGION], "node-2": [f"fpga.intel.com/{region_type(each)}" for each in (D5005, OTHER)]}


@pytest.fixture(scope="module")
def fpgas(cluster_is_possible: None) -> Iterator[Fpgas]:
    """A node for each driver, with cards programmed with NLB0 and empty bitstream stores."""
    plans = plan("node-1", NodeSpec(fpgas=[DFL])), plan("node-2", NodeSpec(fpgas=[OPAE, SECOND]))
    with running_cluster(*plans) as cluster, cluster.namespace(TEAM):
        cluster.import_image(product_image())
        nodes = [
            Fpga(cluster, cluster.nodes["node-1"], DFL, PORT),
            Fpga(cluster, cluster.nodes["node-2"], OPAE, OPAE_PORTS[0]),
        ]
        yield Fpgas(cluster, nodes)


@pytest.fixture
def deployed(fpgas: Fpgas, request: pytest.FixtureRequest) -> Fpgas:
    """The installation of docs/accelerators.md and docs/fpga-webhook.md, in mode region."""
    if getattr(request.node, "execution_count", 1) > 1:  # a rerun: the pods of the failed run exist
        fpgas.delete_pods()
    objects = render(REPOSITORY / "deploy/fpga_plugin/overlays/region")
    fpgas.install(Installation("intelfpgaplugin-system", "intel-fpga-plugin", objects), OFFERED)
    return fpgas


@pytest.fixture
def fpga(deployed: Fpgas) -> Fpga:
    """The node of the kernel's own driver."""
    return deployed.nodes[0]


@pytest.fixture
def opae(deployed: Fpgas) -> Fpga:
    """The node of the other driver."""
    return deployed.nodes[1]


def test_the_requested_function_is_programmed_before_the_pod_starts(fpga: Fpga) -> None:
    fpga.program(NLB0)
    fpga.install(NLB3)
    fpga.cluster.apply(requesting_pod("programmed", ORCHESTRATED[NLB3]))
    assert fpga.output_of("programmed") == [NLB3, "/dev/dfl-port.0"]
    assert fpga.afu == NLB3


def test_a_function_that_is_in_the_region_already_needs_no_bitstream(fpga: Fpga) -> None:
    fpga.program(NLB3)
    fpga.clear_store()
    fpga.cluster.apply(requesting_pod("there-already", ORCHESTRATED[NLB3]))
    assert fpga.output_of("there-already") == [NLB3, "/dev/dfl-port.0"]


PLACE = STORE / INTERFACE / f"{NLB0}.gbs"
WRONG = {
    "missing": (None, f"no bitstream for AFU {NLB0} in region {INTERFACE}: found neither {PLACE} nor"),
    "renamed": (
        bitstream(NLB3),
        f"{PLACE}: found id {NLB3} in the file, expected {NLB0};",
    ),
    "other-card": (
        bitstream(NLB0, OTHER),
        f"{PLACE}: made for regions with interface id {OTHER}, that of dfl-port.0 is {INTERFACE}",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_without_the_right_bitstream_the_container_does_not_start(fpga: Fpga, wrong: str) -> None:
    content, message = WRONG[wrong]
    fpga.program(NLB3)
    fpga.clear_store()
    if content is not None:
        fpga.write(PLACE, content)
    fpga.cluster.apply(requesting_pod(wrong, ORCHESTRATED[NLB0]))
    fpga.expect_start_error(wrong, f"FPGA_AFU_1 in dfl-port.0: {message}")
    assert fpga.afu == NLB3


def test_the_container_starts_once_the_bitstream_is_installed(fpga: Fpga) -> None:
    fpga.program(NLB0)
    fpga.clear_store()
    fpga.cluster.apply(requesting_pod("tries-again", ORCHESTRATED[NLB3], restart="OnFailure"))
    fpga.wait_for_event("tries-again", f"FPGA_AFU_1 in dfl-port.0: no bitstream for AFU {NLB3} in region {INTERFACE}")
    fpga.install(NLB3)
    assert fpga.output_of("tries-again") == [NLB3, "/dev/dfl-port.0"]


def test_a_failed_programming_prevents_the_container_start(fpga: Fpga) -> None:
    fpga.program(NLB3)
    fpga.install(NLB0)
    # The region is then programmed half way.
    fpga.card(outcomes=["half"])
    fpga.cluster.apply(requesting_pod("refused", ORCHESTRATED[NLB0]))
    fpga.expect_start_error(
        "refused", "FPGA_AFU_1 in dfl-port.0: /dev/dfl-fme.0: programming failed: Input/output error (EIO)"
    )
    # Nothing remains: the next pod can get the region.
    fpga.cluster.apply(requesting_pod("not-refused", ORCHESTRATED[NLB0]))
    assert fpga.output_of("not-refused") == [NLB0, "/dev/dfl-port.0"]


def test_a_crashed_card_is_not_allocatable_until_it_recovers(fpga: Fpga) -> None:
    fpga.program(NLB3)
    fpga.install(NLB0)
    fpga.card(outcomes=["crash"])
    fpga.cluster.apply(requesting_pod("crashed", ORCHESTRATED[NLB0]))
    fpga.expect_start_error(
        "crashed", "FPGA_AFU_1 in dfl-port.0: /dev/dfl-fme.0: programming failed: Input/output error (EIO)"
    )
    fpga.wait_for_allocatable()
    fpga.cluster.apply(requesting_pod("waits", ORCHESTRATED[NLB3]))
    fpga.install(NLB3)
    fpga.power_cycle()
    assert fpga.output_of("waits") == [NLB3, "/dev/dfl-port.0"]
    fpga.wait_for_allocatable(REGION)


def test_the_wait_for_a_driver_that_does_not_answer_is_limited(fpga: Fpga) -> None:
    fpga.program(NLB0)
    fpga.install(NLB3)
    fpga.card(outcomes=["hang"])
    with fpga.hook_flags("-timeout=3"):
        fpga.cluster.apply(requesting_pod("hanging", ORCHESTRATED[NLB3]))
        fpga.expect_start_error(
            "hanging",
            "FPGA_AFU_1 in dfl-port.0: programming for this container took more than 3 s; check the kernel log",
        )
    fpga.card(resume=True)
    wait_until(lambda: not fpga.is_busy(), "the card: done", 60)


def test_init_containers_have_their_functions_before_the_others(fpga: Fpga) -> None:
    fpga.program(NLB3)
    for afu in (NLB0, NLB3):
        fpga.install(afu)
    manifest = requesting_pod("in-turn", ORCHESTRATED[NLB3])
    (first,) = requesting_pod("first", ORCHESTRATED[NLB0])["spec"]["containers"]
    manifest["spec"]["initContainers"] = [{**first, "name": "first"}]
    fpga.cluster.apply(manifest)
    assert fpga.output_of("in-turn") == [NLB0, "/dev/dfl-port.0", NLB3, "/dev/dfl-port.0"]


def test_a_container_has_functions_in_the_regions_of_two_cards_of_the_other_driver(opae: Fpga) -> None:
    opae.install(NLB3)
    opae.install(NLB0, OTHER)
    look = f"cat {' '.join(f'{port}/afu_id' for port in OPAE_PORTS)}; find /dev -name 'intel-fpga-*' | sort"
    manifest = requesting_pod("both", "fpga.intel.com/d5005-nlb3-orchestrated", "sh", "-c", look)
    (container,) = manifest["spec"]["containers"]
    container["resources"]["limits"]["fpga.intel.com/arria10.dcp1.0-nlb0-orchestrated"] = "1"
    opae.cluster.apply(manifest)
    # The first card has another port, which was not requested.
    ports = [f"/dev/intel-fpga-port.{number}" for number in range(3)]
    assert opae.output_of("both") == [NLB3, NLB0, NLB0, *ports]


def test_concurrent_pods_get_a_region_one_after_the_other(fpga: Fpga) -> None:
    for afu in (NLB0, NLB3):
        fpga.install(afu)
    look = f"cat {PORT}/afu_id"
    looks = ("sh", "-c", f"{look}; sleep 1; {look}")
    racers = {"race-0": NLB0, "race-3": NLB3}
    fpga.cluster.apply(*(requesting_pod(name, ORCHESTRATED[afu], *looks) for name, afu in racers.items()))
    assert {name: fpga.output_of(name) for name in racers} == {name: [afu, afu] for name, afu in racers.items()}


def test_a_hook_waits_for_the_process_that_programs_the_card(fpga: Fpga) -> None:
    fpga.program(NLB0)
    fpga.install(NLB3)
    fpga.card(outcomes=["hang"])
    path = fpga.write("/root/other.gbs", bitstream(NLB0))
    with fpga.tool_running("-b", path, "-d", "dfl-port.0", "pr") as tool:
        wait_until(fpga.is_busy, "the card: being programmed", 60)
        fpga.cluster.apply(requesting_pod("patient", ORCHESTRATED[NLB3]))
        wait_until(fpga.is_hook_running, "the hook: running", 60)
        fpga.card(resume=True)
        assert tool.wait(60) == 0
    assert fpga.output_of("patient") == [NLB3, "/dev/dfl-port.0"]


def test_a_newly_programmed_function_replaces_the_former_resource(fpga: Fpga) -> None:
    fpga.program(NLB0)
    with fpga.mode("af", WITH[NLB0]):
        fpga.program(NLB3)
        fpga.wait_for_allocatable(WITH[NLB3])
        fpga.cluster.apply(
            requesting_pod("preprogrammed", PREPROGRAMMED[NLB3]), requesting_pod("gone", PREPROGRAMMED[NLB0])
        )
        assert fpga.output_of("preprogrammed") == [NLB3, "/dev/dfl-port.0"]
        # The pod waits until the region is programmed again.
        pod = fpga.cluster.pod("gone", TEAM)
        assert pod
        assert pod["status"]["phase"] == "Pending"
        fpga.program(NLB0)
        assert fpga.output_of("gone") == [NLB0, "/dev/dfl-port.0"]
        fpga.wait_for_allocatable(WITH[NLB0])


# The supervisor is needed for the emulated card. The tool is that of the host.
DEVELOPER = """
import pathlib, sys
import accelplane.simulate
accelplane.simulate.__path__.append(sys.argv.pop(1))  # images have no emulated kernel
from accelplane.simulate.seccomp import run
afu = pathlib.Path(sys.argv[1])
print(*sorted(pathlib.Path("/dev").glob("dfl-*")), afu.read_text(), flush=True)
status = run(sys.argv[3:], sys.argv[2])
print(afu.read_text())
sys.exit(status)
"""


def developer(fpga: Fpga) -> Object:
    """A pod that programs NLB3 into its region with the tool from the host."""
    path = fpga.write("/opt/team/nlb3.gbs", bitstream(NLB3))
    simulate = fpga.copy(REPOSITORY / "src/accelplane/simulate", "/opt/simulate")
    tool = (str(SOFTWARE / "fpga_tool"), "-b", str(path), "-d", "dfl-port.0", "-q", "pr")
    more: dict[str, Any] = {
        "image": PLUGIN_IMAGE,
        "host_paths": (IOCTLS, str(SOFTWARE), str(path.parent), simulate),
        "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}},
    }
    words = ("python3.11", "-c", DEVELOPER, simulate, f"{PORT}/afu_id", IOCTLS, *tool)
    return requesting_pod("developer", CARDS, *words, **more)


def test_a_pod_programs_its_region_itself(fpga: Fpga) -> None:
    fpga.program(NLB0)
    with fpga.mode("regiondevel", REGION):
        fpga.cluster.apply(developer(fpga))
        assert fpga.output_of("developer") == ["/dev/dfl-fme.0", "/dev/dfl-port.0", NLB0, NLB3]


def test_the_operator_serves_the_webhook_and_runs_the_plugin_while_a_resource_exists(fpgas: Fpgas) -> None:
    fpga, opae = fpgas.nodes
    fpga.cluster.kubectl("label", "node", "node-1", "intel.feature.node.kubernetes.io/fpga-arria10=true")
    objects = render(REPOSITORY / "deploy/operator/default")
    fpgas.install(Installation("inteldeviceplugins-system", "intel-fpga-plugin", objects), {})
    sample = REPOSITORY / "deploy/operator/samples/deviceplugin_v1_fpgadeviceplugin.yaml"
    fpga.cluster.kubectl("apply", "--filename", sample)
    fpga.wait_for_allocatable(REGION)
    fpga.wrap_hook()
    fpga.program(NLB0)
    fpga.install(NLB3)
    fpga.cluster.apply(requesting_pod("operated", ORCHESTRATED[NLB3]))
    assert fpga.output_of("operated") == [NLB3, "/dev/dfl-port.0"]
    # Labels select the nodes with such cards.
    opae.wait_for_allocatable()

    fpga.cluster.kubectl("delete", "--filename", sample)
    fpga.wait_for_allocatable()
    path = "/apis/apps/v1/namespaces/inteldeviceplugins-system/daemonsets"
    assert (fpga.cluster.get(path) or {})["items"] == []


# It is in the namespace of our own tree, whose deletion takes time. The operator was installed meanwhile.
def test_pods_get_their_functions_with_the_manifests_of_the_original(fpgas: Fpgas) -> None:
    fpga = fpgas.nodes[0]
    installations = {
        mode: Installation(originals.NAMESPACE, "intel-fpga-plugin", originals.fpga_originals(fpgas.cluster, mode))
        for mode in ("af", "region")
    }
    fpgas.install(installations["af"], {"node-1": [WITH[fpga.afu]]})
    fpga.program(NLB0)
    fpga.cluster.apply(requesting_pod("original-af", PREPROGRAMMED[NLB0]))
    assert fpga.output_of("original-af") == [NLB0, "/dev/dfl-port.0"]
    # As an administrator replaces one overlay by the other.
    fpgas.apply(installations["region"], OFFERED)
    fpga.install(NLB3)
    fpga.node.run("ctr", "--namespace=k8s.io", "images", "tag", "--force", BUSYBOX_IMAGE, f"docker.io/{DEMO_IMAGE}")
    fpga.cluster.apply(demo())
    fpga.output_of("test-fpga-orchestrated")
    assert fpga.afu == NLB3
    # The memory limit of the manifest is sufficient.
    webhook = f"/api/v1/namespaces/{originals.NAMESPACE}/pods?labelSelector=control-plane%3Dcontroller-manager"
    (pod,) = (fpga.cluster.get(webhook) or {"items": ()})["items"]
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def demo() -> Object:
    """The demo without huge pages, which the nodes of the tests do not have, in the team's namespace."""
    document = yaml.safe_load((REPOSITORY / "demo/test-fpga-orchestrated.yaml").read_text())
    document["metadata"]["namespace"] = TEAM
    (container,) = document["spec"]["containers"]
    assert container["image"] == DEMO_IMAGE
    del container["resources"]["limits"]["hugepages-2Mi"]
    return document
