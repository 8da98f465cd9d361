"""The Level-Zero service with the real loader, in the file system of its image, with a driver for tests."""

from __future__ import annotations

import ctypes
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelplane.gpuservices import levelzero_pb2 as pb
from accelplane.gpuservices import zeapi

from .levelzero import Root, Service, compile_c, compile_driver
from .machine import wait_until
from .product_image import unpack_image

pytestmark = pytest.mark.cluster

Response = pb.DeviceHealth | pb.DeviceTemperature | pb.DeviceIndices | pb.DeviceMemoryAmount

FIRST, SECOND = "0000:03:00.0", "0000:04:00.0"
GIB = 1024**3
NOT_AVAILABLE = (0x70010001, "not available (0x70010001)")
UNKNOWN = (0x7FFFFFFE, "unknown (0x7FFFFFFE)")
UNINITIALIZED = (0x78000001, "uninitialized (0x78000001)")
NO_ANSWER = (0x70020000, "dependency unavailable (0x70020000)")
CODES = {
    0x1: "not ready (0x1)",
    0x70000001: "device lost (0x70000001)",
    0x70000002: "not known (0x70000002)",
    0x70000006: "device requires reset (0x70000006)",
    0x70000007: "device in low power state (0x70000007)",
    0x70010000: "insufficient permissions (0x70010000)",
    0x70010001: "not available (0x70010001)",
    0x70020000: "dependency unavailable (0x70020000)",
    0x78000001: "uninitialized (0x78000001)",
    0x78000002: "unsupported version (0x78000002)",
    0x78000003: "unsupported feature (0x78000003)",
    0x78000004: "invalid argument (0x78000004)",
    0x78000005: "invalid null handle (0x78000005)",
    0x78000007: "invalid null pointer (0x78000007)",
    0x7FFFFFFE: "unknown (0x7FFFFFFE)",
    0x7ABCDEF0: "not known (0x7ABCDEF0)",
}


