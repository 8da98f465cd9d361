"""The real kubelet of a node of `tests/cluster`, with the interface of the contract tests.

The agent under test stays in the test's process: `directory` is a link to the node's `/var/lib/kubelet`, which is a
plain directory on this computer's disk; sockets are independent of namespaces. A link also
keeps the sockets' paths short. Pods are real ones, bound to the node without a scheduler, so that the kubelet itself
has to admit or reject them; the allocated devices are read from the kubelet's checkpoint.
"""

import asyncio
import http
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cluster.build import kubernetes_minor
from cluster.cluster import Cluster
from cluster.machine import wait_until
from cluster.node import Node, NodePlan
from cluster.objects import pod
from kubelets import Counts, PodRejected
from waiting import until

from accelplane.kubelet.checkpoint import read_checkpoint
from accelplane.kubelet.embedded import BEHAVIOURS, RunningContainer

_KUBELET = Path("/var/lib/kubelet")
_NULL = (1, 3)
_REFUSALS = ("UnexpectedAdmissionError", "TopologyAffinityError")
# Allocated device nodes must exist, otherwise containers fail to start.
_DEVICES = [f"/dev/{name}" for name in ("a", "b", "c", "x", "y", "d0")]
_DEVICES += ["/dev/sgx_enclave", "/dev/sgx_provision"]
_DEVICES += ["/dev/onload", "/dev/onload_epoll", "/dev/sfc_char"]
_DEVICES += [f"/dev/dri/card{number}" for number in range(4)]
_DEVICES += [f"/dev/dri/renderD{128 + number}" for number in range(4)]
_FILES = [f"/dev/dri/by-path/pci-0000:{3 + card:02x}:00.0-{kind}" for card in range(4) for kind in ("card", "render")]

_FILES += [f"/opt/onload/versions/{version}/usr/lib64/libonload.so" for version in (1, 2)]


@contextmanager
def running_node() -> Iterator[Node]:
    """A node for any number of `Real`s, one after the other."""
    # Tests read resources from the node's status, so it is updated immediately.
    with Cluster.running([NodePlan(hardware=[_copy_in], kubelet={"nodeStatusUpdateFrequency": "200ms"})]) as cluster:
        yield cluster.nodes["node-1"]


def _copy_in(node: Node) -> None:
    for device in _DEVICES:
        node.mknod(device, *_NULL)
    for file in _FILES:
        node.write(file, "")
    # The agents' CDI directory is that of containerd.
    configuration = node.path("/etc/containerd/config.toml")
    configuration.write_text(configuration.read_text().replace('"/etc/cdi"', f'"{_KUBELET}/cdi"'))


