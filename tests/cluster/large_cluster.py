"""A control plane with many kwok nodes and the eight samples, and the operator's requests and status writes."""

from __future__ import annotations

import http.client
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelplane.operator import models

from .cluster import Cluster
from .installation import CRD, NAMESPACE, Installation, Operator
from .machine import REPOSITORY, wait_until

SAMPLES = REPOSITORY / "deploy" / "operator" / "samples"
# The heartbeats of a thousand kwok nodes are late on a busy machine; the default grace period of 12 s is too short.
NODE_GRACE_PERIOD = 3600
_COUNTED = re.compile(
    r'^rest_client_requests_total\{code="([^"]*)",host="[^"]*",method="([A-Z]+)"\} (\S+)$', re.MULTILINE
)
_SERVED = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)


def selected_by(*families: str) -> dict[str, str]:
    """The labels of a node that the samples of these families select."""
    names = {family: family for family in models.KINDS} | {"fpga": "fpga-arria10"}
    labels = {f"intel.feature.node.kubernetes.io/{names[family]}": "true" for family in families}
    return {"kubernetes.io/arch": "amd64", **labels}


@contextmanager
def installed(directory: Path) -> Iterator[Installation]:
    """A control plane for many nodes, with the operator's CustomResourceDefinitions."""
    with Cluster.running([], silence=NODE_GRACE_PERIOD) as cluster:
        cluster.kubectl("apply", "--server-side", "--kustomize", CRD)
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", CRD / "bases")
        cluster.kubectl("create", "namespace", NAMESPACE)
        yield Installation(cluster, directory)


def label(cluster: Cluster, nodes: Iterable[str], labels: Mapping[str, str | None]) -> None:
    """Sets labels of nodes, and removes those that are None."""
    with cluster.connection() as request:
        for name in nodes:
            change = {"metadata": {"labels": dict(labels)}}
            code, answer = request("PATCH", f"/api/v1/nodes/{name}", change, content="application/merge-patch+json")
            assert code == http.HTTPStatus.OK, answer


@contextmanager
def operator(installation: Installation) -> Iterator[tuple[Operator, Callable[[], Counter[str]]]]:
    """Runs an operator with leader election. Yields it and a function that returns its number of requests by method."""
    host, port = installation.cluster.addresses.host, free_port()
    with installation.operator("-leader-elect", f"-metrics-bind-address={host}:{port}") as running:
        yield running, lambda: requests_of(host, port)


def requests_of(host: str, port: int) -> Counter[str]:
    """The number of requests by method, from the metrics of an operator."""
    counts: Counter[str] = Counter()
    for _, method, count in _COUNTED.findall(_page(host, port, "/metrics")):
        counts[method] += int(float(count))
    return counts


def samples(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """The present samples, by family."""
    path = "/apis/deviceplugin.intel.com/v1/{0}deviceplugins/{0}deviceplugin-sample"
    with cluster.connection() as request:
        answers = {family: request("GET", path.format(family)) for family in models.KINDS}
    return {family: found for family, (status, found) in answers.items() if status == http.HTTPStatus.OK}


def is_reported(resource: Mapping[str, Any], nodes: int) -> bool:
    """Whether the status of a resource reports `nodes` nodes with its plugin, and only the condition Available."""
    status = resource.get("status", {})
    counts = (status.get("desiredNumberScheduled"), status.get("numberReady"), len(status.get("nodeNames") or ()))
    generation = resource["metadata"]["generation"]
    current = [each for each in status.get("conditions", ()) if each["observedGeneration"] == generation]
    holds = {each["type"] for each in current if each["status"] == "True"}
    return counts == (nodes, nodes, nodes) and holds == {"Available"}


def wait_for_statuses(cluster: Cluster, counts: Mapping[str, int], timeout: float) -> None:
    """Waits until the status of every family reports its number of nodes."""

    def are_reported() -> bool:
        found = samples(cluster)
        return len(found) == len(counts) and all(is_reported(found[family], counts[family]) for family in counts)

    wait_until(are_reported, f"statuses: {counts}", timeout, every=0.5)


def status_writes(cluster: Cluster, group: str = "deviceplugin.intel.com") -> Counter[str]:
    """The number of status writes of the group's resources by kind, from the metrics of the API server."""
    status, text = cluster.request("GET", "/metrics")
    assert status == http.HTTPStatus.OK, text
    counts: Counter[str] = Counter()
    for pairs, count in _SERVED.findall(text):
        labels = dict(re.findall(r'([a-z_]+)="([^"]*)"', pairs))
        matches = labels["group"] == group and labels["subresource"] == "status"
        if matches and labels["verb"] in {"PATCH", "PUT", "APPLY"}:
            counts[labels["resource"]] += int(float(count))
    return counts


def _page(host: str, port: int, path: str) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    assert answer.status == http.HTTPStatus.OK, text
    return text


def free_port() -> int:
    """A TCP port that no socket uses."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