@pytest.fixture(scope="module")
def root(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Root:
    directory = unpack_image("intel-gpu-levelzero", tmp_path_factory.mktemp("ze") / "root")
    compile_driver(directory / "tmp/driver.so")
    return Root(directory)


@pytest.fixture
def service(root: Root) -> Iterator[Service]:
    with root.running(devices=2) as running:
        yield running


def health(response: pb.DeviceHealth) -> tuple[bool, bool, bool]:
    return response.memory_ok, response.bus_ok, response.soc_ok


def celsius(response: pb.DeviceTemperature) -> tuple[float, float, float]:
    return getattr(response, "global"), response.gpu, response.memory


def error(
    response: pb.DeviceHealth | pb.DeviceTemperature | pb.DeviceIndices | pb.DeviceMemoryAmount,
) -> tuple[int, str]:
    assert response.HasField("error")
    return response.error.errorcode, response.error.description


NONE = (0, "")


def test_the_structures_and_constants_are_those_of_the_headers(root: Root, tmp_path: Path) -> None:
    structures = {
        "ze_device_properties_t": zeapi.DeviceProperties,
        "zes_device_properties_t": zeapi.SysmanProperties,
        "zes_device_ext_properties_t": zeapi.SysmanExtensionProperties,
        "zes_pci_speed_t": zeapi.PciSpeed,
        "zes_pci_state_t": zeapi.PciState,
        "zes_mem_state_t": zeapi.MemoryState,
        "zes_temp_properties_t": zeapi.TemperatureProperties,
    }
    nested = {"domain": "address.domain", "bus": "address.bus", "device": "address.device"}
    constants = {
        "ZE_RESULT_ERROR_DEVICE_LOST": zeapi.DEVICE_LOST,
        "ZE_RESULT_ERROR_DEVICE_REQUIRES_RESET": zeapi.REQUIRES_RESET,
        "ZE_RESULT_ERROR_NOT_AVAILABLE": zeapi.NOT_AVAILABLE,
        "ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE": zeapi.DEPENDENCY_UNAVAILABLE,
        "ZE_RESULT_ERROR_UNSUPPORTED_FEATURE": zeapi.UNSUPPORTED_FEATURE,
        "ZE_RESULT_ERROR_INVALID_NULL_POINTER": zeapi.INVALID_NULL_POINTER,
        "ZE_RESULT_ERROR_UNKNOWN": zeapi.UNKNOWN,
        "ZE_INIT_FLAG_GPU_ONLY": zeapi.GPU_ONLY,
        "ZES_DEVICE_PROPERTY_FLAG_INTEGRATED": zeapi.INTEGRATED,
        "ZES_PCI_LINK_QUAL_ISSUE_FLAG_SPEED": zeapi.SPEED_ISSUE,
        "ZES_MEM_HEALTH_CRITICAL": zeapi.MEMORY_CRITICAL,
        "ZES_TEMP_SENSORS_GLOBAL": zeapi.SENSOR_GLOBAL,
        "ZES_TEMP_SENSORS_GPU": zeapi.SENSOR_GPU,
        "ZES_TEMP_SENSORS_MEMORY": zeapi.SENSOR_MEMORY,
        "ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES": zeapi.DeviceProperties.TYPE,
        "ZES_STRUCTURE_TYPE_DEVICE_PROPERTIES": zeapi.SysmanProperties.TYPE,
        "ZES_STRUCTURE_TYPE_DEVICE_EXT_PROPERTIES": zeapi.SysmanExtensionProperties.TYPE,
        "ZES_STRUCTURE_TYPE_PCI_PROPERTIES": zeapi.PciProperties.TYPE,
        "ZES_STRUCTURE_TYPE_PCI_STATE": zeapi.PciState.TYPE,
        "ZES_STRUCTURE_TYPE_MEM_STATE": zeapi.MemoryState.TYPE,
        "ZES_STRUCTURE_TYPE_TEMP_PROPERTIES": zeapi.TemperatureProperties.TYPE,
    }
    expected = dict(constants)
    for name, structure in (*structures.items(), ("zes_pci_properties_t", zeapi.PciProperties)):
        expected[f"sizeof({name})"] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            member = field
            if structure is zeapi.PciProperties:
                member = "address.function" if field == "function" else nested.get(field, field)
            expected[f"offsetof({name}, {member})"] = getattr(structure, field).offset
    lines = "".join(f'printf("%llu\\n", (unsigned long long)({expression}));\n' for expression in expected)
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <level_zero/zes_api.h>\n#include <stddef.h>\n#include <stdio.h>\n"
        f"int main(void) {{\n{lines}return 0;\n}}\n"
    )
    output = subprocess.run([compile_c(source, tmp_path / "layout")], capture_output=True, text=True, check=True).stdout
    assert dict(zip(expected, map(int, output.split()), strict=True)) == expected


def test_the_image_has_the_loader_and_a_driver_of_intel(root: Root) -> None:
    libraries = [file.name for file in (root.directory / "usr/lib").rglob("libze_*.so.*")]
    assert any(re.fullmatch(r"libze_loader\.so\.1\.\d+\.\d+", name) for name in libraries)
    assert any(name.startswith("libze_intel_gpu.so.1.") for name in libraries)


def test_without_a_gpu_the_driver_of_intel_does_not_initialize(root: Root) -> None:
    result = root.run(driver=False)
    assert result.returncode == 255
    assert "Level-Zero cannot be initialized: uninitialized (0x78000001)" in result.stderr
    assert not (root.directory / "run/server.sock").exists()


def test_each_device_has_readings_of_its_own(service: Service) -> None:
    service.set(devices=2, device_1_sensors="0:50.5 1:61.25 2:72", device_1_memory="1:1000 1:24", device_1_quality=2)
    assert health(service.health(FIRST)) == (True, True, True)
    assert health(service.health(SECOND)) == (True, False, True)
    assert celsius(service.temperature(FIRST)) == (40, 41, 42)
    assert celsius(service.temperature(SECOND)) == (50.5, 61.25, 72)
    assert service.memory(FIRST).memory_size == 16 * GIB
    assert service.memory(SECOND).memory_size == 1024
    assert list(service.indices().indices) == [0, 1]
    for response in (service.health(SECOND), service.temperature(SECOND), service.memory(SECOND), service.indices()):
        assert error(response) == NONE


