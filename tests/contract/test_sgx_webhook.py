"""`intel_sgx_admissionwebhook` as a process, with the flags that existing manifests give it."""

import asyncio
import base64
import contextlib
import json
import logging
import re
import signal
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.pki import Authority
from kubeapi import KubeApi
from processes import Process, run_main
from tls_peer import Answer, Request, document, serving
from waiting import until

from accelplane.apiserver import ApiServer
from accelplane.cli import sgxwebhook
from accelplane.cli.goflags import Flag, Value
from accelplane.cli.ownsecret import SecretStore
from accelplane.http.servingtls import ServingTls
from accelplane.http.validity import validity
from accelplane.kube.authority import plan_renewal_in_process
from accelplane.kube.testing import PatchError, apply_json_patch
from accelplane.kube.trust import Trust, TrustError, TrustSettings

AUTHORITY = Authority("tests")
REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {"uid": "u", "operation": "CREATE", "object": {"metadata": {}, "spec": {"containers": []}}},
}

Start = Callable[..., Process]


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    directory = tmp_path / "certificates"
    directory.mkdir()
    pair = AUTHORITY.server("localhost", "localhost")
    (directory / "tls.crt").write_bytes(pair.certificate)
    (directory / "tls.key").write_bytes(pair.key)
    return directory


@pytest.fixture
async def start(tmp_path: Path) -> AsyncGenerator[Start]:
    started: list[Process] = []

    def run_program(*arguments: str) -> Process:
        command = ("-m", "accelplane.cli.sgxwebhook", "-port=0", *arguments)
        started.append(Process("python", *command, log=tmp_path / "log"))
        return started[-1]

    yield run_program
    for one in started:
        one.kill()
        await one.exit_code()


async def port_of(process: Process) -> int:
    await process.wait_for_log("serving at port")
    found = re.search(r"serving at port (\d+)", process.log())
    assert found
    return int(found[1])


async def review(port: int, message: bytes, context: ssl.SSLContext | None = None) -> bytes:
    trusting = context or ssl.create_default_context(cadata=AUTHORITY.credentials.certificate.decode())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
    writer.write(message)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def post(body: bytes) -> bytes:
    head = f"POST /mutate--v1-pod HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\nConnection: close\r\n\r\n".encode() + body


async def test_the_program_serves_with_existing_manifests_and_ends_at_sigterm(certificates: Path, start: Start) -> None:
    process = start("-v=1", f"-cert-dir={certificates}", "-kubeconfig=/nowhere")
    port = await port_of(process)
    assert b'"allowed":true' in await review(port, post(json.dumps(REVIEW).encode()))
    assert (await review(port, b"GET /readyz HTTP/1.1\r\nConnection: close\r\n\r\n")).endswith(b"ok\n")
    assert await process.terminate() == 0


async def test_after_sigterm_the_process_is_not_ready_and_serves_until_the_delay_ends(
    certificates: Path, start: Start
) -> None:
    process = start(f"-cert-dir={certificates}", "-shutdown-delay=60")
    port = await port_of(process)
    process.send(signal.SIGTERM)
    await process.wait_for_log("stopping in 60 s")
    ready = await review(port, b"GET /readyz HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert ready.startswith(b"HTTP/1.1 503 ")
    assert b'"allowed":true' in await review(port, post(json.dumps(REVIEW).encode()))
    process.send(signal.SIGTERM)
    assert await process.exit_code() == 0


async def test_sigint_ends_it_too(certificates: Path, start: Start) -> None:
    process = start(f"-cert-dir={certificates}", "-shutdown-delay=0")
    await port_of(process)
    process.send(signal.SIGINT)
    assert await process.exit_code() == 0


async def test_the_program_is_also_a_subcommand(certificates: Path, tmp_path: Path) -> None:
    arguments = ("webhook", "sgx", "-port=0", f"-cert-dir={certificates}", "-metrics-bind-address=0")
    process = Process("accelplane", *arguments, "and so on", log=tmp_path / "log")
    try:
        assert b'"allowed":true' in await review(await port_of(process), post(json.dumps(REVIEW).encode()))
        assert "accelplane webhook sgx: ignored: and so on" in process.log()
    finally:
        assert await process.terminate() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 1, "tls.crt: No such file"),
        (["-aesmd-volume=cloud"], 1, "-aesmd-volume: 'cloud': expected one of auto, hostPath, emptyDir"),
        (["-aesmd-socket-dir=run"], 1, "-aesmd-socket-dir: 'run': expected an absolute path"),
        (["-metrics-bind-address=x"], 1, "-metrics-bind-address: found 'x'"),
        (["-certificate-secret=x"], 1, "-certificate-secret"),
        (["-port=-7", "-cert-dir=/nowhere"], 1, "-port: -7: expected 0 to 65535"),
        (["-shutdown-delay=61", "-cert-dir=/nowhere"], 1, "-shutdown-delay: 61: expected 0 to 60"),
        (["-nonsense"], 2, "flag provided but not defined: -nonsense"),
    ],
)
def test_errors_that_prevent_serving_are_reported(
    certificates: Path, arguments: list[str], code: int, words: str
) -> None:
    directory = certificates if arguments else certificates / "missing"
    ended = run_main(sgxwebhook.main, "-port=0", f"-cert-dir={directory}", *arguments)
    assert ended.returncode == code
    assert words in ended.stderr


