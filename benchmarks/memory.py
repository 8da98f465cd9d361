"""Memory of the agent, idle after its registration: with 4 cards and an NPU, and with all families on a large node."""

import asyncio
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from benchmarks.agent import Memory, World, free_port, registered, whole_world, world
from benchmarks.figures import Figure, Outcome, Scale, median

_GO, _GO_ALL = "Go GPU plugin", "seven Go plugins"
_RESIDENT, _ANONYMOUS = {_GO: 35.0, _GO_ALL: 129.0}, {_GO: 8.0, _GO_ALL: 28.0}


def measure(scale: Scale) -> Outcome:
    count = scale.of(7, 2)
    plain = [asyncio.run(_idle(world, http=False)) for _ in range(count)]
    whole = [asyncio.run(_idle(whole_world, http=False)) for _ in range(count)]
    with_http = [asyncio.run(_idle(world, http=True)) for _ in range(scale.of(3, 1))]
    return Outcome(
        figures=(
            *_figures("", plain, resident=42, anonymous=None, peers=(_GO, _GO_ALL)),
            *_figures("all families: ", whole, resident=48, anonymous=26, peers=(_GO_ALL,)),
            *_figures("with -http-address: ", with_http, resident=None, anonymous=None, peers=()),
        ),
        notes=("with -http-address: /metrics was read once",),
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


async def _idle(make: Callable[[], AbstractContextManager[World]], *, http: bool) -> tuple[Memory, int]:
    address = f"127.0.0.1:{free_port()}"
    with make() as here:
        async with registered(here, *(("--http-address", address) if http else ())) as (agent, _kubelet):
            if http:
                await asyncio.to_thread(_read, f"http://{address}/metrics")
            await asyncio.sleep(2)  # the thread of a scan or of a page ends meanwhile
            return agent.memory(), agent.threads()


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as page:  # noqa: S310 - the agent's own page
        return page.read()
