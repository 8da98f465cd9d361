"""The API server of the demo, with the agent's publisher of slices."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from drapools import offer, offers
from waiting import until

from accelplane.apiserver import AlreadyExists, ApiServer, Conflict, NotFound, load_config, object_path, resource_path
from accelplane.dra import catalog
from accelplane.dra.claims import ClaimReader
from accelplane.dra.model import ClaimRef
from accelplane.dra.publisher import SlicePublisher
from accelplane.dra.resourceslice import ResourceSlice
from accelplane.kubelet.embedded import ClaimApiError
from accelplane.simulate.claimserver import ClaimServer

GPU = "gpu.intel.com"
GPUS = offers(offer("0000:03:00.0"), offer("0000:04:00.0"))
SLICES = resource_path("resource.k8s.io", "v1", "resourceslices")


@pytest.fixture
async def server() -> AsyncIterator[ClaimServer]:
    server = ClaimServer("demo")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def api(server: ClaimServer, tmp_path: Path) -> ApiServer:
    (tmp_path / "kubeconfig").write_text(server.kubeconfig())
    return ApiServer(load_config(str(tmp_path / "kubeconfig")))


@pytest.fixture
async def published(server: ClaimServer, api: ApiServer) -> AsyncIterator[ClaimServer]:
    publisher = SlicePublisher(api, "demo", GPU)
    publisher.set_pool(lambda features: catalog.pool(GPU, "demo", GPUS, features, held=(), evict="gone"))
    publisher.registered(True)
    task = asyncio.create_task(publisher.run())
    await until(lambda: len(server.devices(GPU)) == 2)
    yield server
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_published_devices_are_allocated_once(published: ClaimServer, api: ApiServer) -> None:
    devices = {published.allocate(f"claim-{number}", GPU, pod="pod") for number in range(2)}
    assert devices == {"0000-03-00-0-0x56c0", "0000-04-00-0-0x56c0"}
    with pytest.raises(LookupError, match=f"{GPU}: no free device in 1 slices"):
        published.allocate("claim-2", GPU, pod="pod")
    allocated = await published.claim("default", "claim-0")
    claim = await ClaimReader(api).allocated(ClaimRef("default", allocated.uid, "claim-0"))
    assert claim.in_use
    assert claim.class_of("device") == GPU
    with pytest.raises(ClaimApiError, match='"claim-2" not found'):
        await published.claim("default", "claim-2")


async def test_slices_that_the_kubelet_deletes_are_published_again(published: ClaimServer) -> None:
    await published.delete_slices("")
    assert published.devices(GPU) == []
    await until(lambda: len(published.devices(GPU)) == 2)


async def test_writes_are_checked(published: ClaimServer, api: ApiServer) -> None:
    path = object_path(SLICES, f"demo-{GPU}-0")
    found = await api.get(path, ResourceSlice)
    await api.put(path, found, ResourceSlice)
    with pytest.raises(Conflict):
        await api.put(path, found, ResourceSlice)
    with pytest.raises(AlreadyExists):
        await api.post(SLICES, found, ResourceSlice)
    with pytest.raises(NotFound):
        await api.get(object_path(SLICES, "other"), ResourceSlice)
