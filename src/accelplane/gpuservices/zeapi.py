"""The parts of the Level-Zero C API that the Level-Zero service uses, for `ctypes`.

Structures have the layout of x86-64 Linux. Every structure is zero-initialized and has its type set, as the
specification of Level-Zero requires. Only the standard library is imported: this module runs in the worker process.

Facts: the headers ze_api.h and zes_api.h of Level-Zero 1.20, and the Level-Zero specification.
"""

import ctypes
from ctypes import POINTER, c_char, c_double, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Final

LIBRARY: Final = "libze_loader.so.1"

DEVICE_LOST: Final = 0x7000_0001
REQUIRES_RESET: Final = 0x7000_0006
NOT_AVAILABLE: Final = 0x7001_0001
DEPENDENCY_UNAVAILABLE: Final = 0x7002_0000
UNSUPPORTED_FEATURE: Final = 0x7800_0003
INVALID_NULL_POINTER: Final = 0x7800_0007
UNKNOWN: Final = 0x7FFF_FFFE

_TEXTS: Final = {
    0x0: "success",
    0x1: "not ready",
    0x7000_0001: "device lost",
    0x7000_0006: "device requires reset",
    0x7000_0007: "device in low power state",
    0x7001_0000: "insufficient permissions",
    0x7001_0001: "not available",
    0x7002_0000: "dependency unavailable",
    0x7800_0001: "uninitialized",
    0x7800_0002: "unsupported version",
    0x7800_0003: "unsupported feature",
    0x7800_0004: "invalid argument",
    0x7800_0005: "invalid null handle",
    0x7800_0007: "invalid null pointer",
    0x7FFF_FFFE: "unknown",
}

GPU_ONLY: Final = 1  # ze_init_flags_t
INTEGRATED: Final = 1  # ze_device_property_flags_t
SPEED_ISSUE: Final = 2  # zes_pci_link_qual_issue_flags_t
MEMORY_CRITICAL: Final = 3  # zes_mem_health_t: critical, and above it replace
SENSOR_GLOBAL, SENSOR_GPU, SENSOR_MEMORY = 0, 1, 2  # zes_temp_sensors_t

_MAX_HANDLES = 4096


def error_text(code: int) -> str:
    """The description of a ze_result_t, with its number."""
    return f"{_TEXTS.get(code, 'not known')} (0x{code:X})"


