"""One file at a time: the samples of each file that is read, with their units. Paths are relative to the device."""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from readingplans import HOSTILE
from trees import write

from accelplane.host import Host
from accelplane.pages.device_reader import DeviceReader, DeviceReading
from accelplane.pages.exposition import render
from accelplane.pages.hardware_metrics import hardware
from accelplane.pages.readings import NodeReadings
from accelplane.readings import DevicePlan, InvalidText, Source, dfl, families, gpu, nic, npu, offload, pci, qat
from accelplane.readings.values import number

pytestmark = pytest.mark.memory

FUNCTION = "/sys/devices/pci0000:00/0000:03:00.0"
CARD = f"{FUNCTION}/drm/card0"
TABLES = "/sys/kernel/debug/qat_4xxx_0000:03:00.0"
BUS = "/sys/bus/dsa/devices"
FME, PORT = (f"{FUNCTION}/fpga_region/region0/{name}" for name in ("dfl-fme.0", "dfl-port.0"))
DSA = f"{BUS}/dsa0"

Samples = Mapping[str, float]

# The sources of each kind of device, its directory, and files that other files need.
KINDS: Mapping[str, tuple[Callable[[Host], Iterable[Source]], str, Mapping[str, str]]] = {
    "pci": (lambda host: pci.sources(host, FUNCTION), FUNCTION, {}),
    "i915": (lambda host: gpu.sources(host, CARD, FUNCTION), FUNCTION, {"hwmon/hwmon0/name": "i915"}),
    "i915_gt1": (lambda host: gpu.sources(host, CARD, FUNCTION), FUNCTION, {"hwmon/hwmon0/name": "i915_gt1"}),
    "xe": (lambda host: gpu.sources(host, CARD, FUNCTION), FUNCTION, {"hwmon/hwmon0/name": "xe"}),
    "npu": (lambda host: npu.sources(host, FUNCTION), FUNCTION, {}),
    "qat": (lambda host: qat.sources(host, FUNCTION, ""), FUNCTION, {}),
    "qat debugfs": (lambda host: qat.sources(host, FUNCTION, TABLES), TABLES, {f"{FUNCTION}/qat/state": "up"}),
    "telemetry": (
        lambda host: qat.sources(host, FUNCTION, TABLES),
        f"{TABLES}/telemetry",
        {f"{FUNCTION}/qat/state": "up", "control": "1"},
    ),
    "dsa": (lambda host: offload.idxd(host, BUS, "dsa0", ["wq0.1"]), DSA, {}),
    "queue": (
        lambda host: offload.idxd(host, BUS, "dsa0", ["wq0.1"]), f"{DSA}/wq0.1",
        {"mode": "shared", "type": "user"},
    ),
    "dlb": (lambda host: offload.dlb(host, FUNCTION), FUNCTION, {}),
    "fme": (lambda host: dfl.sources(host, FME, []), FME, {"hwmon/hwmon0/name": "dfl_fme_thermal"}),
    "fme power": (lambda host: dfl.sources(host, FME, []), FME, {"hwmon/hwmon0/name": "dfl_fme_power"}),
    "port": (lambda host: dfl.sources(host, FME, [("dfl-port.0", PORT)]), PORT, {}),
    "nic": (lambda host: nic.sources(host, FUNCTION), FUNCTION, {"hwmon/hwmon0/name": "sfc"}),
}  # fmt: skip

QUEUE = 'unit="wq0.1",mode="shared",type="user"'


def limit(sensor: str, name: str) -> str:
    return f'device_power_limit_watts{{sensor="{sensor}",limit="{name}"}}'


def throttled(gt: str, reason: str) -> str:
    return f'gpu_throttled{{gt="{gt}",reason="{reason}"}}'


