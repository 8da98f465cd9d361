"""The ways in which a device fails, as `inspect`, `top`, the metrics page, the fleet page and its list tell of them.

`kubectl accelplane inspect --fleet` shows the list of the fleet's server.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from agentstatuses import serving_status
from blockedfiles import BlockedFiles, blocked_files
from conftest import Start
from fleetagents import AgentDouble
from fleetagents import node as node_object
from kubeapi import KubeApi
from kubelets import Embedded
from processes import run_command
from runningfleets import connected, fleet_of
from textformat import parse
from waiting import until

from accelplane.fleet.devicelist import device_list
from accelplane.fleet.fleet import Fleet
from accelplane.fleet.web.html import element, render
from accelplane.fleet.web.page import Context
from accelplane.fleet.web.query import Query
from accelplane.fleet.web.screens import SCREENS
from accelplane.fleet.web.summaries import Summaries
from accelplane.host.uevent import Uevent
from accelplane.node.agent import Agent
from accelplane.pages.metrics import MetricsPage
from accelplane.pages.observer import Observer
from accelplane.plugins.gpu import GpuPlugin
from accelplane.simulate import GpuSpec, NodeSpec, SimulatedNode

pytestmark = pytest.mark.memory

XE = "gpu.intel.com/xe"
ADDRESS = "0000:03:00.0"


class World(NamedTuple):
    node: SimulatedNode
    agent: Agent
    kubelet: Embedded
    blocked: BlockedFiles


async def report_critical(world: World) -> None:
    path = Path(world.node.root, "sys/class/drm/card0/device/gpu_health")
    path.write_text("critical\n")
    world.agent.runners["gpu"].request_check()


async def declare_wedged(world: World) -> None:
    path = f"/devices/pci0000:00/{ADDRESS}"
    world.agent.events.record(Uevent("change", f"{path}/drm/card0", "drm", {"WEDGED": "rebind,bus-reset"}))


async def unplug(world: World) -> None:
    world.node.unplug("card0")
    world.agent.runners["gpu"].scan.request()


async def block_reads(world: World) -> None:
    world.blocked.block("card0/device/vendor")
    world.agent.runners["gpu"].scan.request()


async def end_kubelet(world: World) -> None:
    await world.kubelet.kill()


class Answers(NamedTuple):
    """What each place says about the card: whether it is healthy, and whether the kubelet has its resource."""

    inspect: tuple[bool, bool]
    top: bool
    metrics: tuple[bool, bool]
    fleet_list: tuple[bool, bool]
    fleet_page: tuple[bool, bool]


async def ask(agent: Agent, observer: Observer, fleet: Fleet, *place: str) -> Answers:
    place = (*place, "-o", "json", "--plugins", "gpu")
    inspected = await asyncio.to_thread(run_command, "accelplane", "inspect", *place)
    (row,) = [each for each in json.loads(inspected.stdout)["devices"] if each["resource"] == XE]
    topped = await asyncio.to_thread(run_command, "accelplane", "top", "--once", *place)
    (device,) = json.loads(topped.stdout)["devices"]
    samples = parse(MetricsPage().render(agent.status(), await observer.contents()))
    healthy = sum(
        each.value
        for each in samples["accelplane_devices"].samples
        if each.labels == {"resource": XE, "health": "Healthy"}
    )
    served = sum(each.value for each in samples["accelplane_registered"].samples if each.labels["resource"] == XE)
    cluster = fleet.cluster()
    (item,) = device_list(cluster, lambda _namespace: True).devices
    (resource,) = [each for each in cluster.nodes["n1"].resources if each.name == XE]
    context = Context(
        cluster=cluster, summaries=Summaries().of(cluster), visible=lambda _: True, now=1.0, use=fleet.use
    )
    nodes, node = (
        render(element("div", *SCREENS[name].make(context, query).content))
        for name, query in (("nodes", Query()), ("node", Query(node="n1")))
    )
    return Answers(
        (row["health"] == "Healthy", row["advertised"]),
        device["state"] == "healthy",
        (healthy == 1, served == 1),
        (item.state == "healthy", resource.stage == "registered"),
        ("gpu card0: healthy" in nodes, "registered" in node),
    )


@pytest.mark.parametrize("fail", [report_critical, declare_wedged, block_reads, unplug, end_kubelet])
async def test_all_places_agree_about_a_device_that_fails(  # noqa: PLR0917 - fixtures
    fail: Callable[[World], Awaitable[None]],
    api: KubeApi,
    tmp_path: Path,
    directory: str,
    start_agent: Start,
    unused_tcp_port: int,
) -> None:
    node = SimulatedNode(tmp_path)
    node.build(NodeSpec(gpus=[GpuSpec(driver="xe", bdf=ADDRESS)]))
    Path(node.root, "sys/class/drm/card0/device/gpu_health").write_text("ok\n")
    kubelet = Embedded(directory)
    await kubelet.start()
    agent = await start_agent({"health_interval": 1.0}, gpu=GpuPlugin())
    await kubelet.until(lambda resources: resources.get(XE) == (1, 1), 30)
    await kubelet.run_pod("train", {XE: 1})
    double = AgentDouble("n1")
    double.port = unused_tcp_port
    api.put("nodes", node_object("n1"))
    api.put("pods", double.pod())
    place = ("--root", str(tmp_path), "--kubelet-dir", directory)
    with blocked_files() as blocked:
        async with serving_status(agent, unused_tcp_port) as observer, fleet_of(api) as fleet:
            await connected(fleet, "n1")
            before = await ask(agent, observer, fleet, *place)
            assert before == Answers((True, True), True, (True, True), (True, True), (True, True))
            await fail(World(node, agent, kubelet, blocked))
            is_healthy, is_listed = fail is end_kubelet, fail is not end_kubelet
            answers = (is_healthy, is_listed)
            expected = Answers(answers, is_healthy, answers, answers, answers)

            async def agree() -> bool:
                return await ask(agent, observer, fleet, *place) == expected

            try:
                await until(agree, 60)
            except TimeoutError:
                assert await ask(agent, observer, fleet, *place) == expected
        for suffix in list(blocked._released):
            blocked.release(suffix)
    if is_listed:
        await kubelet.kill()


async def test_without_an_agent_health_is_unknown_and_the_exit_code_says_so(tmp_path: Path, directory: str) -> None:
    SimulatedNode(tmp_path).build(NodeSpec(gpus=[GpuSpec(driver="xe", bdf=ADDRESS)]))
    place = ("-root", str(tmp_path), f"-kubelet-dir={directory}", "-plugins", "gpu")
    for command in (("inspect",), ("top", "-once")):
        answer = await asyncio.to_thread(run_command, "accelplane", *command, *place, "-o", "json")
        report = json.loads(answer.stdout)
        row = report["devices"][0]
        assert (answer.returncode, row.get("health"), row.get("state")) == (1, None, None)
        assert any(each.startswith("gpu: no agent answers at ") for each in report["problems"])
        table = await asyncio.to_thread(run_command, "accelplane", *command, *place)
        assert "Healthy" not in table.stdout
        assert "healthy" not in table.stdout
    assert (row := json.loads(await inspect_json(*place))["devices"][0])["held_by"] is None, row


async def inspect_json(*place: str) -> str:
    return (await asyncio.to_thread(run_command, "accelplane", "inspect", *place, "-o", "json")).stdout


async def test_only_root_can_reach_the_socket_and_it_is_removed_at_the_end(
    directory: str, tmp_path: Path, start_agent: Start
) -> None:
    os.makedirs(f"{directory}/device-plugins")
    agent = await start_agent(gpu=GpuPlugin())
    place = Path(directory, "device-plugins/accelplane")
    async with serving_status(agent):
        (path,) = place.iterdir()
        assert (place.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert list(place.iterdir()) == []
