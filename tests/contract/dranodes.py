"""A node with DRA: simulated GPUs, the embedded kubelet, a double of the API server, an agent in this process."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from sliceservers import NODE, SliceServer
from waiting import until

from accelplane.apiserver import ApiServer
from accelplane.kubelet.embedded import AllocatedClaim, ClaimApiError, EmbeddedKubelet, Pod
from accelplane.node.agent import Agent
from accelplane.node.dra.driver import NodeAccess
from accelplane.node.settings import Settings
from accelplane.node.status import DraStatus
from accelplane.plugins import Config, Plugin
from accelplane.plugins.gpu import GpuPlugin
from accelplane.simulate.specs import GpuSpec, NodeSpec
from accelplane.simulate.tree import SimulatedNode

GPU = "gpu.intel.com"
I915 = "gpu.intel.com/i915"


class ClaimsOfServer:
    """The kubelet's requests to the double."""

    def __init__(self, server: SliceServer) -> None:
        self._server = server

    async def claim(self, namespace: str, name: str) -> AllocatedClaim:
        found = self._server.get("resourceclaims", name, namespace)
        if found is None:
            raise ClaimApiError(f'resourceclaims.resource.k8s.io "{name}" not found')
        results = found["status"]["allocation"]["devices"]["results"]
        return AllocatedClaim(
            namespace=namespace,
            name=name,
            uid=found["metadata"]["uid"],
            drivers=tuple(dict.fromkeys(each["driver"] for each in results)),
            reserved_for=tuple(each["name"] for each in found["status"]["reservedFor"]),
        )

    async def delete_slices(self, driver: str) -> None:
        for each in self._server.all("resourceslices"):
            if driver in ("", each["spec"]["driver"]):
                self._server.remove("resourceslices", each["metadata"]["name"])


class DraNode:
    """Two simulated GPUs. `settings` are those of the next agent; `switch` changes those of the running one."""

    def __init__(self, directory: str, tmp_path: Path, server: SliceServer) -> None:
        self.directory = directory
        self.server = server
        self.hardware = SimulatedNode(tmp_path / "root")
        self.cards = self.hardware.build(NodeSpec(gpus=[GpuSpec(), GpuSpec()]))
        self.kubelet = EmbeddedKubelet(directory, claim_api=ClaimsOfServer(server), unprepare_interval=0.2, seed=1)
        self.config = tmp_path / "etc" / "config"
        self.config.parent.mkdir()
        self.config.touch()
        self.settings = Settings(
            root=str(tmp_path / "root"), kubelet_dir=directory, cdi_dir=f"{tmp_path}/cdi", dra_api="gpu=dra"
        )
        self.plugins: dict[str, Plugin[Config]] = {"gpu": GpuPlugin()}
        self.agent: Agent
        self._numbers = itertools.count(1)

    def make_agent(self) -> Agent:
        return Agent(
            self.settings,
            self.plugins,
            config_file=str(self.config),
            reload=lambda: (self.settings, self.plugins),
            dra=lambda: NodeAccess(api=ApiServer(self.server.config), node=NODE),
        )

    @asynccontextmanager
    async def agent_running(self) -> AsyncIterator[Agent]:
        self.agent = self.make_agent()
        task = asyncio.create_task(self.agent.run())
        try:
            yield self.agent
        finally:
            self.agent.stop()
            await task

    def switch(self, api: str) -> None:
        self.settings = replace(self.settings, dra_api=api)
        self.config.write_text(api)

    @property
    def status(self) -> DraStatus:
        return self.agent.status().dra.get("gpu", DraStatus())

    async def until_connected(self) -> None:
        """Waits until the kubelet has registered the driver."""
        await self.kubelet.until(lambda kubelet: kubelet.dra is not None and GPU in kubelet.dra.plugins.names())

    def published(self) -> Sequence[str]:
        """The devices in the slices."""
        return sorted(self.server.devices())

    async def until_published(self, *devices: str) -> None:
        await until(lambda: self.published() == sorted(devices))

    def names(self) -> Sequence[str]:
        """The names of the devices of the GPUs."""
        return sorted(name for unit in self.status.units.values() for name in unit.devices)

    async def until_registered(self, count: int = 2) -> Sequence[str]:
        """Waits until the devices are published, and returns their names."""
        await until(lambda: self.status.stage == "registered" and len(self.published()) == count)
        return self.published()

    def allocate(self, device: str, *pods: str, name: str = "", driver: str = GPU, **result: Any) -> str:
        """What the scheduler does: a new claim with the device, reserved for the pods. Returns its name."""
        name = name or f"claim-{next(self._numbers)}"
        request = {"request": "gpu", "driver": driver, "pool": NODE, "device": device, **result}
        self.server.put(
            "resourceclaims",
            {
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": driver}}]}},
                "status": {
                    "allocation": {"devices": {"results": [request], "config": []}},
                    "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods],
                },
            },
        )
        return name

    async def run_pod(self, name: str, claim: str) -> tuple[str, ...]:
        """The CDI devices of a pod's container. Raises `PodStartError`."""
        pod = Pod(name, containers={"main": {}}, claims={"gpu": claim}, container_claims={"main": ["gpu"]})
        return (await self.kubelet.run_pod(pod)).containers["main"].cdi_devices

    def claims(self) -> Mapping[str, Sequence[str]]:
        """The claims by device."""
        return {unit.devices[0]: unit.claims for unit in self.status.units.values() if unit.claims}
