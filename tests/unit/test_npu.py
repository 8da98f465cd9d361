"""The NPU scan on trees of plain files."""

from pathlib import Path
from typing import Any

import pytest
from trees import link, npu, write

from accelplane.devices import Device, DeviceNode, Skipped
from accelplane.host import Host, Unreadable
from accelplane.plugins.npu import PRODUCTS, NpuConfig, NpuPlugin

pytestmark = pytest.mark.memory


def scan(root: Path, **options: Any) -> tuple[list[Device], dict[str, Skipped]]:
    items = list(NpuPlugin(NpuConfig(**options)).scan(Host(root)))
    return (
        [item for item in items if isinstance(item, Device)],
        {item.subject: item for item in items if isinstance(item, Skipped)},
    )


def test_an_npu_has_one_id_per_share(tmp_path: Path) -> None:
    npu(tmp_path, 0, numa=1)
    devices, _skipped = scan(tmp_path, shared_dev_num=2)
    assert devices == [
        Device(
            resource="accel",
            id=f"accel0-{number}",
            unit="accel0",
            nodes=[DeviceNode("/dev/accel/accel0")],
            topology=(1,),
            attributes={
                "device-id": "0x7e4c",
                "product": "Core Ultra Series 1 (Meteor Lake)",
                "driver": "intel_vpu",
                "bdf": "0000:00:0b.0",
            },
            path="/sys/class/accel/accel0/device",
        )
        for number in (0, 1)
    ]


@pytest.mark.parametrize("device_id", ["0x7e4c", "0x643e", "0xad1d", "0x7d1d", "0xb03e", "0xfd3e", "0xd71d"])
def test_every_known_npu_is_published(tmp_path: Path, device_id: str) -> None:
    npu(tmp_path, 0, device_id=device_id)
    devices, skipped = scan(tmp_path)
    assert [device.attributes["product"] for device in devices] == [PRODUCTS[device_id]]
    assert not skipped


@pytest.mark.parametrize(
    ("facts", "warning", "reason"),
    [
        ({"vendor": "0x1da3"}, False, "vendor '0x1da3' is not Intel"),
        ({"device_id": "0x1234"}, True, "set accept-unknown-ids to publish it"),
        ({"device_id": ""}, True, "unknown PCI id ''"),
        ({"node": False}, True, "/dev/accel/accel0: no such device node"),
    ],
)
def test_a_skipped_accelerator_is_reported(tmp_path: Path, facts: dict[str, Any], warning: bool, reason: str) -> None:
    npu(tmp_path, 0, **facts)
    npu(tmp_path, 1)
    devices, skipped = scan(tmp_path)
    assert [device.id for device in devices] == ["accel1-0"]
    assert skipped["accel0"].warning == warning
    assert reason in skipped["accel0"].reason


@pytest.mark.parametrize("attribute", ["vendor", "device"])
def test_an_unreadable_accelerator_is_reported_and_the_others_are_published(tmp_path: Path, attribute: str) -> None:
    (npu(tmp_path, 0) / attribute).unlink()
    npu(tmp_path, 1)
    devices, skipped = scan(tmp_path)
    assert [device.id for device in devices] == ["accel1-0"]
    assert skipped["accel0"].warning


def test_an_unknown_id_is_published_with_accept_unknown_ids(tmp_path: Path) -> None:
    npu(tmp_path, 0, device_id="0x1234")
    npu(tmp_path, 1, device_id="0x1234", vendor="0x1da3")
    devices, _skipped = scan(tmp_path, accept_unknown_ids=True)
    assert [device.id for device in devices] == ["accel0-0"]
    assert "product" not in devices[0].attributes


def test_an_npu_without_a_driver_link_is_published(tmp_path: Path) -> None:
    (npu(tmp_path, 0) / "driver").unlink()
    host = Host(tmp_path)
    assert len(list(NpuPlugin().scan(host))) == 1
    assert any("driver unknown" in note for note in host.notes)


