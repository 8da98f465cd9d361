"""The reading plans of the plugins on a simulated node with every family."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import memorydirectory
import pytest
from fpgatrees import one_port
from trees import write

from accelplane.devices import Inventory
from accelplane.host import Host
from accelplane.pages.device_reader import DeviceReader
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.plugins.dlb import DlbPlugin
from accelplane.plugins.fpga import FpgaPlugin
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.plugins.idxd import DsaPlugin, IaaPlugin
from accelplane.plugins.npu import NpuPlugin
from accelplane.plugins.qat import QatPlugin
from accelplane.readings.families import FPGA_ERRORS, IDXD_ENABLED, IDXD_QUEUE_ENABLED, PCI_ERRORS, TEMPERATURE
from accelplane.simulate.offload import DlbSpec, DsaSpec, FpgaSpec, IaaSpec, QatSpec, QueueSpec
from accelplane.simulate.specs import GpuSpec, NodeSpec, NpuSpec
from accelplane.simulate.tree import SimulatedNode

NODE = NodeSpec(
    gpus=[GpuSpec(bdf="0000:03:00.0"), GpuSpec(driver="xe", bdf="0000:04:00.0")],
    npus=[NpuSpec(bdf="0000:00:0b.0")],
    qats=[QatSpec(bdf="0000:6b:00.0", vfs=2)],
    dsas=[DsaSpec(bdf="0000:6a:01.0", queues=[QueueSpec(), QueueSpec(mode="shared")])],
    iaas=[IaaSpec(index=1, bdf="0000:6a:02.0", queues=[QueueSpec()])],
    dlbs=[DlbSpec(bdf="0000:72:00.0")],
    fpgas=[FpgaSpec(bdf="0000:81:00.0")],
)


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memorydirectory.path()) as path:
        SimulatedNode(path).build(NODE)
        yield Path(path)


@pytest.mark.parametrize(
    ("plugin", "devices"),
    [
        (GpuPlugin(GpuConfig(shared_dev_num=2, enable_monitoring=True)),
         {"card0": ("0000:03:00.0", ["card0"]), "card1": ("0000:04:00.0", ["card1"])}),
        (NpuPlugin(), {"accel0": ("0000:00:0b.0", ["accel0"])}),
        (QatPlugin(), {"0000:6b:00.0": ("0000:6b:00.0", ["0000:6b:00.0"])}),
        (DsaPlugin(), {"dsa0": ("0000:6a:01.0", ["wq0.0", "wq0.1"])}),
        (IaaPlugin(), {"iax1": ("0000:6a:02.0", ["wq1.0"])}),
        (DlbPlugin(), {"dlb0": ("0000:72:00.0", ["/dev/dlb0"])}),
        (FpgaPlugin(), {"dfl-fme.0": ("0000:81:00.0", ["dfl-port.0"])}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Plugin) else "",
)  # fmt: skip
def test_every_physical_device_is_read_once_with_its_units(
    root: Path, plugin: Plugin[Config], devices: dict[str, tuple[str, list[str]]]
) -> None:
    host = Host(root)
    plugin.prepare(host)
    inventory = Inventory.of(plugin.scan(host))
    plans = list(plugin.readings(Host(root), inventory))
    assert {plan.device: (plan.bdf, list(plan.units)) for plan in plans} == devices
    for plan in plans:
        reading = DeviceReader("p", plan).read(Host(root), "auto", 0.0, held=False)
        assert set(reading.outcomes) <= {"ok"}
    units = {device.unit for device in inventory} - {"all"}
    assert {unit for plan in plans for unit in plan.units} == units


def test_an_fpga_of_the_opae_driver_has_samples_of_its_errors_and_its_function(tmp_path: Path) -> None:
    card = one_port(tmp_path, "opae")
    errors = card.device(0) / card.name("fme", 0) / "errors"
    files = {"pcie0_errors": "0x1", "gbs_errors": "0x0", "fme-errors/errors": "0x7", "fme-errors/first_error": "junk"}
    for name, text in files.items():
        write(errors / name, f"{text}\n")
    write(card.device(0) / card.name("port", 0) / "errors/errors", "0x3\n")
    write(errors.parent / "thermal_mgmt/temperature", "50\n")
    write(card.pci / "aer_dev_fatal", "Undefined 2\nTOTAL_ERR_FATAL 2\n")
    host, plugin = Host(tmp_path), FpgaPlugin()
    plugin.prepare(host)
    [plan] = plugin.readings(host, Inventory.of(plugin.scan(host)))
    assert (plan.device, plan.bdf, plan.units, plan.facts["driver"]) == (
        "intel-fpga-fme.0", card.address, ("intel-fpga-port.0",), "opae",
    )  # fmt: skip
    reading = DeviceReader("fpga", plan).read(host, "auto", 0.0, held=False)
    labels = f'plugin="fpga",device="intel-fpga-fme.0",bdf="{card.address}"'
    assert reading.lines[FPGA_ERRORS] == tuple(
        f'accelplane_fpga_error_flags{{{labels},register="{register}"}} {bits}'
        for register, bits in (
            ("pcie0_errors", 1), ("gbs_errors", 0), ("fme_errors", 3), ("intel-fpga-port.0_errors", 2),
        )
    )  # fmt: skip
    assert reading.lines[PCI_ERRORS] == (f'accelplane_pci_errors_total{{{labels},severity="fatal"}} 2',)
    assert TEMPERATURE not in reading.lines
    assert reading.outcomes["invalid"] == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_devices_and_queues_that_are_not_published_are_read(tmp_path: Path, *, enabled: bool) -> None:
    queues = [QueueSpec(), QueueSpec()]
    SimulatedNode(tmp_path).build(NodeSpec(dsas=[DsaSpec(queues=queues)], iaas=[IaaSpec(index=1, queues=queues)]))
    device = tmp_path / "sys/bus/dsa/devices/dsa0"
    disabled = [device / "wq0.1"] if enabled else [device, device / "wq0.0", device / "wq0.1"]
    for path in disabled:
        (path / "state").write_text("disabled\n")
    host, plugin = Host(tmp_path), DsaPlugin()
    [plan] = plugin.readings(host, Inventory.of(plugin.scan(host)))
    assert (plan.device, plan.units) == ("dsa0", ("wq0.0",) if enabled else ())
    lines = DeviceReader("dsa", plan).read(host, "auto", 0.0, held=False).lines
    assert [line.rpartition(" ")[2] for line in lines[IDXD_ENABLED]] == [str(int(enabled))]
    assert [line.rpartition(" ")[2] for line in lines[IDXD_QUEUE_ENABLED]] == [str(int(enabled)), "0"]
