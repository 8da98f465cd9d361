"""Memory of the agent, idle after its registration: with 4 cards and an NPU, and with all families on a large node."""

import asyncio
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from benchmarks.agent import Memory, NodeSetup, free_port, gpu_npu_node, large_node, registered_agent
from benchmarks.figures import Figure, Result, Scale, median

_GO, _GO_ALL = "Go GPU plugin", "seven Go plugins"
_RESIDENT, _ANONYMOUS = {_GO: 35.0, _GO_ALL: 129.0}, {_GO: 8.0, _GO_ALL: 28.0}


def measure(scale: Scale) -> Result:
    count = scale.of(7, 2)
    gpus = [asyncio.run(_idle(gpu_npu_node, http=False)) for _ in range(count)]
    families = [asyncio.run(_idle(large_node, http=False)) for _ in range(count)]
    with_http = [asyncio.run(_idle(gpu_npu_node, http=True)) for _ in range(scale.of(3, 1))]
    return Result(
        figures=(
            *_figures("", gpus, resident=42, anonymous=None, peers=(_GO, _GO_ALL)),
            *_figures("all families: ", families, resident=48, anonymous=26, peers=(_GO_ALL,)),
            *_figures("with -http-address: ", with_http, resident=None, anonymous=None, peers=()),
        ),
        notes=("with -http-address: after one scrape of /metrics",),
    )


def _figures(
    prefix: str,
    samples: Sequence[tuple[Memory, int]],
    *,
    resident: float | None,
    anonymous: float | None,
    peers: Sequence[str],
) -> Sequence[Figure]:
    memories = [memory for memory, _threads in samples]
    return (
        median(
            f"{prefix}resident",
            [memory.resident for memory in memories],
            "MiB",
            budget=resident,
            peers={name: _RESIDENT[name] for name in peers},
        ),
        median(
            f"{prefix}anonymous",
            [memory.anonymous for memory in memories],
            "MiB",
            budget=anonymous,
            peers={name: _ANONYMOUS[name] for name in peers},
        ),
        median(f"{prefix}proportional (PSS)", [memory.proportional for memory in memories], "MiB"),
        median(f"{prefix}threads", [threads for _memory, threads in samples], "", peers={_GO_ALL: 28} if peers else {}),
    )


async def _idle(make: Callable[[], AbstractContextManager[NodeSetup]], *, http: bool) -> tuple[Memory, int]:
    address = f"127.0.0.1:{free_port()}"
    with make() as setup:
        async with registered_agent(setup, *(("--http-address", address) if http else ())) as (agent, _kubelet):
            if http:
                await asyncio.to_thread(_read, f"http://{address}/metrics")
            await asyncio.sleep(2)  # threads of scans and pages end within this time
            return agent.memory(), agent.threads()


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as page:  # noqa: S310 - a page of the agent
        return page.read()
