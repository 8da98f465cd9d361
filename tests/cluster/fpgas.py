"""Nodes with FPGAs, and actions of users and administrators.

The cards are those of an emulated kernel. Only processes under `simulate.seccomp` can access them, so on these nodes a
wrapper script starts the hook under it.
"""

from __future__ import annotations

import errno
import http
import json
import shutil
import subprocess
from collections import Counter
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
from .cluster import Cluster
from .emulated import emulated, kernel_of, supervised_command
from .machine import REPOSITORY, wait_until
from .node import Node, NodePlan
from .objects import Object, pod

MAPPINGS = REPOSITORY / "deploy/fpga_admissionwebhook/mappings-collection.yaml"
TEAM = "team"

SOFTWARE = Path(HOOK).parent
# The directory of the wrapped hook, and the file with additional flags of the hook.
_WRAPPED_HOOKS = SOFTWARE / "genuine"
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
    """Manifests with plugin and webhook; `app` is the label of the plugin's pods."""

    namespace: str
    app: str
    objects: Sequence[Object]


class Fpgas:
    """The cluster with at most one installation at a time."""

    def __init__(self, cluster: Cluster, nodes: Sequence[Fpga]) -> None:
        self.cluster = cluster
        self.nodes = nodes
        self.installed: Installation | None = None

    def install(self, desired: Installation, offered: Mapping[str, Sequence[str]]) -> None:
        """Replaces the installation, and waits until the resources are allocatable."""
        if self.installed == desired:
            return
        self.uninstall()
        self.apply(desired, offered)

    def apply(self, desired: Installation, offered: Mapping[str, Sequence[str]]) -> None:
        """Applies an installation over the present one."""
        self.installed = desired
        spaces = [each["metadata"]["name"] for each in desired.objects if each["kind"] == "Namespace"]
        wait_until(lambda: not any(map(self._is_ending, spaces)), f"{spaces}: deleted with the former installation", 90)
        self.cluster.kubectl("apply", "--filename=-", text=_list(desired.objects))
        self.cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        self.cluster.kubectl("apply", f"--namespace={TEAM}", "--filename", MAPPINGS)
        for node in self.nodes:
            if node.node.name in offered:
                node.wait_for_allocatable(*offered[node.node.name])
                node.wrap_hook()
        hint = f"see kubectl describe pods -n {desired.namespace}"
        wait_until(lambda: self.admitted_resource() == REGION, "the webhook: mutates pods", 90, hint=hint)

    def uninstall(self) -> None:
        """Deletes everything except the definitions and mappings."""
        if self.installed is None:
            return
        remaining = [each for each in self.installed.objects if each["kind"] != "CustomResourceDefinition"]
        self.cluster.kubectl("delete", "--ignore-not-found", "--wait=false", "--filename=-", text=_list(remaining))
        namespace, app, _ = self.installed
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector=app%3D{app}"
        wait_until(lambda: not (self.cluster.get(path) or {"items": ()})["items"], f"{app}: deletion of its pods", 60)
        wait_until(lambda: self.admitted_resource() == ORCHESTRATED[NLB0], "the webhook: no longer called", 60)
        for node in self.nodes:
            node.wait_for_allocatable()
        self.installed = None

    def delete_pods(self) -> None:
        """Deletes the pods of the team and waits for their end."""
        self.cluster.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", f"--namespace={TEAM}")

    def admitted_resource(self) -> str:
        """The admitted resource of a pod that requests a mapping's name; empty if the pod is rejected."""
        status, answer = self.cluster.request(
            "POST", f"/api/v1/namespaces/{TEAM}/pods?dryRun=All", requesting_pod("asked", ORCHESTRATED[NLB0])
        )
        # A new webhook has not synced the mappings yet.
        if status in (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.SERVICE_UNAVAILABLE):
            return ""
        assert status == http.HTTPStatus.CREATED, answer
        (resource,) = answer["spec"]["containers"][0]["resources"]["limits"]
        return resource

    def _is_ending(self, namespace: str) -> bool:
        found = self.cluster.get(f"/api/v1/namespaces/{namespace}")
        return bool(found and found["metadata"].get("deletionTimestamp"))