ROWS: list[tuple[str, str, str, Samples]] = [
    *(
        ("pci", f"aer_dev_{severity}", f"DLP 2\nPoisoned TLP 1\nTOTAL_ERR_{total} 4", {
            f'pci_errors_total{{severity="{severity}"}}': 3, f'pci_error_messages_total{{severity="{severity}"}}': 4})
        for severity, total in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL"))
    ),
    ("pci", "current_link_speed", "16.0 GT/s PCIe", {"pci_link_transfers_per_second": 16e9}),
    ("pci", "max_link_speed", "32 GT/s", {"pci_link_max_transfers_per_second": 32e9}),
    ("pci", "current_link_width", "8", {"pci_link_lanes": 8}),
    ("pci", "max_link_width", "16", {"pci_link_max_lanes": 16}),
    ("pci", "current_link_width", "0", {}),
    ("pci", "max_link_width", "255", {}),
    ("pci", "power/runtime_active_time", "1500", {'device_runtime_seconds_total{state="active"}': 1.5}),
    ("pci", "power/runtime_suspended_time", "250", {'device_runtime_seconds_total{state="suspended"}': 0.25}),
    ("i915", "hwmon/hwmon0/energy1_input", "2000000", {'device_energy_joules_total{sensor="card"}': 2}),
    ("i915_gt1", "hwmon/hwmon0/energy1_input", "500000", {'device_energy_joules_total{sensor="gt1"}': 0.5}),
    ("i915", "hwmon/hwmon0/power1_max", "120000000", {limit("card", "sustained"): 120}),
    ("i915", "hwmon/hwmon0/power1_max", "0", {}),
    ("i915", "hwmon/hwmon0/power1_rated_max", "150000000", {limit("card", "rated"): 150}),
    ("i915", "hwmon/hwmon0/power1_crit", "300000000", {limit("card", "critical"): 300}),
    ("i915", "hwmon/hwmon0/in0_input", "920", {'device_voltage_volts{sensor="in0"}': 0.92}),
    ("i915", "hwmon/hwmon0/temp1_input", "45500", {'device_temperature_celsius{sensor="package"}': 45.5}),
    *(("i915", f"hwmon/hwmon0/fan{n}_input", "1200", {f'device_fan_rpm{{sensor="fan{n}"}}': 1200}) for n in (1, 2, 3)),
    ("xe", "hwmon/hwmon0/energy1_input", "1000000", {'device_energy_joules_total{sensor="card"}': 1}),
    ("xe", "hwmon/hwmon0/energy2_input", "3000000", {'device_energy_joules_total{sensor="package"}': 3}),
    *(
        ("xe", f"hwmon/hwmon0/power{n}_{attribute}", "200000000", {limit(sensor, name): 200})
        for n, sensor in ((1, "card"), (2, "package"))
        for attribute, name in (("max", "sustained"), ("cap", "burst"), ("rated_max", "rated"), ("crit", "critical"))
    ),
    ("xe", "hwmon/hwmon0/in1_input", "750", {'device_voltage_volts{sensor="in1"}': 0.75}),
    ("xe", "hwmon/hwmon0/temp2_input", "61000", {'device_temperature_celsius{sensor="package"}': 61}),
    ("xe", "hwmon/hwmon0/temp3_input", "70000", {'device_temperature_celsius{sensor="vram"}': 70}),
    ("xe", "hwmon/hwmon0/fan1_input", "900", {'device_fan_rpm{sensor="fan1"}': 900}),
    *(
        ("i915", f"drm/card0/{pattern.format(short)}", "600", {f'gpu_frequency_hertz{{gt="{gt}",kind="{kind}"}}': 6e8})
        for pattern, gt in (("gt/gt1/rps_{}_freq_mhz", "gt1"), ("gt_{}_freq_mhz", "gt0"))
        for short, kind in (("act", "actual"), ("cur", "requested"), ("max", "max"), ("RP0", "hardware-max"))
    ),
    ("i915", "drm/card0/gt/gt0/rc6_residency_ms", "2500", {'gpu_idle_seconds_total{gt="gt0"}': 2.5}),
    ("i915", "drm/card0/gt/gt0/throttle_reason_status", "0", {throttled("gt0", "any"): 0}),
    *(
        ("xe", f"tile0/gt0/freq0/{short}_freq", "600", {f'gpu_frequency_hertz{{gt="gt0",kind="{kind}"}}': 6e8})
        for short, kind in (("act", "actual"), ("cur", "requested"), ("max", "max"), ("rp0", "hardware-max"))
    ),
    ("xe", "tile1/gt1/gtidle/idle_residency_ms", "90", {'gpu_idle_seconds_total{gt="gt1"}': 0.09}),
    ("xe", "tile0/gt0/freq0/throttle/status", "1", {throttled("gt0", "any"): 1}),
    ("xe", "tile0/gt0/freq0/throttle/reasons", "pl1", {throttled("gt0", "any"): 1, throttled("gt0", "pl1"): 1}),
    ("xe", "gpu_health", "critical", {f'gpu_health{{state="{state}"}}': float(state == "critical")
                                      for state in ("ok", "warning", "critical")}),
    ("i915", "lmem_total_bytes", "17179869184", {"gpu_memory_size_bytes": 2**34}),
    ("npu", "npu_busy_time_us", "1500000", {"npu_busy_seconds_total": 1.5}),
    ("npu", "npu_memory_utilization", "4096", {"npu_memory_bytes": 4096}),
    ("npu", "npu_current_frequency_mhz", "0", {'npu_frequency_hertz{kind="actual"}': 0}),
    ("npu", "npu_max_frequency_mhz", "1400", {'npu_frequency_hertz{kind="max"}': 1.4e9}),
    ("qat", "qat/state", "up", {"qat_up": 1}),
    ("qat", "qat/state", "down", {"qat_up": 0}),
    *(
        ("qat", f"qat_ras/errors_{severity}", "2", {f'qat_errors_total{{severity="{severity}"}}': 2})
        for severity in ("correctable", "nonfatal", "fatal")
    ),
    ("qat debugfs", "fw_counters", "AE Requests Responses\n 0: 10 9\n 1: 5 5", {
        "qat_requests_total": 15, "qat_responses_total": 14}),
    ("qat debugfs", "heartbeat/queries_sent", "7", {"qat_heartbeat_queries_total": 7}),
    ("qat debugfs", "heartbeat/queries_failed", "1", {"qat_heartbeat_failures_total": 1}),
    *(
        ("telemetry", "device_data", f"{key} 500 1 900 400", sample)
        for key, sample in (
            ("max_rd_lat", {'qat_latency_seconds{kind="read-max"}': 5e-7}),
            ("rd_lat_acc_avg", {'qat_latency_seconds{kind="read-average"}': 5e-7}),
            ("max_gp_lat", {'qat_latency_seconds{kind="get-to-put-max"}': 5e-7}),
            ("gp_lat_acc_avg", {'qat_latency_seconds{kind="get-to-put-average"}': 5e-7}),
            ("bw_in", {'qat_bandwidth_bytes_per_second{direction="in"}': 62_500_000}),
            ("bw_out", {'qat_bandwidth_bytes_per_second{direction="out"}': 62_500_000}),
            ("exec_cph1", {'qat_slice_executions{slice="cph1"}': 500}),
            ("sample_cnt", {}),
        )
    ),
    ("telemetry", "device_data", "util_xlt0 50", {'qat_slice_utilization_ratio{slice="xlt0"}': 0.5}),
    ("dsa", "state", "disabled", {"idxd_device_enabled": 0}),
    ("dsa", "clients", "2", {"idxd_device_clients": 2}),
    ("dsa", "cmd_status", "0x21", {"idxd_device_command_status": 0x21}),
    ("dsa", "errors", "0x1 0x0 0x0 0x0", {"idxd_device_error": 1}),
    ("dsa", "engine0.0/group_id", "0", {"idxd_engines": 1}),
    ("dsa", "engine0.0/group_id", "-1", {"idxd_engines": 0}),
    ("queue", "state", "enabled", {f"idxd_queue_enabled{{{QUEUE}}}": 1}),
    ("queue", "size", "16", {f"idxd_queue_size{{{QUEUE}}}": 16}),
    ("queue", "clients", "1", {f"idxd_queue_clients{{{QUEUE}}}": 1}),
    ("queue", "occupancy", "3", {f"idxd_queue_entries{{{QUEUE}}}": 3}),
    ("dlb", "total_resources/num_hist_list_entries", "2048", {'dlb_resources{resource="hist_list_entries"}': 2048}),
    ("dlb", "avail_resources/num_dir_ports", "63", {'dlb_resources_available{resource="dir_ports"}': 63}),
    ("fme", "hwmon/hwmon0/temp1_input", "52000", {'device_temperature_celsius{sensor="fpga"}': 52}),
    *(
        ("fme", f"hwmon/hwmon0/temp1_{attribute}", "95000",
         {f'device_temperature_limit_celsius{{sensor="fpga",limit="{name}"}}': 95})
        for attribute, name in (("max", "max"), ("crit", "critical"), ("emergency", "emergency"))
    ),
    ("fme", "hwmon/hwmon0/temp1_max_alarm", "1", {'device_alarm{sensor="fpga_max"}': 1}),
    ("fme", "hwmon/hwmon0/temp1_crit_alarm", "0", {'device_alarm{sensor="fpga_crit"}': 0}),
    ("fme power", "hwmon/hwmon0/power1_input", "30000000", {'device_power_watts{sensor="fpga"}': 30}),
    ("fme power", "hwmon/hwmon0/power1_max", "75000000", {limit("fpga", "sustained"): 75}),
    ("fme power", "hwmon/hwmon0/power1_crit", "90000000", {limit("fpga", "critical"): 90}),
    ("fme power", "hwmon/hwmon0/power1_crit_alarm", "1", {'device_alarm{sensor="fpga_power_crit"}': 1}),
    *(
        ("fme", f"errors/{register}", "0x3", {f'fpga_error_flags{{register="{register}"}}': 2})
        for register in (
            "pcie0_errors", "pcie1_errors", "nonfatal_errors", "catfatal_errors", "fme_errors", "first_error",
        )
    ),
    *(
        ("port", f"errors/{register}", "0x8", {f'fpga_error_flags{{register="dfl-port.0_{register}"}}': 1})
        for register in ("errors", "first_error")
    ),
    ("port", "power_state", "6", {'fpga_port_power_state{unit="dfl-port.0"}': 6}),
    ("port", "power_state", "3", {}),
    ("nic", "hwmon/hwmon0/temp1_input", "55000", {'device_temperature_celsius{sensor="temp1"}': 55}),
    ("nic", "hwmon/hwmon0/in0_input", "12000", {'device_voltage_volts{sensor="in0"}': 12}),
    ("nic", "hwmon/hwmon0/curr1_input", "1500", {'device_current_amperes{sensor="curr1"}': 1.5}),
    ("nic", "hwmon/hwmon0/power1_input", "25000000", {'device_power_watts{sensor="power1"}': 25}),
    ("nic", "hwmon/hwmon0/temp1_alarm", "1", {'device_alarm{sensor="temp1"}': 1}),
    *(
        ("nic", f"net/eth0/statistics/{short}_{name}", "9",
         {f'nic_{metric}_total{{interface="eth0",direction="{direction}"}}': 9})
        for short, direction in (("rx", "receive"), ("tx", "transmit"))
        for name, metric in (("bytes", "bytes"), ("packets", "packets"), ("errors", "errors"), ("dropped", "drops"))
    ),
    ("nic", "net/eth0/carrier_changes", "2", {'nic_carrier_changes_total{interface="eth0"}': 2}),
]  # fmt: skip


