"""Nodes with FPGAs, and what users and administrators do there.

The cards are an emulated kernel's. Only processes that run under `simulate.seccomp` can reach that one, so on these
nodes a script stands in front of the hook and starts it there.
"""

from __future__ import annotations

import errno
import http
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bitstreams import INTERFACE, NLB0, NLB3, gbs, metadata

from accelplane.fpga.ids import af_type, region_type
from accelplane.plugins.fpga.scan import HOOK
from accelplane.simulate import NodeSpec
from accelplane.simulate.offload import FpgaSpec

from .build import ClusterError
from .cluster import Cluster, Node, NodePlan
from .emulated import emulated, kernel_of, supervised
from .machine import REPOSITORY, wait_until
from .objects import Object, pod

MAPPINGS = REPOSITORY / "deploy/fpga_admissionwebhook/mappings-collection.yaml"
TEAM = "team"

SOFTWARE = Path(HOOK).parent
# Where a node keeps the hook that the init container has installed, and what the script has it told.
_GENUINE = SOFTWARE / "genuine"
_FLAGS = Path("/run/fpga-hook-flags")

STORE = Path("/srv/intel.com/fpga")

PLUGIN_NAMESPACES = ("intelfpgaplugin-system", "inteldeviceplugins-system")
PORT = "/sys/class/fpga_region/region0/dfl-port.0"
NODES = "find /dev -name 'dfl-*' | sort"
REGION = f"fpga.intel.com/{region_type(INTERFACE)}"
WITH = {afu: f"fpga.intel.com/{af_type(INTERFACE, afu)}" for afu in (NLB0, NLB3)}
# Names from the example mappings.
CARDS = "fpga.intel.com/arria10.dcp1.2"
ORCHESTRATED = {NLB0: f"{CARDS}-nlb0-orchestrated", NLB3: f"{CARDS}-nlb3-orchestrated"}
PREPROGRAMMED = {NLB0: f"{CARDS}-nlb0-preprogrammed", NLB3: f"{CARDS}-nlb3-preprogrammed"}


class Installation(NamedTuple):
    """Something that brings plugin and webhook: what is applied, and what the plugin's pods are called by `app`."""

    namespace: str
    app: str
    objects: Sequence[Object]


class Fpgas:
    """The cluster, on which one installation is at a time."""

    def __init__(self, cluster: Cluster, nodes: Sequence[Fpga]) -> None:
        self.cluster = cluster
        self.nodes = nodes
        self.installed: Installation | None = None

    def install(self, wanted: Installation, offered: Mapping[str, Sequence[str]]) -> None:
        """What documents say, from nothing until pods can have what the nodes offer."""
        if self.installed == wanted:
            return
        self.uninstall()
        self.apply(wanted, offered)

    def apply(self, wanted: Installation, offered: Mapping[str, Sequence[str]]) -> None:
        """The same, over what is there."""
        self.installed = wanted
        spaces = [each["metadata"]["name"] for each in wanted.objects if each["kind"] == "Namespace"]
        wait_until(lambda: not any(map(self._is_ending, spaces)), f"{spaces}: gone after the former installation", 90)
        self.cluster.kubectl("apply", "--filename=-", text=_list(wanted.objects))
        self.cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        self.cluster.kubectl("apply", f"--namespace={TEAM}", "--filename", MAPPINGS)
        for node in self.nodes:
            if node.node.name in offered:
                node.wait_offered(*offered[node.node.name])
                node.put_script()
        hint = f"see kubectl describe pods -n {wanted.namespace}"
        wait_until(lambda: self.asks() == REGION, "the webhook: asked about pods", 90, hint=hint)

    def uninstall(self) -> None:
        """Takes everything away but the kinds, and the mappings with them."""
        if self.installed is None:
            return
        gone = [each for each in self.installed.objects if each["kind"] != "CustomResourceDefinition"]
        self.cluster.kubectl("delete", "--ignore-not-found", "--wait=false", "--filename=-", text=_list(gone))
        namespace, app, _ = self.installed
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector=app%3D{app}"
        wait_until(lambda: not (self.cluster.get(path) or {"items": ()})["items"], f"{app}: its pods to go", 60)
        wait_until(lambda: self.asks() == ORCHESTRATED[NLB0], "the webhook: not asked any more", 60)
        for node in self.nodes:
            node.wait_offered()
        self.installed = None

    def delete_pods(self) -> None:
        """Deletes the pods of the team and waits for their end."""
        self.cluster.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", f"--namespace={TEAM}")

    def asks(self) -> str:
        """What a pod asks for that asked for a name, when the API server is done with it; empty if it is refused."""
        status, answer = self.cluster.request(
            "POST", f"/api/v1/namespaces/{TEAM}/pods?dryRun=All", asking("asked", ORCHESTRATED[NLB0])
        )
        # A webhook that has just begun does not know the names yet.
        if status in (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.SERVICE_UNAVAILABLE):
            return ""
        assert status == http.HTTPStatus.CREATED, answer
        (resource,) = answer["spec"]["containers"][0]["resources"]["limits"]
        return resource

    def _is_ending(self, namespace: str) -> bool:
        found = self.cluster.get(f"/api/v1/namespaces/{namespace}")
        return bool(found and found["metadata"].get("deletionTimestamp"))


