"""Programs with webhooks as processes with an API server double, and requests to them."""

import asyncio
import json
import re
import ssl
from pathlib import Path
from typing import Any

import yaml
from cluster.pki import Authority
from kubeapi import KubeApi
from processes import Process

AUTHORITY = Authority("tests")


def files(api: KubeApi | None, directory: Path) -> tuple[str, str]:
    """Flags for the API server and for a certificate, whose files are created in `directory`.

    Without an API server, nothing listens at its address.
    """
    pair = AUTHORITY.server("localhost", "localhost")
    (directory / "tls.crt").write_bytes(pair.certificate)
    (directory / "tls.key").write_bytes(pair.key)
    config = {
        "clusters": [{"name": "c", "cluster": {"server": api.url if api else "http://127.0.0.1:1"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "namespace": "system"}}],
        "current-context": "x",
    }
    (directory / "kubeconfig").write_text(yaml.safe_dump(config))
    return f"-kubeconfig={directory / 'kubeconfig'}", f"-cert-dir={directory}"


async def port_of(process: Process, server: str = "webhooks") -> int:
    await process.wait_for_log(f"{server} at port")
    found = re.search(rf"{server} at port (\d+)", process.log())
    assert found
    return int(found[1])


def client_context() -> ssl.SSLContext:
    return ssl.create_default_context(cadata=AUTHORITY.credentials.certificate.decode())


async def page(port: int, path: str, *, bearer: str = "", secure: bool = False) -> tuple[int, str]:
    """A page's status and text."""
    options = {"ssl": client_context(), "server_hostname": "localhost"} if secure else {}
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    field = f"Authorization: Bearer {bearer}\r\n" if bearer else ""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{field}\r\n".encode())
    async with asyncio.timeout(10):
        answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split(" ")[1]), answer.partition("\r\n\r\n")[2]


async def review(port: int, path: str, thing: dict[str, Any], kind: str = "", group: str = "") -> dict[str, Any]:
    """The response to a review of this object, or only the HTTP status."""
    request = {"uid": "u", "operation": "CREATE", "name": "mine", "object": thing}
    request["kind"] = {"group": group, "kind": kind}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(), server_hostname="localhost")
    head = f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    top, _, text = answer.partition(b"\r\n\r\n")
    status = int(top.split(b" ")[1])
    return json.loads(text)["response"] if status == 200 else {"http": status}