def read(root: Path, kind: str) -> DeviceReading:
    host = Host(root)
    sources = tuple(KINDS[kind][0](host))
    return DeviceReader("p", DevicePlan(device="d", units=("d",), sources=sources)).read(host, "auto", 0, held=True)


def samples(root: Path, kind: str) -> dict[str, float]:
    """The samples of a device of the kind, without its own labels."""
    reading = read(root, kind)
    return {
        line.rpartition(" ")[0]
        .removeprefix("accelplane_")
        .replace('plugin="p",device="d"', "")
        .replace("{,", "{")
        .replace("{}", ""): float(line.rpartition(" ")[2])
        for family, lines in reading.lines.items()
        if family not in (families.INFO, families.UNIT_INFO, families.ENERGY_GAPS)
        for line in lines
    }


def path_of(root: Path, kind: str, name: str) -> Path:
    return root / (name if name.startswith("/") else f"{KINDS[kind][1]}/{name}").lstrip("/")


def build(root: Path, kind: str, files: Mapping[str, str]) -> None:
    for name, text in {**KINDS[kind][2], **files}.items():
        write(path_of(root, kind, name), f"{text}\n")


@pytest.mark.parametrize(("kind", "name", "text", "expected"), ROWS, ids=[f"{each[0]} {each[1]}" for each in ROWS])
def test_a_file_becomes_a_sample_in_base_units(
    tmp_path: Path, kind: str, name: str, text: str, expected: Samples
) -> None:
    build(tmp_path, kind, {})
    before = samples(tmp_path, kind)
    build(tmp_path, kind, {name: text})
    after = samples(tmp_path, kind)
    assert before.items() <= after.items()
    assert {each: value for each, value in after.items() if each not in before} == pytest.approx(expected)


