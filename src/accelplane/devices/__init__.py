"""What a device is: immutable values, and the arithmetic on sets of them. Pure data, no effects.

A plugin's scan yields `Device` values; an `Inventory` holds one complete scan; every publisher (the kubelet's
servers, CDI files, metrics) is fed from the difference between two inventories.
"""

from accelplane.devices.cdi import CdiDevice, CdiError, CdiHook, CdiMount, CdiNode
from accelplane.devices.device import (
    HEALTHY,
    UNHEALTHY,
    Allocation,
    Device,
    DeviceNode,
    Mount,
    Resource,
    Skipped,
)
from accelplane.devices.health import HealthPolicy, HealthState, Phase, Verdict
from accelplane.devices.inventory import Changes, Inventory
from accelplane.devices.names import (
    DeviceIdError,
    ResourceNameError,
    check_device_id,
    check_resource_name,
    natural,
)

__all__ = [
    "HEALTHY",
    "UNHEALTHY",
    "Allocation",
    "CdiDevice",
    "CdiError",
    "CdiHook",
    "CdiMount",
    "CdiNode",
    "Changes",
    "Device",
    "DeviceIdError",
    "DeviceNode",
    "HealthPolicy",
    "HealthState",
    "Inventory",
    "Mount",
    "Phase",
    "Resource",
    "ResourceNameError",
    "Skipped",
    "Verdict",
    "check_device_id",
    "check_resource_name",
    "natural",
]
