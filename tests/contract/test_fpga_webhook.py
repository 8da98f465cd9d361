"""`intel_fpga_admissionwebhook` as a process: watches, reviews, and startup errors."""

import asyncio
import base64
import contextlib
import json
import re
import signal
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kubeapi import KubeApi
from processes import Process, run_main
from waiting import until
from webhookprograms import client_context, files, page, port_of, review

from accelplane.admission.mappings import AcceleratorFunction, FpgaRegion, Mappings
from accelplane.cli import fpgawebhook
from accelplane.kube.client import Client
from accelplane.kube.informer import Informer
from accelplane.kube.testing import apply_json_patch

INTERFACE = "69528db6eb31577a8c3668f9faa081f6"
NLB0 = "d8424dc4a4a3c413f89e433683f9040b"

Start = Callable[..., Process]


@pytest.fixture
async def start(api: KubeApi, tmp_path: Path) -> AsyncGenerator[Start]:
    file_arguments = files(api, tmp_path)
    started: list[Process] = []

    def main_process(*arguments: str) -> Process:
        command = ("-m", "accelplane", "webhook", "fpga", *file_arguments, "-port=0", "-shutdown-delay=0")
        started.append(Process("python", *command, *arguments, log=tmp_path / f"log{len(started)}"))
        return started[-1]

    yield main_process
    for one in started:
        one.kill()
        await one.exit_code()


async def review_pod(process: Process, pod: dict[str, Any]) -> dict[str, Any]:
    """The response to the creation of this pod."""
    await process.wait_for_log("all caches are synced")
    return await review(await port_of(process), "/pods", pod, "Pod")


def pod_requesting(name: str) -> dict[str, Any]:
    resources = {field: {f"fpga.intel.com/{name}": "1"} for field in ("limits", "requests")}
    return {"metadata": {"namespace": "n"}, "spec": {"containers": [{"name": "a", "resources": resources}]}}


def put(api: KubeApi, name: str, mode: str, **more: Any) -> None:
    spec = {"afuId": NLB0, "interfaceId": INTERFACE, "mode": mode}
    api.put("acceleratorfunctions", {"metadata": {"name": name, "namespace": "n"}, "spec": spec, **more})


async def test_reviews_use_the_current_objects(api: KubeApi, start: Start) -> None:
    put(api, "a", "af")
    process = start("-leader-elect")

    async def resource() -> str:
        answer = await review_pod(process, pod_requesting("a"))
        if not answer["allowed"]:
            return str(answer["status"]["message"])
        pod = apply_json_patch(pod_requesting("a"), json.loads(base64.b64decode(answer["patch"])))
        (name,) = pod["spec"]["containers"][0]["resources"]["limits"]
        return str(name)

    assert await resource() == "fpga.intel.com/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs"
    put(api, "a", "region")

    async def follows() -> bool:
        return await resource() == f"fpga.intel.com/region-{INTERFACE}"

    await until(follows)
    api.remove("acceleratorfunctions", "a", "n")

    async def forgets() -> bool:
        return "has no AcceleratorFunction and no FpgaRegion" in await resource()

    await until(forgets)
    assert await process.terminate() == 0


async def test_writing_a_status_does_not_rebuild_the_names(api: KubeApi) -> None:
    put(api, "a", "af")
    client = Client(api.config, field_manager="test", timeout=1)
    informer = Informer(client)
    functions = informer.cache(AcceleratorFunction)
    mappings = Mappings(functions, Informer(client).cache(FpgaRegion))
    running = asyncio.create_task(informer.run())
    try:
        await until(lambda: bool(mappings.of("n").targets))
        before, notifications = mappings.of("n"), 0

        def on_change(_old: AcceleratorFunction | None, _new: AcceleratorFunction | None) -> None:
            nonlocal notifications
            notifications += 1

        functions.subscribe(on_change)
        put(api, "a", "af", status={"resource": "x"})
        await until(lambda: notifications == 2)
        assert mappings.of("n") is before
        put(api, "a", "region")
        await until(lambda: mappings.of("n") != before)
    finally:
        running.cancel()
        await client.close()


