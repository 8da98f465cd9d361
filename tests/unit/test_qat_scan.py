"""The QAT scan in dpdk mode on trees of plain files."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from trees import link, write
from trees_qat import group, pf, vf

from accelplane.devices import Device, DeviceNode, Inventory, Mount, Skipped
from accelplane.host import Host
from accelplane.plugins.qat import QatConfig, QatPlugin
from accelplane.plugins.qat.scan import discover, scan

pytestmark = pytest.mark.memory

VFIO = DeviceNode("/dev/vfio/vfio")


class QatScan:
    """One scan: devices by ID, reasons of skipped hardware by subject, notes."""

    def __init__(self, root: Path, unbound: Mapping[str, str] | None = None, **options: Any) -> None:
        host = Host(root)
        config = QatConfig(**options)
        items = list(scan(host, config, discover(host, config), lambda address: (unbound or {}).get(address, "")))
        self.devices = {item.id: item for item in items if isinstance(item, Device)}
        self.skipped = {item.subject: item for item in items if isinstance(item, Skipped)}
        self.notes = "\n".join(host.notes)

    @property
    def resources(self) -> set[str]:
        return {device.resource for device in self.devices.values()}


def test_a_virtual_function_is_a_device_with_its_group(tmp_path: Path) -> None:
    pf(tmp_path, vfs=[0], numa=1)
    assert QatScan(tmp_path).devices == {
        "0000:6b:00.1": Device(
            resource="cy",
            id="0000:6b:00.1",
            unit="0000:6b:00.0",
            nodes=[DeviceNode(group("0000:6b:00.1")), VFIO],
            topology=(1,),
            attributes={"device-id": "0x4941", "model": "4xxx"},
            path="/sys/bus/pci/devices/0000:6b:00.1",
        )
    }


def test_only_enabled_drivers_count_in_their_order(tmp_path: Path) -> None:
    pf(tmp_path, "0000:6b:00.0", vfs=[0])
    pf(tmp_path, "0000:3d:00.0", driver="c6xx", vfs=[0], vf_id="0x37c9")
    pf(tmp_path, "0000:ee:00.0", driver="420xx", vfs=[0], vf_id="0x4947", services="dc")
    assert list(QatScan(tmp_path).devices) == ["0000:6b:00.1", "0000:ee:00.1"]
    both = QatScan(tmp_path, kernel_vf_drivers="c6xxvf,4xxxvf,c6xxvf")
    assert {id_: device.resource for id_, device in both.devices.items()} == {
        "0000:3d:00.1": "generic",
        "0000:6b:00.1": "cy",
    }
    assert "generic" not in both.notes


def test_ids_are_not_read_for_functions_of_a_known_physical_function(tmp_path: Path) -> None:
    pf(tmp_path, vfs=[0], vf_id="0x1234")
    assert QatScan(tmp_path).resources == {"generic"}


def test_a_virtual_function_removed_during_the_scan_causes_no_warning(tmp_path: Path) -> None:
    pf(tmp_path, "0000:6b:00.0", vfs=[0, 1, 2])
    shutil.rmtree(tmp_path / "sys/devices/pci0000:6b/0000:6b:00.2")
    (tmp_path / "sys/devices/pci0000:6b/0000:6b:00.3/device").unlink()
    result = QatScan(tmp_path)
    assert list(result.devices) == ["0000:6b:00.1"]
    assert {subject: skipped.warning for subject, skipped in result.skipped.items()} == {
        "0000:6b:00.2": False,
        "0000:6b:00.3": True,
    }


def test_a_host_without_devices_has_no_devices(tmp_path: Path) -> None:
    assert (QatScan(tmp_path).devices, QatScan(tmp_path).skipped) == ({}, {})


def test_a_physical_function_without_virtual_functions_is_reported_and_ends_the_search_by_id(
    tmp_path: Path,
) -> None:
    pf(tmp_path)
    vf(tmp_path, "0000:00:05.0")
    result = QatScan(tmp_path)
    assert result.devices == {}
    assert "no virtual functions are enabled" in result.skipped["0000:6b:00.0"].reason


class TestVirtualMachine:
    def test_functions_are_identified_by_their_ids_and_generic(self, tmp_path: Path) -> None:
        vf(tmp_path, "0000:00:05.0")
        vf(tmp_path, "0000:00:06.0", device_id="4947")
        vf(tmp_path, "0000:00:07.0", device_id="0x37c9")
        vf(tmp_path, "0000:00:08.0", device_id="0x4940")
        vf(tmp_path, "0000:00:09.0", vendor=None)
        result = QatScan(tmp_path)
        assert list(result.devices) == ["0000:00:05.0", "0000:00:06.0", "0000:00:09.0"]
        assert result.resources == {"generic"}
        assert "not visible in a virtual machine" in result.notes

    def test_a_function_of_another_vendor_with_the_same_device_id_is_skipped(self, tmp_path: Path) -> None:
        vf(tmp_path, "0000:00:05.0", vendor="0x1234")
        result = QatScan(tmp_path)
        assert result.devices == {}
        assert "vendor is '0x1234'" in result.skipped["0000:00:05.0"].reason

    def test_an_unreadable_function_is_skipped(self, tmp_path: Path) -> None:
        vf(tmp_path, "0000:00:05.0", device_id=None)
        vf(tmp_path, "0000:00:06.0")
        result = QatScan(tmp_path)
        assert list(result.devices) == ["0000:00:06.0"]
        assert "0000:00:05.0 skipped" in result.notes

    def test_an_unbound_physical_function_is_the_unit_of_its_virtual_functions(self, tmp_path: Path) -> None:
        function = pf(tmp_path, vfs=[0, 1])
        shutil.rmtree(tmp_path / "sys/bus/pci/drivers/4xxx")
        (function / "driver").unlink()
        assert {device.unit for device in QatScan(tmp_path).devices.values()} == {"0000:6b:00.0"}


class TestCap:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        pf(tmp_path, "0000:6b:00.0", vfs=[0, 1, 2, 10])
        pf(tmp_path, "0000:70:00.0", vfs=[0, 1])
        return tmp_path

    @pytest.mark.parametrize(
        ("by", "most", "ids"),
        [
            ("order", 0, []),
            ("order", 3, ["6b:00.1", "6b:00.2", "6b:01.3"]),  # virtfn10 before virtfn2
            ("order", 5, ["6b:00.1", "6b:00.2", "6b:01.3", "6b:00.3", "70:00.1"]),
            ("pf", 3, ["6b:00.1", "70:00.1", "6b:00.2"]),
            ("pf", 5, ["6b:00.1", "70:00.1", "6b:00.2", "70:00.2", "6b:00.3"]),
            ("pf", 6, ["6b:00.1", "70:00.1", "6b:00.2", "70:00.2", "6b:00.3", "6b:01.3"]),
        ],
    )
    def test_functions_beyond_the_limit_are_skipped_and_counted(
        self, root: Path, by: str, most: int, ids: list[str]
    ) -> None:
        result = QatScan(root, max_num_devices=most, max_num_devices_by=by)
        assert list(result.devices) == [f"0000:{id_}" for id_ in ids]
        left = [subject for subject in result.skipped if subject.endswith("virtual functions")]
        assert left == ([f"{6 - most} virtual functions"] if most < 6 else [])


class TestNodes:
    def test_without_iommu_the_group_has_another_name(self, tmp_path: Path) -> None:
        vf(tmp_path, "0000:00:05.0", noiommu=True)
        assert QatScan(tmp_path).devices["0000:00:05.0"].nodes == (
            DeviceNode(group("0000:00:05.0").replace("vfio/", "vfio/noiommu-")),
            VFIO,
        )

    def test_igb_uio_gives_the_node_and_the_device_directory(self, tmp_path: Path) -> None:
        function = vf(tmp_path, "0000:00:05.0")
        (function / "uio/uio10").mkdir()
        device = QatScan(tmp_path, dpdk_driver="igb_uio").devices["0000:00:05.0"]
        assert device.nodes == (DeviceNode("/dev/uio10"),)
        assert device.mounts == (Mount("/sys/class/uio/uio10/device", read_only=False),)

    def test_iommufd_adds_existing_nodes(self, tmp_path: Path) -> None:
        (vf(tmp_path, "0000:00:05.0") / "vfio-dev/vfio3").mkdir(parents=True)
        vf(tmp_path, "0000:00:06.0")
        result = QatScan(tmp_path, iommufd=True)
        assert [node.host_path for node in result.devices["0000:00:05.0"].nodes] == [
            group("0000:00:05.0"),
            "/dev/vfio/vfio",
            "/dev/vfio/devices/vfio3",
            "/dev/iommu",
        ]
        assert len(result.devices["0000:00:06.0"].nodes) == 2
        assert "0000:00:06.0: no IOMMUFD node" in result.notes

    @pytest.mark.parametrize(
        ("driver", "missing", "reason"),
        [
            ("vfio-pci", "iommu_group", "iommu_group: No such file"),
            ("igb_uio", "uio", "uio: No such file"),
            ("igb_uio", "uio/uio7", "uio: no entry like uio0"),
            ("vfio-pci", "device", "device: No such file"),
        ],
    )
    def test_a_function_without_nodes_is_skipped_and_others_are_published(
        self, tmp_path: Path, driver: str, missing: str, reason: str
    ) -> None:
        pf(tmp_path, vfs=[0, 1])
        path = tmp_path / "sys/bus/pci/devices/0000:6b:00.1" / missing
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        result = QatScan(tmp_path, dpdk_driver=driver)
        assert list(result.devices) == ["0000:6b:00.2"]
        assert result.skipped["0000:6b:00.1"].warning
        assert reason in result.skipped["0000:6b:00.1"].reason

    def test_an_unbound_function_is_unhealthy_with_the_reason(self, tmp_path: Path) -> None:
        pf(tmp_path, vfs=[0, 1])
        result = QatScan(tmp_path, {"0000:6b:00.1": "no such driver"})
        assert [(device.healthy, device.reason) for device in result.devices.values()] == [
            (False, "no such driver"),
            (True, ""),
        ]

    def test_an_unbound_function_without_nodes_is_skipped_with_the_reason(self, tmp_path: Path) -> None:
        function = pf(tmp_path, vfs=[0])
        shutil.rmtree(function.with_name("0000:6b:00.1") / "uio")
        result = QatScan(tmp_path, {"0000:6b:00.1": "no such driver"}, dpdk_driver="igb_uio")
        assert result.skipped["0000:6b:00.1"].reason == "no such driver"


CONFIGURED = "[GENERAL]\nServicesEnabled = {}\n[KERNEL]\n"


class TestServices:
    @pytest.mark.parametrize("device_id", ["0x4941", "0x4943", "0x4945", "0x4947", "0x4949"])
    def test_newer_generations_have_configured_services(self, tmp_path: Path, device_id: str) -> None:
        pf(tmp_path, vfs=[0], vf_id=device_id, services="dc")
        assert QatScan(tmp_path).resources == {"dc"}

    @pytest.mark.parametrize("device_id", ["0x0442", "0x0443", "0x18a1", "0x19e3", "0x37c9", "0x6f55"])
    def test_older_generations_have_all_services(self, tmp_path: Path, device_id: str) -> None:
        pf(tmp_path, vfs=[0], vf_id=device_id, services="dc")
        result = QatScan(tmp_path)
        assert (result.resources, result.notes) == ({"generic"}, "")

    @pytest.mark.parametrize("bridge", [False, True])
    @pytest.mark.parametrize(
        ("facts", "resource", "note"),
        [
            (("up", "sym;dc", "junk"), "sym-dc", ""),
            (("up", "asym;sym", None), "cy", ""),
            (("up", "sym;future", None), "generic", "services are 'sym;future'"),
            (("up", None, CONFIGURED.format("dc;asym")), "asym-dc", ""),
            (("up", "", CONFIGURED.format("dc")), "dc", ""),
            (("down", "sym", CONFIGURED.format("dc")), "dc", ""),
            ((None, "sym", CONFIGURED.format("sym;asym")), "cy", ""),
            ((None, None, "[GENERAL]\n"), "generic", "services are ''"),
            ((None, None, "[general]\nServicesEnabled=dc\n"), "generic", "services are ''"),
            ((None, None, "[GENERAL]\njunk\n"), "generic", "line 2 is 'junk'"),
            ((None, None, None), "generic", "dev_cfg: No such file"),
            # The services apply when it is up; until then its functions are unhealthy.
            (("down", "sym", None), "sym", ""),
        ],
    )
    def test_services_are_read_from_sysfs_then_debugfs(
        self,
        tmp_path: Path,
        facts: tuple[str | None, str | None, str | None],
        resource: str,
        note: str,
        *,
        bridge: bool,
    ) -> None:
        state, services, dev_cfg = facts
        pf(tmp_path, vfs=[0, 1], state=state, services=services, dev_cfg=dev_cfg, bridge=bridge)
        result = QatScan(tmp_path)
        assert result.resources == {resource}
        assert note in result.notes
        assert result.notes.count("virtual functions of 0000:6b:00.0 are") == bool(note)

    @pytest.mark.parametrize("attribute", ["state", "cfg_services"])
    def test_unreadable_services_are_generic_with_the_reason(self, tmp_path: Path, attribute: str) -> None:
        function = pf(tmp_path, vfs=[0])
        write(function / "qat" / attribute, b"\xff\xfe")
        result = QatScan(tmp_path)
        assert result.resources == {"generic"}
        assert f"{attribute}: not text" in result.notes


SPOTS = st.sampled_from(
    [
        *(f"sys/bus/pci/devices/0000:6b:00.1/{name}" for name in ("device", "iommu_group", "iommu_group/name", "uio")),
        *(f"sys/bus/pci/devices/0000:6b:00.1/{name}" for name in ("physfn", "driver", "uio/uio7", "vfio-dev")),
        *(f"sys/bus/pci/devices/0000:6b:00.0/{name}" for name in ("virtfn0", "virtfn1", "driver", "numa_node", "qat")),
        *(f"sys/bus/pci/devices/0000:6b:00.0/qat/{name}" for name in ("state", "cfg_services")),
        *("sys/bus/pci/drivers/4xxx/0000:6b:00.0", "sys/bus/pci/drivers/4xxx", "sys/bus/pci/devices"),
        *("sys/kernel/debug/qat_4xxx_0000:6b:00.0/dev_cfg", "sys/kernel/debug"),
    ]
)
DAMAGE = st.sampled_from(["gone", "directory", "loop", "dangling", "junk", "long", "fifo"])


@settings(max_examples=examples(150), deadline=None)
@given(location=SPOTS, damage=DAMAGE, uio=st.booleans())
def test_a_device_with_invalid_attributes_does_not_affect_others(
    tmp_path: Path, location: str, damage: str, uio: bool
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    pf(root, "0000:6b:00.0", vfs=[0, 1], dev_cfg="")
    pf(root, "0000:70:00.0", driver="420xx", vfs=[0], vf_id="0x4947", services="dc")
    path = root / location
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        path.rename(f"{path}.moved")
    path.parent.mkdir(parents=True, exist_ok=True)
    match damage:
        case "directory":
            path.mkdir()
        case "loop":
            link(path, path.name)
        case "dangling":
            link(path, "../\udcff gone")
        case "junk":
            write(path, b"\xff\0\n-1")
        case "long":
            write(path, "x" * 100_000)
        case "fifo":
            os.mkfifo(path)
        case _:
            pass
    plugin, host = QatPlugin(QatConfig(dpdk_driver="igb_uio" if uio else "vfio-pci", iommufd=True)), Host(root)
    devices = list(Inventory.of(plugin.scan(host)))
    assert devices == list(Inventory.of(plugin.scan(Host(root))))
    if location != "sys/bus/pci/devices":
        assert "0000:70:00.1" in [device.id for device in devices]
