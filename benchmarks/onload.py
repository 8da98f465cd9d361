"""The Onload operator on a real control plane with 500 nodes of kwok: installation, and an upgrade of a tenth of the
nodes at a time.

Nodes, module pods and plugin pods are simulated; API server, controllers and scheduler are real.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, Result, Scale, single
from benchmarks.process import cpu_seconds, memory_of
from tests.cluster.cluster import why_unavailable
from tests.cluster.large_cluster import free_port, requests_of
from tests.cluster.machine import wait_until
from tests.cluster.onload_lab import NEW, OLD, SELECTOR, Lab, onload, running_lab

_TIMEOUT = 1500.0
# Seconds until the events of the last changes, and the status updates that follow them, are over; seconds at rest.
_SETTLE, _IDLE = 30, 60
_SHARE = "10%"


def measure(scale: Scale) -> Result:
    if problem := why_unavailable():
        return Result(skipped=problem)
    count = scale.of(500, 10)
    with tempfile.TemporaryDirectory() as directory, running_lab(Path(directory), 2, nodes=0) as lab:
        lab.cluster.add_kwok_nodes(count, prefix="node", labels=SELECTOR, timeout=_TIMEOUT)
        figures = _measure(lab, count)
    return Result(
        figures=figures,
        notes=(
            f"maxUnavailable {_SHARE}; kwok nodes, a KMM 2 double; everything shares the cores",
            "the operator sends at most 20 requests per second",
            "minReadySeconds is 0; with its default, each node of an upgrade takes 10 s longer",
        ),
    )


def _measure(lab: Lab, count: int) -> Sequence[Figure]:
    host, port = "127.0.0.1", free_port()
    with lab.operator(f"--metrics-bind-address={host}:{port}") as operator:
        assert operator.process is not None
        process = operator.process.pid
        figures: list[Figure] = []
        for name, version in (("installation", OLD), ("upgrade", NEW)):
            started, cpu = time.monotonic(), cpu_seconds(process)
            before = requests_of(host, port) if figures else {}
            if figures:
                lab.upgrade(version)
            else:
                lab.create(onload(version, upgrade={"maxUnavailable": _SHARE}))
            wait_until(lambda version=version: is_complete(lab, version, count), f"{name}: complete", _TIMEOUT, every=1)
            requests = requests_of(host, port)
            requests.subtract(before)
            label = f"{count} nodes, {name}"
            figures += [
                single(f"{label}: until all nodes are verified", time.monotonic() - started, "s"),
                single(f"{label}: processor time of the operator", cpu_seconds(process) - cpu, "s"),
                single(f"{label}: requests", requests.total(), ""),
                single(f"{label}: writes", sum(requests[each] for each in ("PATCH", "POST", "DELETE")), ""),
            ]
        figures += _idle(process, host, port, count)
        lab.delete()
        wait_until(lambda: not lab.resource(), "the resource: deleted", _TIMEOUT, every=1)
    return figures


def _idle(process: int, host: str, port: int, count: int) -> Sequence[Figure]:
    time.sleep(_SETTLE)
    cpu, before = cpu_seconds(process), requests_of(host, port).total()
    time.sleep(_IDLE)
    used, share = memory_of(process), 60 / _IDLE
    label = f"{count} nodes"
    return (
        single(f"{label}: resident", used.resident, "MiB"),
        single(f"{label}: anonymous", used.anonymous, "MiB"),
        single(f"{label}: peak resident", used.peak, "MiB", budget=128),
        single(f"{label}: processor time per minute, idle", (cpu_seconds(process) - cpu) * share * 1e3, "ms"),
        single(f"{label}: requests per minute, idle", (requests_of(host, port).total() - before) * share, ""),
    )


def is_complete(lab: Lab, version: str, count: int) -> bool:
    """Whether the status of the resource reports the version on all nodes."""
    found = lab.resource()
    status = found.get("status", {})
    onload_status = status.get("onload", {})
    return (
        status.get("observedGeneration") == found["metadata"]["generation"]
        and (onload_status.get("version"), onload_status.get("nodesUpgraded")) == (version, count)
        and lab.condition("Ready").get("status") == "True"
    )
