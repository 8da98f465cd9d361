"""The FPGA plugin on trees of plain files: both drivers, virtual functions, several ports, the three modes."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bitstreams import INTERFACE, NLB0, NLB3
from fpgatrees import Card, class_device, fme, function, one_port, port, with_vf
from trees import write

from accelplane.cli import dropin as dropins
from accelplane.cli.node import dropin
from accelplane.devices import CdiDevice, CdiHook, CdiNode, Device, DeviceNode, Resource, Skipped
from accelplane.fpga.ids import CRASHED
from accelplane.host import Host
from accelplane.plugins.fpga import FpgaPlugin
from accelplane.plugins.fpga.config import FpgaConfig
from accelplane.plugins.fpga.scan import read, recall

pytestmark = pytest.mark.memory

AF_NLB0 = "af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs"
AF_CRASHED = "af-fff.fff.__________________________________________8"
REGION = f"region-{INTERFACE}"
OTHER = "0123456789abcdef0123456789abcdef"


def plugin(mode: str = "af", **options: Any) -> FpgaPlugin:
    return FpgaPlugin(FpgaConfig(mode=mode, **options))


def scan(plugin: FpgaPlugin, root: Path) -> list[Device | Resource | Skipped]:
    """Performs one scan as the agent does."""
    host = Host(root)
    plugin.prepare(host)
    return list(plugin.scan(host))


def devices(found: Sequence[Device | Resource | Skipped]) -> list[Device]:
    return [device for device in found if isinstance(device, Device)]


def skipped(found: Sequence[Device | Resource | Skipped]) -> Mapping[str, str]:
    return {each.subject: each.reason for each in found if isinstance(each, Skipped)}


def names(found: Sequence[Device | Resource | Skipped]) -> list[tuple[str, str, bool]]:
    return [(device.resource, device.id, device.healthy) for device in devices(found)]


def nodes(device: Device) -> list[str]:
    nodes_of_device = [*device.nodes, *(device.cdi.nodes if device.cdi else ())]
    return [node.host_path.removeprefix("/dev/") for node in nodes_of_device]


def two_ports(root: Path, family: str = "dfl") -> Card:
    """A card whose ports, with one function each, are both the physical function's."""
    card = Card(root, family)
    function(card)
    class_device(card, 0)
    fme(card, interfaces=[INTERFACE] * (1 if family == "opae" else 2), ports=2)
    port(card)
    port(card, 0, NLB3, number=1, inside=1)
    return card


# Published devices.


@pytest.mark.parametrize("family", ["dfl", "opae"])
def test_af_mode_publishes_ports_by_the_function_in_them(tmp_path: Path, family: str) -> None:
    card = one_port(tmp_path, family)
    (device,) = scan(plugin(), tmp_path)
    name = card.name("port", 0)
    assert device == Device(
        resource=AF_NLB0,
        id=name,
        nodes=(DeviceNode(f"/dev/{name}"),),
        topology=(1,),
        attributes={
            "driver": "DFL" if family == "dfl" else "OPAE",
            "bdf": "0000:81:00.0",
            "fme": card.name("fme", 0),
            "interface": INTERFACE,
            "afu": NLB0,
        },
        path=device.path,
        part="port0",
    )
    assert device.path is not None
    assert device.path.endswith(f"/{name}")


@pytest.mark.parametrize("family", ["dfl", "opae"])
def test_region_mode_publishes_regions_that_the_hook_programs(tmp_path: Path, family: str) -> None:
    card = one_port(tmp_path, family)
    (device,) = devices(scan(plugin("region"), tmp_path))
    name = card.name("fme", 0)
    assert (device.resource, device.id) == (REGION, name)
    of_ports = {f"com.intel.fpga.ports/{name}": card.name("port", 0)}
    assert device.annotations == {"com.intel.fpga.mode": "fpga.intel.com/region", **of_ports}
    assert nodes(device) == [card.name("port", 0)]
    arguments = ("intel-fpga-crihook", f"-ports={card.name('port', 0)}")
    hook = CdiHook("createRuntime", "/opt/intel/fpga-sw/intel-fpga-crihook", arguments)
    cdi = CdiDevice(kind="intel.cdi.k8s.io/fpga", name=name, hooks=(hook,))
    assert device.cdi == cdi
    assert cdi.file_name == f"intel.cdi.k8s.io-fpga-{name}.yaml"
    assert cdi.indispensable
    assert (device.topology, device.mounts, device.envs) == ((1,), (), {})


