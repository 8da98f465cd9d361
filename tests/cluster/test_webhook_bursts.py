"""Bursts of pods and the largest reviews, as a real API server sends them, within the manifests' memory limits."""

from __future__ import annotations

import base64
import http
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest

from benchmarks.memory_cgroup import memory_cgroup

from .build import kubernetes_minor
from .cluster import Cluster
from .machine import wait_until
from .objects import endpoints

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
NAMESPACE = "bursts"
NAME = f"hooks.{NAMESPACE}.svc"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
PODS_AT_ONCE = 500
MIB = 1024 * 1024


class Program(NamedTuple):
    """A program with a webhook for pods, its memory limit in the manifests, and what it changes."""

    module: str
    flags: Sequence[str]
    path: str
    limit: int
    requested: str
    expected: str


SGX = ("/mutate--v1-pod", "sgx.intel.com/epc", "sgx.intel.com/enclave")
FPGA = (
    "/pods",
    "fpga.intel.com/arria10.dcp1.2-nlb0-orchestrated",
    "fpga.intel.com/region-69528db6eb31577a8c3668f9faa081f6",
)
IN_CLUSTER = ("-kubeconfig={kubeconfig}", "-health-probe-bind-address=0", "-metrics-bind-address=0")
PROGRAMS = {
    "sgx": Program("sgxwebhook", (), SGX[0], 30 * MIB, *SGX[1:]),
    "fpga": Program("fpgawebhook", IN_CLUSTER, FPGA[0], 60 * MIB, *FPGA[1:]),
    "operator": Program("operator", (*IN_CLUSTER, "-devices=sgx", "-leader-elect=false"), SGX[0], 120 * MIB, *SGX[1:]),
}


@pytest.fixture(scope="module")
def api(cluster_is_possible: None) -> Iterator[Cluster]:
    """A control plane without nodes, with a namespace that has names of FPGAs."""
    with Cluster.running([]) as running, running.namespace(NAMESPACE):
        hosts = running.control.path("/etc/hosts")
        hosts.write_text(f"127.0.0.1 localhost\n{running.addresses.host} {NAME}\n")
        running.kubectl("apply", "--server-side", "--kustomize", ROOT / "deploy/operator/crd")
        running.kubectl("wait", "--for=condition=Established", "--all", "crd", "--timeout=60s")
        mappings = ROOT / "deploy/fpga_admissionwebhook/mappings-collection.yaml"
        running.kubectl("apply", f"--namespace={NAMESPACE}", f"--filename={mappings}")
        yield running


@contextmanager
def webhook(api: Cluster, program: Program, directory: Path) -> Iterator[Path]:
    """The program, and a configuration as in the manifests; its log."""
    with replica(api, program, directory) as log:
        url = {"url": f"https://{NAME}:{_port(log) or 0}{program.path}"}
        with _configured(api, program, url):
            yield log


@contextmanager
def replica(api: Cluster, program: Program, directory: Path, *more: str) -> Iterator[Path]:
    """The program with `more` flags in a memory control group; its log."""
    pair = api.server_certificate("hooks", NAME)
    (directory / "tls.crt").write_bytes(pair.certificate)
    (directory / "tls.key").write_bytes(pair.key)
    log = directory / "log"
    with memory_cgroup(program.limit) as group, log.open("wb") as output:
        flags = [flag.format(kubeconfig=api.kubeconfig) for flag in program.flags]
        command = [*group.command(), sys.executable, "-m", f"accelplane.cli.{program.module}", "-v=1", "-port=0"]
        process = subprocess.Popen([*command, f"-cert-dir={directory}", *flags, *more], stdout=output, stderr=output)
        try:
            wait_until(lambda: _port(log) is not None, f"{program.module}: serves", 60, hint=log.read_text())
            yield log
            assert process.poll() is None, log.read_text()
            assert group.usage().killed == 0
        finally:
            process.kill()
            process.wait()


@contextmanager
def _configured(api: Cluster, program: Program, client: Mapping[str, Any]) -> Iterator[None]:
    """A webhook configuration that the API server uses."""
    try:
        api.apply(_configuration(api, program, client))
        _wait_called(api, program)
        yield
    finally:
        api.request("DELETE", f"{HOOKS}/bursts")


def _port(log: Path) -> int | None:
    found = re.search(r"(?:serving at|webhooks at) port (\d+)", log.read_text())
    return int(found[1]) if found else None


def _configuration(api: Cluster, program: Program, client: Mapping[str, Any]) -> dict[str, Any]:
    authority = base64.b64encode(api.authority).decode()
    hook = {
        "name": "bursts.example.com",
        "clientConfig": {**client, "caBundle": authority},
        "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}],
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "reinvocationPolicy": "IfNeeded",
        "admissionReviewVersions": ["v1"],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}},
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "bursts"},
        "webhooks": [hook],
    }


