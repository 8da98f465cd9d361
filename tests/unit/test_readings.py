"""Readings of device files: from trees of files to samples."""

import errno
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from readingplans import (
    BDF,
    BUS,
    FME,
    FUNCTION,
    HOSTILE,
    IDXD,
    QAT,
    TABLES,
    accessed,
    build,
    read,
    reset_access,
    samples,
)

from accelplane.host import Host, HostError
from accelplane.pages.device_reader import DeviceReader, number_text
from accelplane.pages.exposition import render
from accelplane.pages.hardware_metrics import hardware
from accelplane.pages.readings import NodeReadings
from accelplane.readings import DevicePlan, InvalidText, Source, Value, dfl, families, gpu, offload, pci, qat
from accelplane.readings.plan import waking_reads
from accelplane.readings.values import escape, number, scalar

pytestmark = pytest.mark.memory
CARD = f"{FUNCTION}/drm/card0"

GPU_PCI: dict[str, str] = {
    f"{FUNCTION}/aer_dev_correctable": "RxErr 3\nBadTLP 1\nReplay Timeout 2\nTOTAL_ERR_COR 7\n",
    f"{FUNCTION}/current_link_speed": "16.0 GT/s PCIe\n",
    f"{FUNCTION}/max_link_width": "16\n",
    f"{FUNCTION}/power/runtime_status": "active\n",
    f"{FUNCTION}/power/runtime_active_time": "1500\n",
}
I915 = {
    f"{FUNCTION}/hwmon/hwmon1/name": "i915\n",
    f"{FUNCTION}/hwmon/hwmon1/energy1_input": "2000000\n",
    f"{FUNCTION}/hwmon/hwmon1/power1_max": "120000000\n",
    f"{FUNCTION}/hwmon/hwmon1/power1_crit": "0\n",
    f"{FUNCTION}/hwmon/hwmon1/temp1_input": "45500\n",
    f"{FUNCTION}/hwmon/hwmon1/fan1_input": "1200\n",
    f"{FUNCTION}/hwmon/hwmon2/name": "i915_gt0\n",
    f"{FUNCTION}/hwmon/hwmon2/energy1_input": "500000\n",
    f"{CARD}/gt/gt0/rps_act_freq_mhz": "600\n",
    f"{CARD}/gt/gt0/rc6_residency_ms": "2500\n",
    f"{CARD}/gt/gt0/throttle_reason_status": "1\n",
    f"{CARD}/gt/gt0/throttle_reason_pl1": "1\n",
    f"{CARD}/gt/gt0/throttle_reason_thermal": "0\n",
}
XE = {
    f"{FUNCTION}/hwmon/hwmon0/name": "xe\n",
    f"{FUNCTION}/hwmon/hwmon0/energy1_input": "1000000\n",
    f"{FUNCTION}/hwmon/hwmon0/energy2_input": "3000000\n",
    f"{FUNCTION}/hwmon/hwmon0/temp2_input": "-5000\n",
    f"{FUNCTION}/hwmon/hwmon0/temp3_input": "61000\n",
    f"{FUNCTION}/hwmon/hwmon0/power1_cap": "200000000\n",
    f"{FUNCTION}/hwmon/hwmon0/in1_input": "750\n",
    f"{FUNCTION}/tile0/gt1/freq0/act_freq": "1400\n",
    f"{FUNCTION}/tile0/gt1/freq0/throttle/reasons": "pl1 thermal\n",
    f"{FUNCTION}/tile0/gt1/gtidle/idle_residency_ms": "90\n",
    f"{FUNCTION}/gpu_health": "warning\n",
}


def gpu_plan(host: Host) -> DevicePlan:
    return pci.plan(host, "card0", FUNCTION, gpu.sources(host, CARD, FUNCTION), {"driver": "i915"})


def test_files_of_every_pci_function_become_samples_in_base_units(tmp_path: Path) -> None:
    host = build(tmp_path, GPU_PCI)
    assert samples(read(gpu_plan(host), host)) == {
        'pci_errors_total{severity="correctable"}': 6,
        'pci_error_messages_total{severity="correctable"}': 7,
        "pci_link_transfers_per_second": 16e9,
        "pci_link_max_lanes": 16,
        'device_runtime_seconds_total{state="active"}': 1.5,
        "device_awake": 1,
    }


