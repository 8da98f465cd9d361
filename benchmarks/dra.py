"""Dynamic resource allocation: the cost of the agent with it as a ratio to the agent without it, and latencies.

The API server is the test double in this process. A claim is read from it once in each preparation: the time of such a
request, measured by itself, is subtracted.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from accelplane import rpc
from accelplane.apiserver import ApiServer
from accelplane.kube.testing import FakeApiServer
from accelplane.kubelet import dra_v1_pb2 as pb
from accelplane.kubelet.embedded import AllocatedClaim, ClaimApiError, EmbeddedKubelet
from benchmarks.agent import AgentProcess, Memory, NodeSetup, agent, gpu_npu_node, registered_agent
from benchmarks.figures import Result, Scale, median, percentile, single
from benchmarks.syscall_timestamps import SyscallTimestamps

_NODE, _DRIVER = "node-1", "gpu.intel.com"
_RATIO, _PLUG = 1.5, 300
_PREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
_UNPREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources"
_SETTLE_SECONDS = 5


class _Api(FakeApiServer):
    """An API server of Kubernetes 1.37 with one node. It preserves all fields of slices."""

    def __init__(self) -> None:
        super().__init__()
        self.put("nodes", {"metadata": {"name": _NODE}, "status": {"nodeInfo": {"kubeletVersion": "v1.37.0"}}})
        release = json.dumps({"minor": "37", "gitVersion": "v1.37.0"}).encode()
        group = json.dumps({"versions": [{"version": "v1"}]}).encode()
        self.fault("GET /(version)$", 200, times=-1, body=release)
        self.fault("GET /(apis/resource.k8s.io)$", 200, times=-1, body=group)

    def devices(self) -> list[str]:
        slices = (each["spec"] for each in self.all("resourceslices") if each["spec"]["driver"] == _DRIVER)
        return [device["name"] for spec in slices for device in spec.get("devices") or ()]

    async def until_devices(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.devices()) != count:
                self.changed.clear()
                await self.changed.wait()

    def allocate(self, name: str, device: str) -> str:
        """A claim with the device; returns its UID."""
        result = {"request": "gpu", "driver": _DRIVER, "pool": _NODE, "device": device}
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


class _Claim(msgspec.Struct):
    metadata: dict[str, object]


def measure(scale: Scale) -> Result:
    count, seconds = scale.of(3, 1), scale.of(120, 5)
    without = [asyncio.run(_without(seconds if number == 0 else 0)) for number in range(count)]
    with_dra = [asyncio.run(_with(seconds if number == 0 else 0)) for number in range(count)]
    plain, claims = ([memory.resident for memory, _cpu in runs] for runs in (without, with_dra))
    anonymous = [[memory.anonymous for memory, _cpu in runs] for runs in (without, with_dra)]
    rounds, requests = asyncio.run(_prepare(scale.of(5, 1), scale.of(100, 5)))
    plugged = asyncio.run(_plug(scale.of(20, 2)))
    share = sorted(requests)[len(requests) // 2]
    own = [[max(0.0, each - share) for each in times] for times in rounds]
    return Result(
        figures=(
            median("resident without DRA", plain, "MiB"),
            median("resident with DRA", claims, "MiB"),
            single("resident, ratio", _middle(claims) / _middle(plain), "", samples=count, budget=_RATIO),
            single("anonymous, ratio", _middle(anonymous[1]) / _middle(anonymous[0]), "", samples=count),
            single("idle processor time per minute without DRA", without[0][1], "ms", samples=1),
            single("idle processor time per minute with DRA", with_dra[0][1], "ms", samples=1),
            percentile("NodePrepareResources p50", own, 0.5, "ms"),
            percentile("NodePrepareResources p99", own, 0.99, "ms"),
            median("one request to the API server, subtracted", requests, "ms"),
            median("plug to slice", plugged, "ms", budget=_PLUG),
            single("plug to slice, slowest", max(plugged), "ms", samples=len(plugged)),
        ),
        notes=(
            "4 cards and an NPU; the cards by DRA, the NPU by the device plugin API",
            f"idle: over {seconds} s; the API server is the test double",
            "plug to slice: at most one write per second and node, so cards are plugged in every 1.2 to 1.6 s",
        ),
    )


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


async def _without(seconds: float) -> tuple[Memory, float]:
    with gpu_npu_node() as setup:
        async with registered_agent(setup) as (running, _kubelet):
            return await _idle(running, seconds)


async def _with(seconds: float) -> tuple[Memory, float]:
    async with _dra_agent() as (running, _api, _setup):
        return await _idle(running, seconds)


async def _idle(running: AgentProcess, seconds: float) -> tuple[Memory, float]:
    """The memory, and milliseconds of processor time per minute if `seconds` is not 0."""
    await asyncio.sleep(_SETTLE_SECONDS if seconds else 1)
    before = running.cpu_seconds()
    await asyncio.sleep(seconds)
    cpu = (running.cpu_seconds() - before) * 60e3 / seconds if seconds else 0.0
    return running.memory(), cpu


@contextlib.asynccontextmanager
async def _dra_agent() -> AsyncIterator[tuple[AgentProcess, _Api, NodeSetup]]:
    """An agent that has published its cards."""
    with gpu_npu_node() as setup:
        async with _Api() as api, EmbeddedKubelet(setup.kubelet_dir, claim_api=_NoClaims()):
            environment = {"NODE_NAME": _NODE, "KUBECONFIG": _kubeconfig(setup, f"http://{api.address}")}
            with agent(setup, "-dra-api=gpu=dra", env=environment) as running:
                await api.until_devices(len(setup.node.devices()) - 1)
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


async def _prepare(rounds: int, calls: int) -> tuple[Sequence[Sequence[float]], Sequence[float]]:
    """Milliseconds of calls with a claim of one card each, in rounds, and of requests for a claim."""
    numbers = itertools.count()
    found: list[list[float]] = [[] for _ in range(rounds)]
    requests: list[float] = []
    async with _dra_agent() as (_running, api, setup):
        (device, *_) = api.devices()
        client = ApiServer(api.config, idle_timeout=60).without_rate_limit()
        directory = f"{setup.kubelet_dir}/plugins/{_DRIVER}"
        (socket,) = (name for name in os.listdir(directory) if name.endswith(".sock"))
        async with rpc.Channel(f"{directory}/{socket}") as channel:
            for times in found:
                for _ in range(calls):
                    name = f"claim-{next(numbers)}"
                    claim = pb.Claim(namespace="default", name=name, uid=api.allocate(name, device))
                    start = time.perf_counter()
                    request = pb.NodePrepareResourcesRequest(claims=[claim])
                    answer = await channel.call(_PREPARE, request, pb.NodePrepareResourcesResponse, deadline=45)
                    times.append((time.perf_counter() - start) * 1e3)
                    if error := answer.claims[claim.uid].error:
                        raise RuntimeError(f"NodePrepareResources: {error}")
                    end = pb.NodeUnprepareResourcesRequest(claims=[claim])
                    await channel.call(_UNPREPARE, end, pb.NodeUnprepareResourcesResponse, deadline=45)
                    start = time.perf_counter()
                    await client.get(f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{name}", _Claim)
                    requests.append((time.perf_counter() - start) * 1e3)
        client.close()
    return found, requests


async def _plug(count: int) -> Sequence[float]:
    """Milliseconds from the creation of a card's link until the API server has it in a slice."""
    found: list[float] = []
    spread = random.Random(1)  # noqa: S311 - random delays, not security
    async with _dra_agent() as (_running, api, setup):
        first = len(api.devices())
        links = [f"{setup.node.root}/sys/class/drm/card{first + number}" for number in range(count)]
        timestamps = SyscallTimestamps(*links)
        for number, link in enumerate(links):
            await asyncio.sleep(spread.uniform(1.2, 1.6))
            await asyncio.to_thread(setup.node.plug_gpu)
            await api.until_devices(first + number + 1)
            found.append((time.perf_counter() - timestamps.at[link]) * 1e3)
    return found