async def test_reviews_are_counted_by_outcome_and_names_by_their_state(api: KubeApi, start: Start) -> None:
    put(api, "a", "region")
    put(api, "odd", "afx")
    process = start("-metrics-bind-address=127.0.0.1:0")
    for name in ("a", "a", "odd"):
        await review_pod(process, pod_requesting(name))
    status, text = await page(await port_of(process, "metrics"), "/metrics")
    assert status == 200
    assert 'accelplane_webhook_reviews_total{outcome="mutated",webhook="/pods"} 2.0' in text
    assert 'accelplane_webhook_reviews_total{outcome="denied 400",webhook="/pods"} 1.0' in text
    for end in ("before", "after"):
        (seconds,) = re.findall(
            rf"^accelplane_serving_certificate_not_{end}_timestamp_seconds (\S+)$", text, re.MULTILINE
        )
        assert (float(seconds) > time.time()) == (end == "after")
    for state in ("accepted", "faulty"):
        assert f'accelplane_fpga_mappings{{kind="AcceleratorFunction",state="{state}"}} 1.0' in text


async def test_names_of_april_2020_are_supported(api: KubeApi, start: Start) -> None:
    put(api, "a", "af")
    answer = await review_pod(start("-resource-naming=legacy63"), pod_requesting("a"))
    pod = apply_json_patch(pod_requesting("a"), json.loads(base64.b64decode(answer["patch"])))
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {f"fpga.intel.com/{INTERFACE[:31]}{NLB0}": "1"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-resource-naming=old"], 1, "accelplane webhook fpga: -resource-naming: 'old': expected one of default, leg"),
        (["-port=70000", "-kubeconfig=/nowhere"], 1, "-port: 70000: expected 0 to 65535"),
        (["-shutdown-delay=-1"], 1, "-shutdown-delay: -1: expected 0 to 60 seconds"),
        (["-shutdown-delay=NaN"], 1, "-shutdown-delay: nan: expected 0 to 60 seconds"),
        (["-cert-dir=/nowhere"], 1, "/nowhere/tls.crt"),
        (["-kubeconfig=/nowhere"], 1, "/nowhere"),
        (["-metrics-bind-address=x"], 1, "-metrics-bind-address: found 'x', expected host:port"),
        (["-nonsense"], 2, "flag provided but not defined: -nonsense"),
    ],
)
def test_startup_errors_are_reported(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    def main(arguments: Sequence[str]) -> int:
        return fpgawebhook.main(arguments, "accelplane webhook fpga")

    ended = run_main(main, *files(None, tmp_path), "-port=0", "-shutdown-delay=0", *arguments)
    assert ended.returncode == code
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_unfinished_reviews_do_not_exceed_the_memory_limit_of_the_manifest(api: KubeApi, start: Start) -> None:
    process = start()
    port = await port_of(process)
    head = b"POST /pods HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 3000000\r\n\r\n"
    rejections: list[bytes] = []

    async def send_all_but_the_last_byte() -> None:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client_context(), server_hostname="localhost"
        )
        with contextlib.closing(writer):
            writer.write(head + b"x" * 2_999_999)
            rejections.append((await reader.readline())[9:12])

    tasks = [asyncio.create_task(send_all_but_the_last_byte()) for _ in range(12)]
    # Memory is reserved for one of them at a time. When the first is rejected, another one has its memory.
    await until(lambda: bool(rejections), 60)
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(rejections) <= {b"503", b"408"}
    peak = int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[0])
    assert peak < 60 * 1024


async def test_after_sigterm_the_program_is_not_ready_and_serves_until_the_delay_ends(
    api: KubeApi, start: Start
) -> None:
    put(api, "a", "af")
    addresses = ("-health-probe-bind-address=127.0.0.1:0", "-metrics-bind-address=127.0.0.1:0")
    process = start("-shutdown-delay=3", *addresses)
    assert (await review_pod(process, pod_requesting("a")))["allowed"]
    health, metrics, port = [await port_of(process, name) for name in ("health", "metrics", "webhooks")]
    in_flight = 'controller_runtime_webhook_requests_in_flight{webhook="/pods"}'
    assert f"{in_flight} 0.0" in (await page(metrics, "/metrics"))[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(), server_hostname="localhost")
    head = b"POST /pods HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    writer.write(head + b"{")

    async def receives() -> bool:
        return f"{in_flight} 1.0" in (await page(metrics, "/metrics"))[1]

    await until(receives)
    process.send(signal.SIGTERM)

    async def is_unready() -> bool:
        return await page(health, "/readyz") == (503, "not ready: shutting down")

    await until(is_unready)
    assert (await review(port, "/pods", pod_requesting("a"), "Pod"))["patch"]
    writer.write(b"}")
    async with asyncio.timeout(30):
        answer = await reader.read()
    assert b"\r\nConnection: close\r\n" in answer
    assert await process.exit_code() == 0
