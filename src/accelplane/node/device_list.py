"""The devices of one plugin on their way from a scan to the kubelet. Each inventory has one owner: this."""

from accelplane.devices import Inventory


class DeviceList:
    """`found` has the devices of the last scan that succeeded.

    `checked` is the newest of these inventories whose devices have a health state: new devices are listed only after
    their check. `listed` is what the kubelet gets: with health, and with devices that vanished.
    """

    def __init__(self) -> None:
        self.found = Inventory()
        self.checked = Inventory()
        self.listed = Inventory()
