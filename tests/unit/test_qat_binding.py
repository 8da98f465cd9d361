"""The QAT plugin binds virtual functions to their driver, by its effect on the emulated kernel."""

import errno

import pytest
from kernelhost import KernelHost

from accelplane.devices import Device, Skipped
from accelplane.host.drivers import VFIO_PCI, driver_of
from accelplane.plugins.binding import RETRY_AFTER, Binder
from accelplane.plugins.qat import QatConfig, QatPlugin
from accelplane.simulate.kernel import Kernel, Uevent
from accelplane.simulate.offload import QatSpec
from accelplane.simulate.specs import NodeSpec

QATS = [QatSpec(bdf="0000:61:00.0", vfs=2), QatSpec(bdf="0000:65:00.0", vfs=2, model="c6xx")]
VF, OTHER, OLD = "0000:61:00.1", "0000:61:00.2", "0000:65:00.1"
BIND = "/sys/bus/pci/drivers/vfio-pci/bind"
NEW_ID = "/sys/bus/pci/drivers/vfio-pci/new_id"


def host_of(node: NodeSpec | None = None, events: list[Uevent] | None = None) -> KernelHost:
    kernel = Kernel(node or NodeSpec(qats=QATS), listen=events.append if events is not None else None)
    return KernelHost(kernel, [])


def drivers(host: KernelHost) -> list[str]:
    return [driver_of(host, address) for address in (VF, OTHER, OLD)]


def devices(plugin: QatPlugin, host: KernelHost) -> list[Device]:
    return [item for item in plugin.scan(host) if isinstance(item, Device)]


def test_only_functions_of_enabled_drivers_are_bound() -> None:
    host, plugin = host_of(), QatPlugin()
    plugin.prepare(host)
    assert drivers(host) == ["vfio-pci", "vfio-pci", "c6xxvf"]
    found = devices(plugin, host)
    assert [device.healthy for device in found] == [True, True]
    for device in found:
        assert all(host.kernel.exists(node.host_path) for node in device.nodes)


def test_prepare_and_scan_discover_the_functions_once() -> None:
    links: list[str] = []

    class Recording(KernelHost):
        def link(self, path: str) -> str:
            links.append(path)
            return super().link(path)

    host, plugin = Recording(host_of().kernel, []), QatPlugin()
    plugin.prepare(host)
    assert len(devices(plugin, host)) == 2
    virtfns = [path for path in links if "/virtfn" in path]
    assert len(virtfns) == len(set(virtfns)) == 2
    assert len(devices(plugin, host)) == 2  # a scan without `prepare` discovers them itself


def test_with_igb_uio_devices_have_its_nodes() -> None:
    host, plugin = host_of(NodeSpec(qats=QATS, loaded=["igb_uio"])), QatPlugin(QatConfig(dpdk_driver="igb_uio"))
    assert devices(plugin, host) == []
    plugin.prepare(host)
    found = devices(plugin, host)
    assert len(found) == 2
    for device in found:
        assert host.kernel.exists(device.nodes[0].host_path)
        assert host.kernel.exists(device.mounts[0].host_path)


def test_a_scan_without_prepare_writes_nothing() -> None:
    host, plugin = host_of(), QatPlugin()
    assert len(devices(plugin, host)) == 2
    assert host.writes == []


def test_a_scan_without_prepare_reports_why_functions_cannot_be_bound() -> None:
    host, plugin = host_of(NodeSpec(qats=QATS, loaded=["igb_uio"])), QatPlugin()
    host.kernel.unload("vfio-pci")
    (first, _second) = [item for item in plugin.scan(host) if isinstance(item, (Device, Skipped))]
    assert isinstance(first, Device)
    assert not first.healthy
    assert "the driver vfio-pci is not loaded" in first.reason
    assert host.writes == []


def test_functions_beyond_max_num_devices_keep_their_driver() -> None:
    host, plugin = host_of(), QatPlugin(QatConfig(max_num_devices=1))
    plugin.prepare(host)
    assert drivers(host) == ["vfio-pci", "4xxxvf", "c6xxvf"]


def test_bound_functions_are_not_written_again() -> None:
    events: list[Uevent] = []
    host, plugin = host_of(events=events), QatPlugin()
    plugin.prepare(host)
    events.clear()
    host.writes.clear()
    plugin.prepare(host)
    assert (events, host.writes) == ([], [])


def test_a_function_that_cannot_be_bound_is_unhealthy_and_others_are_bound() -> None:
    host, plugin = host_of(), QatPlugin()
    host.kernel.fail(f"/sys/bus/pci/devices/{VF}/driver_override", errno.EIO)
    plugin.prepare(host)
    assert drivers(host) == ["4xxxvf", "vfio-pci", "c6xxvf"]
    failing, well = devices(plugin, host)
    assert (failing.healthy, well.healthy) == (False, True)
    assert "Input/output error" in failing.reason


def test_the_denylist_of_vfio_pci_is_reported() -> None:
    host, plugin = host_of(), QatPlugin(QatConfig(kernel_vf_drivers="c6xxvf"))
    plugin.prepare(host)
    assert drivers(host) == ["4xxxvf", "4xxxvf", "c6xxvf"]
    assert "disable_denylist=1" in devices(plugin, host)[0].reason


