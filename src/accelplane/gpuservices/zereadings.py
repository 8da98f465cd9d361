"""The readings of the Level-Zero service: health, temperatures, memory, indices. Runs in the worker process.

Each function takes the API and returns the ze_result_t of the last read that failed, and values; a value that could not
be read is a harmless default (true, -999.0, 0). Only the standard library is imported.
"""

import ctypes
import math
from collections.abc import Callable
from typing import NamedTuple

from accelplane.gpuservices import zeapi
from accelplane.gpuservices.zeapi import Api, ZeError

NO_TEMPERATURE = -999.0
_INTEL = 0x8086
_MOST_INDICES = 8
_SENSORS = (zeapi.SENSOR_GLOBAL, zeapi.SENSOR_GPU, zeapi.SENSOR_MEMORY)

Log = Callable[[int, str], None]  # with the verbosity: 1 errors, 2 warnings, 3 info, 4 debug


class Health(NamedTuple):
    code: int = 0
    memory: bool = True
    bus: bool = True


class Temperatures(NamedTuple):
    code: int = 0
    overall: float = NO_TEMPERATURE
    gpu: float = NO_TEMPERATURE
    memory: float = NO_TEMPERATURE


class MemoryAmount(NamedTuple):
    code: int = 0
    size: int = 0


class Indices(NamedTuple):
    code: int = 0
    indices: tuple[int, ...] = ()


