"""The agent and the kubelet's directory: resources are registered again after any restart or replacement."""

import asyncio
import logging
import os
import shutil
from pathlib import Path

import pytest
from agentsockets import OTHER, own_socket, plugins_dir, server
from conftest import Start
from fake_kubelet import FakeKubelet
from gadgets import GADGET, Other, Table, gadgets
from kubelets import Kubelet, embedded_only
from peer import Peer
from waiting import until

from accelplane.devices import Resource
from accelplane.kubelet import registration_state
from accelplane.kubelet.server import Stage
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings
from accelplane.plugins import ScanError


async def registered(agent: Agent, plugin: str = "table", resource: str = "gadget") -> None:
    def is_registered() -> bool:
        served = agent.runners[plugin].publisher.served if plugin in agent.runners else {}
        return resource in served and served[resource].server.stage == Stage.REGISTERED

    await until(is_registered)


@pytest.fixture
async def table(start_agent: Start, kubelet: Kubelet) -> Agent:
    """An agent with two gadgets that are registered with a kubelet."""
    agent = await start_agent(table=Table(gadgets("a", "b")))
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    return agent


# Restarts of kubelets


@embedded_only("a real kubelet's directory is there before the kubelet: the node's own disk")
async def test_resources_are_registered_when_the_kubelet_and_its_directory_appear_later(
    idle_kubelet: Kubelet, start_agent: Start
) -> None:
    shutil.rmtree(idle_kubelet.directory)
    agent = await start_agent(table=Table(gadgets("a", "b")), other=Other(gadgets("c")))
    await until(lambda: "table" in agent.runners and agent.runners["table"].scan.completed.is_set())
    await idle_kubelet.start()
    await idle_kubelet.until(lambda resources: resources == {GADGET: (2, 2), OTHER: (1, 1)})
    await idle_kubelet.kill()


async def test_resources_are_registered_when_only_the_kubelets_socket_appears_later(
    directory: str, idle_kubelet: Kubelet, start_agent: Start
) -> None:
    os.makedirs(plugins_dir(directory))
    agent = await start_agent(table=Table(gadgets("a")))
    await until(lambda: os.path.exists(own_socket(directory)))
    await until(lambda: "waiting for" in server(agent).problem and "kubelet.sock" in server(agent).problem)
    await idle_kubelet.start()
    await idle_kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    assert server(agent).problem == ""
    await idle_kubelet.kill()


async def test_kubelet_restart_keeps_devices_and_new_pods_get_free_ones(kubelet: Kubelet, table: Agent) -> None:
    await kubelet.run_pod("before", {GADGET: 1})
    await kubelet.restart()
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    container = await kubelet.run_pod("after", {GADGET: 1})
    assert len(container.devices) == 1
    assert table.runners["table"].scan.count == 1, "a restart of the kubelet causes no scan"


async def test_repeated_kubelet_restarts_re_register_all_resources(kubelet: Kubelet, table: Agent) -> None:
    for _ in range(5):
        await kubelet.restart()
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    await until(lambda: server(table).stage == Stage.REGISTERED)  # the stream opens before the registration is answered


async def test_a_kubelet_restarted_after_a_kill_gets_the_devices_again(kubelet: Kubelet, table: Agent) -> None:
    await kubelet.kill()
    await until(lambda: "registration" in server(table).problem)
    await kubelet.start()
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})


async def test_a_new_kubelet_socket_causes_a_registration_even_if_sockets_remain(
    directory: str, start_agent: Start
) -> None:
    async with FakeKubelet(directory, watches=True) as first:
        agent = await start_agent(table=Table(gadgets("a")))
        await until(lambda: first.lists == [["a"]])
        os.unlink(first.path)
        second = FakeKubelet(directory, watches=True)
        # The old one is still running with an open stream: only the new socket indicates another kubelet.
        async with second:
            await until(lambda: second.lists == [["a"]])
            await registered(agent)
            assert second.registered == [GADGET]


async def test_a_stream_ended_by_the_kubelet_causes_a_new_registration(directory: str, start_agent: Start) -> None:
    async with FakeKubelet(directory, watches=True) as kubelet:
        await start_agent(table=Table(gadgets("a")))
        await until(lambda: kubelet.lists == [["a"]])
        kubelet.end_streams()
        await until(lambda: kubelet.lists == [["a"], ["a"]])
        assert kubelet.registered == [GADGET, GADGET]


async def test_a_kubelet_that_ends_every_stream_gets_registrations_with_backoff(
    directory: str, start_agent: Start
) -> None:
    async with FakeKubelet(directory, watches=True, cuts=True) as kubelet:
        await start_agent(table=Table(gadgets("a")))
        await until(lambda: len(kubelet.lists) >= 3)
        await asyncio.sleep(1)
        assert len(kubelet.registered) < 12
        kubelet.cuts = False
        lists = len(kubelet.lists)
        await until(lambda: len(kubelet.lists) > lists, 15)


async def test_a_kubelet_that_opens_no_stream_gets_another_registration(
    directory: str, start_agent: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration_state, "STREAM_DEADLINE", 0.5)
    async with FakeKubelet(directory) as kubelet:
        await start_agent(table=Table(gadgets("a")))
        await until(lambda: len(kubelet.registered) == 1)
        await until(lambda: len(kubelet.registered) == 2)


