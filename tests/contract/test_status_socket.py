"""The socket with the status of an agent: created again when it is removed, and served by one agent at a time."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from waiting import until

from accelplane.node import status_socket
from accelplane.node.settings import Settings
from accelplane.node.watcher import Watcher


@asynccontextmanager
async def serving(kubelet_dir: Path, document: bytes) -> AsyncIterator[None]:
    async def made() -> bytes:
        return document

    watcher = Watcher()
    watcher.start()
    task = asyncio.create_task(status_socket.serve(Settings(kubelet_dir=str(kubelet_dir)), "agent", made, watcher))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
        watcher.close()


async def read(path: Path) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.fixture
def kubelet_dir(directory: str) -> Path:
    (Path(directory) / "device-plugins").mkdir()
    return Path(directory)


async def test_a_removed_socket_is_created_again(kubelet_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_socket, "_CHECK_INTERVAL", 600.0)  # only events wake it
    path = kubelet_dir / "device-plugins/accelplane/agent.sock"
    async with serving(kubelet_dir, b"first"):
        await until(path.exists)
        for remove in (path.unlink, lambda: os.rename(path.parent, kubelet_dir / "other")):
            remove()
            await until(path.exists)
            assert await read(path) == b"first"
    assert not path.exists()


async def test_the_socket_appears_when_the_kubelet_has_created_its_directory(directory: str) -> None:
    path = Path(directory, "device-plugins/accelplane/agent.sock")
    async with serving(Path(directory), b"first"):
        await asyncio.sleep(0)
        path.parent.parent.mkdir()
        await until(path.exists)


async def test_a_second_agent_serves_after_the_first_one(kubelet_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_socket, "_CHECK_INTERVAL", 600.0)
    path = kubelet_dir / "device-plugins/accelplane/agent.sock"
    async with AsyncExitStack() as first:
        await first.enter_async_context(serving(kubelet_dir, b"first"))
        await until(path.exists)
        async with serving(kubelet_dir, b"second"):
            await asyncio.sleep(0.05)
            assert await read(path) == b"first"
            await first.aclose()
            await until(path.exists)
            assert await read(path) == b"second"
