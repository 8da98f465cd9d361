"""Readings of NPU, DSA, IAA, DLB, QAT and FPGA devices."""

from pathlib import Path

import pytest
from readingplans import BUS, FME, FUNCTION, IDXD, QAT, TABLES, accessed, build, read, reset_access, texts

from accelplane.readings import DevicePlan, dfl, nic, npu, offload, qat

pytestmark = pytest.mark.memory


def test_files_of_an_npu_become_samples(tmp_path: Path) -> None:
    files = {"npu_busy_time_us": "1500000", "npu_memory_utilization": "4096", "npu_current_frequency_mhz": "0"}
    host = build(tmp_path, {f"{FUNCTION}/{name}": f"{text}\n" for name, text in files.items()})
    assert texts(npu.sources(host, FUNCTION), host) == {
        "npu_busy_seconds_total": 1.5, "npu_memory_bytes": 4096, 'npu_frequency_hertz{kind="actual"}': 0,
    }  # fmt: skip


def test_files_of_dsa_become_samples_of_device_and_queue(tmp_path: Path) -> None:
    host = build(tmp_path, {f"{BUS}/dsa0/{name}": f"{text}\n" for name, text in IDXD.items()})
    queue = '{unit="wq0.1",mode="shared",type="user"}'
    assert texts(offload.idxd(host, BUS, "dsa0", ["wq0.1"]), host) == {
        "idxd_device_enabled": 1, "idxd_device_clients": 2, "idxd_device_command_status": 0, "idxd_device_error": 0,
        "idxd_engines": 2, f"idxd_queue_entries{queue}": 3, f"idxd_queue_size{queue}": 16,
        f"idxd_queue_clients{queue}": 1, f"idxd_queue_enabled{queue}": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "value"),
    [
        ("00000000,00000000,00000000,00000000,00000000,00000000,00000000,00000001\n", 1),
        ("00000001,00000000,00000000,00000000,00000000,00000000,00000000,00000000\n", 0),
        ("00000000,00000000,00000000,00000000,00000000,00000000,ffffffff,ffffffff\n", None),
        ("00000000,00000000,00000000,00000000,00000000,00000000,00000001,ffffffff\n", 1),
        ("0xffffffffffffffff 0x0 0x0 0x0", None),
        ("0,0,0,0", None),
        ("0x1 0x0 0x0 0x0", 1),
        ("0000000000000000 0 0 0", 0),
        ("0x0 0x0", None),
        ("a b c zz", None),
    ],
)
def test_the_error_of_dsa_is_the_first_word_of_its_register(tmp_path: Path, errors: str, value: float | None) -> None:
    host = build(tmp_path, {f"{BUS}/dsa0/errors": errors})
    assert texts(offload.idxd(host, BUS, "dsa0", []), host) == ({} if value is None else {"idxd_device_error": value})


def test_files_of_dlb_become_samples_by_resource(tmp_path: Path) -> None:
    files = {"total_resources/num_ldb_queues": "32", "avail_resources/num_ldb_queues": "30", "avail_resources/x": "1"}
    host = build(tmp_path, {f"{FUNCTION}/{name}": text for name, text in files.items()})
    assert texts(offload.dlb(host, FUNCTION), host) == {
        'dlb_resources{resource="ldb_queues"}': 32, 'dlb_resources_available{resource="ldb_queues"}': 30,
    }  # fmt: skip


RAS = {'qat_errors_total{severity="fatal"}': 2.0}


def test_files_of_qat_become_samples_of_all_engines(tmp_path: Path) -> None:
    host = build(tmp_path, QAT)
    assert texts(qat.sources(host, FUNCTION, TABLES), host) == {
        "qat_up": 1, "qat_requests_total": 15, "qat_responses_total": 14, "qat_heartbeat_queries_total": 7,
        'qat_bandwidth_bytes_per_second{direction="in"}': 250_000, 'qat_latency_seconds{kind="read-max"}': 5e-7,
        'qat_slice_utilization_ratio{slice="cpr0"}': 0.5, 'qat_slice_executions{slice="cpr0"}': 9, **RAS,
    }  # fmt: skip


def test_tables_of_a_qat_device_that_is_down_are_not_opened(tmp_path: Path) -> None:
    host = build(tmp_path, {**QAT, f"{FUNCTION}/qat/state": "down\n"})
    tables = [path for path in QAT if path.startswith(TABLES)]
    reset_access(host, tables)
    assert texts(qat.sources(host, FUNCTION, TABLES), host) == {"qat_up": 0, **RAS}
    assert accessed(host, tables) == set()


def test_telemetry_that_is_switched_off_is_not_read(tmp_path: Path) -> None:
    host = build(tmp_path, {**QAT, f"{TABLES}/telemetry/control": "0\n"})
    reset_access(host, tables := [f"{TABLES}/telemetry/{name}" for name in ("control", "device_data")])
    found = texts(qat.sources(host, FUNCTION, TABLES), host)
    assert accessed(host, tables) == {tables[0]}
    assert not [name for name in found if "slice" in name or "latency" in name]
    assert found["qat_requests_total"] == 15