@pytest.mark.parametrize(
    ("modules", "ok"),
    [("0:1", True), ("1:1", True), ("2:1", True), ("3:1", False), ("4:1", False), ("1:1 1:1 4:1", False), ("", True)],
)
def test_memory_is_not_ok_if_a_module_is_critical_or_to_be_replaced(service: Service, modules: str, ok: bool) -> None:
    service.set(device_0_memory=modules)
    assert health(service.health(FIRST)) == (ok, True, True)


@pytest.mark.parametrize(("issues", "ok"), [(0, True), (1, True), (2, False), (3, False)])
def test_the_bus_is_not_ok_if_the_speed_of_the_link_is_reduced(service: Service, issues: int, ok: bool) -> None:
    service.set(device_0_quality=issues)
    assert health(service.health(FIRST)) == (True, ok, True)


def test_an_integrated_gpu_has_no_memory_of_its_own(service: Service) -> None:
    service.set(device_0_integrated=1, device_0_memory="4:1000", device_0_sensors="0:40 1:41")
    assert health(service.health(FIRST)) == (True, True, True)
    assert service.memory(FIRST).memory_size == 0
    response = service.temperature(FIRST)
    assert celsius(response) == (40, 41, -999)
    assert error(response) == NOT_AVAILABLE


@pytest.mark.parametrize("code", [code for code in CODES if code != 0x78000003])
def test_a_failing_state_of_the_bus_is_an_error_and_the_bus_stays_ok(service: Service, code: int) -> None:
    service.set(device_0_zesDevicePciGetState=code, device_0_memory="4:1")
    response = service.health(FIRST)
    assert health(response) == (False, True, True)
    assert error(response) == (code, CODES[code])


def test_a_state_of_the_bus_that_is_not_supported_is_no_error(service: Service) -> None:
    service.set(device_0_zesDevicePciGetState=0x78000003)
    assert error(service.health(FIRST)) == NONE


@pytest.mark.parametrize("function", ["zesDeviceEnumMemoryModules", "zesMemoryGetState", "zesDeviceGetProperties"])
def test_failing_reads_of_memory_are_no_error(service: Service, function: str) -> None:
    service.set(**{f"device_0_{function}": 0x70010000})
    assert (health(service.health(FIRST)), error(service.health(FIRST))) == ((True, True, True), NONE)
    amount = service.memory(FIRST)
    assert (amount.memory_size, error(amount)) == (16 * GIB if function == "zesDeviceGetProperties" else 0, NONE)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "function", ["zesDeviceEnumTemperatureSensors", "zesTemperatureGetProperties", "zesTemperatureGetState"]
)
def test_failing_reads_of_temperatures_are_errors(service: Service, function: str, code: int) -> None:
    service.set(**{f"device_0_{function}": code})
    response = service.temperature(FIRST)
    assert celsius(response) == (-999, -999, -999)
    assert error(response) == (code, CODES[code])


@pytest.mark.parametrize(
    ("sensors", "expected", "expected_error"),
    [
        ("", (-999, -999, -999), NONE),
        ("0:30", (30, -999, -999), NOT_AVAILABLE),
        ("6:90 5:10 2:33", (-999, -999, 33), NOT_AVAILABLE),
        ("0:30 0:70 0:40 1:1 2:2", (70, 1, 2), NONE),
        ("0:nan 1:inf 2:5", (-999, -999, 5), UNKNOWN),
        ("0:-40 1:0 2:2000", (-40, 0, 2000), NONE),
    ],
)
def test_a_temperature_is_that_of_the_hottest_sensor_of_its_kind(
    service: Service, sensors: str, expected: tuple[float, ...], expected_error: tuple[int, str]
) -> None:
    service.set(device_0_sensors=sensors)
    response = service.temperature(FIRST)
    assert celsius(response) == expected
    assert error(response) == expected_error