def test_with_cdi_ports_are_injected_only_with_the_hook(tmp_path: Path) -> None:
    one_port(tmp_path)
    (device,) = devices(scan(plugin("region", cdi="only"), tmp_path))
    assert device.nodes == ()
    arguments = ("intel-fpga-crihook", "-ports=dfl-port.0")
    hook = CdiHook("createRuntime", "/opt/intel/fpga-sw/intel-fpga-crihook", arguments)
    node = CdiNode("/dev/dfl-port.0", "/dev/dfl-port.0")
    assert device.cdi == CdiDevice(kind="intel.cdi.k8s.io/fpga", name="dfl-fme.0", nodes=(node,), hooks=(hook,))


def test_without_the_hook_by_cdi_the_kubelet_injects_the_ports(tmp_path: Path) -> None:
    one_port(tmp_path)
    (device,) = devices(scan(plugin("region", cdi="off"), tmp_path))
    assert (device.nodes, device.cdi) == ((DeviceNode("/dev/dfl-port.0"),), None)
    assert device.annotations == {
        "com.intel.fpga.mode": "fpga.intel.com/region",
        "com.intel.fpga.ports/dfl-fme.0": "dfl-port.0",
    }


@pytest.mark.parametrize("family", ["dfl", "opae"])
def test_regiondevel_mode_adds_the_fme_and_has_no_hook(tmp_path: Path, family: str) -> None:
    card = one_port(tmp_path, family)
    (device,) = devices(scan(plugin("regiondevel"), tmp_path))
    assert (device.resource, device.id) == (REGION, card.name("fme", 0))
    assert nodes(device) == [card.name("port", 0), card.name("fme", 0)]
    assert (device.annotations, device.cdi) == ({}, None)


@pytest.mark.parametrize("tree", [two_ports, with_vf])
@pytest.mark.parametrize("family", ["dfl", "opae"])
def test_all_ports_of_an_fme_are_one_region_also_those_of_virtual_functions(
    tmp_path: Path, family: str, tree: Any
) -> None:
    card = tree(tmp_path, family)
    (device,) = devices(scan(plugin("regiondevel"), tmp_path))
    assert device.id == card.name("fme", 0)
    assert sorted(nodes(device)) == [card.name("fme", 0), card.name("port", 0), card.name("port", 1)]
    assert {name for _, name, _ in names(scan(plugin(), tmp_path))} == {card.name("port", 0), card.name("port", 1)}


def test_ports_whose_regions_differ_are_different_regions_of_their_fme(tmp_path: Path) -> None:
    card = two_ports(tmp_path)
    fme(card, interfaces=[INTERFACE, OTHER], ports=2)
    found = devices(scan(plugin("region"), tmp_path))
    assert [(device.resource, device.id, nodes(device)) for device in found] == [
        (REGION, "dfl-fme.0", ["dfl-port.0"]),
        (f"region-{OTHER}", "dfl-fme.0", ["dfl-port.1"]),
    ]
    for cdi in ("auto", "only"):
        # Each has its own file, and its own record of allocated ports.
        found = devices(scan(plugin("region", cdi=cdi), tmp_path))
        assert [device.cdi.name for device in found if device.cdi] == [f"dfl-fme.0-{INTERFACE}", f"dfl-fme.0-{OTHER}"]
        arguments = [hook.args[1:] for device in found if device.cdi for hook in device.cdi.hooks]
        assert arguments == [("-ports=dfl-port.0",), ("-ports=dfl-port.1",)]
        records = [{key: device.annotations[key] for key in device.annotations if "ports/" in key} for device in found]
        assert records == [
            {f"com.intel.fpga.ports/dfl-fme.0-{INTERFACE}": "dfl-port.0"},
            {f"com.intel.fpga.ports/dfl-fme.0-{OTHER}": "dfl-port.1"},
        ]


def test_names_of_april_2020_fit_into_the_default_directory(tmp_path: Path) -> None:
    one_port(tmp_path)
    legacy = plugin(resource_naming="legacy63")
    (device,) = devices(scan(legacy, tmp_path))
    assert device.resource == f"{INTERFACE[:31]}{NLB0}"
    for resource in (device.resource, AF_NLB0, REGION):
        assert len(f"/var/lib/kubelet/device-plugins/{legacy.socket_name(resource)}") <= 107
    assert legacy.socket_name(AF_NLB0) == f"fpga.intel.com-{AF_NLB0}.sock"
    assert names(scan(plugin("region", resource_naming="legacy63"), tmp_path)) == [(REGION, "dfl-fme.0", True)]


def test_a_host_without_a_driver_has_no_devices(tmp_path: Path) -> None:
    assert scan(plugin(), tmp_path) == []


def test_an_fme_without_ports_is_reported(tmp_path: Path) -> None:
    card = one_port(tmp_path)
    shutil.rmtree(card.device(0) / "dfl-port.0")
    assert scan(plugin("region"), tmp_path) == [
        Skipped("dfl-fme.0", "no usable port: its ports are released, or cannot be read")
    ]


