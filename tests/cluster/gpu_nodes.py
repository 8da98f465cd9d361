"""Real nodes with simulated GPUs and the GPU plugin as a daemon: shared by tests of the kubelet's device manager."""

from __future__ import annotations

import http
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accelplane.kubelet.checkpoint import Holding, read_checkpoint
from accelplane.simulate.tree import GpuSpec, SimulatedNode

from .build import ClusterError
from .cluster import Cluster
from .machine import Argument, Daemon, wait_until
from .node import Node
from .objects import Object, pod

I915 = "gpu.intel.com/i915"
NAMESPACE = "default"
PLUGIN = Path(sys.executable).with_name("intel_gpu_device_plugin")
BY_PATH = "/dev/dri/by-path"
MANIFESTS = "/etc/kubernetes/manifests"
# Device changes are reported immediately in the node's status; static pods are for nodes without an API server.
KUBELET = {"nodeStatusUpdateFrequency": "200ms", "staticPodPath": MANIFESTS}

_PANIC = re.compile(r"^panic: |nil pointer dereference", re.MULTILINE)


class KubeletProcess:
    """Observes the kubelet's process: it must neither end nor panic."""

    def __init__(self, node: Node, start: int | None = None) -> None:
        """Its log begins at the byte `start` of the file, at the file's end by default."""
        self._node = node
        self._pid = node.kubelet.pid
        self._start = node.kubelet.log.stat().st_size if start is None else start

    def log(self) -> str:
        """The kubelet's log since then."""
        with self._node.kubelet.log.open("rb") as log:
            log.seek(self._start)
            return log.read().decode(errors="replace")

    def check(self) -> None:
        """Raises `AssertionError` if the kubelet has ended or panicked."""
        log = self.log()
        if (panic := _PANIC.search(log)) or not self._node.kubelet.running:
            trace = log[panic.start() :][:3000] if panic else self._node.kubelet.tail()
            raise AssertionError(f"{self._node.name}: the kubelet crashed\n{trace}")
        assert self._node.kubelet.pid == self._pid, f"{self._node.name}: another kubelet runs"

    def found(self, pattern: str) -> list[Any]:
        return re.findall(pattern, self.log())

    def logged(self, pattern: str) -> bool:
        return re.search(pattern, self.log()) is not None

    def wait_log(self, pattern: str, timeout: float = 60) -> None:
        """Waits for a line of the log; the kubelet must run until then."""

        def logged() -> bool:
            self.check()
            return self.logged(pattern)

        try:
            wait_until(logged, f"{self._node.name}: kubelet log with {pattern}", timeout)
        except ClusterError as error:
            lines = re.findall(r".*(?:dmission|TopologyHint|Processed device|SyncLoop).*", self.log())
            raise ClusterError("\n".join([str(error), *lines[-20:]])) from None


