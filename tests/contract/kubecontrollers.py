"""A controller of ConfigMaps, whose reconciler records its calls."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kubeapi import KubeApi
from kubekinds import Config, Widget, widget

from accelplane.kube.client import Client
from accelplane.kube.controller import Controller, Reconcile
from accelplane.kube.informer import Informer, WatchTimeouts
from accelplane.kube.metrics import Metrics
from accelplane.kube.objects import Request

HASTE = WatchTimeouts(first_delay=0.01, max_delay=0.1)


class Setup:
    """A server with widgets and ConfigMaps in caches, and what was reconciled."""

    def __init__(self, api: KubeApi, client: Client) -> None:
        self.api = api
        self.client = client
        self.informers = [Informer(client, watch_timeouts=HASTE) for _ in range(2)]
        self.widgets = self.informers[0].cache(Widget)
        self.configs = self.informers[1].cache(Config)
        self.seen: list[Request] = []
        self.metrics = Metrics()

    async def record(self, request: Request) -> None:
        self.seen.append(request)

    def controller(self, reconcile: Reconcile | None = None, **more: float) -> Controller:
        return Controller("widget", reconcile or self.record, metrics=self.metrics, **more)  # pyright: ignore[reportArgumentType]

    @contextlib.asynccontextmanager
    async def running(self, controller: Controller) -> AsyncIterator[None]:
        caches = [asyncio.create_task(informer.run()) for informer in self.informers]
        async with asyncio.timeout(5):
            await self.widgets.synced.wait()
            await self.configs.synced.wait()
        running = asyncio.create_task(controller.run())
        try:
            yield
            controller.stop()
            async with asyncio.timeout(5):
                await running
        finally:
            for task in (*caches, running):
                task.cancel()

    def counted(self, name: str) -> dict[str, float]:
        return {
            sample.labels.get("result", ""): sample.value
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == name
        }


async def thing(setup: Setup, name: str = "w") -> Widget:
    setup.api.put("widgets", widget(name))
    return await setup.client.get(Widget, name)
