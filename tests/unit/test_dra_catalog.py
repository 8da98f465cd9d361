"""The devices that are published of a node's units."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import memorydirectory
import pytest
from drapools import STANDARD, functions, offer, offers
from msgspec.structs import replace
from trees import link, write

from accelplane.devices import Unit, Version, plain
from accelplane.dra import catalog
from accelplane.dra.families.devices import FAMILIES, other
from accelplane.dra.families.facts import with_facts
from accelplane.dra.model import Capacity, DeviceName, Features, Offer, Pool, PoolDevice
from accelplane.host import Host
from accelplane.node.scan_loop import scan
from accelplane.node.units import units_of
from accelplane.plugins import Plugin
from accelplane.plugins.dlb import DlbPlugin
from accelplane.plugins.fpga import FpgaPlugin
from accelplane.plugins.gpu import GpuPlugin
from accelplane.plugins.idxd import DsaPlugin, IaaPlugin
from accelplane.plugins.npu import NpuPlugin
from accelplane.plugins.qat import QatPlugin
from accelplane.plugins.sgx import SgxConfig, SgxPlugin
from accelplane.simulate.offload import DlbSpec, DsaSpec, FpgaSpec, IaaSpec, QatSpec, QueueSpec
from accelplane.simulate.specs import GpuSpec, NodeSpec, NpuSpec, SgxSpec
from accelplane.simulate.tree import SimulatedNode

NODE, GPU, OTHER = "node-1", "gpu.intel.com", "tpu.example.com"
COMMON = {"model", "type", "driver", "pciId", "pciAddress", "health", "numaNode", "parent"}
REPOSITORY = Path(__file__).parents[2]
ALL = Features(taints=True, counters=True, consumable=True)
NONE = Features(taints=False, counters=False, consumable=False)
NAME = "0000-03-00-0-0x56c0"
SPEC = NodeSpec(
    gpus=[GpuSpec(bdf="0000:03:00.0", tiles=2, memory=8 << 30), GpuSpec(driver="xe", bdf="0000:04:00.0")],
    npus=[NpuSpec(bdf="0000:00:0b.0")],
    qats=[QatSpec(bdf="0000:6b:00.0", vfs=2)],
    dsas=[DsaSpec(bdf="0000:6a:01.0", queues=[QueueSpec(), QueueSpec(mode="shared")])],
    iaas=[IaaSpec(index=1, bdf="0000:6a:02.0", queues=[QueueSpec()])],
    dlbs=[DlbSpec(bdf="0000:72:00.0")],
    fpgas=[FpgaSpec(bdf="0000:81:00.0")],
    sgx=SgxSpec(),
)


def pool(
    given: Mapping[str, Offer], features: Features = ALL, *, driver: str = GPU, held: set[str] | None = None,
    evict: catalog.Evict = "gone",
) -> Pool:  # fmt: skip
    return catalog.pool(driver, NODE, given, features, held=held or (), evict=evict)


def names(found: Pool) -> list[str]:
    return [device.name for device in found.devices]


def taints(found: Pool) -> list[str]:
    return [f"{taint.key}={taint.value}:{taint.effect}" for device in found.devices for taint in device.taints]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memorydirectory.path()) as path:
        SimulatedNode(Path(path)).build(SPEC)
        yield Path(path)


def published(root: Path, plugin: Plugin[Any], **fields: Any) -> dict[str, PoolDevice]:
    host = Host(root)
    units = [with_facts(host, plugin.namespace, unit) for unit in units_of(host, scan(plugin, host))]
    found = pool({unit.id: Offer(unit=unit, owner="dra", **fields) for unit in units}, driver=plugin.namespace)
    return {device.name: device for device in found.devices}


class TestSimulatedNode:
    @pytest.mark.parametrize(
        ("plugin", "expected"),
        [
            (GpuPlugin(), [NAME, f"{NAME}-t0", f"{NAME}-t1", "0000-04-00-0-0xe20b"]),
            (NpuPlugin(), ["0000-00-0b-0-0x643e"]),
            (QatPlugin(), ["qatvf-0000-6b-00-1", "qatvf-0000-6b-00-2"]),
            (DsaPlugin(), ["0000-6a-01-0-wq0", "0000-6a-01-0-wq1"]),
            (IaaPlugin(), ["0000-6a-02-0-wq0"]),
            (DlbPlugin(), ["0000-72-00-0"]),
            (SgxPlugin(SgxConfig(enclave_limit=3, provision_limit=3)), ["enclave", "provision"]),
            (FpgaPlugin(), ["0000-81-00-0-port0"]),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Plugin) else "",
    )
    def test_every_device_of_a_family_has_every_attribute(
        self, root: Path, plugin: Plugin[Any], expected: list[str]
    ) -> None:
        found = published(root, plugin)
        assert list(found) == expected
        family = FAMILIES[plugin.namespace]
        for device in found.values():
            own = {name for name in device.attributes if "/" not in name}
            assert own == COMMON | family.attributes.keys()
            assert set(device.capacities) == set(family.capacities)
            assert len(device.attributes) + len(device.capacities) <= 32

    def test_a_gpu_has_the_attributes_of_intels_driver(self, root: Path) -> None:
        device = published(root, GpuPlugin())[NAME]
        assert plain(device.attributes) == {
            "model": "Flex 170", "family": "Data Center Flex", "type": "gpu", "driver": "i915", "pciId": "0x56c0",
            "pciAddress": "0000:03:00.0", "health": "Healthy", "numaNode": 0, "parent": "", "sriov": True,
            "pciRoot": "00", "kind": "discrete", "vfIndex": -1, "tiles": 2, "memoryKnown": True,
            "iommuGroup": device.attributes["iommuGroup"],
            f"{STANDARD}pcieRoot": "pci0000:00", f"{STANDARD}pciBusID": "0000:03:00.0", f"{STANDARD}numaNode": 0,
        }  # fmt: skip
        assert device.capacities == {
            "memory": Capacity(16 << 30), "millicores": Capacity(1000), "shares": Capacity(1)
        }  # fmt: skip

    def test_functions_of_qat_have_the_services_of_their_device(self, root: Path) -> None:
        device = published(root, QatPlugin())["qatvf-0000-6b-00-1"]
        assert device.attributes["services"] == "sym;asym"
        assert (device.attributes["sym"], device.attributes["dc"]) == (True, False)
        assert (device.attributes["pf"], device.attributes["parent"]) == ("0000:6b:00.0", "0000-6b-00-0")
        assert (device.attributes["type"], device.attributes["heartbeat"]) == ("vf", "ok")
        [lost, _other] = published(root, QatPlugin(), state="unhealthy", reason="heartbeat").values()
        assert lost.attributes["heartbeat"] == "lost"

    def test_a_queue_has_its_configuration(self, root: Path) -> None:
        [dedicated, shared] = published(root, DsaPlugin()).values()
        assert [each.attributes["mode"] for each in (dedicated, shared)] == ["dedicated", "shared"]
        assert {each.attributes["type"] for each in (dedicated, shared)} == {"user"}
        assert dedicated.capacities["size"].value > 0
        assert dedicated.attributes["wqName"] != ""

    def test_the_memory_of_enclaves_is_a_capacity(self, root: Path) -> None:
        found = published(root, SgxPlugin(SgxConfig(enclave_limit=3)), shares=3)
        assert found["enclave"].capacities["epc"].value > 0
        assert found["enclave"].capacities["epc"].default == 0
        assert found["provision"].capacities["epc"].value == 0

    def test_a_port_of_an_fpga_has_interface_and_afu(self, root: Path) -> None:
        device = published(root, FpgaPlugin())["0000-81-00-0-port0"]
        assert device.attributes["type"] == "port"
        assert len(str(device.attributes["interfaceId"])) == 32
        assert len(str(device.attributes["afuId"])) == 32
        assert device.attributes["programmable"] is True


class TestDlb:
    @pytest.mark.parametrize(
        ("address", "parent", "queues"), [("0000:72:00.0", "", 32), ("0000:72:00.2", "0000:72:00.0", 4)]
    )
    def test_a_function_has_the_resources_of_its_driver(
        self, tmp_path: Path, address: str, parent: str, queues: int
    ) -> None:
        devices = tmp_path / "sys/bus/pci/devices"
        write(devices / "0000:72:00.0/total_resources/num_ldb_queues", "32\n")
        write(devices / "0000:72:00.0/vf1_resources/num_ldb_queues", "4\n")
        link(devices / "0000:72:00.0/virtfn1", devices / "0000:72:00.2")
        unit = Unit(id=address, parent=parent, health="dlb0", attributes={"pciAddress": address}, ids={"vf": ["dlb0"]})
        given = offers(Offer(unit=with_facts(Host(tmp_path), "dlb.intel.com", unit), owner="dra"))
        [device] = pool(given, driver="dlb.intel.com").devices
        assert device.capacities["ldbQueues"] == Capacity(queues)
        assert device.capacities["dirCredits"] == Capacity(0)


class TestOwners:
    @pytest.mark.parametrize("owner", ["plugin", "none"])
    def test_units_of_other_owners_are_not_published(self, owner: str) -> None:
        given = offers(offer(), offer("0000:04:00.0", owner=owner))
        assert names(pool(given)) == [NAME]
        assert [each.device for each in catalog.health(GPU, given)] == [NAME]
        assert set(catalog.device_names(GPU, given)) == {NAME, "0000-04-00-0-0x56c0"}

    def test_a_physical_function_is_not_published_beside_its_virtual_ones(self) -> None:
        virtual = [offer(f"0000:03:00.{number}", parent="0000:03:00.0") for number in range(1, 5)]
        found = pool(offers(offer(), *virtual))
        assert len(found.devices) == 4
        assert {device.attributes["parent"] for device in found.devices} == {"0000-03-00-0"}


class TestHealth:
    @pytest.mark.parametrize(
        ("state", "evict", "expected", "without"),
        [
            ("healthy", "gone", [], 1),
            ("degraded", "gone", ["gpu.intel.com/health=hot:None"], 1),
            ("unhealthy", "gone", ["gpu.intel.com/health=hot:NoSchedule"], 0),
            ("unhealthy", "sick", ["gpu.intel.com/health=hot:NoExecute"], 0),
            ("unhealthy", "never", ["gpu.intel.com/health=hot:NoSchedule"], 0),
            ("recovering", "gone", ["gpu.intel.com/health=hot:NoSchedule"], 0),
            ("unbound", "sick", ["gpu.intel.com/unbound=hot:NoSchedule"], 0),
            ("cleanup", "sick", ["gpu.intel.com/cleanup=hot:NoSchedule"], 0),
        ],
    )
    def test_a_state_is_a_taint_or_withdraws_the_device(
        self, state: Any, evict: Any, expected: list[str], without: int
    ) -> None:
        given = offers(offer(state=state, reason="hot"))
        assert taints(pool(given, evict=evict)) == expected
        found = pool(given, NONE, evict=evict)
        assert len(found.devices) == without
        assert taints(found) == []

    @pytest.mark.parametrize(
        ("evict", "effect"), [("gone", "NoExecute"), ("sick", "NoExecute"), ("never", "NoSchedule")]
    )
    def test_a_device_that_is_gone_stays_while_a_claim_has_it(self, evict: Any, effect: str) -> None:
        given = offers(offer(state="gone", reason="unplugged"))
        assert taints(pool(given, held={"0000:03:00.0"}, evict=evict)) == [f"gpu.intel.com/gone=unplugged:{effect}"]
        assert names(pool(given, evict=evict)) == []
        assert names(pool(given, NONE, held={"0000:03:00.0"}, evict=evict)) == []

    def test_reasons_become_values_of_labels(self) -> None:
        given = offers(offer(state="unhealthy", reason=f" core[0]: too hot/{'x' * 80}-"))
        [taint] = taints(pool(given))
        assert taint == f"gpu.intel.com/health=core-0-too-hot-{'x' * 48}:NoSchedule"

    @pytest.mark.parametrize(
        ("state", "health", "attribute", "message"),
        [
            ("healthy", "HEALTHY", "Healthy", ""),
            ("degraded", "HEALTHY", "Healthy", "the text"),
            ("unhealthy", "UNHEALTHY", "Unhealthy", "the text"),
            ("recovering", "UNKNOWN", "Unknown", "the text"),
            ("gone", "UNHEALTHY", "Unhealthy", "the text"),
        ],
    )
    def test_the_kubelet_gets_the_state_with_its_text(
        self, state: Any, health: str, attribute: str, message: str
    ) -> None:
        given = offers(offer(state=state, reason="hot", text="the text"))
        [found] = catalog.health(GPU, given)
        assert (found.health, found.message) == (health, message)
        assert pool(given, held={"0000:03:00.0"}).devices[0].attributes["health"] == attribute

    def test_messages_are_cut_at_a_character(self) -> None:
        [found] = catalog.health(GPU, offers(offer(state="unhealthy", text="é" * 600 + "x")))
        assert found.message == "é" * 512


class TestParts:
    def test_a_shared_device_has_shares_that_requests_consume(self) -> None:
        [device] = pool(offers(offer(shares=3))).devices
        assert device.multiple
        assert device.capacities["shares"] == Capacity(3, default=1, minimum=1)
        # Without a default, the first request would take all.
        assert device.capacities["memory"] == Capacity(1 << 34, default=0)

    def test_without_consumable_capacity_each_share_is_a_device(self) -> None:
        given = offers(offer(shares=3))
        found = pool(given, NONE)
        assert names(found) == [f"{NAME}-s{number}" for number in range(3)]
        assert {device.attributes["parent"] for device in found.devices} == {NAME}
        assert not any(device.multiple for device in found.devices)
        shares = {name: DeviceName(unit="0000:03:00.0", slot=name[-2:]) for name in names(found)}
        assert catalog.device_names(GPU, given) == {NAME: DeviceName(unit="0000:03:00.0", multiple=True), **shares}

    def test_at_most_64_enclaves_are_devices(self) -> None:
        enclave = Unit(id="sgx-enclave", health="sgx-enclave", ids={"enclave": ["sgx-enclave-0"]})
        found = pool(offers(Offer(unit=enclave, owner="dra", shares=110)), NONE, driver="sgx.intel.com")
        assert names(found) == [f"enclave-{number}" for number in range(64)]

    def test_a_gpu_and_its_tiles_consume_the_same_counters(self) -> None:
        given = offers(offer(attributes={"tiles": 2}))
        found = pool(given)
        [whole, first, second] = found.devices
        assert found.counter_sets == {NAME: {"tiles": 2}}
        assert whole.counters == {NAME: {"tiles": 2}}
        assert first.counters == second.counters == {NAME: {"tiles": 1}}
        assert first.capacities["memory"] == Capacity(1 << 33)
        assert (first.attributes["tiles"], first.attributes["parent"], first.attributes["type"]) == (1, NAME, "tile")
        tiles = {
            f"{NAME}-t{number}": DeviceName(unit="0000:03:00.0", slot=f"t{number}", tile=number) for number in (0, 1)
        }
        assert catalog.device_names(GPU, given) == {NAME: DeviceName(unit="0000:03:00.0"), **tiles}

    @pytest.mark.parametrize("features", [NONE, Features()])
    def test_tiles_need_proven_counters(self, features: Features) -> None:
        found = pool(offers(offer(attributes={"tiles": 2})), features)
        assert names(found) == [NAME]
        assert not found.counter_sets


class TestOtherDrivers:
    def offer(self, name: str = "tpu0", **fields: Any) -> Offer:
        return Offer(unit=Unit(id=name, health=name, **fields), owner="dra")

    def test_a_unit_has_its_id_as_name_and_its_own_attributes(self) -> None:
        attributes = {"firmware": Version("1.2.3"), "ecc": True, "no name": "x", "cores": 8}
        given = offers(self.offer("0000:3b:00.0", attributes=attributes, capacities={"memory": 1 << 34}))
        [device] = pool(given, driver=OTHER).devices
        assert device.name == "0000-3b-00-0"
        found = plain(device.attributes)
        assert (found["firmware"], found["ecc"], found["cores"]) == ("1.2.3", True, 8)
        assert "no name" not in found
        assert device.capacities == {"shares": Capacity(1), "memory": Capacity(1 << 34)}

    def test_devices_have_the_attributes_of_each_other(self) -> None:
        given = offers(
            self.offer("a", attributes={"ecc": True, "firmware": Version("1.2.3")}, capacities={"memory": 1}),
            self.offer("b", attributes={"cores": 8, "site": "x"}),
        )
        [first, second] = pool(given, driver=OTHER).devices
        assert (first.attributes["cores"], first.attributes["site"]) == (0, "")
        assert (second.attributes["ecc"], second.attributes["firmware"]) == (False, Version("0.0.0"))
        assert second.capacities == {"shares": Capacity(1), "memory": Capacity(0)}

    def test_devices_have_the_attributes_that_the_plugin_states(self) -> None:
        """Devices of other nodes have them, and a selector must not fail."""
        given = offers(self.offer("a", attributes={"serial": "A1", "cores": "two"}, ids={"tpu": ["a"]}))
        family = other({"serial": "", "cores": 0, "firmware": Version("0.0.0")}, {"memory": 0})
        [device] = catalog.pool(OTHER, NODE, given, ALL, held=(), evict="gone", other=family).devices
        found = plain(device.attributes)
        assert (found["serial"], found["cores"], found["firmware"]) == ("A1", 0, "0.0.0")
        assert device.capacities == {"shares": Capacity(1), "memory": Capacity(0)}

    def test_the_type_is_the_resource_unless_the_plugin_has_one(self) -> None:
        given = offers(
            self.offer("a", ids={"tpu": ["a"]}), self.offer("b", ids={"tpu": ["b"]}, attributes={"type": "board"})
        )
        assert [each.attributes["type"] for each in pool(given, driver=OTHER).devices] == ["tpu", "board"]

    def test_at_most_64_shares_are_devices(self) -> None:
        shared = replace(self.offer("kvm"), shares=1000)
        assert len(pool(offers(shared), NONE, driver=OTHER).devices) == 64
        [device] = pool(offers(shared), driver=OTHER).devices
        assert device.capacities["shares"] == Capacity(1000, default=1, minimum=1)

    def test_names_are_dns_labels_and_different(self) -> None:
        ids = ["y" * 50, "a.b", "a:b", "A_b", "é", "x" * 200, "-", "a-b-s0"]
        given = offers(*(self.offer(each) for each in ids))
        found = catalog.device_names(OTHER, given)
        assert sorted(each.unit for each in found.values()) == sorted(ids)
        assert len(found) == len(ids)
        assert names(pool(given, driver=OTHER)) == names(pool(dict(reversed(list(given.items()))), driver=OTHER))


def test_names_of_200_functions_are_in_natural_order() -> None:
    found = names(pool(functions(200), driver="qat.intel.com"))
    assert len(found) == 200
    assert found == sorted(found)


class TestNames:
    """The names in documentation and manifests are those of the catalog."""

    def test_the_documentation_has_all_attributes_and_capacities(self) -> None:
        section = (REPOSITORY / "docs/dra-claims.md").read_text().partition("\n## Attributes\n")[2]
        found: dict[str, tuple[set[str], set[str]]] = {}
        for line in section.splitlines():
            cells = line.split("|")[1:]
            if len(cells) >= 3 and ".intel.com`" in cells[0]:
                attributes, capacities = (set(re.findall(r"`(\w+)`", cell)) for cell in cells[1:3])
                found.update(dict.fromkeys(re.findall(r"`([a-z.]+)`", cells[0]), (attributes, capacities)))
        words = {"sym", "asym", "dc", "dcc", "decomp"}  # the line of QAT has them as one text
        expected = {name: (set(each.attributes) - words, set(each.capacities)) for name, each in FAMILIES.items()}
        assert found == expected

    def test_selectors_have_attributes_that_all_devices_of_the_driver_have(self) -> None:
        used: set[tuple[str, str, str]] = set()
        for file in [*(REPOSITORY / "deploy/dra").rglob("*.yaml"), *(REPOSITORY / "demo").rglob("*.yaml")]:
            used.update(re.findall(r'device\.(attributes|capacity)\["([a-z]+\.intel\.com)"\]\.(\w+)', file.read_text()))
        known = {
            *(
                ("attributes", driver, name)
                for driver, each in FAMILIES.items()
                for name in (*COMMON, *each.attributes)
            ),
            *(("capacity", driver, name) for driver, each in FAMILIES.items() for name in each.capacities),
        }
        assert len(used) > 5
        assert used - known == set()
