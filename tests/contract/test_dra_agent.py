"""The agent with DRA: slices, claims and owners, at the embedded kubelet and a double of the API server."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dranodes import GPU, I915, DraNode
from msgspec.structs import replace
from sliceservers import NODE, SliceServer
from waiting import until

from accelplane.cli.inspect import _report as inspect_report
from accelplane.cli.inspect import chosen_plugins
from accelplane.dra import catalog
from accelplane.kubelet.embedded import AdmissionError, Pod, PodStartError
from accelplane.node import status_socket
from accelplane.node.dra import driver as driver_module
from accelplane.node.dra import node as node_module
from accelplane.node.status import plugin_problems
from accelplane.pages.local_status import local_status
from accelplane.pages.metrics import MetricsPage
from accelplane.pages.observer import Observer
from accelplane.pages.server import status_report
from accelplane.report.inventory import NodeInventory

GPU_POD = Pod("plain", containers={"main": {I915: 1}})


@pytest.fixture
async def node(directory: str, tmp_path: Path) -> AsyncIterator[DraNode]:
    async with SliceServer() as server:
        node = DraNode(directory, tmp_path, server)
        async with node.kubelet:
            yield node


def files(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.startswith("k8s.")) if os.path.isdir(directory) else []


async def test_a_claim_gets_its_device_and_the_next_pod_gets_it_afterwards(node: DraNode) -> None:
    """Cases 1 to 3."""
    async with node.agent_running():
        first, second = await node.until_registered()
        assert I915 not in node.kubelet.resources()
        claim = node.allocate(first, "a")
        assert len(await node.run_pod("a", claim)) == 2
        assert node.claims() == {first: (f"default/{claim}",)}
        (file,) = files(node.settings.cdi_dir)
        document = json.loads(Path(node.settings.cdi_dir, file).read_text())
        nodes = {
            each["path"] for device in document["devices"] for each in device["containerEdits"].get("deviceNodes", ())
        }
        assert nodes == {"/dev/dri/card0", "/dev/dri/renderD128"}
        node.kubelet.delete_pod("a")
        await until(lambda: not node.claims())
        assert files(node.settings.cdi_dir) == []
        assert await node.run_pod("b", node.allocate(first, "b"))
        assert second in node.published()
    assert os.listdir(f"{node.directory}/plugins_registry") == []


async def test_pages_show_claims_as_holders_and_the_driver(node: DraNode) -> None:
    async with node.agent_running() as agent:
        first, _second = await node.until_registered()
        observer = Observer(agent)
        try:
            await observer.inventory()  # the holders that it reads can be used for 10 s
            await node.run_pod("a", node.allocate(first, "a"))
            inventory = msgspec.json.decode((await observer.inventory()).body, type=NodeInventory)
            page = MetricsPage().render(agent.status(), await observer.contents()).decode()
        finally:
            await observer.close()
        held = {unit.unit: [(each.pod, each.via) for each in unit.holders] for unit in inventory.units}
        assert held == {"card0": [("a", "dra")], "card1": []}
        assert [unit.ids for unit in inventory.units] == [{"gpu.intel.com": 1}] * 2
        (resource,) = inventory.plugins[0].resources
        assert (resource.name, resource.stage) == ("gpu.intel.com", "registered")
        assert (resource.ids, resource.healthy, resource.allocated) == (2, 2, 1)
        report = status_report(agent.status())["dra"]
        assert isinstance(report, dict)
        assert (report["gpu"]["stage"], report["gpu"]["prepare-failures"]) == ("registered", 0)
        for line in (
            'accelplane_dra_units{owner="dra",plugin="gpu"} 2.0',
            'accelplane_dra_registered{plugin="gpu"} 1.0',
            'accelplane_dra_published_units{plugin="gpu"} 2.0',
            'accelplane_dra_claims{plugin="gpu"} 1.0',
            'accelplane_dra_prepares_total{plugin="gpu",result="ok"} 1.0',
        ):
            assert line in page.splitlines()
        report = await inspect_report(
            node.settings, chosen_plugins(node.settings.root, "gpu", ""), "", only_names=False
        )
        assert [(unit.owner, unit.published) for unit in inventory.units] == [("dra", True)] * 2
        rows = {row.id: row.held_by for row in report.devices if row.resource == I915}
        assert rows == {"card0-0": ("default/a/main (DRA)",), "card1-0": ()}


async def test_a_device_that_only_its_claim_knows_is_shown_with_its_holder(node: DraNode) -> None:
    """A removed device has no ID of the device plugin any more, and neither has one that is bound to VFIO."""
    agent = node.make_agent()
    observer = Observer(agent)
    agent.services["status"] = partial(
        status_socket.serve, agent.settings, agent.program, partial(local_status, agent.status, observer)
    )
    node.make_agent = lambda: agent  # type: ignore[method-assign]
    async with node.agent_running():
        first, second = await node.until_registered()
        await node.run_pod("a", node.allocate(first, "a"))
        node.hardware.unplug(node.cards[0])
        await until(lambda: node.server.devices() == {first: f"{GPU}/gone=gone:NoExecute", second: ""})
        await until(lambda: os.path.isdir(status_socket.directory(node.settings)))
        page = MetricsPage().render(agent.status(), await observer.contents()).decode()
        inventory = msgspec.json.decode((await observer.inventory()).body, type=NodeInventory)
        chosen = chosen_plugins(node.settings.root, "gpu", "")
        rows = (await inspect_report(node.settings, chosen, "", only_names=False)).devices
        await until(lambda: next(iter(node.status.units.values())).taints == [f"{GPU}/gone=gone:NoExecute"])
    await observer.close()
    assert 'accelplane_dra_unhealthy_units{plugin="gpu",state="gone"} 1.0' in page.splitlines()
    assert [(each.unit, each.bdf, each.phase, each.reason, each.owner, each.published) for each in inventory.units] == [
        ("card1", "0000:02:00.0", "healthy", "", "dra", True),
        ("card0", "0000:01:00.0", "unhealthy", "gone", "dra", True),
    ]
    assert [[(each.pod, each.via) for each in unit.holders] for unit in inventory.units] == [[], [("a", "dra")]]
    assert [
        (each.resource, each.id, each.unit, each.health, each.owner, each.advertised, each.held_by) for each in rows
    ] == [
        (I915, "card1-0", "card1", "Healthy", "dra", True, ()),
        (GPU, first, "card0", "Unhealthy", "dra", True, ("default/a/main (DRA)",)),
    ]


async def test_inspect_shows_the_problems_of_the_driver(node: DraNode) -> None:
    node.server.refused.add("0000-02-00-0-0x56c0")
    async with node.agent_running() as agent:
        await node.until_registered(1)
        text = "gpu: device 0000-02-00-0-0x56c0 is not published: spec.devices[1].name: refused"
        await until(lambda: text in plugin_problems(agent.status()))


async def test_events_say_what_is_not_published_and_which_claim_is_not_prepared(node: DraNode) -> None:
    """Cases 18, 37 and 3.1 of the publication."""
    node.server.refused.add("0000-02-00-0-0x56c0")
    async with node.agent_running():
        (first,) = await node.until_registered(1)
        claim = node.allocate(first, "a")
        await node.run_pod("a", claim)
        with pytest.raises(PodStartError):
            await node.run_pod("b", node.allocate(first, "b", name="late"))
        await until(lambda: len(node.server.all("events")) == 3)
        text = f"device {first} is still held by claim default/{claim}, waiting for its pod to end"
        assert f"PrepareFailed: claim default/late: {text}" in node.status.events
    found = {each["reason"]: (each["regarding"]["name"], each["note"]) for each in node.server.all("events")}
    problem = "device 0000-02-00-0-0x56c0 is not published: spec.devices[1].name: refused"
    assert found == {
        "OwnersChanged": (NODE, "2 devices belong to DRA, 0 to the device plugin"),
        "DeviceNotPublished": (NODE, problem),
        "PrepareFailed": ("late", text),
    }


async def test_the_slice_has_the_node_as_owner_and_pool(node: DraNode) -> None:
    async with node.agent_running():
        await node.until_registered()
        (found,) = node.server.slices
        assert (found.spec.driver, found.spec.pool.name, found.spec.node_name) == (GPU, NODE, NODE)


async def test_claims_cause_no_publication_and_no_health_report(node: DraNode, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node.agent_running():
        first, _second = await node.until_registered()
        made = list[str]()

        def record(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments, **options: (made.append(name), make(*arguments, **options))[1]

        for name in ("pool", "health"):
            monkeypatch.setattr(catalog, name, record(name, getattr(catalog, name)))
        await node.run_pod("a", node.allocate(first, "a"))
        assert node.claims()
        node.kubelet.delete_pod("a")
        await until(lambda: not node.claims())
        assert made == []


async def test_a_label_says_that_slices_are_published_and_stays_over_a_restart(node: DraNode, tmp_path: Path) -> None:
    node.settings = replace(node.settings, nfd_dir=str(tmp_path))
    file = tmp_path / f"accelplane-dra-{GPU}.txt"
    async with node.agent_running():
        await node.until_registered()
        await until(file.exists)
        assert file.read_text() == f"{GPU}/dra=published\n"
    inode = file.stat().st_ino
    async with node.agent_running():
        await until(lambda: node.status.publishing)
        for card in node.cards:
            assert file.stat().st_ino == inode
            node.hardware.unplug(card)
        await until(lambda: not file.exists())


async def test_a_label_of_an_earlier_boot_is_removed_until_slices_are_published(node: DraNode, tmp_path: Path) -> None:
    node.settings = replace(node.settings, nfd_dir=str(tmp_path))
    file = tmp_path / f"accelplane-dra-{GPU}.txt"
    file.write_text(f"{GPU}/dra=published\n")
    os.utime(file, (1, 1))
    node.server.fault("GET /version", times=-1, status=500)
    async with node.agent_running():
        await until(lambda: not file.exists())


async def test_a_label_is_removed_with_a_disabled_plugin(node: DraNode, tmp_path: Path) -> None:
    node.settings = replace(node.settings, nfd_dir=str(tmp_path))
    file = tmp_path / f"accelplane-dra-{GPU}.txt"
    async with node.agent_running():
        await node.until_registered()
        await until(file.exists)
        node.plugins = {}
        node.config.write_text("none")
        await until(lambda: not file.exists())


async def test_slices_keep_their_uid_and_generation_over_a_restart(node: DraNode) -> None:
    """Case 10."""
    async with node.agent_running():
        await node.until_registered()
        before = node.server.all("resourceslices")
    async with node.agent_running():
        await until(lambda: node.status.publishing)
        await asyncio.sleep(0.1)
    after = node.server.all("resourceslices")
    assert [each["metadata"]["uid"] for each in after] == [each["metadata"]["uid"] for each in before]
    assert [each["spec"]["pool"] for each in after] == [each["spec"]["pool"] for each in before]


async def test_slices_return_after_a_restart_of_the_kubelet(node: DraNode) -> None:
    """Case 9."""
    async with node.agent_running():
        devices = await node.until_registered()
        claim = node.allocate(devices[0], "a", "b")
        ids = await node.run_pod("a", claim)
        await node.kubelet.restart()
        await node.until_connected()
        await node.until_published(*devices)
        assert await node.run_pod("b", claim) == ids  # case 7


async def test_a_claim_for_a_unit_of_the_device_plugin_is_refused(node: DraNode) -> None:
    """Case 51, R5."""
    async with node.agent_running():
        first, second = await node.until_registered()
        address = next(id_ for id_, unit in node.status.units.items() if first in unit.devices)
        node.switch(f"gpu=dra,{address}=plugin")
        await node.until_published(second)
        await node.kubelet.until(lambda kubelet: I915 in kubelet.resources())
        with pytest.raises(PodStartError, match="plugin"):
            await node.run_pod("a", node.allocate(first, "a"))
        assert await node.run_pod("b", node.allocate(second, "b"))


async def test_no_unit_is_offered_by_both_while_the_api_changes(node: DraNode) -> None:
    """Case 49, looked at from outside: the kubelet's healthy IDs and the slices of the API server."""
    overlaps: list[object] = []
    async with node.agent_running():
        devices = await node.until_registered()
        claim = node.allocate(devices[0], "a")
        await node.run_pod("a", claim)
        ids = dict(zip(devices, ("card0-0", "card1-0"), strict=True))

        def check() -> None:
            status = node.kubelet.resources().get(I915)
            healthy = {id_ for id_, device in status.devices.items() if device.healthy} if status is not None else set()
            if any(ids[name] in healthy for name in node.published()):
                overlaps.append((node.published(), healthy))

        async def watch() -> None:
            while True:
                check()
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        node.switch("gpu=plugin")
        await node.kubelet.until(lambda kubelet: I915 in kubelet.resources())
        assert (await node.kubelet.run_pod(GPU_POD)).containers["main"].device_ids
        with pytest.raises(AdmissionError):
            await node.kubelet.run_pod(Pod("third", containers={"main": {I915: 1}}))
        node.kubelet.delete_pod("a")
        await node.kubelet.until(lambda kubelet: kubelet.resources()[I915].allocatable == 2)
        node.switch("gpu=dra")
        await until(lambda: len(node.published()) == 1)
        node.kubelet.delete_pod("plain")
        await node.until_published(*devices)
        watcher.cancel()
    assert overlaps == []