def test_files_of_i915_become_samples_of_card_and_gt(tmp_path: Path) -> None:
    host = build(tmp_path, I915)
    assert samples(read(gpu_plan(host), host)) == {
        'device_energy_joules_total{sensor="card"}': 2,
        'device_energy_joules_total{sensor="gt0"}': 0.5,
        'device_power_limit_watts{sensor="card",limit="sustained"}': 120,  # the one that is 0 is off
        'device_temperature_celsius{sensor="package"}': 45.5,
        'device_fan_rpm{sensor="fan1"}': 1200,
        'gpu_frequency_hertz{gt="gt0",kind="actual"}': 600e6,
        'gpu_idle_seconds_total{gt="gt0"}': 2.5,
        'gpu_throttled{gt="gt0",reason="any"}': 1,
        'gpu_throttled{gt="gt0",reason="pl1"}': 1,
        "device_energy_gaps_total": 0,
    }


def test_files_of_xe_become_samples_of_card_package_and_gt(tmp_path: Path) -> None:
    host = build(tmp_path, XE)
    assert samples(read(gpu_plan(host), host)) == {
        'device_energy_joules_total{sensor="card"}': 1,
        'device_energy_joules_total{sensor="package"}': 3,
        'device_temperature_celsius{sensor="package"}': -5,
        'device_temperature_celsius{sensor="vram"}': 61,
        'device_power_limit_watts{sensor="card",limit="burst"}': 200,
        'device_voltage_volts{sensor="in1"}': 0.75,
        'gpu_frequency_hertz{gt="gt1",kind="actual"}': 1.4e9,
        'gpu_throttled{gt="gt1",reason="any"}': 1,
        'gpu_throttled{gt="gt1",reason="pl1"}': 1,
        'gpu_throttled{gt="gt1",reason="thermal"}': 1,
        'gpu_idle_seconds_total{gt="gt1"}': 0.09,
        'gpu_health{state="ok"}': 0,
        'gpu_health{state="warning"}': 1,
        'gpu_health{state="critical"}': 0,
        "device_energy_gaps_total": 0,
    }


def test_the_package_of_xe_has_one_name_whatever_the_driver_labels(tmp_path: Path) -> None:
    labels = {f"{FUNCTION}/hwmon/hwmon0/{name}_label": "pkg\n" for name in ("energy2", "temp2", "in1")}
    host = build(tmp_path, {**XE, **labels, f"{FUNCTION}/hwmon/hwmon0/temp3_label": "vram\n"})
    found = samples(read(gpu_plan(host), host))
    assert {name for name in found if "sensor" in name and "limit" not in name} == {
        'device_energy_joules_total{sensor="card"}', 'device_energy_joules_total{sensor="package"}',
        'device_temperature_celsius{sensor="package"}', 'device_temperature_celsius{sensor="vram"}',
        'device_voltage_volts{sensor="package"}',
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("none\n", {"any": 0.0}),
        ("pl1 thermal\n", {"any": 1.0, "pl1": 1.0, "thermal": 1.0}),
        (" ".join(f"r{n}" for n in range(300)), {}),
        ('reason_"}\n', {}),
        ("", {}),
    ],
)
def test_throttle_reasons_of_xe_are_the_words_of_the_file(
    tmp_path: Path, text: str, reasons: Mapping[str, float]
) -> None:
    host = build(tmp_path, {f"{FUNCTION}/tile0/gt0/freq0/throttle/reasons": text})
    expected = {f'gpu_throttled{{gt="gt0",reason="{reason}"}}': value for reason, value in reasons.items()}
    assert samples(read(gpu_plan(host), host)) == expected


def test_reason_files_with_invalid_names_are_not_read(tmp_path: Path) -> None:
    directory = f"{CARD}/gt/gt0"
    files = {f"{directory}/throttle_reason_{name}": "1\n" for name in ("status", "new_reason", 'x"}\n', "Loud")}
    host = build(tmp_path, files)
    assert samples(read(gpu_plan(host), host)) == {
        'gpu_throttled{gt="gt0",reason="any"}': 1,
        'gpu_throttled{gt="gt0",reason="new_reason"}': 1,
    }


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("Unknown\n", None), ("16 GT/s\n", 16e9), ("32.0 GT/s PCIe\n", 32e9), ("2.5 GT/s PCIe\n", 2.5e9),
        ("16.0 GT/s PCIe 2\n", None),
    ],
)  # fmt: skip
def test_link_speeds_are_transfers_per_second(tmp_path: Path, text: str, speed: float | None) -> None:
    host = build(tmp_path, {f"{FUNCTION}/current_link_speed": text})
    expected = {} if speed is None else {"pci_link_transfers_per_second": speed}
    assert samples(read(gpu_plan(host), host)) == expected


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
@pytest.mark.parametrize(
    "name", ["hwmon/hwmon0/energy1_input", "hwmon/hwmon0/temp1_input", "max_link_width", "power/runtime_active_time"]
)
def test_text_that_is_no_number_has_no_sample_and_counts_as_invalid(
    tmp_path: Path, name: str, text: str | bytes
) -> None:
    host = build(tmp_path, {f"{FUNCTION}/{name}": text, f"{FUNCTION}/hwmon/hwmon0/name": "i915\n"})
    reading = read(gpu_plan(host), host)
    assert set(samples(reading)) <= {"device_energy_gaps_total"}
    assert reading.outcomes == {"invalid": 1}


