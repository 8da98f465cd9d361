"""FPGAs from a pod's wish to the function in the region: webhook, plugin, kubelet, containerd with CDI, hook, card.

All of it is what users deploy (`kubectl apply -k deploy/fpga_plugin/overlays/region`, the example mappings) but for the
card, which is an emulated kernel's. Only processes that run under `simulate.seccomp` can reach that one, so on this
node a script stands in front of the hook and starts it there.
"""

from __future__ import annotations

import http
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
from .emulated import emulated, kernel_of, supervised
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
        self.wait_offered(*resources)
        yield
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

    def refused(self, name: str, *words: str) -> None:
        """The container was not started, and users are told why."""
        seen = self.cluster.wait_pod(name, "Failed", namespace=TEAM, timeout=90)
        (status,) = seen["status"]["containerStatuses"]
        assert status["state"]["terminated"]["reason"] == "StartError", status
        wanted = f"stderr: intel-fpga-crihook: {' '.join(words)}"
        told = ""

        def said() -> bool:
            nonlocal told
            told = self.cluster.kubectl("describe", "pod", name, f"--namespace={TEAM}")
            _before, heading, events = told.partition("\nEvents:")
            return bool(heading) and wanted in events

        try:
            wait_until(said, f"events of {name} with: {wanted}", 30)
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
