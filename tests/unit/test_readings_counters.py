"""Files that appear and disappear: open files of work queues, and NICs with and without interfaces."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from accelplane.devices import Inventory
from accelplane.host import Host
from accelplane.node.units import complete
from accelplane.pages.device_reader import DeviceReader, DeviceReading
from accelplane.plugins.onload import OnloadPlugin
from accelplane.readings import DevicePlan, families, nic, offload
from accelplane.readings.values import labels

QUEUE = "/sys/bus/dsa/devices/dsa0/wq0.1"
NIC = "/sys/bus/pci/devices/0000:03:00.0"


def build(root: Path, files: Mapping[str, str]) -> Host:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root)


def samples(reading: DeviceReading, prefix: str) -> dict[str, float]:
    """The values of families whose names begin so, by the labels beside those of the device."""
    device = f"{{{labels(plugin=reading.plugin, device=reading.device)}"
    lines = [line for family, found in reading.lines.items() if family is not families.INFO for line in found]
    parts = (line.replace(f"{device},", "{").replace(device, "{").rpartition(" ") for line in lines)
    found = {series.removeprefix("accelplane_"): float(value) for series, _, value in parts}
    return {series: value for series, value in found.items() if series.startswith(prefix)}


class Faults:
    """A work queue, whose open files a test sets."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / QUEUE.lstrip("/") / "dsa!wq0.1"
        build(root, {f"{QUEUE}/state": "enabled\n", f"{QUEUE}/mode": "shared\n", f"{QUEUE}/type": "user\n"})
        self.directory.mkdir()
        self.reader = self.plan()

    def plan(self) -> DeviceReader:
        sources = tuple(offload.idxd(Host(self.root), "/sys/bus/dsa/devices", "dsa0", ["wq0.1"]))
        return DeviceReader("dsa", DevicePlan(device="dsa0", units=("wq0.1",), sources=sources))

    def set(self, **files: tuple[int, int]) -> None:
        shutil.rmtree(self.directory)
        self.directory.mkdir()
        for name, (resolved, failed) in files.items():
            texts = {"cr_faults": resolved, "cr_fault_failures": failed, "pid": 7}
            build(self.directory, {f"{name}/{key}": f"{value}\n" for key, value in texts.items()})

    def read(self) -> tuple[float, float]:
        found = samples(self.reader.read(Host(self.root), "auto", 0.0, held=True), "idxd_completion")
        return tuple(  # type: ignore[return-value]
            found.get(f'idxd_completion_faults_total{{unit="wq0.1",outcome="{outcome}"}}', 0.0)
            for outcome in ("resolved", "failed")
        )


def test_completion_faults_are_the_sum_of_open_files_and_never_go_down(tmp_path: Path) -> None:
    queue = Faults(tmp_path)
    assert queue.read() == (0, 0)
    queue.set(file0=(3, 1), file1=(2, 0))
    assert queue.read() == (5, 1)
    queue.set(file1=(4, 0))  # the first file was closed
    assert queue.read() == (7, 1)
    queue.set()
    assert queue.read() == (7, 1)
    queue.set(file1=(1, 1), junk=(100, 100))  # another file of the same name
    assert queue.read() == (8, 2)
    queue.set(file1=(1, 1))
    assert queue.read() == (8, 2)


def test_completion_faults_survive_a_new_plan(tmp_path: Path) -> None:
    queue = Faults(tmp_path)
    queue.set(file0=(3, 1))
    queue.read()
    earlier, queue.reader = queue.reader, queue.plan()
    queue.reader.adopt(earlier)
    queue.set(file0=(5, 1))
    assert queue.read() == (5, 1)


def test_invalid_completion_faults_are_counted_and_not_added(tmp_path: Path) -> None:
    queue = Faults(tmp_path)
    queue.set(file0=(3, 1))
    build(queue.directory, {"file0/cr_faults": "many\n"})
    reading = queue.reader.read(Host(tmp_path), "auto", 0.0, held=True)
    assert reading.outcomes["invalid"] == 1
    assert queue.read() == (0, 1)


def test_completion_faults_are_not_counted_again_after_a_reading_that_fails(tmp_path: Path) -> None:
    queue = Faults(tmp_path)
    queue.set(file0=(3, 1))
    assert queue.read() == (3, 1)
    away = queue.directory.with_name("away")
    queue.directory.rename(away)  # the directory cannot be listed
    assert queue.read() == (3, 1)
    away.rename(queue.directory)
    assert queue.read() == (3, 1)
    for text in ("many\n", ""):
        build(queue.directory, {"file0/cr_faults": text})
        assert queue.read() == (3, 1)
    queue.set(file0=(4, 1))
    assert queue.read() == (4, 1)
    file = queue.directory / "file0/cr_faults"
    file.unlink()
    file.mkdir()  # reading it fails
    assert queue.read() == (4, 1)
    queue.set(file0=(6, 1))
    assert queue.read() == (6, 1)