@pytest.mark.parametrize(
    ("text", "errors", "messages", "outcome"),
    [
        ("RxErr 3\nUnknown New Error 4\n", 7, None, "ok"),
        ("RxErr 3\nBadTLP -2\nTOTAL_ERR_COR 5\n", 3, 5, "invalid"),
        ("".join(f"E{n} 1\n" for n in range(400)), 256, None, "invalid"),
        ("RxErr 3\nBadTLP 1\n" + 10_000 * "An Error With A Long Name 0\n", 4, None, "invalid"),
        ("RxErr\n", None, None, "invalid"),
    ],
)
def test_pci_error_counters_are_the_sum_of_the_valid_lines(
    tmp_path: Path, text: str, errors: float | None, messages: float | None, outcome: str
) -> None:
    host = build(tmp_path, {f"{FUNCTION}/aer_dev_correctable": text})
    reading = read(gpu_plan(host), host)
    found = samples(reading)
    assert found.get('pci_errors_total{severity="correctable"}') == errors
    assert found.get('pci_error_messages_total{severity="correctable"}') == messages
    assert reading.outcomes == {outcome: 1}


def test_a_sleeping_device_is_not_read_and_keeps_its_counters(tmp_path: Path) -> None:
    host = build(tmp_path, {**GPU_PCI, **I915})
    reader = DeviceReader("gpu", gpu_plan(host))
    awake = samples(reader.read(host, "auto", 0.0, held=True))
    build(tmp_path, {f"{FUNCTION}/power/runtime_status": "suspended\n"})
    waking = [source.path for source in reader.plan.sources if source.waking]
    reset_access(host, waking)
    reading = reader.read(host, "auto", 10.0, held=True)
    asleep = samples(reading)
    assert accessed(host, waking) == set()
    assert asleep["device_awake"] == 0
    counters = {name for name in asleep if "_total" in name}
    assert {name: asleep[name] for name in counters} == {name: awake[name] for name in counters}
    assert asleep.keys() - counters == {"device_awake"}
    assert reading.outcomes["asleep"] == len(waking)
    assert not reading.fresh


def test_an_active_device_without_holders_is_read_once_a_minute(tmp_path: Path) -> None:
    host = build(tmp_path, {**GPU_PCI, **I915})
    reader = DeviceReader("gpu", gpu_plan(host))
    reads = [reader.read(host, "auto", 5.0 * step, held=False).fresh for step in range(36)]
    assert sum(reads) == 3
    reader = DeviceReader("gpu", gpu_plan(host))
    assert all(reader.read(host, "auto", 5.0 * step, held=True).fresh for step in range(36))


def test_values_between_two_readings_of_an_unheld_device_are_repeated(tmp_path: Path) -> None:
    host = build(tmp_path, {**GPU_PCI, **I915})
    reader = DeviceReader("gpu", gpu_plan(host))
    first = samples(reader.read(host, "auto", 0.0, held=False))
    build(tmp_path, {f"{FUNCTION}/hwmon/hwmon1/temp1_input": "70000\n"})
    repeated = reader.read(host, "auto", 30.0, held=False)
    assert samples(repeated) == first
    assert repeated.outcomes.keys() == {"ok"}, "the device is awake"
    assert not repeated.fresh