class Fpga:
    """A node. Methods about a card or a port refer to the first one."""

    def __init__(self, cluster: Cluster, node: Node, card: FpgaSpec, port: str) -> None:
        self.cluster = cluster
        self.node = node
        self.spec = card
        self.port = port

    # The cluster

    @property
    def allocatable(self) -> Counter[str]:
        """The numbers of allocatable FPGA resources."""
        found = self.cluster.get(f"/api/v1/nodes/{self.node.name}") or {"status": {}}
        amounts = found["status"].get("allocatable", {})
        return +Counter({name: int(amount) for name, amount in amounts.items() if name.startswith("fpga.intel.com/")})

    def wait_for_allocatable(self, *resources: str) -> None:
        """Waits until exactly these FPGA resources are allocatable, each as often as it is repeated."""
        name = f"{self.node.name}: allocatable: {', '.join(resources) or 'nothing'}"
        try:
            wait_until(lambda: self.allocatable == Counter(resources), name, 90)
        except ClusterError as error:
            label = "--selector=app=intel-fpga-plugin"
            output = [self.cluster.kubectl("describe", "pods", "--all-namespaces", label, check=False)]
            for namespace in PLUGIN_NAMESPACES:
                words = (f"--namespace={namespace}", label, "--all-containers", "--prefix")
                output.append(self.cluster.kubectl("logs", *words, check=False))
            raise ClusterError("\n".join([str(error), *output])) from None

    @contextmanager
    def mode(self, mode: str, *resources: str) -> Iterator[None]:
        """Sets the mode annotation of the node during the block."""
        before = self.allocatable
        annotation = "fpga.intel.com/device-plugin-mode"
        self.cluster.kubectl("annotate", "node", self.node.name, f"{annotation}={mode}")
        try:
            self.wait_for_allocatable(*resources)
            yield
        finally:
            self.cluster.kubectl("annotate", "node", self.node.name, f"{annotation}-")
        self.wait_for_allocatable(*before.elements())

    # The node

    def wrap_hook(self) -> None:
        """Wraps the installed hook so that it accesses the emulated kernel."""
        hook = self.node.path(HOOK)
        with hook.open("rb") as file:
            if file.read(2) == b"#!":
                return
        self.node.run("mkdir", "-p", _WRAPPED_HOOKS)
        # An installation links existing programs with the same content.
        self.node.run("rm", "-f", _WRAPPED_HOOKS / Path(HOOK).name)
        self.node.run("mv", HOOK, _WRAPPED_HOOKS)
        words = " ".join(f"'{word}'" for word in supervised_command(_WRAPPED_HOOKS / Path(HOOK).name))
        script = self.node.path(f"{HOOK}.script")
        script.write_text(f'#!/bin/sh\nexec {words} $(cat {_FLAGS} 2>/dev/null) "$@"\n')
        script.chmod(0o755)
        script.rename(hook)

    @contextmanager
    def hook_flags(self, *flags: str) -> Iterator[None]:
        """Adds flags to the hook."""
        self.node.path(_FLAGS).write_text(" ".join(flags))
        try:
            yield
        finally:
            self.node.path(_FLAGS).unlink()

    def tool(self, *words: str | Path, text: str = "") -> str:
        """The output of the tool on the host."""
        return self.node.run(*supervised_command(SOFTWARE / "fpga_tool", *words), text=text).stdout

    def write(self, path: str | Path, content: bytes) -> Path:
        target = self.node.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return Path(path)

    def copy(self, directory: Path, path: str) -> str:
        """Copies a directory to `path` on the node, where pods can mount it."""
        shutil.copytree(directory, self.node.path(path), dirs_exist_ok=True)
        return path

    def install(self, afu: str, interface: str = "") -> None:
        """Installs a bitstream in the host's store."""
        path = self.write("/root/bitstream.gbs", bitstream(afu, interface or self.spec.interface))
        self.tool("-b", path, "-force", "install")

    def program(self, afu: str) -> None:
        """Programs the card with the tool."""
        path = self.write("/root/bitstream.gbs", bitstream(afu, self.spec.interface))
        self.tool("-b", path, "-d", Path(self.port).name, "pr")
        assert self.afu == afu

    @contextmanager
    def tool_running(self, *words: str | Path) -> Iterator[subprocess.Popen[bytes]]:
        """Runs the tool on the host during the block."""
        command = self.node.enter(supervised_command(SOFTWARE / "fpga_tool", *words))
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=self.node.environment()) as process:
            try:
                yield process
            finally:
                process.kill()

    def card(self, **what: object) -> None:
        """Sets the results of programming operations."""
        kernel_of(self.node).do("fpga", bdf=self.spec.bdf, **what)

    def power_cycle(self) -> None:
        """Resets the card to its state at boot."""
        kernel = kernel_of(self.node)
        assert self.spec.bdf
        kernel.unplug(self.spec.bdf)
        kernel.plug(self.spec)

    def is_busy(self) -> bool:
        try:
            return not self.afu
        except OSError as error:
            return error.errno == errno.EBUSY

    def is_hook_running(self) -> bool:
        """Whether a hook of a container is running."""
        return bool(self.node.run("pgrep", "-f", f"^{_WRAPPED_HOOKS}", check=False).stdout)

    def clear_store(self) -> None:
        self.node.run("rm", "-rf", STORE / self.spec.interface)

    @property
    def afu(self) -> str:
        return kernel_of(self.node).read(f"{self.port}/afu_id").strip()

    # Pods

    def output_of(self, name: str) -> list[str]:
        """Waits for the end of a pod; returns the words of its output."""
        spec = self.cluster.wait_pod(name, "Succeeded", namespace=TEAM, timeout=90)["spec"]
        # One container at a time: with --all-containers kubectl prints them in random order.
        containers = [one["name"] for one in (*spec.get("initContainers", ()), *spec["containers"])]
        logs = [self.cluster.kubectl("logs", name, f"--namespace={TEAM}", f"--container={one}") for one in containers]
        return " ".join(logs).split()

    def expect_start_error(self, name: str, words: str) -> None:
        """Waits until the container has failed to start with an event of the hook."""
        pod = self.cluster.wait_pod(name, "Failed", namespace=TEAM, timeout=90)
        (status,) = pod["status"]["containerStatuses"]
        assert status["state"]["terminated"]["reason"] == "StartError", status
        self.wait_for_event(name, words)

    def wait_for_event(self, name: str, words: str) -> None:
        """Waits for an event of the pod with this message of the hook."""
        desired = f"stderr: intel-fpga-crihook: {words}"
        output = ""

        def has_event() -> bool:
            nonlocal output
            output = self.cluster.kubectl("describe", "pod", name, f"--namespace={TEAM}")
            _before, heading, events = output.partition("\nEvents:")
            return bool(heading) and desired in events

        try:
            wait_until(has_event, f"events of {name} with: {desired}", 60)
        except ClusterError as error:
            raise AssertionError(f"{error}\n{output}") from None


def _list(objects: Sequence[Object]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


def plan(name: str, cards: NodeSpec) -> NodePlan:
    """A node with these cards, whose status is updated immediately."""
    fast = {"nodeStatusUpdateFrequency": "200ms"}
    return NodePlan(name=name, hardware=[emulated(cards, openable=False)], kubelet=fast)


def bitstream(afu: str, interface: str = INTERFACE) -> bytes:
    return gbs(metadata(interface, afu), bytes.fromhex(afu) + b"and the rest")


def requesting_pod(name: str, resource: str, *command: str, **more: Any) -> Object:
    """A pod that requests one device and prints its device nodes."""
    words = command or ("sh", "-c", f"cat {PORT}/afu_id; {NODES}")
    return pod(name, *words, namespace=TEAM, resources={resource: "1"}, **more)