@pytest.mark.parametrize(
    ("rows", "requests"),
    [("0: 10 9\n1: 5\n", 10), ("0: 10 9\n0: 5 5\n", 10), (f"0: 10 9\n1: {10**25} 1\n", 10), ("AE\n", None)],
)
def test_invalid_lines_of_firmware_counters_are_omitted(tmp_path: Path, rows: str, requests: float | None) -> None:
    host = build(tmp_path, {**QAT, f"{TABLES}/fw_counters": f"AE   Requests   Responses\n{rows}"})
    sources = tuple(qat.sources(host, FUNCTION, TABLES))
    assert texts(sources, host).get("qat_requests_total") == requests
    outcomes = read(DevicePlan(device="d", units=("d",), sources=sources), host).outcomes
    assert outcomes["invalid"] == 1


PORT = f"{FUNCTION}/fpga_region/region0/dfl-port.0"


def test_files_of_dfl_become_samples_of_sensors_registers_and_ports(tmp_path: Path) -> None:
    host = build(
        tmp_path,
        {
            f"{FME}/hwmon/hwmon0/name": "dfl_fme_thermal\n",
            f"{FME}/hwmon/hwmon0/temp1_input": "52000\n",
            f"{FME}/hwmon/hwmon0/temp1_crit": "95000\n",
            f"{FME}/hwmon/hwmon0/temp1_max_alarm": "0\n",
            f"{FME}/hwmon/hwmon1/name": "dfl_fme_power\n",
            f"{FME}/hwmon/hwmon1/power1_input": "30000000\n",
            f"{FME}/errors/fme_errors": "0x3\n",
            f"{FME}/errors/pcie0_errors": "junk\n",
            f"{PORT}/errors/errors": "0x0\n",
            f"{PORT}/power_state": "2\n",
        },
    )
    assert texts(dfl.sources(host, FME, [("dfl-port.0", PORT)]), host) == {
        'device_temperature_celsius{sensor="fpga"}': 52,
        'device_temperature_limit_celsius{sensor="fpga",limit="critical"}': 95,
        'device_alarm{sensor="fpga_max"}': 0,
        'device_power_watts{sensor="fpga"}': 30,
        'fpga_error_flags{register="fme_errors"}': 2,
        'fpga_error_flags{register="dfl-port.0_errors"}': 0,
        'fpga_port_power_state{unit="dfl-port.0"}': 2,
    }


def test_alarms_of_temperature_and_power_of_an_fpga_are_two_samples(tmp_path: Path) -> None:
    files = {
        f"{FME}/hwmon/hwmon0/name": "dfl_fme_thermal\n",
        f"{FME}/hwmon/hwmon0/temp1_crit_alarm": "1\n",
        f"{FME}/hwmon/hwmon1/name": "dfl_fme_power\n",
        f"{FME}/hwmon/hwmon1/power1_crit_alarm": "1\n",
    }
    host = build(tmp_path, files)
    assert texts(dfl.sources(host, FME, []), host) == {
        'device_alarm{sensor="fpga_crit"}': 1,
        'device_alarm{sensor="fpga_power_crit"}': 1,
    }


def test_sensors_with_equal_labels_are_not_added(tmp_path: Path) -> None:
    hwmon = f"{FUNCTION}/hwmon"
    files = {
        f"{hwmon}/hwmon0/temp1_label": "PHY temp.", f"{hwmon}/hwmon0/temp1_input": "45000",
        f"{hwmon}/hwmon0/temp2_label": "PHY  temp", f"{hwmon}/hwmon0/temp2_input": "50000",
        f"{hwmon}/hwmon0/temp2_max": "90000",
        f"{hwmon}/hwmon0/in0_label": "PHY temp.", f"{hwmon}/hwmon0/in0_input": "900",
        f"{hwmon}/hwmon1/temp1_label": "x" * 40, f"{hwmon}/hwmon1/temp1_input": "1000",
        f"{hwmon}/hwmon2/temp1_label": "x" * 32, f"{hwmon}/hwmon2/temp1_input": "2000",
        f"{hwmon}/hwmon3/temp1_label": "phy_temp_2", f"{hwmon}/hwmon3/temp1_input": "3000",
    }  # fmt: skip
    host = build(tmp_path, files)
    assert texts(nic.sources(host, FUNCTION), host) == {
        'device_temperature_celsius{sensor="phy_temp"}': 45,
        'device_temperature_celsius{sensor="phy_temp_2"}': 50,
        'device_temperature_limit_celsius{sensor="phy_temp_2",limit="max"}': 90,
        'device_voltage_volts{sensor="phy_temp"}': 0.9,
        f'device_temperature_celsius{{sensor="{"x" * 32}"}}': 1,
        f'device_temperature_celsius{{sensor="{"x" * 30}_2"}}': 2,
        'device_temperature_celsius{sensor="phy_temp_2_2"}': 3,
    }
