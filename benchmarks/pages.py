"""The cost of the agent's pages: while nobody reads them, scraped every 30 s, with a waiting reader; and their memory.

The agents run at the same time, on nodes of their own. No plugin scans in the measured interval. With TLS and
authorized readers, a test double of the API server answers the reviews.
"""

import asyncio
import contextlib
import datetime
import json
import ssl
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from msgspec import Struct

from accelplane.apiserver.discovery import SERVICE_ACCOUNT
from accelplane.http.messages import Request, Response
from accelplane.http.server import HttpServer
from accelplane.http.servingtls import ServingTls
from accelplane.kube.authority import renew
from accelplane.kube.certificates import CertificatePolicy
from accelplane.kubelet.embedded import Pod
from benchmarks.agent import GPU, PROGRAM, NodeSetup, free_port, gpu_npu_node, large_node, registered_agent
from benchmarks.figures import Figure, Result, Scale, median, single
from benchmarks.scrape import large_gpu_node

_INTERVAL, _SETTLE, _START_INTERVAL = 240, 5, 3
_SCRAPE_INTERVAL = 30.0
_HOLDERS = 500
# The account of a pod, in a mount namespace with another /run.
_WITH_ACCOUNT = (
    "unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
    f'mount -t tmpfs none /run && mkdir -p {SERVICE_ACCOUNT} && cp "$0"/* {SERVICE_ACCOUNT} && exec "$@"',
)  # fmt: skip

Read = Callable[[str], Coroutine[object, object, object]]


class Idle(Struct, frozen=True):
    """Processor time per minute in ms, and the number of open descriptors at the end."""

    cpu: float
    descriptors: int


def measure(scale: Scale) -> Result:
    return asyncio.run(_measure(scale))


async def _measure(scale: Scale) -> Result:
    seconds, count = scale.of(_INTERVAL, 3), scale.of(3, 1)
    agents: list[tuple[Callable[[], AbstractContextManager[NodeSetup]], Read | None]] = [
        *[(gpu_npu_node, None), (gpu_npu_node, _read)] * count,
        *[(large_node, _read), (large_node, _scrape), (large_node, _wait)] * count,
    ]
    idle = await asyncio.gather(
        *(_idle(make, read, place, seconds) for place, (make, read) in enumerate(agents))
    )  # fmt: skip
    off, unread = idle[: 2 * count : 2], idle[1 : 2 * count : 2]
    quiet, scraped, waiting = (idle[2 * count + number :: 3] for number in range(3))
    base = median("without pages", [each.cpu for each in off], "ms")
    figures = [
        base,
        median("pages that nobody reads", [each.cpu for each in unread], "ms", budget=base.value + 0.1),
        # An agent may be in a scan, whose directories are open.
        single(
            "more descriptors",
            min(each.descriptors for each in unread) - min(each.descriptors for each in off),
            "",
            budget=1,
        ),
        median("large node, pages that nobody reads", [each.cpu for each in quiet], "ms"),
        median("large node, scraped every 30 s", [each.cpu for each in scraped], "ms", budget=30),
        median(
            "large node, more with a waiting reader of the inventory",
            [one.cpu - other.cpu for one, other in zip(waiting, quiet, strict=True)],
            "ms",
            budget=3,
        ),
    ]
    return Result(
        figures=(*figures, *await _memory()),
        notes=(
            f"processor time per minute, over {seconds} s; pages were read once before, and closed their directories",
        ),
    )


async def _idle(
    make: Callable[[], AbstractContextManager[NodeSetup]], read: Read | None, place: int, seconds: float
) -> Idle:
    await asyncio.sleep(_START_INTERVAL * place)
    address = f"127.0.0.1:{free_port()}"
    options = () if read is None else ("--http-address", address)
    with make() as setup:
        async with registered_agent(setup, *options) as (agent, _kubelet):
            if read is not None:
                await _get(f"http://{address}/metrics")
            reader = asyncio.create_task((read or _read)(f"http://{address}"))
            await asyncio.sleep(_SETTLE)
            cpu = agent.cpu_seconds()
            await asyncio.sleep(seconds)
            agent.check()
            used, descriptors = agent.cpu_seconds() - cpu, agent.descriptors()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            return Idle(used * 1e3 * 60 / seconds, descriptors)