@pytest.mark.parametrize("target", [None, "../../../platform.0"])
def test_an_npu_without_a_pci_address_is_published(tmp_path: Path, target: str | None) -> None:
    function = npu(tmp_path, 0)
    device = function / "accel/accel0/device"
    device.unlink()
    if target:
        function.rename(real := function.with_name("platform.0"))
        link(tmp_path / "sys/devices/pci0000:00/0000:00:0b.0", real)
        link(real / "accel/accel0/device", target)
    else:
        write(device / "vendor", "0x8086")
        write(device / "device", "0x7e4c")
    devices, _skipped = scan(tmp_path)
    assert "bdf" not in devices[0].attributes


def test_other_entries_of_the_class_are_ignored(tmp_path: Path) -> None:
    npu(tmp_path, 0)
    (tmp_path / "sys/class/accel/accelerator").mkdir()
    devices, skipped = scan(tmp_path)
    assert (len(devices), skipped) == (1, {})


def test_no_class_directory_is_no_devices(tmp_path: Path) -> None:
    assert scan(tmp_path) == ([], {})


def test_a_class_directory_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "sys/class/accel", "")
    with pytest.raises(Unreadable, match="/sys/class/accel"):
        scan(tmp_path)


def test_a_prefix_is_part_of_the_paths(tmp_path: Path) -> None:
    npu(tmp_path / "fake", 0)
    devices, _skipped = scan(tmp_path, prefix="/fake/")
    assert devices[0].nodes == (DeviceNode("/fake/dev/accel/accel0"),)


@pytest.mark.parametrize(
    ("mode", "classic", "name"),
    [
        ("auto", True, None),
        ("off", True, None),
        ("all", True, "intel.cdi.k8s.io/npu=accel0"),
        ("only", False, "intel.cdi.k8s.io/npu=accel0"),
    ],
)
def test_cdi_mode(tmp_path: Path, mode: str, classic: bool, name: str | None) -> None:
    npu(tmp_path, 0)
    devices, _skipped = scan(tmp_path, cdi=mode)
    assert bool(devices[0].nodes) == classic
    assert (devices[0].cdi.qualified_name if devices[0].cdi else None) == name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shared_dev_num": 0}, "sharing the same NPU must greater than zero"),
        ({"allocation_policy": ""}, "invalid value for allocation-policy"),
        ({"cdi": "maybe"}, "invalid value for cdi"),
        ({"prefix": "fake"}, "must be an absolute path"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^argument error: .*{sentence}"):
        NpuConfig(**options)


async def test_shares_are_spread_over_npus(tmp_path: Path) -> None:
    npu(tmp_path, 0)
    npu(tmp_path, 1)
    devices, _skipped = scan(tmp_path, shared_dev_num=2)
    assert await NpuPlugin().preferred_allocation(devices, [], 2, {}) == ["accel0-0", "accel1-0"]


def test_busy_time_is_measured_in_seconds_once_per_npu(tmp_path: Path) -> None:
    npu(tmp_path, 0, busy_us=1_500_000)
    npu(tmp_path, 1)
    npu(tmp_path, 2, busy_us=0)
    npu(tmp_path, 3, busy_us=0)
    npu(tmp_path, 4, busy_us=0)
    npu(tmp_path, 5, busy_us=0)
    for number, text in ((2, "much"), (3, "-1"), (4, "18446744073709551615"), (5, "1_000")):
        write(tmp_path / f"sys/class/accel/accel{number}/device/npu_busy_time_us", text)
    plugin, host = NpuPlugin(NpuConfig(shared_dev_num=2)), Host(tmp_path)
    devices = [item for item in plugin.scan(host) if isinstance(item, Device)]
    assert [(sample.name, sample.labels, sample.value) for sample in plugin.measure(host, devices)] == [
        ("npu_busy_seconds_total", {"device": "accel0"}, 1.5)
    ]
