"""A node with GPUs and a GPU plugin that is a process of the node, for scenarios of node operation."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelplane.kubelet.checkpoint import Holding, read_checkpoint
from accelplane.simulate.tree import SimulatedNode

from .build import ClusterError
from .cluster import Cluster
from .machine import Argument, Daemon, wait_until
from .node import Node
from .objects import Object, pod

I915, MONITORING = "gpu.intel.com/i915", "gpu.intel.com/i915_monitoring"
PLUGIN = Path(sys.executable).with_name("intel_gpu_device_plugin")
CARDS = 3


class Setup:
    """A node with three cards, the plugin as a daemon that a test starts, and pods that are deleted after the test."""

    def __init__(self, cluster: Cluster, tree: Path) -> None:
        self.cluster = cluster
        self.node: Node = cluster.nodes["node-1"]
        self.tree = tree
        self.hardware = SimulatedNode(tree, device_nodes="char", numbers=(1, 3))
        for _ in range(CARDS):
            self.hardware.plug_gpu()
        self.node.hardware.append(lambda node: node.copy_tree(tree))
        self.node.copy_tree(tree)
        self.namespace = ""
        self._daemons: list[Daemon] = []

    def daemon(self, name: str, *command: Argument) -> Daemon:
        """A program on the node, ended with the test."""
        started = self.node.add_daemon(name, command)
        self._daemons.append(started)
        started.start()
        return started

    def plugin(self, *flags: str, name: str = "gpu-plugin") -> Daemon:
        return self.daemon(name, PLUGIN, "-v=3", *flags)

    def wait(self, resource: str, amount: int, timeout: float = 30) -> None:
        def there() -> bool:
            return self.node.allocatable(resource) == amount

        try:
            wait_until(there, f"{resource}: {amount} allocatable", timeout)
        except ClusterError as error:
            raise ClusterError(f"{error}; it is {self.node.allocatable(resource)}") from None

    def run(self, name: str, wants: Mapping[str, int], *command: str, **more: Any) -> Object:
        """A running pod."""
        self.request(name, wants, *command, **more)
        return self.running(name)

    def request(self, name: str, wants: Mapping[str, int], *command: str, **more: Any) -> None:
        amounts = {resource: str(amount) for resource, amount in wants.items()}
        # The first process of a container ignores SIGTERM without a handler.
        command = command or ("sh", "-c", "trap exit TERM; sleep 1000000 & wait")
        self.cluster.apply(pod(name, *command, namespace=self.namespace, resources=amounts, **more))

    def running(self, name: str) -> Object:
        return self.cluster.wait_pod(name, namespace=self.namespace)

    def container_state(self, name: str) -> tuple[str, int]:
        """The container ID of a pod and its restart count, which show whether the pod was disturbed."""
        (status,) = self.running(name)["status"]["containerStatuses"]
        return status["containerID"], status["restartCount"]

    def wait_for_pod(self, name: str, *command: str) -> str:
        return self.cluster.kubectl("exec", name, f"--namespace={self.namespace}", "--", *command)

    def cards(self, name: str) -> list[str]:
        """The cards whose device nodes a pod has."""
        return sorted(re.findall(r"\bcard\d+\b", self.wait_for_pod(name, "ls", "/dev/dri")))

    def holdings(self) -> Sequence[Holding]:
        kept = read_checkpoint(str(self.node.path("/var/lib/kubelet/device-plugins")))
        return kept.holdings if kept else ()

    def delete(self, *names: str) -> None:
        """Ends pods; when this returns their devices are free."""
        # With a grace a pod stays in the API until its containers have ended.
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        for name in names:
            self.cluster.request("DELETE", f"{pods}/{name}", {"gracePeriodSeconds": 1})
        for name in names:
            wait_until(lambda name=name: not self.cluster.pod(name, self.namespace), f"end of pod {name}", 60)

    def clean_up(self) -> None:
        """Reverts the changes of a test, so that the next one starts with the initial state of the node."""
        for daemon in (self.node.runtime, self.node.kubelet):
            if self.node.powered and not daemon.running:
                daemon.start()
        listed = self.cluster.get(f"/api/v1/namespaces/{self.namespace}/pods") or {"items": []}
        self.delete(*(each["metadata"]["name"] for each in listed["items"]))
        for daemon in self._daemons:
            daemon.stop()
            self.node.daemons.pop(daemon.name, None)
        self._daemons.clear()
        wait_until(lambda: not self.node.allocatable(I915), "the node's status without the plugin")
        for device in self.hardware.devices()[CARDS:]:
            self.hardware.unplug(device.name)
        self.node.copy_tree(self.tree)
