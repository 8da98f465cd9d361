"""Units change their owner between the device plugin and DRA, and never have two. The DRA driver is a stand-in."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gadgets import GADGET, Table, WithHealth, gadget, gadgets
from kubelets import Kubelet, PodRejected, embedded_only
from msgspec.structs import replace
from ownernodes import ACCESS, GpuTable, Node, StandIn
from waiting import until

from accelplane.devices import Verdict
from accelplane.dra.ownership import OwnershipRecord
from accelplane.kubelet.podresources import PodResources
from accelplane.node.agent import Agent
from accelplane.node.allocations import AllocationReader, Reading
from accelplane.node.dra import node as node_module
from accelplane.node.dra.other_plugin import OtherPlugin

pytestmark = embedded_only("the driver is a stand-in")


@pytest.fixture
def node(kubelet: Kubelet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(kubelet, tmp_path, Table(gadgets("a", "b")), "dra")
    monkeypatch.setattr(node_module, "Driver", StandIn)
    monkeypatch.setattr(node_module, "EventWriter", lambda _api, _node: node)
    return node


async def test_units_of_dra_are_in_no_list_of_the_kubelet(node: Node) -> None:
    async with node.running():
        await node.owned(a="dra", b="dra")
        assert node.recorded() == {"a", "b"}
        assert node.kubelet.resources() == {}
        assert [device.id for device in node.agent.status().plugins["table"].unlisted] == ["a", "b"]


async def test_ids_that_stand_for_several_devices_stay_with_the_device_plugin(node: Node) -> None:
    node.plugin.found = [*gadgets("a"), gadget("all", resource="monitoring", path=None)]  # type: ignore[attr-defined]
    async with node.running():
        await node.owned(a="dra")
        await node.kubelet.until(lambda resources: resources == {"example.com/monitoring": (1, 1)})


async def test_a_family_may_be_split(node: Node) -> None:
    node.plugin.found = [gadget("a"), gadget("b", attributes={"bdf": "0000:03:00.0"})]  # type: ignore[attr-defined]
    node.settings = replace(node.settings, dra_api="0000:03:00.0=dra")
    async with node.running():
        await until(lambda: {each.owner for each in node.offers().values()} == {"plugin", "dra"})
        await node.kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
        assert node.offers()["a"].owner == "plugin"


async def test_units_have_the_facts_of_their_family(node: Node, tmp_path: Path) -> None:
    memory = tmp_path / "sys/bus/pci/devices/0000:03:00.0/tile0/physical_vram_size_bytes"
    memory.parent.mkdir(parents=True)
    memory.write_text("0x400000000\n")
    node.plugin = GpuTable([gadget("a", attributes={"bdf": "0000:03:00.0"})])
    async with node.running():
        await until(lambda: [each.unit.capacities for each in node.offers().values()] == [{"memory": 1 << 34}])


async def test_no_api_offers_units_of_none(node: Node) -> None:
    node.settings = replace(node.settings, dra_api="none")
    async with node.running():
        await node.owned(a="none", b="none")
        assert node.kubelet.resources() == {}
        assert node.recorded() == frozenset()


async def test_a_unit_changes_to_dra_when_its_pod_has_ended(node: Node) -> None:
    """Case 49: free units at once, others after their pods."""
    node.settings = replace(node.settings, dra_api="")
    async with node.running():
        await node.kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
        (held,) = (await node.kubelet.run_pod("pod", {GADGET: 1})).device_ids[GADGET]
        free = "b" if held == "a" else "a"
        node.switch("dra")
        await node.owned(**{held: "none", free: "dra"})
        await node.kubelet.until(lambda resources: resources == {GADGET: (1, 0)})
        assert node.offers()[held].containers == ["default/pod/main"]
        await node.kubelet.delete_pod("pod")
        await node.owned(a="dra", b="dra")
        await node.kubelet.until(lambda resources: resources == {})


async def test_a_unit_changes_back_when_no_claim_holds_it_and_no_slice_names_it(node: Node) -> None:
    async with node.running():
        await node.owned(a="dra", b="dra")
        await until(lambda: isinstance(node.units.driver, StandIn))
        driver = node.driver
        assert driver.published() == {"a", "b"}
        driver.claims, driver.writes = {"a": ["ns/claim"]}, False
        node.switch("")
        await node.owned(a="none", b="none")
        driver.writes = True
        node.agent.changes.notify_all()
        await node.owned(a="none", b="plugin")
        await node.kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
        assert node.recorded() == {"a"}
        driver.claims = {}
        node.agent.changes.notify_all()
        await node.kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
        await until(lambda: not node.agent.status().dra)  # nothing of DRA is left
        assert not Path(node.settings.ownership_dir, "table.json").exists()


async def test_a_claim_of_an_instance_that_has_just_ended_delays_the_change_back(node: Node) -> None:
    async with node.running():
        await node.owned(a="dra", b="dra")
        await until(lambda: isinstance(node.units.driver, StandIn))
        node.driver.claims_of_others = {"a"}
        node.switch("")
        await node.owned(a="none", b="plugin")
        assert node.recorded() == {"a"}


async def test_a_claim_that_another_instance_unprepares_does_not_delay_the_change_back(node: Node) -> None:
    async with node.running():
        await node.owned(a="dra", b="dra")
        await until(lambda: isinstance(node.units.driver, StandIn))
        node.driver.claims = {"a": ["ns/claim"]}
        node.switch("")
        await node.owned(a="none", b="plugin")
        node.driver.others_unprepare = True
        await node.kubelet.until(lambda resources: resources == {GADGET: (2, 2)})


@pytest.mark.parametrize(("owner", "method"), [(OtherPlugin, "check"), (OwnershipRecord, "change")])
async def test_a_container_of_a_plugin_that_has_just_ended_delays_the_change(
    node: Node, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """The container appears when the last of the other checks is over."""
    read, checked, holders = AllocationReader.read, getattr(owner, method), dict[tuple[str, str], list[str]]()

    async def reading(self: AllocationReader, since: float, *, ask_kubelet: bool = True) -> Reading:
        found = await read(self, since, ask_kubelet=ask_kubelet)
        return replace(found, held={**found.held, **dict.fromkeys(holders, ())}, holders=holders)

    def check(*arguments: Any, **options: Any) -> Any:
        holders[GADGET, "a"] = ["ns/pod/main"]
        return checked(*arguments, **options)

    monkeypatch.setattr(AllocationReader, "read", reading)
    monkeypatch.setattr(owner, method, check)
    async with node.running():
        await node.owned(a="none", b="dra")


async def test_a_call_in_progress_delays_the_change_back(node: Node) -> None:
    async with node.running():
        await node.owned(a="dra", b="dra")
        await until(lambda: isinstance(node.units.driver, StandIn))
        driver = node.driver
        driver.busy.clear()
        node.switch("")
        await node.owned(a="none", b="none")
        await asyncio.sleep(0.05)
        driver.claims = {"a": ["ns/claim"]}  # the call has recorded its claim
        driver.busy.set()
        node.agent.changes.notify_all()
        await node.owned(a="none", b="plugin")


async def test_a_change_that_is_reverted_takes_effect_at_once(node: Node) -> None:
    async with node.running():
        await node.owned(a="dra", b="dra")
        await until(lambda: isinstance(node.units.driver, StandIn))
        node.driver.claims = {"a": ["ns/claim"], "b": ["ns/claim"]}
        node.switch("")
        await node.owned(a="none", b="none")
        node.switch("dra")
        await node.owned(a="dra", b="dra")


async def test_the_record_counts_after_a_restart_with_another_configuration(node: Node) -> None:
    """R6: units that belong to DRA stay withheld until it is known that they are free."""
    async with node.running():
        await node.owned(a="dra", b="dra")
    node.settings = replace(node.settings, dra_api="")
    StandIn.published, published = (lambda _self: None), StandIn.published  # type: ignore[method-assign]
    try:
        async with node.running():
            await node.owned(a="none", b="none")
            assert node.kubelet.resources() == {}
            StandIn.published = published  # type: ignore[method-assign]
            node.agent.changes.notify_all()
            await node.kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    finally:
        StandIn.published = published  # type: ignore[method-assign]


async def test_recorded_units_are_offered_at_once_after_a_restart(node: Node) -> None:
    async with node.running():
        await node.owned(a="dra", b="dra")
    await node.kubelet.kill()
    async with node.running():
        await node.owned(a="dra", b="dra")  # also without a kubelet
    await node.kubelet.start()


async def test_a_pod_of_an_agent_without_dra_keeps_its_unit(node: Node) -> None:
    """An older version does not know the record."""
    async with node.running():
        await node.owned(a="dra", b="dra")
    dra_api, node.settings = node.settings, replace(node.settings, dra_api="")
    record = Path(node.settings.ownership_dir, "table.json")
    content = record.read_bytes()
    record.unlink()
    async with node.running():
        await node.kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
        (held,) = (await node.kubelet.run_pod("pod", {GADGET: 1})).device_ids[GADGET]
    record.write_bytes(content)
    node.settings = dra_api
    async with node.running():
        await until(lambda: len(node.offers()) == 2 and node.offers()[held].owner == "none")
        await until(lambda: {each.owner for each in node.offers().values()} == {"none", "dra"})
        await node.kubelet.delete_pod("pod")
        await node.owned(a="dra", b="dra")


async def test_allocate_refuses_a_part_of_a_function_that_a_claim_holds(node: Node) -> None:
    bdf = "0000:03:00.0"
    node.plugin.found = [gadget(key, attributes={"bdf": bdf}, part=key) for key in "ab"]  # type: ignore[attr-defined]
    node.settings = replace(node.settings, dra_api="table=plugin,0000:ff:00.0=dra")
    async with node.running():
        await node.kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
        stand_in = StandIn("example.com", node.units)
        stand_in.claims = {bdf: ["ns/claim"]}
        node.units.driver = stand_in
        with pytest.raises(PodRejected, match=r"device [ab] is held by the resource claim ns/claim"):
            await node.kubelet.run_pod("pod", {GADGET: 1})


async def test_allocate_refuses_a_unit_that_a_claim_holds(node: Node) -> None:
    """R5: the last check, whatever the accounts say."""
    node.settings = replace(node.settings, dra_api="table=plugin,0000:ff:00.0=dra")
    async with node.running():
        await node.owned(a="plugin", b="plugin")
        await node.kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
        stand_in = StandIn("example.com", node.units)
        stand_in.claims = {"a": ["ns/claim"], "b": ["ns/claim"]}
        node.units.driver = stand_in
        with pytest.raises(PodRejected, match=r"device [ab] is held by the resource claim ns/claim"):
            await node.kubelet.run_pod("pod", {GADGET: 1})


async def test_health_is_the_state_of_a_unit(node: Node) -> None:
    plugin = WithHealth(gadgets("a", "b"))
    plugin.verdicts = {
        "a": Verdict("bad", "87 degrees", "temperature"),
        "b": Verdict("good", "60 degrees", "temperature"),
    }
    node.plugin = plugin
    async with node.running():
        await node.owned(a="dra", b="dra")
        await until(lambda: node.offers()["a"].state == "unhealthy")
        assert (node.offers()["a"].reason, node.offers()["a"].text) == ("temperature", "87 degrees")
        await until(lambda: (node.offers()["b"].state, node.offers()["b"].text) == ("degraded", "60 degrees"))
        plugin.verdicts = {"a": Verdict("good"), "b": Verdict("good")}
        node.agent.runners["table"].health.request()
        await until(lambda: node.offers()["a"].state == "recovering")
        await until(lambda: node.offers()["a"].state == "healthy")


async def test_a_unit_that_is_gone_stays_while_a_claim_holds_it(node: Node) -> None:
    async with node.running():
        await node.owned(a="dra", b="dra")
        await until(lambda: isinstance(node.units.driver, StandIn))
        node.driver.claims = {"a": ["ns/claim"]}
        node.plugin.found = []  # type: ignore[attr-defined]
        node.agent.runners["table"].scan.request()
        await until(lambda: {id_: offer.state for id_, offer in node.offers().items()} == {"a": "gone"})
        node.driver.claims = {}
        node.agent.changes.notify_all()
        await until(lambda: not node.offers())


async def test_a_unit_that_a_claim_has_bound_to_vfio_is_gone_when_its_function_is(node: Node, tmp_path: Path) -> None:
    address = "0000:03:00.0"
    function = tmp_path / "sys/bus/pci/devices" / address
    function.mkdir(parents=True)
    node.plugin.found = [gadget("a", attributes={"bdf": address})]  # type: ignore[attr-defined]
    async with node.running():
        await until(lambda: [offer.owner for offer in node.offers().values()] == ["dra"])
        await until(lambda: isinstance(node.units.driver, StandIn))
        node.driver.bound_units = {address: node.offers()[address].unit}
        node.driver.claims = {address: ["ns/claim"]}
        node.plugin.found = []  # type: ignore[attr-defined]
        node.agent.runners["table"].scan.request()
        await until(lambda: node.agent.runners["table"].context.devices.found.resources == {})
        assert node.offers()[address].state == "healthy"
        function.rmdir()
        node.agent.runners["table"].scan.request()
        await until(lambda: node.offers()[address].state == "gone")


async def test_a_damaged_record_is_set_aside_and_written_anew(node: Node) -> None:
    record = Path(node.settings.ownership_dir, "table.json")
    record.parent.mkdir(parents=True)
    record.write_text("{")
    async with node.running():
        await node.owned(a="dra", b="dra")
        assert json.loads(record.read_text())["dra"] == ["a", "b"]


async def test_two_agents_with_one_configuration_offer_the_same_units(node: Node) -> None:
    """During a rolling update."""
    async with node.running():
        await node.owned(a="dra", b="dra")
        later = Agent(node.settings, {"table": Table(gadgets("a", "b"))}, dra=lambda: ACCESS)
        task = asyncio.create_task(later.run())
        earlier, node.agent = node.agent, later
        await node.owned(a="dra", b="dra")
        later.stop()
        await task
        node.agent = earlier


async def test_an_agent_with_another_configuration_waits_for_the_end_of_the_earlier_one(node: Node) -> None:
    """R7."""
    async with node.running():
        await node.owned(a="dra", b="dra")
        settings = replace(node.settings, dra_api="")
        later = Agent(settings, {"table": Table(gadgets("a", "b"))}, dra=lambda: ACCESS)
        task = asyncio.create_task(later.run())
        earlier, node.agent = node.agent, later
        await node.owned(a="none", b="none")
        await until(lambda: node.units.problem == "another agent on this node hands out units of this family")
        assert node.events[-1] == f"example.com: OtherAgent: {node.units.problem}"
        node.agent = earlier
    await node.kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    later.stop()
    await task


async def test_kubelet_is_asked_for_other_plugins_at_intervals_not_after_each_change(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelplane.node.dra.other_plugin._INTERVAL", 3600.0)
    async with node.running():
        await node.owned(a="dra", b="dra")
        assert await node.units.reconcile()

        def fail(_plugins: PodResources) -> None:
            raise AssertionError

        monkeypatch.setattr(PodResources, "allocatable", fail)
        node.units.other_plugin.directory_changed()
        assert await node.units.reconcile()


async def test_another_device_plugin_with_the_resource_keeps_dra_from_its_units(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 52, R8: a drop-in plugin that runs beside the agent."""
    monkeypatch.setattr("accelplane.node.dra.other_plugin._CONFIRM_TIME", 0.1)
    monkeypatch.setattr("accelplane.node.dra.other_plugin._INTERVAL", 0.1)
    monkeypatch.setattr("accelplane.node.dra.other_plugin._RECHECK", 0.1)
    dropin = Agent(replace(node.settings, dra_api=""), {"table": Table(gadgets("a", "b"))}, program="dropin")
    task = asyncio.create_task(dropin.run())
    await node.kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    async with node.running():
        await node.owned(a="none", b="none")
        await until(lambda: "another device plugin serves example.com/gadget" in node.units.other_plugin.problem)
        assert node.events == [f"example.com: OtherDevicePlugin: {node.units.other_plugin.problem}"]
        dropin.stop()
        await task
        await node.owned(a="dra", b="dra")
        assert node.units.other_plugin.problem == ""
