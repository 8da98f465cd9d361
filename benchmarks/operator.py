"""The operator on a real control plane: memory, processor time, requests, and latency from an edit to the DaemonSet.

With the eight samples and no nodes, then with a thousand nodes that have GPUs and one other kind each. Nodes and pods
are simulated by kwok; API server, controllers and scheduler are real.
"""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from accelplane.kube.client import Client, Selection, load_config
from accelplane.operator.models import KINDS
from accelplane.operator.resources import KINDS as RESOURCES
from accelplane.operator.resources import DaemonSet
from benchmarks.figures import Figure, Result, Scale, median, percentile, single
from benchmarks.process import cpu_seconds, memory_of
from tests.cluster import large_cluster
from tests.cluster.cluster import why_unavailable
from tests.cluster.installation import NAMESPACE, Installation

_BUDGET = 80
_EVERYWHERE = "gpu"
# Resident and anonymous, in MiB.
_GO_EMPTY, _GO_FULL = ("Go operator with 7 resources", 43.0, 12.5), ("Go operator", 60.0, 29.0)
_SETTLE_SECONDS, _TIMEOUT = 5.0, 600.0

Requests = Callable[[], Counter[str]]


def measure(scale: Scale) -> Result:
    if problem := why_unavailable():
        return Result(skipped=problem)
    with tempfile.TemporaryDirectory() as directory, large_cluster.installed(Path(directory)) as installation:
        figures = _measure(installation, scale.of(1000, 20), scale.of(60, 5), scale.of(50, 5))
    return Result(
        figures=figures,
        notes=(
            "eight samples; each kwok node has GPUs and one other kind; everything shares the cores",
            "the leader reads and writes its Lease every 2 s: 60 requests per minute",
            "edit: from the start of the request until a watch reports the DaemonSet; it replaces no pods",
        ),
    )


def _measure(installation: Installation, nodes: int, idle: int, edits: int) -> Sequence[Figure]:
    cluster = installation.cluster
    others = [family for family in KINDS if family != _EVERYWHERE]
    nodes_of = {family: slice(number, None, len(others)) for number, family in enumerate(others)}
    nodes_of[_EVERYWHERE] = slice(None)
    with large_cluster.operator(installation) as (operator, requests):
        assert operator.process is not None
        process = operator.process.pid
        cluster.kubectl("apply", "--kustomize", large_cluster.SAMPLES)
        large_cluster.wait_for_statuses(cluster, dict.fromkeys(KINDS, 0), _TIMEOUT)
        empty = _idle("no nodes", process, requests, idle, _GO_EMPTY)
        # The nodes come first: kwok lists all pods for each new node.
        names = cluster.add_kwok_nodes(nodes, timeout=_TIMEOUT)
        cpu, writes, started = cpu_seconds(process), large_cluster.status_writes(cluster), time.monotonic()
        for family, place in nodes_of.items():
            large_cluster.label(cluster, names[place], large_cluster.selected_by(family))
        counts = {family: len(names[place]) for family, place in nodes_of.items()}
        large_cluster.wait_for_statuses(cluster, counts, _TIMEOUT)
        label = f"{nodes} nodes are labelled"
        labelled = (
            single(
                f"{label}: until {sum(counts.values())} pods are ready and reported", time.monotonic() - started, "s"
            ),
            single(f"{label}: processor time of the operator", cpu_seconds(process) - cpu, "s"),
            single(f"{label}: status writes", (large_cluster.status_writes(cluster) - writes).total(), ""),
        )
        full = _idle(f"{nodes} nodes", process, requests, idle, _GO_FULL)
        times = asyncio.run(_edit(str(installation.kubeconfig), edits))
        edited = (
            median(f"{nodes} nodes: edit of a resource to DaemonSet", times, "ms"),
            percentile(f"{nodes} nodes: the same, p99", [times], 0.99, "ms"),
        )
    return (*empty, *labelled, *full, *edited)


def _idle(
    name: str, process: int, requests: Requests, seconds: int, peer: tuple[str, float, float]
) -> Sequence[Figure]:
    time.sleep(_SETTLE_SECONDS)
    sent_before, cpu = requests(), cpu_seconds(process)
    time.sleep(seconds)
    cpu_time, sent = cpu_seconds(process) - cpu, requests() - sent_before
    peer_name, resident, anonymous = peer
    share = 60 / seconds
    used = memory_of(process)
    return (
        single(f"{name}: resident", used.resident, "MiB", budget=_BUDGET, peers={peer_name: resident}),
        single(f"{name}: anonymous", used.anonymous, "MiB", peers={peer_name: anonymous}),
        single(f"{name}: peak resident", used.peak, "MiB"),
        single(f"{name}: processor time per minute, idle", cpu_time * share * 1e3, "ms"),
        single(f"{name}: requests per minute, idle", sent.total() * share, ""),
    )


async def _edit(kubeconfig: str, count: int) -> Sequence[float]:
    """Milliseconds of each edit. It changes the update strategy: a change of the pod template replaces all pods."""
    client = Client(load_config(kubeconfig), field_manager="benchmark")
    selection = Selection(NAMESPACE, labels="app=intel-gpu-plugin")
    times: list[float] = []
    try:
        version = (await client.list(DaemonSet, selection)).resource_version
        watch = client.watch(DaemonSet, selection, version, duration=_TIMEOUT, idle=_TIMEOUT)
        for number in range(count):
            max_unavailable = 10 + number
            strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": max_unavailable}}
            started = time.perf_counter()
            await client.patch(RESOURCES["gpu"], "gpudeviceplugin-sample", {"spec": {"updateStrategy": strategy}})
            async for event in watch:
                if f'"maxUnavailable":{max_unavailable}'.encode() in bytes(event.object):
                    times.append((time.perf_counter() - started) * 1e3)
                    break
        await watch.aclose()
    finally:
        await client.close()
    return times