async def test_a_port_in_use_is_reported(certificates: Path, start: Start) -> None:
    port = await port_of(start(f"-cert-dir={certificates}"))
    second = start(f"-cert-dir={certificates}", f"-port={port}")
    assert await second.exit_code() == 1
    assert f"-port: {port}: " in second.log()


async def test_reviews_are_counted_on_a_metrics_page_with_the_option(certificates: Path, start: Start) -> None:
    spare = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{spare.sockets[0].getsockname()[1]}"
    spare.close()
    await spare.wait_closed()
    port = await port_of(start(f"-cert-dir={certificates}", f"-metrics-bind-address={address}"))
    await review(port, post(json.dumps(REVIEW).encode()))
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
    page = (await reader.read()).decode()
    writer.close()
    assert 'controller_runtime_webhook_requests_total{webhook="/mutate--v1-pod",code="200"} 1\n' in page
    assert 'accelplane_webhook_reviews_total{webhook="/mutate--v1-pod",outcome="allowed"} 1\n' in page
    assert 'controller_runtime_webhook_latency_seconds_count{webhook="/mutate--v1-pod"} 1\n' in page
    found = validity((certificates / "tls.crt").read_bytes())
    for end, seconds in (("before", found.not_before), ("after", found.not_after)):
        assert f"accelplane_serving_certificate_not_{end}_timestamp_seconds {seconds:.0f}\n" in page


def test_flags_set_the_options_of_decisions() -> None:
    defaults: dict[str, Value] = {flag.name: flag.default for flag in sgxwebhook.FLAGS}
    assert sgxwebhook.sgx_options(defaults) == sgxwebhook.SgxOptions()
    changed = sgxwebhook.sgx_options(
        defaults
        | {
            "aesmd-name": "q",
            "aesmd-socket-dir": "/q",
            "aesmd-volume": "emptyDir",
            "aesmd-sidecar-without-epc": True,
            "epc-whole-pages": True,
            "epc-required": True,
        }
    )
    assert changed == sgxwebhook.SgxOptions(
        aesmd_name="q",
        socket_directory="/q",
        socket_volume="emptyDir",
        sidecar_without_epc=True,
        whole_pages=True,
        epc_required=True,
    )


def test_flags_have_names_of_their_own() -> None:
    names = [flag.name for flag in sgxwebhook.FLAGS]
    assert len(set(names)) == len(names)
    assert isinstance(sgxwebhook.FLAGS[0], Flag)


SECRET = "/api/v1/namespaces/system/secrets/own"  # noqa: S105 - a path
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/hooks"


