"""One operator process for both products, the Intel device plugins and Onload, with 1,000 nodes of kwok: its memory,
and its processor time while nothing changes.

Nodes and pods are simulated; API server, controllers and scheduler are the real ones.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from accelplane.operator.models import KINDS
from benchmarks.figures import Figure, Result, Scale, single
from benchmarks.onload import is_complete
from benchmarks.process import cpu_seconds, memory_of
from tests.cluster import large_cluster
from tests.cluster.cluster import why_unavailable
from tests.cluster.installation import CRD, NAMESPACE, Installation
from tests.cluster.machine import wait_until
from tests.cluster.onload_lab import OLD, PLUGIN_IMAGE, SELECTOR, Lab, onload, running_lab

_TIMEOUT = 1500.0
_ON_ALL_NODES = "gpu"
# Nodes on which Onload is installed at the same time.
_SHARE = "10%"


def measure(scale: Scale) -> Result:
    if problem := why_unavailable():
        return Result(skipped=problem)
    count = scale.of(1000, 20)
    with tempfile.TemporaryDirectory() as directory, running_lab(Path(directory), 2, nodes=0) as lab:
        figures = _measure(lab, Path(directory), count, scale.of(120, 10))
    return Result(
        figures=figures,
        notes=(
            "eight samples: GPUs on every node, and one other kind; Onload on every node, with a double of KMM 2",
            "at rest: nothing changes in the cluster; kwok updates the status of a node every ten minutes",
        ),
    )


def _measure(lab: Lab, directory: Path, count: int, seconds: int) -> Sequence[Figure]:
    cluster = lab.cluster
    cluster.kubectl("apply", "--server-side", "--kustomize", CRD)
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", CRD / "bases")
    cluster.kubectl("create", "namespace", NAMESPACE)
    installation = Installation(cluster, directory)
    host, port = cluster.addresses.host, large_cluster.free_port()
    flags = ("-onload", "-leader-elect", f"-metrics-bind-address={host}:{port}")
    with installation.operator(*flags, DEVICE_PLUGIN_IMG=PLUGIN_IMAGE) as operator:
        assert operator.process is not None
        process = operator.process.pid
        cluster.kubectl("apply", "--kustomize", large_cluster.SAMPLES)
        lab.create(onload(OLD, upgrade={"maxUnavailable": _SHARE}))
        started = time.monotonic()
        counts = _add_nodes(lab, count)
        large_cluster.wait_for_statuses(cluster, counts, _TIMEOUT)
        wait_until(lambda: is_complete(lab, OLD, count), "Onload: complete", _TIMEOUT, every=1)
        complete = single(f"{count} nodes: until both products are ready on all", time.monotonic() - started, "s")
        return complete, *_at_rest(process, host, port, count, seconds)


def _add_nodes(lab: Lab, count: int) -> dict[str, int]:
    """Adds the nodes, labelled for both products. Returns how many nodes each kind of device plugin selects."""
    others = [family for family in KINDS if family != _ON_ALL_NODES]
    cluster = lab.cluster
    names = cluster.add_kwok_nodes(count, prefix="node", labels=SELECTOR, timeout=_TIMEOUT)
    counts = {_ON_ALL_NODES: count}
    for number, family in enumerate(others):
        selected = names[number :: len(others)]
        large_cluster.label(cluster, selected, large_cluster.selected_by(_ON_ALL_NODES, family))
        counts[family] = len(selected)
    return counts


def _at_rest(process: int, host: str, port: int, count: int, seconds: int) -> Sequence[Figure]:
    # Events of the last changes, and the status updates that follow them, are over by then.
    time.sleep(30)
    requests, cpu = large_cluster.requests_of(host, port).total(), cpu_seconds(process)
    time.sleep(seconds)
    used, share = memory_of(process), 60 / seconds
    spent, sent = cpu_seconds(process) - cpu, large_cluster.requests_of(host, port).total() - requests
    return (
        single(f"{count} nodes: resident", used.resident, "MiB", budget=80),
        single(f"{count} nodes: anonymous", used.anonymous, "MiB"),
        single(f"{count} nodes: most resident so far", used.peak, "MiB"),
        single(f"{count} nodes: processor time a minute, at rest", spent * share * 1e3, "ms", budget=200),
        single(f"{count} nodes: requests a minute, at rest", sent * share, ""),
    )
