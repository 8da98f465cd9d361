"""The fleet with 5,000 nodes of 8 cards each: memory, processor time without changes and with 500 per second, pages.

The API server is the test double. The agents are in a separate process and respond over the loopback interface. During
the changes one client reads live updates, and another one requests a page each second, both over the loopback interface
from this process: their times include everything that delays the event loop.
"""

import asyncio
import gzip
import os
import re
import sys
import time
from asyncio.subprocess import PIPE, Process

from msgspec import Struct

from accelplane.apiserver import ClientConfig
from accelplane.fleet.fleet import Fleet
from accelplane.fleet.options import FleetOptions
from accelplane.fleet.serve import listen
from accelplane.fleet.web.gate import OpenGate
from accelplane.fleet.web.site import Screens, Site
from accelplane.http.messages import Request, Response
from accelplane.kube.client import Client
from benchmarks.figures import Figure, Result, Scale, percentile, single
from benchmarks.process import cpu_seconds, memory_of

_CONNECT_TIMEOUT = 600.0
_PAGE_TIMEOUT = 60.0
_GENERATION = re.compile(rb'data-generation="(\d+)"')
_CHANGES = 500
_PAGES = (("first page", "/"), ("100 nodes", "/nodes"), ("namespaces", "/namespaces"), ("waiting pods", "/waiting"))
_PAGE_BUDGETS = {"first page": 50.0, "100 nodes": 50.0}


class Load(Struct, frozen=True):
    """The number of nodes, the seconds without changes, and the seconds with `changes` each."""

    nodes: int
    idle: int
    seconds: int
    changes: int


def measure(scale: Scale) -> Result:
    nodes = scale.of(5000, 100)
    figures = asyncio.run(_measure(Load(nodes, scale.of(60, 2), scale.of(60, 2), min(nodes, _CHANGES))))
    return Result(
        figures=figures,
        notes=(
            f"{nodes} nodes with 8 cards each, all allocated; agents and API server in another process",
            "first change in the snapshot: from the command to the agents; the changes of a second are sent together",
            "during changes: a client of live updates of 100 nodes, and one that requests such a page each second",
        ),
    )


async def _measure(load: Load) -> tuple[Figure, ...]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.fleetagents", str(load.nodes), stdin=PIPE, stdout=PIPE
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        return await _measure_fleet(process, url, load)
    finally:
        process.kill()
        await process.wait()


async def _measure_fleet(agents: Process, url: str, load: Load) -> tuple[Figure, ...]:
    assert agents.stdin is not None
    client, own = Client(ClientConfig(server=url), field_manager="benchmark"), os.getpid()
    fleet = Fleet(client, FleetOptions(loopback_agents=True))
    running = asyncio.create_task(fleet.run())
    started = time.monotonic()
    async with asyncio.timeout(_CONNECT_TIMEOUT):
        await _wait_until_connected(fleet, load.nodes)
    connecting = time.monotonic() - started
    memory, before = memory_of(own), cpu_seconds(own)
    await asyncio.sleep(load.idle)
    idle_cpu = (cpu_seconds(own) - before) * 60 / load.idle
    screens = Screens(fleet)
    async with listen(screens, OpenGate(loopback_only=True), "127.0.0.1:0") as port:
        user = _User(port)
        before, delays = cpu_seconds(own), list[float]()
        updates = asyncio.create_task(user.follow())
        for _ in range(load.seconds):
            start, generation = time.monotonic(), fleet.cluster().generation
            agents.stdin.write(f"{load.changes}\n".encode())
            await fleet.changed(generation)
            delays.append((time.monotonic() - start) * 1000)
            await user.request()
            await asyncio.sleep(max(0.0, start + 1 - time.monotonic()))
        busy = (cpu_seconds(own) - before) / load.seconds
        updates.cancel()
        await asyncio.gather(updates, return_exceptions=True)
        await screens.live.close()
    pages = await _measure_pages(fleet)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await client.close()
    return (
        single("all agents connected", connecting, "s"),
        single("resident memory", memory.resident, "MiB", budget=200),
        single("processor time per minute, no changes", idle_cpu, "s", budget=3),
        single(f"processor time with {load.changes} changes per second", busy * 1000, "ms/s"),
        percentile("first change in the snapshot", (delays,), 0.99, "ms", budget=3000),
        percentile("100 nodes during changes: time to the answer, median", (user.times,), 0.5, "ms"),
        percentile("100 nodes during changes: time to the answer, 99 %", (user.times,), 0.99, "ms"),
        single("live updates during changes, a second", user.updates / load.seconds, "events/s"),
        single("requests to load the page again during changes", user.reloads, "events"),
        single("resident memory after changes and pages", memory_of(own).resident, "MiB", budget=200),
        *pages,
    )