NIC_FILES = {
    f"{NIC}/vendor": "0x1924\n", f"{NIC}/device": "0x0b03\n", f"{NIC}/class": "0x020000\n",
    f"{NIC}/hwmon/hwmon3/name": "sfc\n", f"{NIC}/hwmon/hwmon3/temp1_input": "51000\n",
    f"{NIC}/hwmon/hwmon3/temp1_label": "PHY temp.\n", f"{NIC}/hwmon/hwmon3/temp1_crit": "105000\n",
    f"{NIC}/hwmon/hwmon3/in1_input": "1210\n", f"{NIC}/hwmon/hwmon3/curr1_input": "2500\n",
    f"{NIC}/hwmon/hwmon3/power1_input": "7000000\n", f"{NIC}/hwmon/hwmon3/temp1_alarm": "0\n",
}  # fmt: skip
STATISTICS = {
    f"{NIC}/net/sfc0/statistics/rx_bytes": "1000\n", f"{NIC}/net/sfc0/statistics/tx_bytes": "2000\n",
    f"{NIC}/net/sfc0/statistics/rx_packets": "10\n", f"{NIC}/net/sfc0/statistics/tx_dropped": "1\n",
    f"{NIC}/net/sfc0/statistics/rx_errors": "4\n", f"{NIC}/net/sfc0/carrier_changes": "3\n",
    f'{NIC}/net/bad"name/carrier_changes': "5\n",
}  # fmt: skip


def test_sensors_of_nics_need_no_interface_and_statistics_do(tmp_path: Path) -> None:
    sensors = {
        'device_temperature_celsius{sensor="phy_temp"}': 51,
        'device_temperature_limit_celsius{sensor="phy_temp",limit="critical"}': 105,
        'device_voltage_volts{sensor="in1"}': 1.21,
        'device_current_amperes{sensor="curr1"}': 2.5,
        'device_power_watts{sensor="power1"}': 7,
        'device_alarm{sensor="phy_temp"}': 0,
    }
    statistics = {
        'nic_bytes_total{interface="sfc0",direction="receive"}': 1000,
        'nic_bytes_total{interface="sfc0",direction="transmit"}': 2000,
        'nic_packets_total{interface="sfc0",direction="receive"}': 10,
        'nic_errors_total{interface="sfc0",direction="receive"}': 4,
        'nic_drops_total{interface="sfc0",direction="transmit"}': 1,
        'nic_carrier_changes_total{interface="sfc0"}': 3,
        'nic_carrier_changes_total{interface="bad\\"name"}': 5,
    }
    for files, expected in ((NIC_FILES, sensors), (STATISTICS, sensors | statistics)):
        host = build(tmp_path, files)
        plan = DevicePlan(device="nic", units=(), sources=tuple(nic.sources(host, NIC)))
        reading = DeviceReader("onload", plan).read(host, "auto", 0.0, held=False)
        assert samples(reading, "") == expected


def test_onload_reads_the_functions_of_its_driver(tmp_path: Path) -> None:
    host = build(tmp_path, NIC_FILES)
    plugin = OnloadPlugin()
    inventory = Inventory.of(plugin._shares("", None))
    assert not list(plugin.readings(host, inventory)), "no driver uses the function"
    drivers = tmp_path / "sys/bus/pci/drivers/sfc"
    drivers.mkdir(parents=True)
    (tmp_path / NIC.lstrip("/") / "driver").symlink_to(drivers)
    [plan] = complete(Host(tmp_path), plugin.readings(Host(tmp_path), inventory), inventory)
    assert (plan.device, plan.bdf, list(plan.units)) == ("0000:03:00.0", "0000:03:00.0", ["sfc"])
    assert (plan.facts["driver"], plan.facts["kind"]) == ("sfc", "nic")
    assert families.TEMPERATURE in {value.family for source in plan.sources for value in _parsed(source, host)}
    other = str(tmp_path / NIC.lstrip("/")).replace("03:00.0", "03:00.1")
    shutil.copytree(tmp_path / NIC.lstrip("/"), other, symlinks=True)
    assert [list(each.units) for each in plugin.readings(Host(tmp_path), inventory)] == [[], []]


def _parsed(source: object, host: Host) -> list[object]:
    text = host.text(source.path)  # type: ignore[attr-defined]
    return list(source.parse(text))  # type: ignore[attr-defined]
