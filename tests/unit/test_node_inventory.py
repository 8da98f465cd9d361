"""The document of `/api/v1/inventory`, as `accelplane fleet` decodes it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from accelplane.devices import CdiDevice, Device, Phase, Skipped
from accelplane.fleet.web.summaries import held_share
from accelplane.kubelet.podresources import ClaimHolder, DeviceHolder
from accelplane.kubelet.server import Stage
from accelplane.node.advertised import DEPARTED
from accelplane.node.health_history import HealthChange
from accelplane.node.status import (
    DraStatus,
    DraUnit,
    NodeStatus,
    PluginStatus,
    ResourceStatus,
    ScanStatus,
    UnitHealth,
)
from accelplane.pages.holders import Holders
from accelplane.pages.inventory import (
    Facts,
    document,
    inventory_plugins,
    state_of,
)
from accelplane.readings import DevicePlan
from accelplane.report.decoding import decode_inventory
from accelplane.report.inventory import AdvertisedResource, HoldersSource, NodeInventory
from accelplane.report.inventory import Holder as ReportedHolder
from accelplane.report.limits import MAX_BYTES, VERSION

IDENTITY = NodeInventory(VERSION, "n", "a", {"accelplane": "1"}, "1.2", holders=HoldersSource("none"))


def facts(
    *devices: Device,
    health: dict[str, UnitHealth] | None = None,
    holders: Holders | None = None,
    skipped: tuple[Skipped, ...] = (),
    problem: str = "",
) -> Facts:
    resources: dict[str, dict[str, Device]] = {}
    for device in devices:
        resources.setdefault(device.resource, {})[device.id] = device
    plugin = PluginStatus(
        name="p",
        namespace="x.example.com",
        scan=ScanStatus(completed=True),
        resources={
            name: ResourceStatus(name=f"x.example.com/{name}", stage=Stage.SERVING, problem=problem, devices=found)
            for name, found in resources.items()
        },
        health=health or {},
        skipped=skipped,
    )
    status = NodeStatus(version="1", root="/", kubelet_dir="/k", plugins={"p": plugin})
    return Facts(status=status, holders=holders or Holders())


def build_inventory(found: Facts) -> bytes:
    return document(inventory_plugins(found), IDENTITY)


@pytest.mark.parametrize(
    ("device", "health", "expected"),
    [
        (Device(resource="r", id="a"), None, ("healthy", True, "", "")),
        (Device(resource="r", id="a", health="Unhealthy", reason=DEPARTED), None,
         ("unhealthy", True, "gone", DEPARTED)),
        (Device(resource="r", id="a", health="Unhealthy", reason="scan fails: x"), None,
         ("unhealthy", True, "scan", "scan fails: x")),
        (Device(resource="r", id="a", health="Unhealthy", reason="disabled"), None,
         ("unhealthy", True, "other", "disabled")),
        (Device(resource="r", id="a"), UnitHealth(phase=Phase.SUSPECT, cause="memory", reason="slow"),
         ("suspect", True, "memory", "slow")),
        (Device(resource="r", id="a"), UnitHealth(phase=Phase.HEALTHY, unknown="no answer"),
         ("healthy", False, "", "no answer")),
        (Device(resource="r", id="a"), UnitHealth(phase=Phase.HEALTHY, warning="warm", warning_cause="temperature"),
         ("healthy", True, "temperature", "warm")),
        (Device(resource="r", id="a", health="Unhealthy", reason="disabled"),
         UnitHealth(phase=Phase.HEALTHY, warning="warm", warning_cause="temperature"),
         ("unhealthy", True, "other", "disabled")),
        (Device(resource="r", id="a", health="Unhealthy", reason=DEPARTED), UnitHealth(phase=Phase.HEALTHY),
         ("unhealthy", True, "gone", DEPARTED)),
    ],
)  # fmt: skip
def test_the_phase_of_a_unit_is_that_of_its_health_source_or_of_its_devices(
    device: Device, health: UnitHealth | None, expected: tuple[str, bool, str, str]
) -> None:
    [unit] = decode_inventory(build_inventory(facts(device, health={"a": health} if health else {}))).units
    assert (unit.phase, unit.known, unit.reason, unit.text) == expected


def test_a_plugin_is_omitted_until_its_first_scan_is_complete() -> None:
    found = facts(Device(resource="r", id="a"))
    starting = replace(found.status.plugins["p"], scan=ScanStatus())
    found = replace(found, status=replace(found.status, plugins={"p": starting}))
    assert decode_inventory(build_inventory(found)).plugins == ()


def test_a_unit_has_the_holders_of_claims_with_their_driver() -> None:
    claim = ClaimHolder("n", "p", "c", "dra.example.com", "pool", "a", ("example.com/r=a", "example.com/r=other"))
    found = facts(
        Device(resource="r", id="a-0", unit="a", cdi=CdiDevice(kind="example.com/r", name="a")),
        Device(resource="r", id="a-1", unit="a", cdi=CdiDevice(kind="example.com/r", name="a")),
        holders=Holders([], "podresources", claims=[claim], since={("n", "p", "c", "dra.example.com"): 5.0}),
    )
    content = build_inventory(found)
    [unit] = decode_inventory(content).units
    assert unit.holders == (ReportedHolder("n", "p", "c", "dra.example.com", 1, 5.0, "dra"),)
    assert held_share(unit) == 1.0
    (resource,) = decode_inventory(content).plugins[0].resources
    assert (resource.ids, resource.allocated) == (2, 0)


def test_units_for_claims_are_counted_under_the_driver() -> None:
    def unit(name: str, **changes: Any) -> DraUnit:
        return DraUnit(**{"unit": name, "owner": "dra", "published": True} | changes)

    units = {
        "a": unit("a", shares=3, held=2, devices=("a",), claims=("n/one", "n/two")),
        "b": unit("b", state="unhealthy", published=False),
        "c": unit("c", owner="none", published=False, held=1),
        "d": unit("d", owner="plugin", published=False),
    }
    found = facts(*(Device(resource="r", id=name, unit=name) for name in units))
    dra = DraStatus(driver="x.example.com", stage="serving", problems=("not registered",), units=units)
    decoded = decode_inventory(build_inventory(replace(found, status=replace(found.status, dra={"p": dra}))))
    driver, resource = decoded.plugins[0].resources
    assert driver == AdvertisedResource("x.example.com", "serving", "not registered", ids=5, healthy=3, allocated=3)
    assert (resource.name, resource.ids) == ("x.example.com/r", 4)
    assert [each.ids.get("x.example.com") for each in decoded.units] == [3, 1, 1, None]


def test_units_that_only_dra_knows_are_listed_while_a_claim_has_them() -> None:
    units = {
        "0000:03:00.0": DraUnit(unit="vfio", owner="dra", published=True, claims=("n/one",)),
        "0000:04:00.0": DraUnit(unit="removed", owner="dra", state="gone", text="was removed", claims=("n/two",)),
        "0000:05:00.0": DraUnit(unit="unclaimed", owner="dra", state="unbound"),
        "0000:06:00.0": DraUnit(unit="scanned", owner="none", state="cleanup", text="not reset"),
    }
    found = facts(Device(resource="r", id="a", unit="scanned"))
    status = replace(found.status, dra={"p": DraStatus(driver="x.example.com", units=units)})
    decoded = decode_inventory(build_inventory(replace(found, status=status)))
    assert [
        (each.unit, each.bdf, each.phase, each.reason, each.text, each.owner, each.published) for each in decoded.units
    ] == [
        ("scanned", "0000:06:00.0", "unhealthy", "cleanup", "not reset", "none", False),
        ("vfio", "0000:03:00.0", "healthy", "", "", "dra", True),
        ("removed", "0000:04:00.0", "unhealthy", "gone", "was removed", "dra", False),
    ]


def test_a_unit_has_the_ids_of_all_its_resources_and_the_holders_of_each() -> None:
    found = facts(
        Device(resource="r", id="a-0", unit="a"),
        Device(resource="r", id="a-1", unit="a"),
        Device(resource="monitoring", id="all", unit="a"),
        holders=Holders(
            [
                DeviceHolder("n", "p", "c", "x.example.com/r", ("a-0", "a-1", "unlisted")),
                DeviceHolder("n", "p", "c", "x.example.com/monitoring", ("all",)),
                DeviceHolder("n", "p", "c", "other.example.com/r", ("a-0",)),
            ],
            "podresources",
            since={("n", "p", "c", "x.example.com/r"): 5.0},
        ),
    )
    decoded = decode_inventory(build_inventory(found))
    [unit] = decoded.units
    assert unit.ids == {"x.example.com/r": 2, "x.example.com/monitoring": 1}
    assert [(each.resource, each.count, each.since) for each in unit.holders] == [
        ("x.example.com/r", 2, 5.0),
        ("x.example.com/monitoring", 1, 0.0),
    ]
    assert {each.name: each.allocated for each in decoded.plugins[0].resources} == {
        "x.example.com/r": 3,
        "x.example.com/monitoring": 1,
    }


def test_the_state_does_not_depend_on_the_age_of_the_holders_and_depends_on_their_source() -> None:
    rows = [DeviceHolder("n", "p", "c", "x.example.com/r", ("a",))]
    device = Device(resource="r", id="a")
    old, new = (facts(device, holders=Holders(rows, "podresources", began)) for began in (1.0, 50.0))
    checkpoint = facts(device, holders=Holders(rows, "checkpoint", 50.0))
    first, second, third = (state_of(inventory_plugins(each), each.holders.source) for each in (old, new, checkpoint))
    assert first == second != third


def test_a_too_large_inventory_omits_history_and_then_units() -> None:
    change = HealthChange(1.0, Phase.UNHEALTHY, "bus", "x" * 2048)
    devices = [Device(resource="r", id=f"d{number}") for number in range(2000)]
    few, many = (
        facts(*devices[:count], health={
            device.unit: UnitHealth(phase=Phase.UNHEALTHY, reason="y" * text, changes=[change] * 32)
            for device in devices[:count]
        })
        for count, text in ((100, 1), (2000, 5000))
    )  # fmt: skip
    for found, lengths, units in ((few, {8}, 100), (many, {0}, None)):
        body = build_inventory(found)
        decoded = decode_inventory(body)
        assert len(body) <= MAX_BYTES
        assert {len(unit.history) for unit in decoded.units} == lengths
        assert units is None or len(decoded.units) == units
        assert decoded.units
        assert decoded.plugins[0].resources[0].ids == (units or 2000)


def test_long_lists_of_holders_and_skipped_hardware_are_cut() -> None:
    rows = [DeviceHolder("n", f"p{number}", "c", "x.example.com/r", ("a",)) for number in range(20_000)]
    skipped = tuple(Skipped(f"s{number}", "r") for number in range(2000))
    body = build_inventory(facts(Device(resource="r", id="a"), holders=Holders(rows), skipped=skipped))
    decoded = decode_inventory(body)
    assert len(decoded.units[0].holders) == 4096
    assert len(decoded.plugins[0].skipped) == 1024


names = st.text(max_size=400) | st.sampled_from(["a", "\ud800", "</script>", "a\x00b", "\u202ex"])


@pytest.mark.untraced
@given(names.filter(bool), names, names, st.sampled_from(Phase), st.lists(st.integers() | st.none(), max_size=3))
def test_any_text_gives_an_inventory_that_the_fleet_decodes(
    id_: str, reason: str, fact: str, phase: Phase, topology: list[int | None]
) -> None:
    device = Device(
        resource="r", id=id_, health="Unhealthy", reason=reason, topology=tuple(each or 0 for each in topology)
    )
    rows = [DeviceHolder(fact, fact, reason, "x.example.com/r", (id_,))]
    found = facts(
        device,
        health={device.unit: UnitHealth(phase=phase, reason=reason, changes=[HealthChange(1.0, phase, "bus", reason)])},
        holders=Holders(rows, "podresources"),
        skipped=(Skipped(id_, reason),),
        problem=reason,
    )
    plan = DevicePlan(device=fact, units=(device.unit,), bdf=fact, facts={"model": fact})
    body = build_inventory(msgspec.structs.replace(found, plans={"p": [plan]}))
    decoded = decode_inventory(body)
    assert decoded.units[0].phase == ("unhealthy" if phase is Phase.HEALTHY else phase)
    assert len(decoded.units[0].holders) == 1