class _User:
    """A browser with the list of nodes: live updates, and the page itself when it is requested."""

    def __init__(self, port: int) -> None:
        self.times: list[float] = []
        self.updates = 0
        self.reloads = 0
        self._port = port

    async def request(self) -> None:
        """Requests the page and notes the time."""
        start = time.monotonic()
        await self._page()
        self.times.append((time.monotonic() - start) * 1000)

    async def follow(self) -> None:
        """Counts the updates until it is cancelled. Like a browser, it reloads the page after a `reload` event."""
        while True:
            generation = _GENERATION.findall(await self._page())[0].decode()
            reader, writer = await self._open(f"/api/v1/events?screen=nodes&sort=name&generation={generation}")
            try:
                while (line := await reader.readline()) and line != b"event: reload\n":
                    self.updates += line in (b"event: rows\n", b"event: overview\n")
                self.reloads += bool(line)
            finally:
                writer.close()

    async def _page(self) -> bytes:
        """Raises `OSError` or `TimeoutError` without a complete page."""
        async with asyncio.timeout(_PAGE_TIMEOUT):
            reader, writer = await self._open("/nodes?sort=name")
            body = await reader.read()
            writer.close()
        if not body.startswith(b"HTTP/1.1 200 ") or not body.rstrip().endswith(b"</html>"):
            raise OSError(f"/nodes: found {body[:80]!r}, expected a complete page")
        return body

    async def _open(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        return reader, writer


async def _measure_pages(fleet: Fleet) -> list[Figure]:
    """Processor time to the first byte without the network, and sizes with the assets."""
    screens = Screens(fleet)
    site = Site(screens, OpenGate(loopback_only=False))
    links = screens.assets.links
    assets = [(await _get(site, f"/{path}")).body for path in (links.style, links.script)]
    figures: list[Figure] = []
    for name, path in _PAGES:
        times = list[float]()
        body: bytes | bytearray = b""
        for _ in range(10):
            # The handler does not wait: this is the time to the first byte if nothing else runs.
            start = time.thread_time()
            body = (await _get(site, path)).body
            times.append((time.thread_time() - start) * 1000)
        figures.append(
            percentile(f"{name}: processor time to the first byte", (times,), 0.5, "ms", budget=_PAGE_BUDGETS.get(name))
        )
        parts = [bytes(body), *assets]
        figures.append(single(f"{name}: size with assets", sum(map(len, parts)) / 1000, "KB", budget=200))
        packed = sum(len(gzip.compress(part, 6)) for part in parts) / 1000
        figures.append(single(f"{name}: compressed", packed, "KB", budget=60))
    return figures


async def _get(site: Site, path: str) -> Response:
    answer = site(Request("GET", path, "", b""))
    return answer if isinstance(answer, Response) else await answer


async def _wait_until_connected(fleet: Fleet, nodes: int) -> None:
    generation = -1
    while len(fleet.cluster().nodes) < nodes or not all(node.units for node in fleet.cluster().nodes.values()):
        generation = await fleet.changed(generation)