class Fpga:
    """A node. What is said of a card or a port is said of the first one."""

    def __init__(self, cluster: Cluster, node: Node, card: FpgaSpec, port: str) -> None:
        self.cluster = cluster
        self.node = node
        self.spec = card
        self.port = port

    # The cluster

    def wait_offered(self, *resources: str) -> None:
        """Until the node has one of each of these to give, and no other of FPGAs."""

        def so() -> bool:
            found = self.cluster.get(f"/api/v1/nodes/{self.node.name}") or {"status": {}}
            amounts = found["status"].get("allocatable", {})
            now = {name: amount for name, amount in amounts.items() if name.startswith("fpga.intel.com/")}
            return {name: amount for name, amount in now.items() if amount != "0"} == dict.fromkeys(resources, "1")

        try:
            wait_until(so, f"{self.node.name}: to give: {', '.join(resources) or 'nothing'}", 90)
        except ClusterError as error:
            label = "--selector=app=intel-fpga-plugin"
            told = [self.cluster.kubectl("describe", "pods", "--all-namespaces", label, check=False)]
            for namespace in PLUGIN_NAMESPACES:
                words = (f"--namespace={namespace}", label, "--all-containers", "--prefix")
                told.append(self.cluster.kubectl("logs", *words, check=False))
            raise ClusterError("\n".join([str(error), *told])) from None

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
        self.wait_offered(f"fpga.intel.com/{region_type(self.spec.interface)}")

    # The node

    def put_script(self) -> None:
        """Has the hook that is installed reach the emulated kernel."""
        hook = self.node.path(HOOK)
        with hook.open("rb") as file:
            if file.read(2) == b"#!":
                return
        self.node.run("mkdir", "-p", _GENUINE)
        # An installation that finds the same programs there links them.
        self.node.run("rm", "-f", _GENUINE / Path(HOOK).name)
        self.node.run("mv", HOOK, _GENUINE)
        words = " ".join(f"'{word}'" for word in supervised(_GENUINE / Path(HOOK).name))
        script = self.node.path(f"{HOOK}.script")
        script.write_text(f'#!/bin/sh\nexec {words} $(cat {_FLAGS} 2>/dev/null) "$@"\n')
        script.chmod(0o755)
        script.rename(hook)

    @contextmanager
    def hook_flags(self, *flags: str) -> Iterator[None]:
        """The hook is given these, as no runtime does."""
        self.node.path(_FLAGS).write_text(" ".join(flags))
        try:
            yield
        finally:
            self.node.path(_FLAGS).unlink()

    def tool(self, *words: str | Path, text: str = "") -> str:
        """What the tool on the host says."""
        return self.node.run(*supervised(SOFTWARE / "fpga_tool", *words), text=text).stdout

    def write(self, path: str | Path, content: bytes) -> Path:
        target = self.node.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return Path(path)

    def copy(self, directory: Path, path: str) -> str:
        """The directory, which pods cannot mount from where it is, at `path` of the node."""
        shutil.copytree(directory, self.node.path(path), dirs_exist_ok=True)
        return path

    def install(self, afu: str, interface: str = "") -> None:
        """The bitstream is in the host's store."""
        path = self.write("/root/bitstream.gbs", bitstream(afu, interface or self.spec.interface))
        self.tool("-b", path, "-force", "install")

    def program(self, afu: str) -> None:
        """The administrator programs the card."""
        path = self.write("/root/bitstream.gbs", bitstream(afu, self.spec.interface))
        self.tool("-b", path, "-d", Path(self.port).name, "pr")
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
        kernel_of(self.node).do("fpga", bdf=self.spec.bdf, **what)

    def power_cycle(self) -> None:
        """The card is as at the first boot."""
        kernel = kernel_of(self.node)
        assert self.spec.bdf
        kernel.unplug(self.spec.bdf)
        kernel.plug(self.spec)

    def is_busy(self) -> bool:
        try:
            return not self.afu
        except OSError as error:
            return error.errno == errno.EBUSY

    def hook_runs(self) -> bool:
        """Whether a hook of a container, in the node's namespaces, is there; it may wait."""
        return bool(self.node.run("pgrep", "-f", f"^{_GENUINE}", check=False).stdout)

    def empty_the_store(self) -> None:
        self.node.run("rm", "-rf", STORE / self.spec.interface)

    @property
    def afu(self) -> str:
        return kernel_of(self.node).read(f"{self.port}/afu_id").strip()

    # Pods

    def ran(self, name: str) -> list[str]:
        """What the pod, which has come to its end, has printed."""
        spec = self.cluster.wait_pod(name, "Succeeded", namespace=TEAM, timeout=90)["spec"]
        # One by one: with --all-containers kubectl prints them in random order.
        containers = [one["name"] for one in (*spec.get("initContainers", ()), *spec["containers"])]
        logs = [self.cluster.kubectl("logs", name, f"--namespace={TEAM}", f"--container={one}") for one in containers]
        return " ".join(logs).split()

    def refused(self, name: str, words: str) -> None:
        """The container was not started, and users are told why."""
        seen = self.cluster.wait_pod(name, "Failed", namespace=TEAM, timeout=90)
        (status,) = seen["status"]["containerStatuses"]
        assert status["state"]["terminated"]["reason"] == "StartError", status
        self.wait_for_statuses(name, words)

    def wait_for_statuses(self, name: str, words: str) -> None:
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


def _list(objects: Sequence[Object]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


def plan(name: str, cards: NodeSpec) -> NodePlan:
    """A node with these cards, which tells at once what it has to give."""
    fast = {"nodeStatusUpdateFrequency": "200ms"}
    return NodePlan(name=name, hardware=[emulated(cards, openable=False)], kubelet=fast)


def bitstream(afu: str, interface: str = INTERFACE) -> bytes:
    return gbs(metadata(interface, afu), bytes.fromhex(afu) + b"and the rest")


def asking(name: str, resource: str, *command: str, **more: Any) -> Object:
    """A pod that asks for one, and tells what it is given."""
    words = command or ("sh", "-c", f"cat {PORT}/afu_id; {NODES}")
    return pod(name, *words, namespace=TEAM, resources={resource: "1"}, **more)
