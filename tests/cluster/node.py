"""A node of a test cluster: a machine with a container runtime, a kubelet, a kube-proxy and simulated hardware."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from . import hardware, settings
from .build import ClusterError
from .machine import Argument, Machine, wait_until
from .runtimes import CONTAINERD, Runtime

if TYPE_CHECKING:
    from .cluster import Cluster

Hardware = Callable[["Node"], None]


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """The plan of a node: ``hardware`` is added at every boot, ``kubelet`` are fields of its KubeletConfiguration."""

    name: str = "node-1"
    runtime: Runtime = CONTAINERD
    hardware: Sequence[Hardware] = ()
    kubelet: Mapping[str, object] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


class Node(Machine):
    """A machine with a container runtime, a kubelet, a kube-proxy and hardware that is only simulated.

    ``hardware`` is added at each boot. What a test plugs in later is removed by a reboot,
    like all driver configuration, unless it is appended there.
    """

    def __init__(self, cluster: Cluster, plan: NodePlan, position: int) -> None:
        own = list(plan.runtime.programs)
        super().__init__(
            plan.name,
            cluster.directory / plan.name,
            cgroup=f"accelplane-{cluster.number}-{plan.name}",
            path=":".join([*map(str, own), cluster.path]),
            shares=[*cluster.shares, *own],
            owned=cluster.owned,
        )
        self.cluster = cluster
        self.plan = plan
        self.position = position
        self.hardware: list[Hardware] = list(plan.hardware)
        self._trees: dict[Path, frozenset[Path]] = {}
        self.address = cluster.addresses.node(position)
        self.runtime = self.add_daemon(plan.runtime.name, plan.runtime.command, ready=self._runtime_answers)
        self.kubelet = self.add_daemon(
            "kubelet", settings.kubelet(self.name, self.address, plan.labels), ready=self._kubelet_answers
        )
        self.kube_proxy = self.add_daemon("kube-proxy", settings.kube_proxy(self.name))

    # Hardware

    def copy_tree(self, tree: Path) -> None:
        """Show the files, links and device nodes below ``tree`` (``sys/…``, ``dev/…``) in the node.

        Another call with the same tree updates the node: files that are no longer in the tree are removed.
        """
        self._trees[tree] = hardware.copy_tree(self, tree, self._trees.get(tree, frozenset()))

    def mknod(self, path: Argument, major: int, minor: int, *, mode: int = 0o666) -> None:
        """Make a character device node in the node's /dev."""
        hardware.mknod(self, path, major, minor, mode=mode)

    def write(self, path: Argument, text: str) -> None:
        """Set a file below the node's /sys or /dev, for example a health attribute."""
        hardware.write(self, path, text)

    def remove(self, path: Argument) -> None:
        """Remove a file or a directory of the node's /sys or /dev."""
        hardware.remove(self, path)

    # Life

    def boot(self) -> None:
        """Switch on: file system, network, hardware, daemons. The node is not necessarily Ready yet."""
        self.start_services()
        self.join()

    def start_services(self) -> None:
        """The part of ``boot`` that needs no API server."""
        self.power_on()
        self._trees.clear()
        self.cluster.network.plug_cable(self)
        for put_in in self.hardware:
            put_in(self)
        self.runtime.start()

    def join(self) -> None:
        """The other part of ``boot``."""
        self.kubelet.start(wait=False)
        self.kube_proxy.start()

    def reboot(self, *, wait: bool = True) -> None:
        """Power the node off and on: /run, sockets and containers are lost, the disk is not."""
        self.power_off()
        self.boot()
        if wait:
            self.kubelet.wait_ready()
            # The node's status is still Ready from before: only the report of the new boot counts.
            wait_until(self._reported_since_boot, f"{self.name}: report after the reboot", 60)
            self.wait_ready()

    def wait_ready(self, timeout: float = 60) -> None:
        """Wait until the node is Ready in the API."""

        def ready() -> bool:
            if not self.kubelet.running:
                raise ClusterError(f"{self.kubelet}: ended\n{self.kubelet.tail()}")
            return self.ready

        wait_until(ready, f"{self.name}: Ready", timeout, hint=f"log: {self.kubelet.log}")

    @property
    def ready(self) -> bool:
        node = self.cluster.get(f"/api/v1/nodes/{self.name}")
        conditions = node["status"].get("conditions", []) if node else []
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def allocatable(self, resource: str) -> int | None:
        """The allocatable number of a resource in the API; None for an unknown resource."""
        node = self.cluster.get(f"/api/v1/nodes/{self.name}")
        amount = node["status"].get("allocatable", {}).get(resource) if node else None
        return None if amount is None else int(amount)

    def disconnect(self) -> None:
        """Disconnect the node's network; the machine continues to run."""
        self.run("ip", "link", "set", "eth0", "down")

    def connect(self) -> None:
        """Connect the node's network again."""
        self.run("ip", "link", "set", "eth0", "up")
        self.cluster.network.route(self)

    def import_image(self, archive: Path) -> None:
        """Import the image of a docker or OCI archive into the node, under its name in the archive."""
        self.plan.runtime.import_image(self, self.cluster.assets, archive)

    def _runtime_answers(self) -> bool:
        return self.run(*self.plan.runtime.check, check=False).returncode == 0

    def _kubelet_answers(self) -> bool:
        connection = http.client.HTTPConnection(self.address, settings.KUBELET_HEALTH_PORT, timeout=2)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _reported_since_boot(self) -> bool:
        node = self.cluster.get(f"/api/v1/nodes/{self.name}")
        current = self.path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return node is not None and node["status"]["nodeInfo"]["bootID"] == current
