"""An operator of device plugins on an API server in memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from apicalls import OPERATOR, recorded
from kubeapi import KubeApi, Object

from accelplane.kube.client import Client
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.manager import OFF, Manager
from accelplane.operator.controller import controllers
from accelplane.operator.settings import ImagePolicy, Settings

NAMESPACE = "plugins"
IMAGE = "intel/intel-gpu-plugin:0.31.1"


@contextlib.asynccontextmanager
async def operator(
    api: KubeApi, *families: str, images: ImagePolicy | None = None, wait: float = 10, dra: bool = False
) -> AsyncIterator[None]:
    """Runs the controllers of these families; `dra`: they may grant the rights for claims."""
    client = Client(api.config, field_manager="accelplane-operator", timeout=1)
    manager = Manager(
        client, health_address=OFF, metrics_address=OFF, watch_timeouts=WatchTimeouts(first_delay=0.01, max_delay=0.1)
    )
    settings = Settings(
        namespace=NAMESPACE,
        images=images or ImagePolicy(),
        dra_role="x-dra-role" if dra else "",
        dra_status_role="x-dra-status-role" if dra else "",
    )
    controllers(manager, families, settings, wait=wait)
    task = asyncio.create_task(manager.run())
    try:
        yield
        assert not task.done()
        manager.stop()
        async with asyncio.timeout(5):
            await task
        assert recorded(api.requests) <= OPERATOR
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


def put(api: KubeApi, thing: Object, *, generation: int = 1) -> Object:
    """Applies a custom resource."""
    thing["metadata"]["generation"] = generation
    return api.put(f"{thing['kind'].lower()}s", thing)


def daemonset(api: KubeApi, family: str = "gpu", name: str = "mine") -> Object | None:
    return api.get("daemonsets", f"intel-{family}-plugin-{name}", NAMESPACE)


def condition(api: KubeApi, kind: str, family: str = "gpu", name: str = "mine") -> Object | None:
    found = api.get(f"{family}deviceplugins", name) or {}
    conditions = found.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), None)


def has_condition(api: KubeApi, kind: str, status: str, **where: str) -> bool:
    found = condition(api, kind, **where)
    return found is not None and found["status"] == status
