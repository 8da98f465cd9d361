"""A real node with simulated GPUs and the GPU agent with DRA as a daemon: shared by tests of claims."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelplane.simulate import GpuSpec

from .cluster import Cluster
from .gpu_nodes import NAMESPACE, PLUGIN, GpuNode
from .machine import REPOSITORY, Argument, Daemon, wait_until
from .node import Node
from .objects import Object

GPU = "gpu.intel.com"
API = "/apis/resource.k8s.io/v1"
KUBECONFIG = "/etc/kubernetes/agent.kubeconfig"
CDI_DIR = "/run/cdi"  # /var/run is an absolute link, which leads to the host from outside
CLASSES = REPOSITORY / "deploy/dra/classes"
EXTENDED = REPOSITORY / "deploy/dra/extended-resources"
NAMES = ("0000-01-00-0-0x56c0", "0000-02-00-0-0x56c0")


class DraNode(GpuNode):
    """The agent has the rights of the administrator. `tests/cluster/test_dra_policies.py` is about its own rights."""

    def __init__(self, node: Node, tree: Path, cards: int = 2) -> None:
        super().__init__(node, tree, cards, numbers=None)
        self.agent: Daemon | None = None
        node.path(KUBECONFIG).parent.mkdir(parents=True, exist_ok=True)
        node.path(KUBECONFIG).write_text(node.cluster.kubeconfig.read_text())

    def start_agent(self, *flags: str, program: Sequence[Argument] = (PLUGIN,)) -> Daemon:
        """Starts the agent, with `-dra-api=dra` by default."""
        if self.agent is None:
            self.agent = self.add_agent("agent", *(flags or ("-dra-api=dra",)), program=program)
        self.agent.start()
        return self.agent

    def add_agent(self, name: str, *flags: str, program: Sequence[Argument] = (PLUGIN,), pod_uid: str = "") -> Daemon:
        """An agent that does not run yet. Agents that run at the same time have different UIDs of pods."""
        environment = {"NODE_NAME": self.node.name, "KUBECONFIG": KUBECONFIG, "POD_UID": pod_uid}
        agent = self.node.add_daemon(name, [*program, "-v=3", *flags], environment=environment)
        self.daemons.append(agent)
        return agent

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
        self.agent.kill()
        self.start_registered(self.agent)

    def start_registered(self, agent: Daemon) -> None:
        """Starts an agent, and waits until the kubelet has registered it."""

        def count() -> int:
            return agent.log.read_text().count(f"{GPU}: registered") if agent.log.exists() else 0

        registrations = count()
        agent.start()
        wait_until(lambda: count() > registrations, f"{agent}: registration", 30)

    def reboot(self) -> None:
        """Reboots the node. The agent starts before the kubelet, and the numbers of the cards are in reverse order."""
        agent = self.agent
        assert agent is not None

        def start(node: Node) -> None:
            addresses = [self.hardware.device(card).bdf for card in reversed(self.cards)]
            for card in self.cards:
                self.hardware.unplug(card)
            for index, address in enumerate(addresses):
                self.hardware.plug_gpu(GpuSpec(index=index, bdf=address))
            node.copy_tree(self.tree)
            agent.start()

        self.node.hardware.append(start)
        try:
            self.node.reboot()
        finally:
            self.node.hardware.remove(start)

    # Slices

    def slices(self, driver: str = GPU) -> list[Object]:
        found = (self.cluster.get(f"{API}/resourceslices") or {"items": []})["items"]
        return [each for each in found if each["spec"]["driver"] == driver]

    def devices(self, driver: str = GPU) -> dict[str, Object]:
        return {device["name"]: device for each in self.slices(driver) for device in each["spec"].get("devices") or ()}

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

    def touch(self, pod: str) -> Object:
        """Changes a pod, so that the kubelet tries a failed preparation again. It would wait for 60 to 90 s."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}"
        change = {"metadata": {"annotations": {"attempt": str(time.monotonic_ns())}}}
        return self.cluster.request("PATCH", path, change, content="application/merge-patch+json")[1]

    def wait_started(self, name: str, restarts: int = 0) -> None:
        """Waits until a container has started, or has started again `restarts` times, also if an attempt fails."""

        def is_running() -> bool:
            statuses = self.touch(name)["status"].get("containerStatuses", ())
            return any("running" in each["state"] and each["restartCount"] == restarts for each in statuses)

        wait_until(is_running, f"pod {name}: running after {restarts} restarts", 90, every=1)
        self.cluster.wait_pod(name, namespace=NAMESPACE)

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

    def numbers(self, pod: str) -> dict[str, str]:
        """The numbers of the device nodes below /dev/dri in a container, in hexadecimal, by name."""
        command = ("sh", "-c", "cd /dev/dri && stat -c '%n %t:%T' card* renderD*")
        listed = self.cluster.kubectl("exec", pod, "--", *command)
        return dict(line.split() for line in listed.splitlines())

    def containers_with(self, device: str) -> set[str]:
        """The IDs of the containers whose processes see the device node."""
        found: set[str] = set()
        for process, container in self._processes():
            with suppress(OSError):  # the process has ended
                if (process / "root" / device.lstrip("/")).exists():
                    found.add(container)
        return found

    @contextmanager
    def blocked_runtime(self, container: str) -> Iterator[None]:
        """A container that cannot be stopped: its shim, the parent of its processes, does not answer the runtime."""
        processes = [process for process, each in self._processes() if each == container]
        parents = {re.findall(r"^PPid:\s+(\d+)", (each / "status").read_text(), re.MULTILINE)[0] for each in processes}
        (shim,) = parents - {each.name for each in processes}
        self.node.run("kill", "-STOP", shim)
        try:
            yield
        finally:
            self.node.run("kill", "-CONT", shim)

    def _processes(self) -> Iterator[tuple[Path, str]]:
        """The directories of processes below /proc, with the IDs of their containers."""
        for process in self.node.path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if found := re.search("[0-9a-f]{64}", (process / "cgroup").read_text()):
                    yield process, found[0]

    # What the driver leaves on the node

    def journal(self) -> dict[str, Object]:
        """The journal entries of claims, by the path of the file, of all drivers."""
        files = self.node.path("/var/lib/kubelet/plugins").glob("*/claims/*.json")
        return {str(file.relative_to(self.node.root)): json.loads(file.read_text()) for file in files}

    def cdi_files(self) -> list[str]:
        cdi = self.node.path(CDI_DIR)
        return sorted(str(path.relative_to(self.node.root)) for path in cdi.glob("k8s.*.json")) if cdi.is_dir() else []

    def left(self) -> Sequence[str]:
        """The journal entries and CDI files of claims."""
        return [*sorted(self.journal()), *self.cdi_files()]

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
