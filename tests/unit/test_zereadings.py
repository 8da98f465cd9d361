"""Readings of the Level-Zero service, and its worker. `tests/cluster/test_levelzero.py` uses the real loader."""

import ctypes
import io
import math
import subprocess
import sys
from typing import Any

import pytest

from accelplane.gpuservices import zeapi, zereadings
from accelplane.gpuservices.zeapi import UNKNOWN, Api, ZeError
from accelplane.gpuservices.zereadings import Health, Indices, MemoryAmount, Sysman, Temperatures
from accelplane.gpuservices.zeworker import Worker

BDF = "0000:03:00.0"
DEVICE, MODULES, SENSORS = 1, 100, 200  # handles


class Native(Api):
    """The API with one device. `fails` has codes by function; the other attributes are its readings."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.called: list[str] = []
        self.drivers, self.devices = 1, 1
        self.integrated = False
        self.quality = 0
        self.memory = [(1, 1000)]
        self.sensors = [(0, 40.0), (1, 41.0), (2, 42.0)]
        self.vendor = 0x8086
        self.missing = ""

    def has(self, name: str) -> bool:
        return name != self.missing

    def call(self, name: str, *arguments: Any) -> None:
        self.called.append(name)
        if code := self.fails.get(name):
            raise ZeError(name, code)
        match name.removeprefix("zes").removeprefix("ze"):
            case "Init":
                pass
            case "DriverGet":
                self._list(DEVICE, self.drivers, *arguments)
            case "DeviceGet":
                self._list(DEVICE, self.devices, *arguments[1:])
            case "DeviceEnumMemoryModules":
                self._list(MODULES, len(self.memory), *arguments[1:])
            case "DeviceEnumTemperatureSensors":
                self._list(SENSORS, len(self.sensors), *arguments[1:])
            case _:
                self._fill(name, arguments[0], arguments[1]._obj)

    def _list(self, first: int, available: int, count: Any, handles: Any) -> None:
        for index in range(available if handles else 0):
            handles[index] = first + index
        count._obj.value = available

    def _fill(self, name: str, handle: int, value: Any) -> None:
        match name:
            case "zesDevicePciGetProperties":
                value.bus = 3 + handle - DEVICE
            case "zesDevicePciGetState":
                value.qualityIssues = self.quality
            case "zesDeviceGetProperties":
                extension = zeapi.SysmanExtensionProperties.from_address(value.pNext)
                assert (value.core.stype, extension.stype) == (0x3, 0x2D)
                extension.flags = int(self.integrated)
            case "zesMemoryGetState":
                value.health, value.size = self.memory[handle - MODULES]
            case "zesTemperatureGetProperties":
                value.type = self.sensors[handle - SENSORS][0]
            case "zesTemperatureGetState":
                value.value = self.sensors[handle - SENSORS][1]
            case "zeDeviceGetProperties":
                value.vendorId = self.vendor
            case _:
                raise AssertionError(name)


@pytest.fixture
def native() -> Native:
    return Native()


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def sysman(native: Native, logged: list[str]) -> Sysman:
    return Sysman(native, lambda level, text: logged.append(f"{level} {text}"))


# size, and the offset of each field: x86-64 (tests/cluster/test_levelzero.py compares them with the headers)
LAYOUTS: dict[type[ctypes.Structure], tuple[int, dict[str, int]]] = {
    zeapi.DeviceProperties: (368, {"pNext": 8, "vendorId": 20, "flags": 28, "maxMemAllocSize": 40, "uuid": 96,
                                   "timerResolution": 80, "kernelTimestampValidBits": 92, "name": 112}),
    zeapi.SysmanProperties: (776, {"core": 16, "numSubdevices": 384, "serialNumber": 388, "driverVersion": 708}),
    zeapi.SysmanExtensionProperties: (40, {"uuid": 16, "type": 32, "flags": 36}),
    zeapi.PciProperties: (56, {"domain": 16, "bus": 20, "device": 24, "function": 28, "maxSpeed": 32,
                               "haveReplayCounters": 50}),
    zeapi.PciState: (48, {"status": 16, "qualityIssues": 20, "stabilityIssues": 24, "speed": 32}),
    zeapi.MemoryState: (40, {"health": 16, "free": 24, "size": 32}),
    zeapi.TemperatureProperties: (48, {"type": 16, "onSubdevice": 20, "subdeviceId": 24, "maxTemperature": 32,
                                       "isThreshold2Supported": 42}),
}  # fmt: skip


@pytest.mark.parametrize("structure", LAYOUTS)
def test_structures_have_the_layout_of_the_headers(structure: type[ctypes.Structure]) -> None:
    size, offsets = LAYOUTS[structure]
    assert ctypes.sizeof(structure) == size
    assert {name: getattr(structure, name).offset for name in offsets} == offsets


@pytest.mark.parametrize(
    ("code", "text"), [(0, "success (0x0)"), (0x70000001, "device lost (0x70000001)"), (0xABC, "not known (0xABC)")]
)
def test_the_text_of_a_result_ends_in_its_number(code: int, text: str) -> None:
    assert zeapi.error_text(code) == text


def test_a_device_that_passes_all_checks_is_healthy(sysman: Sysman, native: Native) -> None:
    assert sysman.health(BDF) == Health()
    assert sysman.temperatures(BDF) == Temperatures(0, 40, 41, 42)
    assert sysman.memory_amount(BDF) == MemoryAmount(0, 1000)
    assert native.called.count("zesDeviceGet") == 2  # once for all


def test_a_device_with_a_failed_check_is_unhealthy(sysman: Sysman, native: Native) -> None:
    native.memory, native.quality = [(1, 1000), (3, 24)], 2
    assert sysman.health(BDF) == Health(0, memory=False, bus=False)
    assert sysman.memory_amount(BDF) == MemoryAmount(0, 1024)


def test_an_integrated_device_has_no_memory(sysman: Sysman, native: Native) -> None:
    native.integrated, native.memory, native.sensors = True, [(4, 1000)], native.sensors[:2]
    assert sysman.health(BDF) == Health()
    assert sysman.memory_amount(BDF) == MemoryAmount()
    assert sysman.temperatures(BDF) == Temperatures(zeapi.NOT_AVAILABLE, 40, 41)


@pytest.mark.parametrize(
    ("sensors", "expected"),
    [
        ([], Temperatures()),
        ([(0, 30.0), (0, 70.0)], Temperatures(zeapi.NOT_AVAILABLE, 70)),
        ([(0, math.nan), (1, 1.0), (2, math.inf)], Temperatures(UNKNOWN, gpu=1)),
    ],
)
def test_the_hottest_sensor_counts(
    sysman: Sysman, native: Native, sensors: list[tuple[int, float]], expected: Temperatures
) -> None:
    native.sensors = sensors
    assert sysman.temperatures(BDF) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("zesInit", (Health(9), Temperatures(9), MemoryAmount(9))),
        ("zesDriverGet", (Health(9), Temperatures(9), MemoryAmount(9))),
        (
            "zesDevicePciGetProperties",
            (Health(UNKNOWN), Temperatures(UNKNOWN), MemoryAmount(UNKNOWN)),
        ),
        ("zesDevicePciGetState", (Health(9), Temperatures(0, 40, 41, 42), MemoryAmount(0, 1000))),
        ("zesDeviceGetProperties", (Health(), Temperatures(0, 40, 41, 42), MemoryAmount(0, 1000))),
        ("zesDeviceEnumMemoryModules", (Health(), Temperatures(0, 40, 41, 42), MemoryAmount())),
        ("zesMemoryGetState", (Health(), Temperatures(0, 40, 41, 42), MemoryAmount())),
        ("zesDeviceEnumTemperatureSensors", (Health(), Temperatures(9), MemoryAmount(0, 1000))),
        ("zesTemperatureGetProperties", (Health(), Temperatures(9), MemoryAmount(0, 1000))),
        ("zesTemperatureGetState", (Health(), Temperatures(9), MemoryAmount(0, 1000))),
    ],
)
def test_a_failing_function_leaves_the_other_values(
    sysman: Sysman, native: Native, logged: list[str], function: str, expected: tuple[object, ...]
) -> None:
    native.fails[function] = 9
    assert (sysman.health(BDF), sysman.temperatures(BDF), sysman.memory_amount(BDF)) == expected
    assert any(function in line or "unknown PCI address" in line for line in logged)


@pytest.mark.parametrize(("drivers", "devices"), [(0, 1), (1, 0)])
def test_an_enumeration_without_devices_is_tried_again(
    sysman: Sysman, native: Native, drivers: int, devices: int
) -> None:
    native.drivers, native.devices = drivers, devices
    assert sysman.health(BDF) == Health(zeapi.NOT_AVAILABLE)
    native.drivers = native.devices = 1
    assert sysman.health(BDF) == Health()


def test_a_gpu_that_was_plugged_in_after_the_enumeration_is_found(sysman: Sysman, native: Native) -> None:
    assert sysman.health(BDF) == Health()
    native.devices = 2
    assert sysman.health("0000:04:00.0") == Health()


def test_the_first_of_several_drivers_is_used(sysman: Sysman, native: Native, logged: list[str]) -> None:
    native.drivers = 2
    assert sysman.health(BDF) == Health()
    assert "2 found 2 drivers, using the first one" in logged


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("zeInit", Indices(zeapi.INVALID_NULL_POINTER)),
        ("zeDriverGet", Indices(zeapi.INVALID_NULL_POINTER)),
        ("zeDeviceGet", Indices(zeapi.DEVICE_LOST)),
        ("zeDeviceGetProperties", Indices()),
        ("", Indices(0, (0,))),
    ],
)
def test_indices_are_those_of_intel(native: Native, function: str, expected: Indices) -> None:
    native.fails[function] = 9
    assert zereadings.indices(native, lambda _level, _text: None) == expected
    native.vendor = 0x10DE
    assert zereadings.indices(native, lambda _level, _text: None).indices == ()


@pytest.mark.parametrize("mode", ["sysman", "core"])
def test_the_worker_answers_line_by_line(native: Native, mode: str) -> None:
    output = io.BytesIO()
    requests = f"init\nhealth {BDF}\ntemperature {BDF}\nmemory {BDF}\nindices\nmemory 0000:09:00.0\n"
    Worker(mode, 3, output, lambda: native).serve(io.BytesIO(requests.encode()))
    assert native.called[0] == ("zesInit" if mode == "sysman" else "zeInit")
    found = f"3 found devices: {BDF}"
    assert output.getvalue().decode().splitlines() == [
        *([found, "= 0"] if mode == "sysman" else ["= 0", found]),
        "= 0 1 1",
        "= 0 40.0 41.0 42.0",
        "= 0 1000",
        "= 0 0",
        found,
        "1 0000:09:00.0: unknown PCI address: unknown (0x7FFFFFFE)",
        f"= {UNKNOWN} 0",
    ]


def test_the_worker_is_initialized_although_the_enumeration_fails(native: Native) -> None:
    output = io.BytesIO()
    native.devices = 0
    Worker("sysman", 1, output, lambda: native).serve(io.BytesIO(b"init\n"))
    assert output.getvalue() == b"1 zesDeviceGet: found no device: not available (0x70010001)\n= 0\n"


def test_a_worker_without_changes_sends_no_messages(native: Native) -> None:
    output = io.BytesIO()
    native.fails["zesInit"] = 9
    Worker("sysman", 0, output, lambda: native).serve(io.BytesIO(f"init\nhealth {BDF}\n".encode()))
    assert output.getvalue() == b"= 9\n= 9 1 1\n"


def test_a_loader_below_the_minimum_version_is_reported(native: Native) -> None:
    native.missing = "zesInit"
    output = io.BytesIO()
    Worker("sysman", 0, output, lambda: native).serve(io.BytesIO(b"init\n"))
    assert output.getvalue() == b"! libze_loader.so.1 has no function zesInit; install Level-Zero 1.9 or newer\n"


@pytest.mark.parametrize("request_line", ["health 0000:03:00.0", "nonsense"])
def test_other_requests_are_errors(native: Native, request_line: str) -> None:
    with pytest.raises(ValueError, match="request"):
        Worker("sysman", 0, io.BytesIO(), lambda: native).serve(io.BytesIO(f"{request_line}\n".encode()))


def test_the_worker_process_reports_a_missing_loader() -> None:
    command = [sys.executable, "-m", "accelplane.gpuservices.zeworker", "sysman", "0"]
    result = subprocess.run(command, input="init\n", capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0
    assert result.stdout.startswith(("! libze_loader.so.1", "= "))
