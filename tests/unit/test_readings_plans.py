"""The reading plans of the plugins on a simulated node with every family."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import memorydirectory
import pytest

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
    inventory = Inventory.of(plugin.namespace, plugin.scan(host))
    plans = list(plugin.readings(Host(root), inventory))
    assert {plan.device: (plan.bdf, list(plan.units)) for plan in plans} == devices
    for plan in plans:
        reading = DeviceReader("p", plan).read(Host(root), "auto", 0.0, held=False)
        assert set(reading.outcomes) <= {"ok"}
    units = {device.unit for device in inventory} - {"all"}
    assert {unit for plan in plans for unit in plan.units} == units
