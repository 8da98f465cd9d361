"""An agent that publishes slices at the double of the API server, in virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any

from drapools import offer, offers
from sliceservers import DRIVER, NODE, SliceServer
from virtualtime import TCP_DELAY, VirtualTimeLoop

from accelplane.apiserver import ApiServer
from accelplane.dra import catalog
from accelplane.dra.model import Features, Offer, Pool
from accelplane.dra.publisher import SlicePublisher

QAT = "qat.intel.com"
GPUS = offers(offer("0000:03:00.0"), offer("0000:04:00.0"))
TILES = offers(offer(attributes={"tiles": 2}))
PARTS = {"0000-03-00-0-0x56c0", "0000-03-00-0-0x56c0-t0", "0000-03-00-0-0x56c0-t1"}
NAMES = {"0000-03-00-0-0x56c0", "0000-04-00-0-0x56c0"}


class Agent:
    """A publisher with offers that a test changes."""

    def __init__(self, server: SliceServer, given: Mapping[str, Offer], driver: str = DRIVER, **options: Any) -> None:
        self.events: list[tuple[str, str]] = []
        self.held: Collection[str] = ()
        self.offers = given
        self.publisher = SlicePublisher(
            ApiServer(server.config),
            NODE,
            driver,
            on_event=lambda reason, text: self.events.append((reason, text)),
            **options,
        )
        self.driver = driver
        self.publisher.set_pool(self.pool)

    def pool(self, features: Features) -> Pool:
        return catalog.pool(self.driver, NODE, self.offers, features, held=self.held, evict="gone")

    def offer(self, given: Mapping[str, Offer]) -> None:
        self.offers = given
        self.publisher.set_pool(self.pool)


@contextlib.asynccontextmanager
async def running(
    server: SliceServer, given: Mapping[str, Offer] = GPUS, *, registered: bool = True, **options: Any
) -> AsyncGenerator[Agent]:
    agent = Agent(server, given, **options)
    task = asyncio.create_task(agent.publisher.run())
    agent.publisher.registered(registered)
    try:
        yield agent
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], seconds: float = 300) -> float:
    """Waits in virtual time; returns the seconds."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start < seconds
        await asyncio.sleep(0.05 if loop.time() - start < 3 else 0.5)
    return loop.time() - start


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `main` in virtual time."""
    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, TCP_DELAY)) as runner:
        runner.run(main())


def wipe(server: SliceServer) -> None:
    """What the kubelet does when it starts, and the garbage collector for a node that is gone."""
    for each in server.slices:
        server.remove("resourceslices", each.metadata.name)


def identities(server: SliceServer) -> dict[str, tuple[str, int]]:
    return {each.metadata.name: (each.metadata.uid, each.spec.pool.generation) for each in server.slices}


def unhealthy(address: str = "0000:03:00.0", **fields: Any) -> Offer:
    return offer(address, "unhealthy", reason="temperature", **fields)