async def test_the_end_of_the_api_server_stops_nothing_on_the_node(node: DraNode) -> None:
    """Case 55."""
    async with node.agent_running():
        devices = await node.until_registered()
        claim = node.allocate(devices[0], "a", "b")
        ids = await node.run_pod("a", claim)
        fault = node.server.fault("", 503, times=-1)
        assert await node.run_pod("b", claim) == ids
        node.hardware.unplug(node.cards[1])
        await until(lambda: len(node.status.units) == 1)
        assert node.published() == devices
        node.server.faults.remove(fault)
        await node.until_published(devices[0])


async def test_a_restart_with_another_configuration_keeps_prepared_claims(node: DraNode) -> None:
    async with node.agent_running():
        first, second = await node.until_registered()
        await node.run_pod("a", node.allocate(first, "a"))
    node.settings = replace(node.settings, dra_api="")
    async with node.agent_running():
        await node.kubelet.until(lambda kubelet: I915 in kubelet.resources())
        owners = {unit.devices[0]: unit.owner for unit in node.status.units.values()}
        assert owners == {first: "none", second: "plugin"}
        node.kubelet.delete_pod("a")
        await node.kubelet.until(lambda kubelet: kubelet.resources()[I915].allocatable == 2)
        await until(lambda: not node.agent.status().dra)


async def test_a_journal_that_cannot_be_used_is_reported_once_and_tried_again(
    node: DraNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_module, "_RESTART_DELAY", 0.02)
    journal = Path(node.directory, "plugins", GPU, "claims")
    journal.parent.mkdir(parents=True)
    journal.touch()
    async with node.agent_running():
        await until(lambda: any(f"{journal.parent}: File exists" in problem for problem in node.status.problems))
        await asyncio.sleep(0.1)
        assert len([record for record in caplog.records if "File exists" in record.getMessage()]) == 1
        journal.unlink()
        await node.until_registered()
        assert node.status.problems == ()


async def test_cdi_files_of_claims_that_are_removed_are_written_again(
    node: DraNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "_CDI_DELAY", 0.0)
    async with node.agent_running():
        first, _second = await node.until_registered()
        await node.run_pod("a", node.allocate(first, "a"))
        (file,) = Path(node.settings.cdi_dir).glob("k8s.*-claim_*.json")
        before = file.read_bytes()
        file.unlink()
        await until(file.exists)
        assert file.read_bytes() == before
        node.kubelet.delete_pod("a")
        await until(lambda: not node.claims())
        assert not file.exists()