class GpuNode:
    """A node with `cards` simulated cards on NUMA node 0, and daemons and pods that end with `reset`.

    All device nodes have `numbers`, those of /dev/null by default, or the numbers of the kernel for None.
    """

    def __init__(self, node: Node, tree: Path, cards: int, numbers: tuple[int, int] | None = (1, 3)) -> None:
        self.node = node
        self.cluster: Cluster = node.cluster
        self.tree = tree
        self.cards = [f"card{index}" for index in range(cards)]
        self.hardware = SimulatedNode(tree, device_nodes="char", numbers=numbers)
        self.daemons: list[Daemon] = []
        node.path(MANIFESTS).mkdir(parents=True, exist_ok=True)
        self.plug(*self.cards)

    # Hardware

    def plug(self, *cards: str, tiles: int = 1) -> None:
        for card in cards:
            self.hardware.plug_gpu(GpuSpec(index=int(card.removeprefix("card")), tiles=tiles))
        self._announce("add", [self.hardware.device(card).class_path for card in cards])

    def unplug(self, *cards: str) -> None:
        paths = [self.hardware.device(card).class_path for card in cards]
        for card in cards:
            self.hardware.unplug(card)
        self._announce("remove", paths)

    def plugged(self) -> set[str]:
        return {device.name for device in self.hardware.devices()}

    def _announce(self, action: str, paths: Sequence[str]) -> None:
        while True:
            # containerd makes a missing mount source a directory when a container with a stored answer starts.
            for link in self.node.path(BY_PATH).glob("*"):
                if not link.is_symlink() and link.is_dir():
                    link.rmdir()
            try:
                self.node.copy_tree(self.tree)
                break
            except IsADirectoryError:
                continue
        for path in paths:
            self.node.uevent(action, path, "drm")

    # Programs

    def start(self, name: str, *command: Argument) -> Daemon:
        daemon = self.node.add_daemon(name, command)
        self.daemons.append(daemon)
        daemon.start()
        return daemon

    def start_plugin(self, *flags: str) -> Daemon:
        return self.start("gpu-plugin", PLUGIN, "-v=3", *flags)

    def restart_kubelet(self) -> KubeletProcess:
        if self.node.kubelet.running:
            self.node.kubelet.stop()
        start = self.node.kubelet.log.stat().st_size
        self.node.kubelet.start(wait=False)
        return KubeletProcess(self.node, start)

    def counts(self, resource: str = I915) -> tuple[int, int]:
        """Capacity and allocatable in the node's status."""
        status = (self.cluster.get(f"/api/v1/nodes/{self.node.name}") or {"status": {}})["status"]
        return tuple(int(status.get(each, {}).get(resource, "0")) for each in ("capacity", "allocatable"))  # type: ignore[return-value]

    def wait_counts(self, capacity: int, allocatable: int, resource: str = I915, timeout: float = 60) -> None:
        try:
            wait_until(lambda: self.counts(resource) == (capacity, allocatable), "", timeout)
        except ClusterError:
            found = self.counts(resource)
            raise ClusterError(
                f"{self.node.name}: {resource}: capacity and allocatable are {found}, expected {capacity, allocatable}"
            ) from None

    def wait_capacity_at_most(self, capacity: int, resource: str = I915) -> None:
        wait_until(lambda: self.counts(resource)[0] <= capacity, f"{self.node.name}: capacity at most {capacity}", 40)

    def holdings(self) -> Sequence[Holding]:
        """The content of the kubelet's checkpoint."""
        found = read_checkpoint(str(self.node.path("/var/lib/kubelet/device-plugins")))
        return found.holdings if found else ()

    # Pods

    def pod(self, name: str, wants: Mapping[str, object], **fields: Any) -> Object:
        """A pod that is bound to this node; it ends at SIGTERM."""
        amounts = {resource: str(amount) for resource, amount in wants.items()}
        command = ("sh", "-c", "trap exit TERM; sleep 1000000 & wait")
        return pod(name, *command, namespace=NAMESPACE, node=self.node.name, resources=amounts, **fields)

    def create(self, name: str, wants: Mapping[str, object], **fields: Any) -> None:
        status, answer = self.cluster.request(
            "POST", f"/api/v1/namespaces/{NAMESPACE}/pods", self.pod(name, wants, **fields)
        )
        assert status == http.HTTPStatus.CREATED, answer

    def run(self, name: str, wants: Mapping[str, object], **fields: Any) -> Object:
        self.create(name, wants, **fields)
        return self.cluster.wait_pod(name, namespace=NAMESPACE)

    def pods(self) -> dict[str, Object]:
        listed = self.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods?fieldSelector=spec.nodeName={self.node.name}")
        return {each["metadata"]["name"]: each for each in (listed or {"items": []})["items"]}

    def device_ids(self, name: str, resource: str = I915) -> tuple[str, ...]:
        """The device ids that a running pod holds, from the checkpoint."""
        uid = self.pods()[name]["metadata"]["uid"]
        # The UID of a static pod is the hash of its manifest; it differs from the UID in the API.
        uid = self.pods()[name]["metadata"].get("annotations", {}).get("kubernetes.io/config.hash", uid)
        return tuple(
            id_ for each in self.holdings() if (each.pod_uid, each.resource) == (uid, resource) for id_ in each.ids
        )

    def container(self, name: str) -> tuple[str, int]:
        """The id of a running pod's container and its restarts: unchanged while the pod is not disturbed."""
        (status,) = self.cluster.wait_pod(name, namespace=NAMESPACE)["status"]["containerStatuses"]
        return status["containerID"], status["restartCount"]

    def delete(self, *names: str) -> None:
        """Deletes pods and waits until their containers have ended."""
        for name in names:
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
            self.cluster.request("DELETE", path, {"gracePeriodSeconds": 1})
        wait_until(lambda: self.pods().keys().isdisjoint(names), f"{self.node.name}: end of {names}", 60)

    # Static pods

    def write_manifest(self, name: str, wants: Mapping[str, object]) -> str:
        """Runs a pod from a file on the node; returns its name in the API."""
        described = self.pod(name, wants)
        del described["spec"]["nodeName"]
        self.node.path(f"{MANIFESTS}/{name}.json").write_text(json.dumps(described))
        return f"{name}-{self.node.name}"

    def remove_manifests(self) -> None:
        for file in self.node.path(MANIFESTS).iterdir():
            file.unlink()

    def reset(self) -> None:
        """Ends the test's pods and daemons and restores the cards; a kubelet that crashed runs again."""
        self.node.connect()
        for daemon in self.daemons:
            daemon.stop()
            self.node.daemons.pop(daemon.name, None)
        self.daemons.clear()
        self.remove_manifests()
        if not self.node.kubelet.running:
            self.node.kubelet.start()
        # Mirror pods are deleted with their manifests.
        self.delete(*(name for name, each in self.pods().items() if "ownerReferences" not in each["metadata"]))
        wait_until(lambda: not self.pods(), f"{self.node.name}: end of all pods", 60)
        self.node.remove(BY_PATH)
        self.unplug(*self.plugged())
        self.plug(*self.cards)


def on_all(nodes: Sequence[GpuNode], scenario: Callable[[GpuNode], None]) -> None:
    """Runs the scenario on all nodes at the same time. Raises the first error."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        for future in [pool.submit(scenario, node) for node in nodes]:
            future.result()
