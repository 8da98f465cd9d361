"""Readings of devices of the emulated kernel, whose files answer with the errors of the real one."""

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from mountpoints import mounted_for_test

from accelplane.devices import Inventory
from accelplane.host import Host
from accelplane.pages.device_reader import DeviceReading
from accelplane.pages.readings import Readings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.plugins.idxd import DsaPlugin
from accelplane.plugins.qat import QatPlugin
from accelplane.simulate import DsaSpec, NodeSpec, QatSpec, QueueSpec
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.model import Attribute, oserror

BDF = "0000:61:00.0"
TABLES = f"/sys/kernel/debug/qat_4xxx_{BDF}"


async def readings(root: Path, name: str, plugin: Plugin[Config], count: int) -> list[tuple[DeviceReading, int, int]]:
    """Successive readings of the only device of a plugin, with the reads that were denied and that were missing."""
    source = plugin, Inventory.of(plugin.scan(Host(root)))
    now = [1000.0]
    reader = Readings(lambda: {name: source}, str(root), held=lambda: (), clock=lambda: now[0])
    found: list[tuple[DeviceReading, int, int]] = []
    for _ in range(count):
        now[0] += 2
        taken = await reader.take()
        (device,) = taken.devices
        found.append((device, taken.outcomes[name].get("denied", 0), taken.outcomes[name].get("missing", 0)))
    await reader.close()
    return found


def names(reading: DeviceReading) -> Sequence[str]:
    return sorted(family.name.removeprefix("accelplane_") for family in reading.lines)


async def test_a_table_without_permission_is_logged_once_and_health_is_unaffected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(vfs=1)]))
    kernel.tree.directory(TABLES, {"fw_counters": Attribute("AE Requests Responses\n 0: 1 1", mode=0)})
    with mounted_for_test(kernel, tmp_path) as root:
        caplog.set_level("INFO")
        found = await readings(root, "qat", QatPlugin(), 3)
        plugin, host = QatPlugin(), Host(root)
        verdicts = await plugin.health(host, list(plugin.scan(host)))
    assert all("qat_up" in names(reading) and "qat_requests_total" not in names(reading) for reading, _, _ in found)
    assert found[0][1] == 1
    messages = [message for message in caplog.messages if TABLES in message]
    assert messages == [f"qat: {TABLES}/fw_counters: permission denied; its metrics are missing"]
    assert {unit: verdict.answer for unit, verdict in verdicts.items()} == {BDF: "good"}


async def test_a_queue_without_occupancy_in_hardware_has_its_other_samples(tmp_path: Path) -> None:
    kernel = Kernel(NodeSpec(dsas=[DsaSpec(queues=[QueueSpec()])]))

    def read() -> str:
        raise oserror(errno.EOPNOTSUPP)

    kernel.tree.attribute("/sys/bus/dsa/devices/wq0.0/occupancy").read = read
    with mounted_for_test(kernel, tmp_path) as root:
        found = await readings(root, "dsa", DsaPlugin(), 2)
    queue = [name for name in names(found[0][0]) if "queue" in name]
    assert queue == ["idxd_queue_clients", "idxd_queue_enabled", "idxd_queue_size"]
    assert found[0][2] == 1
