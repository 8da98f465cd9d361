"""Device families: one module or package for each. `base` defines the interface of plugins.

Authors of plugins can import all they need from here.
"""

from msgspec import Meta

from accelplane.devices import (
    Allocation,
    Cause,
    CdiDevice,
    CdiHook,
    CdiMount,
    CdiNode,
    Device,
    DeviceNode,
    HealthPolicy,
    Mount,
    Resource,
    Skipped,
    Verdict,
    Version,
)
from accelplane.host import Host, HostError, Missing, Unreadable, WriteError
from accelplane.plugins.base import (
    Config,
    NodePods,
    Plugin,
    PodAllocator,
    PodsError,
    Sample,
    ScanError,
    ScanResult,
    Watch,
)

__all__ = [
    "Allocation",
    "Cause",
    "CdiDevice",
    "CdiHook",
    "CdiMount",
    "CdiNode",
    "Config",
    "Device",
    "DeviceNode",
    "HealthPolicy",
    "Host",
    "HostError",
    "Meta",
    "Missing",
    "Mount",
    "NodePods",
    "Plugin",
    "PodAllocator",
    "PodsError",
    "Resource",
    "Sample",
    "ScanError",
    "ScanResult",
    "Skipped",
    "Unreadable",
    "Verdict",
    "Version",
    "Watch",
    "WriteError",
]
