"""The controller of Onload resources, running against the double of the API server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from kubeapi import KubeApi
from onloadsetup import Setup

from accelplane.kube.client import Client
from accelplane.kube.manager import OFF, Manager
from accelplane.onload.reconciler import OnloadController

IMAGE = "accelplane/onload-device-plugin:1"
VERSION = "8.1.2.26"


def wall_clock() -> Callable[[], float]:
    """A clock that starts at the current time and advances with the running event loop."""
    loop = asyncio.get_running_loop()
    start = time.time() - loop.time()
    return lambda: start + loop.time()


@contextlib.asynccontextmanager
async def operator(api: KubeApi, image: str = IMAGE, manager: str = "onload-operator") -> AsyncIterator[None]:
    client = Client(api.config, field_manager=manager, timeout=2)
    instance = Manager(client, health_address=OFF, metrics_address=OFF)
    OnloadController(instance, image, clock=wall_clock())
    task = asyncio.create_task(instance.run())
    try:
        await asyncio.sleep(0)
        yield
        assert not task.done(), task.result()
        instance.stop()
        async with asyncio.timeout(30):
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


@contextlib.asynccontextmanager
async def running(setup: Setup) -> AsyncIterator[None]:
    """The cluster reacts. At the end, no invariant was violated."""
    task = asyncio.create_task(setup.run())
    try:
        yield
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not setup.violations


def events(api: KubeApi, reason: str) -> list[str]:
    """The texts of the events with this reason."""
    return [each["note"] for each in api.all("events") if each["reason"] == reason]