class Api:
    """The two objects at an API server."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {
            SECRET: {"metadata": {"name": "own", "resourceVersion": "1"}},
            CONFIGURATION: {
                "metadata": {"name": "hooks"},
                "webhooks": [{"name": "a", "clientConfig": {"service": {"name": "hook", "namespace": "system"}}}],
            },
        }
        self.status = ""

    def answer(self) -> Answer:
        async def run_program(request: Request, writer: asyncio.StreamWriter) -> None:
            await self._reply(request)(request, writer)

        return run_program

    def _reply(self, request: Request) -> Answer:
        if self.status or request.path not in self.objects:
            return document({"kind": "Status", "reason": "No"}, self.status or "404 Not Found")
        if request.method == "PATCH":
            assert request.headers["content-type"] == "application/json-patch+json"
            try:
                self.objects[request.path] = apply_json_patch(self.objects[request.path], json.loads(request.body))
            except PatchError:
                return document({"kind": "Status", "reason": "Invalid"}, "422 Unprocessable Entity")
            metadata = self.objects[request.path]["metadata"]
            metadata["resourceVersion"] = str(int(metadata.get("resourceVersion", 0)) + 1)
        return document(self.objects[request.path])


SETTINGS = TrustSettings(service="hook", namespace="system")


async def test_its_own_certificate_is_kept_in_the_secret_and_trusted_by_the_configuration(tmp_path: Path) -> None:
    setup, tls = Api(), ServingTls()
    async with serving(tmp_path, setup.answer()) as peer:
        await Trust(SecretStore(peer.api, "system", "own", "hooks"), tls, SETTINGS).reconcile()
        second = ServingTls()
        await Trust(SecretStore(peer.api, "system", "own", "hooks"), second, SETTINGS).reconcile()
    assert tls.ready
    assert second.ready
    assert set(setup.objects[SECRET]["data"]) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    assert setup.objects[SECRET]["metadata"]["resourceVersion"] == "2"
    bundle = setup.objects[CONFIGURATION]["webhooks"][0]["clientConfig"]["caBundle"]
    assert bundle == setup.objects[SECRET]["data"]["ca.crt"]


async def test_a_concurrent_write_is_detected(tmp_path: Path) -> None:
    setup = Api()
    async with serving(tmp_path, setup.answer()) as peer:
        store = SecretStore(peer.api, "system", "own", "hooks")
        secret = await store.read()
        assert secret is not None
        assert await store.write({"x": b"y"}, secret.version)
        assert not await store.write({"x": b"z"}, secret.version)
    assert setup.objects[SECRET]["data"] == {"x": base64.b64encode(b"y").decode()}


@pytest.mark.parametrize("status", ["403 Forbidden", "404 Not Found", "500 Internal Server Error"])
async def test_a_rejected_request_is_retried_later(tmp_path: Path, status: str) -> None:
    setup = Api()
    setup.status = status
    async with serving(tmp_path, setup.answer()) as peer:
        with pytest.raises(TrustError, match="cannot be created" if status.startswith("404") else status[:3]):
            await Trust(SecretStore(peer.api, "system", "own", "hooks"), ServingTls(), SETTINGS).reconcile()


async def test_a_secret_that_is_not_base64_is_reported(tmp_path: Path) -> None:
    setup = Api()
    setup.objects[SECRET]["data"] = {"tls.crt": "%"}
    async with serving(tmp_path, setup.answer()) as peer:
        with pytest.raises(TrustError, match=r"secrets/own: .*expected base64"):
            await SecretStore(peer.api, "system", "own", "hooks").read()


@contextlib.asynccontextmanager
async def store_certificate(api: KubeApi) -> AsyncIterator[SecretStore]:
    """A certificate in the double of an API server. Polling would take longer than the test."""
    api.put("secrets", {"metadata": {"name": "own", "namespace": "system"}})
    entry = {"name": "x", "clientConfig": {"service": {"name": "hook", "namespace": "system"}}}
    api.put("mutatingwebhookconfigurations", {"metadata": {"name": "hooks"}, "webhooks": [entry]})
    store = SecretStore(ApiServer(api.config), "system", "own", "hooks")
    settings = TrustSettings(service="hook", namespace="system", poll_interval=600, min_interval=0)
    tls = ServingTls()
    task = asyncio.create_task(Trust(store, tls, settings, planner=plan_renewal_in_process).run())
    try:
        await until(lambda: tls.ready)
        yield store
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def bundle_of(api: KubeApi) -> str | None:
    (entry,) = (api.get("mutatingwebhookconfigurations", "hooks") or {})["webhooks"]
    return entry["clientConfig"].get("caBundle")


async def test_changes_of_the_secret_and_the_configuration_are_noticed_without_polling(api: KubeApi) -> None:
    async with store_certificate(api) as store:
        await until(lambda: store.watching and bundle_of(api) is not None)
        secret = api.get("secrets", "own", "system") or {}
        api.put("secrets", {**secret, "data": {"ca.crt": secret["data"]["ca.crt"], "ca.key": secret["data"]["ca.key"]}})
        await until(lambda: "tls.crt" in (api.get("secrets", "own", "system") or {})["data"])
        bundle = bundle_of(api)
        configuration = api.get("mutatingwebhookconfigurations", "hooks") or {}
        del configuration["webhooks"][0]["clientConfig"]["caBundle"]
        api.put("mutatingwebhookconfigurations", configuration)
        await until(lambda: bundle_of(api) == bundle)


async def test_a_watch_that_ends_is_opened_again(api: KubeApi) -> None:
    async with store_certificate(api) as store:
        await until(lambda: store.watching)
        before = api.count("WATCH")
        api.end_watches()
        await until(lambda: api.count("WATCH") == before + 2)
        api.abort_watches()
        await until(lambda: not store.watching)
        await until(lambda: store.watching)


async def test_an_account_without_the_right_to_watch_polls(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    api.fault("WATCH", 403, times=2)
    with caplog.at_level(logging.INFO):
        async with store_certificate(api) as store:
            await until(lambda: caplog.text.count("polls instead of watching") == 2)
            assert not store.watching