def test_a_missing_driver_is_reported_until_it_is_loaded() -> None:
    host = host_of(NodeSpec(qats=QATS, loaded=[]))
    binder = Binder(VFIO_PCI)
    binder.bind(host, [VF])
    assert "vfio-pci is not loaded" in binder.problems[VF]
    host.kernel.load("vfio-pci")
    binder.bind(host, [VF])
    assert binder.problems == {}
    assert driver_of(host, VF) == "vfio-pci"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_failed_bind_is_retried_after_a_delay_although_its_uevents_request_scans() -> None:
    time, events = Clock(), list[Uevent]()
    host = host_of(events=events)
    binder = Binder(VFIO_PCI, clock=time)
    host.kernel.fail(BIND, errno.EINVAL)
    binder.bind(host, [VF, OTHER])
    problems = binder.problems
    assert problems.keys() == {VF, OTHER}
    assert events
    events.clear()
    time.now += RETRY_AFTER - 1
    binder.bind(host, [VF, OTHER])
    assert (events, binder.problems) == ([], problems)
    host.kernel.clear_faults()
    time.now += 1
    binder.bind(host, [VF, OTHER])
    assert binder.problems == {}


def test_a_removed_function_is_forgotten() -> None:
    host = host_of()
    binder = Binder(VFIO_PCI, clock=Clock())
    host.kernel.fail(BIND, errno.EINVAL)
    binder.bind(host, [VF])
    binder.bind(host, [])
    assert binder.problems == {}


class TestNewId:
    @pytest.mark.parametrize(
        ("drivers", "ids"), [("4xxxvf", ["4941", "4943", "4945"]), ("420xxvf,c6xxvf", ["4947", "37c9"])]
    )
    def test_ids_of_enabled_drivers_are_written_to_new_id_once(self, drivers: str, ids: list[str]) -> None:
        host = host_of()
        binder = Binder(VFIO_PCI, ids=QatConfig(kernel_vf_drivers=drivers).vf_ids)
        for _ in range(2):
            binder.bind(host, [])
        assert host.writes == [(NEW_ID, f"8086 {number}") for number in ids]

    def test_an_id_that_the_driver_knows_is_no_error(self) -> None:
        host = host_of()
        host.kernel.write(NEW_ID, "8086 4943")
        Binder(VFIO_PCI, ids=QatConfig(kernel_vf_drivers="4xxxvf").vf_ids).bind(host, [])
        assert [text for _path, text in host.writes] == ["8086 4941", "8086 4945"]
        assert host.notes == []

    def test_ids_are_written_when_the_driver_is_loaded(self) -> None:
        host = host_of(NodeSpec(qats=QATS, loaded=[]))
        binder = Binder(VFIO_PCI, ids=QatConfig(kernel_vf_drivers="420xxvf").vf_ids)
        binder.bind(host, [])
        assert "load the module of vfio-pci" in host.notes[0]
        host.kernel.load("vfio-pci")
        binder.bind(host, [])
        assert host.writes == [(NEW_ID, "8086 4947")]

    @pytest.mark.parametrize(("new_id", "written"), [("auto", False), ("always", True), ("never", False)])
    def test_the_plugin_writes_ids_at_the_start_if_they_are_always_written(self, new_id: str, written: bool) -> None:
        host = host_of()
        QatPlugin(QatConfig(new_id=new_id)).prepare(host)
        assert ((NEW_ID, "8086 4941") in host.writes) == written

    @pytest.mark.parametrize(("new_id", "bound"), [("auto", True), ("never", False)])
    def test_on_read_only_sysfs_the_result_depends_on_the_option(self, new_id: str, bound: bool) -> None:
        host, plugin = host_of(), QatPlugin(QatConfig(new_id=new_id))
        host.kernel.fail(f"/sys/bus/pci/devices/{VF}/driver_override", errno.EROFS)
        plugin.prepare(host)
        assert (driver_of(host, VF) == "vfio-pci") == bound
        assert driver_of(host, OTHER) == "vfio-pci"


async def test_health_follows_the_heartbeat() -> None:
    host, plugin = host_of(), QatPlugin()
    plugin.prepare(host)
    found = devices(plugin, host)
    unit = "0000:61:00.0"
    assert (await plugin.health(host, found))[unit].answer == "good"
    host.kernel.qat(unit).healthy = False
    verdict = (await plugin.health(host, found))[unit]
    assert (verdict.answer, verdict.reason) == ("bad", f"{unit} has no heartbeat")


def test_a_device_that_is_down_has_no_virtual_functions() -> None:
    host, plugin = host_of(), QatPlugin()
    host.kernel.write("/sys/bus/pci/devices/0000:61:00.0/qat/state", "down")
    items = list(plugin.scan(host))
    assert [item.reason for item in items if isinstance(item, Skipped)] == [
        "no virtual functions are enabled (sriov_numvfs)"
    ]
    assert len(items) == 1
