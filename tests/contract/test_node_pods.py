"""The pods of the node, from the kubelet and from the API server, over real TLS."""

import asyncio
import json
from pathlib import Path

import pytest
from podservers import Servers, gpu_pod, hangs, lists, pod_servers
from tls_peer import Answer, Request, document, respond_with, response

from accelplane.kubelet.embedded import EmbeddedKubelet, Pod
from accelplane.node.pods import ATTEMPTS, MAX_LIST, in_cluster
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.plugins.base import PodsError
from accelplane.plugins.gpu import fractional

API_PATH = "/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-1&limit=10"


async def names(servers: Servers, **options: float) -> list[str]:
    return [pod.name for pod in await servers.reader(**options).pods(fractional.project)]  # type: ignore[arg-type]


def of_kubelet() -> list[dict[str, object]]:
    return [gpu_pod("from-kubelet")]


def of_api() -> list[dict[str, object]]:
    return [gpu_pod("from-api")]


async def test_requests_to_the_kubelet_have_the_account_token(tmp_path: Path) -> None:
    async with pod_servers(tmp_path, lists(of_kubelet), lists(of_api)) as servers:
        assert await names(servers) == ["from-kubelet"]
        (request,) = servers.kubelet.requests
        assert (request.method, request.path) == ("GET", "/pods")
        assert request.headers["authorization"] == "Bearer a.service-account.token"
        assert servers.api.requests == []


async def test_a_self_signed_certificate_can_be_trusted(tmp_path: Path) -> None:
    async with pod_servers(tmp_path, lists(of_kubelet), lists(of_api)) as servers:
        servers.trust = tmp_path / "kubelet.crt"
        pair = (tmp_path / "kubelet/pair.pem").read_text()
        servers.trust.write_text(pair[: pair.index("-----END CERTIFICATE-----") + 26])
        assert await names(servers) == ["from-kubelet"]


@pytest.mark.parametrize(
    "answer",
    [
        document({"kind": "Status", "code": 403}, "403 Forbidden"),
        document({"kind": "Status"}, "500 Internal Server Error"),
        document({"items": 1}),
        respond_with(response("200 OK", b"not JSON")),
        respond_with(response("200 OK", b'{"items": [\xff]}')),
        respond_with(response("200 OK", b'{"items": [{]}')),
        respond_with(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
        respond_with(b"nonsense\r\n\r\n"),
        respond_with(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_LIST + 1), b" " * (MAX_LIST + 1)),
    ],
)
async def test_after_a_failure_of_the_kubelet_the_api_server_is_always_used(tmp_path: Path, answer: Answer) -> None:
    async with pod_servers(tmp_path, answer, lists(of_api)) as servers:
        reader = servers.reader()
        assert reader.uses_kubelet
        for _ in range(2):
            assert [pod.name for pod in await reader.pods(fractional.project)] == ["from-api"]
        assert not reader.uses_kubelet
        assert servers.paths == (["/pods"], [API_PATH, API_PATH])


@pytest.mark.parametrize("problem", ["another name", "another authority", "no trust", "no certificate", "no token"])
async def test_a_kubelet_that_cannot_be_verified_gets_no_token(tmp_path: Path, problem: str) -> None:
    async with pod_servers(tmp_path, lists(of_kubelet), lists(of_api)) as servers:
        node = "node-2" if problem == "another name" else "node-1"
        if problem == "another authority":
            servers.trust = tmp_path / "api/ca.crt"
        elif problem == "no trust":
            servers.trust.unlink()
        elif problem == "no certificate":
            servers.trust.write_text("")
        elif problem == "no token":
            (tmp_path / "kubelet/token").unlink()
        reader = servers.reader(node=node)
        assert [pod.name for pod in await reader.pods(fractional.project)] == ["from-api"]
        assert servers.paths == ([], [API_PATH])


async def test_a_kubelet_timeout_is_retried_five_times(tmp_path: Path) -> None:
    async with pod_servers(tmp_path, hangs, lists(of_api)) as servers:
        reader = servers.reader(timeout=0.2)
        for _ in range(2):
            assert [pod.name for pod in await reader.pods(fractional.project)] == ["from-api"]
        assert servers.paths == (["/pods"] * ATTEMPTS, [API_PATH, API_PATH])


async def test_a_kubelet_that_answers_the_last_attempt_is_used(tmp_path: Path) -> None:
    request_count = 0

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal request_count
        request_count += 1
        await (hangs if request_count < ATTEMPTS else lists(of_kubelet))(request, writer)

    async with pod_servers(tmp_path, answer, lists(of_api)) as servers:
        reader = servers.reader(timeout=0.5)
        for _ in range(2):
            assert [pod.name for pod in await reader.pods(fractional.project)] == ["from-kubelet"]
        assert servers.paths == (["/pods"] * (ATTEMPTS + 1), [])


