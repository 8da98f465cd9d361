"""The scheduler's time per pod with claims, and the size of ResourceSlices, on a control plane with 1,000 kwok nodes.

Each node has the slices of a server with accelerators of seven families, and a slice of another driver, whose devices
have none of our attributes. API server, scheduler and controllers are real. Pods of all kinds are created in turns,
each one after the one before is bound. So the difference of two readings of the scheduler's metrics is one attempt.
"""

import http.client
import re
import socket
import ssl
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.figures import Figure, Result, Scale, median, percentile, quantile, single
from benchmarks.process import memory_of
from tests.cluster import settings
from tests.cluster.cluster import Cluster, why_unavailable
from tests.cluster.large_cluster import NODE_GRACE_PERIOD
from tests.cluster.machine import REPOSITORY, wait_until
from tests.kwokslices import foreign_slice, node_slices, simulated_offers

Json = dict[str, Any]
Totals = Mapping[tuple[str, str], float]

_CLASSES = (REPOSITORY / "deploy/dra/classes", REPOSITORY / "deploy/dra/extended-resources")
_API, _PODS = "/apis/resource.k8s.io/v1", "/api/v1/namespaces/default/pods"
_CLAIMS = f"{_API}/namespaces/default/resourceclaims"
_PLUGIN_RESOURCE, _CLASS_RESOURCE = "gpu.intel.com/i915", "npu.intel.com/accel"
_ANY, _UNGUARDED = "any.example.com", "unguarded.example.com"
_SHARES = {"gpu.intel.com": 4, "npu.intel.com": 4}
_TIMEOUT, _BIND_SECONDS, _FLUSH_SECONDS = 600.0, 60.0, 1.5
_SERIES = re.compile(r"^scheduler_(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_HEAP = re.compile(r"^# HeapAlloc = (\d+)$", re.MULTILINE)


class PodKind(Struct, frozen=True, kw_only=True):
    """The resources that a pod requests, or the class of each request of its claim.

    All devices of the claim have the same value of the attribute `same` if it is not empty.
    """

    name: str
    resources: Mapping[str, str] = {}
    requests: Mapping[str, str] = {}
    same: str = ""

    def claim(self, name: str) -> Json:
        requests = [{"name": key, "exactly": {"deviceClassName": each}} for key, each in self.requests.items()]
        constraints = [{"matchAttribute": self.same}] if self.same else []
        return {"metadata": {"name": name}, "spec": {"devices": {"requests": requests, "constraints": constraints}}}

    def pod(self, name: str) -> Json:
        """A pod that uses the claim of the same name if it has one."""
        resources: Json = {"limits": dict(self.resources)}
        spec: Json = {"containers": [{"name": "main", "image": settings.PAUSE_IMAGE, "resources": resources}]}
        if self.requests:
            resources["claims"] = [{"name": "devices"}]
            spec["resourceClaims"] = [{"name": "devices", "resourceClaimName": name}]
        return {"metadata": {"name": name}, "spec": spec}


def _of_class(name: str) -> PodKind:
    return PodKind(name=name, requests={"device": name})


_PLUGIN = PodKind(name=f"resource {_PLUGIN_RESOURCE} of a device plugin", resources={_PLUGIN_RESOURCE: "1"})
_NO_SELECTOR = PodKind(name="class without a selector", requests={"device": _ANY})
_KINDS = (
    _PLUGIN,
    _NO_SELECTOR,
    *map(_of_class, ("dsa.intel.com", "fpga.intel.com", "gpu.intel.com", "gpu-tile.intel.com")),
    *map(_of_class, ("npu.intel.com", "qat.intel.com")),
    PodKind(name=f"resource {_CLASS_RESOURCE} of a class", resources={_CLASS_RESOURCE: "1"}),
    PodKind(
        name="GPU and QAT function of one NUMA node",
        requests={"gpu": "gpu.intel.com", "qat": "qat.intel.com"},
        same="resource.kubernetes.io/numaNode",
    ),
)


class Attempt(Struct, frozen=True):
    """How long the scheduling of a pod took, in milliseconds, and the number of attempts before the successful one.

    `whole` includes the binding. `algorithm` is the selection of the node, `filters` the part of it that looks for
    nodes with devices.
    """

    whole: float
    algorithm: float
    filters: float
    failures: int


def measure(scale: Scale) -> Result:
    if problem := why_unavailable():
        return Result(skipped=problem)
    # With the limits of other clusters, two programs would collect garbage all the time.
    with Cluster.running([], silence=NODE_GRACE_PERIOD, variables={}) as cluster:
        return _Bench(cluster).measure(scale.of(1000, 10), scale.of(100, 3))


class _Bench:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # The scheduler signs its own certificate.
        self._tls = ssl.create_default_context()
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE

    def measure(self, number_of_nodes: int, count: int) -> Result:
        nodes = self._cluster.add_kwok_nodes(number_of_nodes, resources={_PLUGIN_RESOURCE: "8"}, timeout=_TIMEOUT)
        without_slices = [self._schedule(_PLUGIN, f"before-{number}") for number in range(count)]
        memory = self._memory()
        self._create_classes()
        published = self._publish(nodes)
        growth = [
            single(f"{name}: growth by the slices", value - memory[name], "MiB")
            for name, value in self._memory().items()
        ]
        size = self._stored_bytes(f"/registry/resourceslices/{nodes[0]}-") / 1024
        before = self._totals()
        attempts: dict[str, list[Attempt]] = {kind.name: [] for kind in _KINDS}
        for number in range(count):
            for position, kind in enumerate(_KINDS):
                attempts[kind.name].append(self._schedule(kind, f"pod-{number}-{position}"))
        time.sleep(_FLUSH_SECONDS)
        after = self._totals()
        errors = _sum(after, "schedule_attempts_total", 'result="error"')
        peers = {"plugin": attempts[_PLUGIN.name], "no selector": attempts[_NO_SELECTOR.name]}
        return Result(
            figures=(
                *(single(name, value, "") for name, value in published.items()),
                single("etcd: slices of a node", size, "KiB"),
                *growth,
                *_figures(f"{_PLUGIN.name}, no slices", without_slices, {}),
                *(figure for name, found in attempts.items() for figure in _figures(name, found, peers)),
                *_plugin_figures(before, after),
                single("attempts that ended with an error, CEL included", errors, "", budget=0),
                single("of 3 pods of a class that does not check the driver: CEL errors", self._abort(3), ""),
            ),
            notes=(
                f"{number_of_nodes} kwok nodes; on every second one, 4 containers share a GPU or NPU instead of tiles",
                f"{count} pods of each kind in turns, one at a time; everything shares the cores",
                "attempts include the binding; filters are the search for nodes, in parallel",
                "heap is what is left after garbage collection",
            ),
        )

    def _create(self, path: str, body: Json) -> None:
        status, answer = self._cluster.request("POST", path, body)
        if status != http.HTTPStatus.CREATED:
            raise RuntimeError(f"POST {path}: found status {status}, expected 201: {answer}")

    def _create_classes(self) -> None:
        for tree in _CLASSES:
            self._cluster.kubectl("apply", "--kustomize", tree)
        unguarded = {"cel": {"expression": 'device.attributes["gpu.intel.com"].type != "tile"'}}
        for name, selectors in ((_ANY, []), (_UNGUARDED, [unguarded])):
            self._create(f"{_API}/deviceclasses", {"metadata": {"name": name}, "spec": {"selectors": selectors}})

    def _publish(self, nodes: Sequence[str]) -> Mapping[str, int]:
        """Creates the slices of all nodes. Returns the number of slices and devices."""
        with tempfile.TemporaryDirectory() as tiles, tempfile.TemporaryDirectory() as shared:
            servers = (simulated_offers(Path(tiles)), simulated_offers(Path(shared), shares=_SHARES))
        slices = devices = 0
        with self._cluster.connection() as request:
            for number, name in enumerate(nodes):
                for body in (*node_slices(name, "", servers[number % 2]), foreign_slice(name)):
                    status, answer = request("POST", f"{_API}/resourceslices", body)
                    if status != http.HTTPStatus.CREATED:
                        raise RuntimeError(f"slice {body['metadata']['name']}: {answer}")
                    slices += 1
                    devices += len(body["spec"].get("devices") or ())
        return {"ResourceSlices": slices, "devices": devices}

    def _schedule(self, kind: PodKind, name: str) -> Attempt:
        before = self._totals()
        if kind.requests:
            self._create(_CLAIMS, kind.claim(name))
        self._create(_PODS, kind.pod(name))
        self._wait_for(name, lambda pod: "nodeName" in pod["spec"])
        scheduled = 'result="scheduled"'

        def grown(metric: str, *labels: str) -> float:
            return _sum(after, metric, *labels) - _sum(before, metric, *labels)

        after = self._totals()
        # The attempt is counted after the binding.
        while not grown("schedule_attempts_total", scheduled):
            after = self._totals()
        return Attempt(
            whole=grown("scheduling_attempt_duration_seconds_sum", scheduled) * 1e3,
            algorithm=grown("scheduling_algorithm_duration_seconds_sum") * 1e3,
            filters=grown("framework_extension_point_duration_seconds_sum", 'extension_point="Filter"') * 1e3,
            failures=int(grown("schedule_attempts_total")) - 1,
        )

    def _abort(self, count: int) -> int:
        """Creates pods of the class that does not check the driver. Returns how many a CEL error stops."""
        kind = _of_class(_UNGUARDED)
        names = [f"unguarded-{number}" for number in range(count)]
        for name in names:
            self._create(_CLAIMS, kind.claim(name))
            self._create(_PODS, kind.pod(name))
        pods = [self._wait_for(name, lambda pod: pod["status"].get("conditions")) for name in names]
        return sum("CEL runtime error" in str(pod["status"]["conditions"]) for pod in pods)

    def _wait_for(self, name: str, condition: Callable[[Json], object]) -> Json:
        pods: list[Json] = []

        def holds() -> object:
            pods[:] = [self._cluster.pod(name) or {}]
            return pods[0] and condition(pods[0])

        wait_until(holds, f"pod {name}", _BIND_SECONDS, every=0.01)
        return pods[0]

    def _scheduler_page(self, path: str) -> str:
        address = (self._cluster.addresses.control, settings.SCHEDULER_PORT)
        connection = http.client.HTTPSConnection(*address, context=self._tls, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"scheduler, {path}: found status {answer.status}, expected 200: {text}")
        return text

    def _totals(self) -> Totals:
        """All series of the scheduler, by name and labels."""
        found = _SERIES.findall(self._scheduler_page("/metrics"))
        return {(name, labels): float(value) for name, labels, value in found}

    def _memory(self) -> Mapping[str, float]:
        """Live heap and resident memory, in MiB."""
        path = "/debug/pprof/heap?gc=1&debug=1"
        pages = {"API server": self._cluster.request("GET", path)[1], "scheduler": self._scheduler_page(path)}
        found = {f"heap of the {name}": int(_HEAP.findall(page)[0]) / 2**20 for name, page in pages.items()}
        return found | {"resident memory of the API server": memory_of(self._cluster.apiserver.pid).resident}

    def _stored_bytes(self, prefix: str) -> int:
        """The size of keys and values in etcd, which listens in the machine only."""
        connection = http.client.HTTPConnection("127.0.0.1", 2379, timeout=30)
        connection.sock = self._cluster.control.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.sock.connect(("127.0.0.1", 2379))
        key, end = prefix.encode(), prefix[:-1].encode() + bytes([ord(prefix[-1]) + 1])
        body = {"key": b64encode(key).decode(), "range_end": b64encode(end).decode()}
        connection.request("POST", "/v3/kv/range", msgspec.json.encode(body))
        pairs = msgspec.json.decode(connection.getresponse().read())["kvs"]
        connection.close()
        return sum(len(b64decode(pair[part])) for pair in pairs for part in ("key", "value"))


def _sum(totals: Totals, name: str, *labels: str) -> float:
    """The sum of the series with this name and these labels, each `key="value"`."""
    return sum(
        value for (found, text), value in totals.items() if found == name and all(each in text for each in labels)
    )


def _figures(name: str, attempts: Sequence[Attempt], peers: Mapping[str, Sequence[Attempt]]) -> Iterator[Figure]:
    whole = [each.whole for each in attempts]
    others = {
        peer: quantile([each.whole for each in found], 0.5) for peer, found in peers.items() if found is not attempts
    }
    yield percentile(f"{name}: p50", [whole], 0.5, "ms", peers=others)
    yield percentile(f"{name}: p99", [whole], 0.99, "ms")
    yield median(f"{name}: selection of the node", [each.algorithm for each in attempts], "ms")
    yield median(f"{name}: filters", [each.filters for each in attempts], "ms")
    if failures := sum(each.failures for each in attempts):
        yield single(f"{name}: failed attempts", failures, "")


def _plugin_figures(before: Totals, after: Totals) -> Iterator[Figure]:
    """The mean of DynamicResources in each extension point. The scheduler samples a tenth of the attempts."""
    for point in ("PreFilter", "Filter", "Reserve", "PreBind"):
        labels = ('plugin="DynamicResources"', f'extension_point="{point}"')
        metric = "plugin_execution_duration_seconds"
        seconds, calls = (
            _sum(after, f"{metric}_{part}", *labels) - _sum(before, f"{metric}_{part}", *labels)
            for part in ("sum", "count")
        )
        if calls:
            yield single(f"DynamicResources, {point}: mean of a call", seconds / calls * 1e3, "ms", samples=int(calls))
