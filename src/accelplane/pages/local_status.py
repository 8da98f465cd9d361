"""The document of the agent's Unix socket: the inventory of the pages, and the unit of each listed ID.

Devices of a DRA driver are under the name of the driver.
"""

from collections.abc import Callable

from accelplane.node.status import NodeStatus, listed_devices
from accelplane.pages.observer import Observer
from accelplane.report.local import encode_status


async def local_status(status: Callable[[], NodeStatus], readers: Observer) -> bytes:
    """The document as of now."""
    inventory = (await readers.inventory()).body
    now = status()
    listed = listed_devices(now)
    units = {
        resource: {id_: device.unit for id_, device in devices.items()}
        for resource, (_plugin, devices) in listed.items()
    }
    for dra in now.dra.values():
        units[dra.driver] = {device: unit.unit for unit in dra.units.values() for device in unit.devices}
    return encode_status(inventory, units)
