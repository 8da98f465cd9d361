"""The agent's own sockets and their directory."""

import asyncio
import os
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from agentsockets import OTHER, own_socket, plugins_dir, server
from conftest import Start
from gadgets import GADGET, Other, Table, gadgets
from kubelets import Kubelet, embedded_only
from waiting import until

from accelplane.kubelet.server import Stage
from accelplane.node.agent import Agent
from accelplane.node.settings import ConfigurationError, Settings


@pytest.fixture
async def table(start_agent: Start, kubelet: Kubelet) -> Agent:
    """An agent with two gadgets that are registered with a kubelet."""
    agent = await start_agent(table=Table(gadgets("a", "b")))
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    return agent


async def test_the_socket_is_accessible_only_to_its_owner(directory: str, table: Agent) -> None:
    status = os.stat(own_socket(directory))
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600


async def test_only_sockets_remain_in_the_directory(directory: str, table: Agent) -> None:
    assert {name for name in os.listdir(plugins_dir(directory)) if name.startswith(".")} == set()


async def test_a_deleted_plugin_socket_is_created_and_registered_again(
    directory: str, kubelet: Kubelet, table: Agent
) -> None:
    registrations = server(table).counters.registrations
    os.unlink(own_socket(directory))
    await until(lambda: server(table).counters.registrations > registrations)
    await until(lambda: os.path.exists(own_socket(directory)))
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})


@pytest.mark.parametrize("kind", ["stale socket", "regular file", "dangling link", "fifo"])
async def test_a_socket_of_an_earlier_process_is_replaced(
    directory: str, kubelet: Kubelet, start_agent: Start, kind: str
) -> None:
    path = own_socket(directory)
    match kind:
        case "stale socket":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(path)
        case "regular file":
            Path(path).write_text("")
        case "dangling link":
            os.symlink("/nowhere", path)
        case _:
            os.mkfifo(path)
    await start_agent(table=Table(gadgets("a")))
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    assert stat.S_ISSOCK(os.lstat(path).st_mode)


async def test_a_directory_at_the_socket_path_is_reported_and_the_socket_is_created_after_its_removal(
    directory: str, kubelet: Kubelet, start_agent: Start
) -> None:
    os.mkdir(own_socket(directory))
    agent = await start_agent(table=Table(gadgets("a")), other=Other(gadgets("b")))
    await kubelet.until(lambda resources: resources == {OTHER: (1, 1)})
    await until(lambda: server(agent).problem.startswith(f"cannot create the socket {own_socket(directory)}: Is a dir"))
    os.rmdir(own_socket(directory))
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1), OTHER: (1, 1)})


async def test_a_live_owner_of_the_socket_path_is_not_replaced_until_it_ends(
    directory: str, kubelet: Kubelet, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = own_socket(directory)
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(path)
        owner.listen(50)
        inode = os.stat(path).st_ino
        agent = await start_agent(table=Table(gadgets("a")), other=Other(gadgets("b")))
        await kubelet.until(lambda resources: resources == {OTHER: (1, 1)})
        await until(lambda: f"{path} is in use by process {os.getpid()}" in server(agent).problem)
        assert os.stat(path).st_ino == inode
        assert server(agent).stage == Stage.WAITING
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1), OTHER: (1, 1)})
    assert sum("is in use by" in record.message for record in caplog.records) == 1
    assert f"{GADGET}: the wait has ended; taking over {path}" in caplog.messages


async def test_a_live_owner_of_the_replaced_socket_is_not_replaced(
    directory: str, kubelet: Kubelet, table: Agent
) -> None:
    path = own_socket(directory)
    with socket.socket(socket.AF_UNIX) as thief:
        thief.bind(f"{path}.new")
        thief.listen(50)
        os.rename(f"{path}.new", path)
        inode = os.stat(path).st_ino
        await until(lambda: server(table).stage == Stage.WAITING and "is in use" in server(table).problem)
        await kubelet.until(lambda resources: resources == {GADGET: (2, 0)})
        assert os.stat(path).st_ino == inode
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})


