"""The use of a device: from samples of readings to numbers."""

from collections import Counter
from pathlib import Path

import pytest
from trees import write

from accelplane.host import Host
from accelplane.pages.current_values import device_values
from accelplane.pages.device_reader import DeviceReader, DeviceReading
from accelplane.readings import DevicePlan, families, gpu
from accelplane.readings.use import Counters, Rates, counters, device_value, rates, use_of
from accelplane.readings.values import Value, labels
from accelplane.report.readings import DeviceReadings

FUNCTION = "/sys/devices/pci0000:00/0000:03:00.0"


def reading(*found: Value) -> DeviceReadings:
    lines: dict[families.Family, list[str]] = {}
    for family, extra, value in found:
        lines.setdefault(family, []).append(f'{family.name}{{plugin="gpu",device="card0",{extra}}} {value}')
    return device_values(DeviceReading(lines, Counter()))


def test_an_xe_card_shows_limit_temperature_frequency_and_link(tmp_path: Path) -> None:
    files = {
        "hwmon/hwmon0/name": "xe\n",
        "hwmon/hwmon0/power1_max": "150000000\n",
        "hwmon/hwmon0/power1_cap": "300000000\n",
        "hwmon/hwmon0/temp2_input": "45000\n",
        "hwmon/hwmon0/temp3_input": "61000\n",
        "tile0/gt0/freq0/act_freq": "1400\n",
        "tile0/gt1/freq0/act_freq": "900\n",
        "current_link_speed": "16.0 GT/s PCIe\n",
        "current_link_width": "8\n",
    }
    for name, text in files.items():
        write(tmp_path / FUNCTION[1:] / name, text)
    host = Host(str(tmp_path))
    plan = DevicePlan(device="card0", units=("card0",), sources=tuple(gpu.sources(host, FUNCTION, FUNCTION)))
    found = use_of(device_values(DeviceReader("gpu", plan).read(host, "auto", 0.0, held=False)), Rates())
    assert (found.limit, found.temperature, found.frequency) == (150.0, 61.0, 1.4e9)
    assert (found.link_speed, found.link_lanes, found.awake) == (16e9, 8, None)


def test_power_and_busy_are_rates_between_two_readings() -> None:
    before = Counters(time=10.0, fresh=True, idle={"gt0": 5.0, "gt1": 7.0}, energy={"card": 100.0, "package": 80.0})
    after = Counters(time=12.0, fresh=True, idle={"gt0": 6.5, "gt1": 9.0}, energy={"card": 160.0, "package": 130.0})
    assert rates(before, after) == Rates(busy=0.25, power=30.0)


def test_an_npu_is_busy_while_it_executes_jobs_even_if_other_files_would_wake_it() -> None:
    before, after = (Counters(time=time, fresh=False, busy=busy) for time, busy in ((0.0, 1.0), (2.0, 2.0)))
    assert rates(before, after).busy == 0.5


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Counters(time=0, fresh=True, idle={"gt0": 5.0}), Counters(time=2, fresh=False, idle={"gt0": 5.0})),
        (Counters(time=0, fresh=False, energy={"card": 5.0}), Counters(time=2, fresh=True, energy={"card": 9.0})),
        (Counters(time=0, fresh=True, energy={"card": 5.0}), Counters(time=2, fresh=True, energy={"card": 1.0})),
        (Counters(time=0, fresh=True, busy=5.0), Counters(time=2, fresh=True, busy=1.0)),
        (Counters(time=0, fresh=True, busy=5.0), Counters(time=0.1, fresh=True, busy=6.0)),
    ],
    ids=["repeated", "repeated before", "energy reset", "busy reset", "too short"],
)
def test_a_repeated_or_reset_counter_has_no_rate(before: Counters, after: Counters) -> None:
    assert rates(before, after) == Rates()


def test_a_clock_that_differs_from_the_drivers_gives_no_share_below_0_or_above_1() -> None:
    before = Counters(time=0, fresh=True, idle={"gt0": 0.0})
    assert rates(before, Counters(time=2, fresh=True, idle={"gt0": 2.5})).busy == 0.0
    assert rates(Counters(time=0, fresh=True, busy=0.0), Counters(time=1, fresh=True, busy=9.0)).busy == 1.0


def test_the_device_counts_before_its_package_and_tiles_are_added() -> None:
    assert device_value({"package": 3.0, "card": 4.0}) == 4.0
    assert device_value({"gt0": 3.0, "gt1": 4.0}) == 7.0
    assert device_value({}) is None


def test_a_sleeping_device_has_no_rates_and_its_counters_are_repeated() -> None:
    asleep = reading(Value(families.AWAKE, "", 0.0))
    assert use_of(asleep, Rates(0.5, 20.0)).busy is None
    assert use_of(asleep, Rates(0.5, 20.0)).awake is False
    skipped = device_values(DeviceReading({}, {}, fresh=False))
    assert not counters(skipped, 1.0).fresh


def test_qat_is_as_busy_as_its_busiest_slice() -> None:
    slices = [
        Value(families.QAT_SLICE_UTILIZATION, labels(slice=name), share) for name, share in (("a", 0.2), ("b", 0.7))
    ]
    assert use_of(reading(*slices), Rates()).busy == 0.7


def test_labels_with_escaped_texts_are_read() -> None:
    (found,) = (key for key in counters(reading(Value(families.ENERGY, labels(sensor='a"\\b'), 2.0)), 0.0).energy)
    assert found == 'a"\\b'
