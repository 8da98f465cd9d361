"""Agents with dynamic resource allocation, at the embedded kubelet and the test double of the API server."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path

from accelplane.kube.testing import FakeApiServer
from accelplane.kubelet.embedded import AllocatedClaim, ClaimApiError, EmbeddedKubelet
from benchmarks.agent import AgentProcess, NodeSetup, agent, gpu_npu_node

NODE, DRIVER = "node-1", "gpu.intel.com"


class DraApi(FakeApiServer):
    """An API server of Kubernetes 1.37 with one node. It preserves all fields of slices."""

    def __init__(self) -> None:
        super().__init__()
        self.put("nodes", {"metadata": {"name": NODE}, "status": {"nodeInfo": {"kubeletVersion": "v1.37.0"}}})
        release = json.dumps({"minor": "37", "gitVersion": "v1.37.0"}).encode()
        group = json.dumps({"versions": [{"version": "v1"}]}).encode()
        self.fault("GET /(version)$", 200, times=-1, body=release)
        self.fault("GET /(apis/resource.k8s.io)$", 200, times=-1, body=group)

    def drivers(self) -> set[str]:
        """The drivers with published devices."""
        return {each["spec"]["driver"] for each in self.all("resourceslices") if each["spec"].get("devices")}

    def devices(self) -> list[str]:
        slices = (each["spec"] for each in self.all("resourceslices") if each["spec"]["driver"] == DRIVER)
        return [device["name"] for spec in slices for device in spec.get("devices") or ()]

    async def until_devices(self, count: int) -> None:
        await self.until(lambda: len(self.devices()) == count)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def allocate(self, name: str, device: str) -> str:
        """A claim with the device; returns its UID."""
        result = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device}
        status = {
            "allocation": {"devices": {"results": [result], "config": []}},
            "reservedFor": [{"resource": "pods", "name": "pod", "uid": "1"}],
        }
        claim = {"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": {}}, "status": status}
        return str(self.put("resourceclaims", claim)["metadata"]["uid"])


class _NoClaims:
    """The kubelet's requests: its pods have no claims."""

    async def claim(self, namespace: str, name: str) -> AllocatedClaim:
        raise ClaimApiError(f"{namespace}/{name} not found")

    async def delete_slices(self, driver: str) -> None:
        pass


@contextlib.asynccontextmanager
async def dra_agent(
    apis: str = "gpu=dra", drivers: int = 1, make: Callable[[], AbstractContextManager[NodeSetup]] = gpu_npu_node
) -> AsyncIterator[tuple[AgentProcess, DraApi, NodeSetup]]:
    """An agent with the setting `apis`, after the publication of the devices of all its drivers."""
    with make() as setup:
        async with DraApi() as api, EmbeddedKubelet(setup.kubelet_dir, claim_api=_NoClaims()):
            environment = {"NODE_NAME": NODE, "KUBECONFIG": _kubeconfig(setup, f"http://{api.address}")}
            with agent(setup, f"-dra-api={apis}", env=environment) as running:
                await api.until(lambda: len(api.drivers()) == drivers)
                yield running, api, setup


def _kubeconfig(setup: NodeSetup, server: str) -> str:
    """The path of a kubeconfig file."""
    path = Path(setup.directory, "kubeconfig")
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    path.write_text(json.dumps(content))
    return str(path)