def is_number(text: str) -> bool:
    try:
        number(text)
    except InvalidText:
        return False
    return True


NUMERIC = sorted({(kind, name) for kind, name, text, _expected in ROWS if is_number(text)})


@pytest.mark.parametrize(("kind", "name"), NUMERIC, ids=[" ".join(each) for each in NUMERIC])
def test_a_numeric_file_with_another_text_has_no_sample_and_counts_as_invalid(
    tmp_path: Path, kind: str, name: str
) -> None:
    build(tmp_path, kind, {})
    before, invalid = samples(tmp_path, kind), read(tmp_path, kind).outcomes.get("invalid", 0)
    path = path_of(tmp_path, kind, name)
    for text in HOSTILE:
        if name.endswith("group_id") and text == "-1":
            continue  # an engine without a group
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert samples(tmp_path, kind) == before, text[:20]
        assert read(tmp_path, kind).outcomes["invalid"] == invalid + 1, text[:20]


ALL_FILES = sorted({(kind, name) for kind, name, _text, _expected in ROWS})


@given(st.lists(st.tuples(st.sampled_from(ALL_FILES), st.binary(max_size=100)), min_size=5, max_size=30))
def test_any_content_of_the_files_of_any_kind_yields_a_valid_page(
    tmp_path: Path, files: Sequence[tuple[tuple[str, str], bytes]]
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    kinds = {kind for (kind, _name), _content in files}
    for kind in kinds:
        build(root, kind, {})
    for (kind, name), content in files:
        path = path_of(root, kind, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    readings = [read(root, kind) for kind in sorted(kinds)]
    for reading in readings:
        page = render(hardware(NodeReadings([reading], {"p": reading.outcomes}))).decode()
        assert all(sample.value >= -60 for family in text_string_to_metric_families(page) for sample in family.samples)


@pytest.mark.parametrize("kind", ["pci", "i915", "npu", "qat", "dsa", "dlb", "fme", "port", "nic"])
def test_a_device_without_files_has_no_samples(tmp_path: Path, kind: str) -> None:
    assert samples(tmp_path, kind) == {}
