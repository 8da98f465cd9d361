"""The operator on a genuine control plane: with the eight samples and no node, then with a thousand nodes, all of which
have GPUs and one other kind each. What it takes, what it asks of the API server, and how soon it does what is asked.

Nodes and pods are pretended by kwok; API server, controllers and scheduler are the real ones.
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
from benchmarks.figures import Figure, Outcome, Scale, median, percentile, single
from benchmarks.process import cpu_seconds, memory_of
from tests.cluster import crowd
from tests.cluster.cluster import why_unavailable
from tests.cluster.installation import NAMESPACE, Installation

_BUDGET = 80
_EVERYWHERE = "gpu"
# Resident and anonymous, in MiB.
_GO_EMPTY, _GO_FULL = ("Go operator with 7 resources", 43.0, 12.5), ("Go operator", 60.0, 29.0)
_SETTLED, _PATIENCE = 5.0, 600.0

Requests = Callable[[], Counter[str]]


def measure(scale: Scale) -> Outcome:
    if problem := why_unavailable():
        return Outcome(skipped=problem)
    with tempfile.TemporaryDirectory() as directory, crowd.installed(Path(directory)) as installation:
        figures = _measured(installation, scale.of(1000, 20), scale.of(60, 5), scale.of(50, 5))
    return Outcome(
        figures=figures,
        notes=(
            "eight samples: GPUs on every node, and one of the other kinds; by kwok, on the same cores as all else",
            "a leader reads and writes its Lease every 2 s: 60 requests a minute",
            "an edit: from before the request until a watch reports the DaemonSet; no pods are replaced by it",
        ),
    )


def _measured(installation: Installation, nodes: int, idle: int, edits: int) -> Sequence[Figure]:
    cluster = installation.cluster
    others = [family for family in KINDS if family != _EVERYWHERE]
    having = {family: slice(number, None, len(others)) for number, family in enumerate(others)}
    having[_EVERYWHERE] = slice(None)
    with crowd.operator(installation) as (operator, requests):
        assert operator.process is not None
        process = operator.process.pid
        cluster.kubectl("apply", "--kustomize", crowd.SAMPLES)
        crowd.wait_told(cluster, dict.fromkeys(KINDS, 0), _PATIENCE)
        empty = _idle("no nodes", process, requests, idle, _GO_EMPTY)
        # First the nodes: kwok asks for all pods when a node is new.
        names = cluster.add_pretended_nodes(nodes, timeout=_PATIENCE)
        cpu, writes, started = cpu_seconds(process), crowd.status_writes(cluster), time.monotonic()
        for family, place in having.items():
            crowd.label(cluster, names[place], crowd.selected_by(family))
        counts = {family: len(names[place]) for family, place in having.items()}
        crowd.wait_told(cluster, counts, _PATIENCE)
        joined = f"{nodes} nodes are labelled"
        joining = (
            single(
                f"{joined}: until {sum(counts.values())} pods are ready and reported", time.monotonic() - started, "s"
            ),
            single(f"{joined}: processor time of the operator", cpu_seconds(process) - cpu, "s"),
            single(f"{joined}: writes of a status", (crowd.status_writes(cluster) - writes).total(), ""),
        )
        full = _idle(f"{nodes} nodes", process, requests, idle, _GO_FULL)
        times = asyncio.run(_edit(str(installation.kubeconfig), edits))
        edited = (
            median(f"{nodes} nodes: edit of a resource to DaemonSet", times, "ms"),
            percentile(f"{nodes} nodes: the same, p99", [times], 0.99, "ms"),
        )
    return (*empty, *joining, *full, *edited)


def _idle(
    name: str, process: int, requests: Requests, seconds: int, peer: tuple[str, float, float]
) -> Sequence[Figure]:
    time.sleep(_SETTLED)
    made, cpu = requests(), cpu_seconds(process)
    time.sleep(seconds)
    spent, asked = cpu_seconds(process) - cpu, requests() - made
    who, resident, anonymous = peer
    share = 60 / seconds
    used = memory_of(process)
    return (
        single(f"{name}: resident", used.resident, "MiB", budget=_BUDGET, peers={who: resident}),
        single(f"{name}: anonymous", used.anonymous, "MiB", peers={who: anonymous}),
        single(f"{name}: most resident so far", used.peak, "MiB"),
        single(f"{name}: processor time a minute, idle", spent * share * 1e3, "ms"),
        single(f"{name}: requests a minute, idle", asked.total() * share, ""),
    )


async def _edit(kubeconfig: str, count: int) -> Sequence[float]:
    """Milliseconds of each edit. It is of the update strategy, because a change of the pods would replace them all."""
    client = Client(load_config(kubeconfig), field_manager="benchmark")
    ours = Selection(NAMESPACE, labels="app=intel-gpu-plugin")
    times: list[float] = []
    try:
        version = (await client.list(DaemonSet, ours)).resource_version
        watch = client.watch(DaemonSet, ours, version, duration=_PATIENCE, idle=_PATIENCE)
        for number in range(count):
            most = 10 + number
            strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": most}}
            started = time.perf_counter()
            await client.patch(RESOURCES["gpu"], "gpudeviceplugin-sample", {"spec": {"updateStrategy": strategy}})
            async for event in watch:
                if f'"maxUnavailable":{most}'.encode() in bytes(event.object):
                    times.append((time.perf_counter() - started) * 1e3)
                    break
        await watch.aclose()
    finally:
        await client.close()
    return times