# Changes of a card.


def test_a_programmed_port_has_another_resource(tmp_path: Path) -> None:
    fpga, card = plugin(), one_port(tmp_path)
    assert names(scan(fpga, tmp_path)) == [(AF_NLB0, "dfl-port.0", True)]
    port(card, afu=NLB3)
    ((resource, name, healthy),) = names(scan(fpga, tmp_path))
    assert (resource[:11], name, healthy) == ("af-695.f7d.", "dfl-port.0", True)


@pytest.mark.parametrize("description", ["afu", "interface"])
def test_a_crashed_card_keeps_its_resource_and_is_unhealthy(tmp_path: Path, description: str) -> None:
    fpga, card = plugin(), one_port(tmp_path)
    scan(fpga, tmp_path)
    if description == "afu":
        port(card, afu=CRASHED)
    else:
        fme(card, interfaces=[CRASHED])
    first = scan(fpga, tmp_path)
    assert names(first) == [(AF_NLB0, "dfl-port.0", False)]
    assert devices(first)[0].reason.endswith(f"reads {CRASHED}: the card's firmware has crashed")
    assert scan(fpga, tmp_path) == first
    port(card, afu=NLB0)
    fme(card)
    assert names(scan(fpga, tmp_path)) == [(AF_NLB0, "dfl-port.0", True)]


@pytest.mark.parametrize("mode", ["region", "regiondevel"])
def test_a_region_of_a_crashed_card_keeps_its_resource_and_is_unhealthy(tmp_path: Path, mode: str) -> None:
    fpga, card = plugin(mode), two_ports(tmp_path)
    scan(fpga, tmp_path)
    fme(card, interfaces=[CRASHED] * 2, ports=2)
    found = scan(fpga, tmp_path)
    assert names(found) == [(REGION, "dfl-fme.0", False)]
    assert devices(found)[0].reason == (
        f"the interface id of dfl-fme.0 reads {CRASHED}: the card's firmware has crashed"
    )


@pytest.mark.parametrize(
    ("mode", "resource"), [("af", AF_CRASHED), ("region", f"region-{CRASHED}"), ("regiondevel", f"region-{CRASHED}")]
)
def test_a_card_that_crashed_before_the_start_has_the_resource_of_crashed_cards(
    tmp_path: Path, mode: str, resource: str
) -> None:
    fpga, card = plugin(mode), one_port(tmp_path)
    port(card, afu=CRASHED)
    fme(card, interfaces=[CRASHED])
    for _ in range(2):
        ((name, _, healthy),) = names(scan(fpga, tmp_path))
        assert (name, healthy) == (resource, False)


def test_a_replaced_card_does_not_inherit_the_state_of_the_old_one(tmp_path: Path) -> None:
    fpga, card = plugin(), one_port(tmp_path)
    scan(fpga, tmp_path)
    shutil.rmtree(tmp_path)
    other = card._replace(address="0000:82:00.0")
    for make in (function, lambda card: class_device(card, 0), fme):
        make(other)
    port(other, afu=CRASHED)
    assert [name[:3] for name, _, _ in names(scan(fpga, tmp_path))] == ["af-"]
    assert [healthy for _, _, healthy in names(scan(fpga, tmp_path))] == [False]
    assert AF_NLB0 not in [name for name, _, _ in names(scan(fpga, tmp_path))]


def test_a_removed_card_is_not_published(tmp_path: Path) -> None:
    fpga, card = plugin(), one_port(tmp_path)
    scan(fpga, tmp_path)
    shutil.rmtree(card.pci)
    assert scan(fpga, tmp_path) == []
    assert recall({}, read(Host(tmp_path), afus=True)) == {}


# Devices that cannot be read.


def test_prepare_and_scan_read_the_hardware_once(tmp_path: Path) -> None:
    reads: list[str] = []

    class Recording(Host):
        def raw_text(self, path: str) -> str:
            reads.append(path)
            return super().raw_text(path)

    two_ports(tmp_path)
    fpga, host = plugin(), Recording(tmp_path)
    fpga.prepare(host)
    first = devices(list(fpga.scan(host)))
    afu_ids = [path for path in reads if path.endswith("/afu_id")]
    assert len(afu_ids) == len(set(afu_ids)) == len(first) == 2
    assert devices(list(fpga.scan(host))) == first
    assert len([path for path in reads if path.endswith("/afu_id")]) == 4


