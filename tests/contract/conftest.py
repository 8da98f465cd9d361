"""Fixtures of the contract tests: a kubelet's directory, kubelets, agents, processes."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memorydirectory
import pytest
from draservices import ServedDriver, serving
from kubelets import EMBEDDED, Embedded, Kubelet
from processes import Process
from virtualtime import TCP_DELAY, VirtualTimeLoop

from accelplane.node.agent import Agent
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin

if TYPE_CHECKING:
    from cluster.node import Node
    from kubeapi import KubeApi

    from accelplane.kube.client import Client

Start = Callable[..., Awaitable[Agent]]
Run = Callable[..., Process]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual_time: the test and its fixtures run on a `VirtualTimeLoop`")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """With the marker `virtual_time`, delays of the tested code take no time. Client and server are in the process."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": partial(VirtualTimeLoop, TCP_DELAY)}
    return {"system": asyncio.new_event_loop}


@pytest.fixture
def directory(request: pytest.FixtureRequest) -> Iterator[str]:
    """A kubelet's directory, with short socket paths, for tests with the marker `memory` in memory if possible."""
    memory = request.node.get_closest_marker("memory") and memorydirectory.in_memory()
    path = tempfile.mkdtemp(prefix="ak", dir=memorydirectory.MEMORY if memory else None)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def real_node() -> Iterator["Node"]:
    """One node for all tests with the real kubelet. Skips the tests if it cannot be started."""
    from cluster.cluster import why_unavailable
    from real_kubelet import running_node

    if problem := why_unavailable():
        pytest.skip(f"no cluster: {problem}")
    with running_node() as node:
        yield node


@pytest.fixture(params=[*EMBEDDED, pytest.param("real", marks=pytest.mark.cluster)])
def idle_kubelet(directory: str, request: pytest.FixtureRequest) -> Iterator[Kubelet]:
    """A kubelet that has not been started yet: the embedded one with each behaviour, then a real one."""
    if request.param in EMBEDDED:
        yield Embedded(directory, request.param.removeprefix("embedded-"))
        return
    from real_kubelet import Real

    real = Real(request.getfixturevalue("real_node"), directory)
    yield real
    real.close()


@pytest.fixture
async def kubelet(idle_kubelet: Kubelet) -> AsyncIterator[Kubelet]:
    """A kubelet that runs."""
    await idle_kubelet.start()
    yield idle_kubelet
    await idle_kubelet.kill()


@pytest.fixture
async def start_agent(directory: str, tmp_path: Path) -> AsyncIterator[Start]:
    """`await start_agent(name=plugin, …)`: an agent in this process, ended with the test. Settings by their names."""
    running: list[tuple[Agent, asyncio.Task[None]]] = []

    async def start(settings: dict[str, Any] | None = None, /, **plugins: Plugin[Any]) -> Agent:
        defaults = {"root": str(tmp_path), "kubelet_dir": directory, "cdi_dir": f"{directory}/cdi"}
        agent = Agent(Settings(**{**defaults, **(settings or {})}), plugins)
        running.append((agent, asyncio.create_task(agent.run())))
        await asyncio.sleep(0)
        return agent

    yield start
    for agent, task in running:
        agent.stop()
        async with asyncio.timeout(10):
            await task


@pytest.fixture
def run(tmp_path: Path, directory: str) -> Iterator[Run]:
    """`run("accelplane", "node", …)`: a separate process, killed at the end of the test.

    Every node command gets the test's directories.
    """
    processes: list[Process] = []

    def start(command: str, *arguments: str, **more: Any) -> Process:
        tree = tmp_path / "tree"
        tree.mkdir(exist_ok=True)
        places = (f"--root={tree}", f"--kubelet-dir={directory}", f"--cdi-dir={directory}/cdi")
        log = tmp_path / f"log{len(processes)}"
        processes.append(Process(command, *arguments, *places, log=log, **more))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
async def api() -> "AsyncIterator[KubeApi]":
    """A double of the API server."""
    from kubeapi import kube_api

    async with kube_api() as running:
        yield running


@pytest.fixture
async def client(api: "KubeApi") -> "AsyncIterator[Client]":
    """A client of the double."""
    from accelplane.kube.client import Client

    instance = Client(api.config, field_manager="test", timeout=1)
    yield instance
    await instance.close()


@pytest.fixture
def kubelet_dir(directory: str) -> str:
    """A kubelet's root directory with `plugins_registry`."""
    os.mkdir(f"{directory}/plugins_registry")
    return directory


@pytest.fixture
async def driver(kubelet_dir: str) -> AsyncIterator[ServedDriver]:
    """A DRA driver that a kubelet has registered."""
    async with serving(ServedDriver(kubelet_dir)) as served:
        await served.registered()
        yield served
