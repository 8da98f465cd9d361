"""A test double of the kubelets of kwok nodes for the Onload device plugin: `python -m tests.cluster.onload_devices`.

A node of kwok has no device plugins. This program sets the amount of `amd.com/onload` of such a node as its kubelet
would: to the number of devices while a pod of the device plugin is ready, and to 0 afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

import msgspec

from accelplane.apiserver.ratelimit import RateLimit
from accelplane.kube.client import Client, Selection, load_config
from accelplane.kube.manager import OFF, Manager
from accelplane.kube.objects import ApiInfo, GlobalResource, Metadata, Request, api, is_terminating

from .kmm_kinds import Pod

RESOURCE = "amd.com/onload"
PLUGIN_LABEL = "onload.amd.com/name"
DEVICES = "100"


class Status(msgspec.Struct, frozen=True):
    allocatable: dict[str, str] = {}


class Node(GlobalResource, msgspec.Struct):
    metadata: Metadata
    status: Status = Status()
    _api_info: ClassVar[ApiInfo] = api("", "v1", "Node", "nodes")


async def run() -> None:
    client = Client(load_config(), field_manager="kubelet", rate_limit=RateLimit(500, 1000))
    manager = Manager(client, health_address=OFF, metrics_address=OFF, shutdown_delay=0)
    nodes = manager.cache(Node)
    pods = manager.cache(Pod, Selection(labels=PLUGIN_LABEL))
    pods.add_index("node", lambda pod: [pod.spec.node_name])

    async def reconcile(request: Request) -> None:
        node = nodes.get(request)
        if node is None or "kwok.x-k8s.io/node" not in (node.metadata.annotations or {}):
            return
        ready = any(pod.status.ready and not is_terminating(pod) for pod in pods.by_index("node", request.name))
        found, amount = node.status.allocatable.get(RESOURCE), DEVICES if ready else "0"
        if found != amount and (ready or found is not None):
            change = {"status": {"allocatable": {RESOURCE: amount}, "capacity": {RESOURCE: amount}}}
            await client.patch(Node, request.name, change, subresource="status")

    controller = manager.controller("devices", reconcile, workers=8, max_delay=1)
    controller.for_object(nodes).watches(pods, lambda pod: [Request(pod.spec.node_name)])
    await manager.run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(run())
