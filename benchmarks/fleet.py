"""The fleet with 5,000 nodes of 8 cards each: memory, processor time without changes and with 500 per second, pages.

The API server is the test double. The agents are in a separate process and respond over the loopback interface. During
the changes one client reads live updates, and another one requests a page each second, both over the loopback interface
from this process: their times include everything that delays the event loop.
"""

import asyncio
import gc
import gzip
import itertools
import os
import re
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator

from msgspec import Struct

from accelplane.apiserver import ClientConfig
from accelplane.fleet.fleet import Fleet
from accelplane.fleet.options import FleetOptions
from accelplane.fleet.serve import listen
from accelplane.fleet.web.gate import Gate
from accelplane.fleet.web.live import LiveLimits
from accelplane.fleet.web.site import Screens, Site
from accelplane.http.messages import Request, Response
from accelplane.kube.client import Client
from benchmarks.figures import Figure, Result, Scale, percentile, single
from benchmarks.process import cpu_seconds, memory_of

_CONNECT_TIMEOUT = 600.0
_PAGE_TIMEOUT = 60.0
_TAG = re.compile(rb'(?i)etag: ("[0-9a-f]+")')
_CHANGES = 500
_PAGES = (
    ("first page", "/"), ("100 nodes", "/nodes"), ("devices", "/devices"),
    ("devices by use", "/devices?sort=-busy_percent"), ("pods", "/pods"), ("groups", "/groups"),
    ("namespaces", "/namespaces"), ("waiting pods", "/waiting"),
)  # fmt: skip
_PAGE_BUDGETS = {"first page": 50.0, "100 nodes": 50.0}


class Load(Struct, frozen=True):
    """The number of nodes, the seconds without changes, and the seconds with `changes` each and with viewers."""

    nodes: int
    idle: int
    seconds: int
    changes: int
    viewers: int


def measure(scale: Scale) -> Result:
    nodes, viewers = scale.of(5000, 100), scale.of(100, 5)
    gc.set_threshold(50_000)  # as the command does
    figures = asyncio.run(_measure(Load(nodes, scale.of(60, 2), scale.of(60, 2), min(nodes, _CHANGES), viewers)))
    return Result(
        figures=figures,
        notes=(
            f"{nodes} nodes with 8 cards each, all allocated; agents and API server in another process",
            "first change in the snapshot: from the command to the agents; the changes of a second are sent together",
            f"during changes: {viewers} viewers with different filters, and one that requests the devices each second",
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
    # One address is the source of all viewers here.
    screens = Screens(fleet, limits=LiveLimits(account=200))
    async with listen(screens, Gate(loopback_only=True), "127.0.0.1:0") as port:
        user = _User(port, "/devices?sort=-busy_percent")
        viewers = [_User(port, path) for path in itertools.islice(itertools.cycle(_filters()), load.viewers)]
        before, delays = cpu_seconds(own), list[float]()
        updates = [asyncio.create_task(each.follow(fleet.cluster().generation)) for each in viewers]
        for _ in range(load.seconds):
            start, generation = time.monotonic(), fleet.cluster().generation
            agents.stdin.write(f"{load.changes}\n".encode())
            await fleet.changed(generation)
            delays.append((time.monotonic() - start) * 1000)
            await user.request()
            await asyncio.sleep(max(0.0, start + 1 - time.monotonic()))
        busy = (cpu_seconds(own) - before) / load.seconds
        for task in updates:
            task.cancel()
        ended = await asyncio.gather(*updates, return_exceptions=True)
        if failed := [each for each in ended if not isinstance(each, asyncio.CancelledError)]:
            raise OSError(f"{len(failed)} viewers failed, the first one with {failed[0]!r}")
    times = [time for each in viewers for time in each.times]
    updated = sum(each.updates for each in viewers) * 60 / len(viewers) / load.seconds
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
        percentile("devices by use during changes: time to the answer, median", (user.times,), 0.5, "ms"),
        percentile("devices by use during changes: time to the answer, 99 %", (user.times,), 0.99, "ms", budget=1000),
        percentile("pages of viewers after an event: time to the answer, 99 %", (times,), 0.99, "ms", budget=1000),
        single("updates of a viewer in a minute", updated, "events"),
        single("resident memory after changes and pages", memory_of(own).resident, "MiB", budget=200),
        *pages,
    )


def _filters() -> Iterator[str]:
    """The screens of viewers: one hundred different ones."""
    for number in range(10):
        yield f"/devices?holder=team-{number}/"
        yield f"/devices?state=idle,unhealthy&text=node-0{number}"
        yield f"/devices?sort=-temperature_celsius&start={number * 100}"
        yield f"/devices?sort=-busy_percent&start={number * 100}"
        yield f"/nodes?state=unhealthy&text={number}"
        yield f"/nodes?start={number * 100}"
        yield f"/pods?holder=team-{number}"
        yield f"/pods?sort=-held_since&start={number * 100}"
        yield f"/groups?group=example.com/label-{number}"
        yield f"/search?text=card{number}"


class _User:
    """A browser with a screen: it requests its page again, with the tag of what it has, after each event."""

    def __init__(self, port: int, path: str) -> None:
        self.times: list[float] = []
        self.updates = 0
        self._port = port
        self._path = path
        self._tag = b""

    async def request(self) -> None:
        """Requests the page and notes the time."""
        start = time.monotonic()
        async with asyncio.timeout(_PAGE_TIMEOUT):
            reader, writer = await self._open(self._path, f"If-None-Match: {self._tag.decode()}\r\n")
            body = await reader.read()
            writer.close()
        if not body.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 304 ")):
            raise OSError(f"{self._path}: found {body[:80]!r}, expected a page")
        self._tag = _TAG.findall(body)[0]
        self.times.append((time.monotonic() - start) * 1000)

    async def follow(self, generation: int) -> None:
        """Reads updates until it is cancelled."""
        screen = self._path[1:].partition("?")[0] or "overview"
        reader, writer = await self._open(f"/api/v1/events?screen={screen}&generation={generation}")
        try:
            while line := await reader.readline():
                if line == b"event: changed\n":
                    self.updates += 1
                    await self.request()
        finally:
            writer.close()

    async def _open(self, path: str, fields: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{fields}\r\n".encode())
        return reader, writer


async def _measure_pages(fleet: Fleet) -> list[Figure]:
    """Processor time to the first byte without the network, and sizes with the assets."""
    screens = Screens(fleet)
    site = Site(screens, Gate(loopback_only=False))
    links = screens.assets.links
    assets = [(await _get(site, f"/{path}")).body for path in (links.style, links.script)]
    figures: list[Figure] = []
    for name, path in _PAGES:
        times = list[float]()
        body: bytes | bytearray = b""
        for number in range(10):
            # The handler does not wait: this is the time to the first byte if nothing else runs. The number, which
            # these screens ignore, keeps viewers from sharing the page.
            start = time.thread_time()
            body = (await _get(site, f"{path}{'&' if '?' in path else '?'}unit={number}")).body
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
    path, _, query = path.partition("?")
    answer = site(Request("GET", path, "", b"", query=query))
    return answer if isinstance(answer, Response) else await answer


async def _wait_until_connected(fleet: Fleet, nodes: int) -> None:
    generation = -1
    while len(fleet.cluster().nodes) < nodes or not all(node.units for node in fleet.cluster().nodes.values()):
        generation = await fleet.changed(generation)