async def test_an_error_after_timeouts_ends_the_attempts(tmp_path: Path) -> None:
    request_count = 0

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal request_count
        request_count += 1
        await (hangs if request_count == 1 else document({}, "500 Internal Server Error"))(request, writer)

    async with pod_servers(tmp_path, answer, lists(of_api)) as servers:
        assert await names(servers, timeout=0.5) == ["from-api"]
        assert servers.paths == (["/pods"] * 2, [API_PATH])


async def test_pods_of_the_api_server_are_read_in_pages(tmp_path: Path) -> None:
    pods = [gpu_pod(f"pod{number:02}") for number in range(25)]
    async with pod_servers(tmp_path, document({}, "403 Forbidden"), lists(lambda: pods)) as servers:
        assert await names(servers) == [f"pod{number:02}" for number in range(25)]
        assert len(servers.api.requests) == 3


async def test_pods_that_cannot_be_read_from_either_are_an_error(tmp_path: Path) -> None:
    forbidden = document({"kind": "Status", "reason": "Forbidden", "message": "pods is forbidden"}, "403 Forbidden")
    async with pod_servers(tmp_path, forbidden, forbidden) as servers:
        with pytest.raises(PodsError, match=r"GET /api/v1/pods: 403 Forbidden: pods is forbidden"):
            await names(servers)


async def test_a_pod_that_cannot_be_decoded_is_skipped(tmp_path: Path) -> None:
    items = [{"metadata": 1}, gpu_pod("a"), "pod", None, {}]
    async with pod_servers(tmp_path, document({"items": items}), lists(of_api)) as servers:
        assert await names(servers) == ["a"]


async def test_a_node_without_pods_has_none(tmp_path: Path) -> None:
    async with pod_servers(tmp_path, document({"kind": "PodList", "items": None}), lists(of_api)) as servers:
        assert await names(servers) == []


async def test_concurrent_reads_are_serialized(tmp_path: Path) -> None:
    running = most = 0

    async def answer(_request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        writer.write(response("200 OK", json.dumps({"items": of_kubelet()}).encode()))
        running -= 1

    async with pod_servers(tmp_path, answer, lists(of_api)) as servers:
        reader = servers.reader()
        found = await asyncio.gather(*(reader.pods(fractional.project) for _ in range(4)))
        assert [[pod.name for pod in pods] for pods in found] == [["from-kubelet"]] * 4
        assert most == 1


async def test_holders_are_counted_for_all_pods_of_the_kubelet(directory: str, tmp_path: Path) -> None:
    async with (
        EmbeddedKubelet(directory) as kubelet,
        pod_servers(tmp_path, lists(of_kubelet), lists(of_api)) as servers,
    ):
        await kubelet.run_pod(Pod("idle", "team", containers={"main": {}}))
        reader = servers.reader(kubelet.pod_resources_socket)
        assert await reader.holders(fractional.RESOURCES) == {("team", "idle"): 0}
        with pytest.raises(PodsError, match=r"absent\.sock: List failed"):
            await servers.reader(f"{directory}/absent.sock").holders(fractional.RESOURCES)


IN_CLUSTER = {
    "NODE_NAME": "node-1",
    "HOST_IP": "127.0.0.1",
    "KUBERNETES_SERVICE_HOST": "127.0.0.1",
    "KUBERNETES_SERVICE_PORT": "1",
}


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("NODE_NAME", "NODE_NAME is not set"),
        ("KUBERNETES_SERVICE_HOST", "not in a cluster"),
        ("token", "token: found no file"),
        ("ca.crt", "ca.crt: No such file"),
    ],
)
def test_without_a_cluster_there_is_no_reader(tmp_path: Path, missing: str, problem: str) -> None:
    account(tmp_path, missing)
    environment = {name: value for name, value in IN_CLUSTER.items() if name != missing}
    with pytest.raises(ConfigurationError, match=problem):
        in_cluster(Settings(), environment, account=str(tmp_path))


def test_without_the_address_of_the_host_the_api_server_is_used(tmp_path: Path) -> None:
    account(tmp_path)
    environment = {name: value for name, value in IN_CLUSTER.items() if name != "HOST_IP"}
    assert not in_cluster(Settings(), environment, account=str(tmp_path)).uses_kubelet
    assert in_cluster(Settings(), IN_CLUSTER, account=str(tmp_path)).uses_kubelet


def account(directory: Path, missing: str = "") -> None:
    from cluster.pki import Authority

    certificate = Authority("test").credentials.certificate
    for name, content in (("token", b"secret"), ("ca.crt", certificate), ("namespace", b"default")):
        if name != missing:
            (directory / name).write_bytes(content)
