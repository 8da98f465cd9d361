"""A real node with simulated GPUs and the GPU agent with DRA as a daemon: shared by tests of claims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .cluster import Cluster
from .gpu_nodes import NAMESPACE, PLUGIN, GpuNode
from .machine import REPOSITORY, Daemon, wait_until
from .node import Node
from .objects import Object

GPU = "gpu.intel.com"
API = "/apis/resource.k8s.io/v1"
KUBECONFIG = "/etc/kubernetes/agent.kubeconfig"
CLAIMS_DIR = f"/var/lib/kubelet/plugins/{GPU}/claims"
CDI_DIR = "/var/run/cdi"
CLASSES = REPOSITORY / "deploy/dra/classes"
EXTENDED = REPOSITORY / "deploy/dra/extended-resources"
NAMES = ("0000-01-00-0-0x56c0", "0000-02-00-0-0x56c0")


class DraNode(GpuNode):
    """The agent has the rights of the administrator. `tests/cluster/test_dra_policies.py` is about its own rights."""

    def __init__(self, node: Node, tree: Path, cards: int = 2) -> None:
        super().__init__(node, tree, cards)
        self.agent: Daemon | None = None
        node.path(KUBECONFIG).parent.mkdir(parents=True, exist_ok=True)
        node.path(KUBECONFIG).write_text(node.cluster.kubeconfig.read_text())

    def start_agent(self, *flags: str) -> Daemon:
        """Starts the agent, with `-dra-api=dra` by default."""
        if self.agent is None:
            command = (PLUGIN, "-v=3", *(flags or ("-dra-api=dra",)))
            environment = {"NODE_NAME": self.node.name, "KUBECONFIG": KUBECONFIG}
            self.agent = self.node.add_daemon("agent", command, environment=environment)
            self.daemons.append(self.agent)
        self.agent.start()
        return self.agent

    def stop_agent(self) -> None:
        """Ends the agent as Kubernetes does, so that the next one may have other flags."""
        if self.agent is not None:
            self.agent.stop(30)
            self.daemons.remove(self.agent)
            del self.node.daemons[self.agent.name]
            self.agent = None

    def restart_agent(self) -> None:
        """Kills the agent, starts it, and waits until the kubelet has registered it."""
        assert self.agent is not None
        registrations = self.agent.log.read_text().count(f"{GPU}: registered")
        self.agent.kill()
        self.agent.start()
        log = self.agent.log
        wait_until(lambda: log.read_text().count(f"{GPU}: registered") > registrations, "registration", 30)

    # Slices

    def slices(self, driver: str = GPU) -> list[Object]:
        found = (self.cluster.get(f"{API}/resourceslices") or {"items": []})["items"]
        return [each for each in found if each["spec"]["driver"] == driver]

    def devices(self) -> dict[str, Object]:
        return {device["name"]: device for each in self.slices() for device in each["spec"].get("devices", ())}

    def wait_devices(self, names: Iterable[str] = NAMES, timeout: float = 30) -> None:
        expected = set(names)
        wait_until(lambda: self.devices().keys() == expected, f"{self.node.name}: devices {expected}", timeout)

    # Claims and pods

    def claim(self, name: str, *requests: Object, device_class: str = GPU, device: str = "") -> None:
        """A claim with one request by default, for a certain device if it is given."""
        exactly: Object = {"deviceClassName": device_class}
        if device:
            address = device.removesuffix(device[-7:]).replace("-", ":", 2).replace("-", ".")
            expression = f'device.driver == "{GPU}" && device.attributes["{GPU}"].pciAddress == "{address}"'
            exactly["selectors"] = [{"cel": {"expression": expression}}]
        spec = {"devices": {"requests": [*requests] or [{"name": "gpu", "exactly": exactly}]}}
        metadata = {"name": name, "namespace": NAMESPACE}
        self.cluster.apply(
            {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": spec}
        )

    def claiming_pod(self, name: str, claim: str, **fields: Any) -> Object:
        """A pod that uses a claim. The scheduler allocates it."""
        described = self.pod(name, {}, **fields)
        del described["spec"]["nodeName"]
        described["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": claim}]
        for container in described["spec"]["containers"]:
            container["resources"]["claims"] = [{"name": "gpu"}]
        return described

    def start_claiming(self, name: str, claim: str = "", **fields: Any) -> None:
        """Creates a pod; with a claim of the pod's name by default."""
        if not claim:
            self.claim(name)
        self.cluster.apply(self.claiming_pod(name, claim or name, **fields))

    def run_claiming(self, name: str, claim: str = "", **fields: Any) -> None:
        self.start_claiming(name, claim, **fields)
        self.cluster.wait_pod(name, namespace=NAMESPACE)

    def wait_unschedulable(self, pod: str) -> None:
        """Waits until the scheduler has found no device for the pod."""

        def unschedulable() -> bool:
            found = self.cluster.pod(pod, NAMESPACE) or {"status": {}}
            return "Unschedulable" in [each.get("reason") for each in found["status"].get("conditions", ())]

        wait_until(unschedulable, f"pod {pod} is unschedulable", 30)

    def allocated(self, claim: str) -> list[str]:
        """The devices of a claim."""
        found = self.cluster.get(f"{API}/namespaces/{NAMESPACE}/resourceclaims/{claim}") or {}
        results = found.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
        return [each["device"] for each in results]

    def delete_claims(self, *names: str) -> None:
        for name in names:
            self.cluster.request("DELETE", f"{API}/namespaces/{NAMESPACE}/resourceclaims/{name}")

    def seen_by(self, pod: str, container: str = "main") -> set[str]:
        """The names below /dev/dri in a container."""
        listed = self.cluster.kubectl("exec", pod, f"--container={container}", "--", "sh", "-c", "ls /dev/dri || true")
        return set(listed.split()) - {"by-path"}

    # What the driver leaves on the node

    def left(self) -> Sequence[str]:
        """Journal entries and CDI files of claims."""
        journal = self.node.path(CLAIMS_DIR)
        cdi = self.node.path(CDI_DIR)
        found = [*(journal.glob("*.json") if journal.is_dir() else ()), *(cdi.glob("k8s.*") if cdi.is_dir() else ())]
        return sorted(str(path) for path in found)

    def wait_nothing_left(self, timeout: float = 90) -> None:
        wait_until(lambda: not self.left(), f"{self.node.name}: no entries and files of claims", timeout)

    def events(self, pod: str) -> str:
        path = f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.name={pod}"
        return "\n".join(each["message"] for each in (self.cluster.get(path) or {"items": []})["items"])

    def reset(self) -> None:
        if self.agent is not None:
            if not self.agent.running:
                self.agent.start()
            self.delete(*self.pods())  # pods with claims end only while their driver runs
        super().reset()
        self.agent = None
        found = self.cluster.get(f"{API}/namespaces/{NAMESPACE}/resourceclaims") or {"items": []}
        self.delete_claims(*(each["metadata"]["name"] for each in found["items"]))
        for each in self.slices():
            self.cluster.request("DELETE", f"{API}/resourceslices/{each['metadata']['name']}")
        # The kubelet watches the directories themselves.
        self.node.run("sh", "-c", "rm -rf /var/lib/kubelet/plugins/* /var/lib/kubelet/plugins_registry/*")


def install_classes(cluster: Cluster) -> None:
    cluster.kubectl("apply", "--kustomize", CLASSES)