async def test_a_rejected_registration_is_logged_once_with_the_kubelets_message_and_retried(
    directory: str, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeKubelet(directory, refusal="the ResourceName is not to my taste", watches=True) as kubelet:
        agent = await start_agent(table=Table(gadgets("a")))
        await until(lambda: len(kubelet.registered) >= 3)
        assert server(agent).problem.startswith(f"registration at {kubelet.path} failed: UNKNOWN: the ResourceName")
        kubelet.refusal = ""
        await until(lambda: kubelet.lists == [["a"]])
    logged = [record for record in caplog.records if "not to my taste" in record.message]
    assert len(logged) == 1
    assert logged[0].levelno == logging.WARNING
    assert server(agent).counters.registration_failures["UNKNOWN"] >= 3
    assert server(agent).counters.registrations == 1


async def test_the_agent_waits_while_the_kubelet_path_is_not_a_kubelet(
    directory: str, idle_kubelet: Kubelet, start_agent: Start
) -> None:
    os.makedirs(plugins_dir(directory))
    kubelet_socket = Path(plugins_dir(directory), "kubelet.sock")
    kubelet_socket.write_text("not a socket")
    agent = await start_agent(table=Table(gadgets("a")))
    await until(lambda: os.path.exists(own_socket(directory)))
    await until(lambda: "kubelet.sock failed: UNAVAILABLE" in server(agent).problem)
    kubelet_socket.unlink()
    await idle_kubelet.start()
    await idle_kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    await idle_kubelet.kill()


# Several resources and plugins


async def test_resources_are_added_and_removed_with_devices(
    directory: str, kubelet: Kubelet, start_agent: Start
) -> None:
    plugin = Table([*gadgets("a"), Resource("widget")])
    agent = await start_agent(table=plugin)
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    assert os.path.exists(own_socket(directory, "example.com/widget")), "registered without devices"
    plugin.found = [Resource("widget")]
    agent.runners["table"].scan.request()
    await kubelet.until(lambda resources: resources == {})
    await until(lambda: not os.path.exists(own_socket(directory)))
    plugin.found = gadgets("b", "c")
    agent.runners["table"].scan.request()
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})


async def test_a_resource_that_changes_repeatedly_has_its_last_state(kubelet: Kubelet, start_agent: Start) -> None:
    plugin = Table()
    agent = await start_agent(table=plugin)
    await until(agent.runners["table"].scan.completed.is_set)
    runner = agent.runners["table"]
    for turn in range(10):
        plugin.found = gadgets("a", "b") if turn % 2 else []
        scans = runner.scan.count
        runner.scan.request()
        await until(lambda before=scans: runner.scan.count > before)
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})


async def test_one_resource_with_a_path_too_long_does_not_stop_the_others(
    directory: str, kubelet: Kubelet, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    class LongNamePlugin(Table):
        namespace = f"{'x' * 30}.example.com"

    devices = gadgets("a")
    long = [Resource("y" * 63), *devices]
    await start_agent(table=Table(devices), long=LongNamePlugin(long))
    await kubelet.until(lambda resources: GADGET in resources and f"{LongNamePlugin.namespace}/gadget" in resources)
    logged = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 1
    assert f"{plugins_dir(directory)}/{LongNamePlugin.namespace}-{'y' * 63}.sock: a socket path of" in logged[0]
    assert "at most 107" in logged[0]


@pytest.mark.parametrize(
    "fault", [ScanError("the bus is on fire"), ZeroDivisionError(), OSError(5, "Input/output error")], ids=str
)
async def test_a_plugin_whose_scan_raises_does_not_stop_the_others(
    kubelet: Kubelet, start_agent: Start, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    agent = await start_agent(table=Table(fault), other=Other(gadgets("b")))
    await kubelet.until(lambda resources: resources == {OTHER: (1, 1)})
    await until(lambda: agent.runners["table"].scan.failing)
    logged = [record for record in caplog.records if "scan failed" in record.message]
    assert len(logged) == 1
    assert "table: scan failed" in logged[0].message
    assert (str(fault) or type(fault).__name__) in logged[0].message


async def test_names_that_a_kubelet_rejects_are_omitted_with_a_warning(
    kubelet: Kubelet, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    odd = [Resource("-bad-"), *gadgets("a", "with\nnewline", "", "x" * 300)]
    await start_agent(table=Table(odd))
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    logged = [record.message for record in caplog.records if "not published" in record.message]
    assert len(logged) == 4
    assert all(record.levelno == logging.WARNING for record in caplog.records if "not published" in record.message)


# Shutdown


async def test_a_stopped_agent_leaves_no_socket_and_the_kubelet_no_usable_device(
    directory: str, kubelet: Kubelet
) -> None:
    settings = Settings(root=directory, kubelet_dir=directory, cdi_dir=f"{directory}/cdi")
    agent = Agent(settings, {"table": Table(gadgets("a"))})
    task = asyncio.create_task(agent.run())
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    agent.stop()
    await task
    assert {name for name in os.listdir(plugins_dir(directory)) if name.endswith(".sock")} == {"kubelet.sock"}
    await kubelet.until(lambda resources: resources == {GADGET: (1, 0)})


async def test_stopping_does_not_wait_for_clients_that_read_nothing(directory: str, kubelet: Kubelet) -> None:
    settings = Settings(root=directory, kubelet_dir=directory, cdi_dir=f"{directory}/cdi")
    agent = Agent(settings, {"table": Table(gadgets(*(f"gadget-with-a-long-name-{n}" for n in range(20_000))))})
    task = asyncio.create_task(agent.run())
    await kubelet.until(lambda resources: GADGET in resources)
    async with Peer(own_socket(directory)) as peer:
        call = peer.stream()
        await call.initial_metadata()
        agent.stop()
        async with asyncio.timeout(5):
            await task
        call.cancel()