def _wait_called(api: Cluster, program: Program) -> None:
    def called() -> bool:
        status, response = api.request("POST", f"{PODS}?dryRun=All", pod(program))
        return status == http.HTTPStatus.CREATED and _is_mutated(response, program)

    wait_until(called, "the API server calls the webhook", 60)


def pod(program: Program, containers: int = 1) -> dict[str, Any]:
    resources = {"limits": {program.requested: "1"}}
    return {
        "metadata": {"generateName": "p-"},
        "spec": {
            "containers": [{"name": f"c{number}", "image": "x", "resources": resources} for number in range(containers)]
        },
    }


def _is_mutated(response: Mapping[str, Any], program: Program) -> bool:
    return all(
        each["resources"]["limits"].get(program.expected) == each["resources"]["requests"].get(program.expected) == "1"
        for each in response["spec"]["containers"]
    )


def _delete_pods(api: Cluster) -> None:
    with api.connection(timeout=120) as request:
        request("DELETE", f"{PODS}?gracePeriodSeconds=0")


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_pod_of_a_burst_is_mutated(api: Cluster, tmp_path: Path, name: str) -> None:
    program = PROGRAMS[name]
    with webhook(api, program, tmp_path):
        _create_burst(api, program)


def test_every_pod_of_a_burst_is_mutated_by_one_of_two_replicas(api: Cluster, tmp_path: Path) -> None:
    """Since 1.37 the API server selects a replica for each request, before it for each connection."""
    program = PROGRAMS["sgx"]
    pages = [f"127.0.0.1:{_unused_port()}" for _ in range(2)]
    logs: list[Path] = []
    with ExitStack() as stack:
        for number, page in enumerate(pages):
            directory = tmp_path / str(number)
            directory.mkdir()
            logs.append(stack.enter_context(replica(api, program, directory, f"-metrics-bind-address={page}")))
        api.apply(*_service([_port(log) or 0 for log in logs], api.addresses.host))
        client = {"service": {"namespace": NAMESPACE, "name": "hooks", "path": program.path}}
        with _configured(api, program, client):
            _create_burst(api, program)
        counts = [_requests(page) for page in pages]
    assert sum(counts) > PODS_AT_ONCE
    if kubernetes_minor() >= 37:
        assert min(counts) > PODS_AT_ONCE / 5, counts


def _unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _requests(page: str) -> int:
    """The number of requests that a replica has answered."""
    with urlopen(f"http://{page}/metrics", timeout=30) as response:
        text = response.read().decode()
    return sum(map(int, re.findall(r"^controller_runtime_webhook_requests_total\S* (\d+)", text, re.MULTILINE)))


def _service(ports: Sequence[int], address: str) -> Iterator[dict[str, Any]]:
    """A Service with one endpoint for each port of this computer."""
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "hooks", "namespace": NAMESPACE},
        "spec": {"ports": [{"name": "https", "protocol": "TCP", "port": 443}]},
    }
    yield from endpoints("hooks", ports, address, namespace=NAMESPACE, port_name="https")


def _create_burst(api: Cluster, program: Program) -> None:
    """Creates pods at the same time; each must be mutated.

    The client is in system:masters, which no flow control limits.
    """
    start = threading.Barrier(PODS_AT_ONCE)

    def create(_number: int) -> tuple[int, Any]:
        with api.connection(timeout=120) as request:
            request("GET", "/readyz")
            start.wait(120)
            return request("POST", PODS, pod(program))

    with ThreadPoolExecutor(PODS_AT_ONCE) as threads:
        response = list(threads.map(create, range(PODS_AT_ONCE)))
    _delete_pods(api)
    assert {status for status, _ in response} == {http.HTTPStatus.CREATED}
    missed = [each["metadata"]["name"] for _, each in response if not _is_mutated(each, program)]
    reasons = [line for line in api.control.daemons["kube-apiserver"].tail(3000).splitlines() if "failing open" in line]
    assert missed == [], f"{len(missed)} missed: {reasons[-3:]}"


def test_the_largest_pods_are_mutated_or_denied_within_the_memory_limit(api: Cluster, tmp_path: Path) -> None:
    program = PROGRAMS["sgx"]
    with webhook(api, program, tmp_path):
        status, response = api.request("POST", f"{PODS}?dryRun=All", pod(program, 3000))
        assert (status, _is_mutated(response, program)) == (http.HTTPStatus.CREATED, True)
        status, denied = api.request("POST", f"{PODS}?dryRun=All", pod(program, 12_000))
        assert status in (http.HTTPStatus.FORBIDDEN, http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        assert "use fewer containers" in denied["message"]
        # The largest object that etcd takes has 1.5 MiB.
        large = pod(program)
        large["spec"]["containers"][0]["env"] = [{"name": "V", "value": "x" * 1_500_000}]
        status, response = api.request("POST", PODS, large)
        assert (status, _is_mutated(response, program)) == (http.HTTPStatus.CREATED, True), json.dumps(response)[:500]
        _delete_pods(api)
