"""Memory of the agent with GPU and NPU plugin, 4 cards and an NPU, idle after its registration."""

import asyncio
import urllib.request
from collections.abc import Sequence

from benchmarks.agent import Memory, free_port, registered, world
from benchmarks.figures import Figure, Outcome, Scale, median

_GO, _GO_ALL = "Go GPU plugin", "seven Go plugins"


def measure(scale: Scale) -> Outcome:
    plain = [asyncio.run(_idle(http=False)) for _ in range(scale.of(7, 2))]
    with_http = [asyncio.run(_idle(http=True)) for _ in range(scale.of(3, 1))]
    return Outcome(
        figures=(
            _resident("resident", [memory for memory, _ in plain], budget=42),
            median(
                "anonymous",
                [memory.anonymous for memory, _ in plain],
                "MiB",
                peers={_GO: 8, _GO_ALL: 28},
            ),
            median("proportional (PSS)", [memory.proportional for memory, _ in plain], "MiB"),
            median("threads", [threads for _, threads in plain], "", peers={_GO_ALL: 28}),
            _resident("resident, with -http-address", [memory for memory, _ in with_http], budget=None),
            median("anonymous, with -http-address", [memory.anonymous for memory, _ in with_http], "MiB"),
        ),
        notes=("with -http-address: /metrics was read once",),
    )


def _resident(name: str, memories: Sequence[Memory], budget: float | None) -> Figure:
    sizes = [memory.resident for memory in memories]
    return median(name, sizes, "MiB", budget=budget, peers={_GO: 35, _GO_ALL: 129})


async def _idle(*, http: bool) -> tuple[Memory, int]:
    address = f"127.0.0.1:{free_port()}"
    with world() as here:
        async with registered(here, *(("--http-address", address) if http else ())) as (agent, _kubelet):
            if http:
                await asyncio.to_thread(_read, f"http://{address}/metrics")
            await asyncio.sleep(2)  # the thread of a scan or of a page ends meanwhile
            return agent.memory(), agent.threads()


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as page:  # noqa: S310 - the agent's own page
        return page.read()