async def test_a_recreated_directory_is_served_again(directory: str, idle_kubelet: Kubelet, start_agent: Start) -> None:
    await idle_kubelet.start()
    agent = await start_agent(table=Table(gadgets("a")))
    await idle_kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    await idle_kubelet.kill()
    shutil.rmtree(plugins_dir(directory))
    await until(lambda: "does not exist" in server(agent).problem)
    await idle_kubelet.start()
    await idle_kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    await idle_kubelet.kill()


@embedded_only("a real kubelet's directory stays where it is: the node's own disk")
async def test_the_kubelet_directory_can_be_replaced(directory: str, idle_kubelet: Kubelet, start_agent: Start) -> None:
    await idle_kubelet.start()
    await start_agent(table=Table(gadgets("a")))
    await idle_kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    await idle_kubelet.kill()
    os.rename(directory, f"{directory}-old")
    try:
        await idle_kubelet.start()
        await idle_kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
        await idle_kubelet.kill()
    finally:
        shutil.rmtree(f"{directory}-old")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file", "file: not a directory, expected the kubelet's"),
        ("has-file", "has-file/device-plugins: not a directory, expected the kubelet's"),
        ("x" * 100, "a socket path of"),
    ],
)
async def test_an_unusable_kubelet_directory_stops_the_agent_with_its_path(
    directory: str, place: str, message: str
) -> None:
    Path(directory, "file").write_text("")
    Path(directory, "has-file").mkdir()
    Path(directory, "has-file/device-plugins").write_text("")
    path = os.path.join(directory, place)
    with pytest.raises(ConfigurationError) as error:
        await Agent(Settings(kubelet_dir=path), {"table": Table(gadgets("a"))}).run()
    assert str(error.value).removeprefix("-kubelet-dir: ").startswith(path)
    assert message in str(error.value)


async def test_a_file_that_replaces_the_directory_stops_the_agent_with_its_path(directory: str) -> None:
    path = os.path.join(directory, "kubelet")
    settings = Settings(root=directory, kubelet_dir=path, cdi_dir=f"{directory}/cdi")
    agent = Agent(settings, {"table": Table(gadgets("a"))})
    task = asyncio.create_task(agent.run())
    await until(lambda: bool(agent.runners) and agent.runners["table"].scan.completed.is_set())
    os.mkdir(path)
    Path(path, "device-plugins").write_text("")
    async with asyncio.timeout(10):
        with pytest.raises(ConfigurationError, match=f"^{path}/device-plugins: not a directory"):
            await task


async def test_a_directory_that_the_kubelet_creates_at_any_moment_is_used(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.path.join(directory, "kubelet")
    os.mkdir(path)
    real_stat = os.stat

    def stat_then_create(file: Any, **options: Any) -> os.stat_result:
        try:
            return real_stat(file, **options)
        finally:
            if file == plugins_dir(path) and agent.runners and agent.runners["table"].publisher.served:
                Path(file).mkdir(exist_ok=True)  # right after the first check of the server

    agent = Agent(
        Settings(root=directory, kubelet_dir=path, cdi_dir=f"{directory}/cdi"), {"table": Table(gadgets("a"))}
    )
    monkeypatch.setattr(os, "stat", stat_then_create)
    task = asyncio.create_task(agent.run())
    try:
        await until(lambda: os.path.exists(own_socket(path)) or task.done())
        assert not task.done()
    finally:
        agent.stop()
        await task


async def test_an_agent_whose_only_socket_path_is_too_long_exits_with_that_path(directory: str) -> None:
    class LongNamePlugin(Table):
        namespace = f"{'x' * 90}.example.com"

    settings = Settings(root=directory, kubelet_dir=directory, cdi_dir=f"{directory}/cdi")
    async with asyncio.timeout(10):
        with pytest.raises(ConfigurationError, match=r"xx\.example\.com-gadget\.sock: a socket path of .* at most 107"):
            await Agent(settings, {"long": LongNamePlugin(gadgets("a"))}).run()