@pytest.mark.parametrize(
    ("mode", "status", "in_use", "since", "autosuspend", "decision"),
    [
        ("always", "suspended", False, 0.0, 0.0, "read"),
        ("never", "active", True, 1e9, 0.0, "skip"),
        ("auto", "suspended", True, 1e9, 0.0, "skip"),
        ("auto", "suspending", True, 1e9, 0.0, "skip"),
        ("auto", "error", True, 1e9, 0.0, "skip"),
        ("auto", "active", True, 0.0, 0.0, "read"),
        ("auto", "unsupported", False, 0.0, 0.0, "read"),
        ("auto", "active", False, 59.0, 0.0, "repeat"),
        ("auto", "active", False, 60.0, 0.0, "read"),
        ("auto", "active", False, 60.0, 30.0, "repeat"),
        ("auto", "active", False, 90.0, 30.0, "read"),
    ],
)
def test_waking_reads_depend_on_mode_power_state_and_holders(  # noqa: PLR0917 - cases
    mode: str, status: str, in_use: bool, since: float, autosuspend: float, decision: str
) -> None:
    found = waking_reads(mode, status=status, autosuspend=autosuspend, held=in_use, since_waking=since)
    assert found == decision


@pytest.mark.parametrize("files", [{f"{FUNCTION}/power/control": "on\n"}, {f"{FUNCTION}/physfn/vendor": ""}])
def test_devices_that_never_sleep_are_awake_and_always_read(tmp_path: Path, files: Mapping[str, str]) -> None:
    host = build(tmp_path, {**GPU_PCI, **files, f"{FUNCTION}/power/runtime_status": "suspended\n"})
    found = samples(read(gpu_plan(host), host, in_use=False))
    assert "pci_link_transfers_per_second" in found
    assert found["device_awake"] == 1


def test_a_constant_is_read_once_for_each_plan_when_it_is_valid(tmp_path: Path) -> None:
    path = f"{FUNCTION}/max_link_width"
    host = build(tmp_path, {**GPU_PCI, path: "junk\n"})
    reader = DeviceReader("gpu", gpu_plan(host))

    def lanes(text: str, reader: DeviceReader = reader) -> tuple[float | None, int]:
        (tmp_path / path[1:]).write_text(text)
        reading = reader.read(host, "always", 0.0, held=True)
        return samples(reading).get("pci_link_max_lanes"), sum(reading.outcomes.values())

    assert lanes("junk\n")[0] is None
    value, reads = lanes("16\n")
    assert value == 16
    assert lanes("8\n") == (16, reads - 1)  # the other constants are known from the first reading
    later = DeviceReader("gpu", gpu_plan(host))
    later.adopt(reader)
    assert lanes("4\n", later)[0] == 4


def test_the_link_of_a_card_with_a_switch_is_that_of_its_upstream_port(tmp_path: Path) -> None:
    root = "/sys/devices/pci0000:00/0000:00:01.0"
    upstream = f"{root}/0000:01:00.0"
    downstream = f"{upstream}/0000:02:01.0"
    function = f"{downstream}/{BDF}"
    files: dict[str, str] = {}
    for path, device, speed, lanes in (
        (root, "0x460d", "32.0", 16), (upstream, "0x4fa1", "16.0", 8), (downstream, "0x4fa4", "2.5", 1),
        (function, "0x56c0", "2.5", 1),
    ):  # fmt: skip
        files |= {
            f"{path}/vendor": "0x8086\n", f"{path}/device": f"{device}\n",
            f"{path}/current_link_speed": f"{speed} GT/s PCIe\n", f"{path}/current_link_width": f"{lanes}\n",
        }  # fmt: skip
    host = build(tmp_path, files)
    found = samples(read(pci.plan(host, "card0", function, pci.sources(host, function), {}), host))
    assert found == {"pci_link_transfers_per_second": 16e9, "pci_link_lanes": 8}
    (tmp_path / upstream[1:] / "device").write_text("0x1234\n")  # a switch of the machine
    found = samples(read(pci.plan(host, "card0", function, pci.sources(host, function), {}), host))
    assert found == {"pci_link_transfers_per_second": 2.5e9, "pci_link_lanes": 1}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EOPNOTSUPP, errno.ENOENT])
def test_a_further_file_that_is_unreadable_is_read_once_unless_it_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    host = build(tmp_path, {"/f/state": "up\n", "/f/counters": "1\n"})
    further = Source(path="/f/counters", parse=scalar(families.TEMPERATURE))
    source = Source(path="/f/state", parse=lambda _text: (), follow=lambda _text: [further])
    reader = DeviceReader("gpu", DevicePlan(device="card0", units=("card0",), sources=(source,)))
    read_once, tried = host.read_once, list[str]()

    def read(path: str, size: int) -> bytes:
        if path == further.path and not tried:
            tried.append(path)
            raise HostError(path, os.strerror(code), code)
        return read_once(path, size)

    monkeypatch.setattr(host, "read_once", read)
    outcome = "denied" if code == errno.EACCES else "missing"
    assert reader.read(host, "auto", 0.0, held=True).outcomes == {"ok": 1, outcome: 1}
    later = reader.read(host, "auto", 1.0, held=True)
    assert later.outcomes == ({"ok": 2} if code == errno.ENOENT else {"ok": 1})