async def _read(_url: str) -> None:
    """Does not read."""


async def _scrape(url: str) -> None:
    while True:
        await _get(f"{url}/metrics")
        await asyncio.sleep(_SCRAPE_INTERVAL)


async def _wait(url: str) -> None:
    """Waits for the inventory again and again on one connection, as the fleet does."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    tag = ""
    try:
        while True:
            lines = ("GET /api/v1/inventory?wait=55 HTTP/1.1", "Host: localhost", f"If-None-Match: {tag}")
            writer.write("\r\n".join((*lines, "", "")).encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            fields = dict(line.split(": ", 1) for line in head[1:] if line)
            await reader.readexactly(int(fields.get("content-length", "0")))
            tag = fields.get("etag", tag)
    finally:
        writer.close()


async def _memory() -> Sequence[Figure]:
    plain = await _resident()
    with tempfile.TemporaryDirectory() as directory:
        async with _reviews(Path(directory)) as port:
            secure = await _resident(Path(directory), port)
    with large_gpu_node() as setup:
        address = f"127.0.0.1:{free_port()}"
        async with registered_agent(setup, "--http-address", address) as (agent, kubelet):
            for _ in range(3):
                await _get(f"http://{address}/metrics")
                await asyncio.sleep(1.1)  # a younger reading would be used again
            before = agent.memory().resident
            for number in range(_HOLDERS):
                await kubelet.run_pod(Pod(f"holder-{number}", containers={"main": {GPU: 1}}))
            for _ in range(3):
                await _get(f"http://{address}/metrics")
                await asyncio.sleep(1.1)
            after = agent.memory().resident
    return (
        single("resident, pages read", plain, "MiB", budget=40),
        single("more with TLS and reviews", secure - plain, "MiB", budget=3),
        single("64 GPUs: more with 500 containers", after - before, "MiB", budget=1),
    )


async def _resident(account: Path | None = None, port: int = 0) -> float:
    """The memory of an agent whose metrics page was read once; with TLS, and by an authorized reader, if given."""
    number = free_port()
    options = ["--http-address", f"127.0.0.1:{number}"]
    program, env, url, authority = PROGRAM, dict[str, str](), f"http://127.0.0.1:{number}/metrics", None
    if account is not None:
        options += ["--http-tls-dir", str(account), "--http-authorized"]
        program = (*_WITH_ACCOUNT, str(account), *PROGRAM)
        env = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": str(port)}
        url, authority = f"https://localhost:{number}/metrics", account / "ca.crt"
    with gpu_npu_node() as setup:
        async with registered_agent(setup, *options, program=program, env=env) as (agent, _kubelet):
            await _get(url, authority)
            await asyncio.sleep(2)  # threads end within this time
            return agent.memory().resident


@contextlib.asynccontextmanager
async def _reviews(directory: Path) -> AsyncIterator[int]:
    """An API server that authorizes every token. Writes the files of an account and of a certificate."""
    pair = renew(None, ["localhost"], datetime.datetime.now(datetime.UTC), CertificatePolicy())
    for name in ("tls.crt", "tls.key"):
        (directory / name).write_bytes(pair.secret_data()[name])
    (directory / "ca.crt").write_bytes(pair.authorities)
    (directory / "token").write_text("t")
    (directory / "namespace").write_text("default")
    status = {"authenticated": True, "user": {"username": "prometheus"}, "allowed": True}

    def review(request: Request) -> Response:
        return Response(201, json.dumps({"status": status}).encode(), "application/json")

    tls = ServingTls()
    tls.follow(str(directory))
    server = HttpServer(review)
    try:
        yield await server.start("localhost", 0, tls.connection_context)
    finally:
        await server.stop(grace=1.0)


async def _get(url: str, authority: Path | None = None) -> bytes:
    def get() -> bytes:
        request = urllib.request.Request(url, headers={"Authorization": "Bearer t"})  # noqa: S310 - the agent's page
        context = ssl.create_default_context(cafile=authority) if authority is not None else None
        with urllib.request.urlopen(request, timeout=10, context=context) as page:  # noqa: S310
            return page.read()

    return await asyncio.to_thread(get)