class ZeError(Exception):
    """A function of the API failed; `code` is its ze_result_t."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: {error_text(code)}")
        self.code = code


class _Typed(ctypes.Structure):
    """A structure that begins with its type and a pointer to an extension."""

    TYPE = 0
    _fields_ = (("stype", c_uint32), ("pNext", c_void_p))

    def __init__(self) -> None:
        super().__init__()
        self.stype = self.TYPE


class DeviceProperties(_Typed):
    """ze_device_properties_t."""

    TYPE = 0x3
    _fields_ = (
        *[(name, c_uint32) for name in ("type", "vendorId", "deviceId", "flags", "subdeviceId", "coreClockRate")],
        ("maxMemAllocSize", c_uint64),
        *[(name, c_uint32) for name in ("maxHardwareContexts", "maxCommandQueuePriority", "numThreadsPerEU")],
        *[(name, c_uint32) for name in ("physicalEUSimdWidth", "numEUsPerSubslice", "numSubslicesPerSlice")],
        ("numSlices", c_uint32),
        ("timerResolution", c_uint64),
        ("timestampValidBits", c_uint32),
        ("kernelTimestampValidBits", c_uint32),
        ("uuid", c_uint8 * 16),
        ("name", c_char * 256),
    )


class SysmanProperties(_Typed):
    """zes_device_properties_t."""

    TYPE = 0x1
    _fields_ = (
        ("core", DeviceProperties),
        ("numSubdevices", c_uint32),
        *[(name, c_char * 64) for name in ("serialNumber", "boardNumber", "brandName", "modelName")],
        *[(name, c_char * 64) for name in ("vendorName", "driverVersion")],
    )

    def __init__(self) -> None:
        super().__init__()
        self.core.stype = DeviceProperties.TYPE


class SysmanExtensionProperties(_Typed):
    """zes_device_ext_properties_t."""

    TYPE = 0x2D
    _fields_ = (("uuid", c_uint8 * 16), ("type", c_uint32), ("flags", c_uint32))


class PciSpeed(ctypes.Structure):
    """zes_pci_speed_t."""

    _fields_ = (("gen", c_int32), ("width", c_int32), ("maxBandwidth", c_int64))


class PciProperties(_Typed):
    """zes_pci_properties_t, with the PCI address in its place."""

    TYPE = 0x2
    _fields_ = (
        *[(name, c_uint32) for name in ("domain", "bus", "device", "function")],
        ("maxSpeed", PciSpeed),
        *[(name, c_uint8) for name in ("haveBandwidthCounters", "havePacketCounters", "haveReplayCounters")],
    )


class PciState(_Typed):
    """zes_pci_state_t."""

    TYPE = 0x17
    _fields_ = (
        *[(name, c_uint32) for name in ("status", "qualityIssues", "stabilityIssues")],
        ("speed", PciSpeed),
    )


class MemoryState(_Typed):
    """zes_mem_state_t."""

    TYPE = 0x1E
    _fields_ = (("health", c_uint32), ("free", c_uint64), ("size", c_uint64))


class TemperatureProperties(_Typed):
    """zes_temp_properties_t."""

    TYPE = 0x14
    _fields_ = (
        ("type", c_uint32),
        ("onSubdevice", c_uint8),
        ("subdeviceId", c_uint32),
        ("maxTemperature", c_double),
        *[(name, c_uint8) for name in ("isCriticalTempSupported", "isThreshold1Supported", "isThreshold2Supported")],
    )


_Handle = c_void_p
_Handles = POINTER(c_void_p)
_Count = POINTER(c_uint32)

FUNCTIONS: Final = {
    "zeInit": (c_uint32,),
    "zeDriverGet": (_Count, _Handles),
    "zeDeviceGet": (_Handle, _Count, _Handles),
    "zeDeviceGetProperties": (_Handle, POINTER(DeviceProperties)),
    "zesInit": (c_uint32,),
    "zesDriverGet": (_Count, _Handles),
    "zesDeviceGet": (_Handle, _Count, _Handles),
    "zesDeviceGetProperties": (_Handle, POINTER(SysmanProperties)),
    "zesDevicePciGetProperties": (_Handle, POINTER(PciProperties)),
    "zesDevicePciGetState": (_Handle, POINTER(PciState)),
    "zesDeviceEnumMemoryModules": (_Handle, _Count, _Handles),
    "zesMemoryGetState": (_Handle, POINTER(MemoryState)),
    "zesDeviceEnumTemperatureSensors": (_Handle, _Count, _Handles),
    "zesTemperatureGetProperties": (_Handle, POINTER(TemperatureProperties)),
    "zesTemperatureGetState": (_Handle, POINTER(c_double)),
}


class Api:
    """The functions of the loader. Its methods raise `ZeError`; handles are addresses."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Raises `OSError` if the library cannot be loaded."""
        self._library = ctypes.CDLL(library)

    def has(self, name: str) -> bool:
        """Whether the loader is new enough to have a function."""
        return hasattr(self._library, name)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function. One that the loader lacks is an unsupported feature."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise ZeError(name, UNSUPPORTED_FEATURE) from None
        function.restype = c_uint32
        function.argtypes = FUNCTIONS[name]
        if code := function(*arguments):
            raise ZeError(name, code)

    def handles(self, name: str, *before: object, most: int = _MAX_HANDLES) -> list[int]:
        """The handles of a function that lists them: it is called for their number, then for at most `most` handles."""
        count = c_uint32(0)
        self.call(name, *before, ctypes.byref(count), None)
        count.value = min(count.value, most)
        if not count.value:
            return []
        size = count.value
        found = (c_void_p * size)()
        self.call(name, *before, ctypes.byref(count), found)
        return [handle for handle in found[: min(count.value, size)] if handle]
