"""FPGAs from a pod's wish to the function in the region: webhook, plugin, kubelet, containerd with CDI, hook, card.

All of it is what users deploy (`kubectl apply -k deploy/fpga_plugin/overlays/region`, the example mappings) but for the
card, which is an emulated kernel's. Only processes that run under `simulate.seccomp` can reach that one, so on this
node a script stands in front of the hook and starts it there.
"""

from __future__ import annotations

import errno
import http
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bitstreams import INTERFACE, NLB0, NLB3, gbs, metadata

from accelplane.fpga.ids import af_type, region_type
from accelplane.plugins.fpga.scan import HOOK
from accelplane.simulate import NodeSpec
from accelplane.simulate.offload import FpgaSpec

from .build import ClusterError
from .cluster import Cluster, Node, NodePlan
from .conftest import running_cluster
from .emulated import IOCTLS, emulated, kernel_of, supervised
from .machine import REPOSITORY, wait_until
from .objects import Object, pod
from .product_image import product_image

pytestmark = pytest.mark.cluster

SYSTEM = "intelfpgaplugin-system"
TREE = REPOSITORY / "deploy/fpga_plugin/overlays/region"
MAPPINGS = REPOSITORY / "deploy/fpga_admissionwebhook/mappings-collection.yaml"
PLUGIN_IMAGE = "accelplane/intel-fpga-plugin:devel"
TEAM = "team"

CARD = "0000:63:00.0"
PORT = "/sys/class/fpga_region/region0/dfl-port.0"
NODES = "find /dev -name 'dfl-*' | sort"
SOFTWARE = Path(HOOK).parent
# Where the node keeps the hook that the init container has installed.
GENUINE = SOFTWARE / "genuine"
STORE = Path("/srv/intel.com/fpga") / INTERFACE

REGION = f"fpga.intel.com/{region_type(INTERFACE)}"
WITH = {afu: f"fpga.intel.com/{af_type(INTERFACE, afu)}" for afu in (NLB0, NLB3)}
# Names from the example mappings.
CARDS = "fpga.intel.com/arria10.dcp1.2"
ORCHESTRATED = {NLB0: f"{CARDS}-nlb0-orchestrated", NLB3: f"{CARDS}-nlb3-orchestrated"}
PREPROGRAMMED = {NLB0: f"{CARDS}-nlb0-preprogrammed", NLB3: f"{CARDS}-nlb3-preprogrammed"}


