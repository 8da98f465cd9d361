"""Trees of sysfs, and the samples that a plan reads from them."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from accelplane.host import Host
from accelplane.pages.device_reader import DeviceReader, DeviceReading
from accelplane.readings import DevicePlan, Source, families

BDF = "0000:03:00.0"
FUNCTION = f"/sys/devices/pci0000:00/{BDF}"

# No numbers, or values of registers that cannot be read.
HOSTILE: Sequence[str | bytes] = (
    "-1", "0xffffffff", "18446744073709551615", "1" + 40 * "0", "", b"\0", 70_000 * "1", b"\xe9\xff", "nan", "1e999",
    "12 34", "0x", "+", "٣",
)  # fmt: skip


def build(root: Path, files: Mapping[str, str | bytes]) -> Host:
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Host(root)


def reset_access(host: Host, paths: Iterable[str]) -> None:
    """With relatime, a read updates the time of access only if it is older than the modification."""
    for path in paths:
        os.utime(host.local(path), ns=(0, os.stat(host.local(path)).st_mtime_ns))


def accessed(host: Host, paths: Iterable[str]) -> set[str]:
    """The files that have been read since `reset_access`."""
    return {path for path in paths if os.stat(host.local(path)).st_atime_ns != 0}


def read(plan: DevicePlan, host: Host, mode: str = "auto", *, in_use: bool = True) -> DeviceReading:
    return DeviceReader("gpu", plan).read(host, mode, 1000.0, held=in_use)


def samples(reading: DeviceReading) -> dict[str, float]:
    """Samples by name and labels, without the labels of the device and without its description."""
    found: dict[str, float] = {}
    for family, lines in reading.lines.items():
        if family is families.INFO:
            continue
        for line in lines:
            name, _, value = line.rpartition(" ")
            name = name.replace(f'plugin="gpu",device="card0",bdf="{BDF}"', "").replace("{,", "{").replace("{}", "")
            found[name.removeprefix("accelplane_")] = float(value)
    return found


def texts(sources: Iterable[Source], host: Host) -> dict[str, float]:
    """As `samples`, of sources without a PCI function."""
    return samples(read(DevicePlan(device="card0", units=("card0",), bdf=BDF, sources=tuple(sources)), host))


BUS = "/sys/bus/dsa/devices"
IDXD = {
    "state": "enabled", "clients": "2", "cmd_status": "0x0", "errors": "0x0 0x0 0x0 0x0", "engine0.0/group_id": "0",
    "engine0.1/group_id": "-1", "engine0.2/group_id": "1", "wq0.1/state": "enabled", "wq0.1/mode": "shared",
    "wq0.1/type": "user", "wq0.1/size": "16", "wq0.1/clients": "1", "wq0.1/occupancy": "3",
}  # fmt: skip


TABLES = "/sys/kernel/debug/qat_4xxx_0000:6b:00.0"
QAT = {
    f"{FUNCTION}/qat/state": "up\n",
    f"{FUNCTION}/qat_ras/errors_fatal": "2\n",
    f"{TABLES}/fw_counters": "AE   Requests   Responses\n 0:  10  9\n 1:  5  5\n",
    f"{TABLES}/heartbeat/queries_sent": "7\n",
    f"{TABLES}/telemetry/control": "1\n",
    f"{TABLES}/telemetry/device_data": "sample_cnt 8\nbw_in 2 1 3 2\nmax_rd_lat 500\nutil_cpr0 50\nexec_cpr0 9\n",
}


FME = f"{FUNCTION}/fpga_region/region0/dfl-fme.0"
