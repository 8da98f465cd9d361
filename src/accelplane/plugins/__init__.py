"""Device families. `base` says what a plugin is; one module or package per family stands beside it.

What the author of a plugin needs can be imported from here.
"""

from msgspec import Meta

from accelplane.devices import (
    Allocation,
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
)
from accelplane.host import Host, HostError, Missing, Unreadable, WriteError
from accelplane.plugins.base import Config, Plugin, Sample, ScanError, ScanResult, Watch

__all__ = [
    "Allocation",
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
    "Plugin",
    "Resource",
    "Sample",
    "ScanError",
    "ScanResult",
    "Skipped",
    "Unreadable",
    "Verdict",
    "Watch",
    "WriteError",
]