class Fpga:
    """The cluster with the card, and what users and administrators do there."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.node: Node = cluster.nodes["node-1"]

    # The cluster

    def deploy(self) -> None:
        """What docs/accelerators.md and docs/fpga-webhook.md say, and the script in front of the hook."""
        self.cluster.kubectl("apply", "--kustomize", TREE)
        self.cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        self.cluster.kubectl("apply", f"--namespace={TEAM}", "--filename", MAPPINGS)
        self.wait_offered(REGION)
        self.node.run("mkdir", GENUINE)
        self.node.run("mv", HOOK, GENUINE)
        words = " ".join(f"'{word}'" for word in supervised(GENUINE / Path(HOOK).name))
        script = self.node.path(HOOK)
        script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        script.chmod(0o755)
        wait_until(self._asked, "the webhook: asked about pods", 60, hint=f"see kubectl describe pods -n {SYSTEM}")

    def _asked(self) -> bool:
        status, answer = self.cluster.request(
            "POST", f"/api/v1/namespaces/{TEAM}/pods?dryRun=All", asking("asked", ORCHESTRATED[NLB0])
        )
        assert status == http.HTTPStatus.CREATED, answer
        return REGION in answer["spec"]["containers"][0]["resources"]["limits"]

    def wait_offered(self, *resources: str) -> None:
        """Until the node has one of each of these to give, and no other of FPGAs."""

        def so() -> bool:
            found = self.cluster.get(f"/api/v1/nodes/{self.node.name}") or {"status": {}}
            amounts = found["status"].get("allocatable", {})
            now = {name: amount for name, amount in amounts.items() if name.startswith("fpga.intel.com/")}
            return {name: amount for name, amount in now.items() if amount != "0"} == dict.fromkeys(resources, "1")

        try:
            wait_until(so, f"to give: {', '.join(resources)}", 90)
        except ClusterError as error:
            told = self.cluster.kubectl("describe", "pods", f"--namespace={SYSTEM}", check=False)
            logs = self.cluster.kubectl(
                "logs", f"--namespace={SYSTEM}", "--selector=app=intel-fpga-plugin", "--all-containers", check=False
            )
            raise ClusterError(f"{error}\n{told}\n{logs}") from None

    @contextmanager
    def mode(self, mode: str, *resources: str) -> Iterator[None]:
        """What the administrator has written at the node."""
        annotation = "fpga.intel.com/device-plugin-mode"
        self.cluster.kubectl("annotate", "node", self.node.name, f"{annotation}={mode}")
        try:
            self.wait_offered(*resources)
            yield
        finally:
            self.cluster.kubectl("annotate", "node", self.node.name, f"{annotation}-")
        self.wait_offered(REGION)

    # The node

    def tool(self, *words: str | Path, text: str = "") -> str:
        """What the tool on the host says."""
        return self.node.run(*supervised(SOFTWARE / "fpga_tool", *words), text=text).stdout

    def write(self, path: str | Path, content: bytes) -> Path:
        target = self.node.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return Path(path)

    def install(self, afu: str) -> None:
        """The bitstream is in the host's store."""
        path = self.write("/root/bitstream.gbs", bitstream(afu))
        self.tool("-b", path, "-force", "install")

    def program(self, afu: str) -> None:
        """The administrator programs the card."""
        self.tool("-b", self.write("/root/bitstream.gbs", bitstream(afu)), "-d", "dfl-port.0", "pr")
        assert self.afu == afu

    @contextmanager
    def tool_running(self, *words: str | Path) -> Iterator[subprocess.Popen[bytes]]:
        """Meanwhile the tool runs on the host."""
        command = self.node.enter(supervised(SOFTWARE / "fpga_tool", *words))
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=self.node.environment()) as process:
            try:
                yield process
            finally:
                process.kill()

    def card(self, **what: object) -> None:
        """What becomes of attempts to program the card."""
        kernel_of(self.node).do("fpga", bdf=CARD, **what)

    def is_busy(self) -> bool:
        try:
            return not self.afu
        except OSError as error:
            return error.errno == errno.EBUSY

    def hook_runs(self) -> bool:
        """Whether a hook of a container, in the node's namespaces, is there; it may wait."""
        return bool(self.node.run("pgrep", "-f", f"^{GENUINE}", check=False).stdout)

    def empty_the_store(self) -> None:
        self.node.run("rm", "-rf", STORE)

    @property
    def afu(self) -> str:
        return kernel_of(self.node).read(f"{PORT}/afu_id").strip()

    # Pods

    def ran(self, name: str) -> list[str]:
        """What the pod, which has come to its end, has printed."""
        self.cluster.wait_pod(name, "Succeeded", namespace=TEAM, timeout=90)
        return self.cluster.kubectl("logs", name, f"--namespace={TEAM}").split()

    def refused(self, name: str, words: str) -> None:
        """The container was not started, and users are told why."""
        seen = self.cluster.wait_pod(name, "Failed", namespace=TEAM, timeout=90)
        (status,) = seen["status"]["containerStatuses"]
        assert status["state"]["terminated"]["reason"] == "StartError", status
        self.wait_told(name, words)

    def wait_told(self, name: str, words: str) -> None:
        """Until the pod's events say so in the hook's name."""
        wanted = f"stderr: intel-fpga-crihook: {words}"
        told = ""

        def said() -> bool:
            nonlocal told
            told = self.cluster.kubectl("describe", "pod", name, f"--namespace={TEAM}")
            _before, heading, events = told.partition("\nEvents:")
            return bool(heading) and wanted in events

        try:
            wait_until(said, f"events of {name} with: {wanted}", 60)
        except ClusterError as error:
            raise AssertionError(f"{error}\n{told}") from None


def bitstream(afu: str, interface: str = INTERFACE) -> bytes:
    return gbs(metadata(interface, afu), bytes.fromhex(afu) + b"and the rest")


def asking(name: str, resource: str, *command: str, **more: Any) -> Object:
    """A pod that asks for one, and tells what it is given."""
    words = command or ("sh", "-c", f"cat {PORT}/afu_id; {NODES}")
    return pod(name, *words, namespace=TEAM, resources={resource: "1"}, **more)


@pytest.fixture(scope="module")
def fpga(cluster_is_possible: None) -> Iterator[Fpga]:
    """A node with one card, programmed with NLB0, in mode region; nothing is in its store."""
    card = NodeSpec(fpgas=[FpgaSpec(bdf=CARD, interface=INTERFACE, afus=[NLB0])])
    plan = NodePlan(hardware=[emulated(card, openable=False)], kubelet={"nodeStatusUpdateFrequency": "200ms"})
    with running_cluster(plan) as cluster, cluster.namespace(TEAM):
        cluster.import_image(product_image())
        made = Fpga(cluster)
        made.deploy()
        yield made


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


OTHER = "ce48969398f05f33946d560708be108a"
WRONG = {
    "missing": (None, f"no bitstream for AFU {NLB0} in region {INTERFACE}: neither {STORE}/{NLB0}.gbs nor"),
    "renamed": (bitstream(NLB3), f"{STORE}/{NLB0}.gbs: is the bitstream of {NLB3} by its content, expected {NLB0};"),
    "other-card": (
        bitstream(NLB0, OTHER),
        f"{STORE}/{NLB0}.gbs: made for regions with interface id {OTHER}, that of dfl-port.0 is {INTERFACE}",
    ),
    "torn": (bitstream(NLB0)[:40], f"{STORE}/{NLB0}.gbs: ends within its metadata, is the file complete?"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_without_the_right_bitstream_the_container_does_not_start(fpga: Fpga, wrong: str) -> None:
    content, told = WRONG[wrong]
    fpga.program(NLB3)
    fpga.empty_the_store()
    if content is not None:
        fpga.write(STORE / f"{NLB0}.gbs", content)
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