def test_text_that_has_not_changed_is_not_parsed_again(tmp_path: Path) -> None:
    texts: list[str] = []

    def parse(text: str) -> Sequence[Value]:
        texts.append(text)
        return (Value(families.POWER, "", float(text)),)

    host = build(tmp_path, {"/sys/power": "1"})
    plan = DevicePlan(device="d", units=("d",), sources=(Source(path="/sys/power", parse=parse),))
    reader = DeviceReader("p", plan)
    first, second = (reader.read(host, "auto", now, held=True) for now in (0.0, 1.0))
    build(tmp_path, {"/sys/power": "2"})
    third = reader.read(host, "auto", 2.0, held=True)
    assert texts == ["1", "2"]
    assert first.lines == second.lines != third.lines


def test_gaps_between_energy_reads_are_counted(tmp_path: Path) -> None:
    host = build(tmp_path, I915)
    reader = DeviceReader("gpu", gpu_plan(host))
    gaps = [samples(reader.read(host, "auto", now, held=True))["device_energy_gaps_total"] for now in (0, 240, 481)]
    assert gaps == [0, 0, 1]


def test_a_removed_file_is_reported_missing_once_and_not_read_again(tmp_path: Path) -> None:
    host = build(tmp_path, I915)
    reader = DeviceReader("gpu", gpu_plan(host))
    (tmp_path / FUNCTION.lstrip("/") / "hwmon/hwmon1/temp1_input").unlink()
    assert [reader.read(host, "auto", now, held=True).outcomes.get("missing") for now in (0, 1)] == [1, None]


def test_a_path_that_cannot_be_read_counts_as_error(tmp_path: Path) -> None:
    host = build(tmp_path, {"/sys/table/x": ""})
    source = Source(path="/sys/table", parse=scalar(families.POWER))
    plan = DevicePlan(device="d", units=("d",), sources=(source,))
    assert read(plan, host).outcomes == {"error": 1}


def test_labels_are_escaped_and_limited_to_128_bytes() -> None:
    assert escape('a"b\\c\nd\u202e') == 'a\\"b\\\\c?d?'
    assert len(escape("ä" * 200).encode()) == 128


@pytest.mark.parametrize(("text", "value"), [("12\n", 12), ("0x10", 16), ("-5", -5), ("+7", 7), ("0xFF\n", 255)])
def test_numbers_are_decimal_or_hexadecimal(text: str, value: int) -> None:
    assert number(text) == value


def test_a_value_outside_its_limits_is_invalid() -> None:
    parse = scalar(families.TEMPERATURE, scale=1e-3, lowest=-60, highest=250)
    assert parse("250000")[0].value == 250
    for text in ("250001", "-60001"):
        with pytest.raises(InvalidText, match=text):
            parse(text)


FILES = [*GPU_PCI, *I915, *XE, *QAT, *(f"{BUS}/dsa0/{name}" for name in IDXD), f"{FME}/errors/fme_errors"]


@given(st.dictionaries(st.sampled_from(FILES), st.binary(max_size=200), min_size=20))
def test_any_content_of_any_file_yields_a_valid_page(tmp_path: Path, files: Mapping[str, bytes]) -> None:
    host = build(Path(tempfile.mkdtemp(dir=tmp_path)), files)
    found = (
        *gpu.sources(host, CARD, FUNCTION), *qat.sources(host, FUNCTION, TABLES),
        *offload.idxd(host, BUS, "dsa0", ["wq0.1"]), *dfl.sources(host, FME, []),
    )  # fmt: skip
    reading = read(pci.plan(host, "card0", FUNCTION, found, {}), host)
    page = render(hardware(NodeReadings([reading], {"gpu": reading.outcomes}))).decode()
    for family in text_string_to_metric_families(page):
        assert all(sample.value >= -60 for sample in family.samples)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2, "2"),
        (-3.0, "-3"),
        (0.1, "0.1"),
        (1e300, "1e+300"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_the_text_of_a_number_is_that_of_the_text_format(value: float, text: str) -> None:
    assert number_text(value) == text