@pytest.mark.parametrize(
    "bdf", ["0000:07:00.0", "", "card0", "0000:03:00.0 ", "0000:03:00.0\nindices", "x" * 5000, "é"]
)
def test_an_unknown_device_is_an_error(service: Service, bdf: str) -> None:
    assert (health(service.health(bdf)), error(service.health(bdf))) == ((True, True, True), UNKNOWN)
    assert (celsius(service.temperature(bdf)), error(service.temperature(bdf))) == ((-999, -999, -999), UNKNOWN)
    assert (service.memory(bdf).memory_size, error(service.memory(bdf))) == (0, UNKNOWN)


def test_pci_addresses_of_any_domain_are_found(root: Root) -> None:
    with root.running(devices=2, device_0_bdf="10000:e1:1f.7", device_1_bdf="0001:00:02.0") as service:
        assert error(service.health("10000:e1:1f.7")) == NONE
        assert error(service.health("0001:00:02.0")) == NONE


def test_a_device_without_a_pci_address_does_not_hide_others(root: Root) -> None:
    with root.running(devices=2, device_0_zesDevicePciGetProperties=0x70010000) as service:
        assert error(service.health(FIRST)) == UNKNOWN
        assert error(service.health(SECOND)) == NONE


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"drivers": 0}, NOT_AVAILABLE),
        ({"devices": 0}, NOT_AVAILABLE),
        ({"zesDriverGet": 0x70010000}, (0x70010000, CODES[0x70010000])),
        ({"zesDeviceGet": 0x70000001}, (0x70000001, CODES[0x70000001])),
    ],
)
def test_a_failed_enumeration_is_an_error_and_is_retried(
    root: Root, state: dict[str, object], expected: tuple[int, str]
) -> None:
    with root.running(**state) as service:
        assert error(service.health(FIRST)) == expected
        assert error(service.temperature(FIRST)) == expected
        assert error(service.memory(FIRST)) == expected
        service.set()
        assert error(service.health(FIRST)) == NONE


def test_the_first_of_several_drivers_is_used(root: Root) -> None:
    with root.running(drivers=2) as service:
        assert error(service.health(FIRST)) == NONE
        assert "found 2 drivers, using the first one" in service.logged()


@pytest.mark.parametrize(
    ("state", "indices", "expected"),
    [
        ({"devices": 3, "device_1_vendor": "0x10de"}, [0, 2], NONE),
        ({"devices": 3, "device_0_zeDeviceGetProperties": 0x70000001}, [1, 2], NONE),
        ({"devices": 12}, [*range(8)], NONE),
        ({"device_0_vendor": "0x1002"}, [], NONE),
        ({"zeDriverGet": 0x70010000}, [], (0x78000007, CODES[0x78000007])),
        ({"drivers": 0}, [], (0x78000007, CODES[0x78000007])),
        ({"devices": 0}, [], (0x70000001, CODES[0x70000001])),
        ({"zeDeviceGet": 0x70010000}, [], (0x70000001, CODES[0x70000001])),
    ],
)
def test_in_wsl_mode_the_indices_are_those_of_intel_among_the_first_eight(
    root: Root, state: dict[str, object], indices: list[int], expected: tuple[int, str]
) -> None:
    with root.running("-wsl") as service:
        assert list(service.indices().indices) == [0]
        service.set(**state)
        response = service.indices()
        assert (list(response.indices), error(response)) == (indices, expected)


