"""`intel_fpga_admissionwebhook` as a process: what it follows, what it answers, and what keeps it from running."""

import asyncio
import base64
import json
import re
import ssl
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.pki import Authority
from jsonpatching import applied
from kubeapi import KubeApi
from processes import Process
from waiting import until

AUTHORITY = Authority("tests")
INTERFACE = "69528db6eb31577a8c3668f9faa081f6"
NLB0 = "d8424dc4a4a3c413f89e433683f9040b"

Start = Callable[..., Process]


@pytest.fixture
async def start(api: KubeApi, tmp_path: Path) -> AsyncGenerator[Start]:
    pair = AUTHORITY.server("localhost", "localhost")
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)
    config = {
        "clusters": [{"name": "c", "cluster": {"server": api.url}}],
        "contexts": [{"name": "x", "context": {"cluster": "c"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    files = (f"-kubeconfig={tmp_path / 'kubeconfig'}", f"-cert-dir={tmp_path}")
    started: list[Process] = []

    def go(*arguments: str) -> Process:
        command = ("-m", "accelplane", "webhook", "fpga", *files, "-port=0")
        started.append(Process("python", *command, *arguments, log=tmp_path / f"log{len(started)}"))
        return started[-1]

    yield go
    for one in started:
        one.kill()
        await one.exit_code()


async def asked(process: Process, pod: dict[str, Any]) -> dict[str, Any]:
    """The response to the creation of this pod."""
    await process.said("all caches are synced")
    found = re.search(r"webhooks at port (\d+)", process.log())
    assert found
    request = {
        "uid": "u",
        "operation": "CREATE",
        "kind": {"version": "v1", "kind": "Pod"},
        "namespace": "n",
        "object": pod,
    }
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
    context = ssl.create_default_context(cadata=AUTHORITY.credentials.certificate.decode())
    reader, writer = await asyncio.open_connection("127.0.0.1", int(found[1]), ssl=context, server_hostname="localhost")
    head = f"POST /pods HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return json.loads(answer.partition(b"\r\n\r\n")[2])["response"]


def asking(name: str) -> dict[str, Any]:
    resources = {field: {f"fpga.intel.com/{name}": "1"} for field in ("limits", "requests")}
    return {"metadata": {}, "spec": {"containers": [{"name": "a", "resources": resources}]}}


def put(api: KubeApi, name: str, mode: str) -> None:
    spec = {"afuId": NLB0, "interfaceId": INTERFACE, "mode": mode}
    api.put("acceleratorfunctions", {"metadata": {"name": name, "namespace": "n"}, "spec": spec})


async def test_it_answers_by_the_objects_there_are_now(api: KubeApi, start: Start) -> None:
    put(api, "a", "af")
    process = start("-leader-elect")

    async def resource() -> str:
        answer = await asked(process, asking("a"))
        if not answer["allowed"]:
            return str(answer["status"]["message"])
        pod = applied(asking("a"), json.loads(base64.b64decode(answer["patch"])))
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


async def test_names_of_april_2020_are_to_be_had(api: KubeApi, start: Start) -> None:
    put(api, "a", "af")
    answer = await asked(start("-resource-naming=legacy63"), asking("a"))
    pod = applied(asking("a"), json.loads(base64.b64decode(answer["patch"])))
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {f"fpga.intel.com/{INTERFACE[:31]}{NLB0}": "1"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-resource-naming=old"], 1, "accelplane webhook fpga: -resource-naming: 'old': expected one of default, leg"),
        (["-port=70000"], 1, "-port: 70000: expected 0 to 65535"),
        (["-cert-dir=/nowhere"], 1, "/nowhere/tls.crt"),
        (["-kubeconfig=/nowhere"], 1, "/nowhere"),
        (["-metrics-bind-address=x"], 1, "-metrics-bind-address: 'x': expected host:port"),
        (["-nonsense"], 2, "flag provided but not defined: -nonsense"),
    ],
)
async def test_what_keeps_it_from_running_is_said(start: Start, arguments: list[str], code: int, words: str) -> None:
    process = start(*arguments)
    assert await process.exit_code() == code
    assert words in process.log()
    assert "Traceback" not in process.log()
