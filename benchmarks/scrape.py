"""The cost of the metrics page: processor time of a scrape, size of the page, and Allocate while it is scraped.

The large node has 64 GPUs, each with the files of i915 on a recent kernel, shared by 8 containers each; 64 containers
hold one. The files are in memory below a directory. With the same files below `/`, in a mount namespace of its own, a
scrape takes the same processor time.
"""

import asyncio
import contextlib
import glob
import gzip
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence

from accelplane.kubelet.embedded import Pod
from benchmarks.agent import GPU, AgentProcess, NodeSetup, free_port, gpu_npu_node, ordinary_node, registered_agent
from benchmarks.figures import Figure, Result, Scale, median, percentile, quantile
from benchmarks.raw_grpc_client import RawGrpcClient
from benchmarks.reference_kubelet import ALLOCATE, allocate_request

_CARDS, _SHARES, _HOLDERS = 64, 8, 64
_SLOWER = 1.0  # the largest increase of the 99th percentile of `Allocate`, in milliseconds
_SCRAPER = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1], timeout=10).read()
    time.sleep(1)
"""
_HWMON = {
    "name": "i915", "energy1_input": "123456789", "power1_max": "120000000", "power1_crit": "200000000",
    "temp1_input": "45000", "fan1_input": "1200", "in0_input": "780",
}  # fmt: skip
_GT = {
    "rps_act_freq_mhz": "600", "rps_cur_freq_mhz": "650", "rps_max_freq_mhz": "2050", "rps_RP0_freq_mhz": "2050",
    "rc6_residency_ms": "123456", "throttle_reason_status": "0",
}  # fmt: skip
_AER = "RxErr 0\nBadTLP 0\nBadDLLP 0\nRollover 0\nTimeout 0\nNonFatalErr 0\nCorrIntErr 0\nHeaderOF 0\nTOTAL_ERR_COR 0\n"
_PCI = {
    "aer_dev_correctable": _AER, "aer_dev_nonfatal": _AER.replace("_COR", "_NONFATAL"),
    "aer_dev_fatal": _AER.replace("_COR", "_FATAL"), "current_link_speed": "16.0 GT/s PCIe",
    "max_link_speed": "16.0 GT/s PCIe", "current_link_width": "16", "max_link_width": "16",
    "power/runtime_status": "active", "power/control": "on", "power/runtime_active_time": "1000",
    "power/runtime_suspended_time": "0",
}  # fmt: skip


def measure(scale: Scale) -> Result:
    return asyncio.run(_measure(scale))


async def _measure(scale: Scale) -> Result:
    scrapes = scale.of(60, 3)
    figures: list[Figure] = []
    with large_gpu_node() as setup:
        async with _scraped(setup) as (agent, url):
            page = await _read(url)
            figures += _costs("64 GPUs: ", [await _cost(agent, url) for _ in range(scrapes)], 20)
            figures.append(Figure(name="64 GPUs: page", value=len(page) / 1000, unit="kB", budget=200))
            compressed = len(gzip.compress(page, 1)) / 1000
            figures.append(Figure(name="64 GPUs: page with gzip level 1", value=compressed, unit="kB", budget=20))
            figures += await asyncio.to_thread(_allocate, setup, url, scale)
            figures.append(Figure(name="64 GPUs: resident", value=agent.memory().resident, unit="MiB", budget=40))
    with ordinary_node() as setup:
        async with _scraped(setup) as (agent, url):
            figures += _costs("ordinary node: ", [await _cost(agent, url) for _ in range(scrapes)], 8)
    return Result(figures=figures, notes=(f"{scrapes} scrapes, 1.1 s apart; --root is a directory in memory",))


@contextlib.contextmanager
def large_gpu_node() -> Iterator[NodeSetup]:
    """A node with 64 GPUs, each with all files of i915, and with 8 IDs."""
    with gpu_npu_node(cards=_CARDS, npus=0) as setup:
        for device in setup.node.devices():
            path = f"{setup.root}{device.path}"
            for name, text in _PCI.items():
                _write(f"{path}/{name}", text)
            for name, text in _HWMON.items():
                _write(f"{path}/hwmon/hwmon0/{name}", text)
            for name, text in _GT.items():
                _write(f"{path}/drm/{device.name}/gt/gt0/{name}", text)
        config = f"{setup.directory}/agent.yaml"
        with open(config, "w", encoding="utf-8") as file:
            file.write(f"plugins: {{gpu: {{shared-dev-num: {_SHARES}}}}}\n")
        yield NodeSetup(setup.directory, setup.node, ("gpu",), config=config, shares=_SHARES)


@contextlib.asynccontextmanager
async def _scraped(setup: NodeSetup) -> AsyncIterator[tuple[AgentProcess, str]]:
    address = f"127.0.0.1:{free_port()}"
    async with registered_agent(setup, "--http-address", address) as (agent, kubelet):
        if setup.shares > 1:
            for number in range(_HOLDERS):
                await kubelet.run_pod(Pod(f"holder-{number}", containers={"main": {GPU: 1}}))
        yield agent, f"http://{address}/metrics"


async def _cost(agent: AgentProcess, url: str) -> float:
    """Milliseconds of processor time of one scrape."""
    await asyncio.sleep(1.1)  # a younger reading would be used again
    before = agent.cpu_seconds()
    await _read(url)
    return (agent.cpu_seconds() - before) * 1000


def _costs(prefix: str, samples: list[float], budget: float) -> list[Figure]:
    return [median(f"{prefix}processor time of a scrape", samples, "ms", budget=budget)]


def _allocate(setup: NodeSetup, url: str, scale: Scale) -> list[Figure]:
    """Latency of `Allocate` without scrapes and with one every second, in alternating rounds."""
    (socket,) = glob.glob(f"{setup.kubelet_dir}/device-plugins/{GPU.replace('/', '-')}*.sock")
    request = allocate_request("card0-0").SerializeToString()
    alone: list[Sequence[float]] = []
    scraped: list[Sequence[float]] = []
    with RawGrpcClient(socket, ALLOCATE) as client:
        for _ in range(scale.of(5, 1)):
            alone.append(_latencies(client, request, scale.of(2000, 20)))
            with subprocess.Popen([sys.executable, "-c", _SCRAPER, url]) as scraper:
                try:
                    scraped.append(_latencies(client, request, scale.of(2000, 20)))
                finally:
                    scraper.kill()
    base = quantile([sample for part in alone for sample in part], 0.99)
    return [
        percentile("Allocate without scrapes, p50", alone, 0.5, "ms"),
        percentile("Allocate without scrapes, p99", alone, 0.99, "ms"),
        percentile("Allocate while scraped every second, p50", scraped, 0.5, "ms"),
        percentile("Allocate while scraped every second, p99", scraped, 0.99, "ms", budget=base + _SLOWER),
    ]


def _latencies(client: RawGrpcClient, request: bytes, count: int) -> Sequence[float]:
    """Milliseconds of each call, with a pause after it: calls are at any time of a scrape."""
    found: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        client.call(request)
        found.append((time.perf_counter() - start) * 1000)
        time.sleep(0.002)
    return found


async def _read(url: str) -> bytes:
    return await asyncio.to_thread(_fetch, url)


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as page:  # noqa: S310 - the agent's own page
        return page.read()


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")