class Real:
    """The node's kubelet, stopped and without state before `start` and after `close`."""

    def __init__(self, node: Node, directory: str) -> None:
        self.node = node
        self.directory = directory
        minor = kubernetes_minor()
        self.deletes_files = minor < 33
        self.behaviour = max((each for each in BEHAVIOURS if int(each.split(".")[1]) <= minor), default=BEHAVIOURS[0])
        self.cluster: Cluster = node.cluster
        self._path = f"/api/v1/nodes/{node.name}"
        self._plugins = node.disk / "root" / _KUBELET.relative_to("/") / "device-plugins"
        self._reset()
        os.rmdir(directory)
        os.symlink(self._plugins.parent, directory)

    def close(self) -> None:
        self._reset()
        os.unlink(self.directory)

    async def start(self) -> None:
        await asyncio.to_thread(self._start)

    async def kill(self) -> None:
        if self.node.kubelet.running:
            await asyncio.to_thread(self.node.kubelet.kill)

    async def restart(self) -> None:
        await asyncio.to_thread(self.node.kubelet.stop)
        await self.start()

    def resources(self) -> Mapping[str, Counts]:
        status = self._node()["status"]
        return {
            name: Counts(_number(capacity), _number(status["allocatable"].get(name, "0")))
            for name, capacity in sorted(status["capacity"].items())
            if "/" in name and _number(capacity)
        }

    async def until(self, condition: Callable[[Mapping[str, Counts]], bool], seconds: float = 10) -> None:
        async def has_device() -> bool:
            return condition(await asyncio.to_thread(self.resources))

        try:
            await until(has_device, seconds + 5)
        except TimeoutError:
            raise TimeoutError(
                f"the node's status shows {dict(self.resources())}\n{self.node.kubelet.tail()}"
            ) from None

    async def run_pod(self, name: str, wants: Mapping[str, int]) -> RunningContainer:
        described = pod(name, node=self.node.name, resources={each: str(count) for each, count in wants.items()})
        status, answer = await asyncio.to_thread(self.cluster.request, "POST", self._pods(), described)
        assert status == http.HTTPStatus.CREATED, answer
        uid = answer["metadata"]["uid"]

        def runs() -> bool:
            self._raise_refusal(uid)
            return _is_running(self.cluster.pod(name))

        await until(lambda: asyncio.to_thread(runs), 60)
        kept = read_checkpoint(str(self._plugins))
        holdings = {holding.resource: holding for holding in kept.holdings if holding.pod_uid == uid} if kept else {}
        return RunningContainer.of(
            (holdings[each].answer for each in sorted(holdings)), {each: holdings[each].ids for each in holdings}
        )

    async def delete_pod(self, name: str) -> None:
        # With a grace period the pod exists until its containers have ended and its devices are free.
        await asyncio.to_thread(self.cluster.request, "DELETE", self._pods(name), {"gracePeriodSeconds": 1})
        await until(lambda: asyncio.to_thread(lambda: self.cluster.pod(name) is None), 60)

    def _raise_refusal(self, uid: str) -> None:
        # The status of a rejected pod is written up to ten seconds later.
        chosen = f"involvedObject.uid={uid},type=Warning"
        for event in (self.cluster.get(f"/api/v1/namespaces/default/events?fieldSelector={chosen}") or {})["items"]:
            if event["reason"] in _REFUSALS or event["reason"].startswith("OutOf"):
                raise PodRejected(f"{event['reason']}: {event['message']}")

    def _start(self) -> None:
        # The status of the former kubelet remains: only that of the new one counts.
        self._forget_resources()
        self.node.kubelet.start()
        wait_until(lambda: _answers(f"{self.directory}/device-plugins/kubelet.sock"), "the kubelet's socket")

    def _reset(self) -> None:
        if self.node.kubelet.running:
            self.node.kubelet.kill()
        self.cluster.request("DELETE", self._pods(), {"gracePeriodSeconds": 0})
        shutil.rmtree(self._plugins, ignore_errors=True)
        shutil.rmtree(self._plugins.parent / "cdi", ignore_errors=True)
        self._forget_resources()

    def _forget_resources(self) -> None:
        def is_forgotten() -> bool:
            node = self._node()
            for amounts in (node["status"]["capacity"], node["status"]["allocatable"]):
                for name in [name for name in amounts if "/" in name]:
                    del amounts[name]
            return self.cluster.request("PUT", f"{self._path}/status", node)[0] == http.HTTPStatus.OK

        wait_until(is_forgotten, "the node's status without resources")

    def _node(self) -> dict[str, Any]:
        node = self.cluster.get(self._path)
        assert node is not None, "the API server does not answer"
        return node

    def _pods(self, name: str = "") -> str:
        return f"/api/v1/namespaces/default/pods/{name}".rstrip("/")


def _is_running(pod: dict[str, Any] | None) -> bool:
    """Raises `PodRejected` when a container cannot be started."""
    status = (pod or {}).get("status", {})
    for container in status.get("containerStatuses", ()):
        waiting = container["state"].get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            raise PodRejected(f"{waiting['reason']}: {waiting.get('message')}")
    return status.get("phase") == "Running"


def _number(quantity: str) -> int:
    """Whole numbers as Kubernetes writes them: 20000 is 20k."""
    return int(quantity.removesuffix("k")) * (1000 if quantity.endswith("k") else 1)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
        client.connect(path)
        return True
    return False