@pytest.mark.parametrize("fault", ["crash", "abort", "exit"])
def test_a_crash_of_the_driver_is_an_error_and_other_devices_stay_readable(root: Root, fault: str) -> None:
    with root.running(devices=2) as service:
        assert error(service.health(FIRST)) == NONE
        service.set(devices=2, device_0_zesDevicePciGetState=fault)
        old = service.processes()
        response = service.health(FIRST)
        assert (health(response), error(response)) == ((True, True, True), NO_ANSWER)
        service.wait_for_another_worker(old)
        assert error(service.health(SECOND)) == NONE
        assert celsius(service.temperature(SECOND)) == (40, 41, 42)
        # The device that crashed the driver is not queried again for some time.
        worker = service.processes()
        assert error(service.health(FIRST)) == NO_ANSWER
        assert service.processes() == worker
        assert service.process.poll() is None


def test_a_driver_that_hangs_is_an_error_and_other_devices_stay_readable(root: Root) -> None:
    with root.running("-call-timeout=3", devices=2) as service:
        assert error(service.temperature(FIRST)) == NONE
        service.set(devices=2, device_0_zesTemperatureGetState="hang")
        old = service.processes()
        response = service.temperature(FIRST)
        assert (celsius(response), error(response)) == ((-999, -999, -999), NO_ANSWER)
        service.wait_for_another_worker(old)
        assert error(service.temperature(SECOND)) == NONE
        assert not Path(f"/proc/{old[0]}").exists()


def test_output_of_a_driver_does_not_disturb_the_protocol(service: Service) -> None:
    service.set(device_0_zesDevicePciGetState="print", device_0_quality=2)
    assert health(service.health(FIRST)) == (True, False, True)
    assert health(service.health(FIRST)) == (True, False, True)
    assert "garbage on standard output" in service.logged()


@pytest.mark.parametrize("arguments", [[], ["-wsl"]])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0x78000001", "Level-Zero cannot be initialized: uninitialized (0x78000001)"),
        ("crash", "Level-Zero cannot be initialized: the worker process ended with signal 11"),
    ],
)
def test_a_failed_initialization_is_fatal(root: Root, arguments: list[str], value: str, message: str) -> None:
    function = "zeInit" if arguments else "zesInit"
    root.state.write_text(f"{function} {value}\n")
    result = root.run(*arguments)
    root.state.unlink()
    assert result.returncode == 255
    assert message in result.stderr
    assert not (root.directory / "run/server.sock").exists()


def test_a_restarted_driver_is_an_error_until_it_initializes(root: Root) -> None:
    with root.running("-call-timeout=3") as service:
        assert error(service.health(FIRST)) == NONE
        service.set(zesInit="0x78000001", device_0_zesDevicePciGetState="crash")
        assert error(service.health(FIRST)) == NO_ANSWER
        wait_until(lambda: error(service.memory(SECOND)) == UNINITIALIZED, "the error of the initialization", 60)
        service.set(devices=2)
        wait_until(lambda: error(service.memory(SECOND)) == NONE, "the device", 60)


def test_a_socket_that_exists_is_replaced_and_the_own_one_removed(root: Root) -> None:
    path = root.directory / "run/server.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        inode = path.stat().st_ino
        process = subprocess.Popen(root.command()[0], env=root.command()[1])
        wait_until(lambda: path.exists() and path.stat().st_ino != inode, "the service's socket")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert not path.exists()


def test_a_socket_that_cannot_be_created_is_fatal(root: Root) -> None:
    result = root.run("-socket=/no/such/directory/server.sock")
    assert result.returncode == 255
    assert "/no/such/directory/server.sock" in result.stderr


def test_the_worker_ends_with_the_service(root: Root) -> None:
    with root.running() as service:
        assert error(service.health(FIRST)) == NONE
        (worker,) = service.processes()
        service.process.kill()
        wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the end of the worker")


def test_service_and_worker_need_little_memory(service: Service) -> None:
    assert error(service.health(FIRST)) == NONE
    found = {}
    for process in (service.process.pid, *service.processes()):
        status = Path(f"/proc/{process}/smaps_rollup").read_text()
        found[process] = int(re.search(r"^Pss_Anon:\s+(\d+) kB$", status, re.MULTILINE)[1])  # type: ignore[index]
    assert len(found) == 2
    assert sum(found.values()) < 30 * 1024, json.dumps(found)