@pytest.mark.parametrize("mode", ["af", "region"])
def test_an_unreadable_device_keeps_its_resource_unhealthy_and_affects_no_other(tmp_path: Path, mode: str) -> None:
    fpga = plugin(mode)
    one_port(tmp_path)
    second = Card(tmp_path, address="0000:82:00.0")
    function(second)
    class_device(second, 50)
    fme(second, 50, number=1)
    port(second, 50, NLB3, number=1)
    before = names(scan(fpga, tmp_path))
    (tmp_path / "dev/dfl-port.1").unlink()
    host = Host(tmp_path)
    fpga.prepare(host)
    found = list(fpga.scan(host))
    assert names(found) == [(*before[0][:2], True), (*before[1][:2], False)]
    problem = "/dev/dfl-port.1: no such device node"
    assert [device.reason for device in devices(found)] == ["", problem]
    assert skipped(found) == {}
    assert host.notes == [f"{before[1][1]} is unhealthy: {problem}"]
    write(tmp_path / "dev/dfl-port.1", "")
    assert names(scan(fpga, tmp_path)) == before


def test_a_device_that_was_never_readable_is_skipped_with_the_reason(tmp_path: Path) -> None:
    card = two_ports(tmp_path)
    port(card, 0, "nonsense", number=1, inside=1)
    found = scan(plugin(), tmp_path)
    assert [name for _, name, _ in names(found)] == ["dfl-port.0"]
    assert "'nonsense': expected 32 hexadecimal digits" in skipped(found)["dfl-port.1"]


def test_regions_do_not_depend_on_the_functions_in_their_ports(tmp_path: Path) -> None:
    card = one_port(tmp_path)
    port(card, afu="nonsense")
    for mode in ("region", "regiondevel"):
        assert names(scan(plugin(mode), tmp_path)) == [(REGION, "dfl-fme.0", True)]


def test_a_region_with_an_unreadable_known_port_is_unhealthy(tmp_path: Path) -> None:
    fpga = plugin("region")
    two_ports(tmp_path)
    scan(fpga, tmp_path)
    (tmp_path / "dev/dfl-port.1").unlink()
    (device,) = devices(scan(fpga, tmp_path))
    assert (device.healthy, nodes(device)) == (False, ["dfl-port.0", "dfl-port.1"])


def test_repeated_scans_return_equal_devices(tmp_path: Path) -> None:
    fpga, card = plugin(), with_vf(tmp_path)
    scan(fpga, tmp_path)
    for change in (
        lambda: port(card, afu=CRASHED),
        (tmp_path / "dev/dfl-port.1").unlink,
        lambda: port(card, afu=NLB3),
    ):
        change()
        host = Host(tmp_path)
        fpga.prepare(host)
        found = list(fpga.scan(host))
        assert list(fpga.scan(Host(tmp_path))) == found
        assert scan(fpga, tmp_path) == found


def test_metrics_show_the_mode_and_the_ports(tmp_path: Path) -> None:
    two_ports(tmp_path)
    for mode in ("af", "region", "regiondevel"):
        fpga = plugin(mode)
        samples = fpga.measure(Host(tmp_path), devices(scan(fpga, tmp_path)))
        values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
        assert values == {
            ("fpga_mode", "af"): mode == "af",
            ("fpga_mode", "region"): mode == "region",
            ("fpga_mode", "regiondevel"): mode == "regiondevel",
            ("fpga_ports", "dfl-fme.0"): 2,
        }
    assert list(plugin().measure(Host(tmp_path), ())) == []


# The command.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "afu"}, "invalid value for mode, valid values: af, region, regiondevel; found 'afu'"),
        (
            {"resource-naming": "short"},
            "invalid value for resource-naming, valid values: default, legacy63; found 'short'",
        ),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, str], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        FpgaConfig.of(options)


def test_the_default_node_name_is_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "one")
    assert FpgaConfig().node_name == "one"
    assert FpgaConfig(node_name="two").node_name == "two"


def test_the_command_does_not_start_without_a_driver(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [f"-root={tmp_path}", f"-kubelet-dir={tmp_path}"]
    assert dropin("intel_fpga_device_plugin", FpgaPlugin, "fpga", arguments, absence=FpgaPlugin.absence) == 1
    message = capfd.readouterr().err
    assert message.startswith("intel_fpga_device_plugin: no FPGA driver: neither /sys/class/fpga (OPAE) nor ")
    assert "/sys/class/fpga_region (DFL) exists" in message
    assert FpgaPlugin(FpgaConfig(wait_for_driver=True)).absence(Host(tmp_path)) == ""
    (tmp_path / "sys/class/fpga").mkdir(parents=True)
    assert FpgaPlugin().absence(Host(tmp_path)) == ""


def test_the_command_prints_devices_also_without_a_driver(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["intel_fpga_device_plugin", f"-root={tmp_path}", "-check", "-node-name="])
    with pytest.raises(SystemExit) as end:
        dropins.fpga()
    assert end.value.code == 1
    assert "no FPGA driver: neither /sys/class/fpga (OPAE)" in capfd.readouterr().out
