"""The DLB scan on trees of plain files."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import write

from accelplane.devices import Device, DeviceNode, Skipped
from accelplane.host import Host
from accelplane.plugins.dlb import DlbPlugin

pytestmark = pytest.mark.memory


def dlb(root: Path, name: str, vfs: str | None = "0") -> None:
    write(root / "dev" / name, "")
    device = root / "sys/class/dlb2" / name / "device"
    device.mkdir(parents=True)
    if vfs is not None:
        write(device / "sriov_numvfs", vfs)


def scan(root: Path) -> list[Device | Skipped]:
    return list(DlbPlugin().scan(Host(root)))


@pytest.mark.parametrize(
    ("vfs", "resource"),
    [("0\n", "pf"), (None, "vf"), ("-1\n", "vf")],
)
def test_sriov_numvfs_determines_the_resource(tmp_path: Path, vfs: str | None, resource: str) -> None:
    dlb(tmp_path, "dlb3", vfs)
    assert scan(tmp_path) == [Device(resource=resource, id="/dev/dlb3", nodes=[DeviceNode("/dev/dlb3")])]


@pytest.mark.parametrize(("device_id", "resource"), [("0x2710", "pf"), ("0x2714", "pf"), ("0x2711", "vf")])
def test_on_a_kernel_without_sriov_the_pci_id_determines_the_resource(
    tmp_path: Path, device_id: str, resource: str
) -> None:
    dlb(tmp_path, "dlb0", None)
    write(tmp_path / "sys/class/dlb2/dlb0/device/device", f"{device_id}\n")
    assert [item.resource for item in scan(tmp_path) if isinstance(item, Device)] == [resource]


def test_a_node_without_class_device_is_skipped_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path / "dev/dlb0", "")
    reason = "/sys/class/dlb2/dlb0/device does not exist, expected the PCI function of the node"
    assert scan(tmp_path) == [Skipped("dlb0", reason, warning=True)]


@pytest.mark.parametrize("vfs", ["1\n", "16\n", "", "junk"])
def test_a_physical_function_with_virtual_functions_is_skipped_and_reported(tmp_path: Path, vfs: str) -> None:
    dlb(tmp_path, "dlb0", vfs)
    dlb(tmp_path, "dlb1", None)
    skipped, device = scan(tmp_path)
    assert isinstance(skipped, Skipped)
    assert not skipped.warning
    assert f"sriov_numvfs is {vfs.strip()!a}" in skipped.reason
    assert isinstance(device, Device)
    assert device.resource == "vf"


def test_a_node_without_a_readable_driver_counts_as_a_virtual_function_and_is_reported(tmp_path: Path) -> None:
    dlb(tmp_path, "dlb0", None)
    (tmp_path / "sys/class/dlb2/dlb0/device/sriov_numvfs").mkdir()
    host = Host(tmp_path)
    (device,) = DlbPlugin().scan(host)
    assert isinstance(device, Device)
    assert device.resource == "vf"
    assert any("virtual functions unknown: /sys/class/dlb2/dlb0/" in note for note in host.notes)


def test_other_files_of_similar_name_are_no_load_balancers(tmp_path: Path) -> None:
    for name in ("dlb", "dlbx", "dlb0.lock", "mydlb0"):
        write(tmp_path / "dev" / name, "")
    assert scan(tmp_path) == []


def test_a_root_without_dev_has_no_device_nodes(tmp_path: Path) -> None:
    assert scan(tmp_path) == []


@given(text=st.binary(max_size=100))
def test_no_content_of_sriov_numvfs_breaks_the_scan(tmp_path: Path, text: bytes) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    dlb(root, "dlb0", None)
    write(root / "sys/class/dlb2/dlb0/device/sriov_numvfs", text)
    assert len(scan(root)) == 1