class Sysman:
    """The devices of system management by PCI address. They are enumerated again if an address is unknown."""

    def __init__(self, api: Api, log: Log) -> None:
        self._api = api
        self._log = log
        self._devices: dict[str, int] = {}

    def prepare(self) -> None:
        """Enumerates the devices, which may take longer than a call should. A failure is logged."""
        try:
            self._devices = self._enumerate()
        except ZeError as error:
            self._log(1, str(error))

    def health(self, bdf: str) -> Health:
        """Memory is not ok if a module is critical or worse, the bus if its speed is degraded."""
        try:
            device = self._device(bdf)
        except ZeError as error:
            return Health(self._log_failure(bdf, error))
        code, bus = 0, True
        memory = all(state.health < zeapi.MEMORY_CRITICAL for state in self._memory_states(bdf, device) if state)
        state = zeapi.PciState()
        try:
            self._api.call("zesDevicePciGetState", device, ctypes.byref(state))
            bus = not state.qualityIssues & zeapi.SPEED_ISSUE
        except ZeError as error:
            if error.code != zeapi.UNSUPPORTED_FEATURE:
                code = self._log_failure(bdf, error)
        return Health(code, memory, bus)

    def temperatures(self, bdf: str) -> Temperatures:
        """The hottest sensor of each kind: a GPU of several tiles has several."""
        try:
            device = self._device(bdf)
            sensors = self._api.handles("zesDeviceEnumTemperatureSensors", device)
        except ZeError as error:
            return Temperatures(self._log_failure(bdf, error))
        if not sensors:
            return Temperatures()
        kinds, code = self._kinds(bdf, sensors)
        missing = code or zeapi.NOT_AVAILABLE
        values: list[float] = []
        for kind in _SENSORS:
            of_kind = [sensor for sensor in sensors if kinds.get(sensor) == kind]
            value, failed = self._hottest(bdf, of_kind) if of_kind else (NO_TEMPERATURE, missing)
            values.append(value)
            code = failed or code
        return Temperatures(code, *values)

    def memory_amount(self, bdf: str) -> MemoryAmount:
        """The sum of the modules in bytes; 0 for an integrated GPU, and if the size of a module is not known."""
        try:
            device = self._device(bdf)
        except ZeError as error:
            return MemoryAmount(self._log_failure(bdf, error))
        states = self._memory_states(bdf, device)
        return MemoryAmount(size=sum(state.size for state in states if state) if all(states) else 0)

    def _device(self, bdf: str) -> int:
        if bdf not in self._devices:  # also a GPU that was plugged in since
            self._devices = self._enumerate()
        try:
            return self._devices[bdf]
        except KeyError:
            raise ZeError("unknown PCI address", zeapi.UNKNOWN) from None

    def _enumerate(self) -> dict[str, int]:
        self._api.call("zesInit", 0)
        drivers = self._api.handles("zesDriverGet")
        if not drivers:
            raise ZeError("zesDriverGet: found no driver", zeapi.NOT_AVAILABLE)
        if len(drivers) > 1:
            self._log(2, f"found {len(drivers)} drivers, using the first one")
        devices = self._api.handles("zesDeviceGet", drivers[0])
        if not devices:
            raise ZeError("zesDeviceGet: found no device", zeapi.NOT_AVAILABLE)
        found: dict[str, int] = {}
        for device in devices:
            pci = zeapi.PciProperties()
            try:
                self._api.call("zesDevicePciGetProperties", device, ctypes.byref(pci))
            except ZeError as error:
                self._log(2, f"a device has no PCI address: {error}")
                continue
            found[f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.{pci.function:x}"] = device
        self._log(3, f"found devices: {' '.join(found) or 'none with a PCI address'}")
        return found

    def _memory_states(self, bdf: str, device: int) -> list[zeapi.MemoryState | None]:
        """The states of the memory modules, none for an integrated GPU; None for one that cannot be read."""
        if self._is_integrated(bdf, device):
            return []
        try:
            modules = self._api.handles("zesDeviceEnumMemoryModules", device)
        except ZeError as error:
            self._log_failure(bdf, error)
            return []
        states: list[zeapi.MemoryState | None] = []
        for module in modules:
            state = zeapi.MemoryState()
            states.append(None if self._fill(bdf, "zesMemoryGetState", module, state) else state)
        return states

    def _is_integrated(self, bdf: str, device: int) -> bool:
        """A device whose properties cannot be read counts as discrete."""
        extension = zeapi.SysmanExtensionProperties()
        properties = zeapi.SysmanProperties()
        properties.pNext = ctypes.addressof(extension)
        failed = self._fill(bdf, "zesDeviceGetProperties", device, properties)
        return not failed and bool(extension.flags & zeapi.INTEGRATED)

    def _kinds(self, bdf: str, sensors: list[int]) -> tuple[dict[int, int], int]:
        """The kind of each sensor whose properties can be read, and the code of the last failure."""
        kinds: dict[int, int] = {}
        code = 0
        for sensor in sensors:
            properties = zeapi.TemperatureProperties()
            if failed := self._fill(bdf, "zesTemperatureGetProperties", sensor, properties):
                code = failed
            else:
                kinds[sensor] = properties.type
        return kinds, code

    def _hottest(self, bdf: str, sensors: list[int]) -> tuple[float, int]:
        hottest, code = NO_TEMPERATURE, 0
        for sensor in sensors:
            celsius = ctypes.c_double(0)
            try:
                self._api.call("zesTemperatureGetState", sensor, ctypes.byref(celsius))
                if not math.isfinite(celsius.value):
                    raise ZeError("zesTemperatureGetState: found no finite number", zeapi.UNKNOWN)
                hottest = max(hottest, celsius.value)
            except ZeError as error:
                code = self._log_failure(bdf, error)
        return hottest, code

    def _fill(self, bdf: str, function: str, handle: int, structure: ctypes.Structure) -> int:
        """Fills a structure. Returns the ze_result_t; a failure is logged."""
        try:
            self._api.call(function, handle, ctypes.byref(structure))
        except ZeError as error:
            return self._log_failure(bdf, error)
        return 0

    def _log_failure(self, bdf: str, error: ZeError) -> int:
        self._log(1, f"{bdf}: {error}")
        return error.code


def indices(api: Api, log: Log) -> Indices:
    """The positions of Intel's devices among the first eight devices of the first driver."""
    try:
        api.call("zeInit", zeapi.GPU_ONLY)
        drivers = api.handles("zeDriverGet")
    except ZeError as error:
        log(1, str(error))
        drivers = []
    if not drivers:
        return Indices(zeapi.INVALID_NULL_POINTER)
    try:
        devices = api.handles("zeDeviceGet", drivers[0], most=_MOST_INDICES)
    except ZeError as error:
        log(1, str(error))
        devices = []
    if not devices:
        return Indices(zeapi.DEVICE_LOST)
    found: list[int] = []
    for index, device in enumerate(devices):
        properties = zeapi.DeviceProperties()
        try:
            api.call("zeDeviceGetProperties", device, ctypes.byref(properties))
        except ZeError as error:
            log(1, f"device {index}: {error}")
            continue
        if properties.vendorId == _INTEL:
            found.append(index)
    return Indices(indices=tuple(found))
