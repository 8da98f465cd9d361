"""Devices as immutable values, and functions on sets of them, without side effects.

A plugin's scan yields `Device` values, an `Inventory` has those of one complete scan, and publishers (the servers for
the kubelet, CDI files, metrics) act on the differences between two inventories.
"""

from accelplane.devices.cdi import CdiDevice, CdiError, CdiHook, CdiMount, CdiNode
from accelplane.devices.device import HEALTHY, UNHEALTHY, Allocation, Device, DeviceNode, Mount, Resource, Skipped
from accelplane.devices.health import Cause, HealthPolicy, HealthState, Phase, Verdict
from accelplane.devices.inventory import Inventory
from accelplane.devices.names import DeviceIdError, ResourceNameError, check_device_id, check_resource_name, natural
from accelplane.devices.unit import Attribute, Unit, UnitNode, Version, plain

__all__ = [
    "HEALTHY",
    "UNHEALTHY",
    "Allocation",
    "Attribute",
    "Cause",
    "CdiDevice",
    "CdiError",
    "CdiHook",
    "CdiMount",
    "CdiNode",
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
    "Unit",
    "UnitNode",
    "Verdict",
    "Version",
    "check_device_id",
    "check_resource_name",
    "natural",
    "plain",
]
