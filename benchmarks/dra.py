"""Dynamic resource allocation: the cost of the agent with it as a ratio to the agent without it, and latencies.

The API server is the test double in this process. A claim is read from it once in each preparation: the time of such a
request, measured by itself, is subtracted.
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Sequence

import msgspec

from accelplane import rpc
from accelplane.apiserver import ApiServer
from accelplane.kubelet import dra_v1_pb2 as pb
from accelplane.node.settings import Settings
from benchmarks import dra_idle
from benchmarks.dra_agents import DRIVER, dra_agent
from benchmarks.dra_idle import SETTLE_SECONDS, Idle
from benchmarks.figures import Figure, Result, Scale, median, percentile, single
from benchmarks.syscall_timestamps import SyscallTimestamps

_RATIO, _PLUG = 1.5, 300
_GO = "seven Go plugins"
_PREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
_UNPREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources"


class _Claim(msgspec.Struct):
    metadata: dict[str, object]


def measure(scale: Scale) -> Result:
    # An agent without DRA wakes every 30 s.
    seconds, count = scale.of(int(Settings().safety_interval), 35), scale.of(3, 1)
    agents, isolated = dra_idle.run(seconds, count)
    rounds, requests, cpu = asyncio.run(_prepare(scale.of(5, 1), scale.of(100, 5)))
    plugged = asyncio.run(_plug(scale.of(20, 2)))
    share = sorted(requests)[len(requests) // 2]
    own = [[max(0.0, each - share) for each in times] for times in rounds]
    return Result(
        figures=(
            *_figures("", agents.plain, agents.cards),
            *_figures("all families, ordinary node: ", agents.ordinary, agents.ordinary_all),
            percentile("NodePrepareResources p50", own, 0.5, "ms"),
            percentile("NodePrepareResources p99", own, 0.99, "ms"),
            median("one request to the API server, subtracted", requests, "ms"),
            median("processor time to prepare and unprepare a claim", cpu, "ms"),
            median("plug to slice", plugged, "ms", budget=_PLUG),
            single("plug to slice, slowest", max(plugged), "ms", samples=len(plugged)),
        ),
        notes=(
            "4 cards by DRA, an NPU by the device plugin API; on the ordinary node all families by DRA",
            f"idle: over {seconds} s, the agents run at the same time; the API server is the test double",
            "no uevents reach the idle agents" if isolated else "other uevents of the machine wake the idle agents",
            "plug to slice: at most one write per second and node, so cards are plugged in every 1.2 to 1.6 s",
        ),
    )


def _figures(prefix: str, without: Sequence[Idle], with_dra: Sequence[Idle]) -> Sequence[Figure]:
    plain, claims = ([run.memory.resident for run in runs] for runs in (without, with_dra))
    anonymous = [[run.memory.anonymous for run in runs] for runs in (without, with_dra)]
    cpu = [[run.cpu for run in runs] for runs in (without, with_dra)]
    count = len(plain)
    return (
        median(f"{prefix}resident without DRA", plain, "MiB"),
        median(f"{prefix}resident with DRA", claims, "MiB", peers={_GO: 129}),
        single(f"{prefix}resident, ratio", _middle(claims) / _middle(plain), "", samples=count, budget=_RATIO),
        single(f"{prefix}anonymous, ratio", _middle(anonymous[1]) / _middle(anonymous[0]), "", samples=count),
        median(f"{prefix}processor time per minute without DRA", cpu[0], "ms"),
        median(f"{prefix}processor time per minute with DRA", cpu[1], "ms", peers={_GO: 60}),
        single(f"{prefix}processor time, ratio", _middle(cpu[1]) / _middle(cpu[0]), "", samples=count),
        median(f"{prefix}voluntary context switches per minute with DRA", [run.switches for run in with_dra], ""),
    )


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


async def _prepare(rounds: int, calls: int) -> tuple[Sequence[Sequence[float]], Sequence[float], Sequence[float]]:
    """Milliseconds of calls with a claim of one card each, in rounds, and of requests for a claim.

    The last are milliseconds of processor time to prepare and unprepare a claim, of each round.
    """
    numbers = itertools.count()
    found: list[list[float]] = [[] for _ in range(rounds)]
    requests: list[float] = []
    cpu: list[float] = []
    async with dra_agent() as (running, api, setup):
        await asyncio.sleep(SETTLE_SECONDS)
        (device, *_) = api.devices()
        client = ApiServer(api.config, idle_timeout=60).without_rate_limit()
        directory = f"{setup.kubelet_dir}/plugins/{DRIVER}"
        (socket,) = (name for name in os.listdir(directory) if name.endswith(".sock"))
        async with rpc.Channel(f"{directory}/{socket}") as channel:
            for times in found:
                before = running.cpu_seconds()
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
                cpu.append((running.cpu_seconds() - before) / calls * 1e3)
        client.close()
    return found, requests, cpu


async def _plug(count: int) -> Sequence[float]:
    """Milliseconds from the creation of a card's link until the API server has it in a slice."""
    found: list[float] = []
    spread = random.Random(1)  # noqa: S311 - random delays, not security
    async with dra_agent() as (_running, api, setup):
        first = len(api.devices())
        links = [f"{setup.node.root}/sys/class/drm/card{first + number}" for number in range(count)]
        timestamps = SyscallTimestamps(*links)
        for number, link in enumerate(links):
            await asyncio.sleep(spread.uniform(1.2, 1.6))
            await asyncio.to_thread(setup.node.plug_gpu)
            await api.until_devices(first + number + 1)
            found.append((time.perf_counter() - timestamps.at[link]) * 1e3)
    return found
