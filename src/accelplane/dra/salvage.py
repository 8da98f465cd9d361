"""Claims whose file of the journal is damaged: what their CDI files say about the devices.

The CDI file of a claim is written before the entry is `prepared`, and lists devices by name with their nodes.
"""

import re
from collections.abc import Mapping, Sequence

from accelplane.dra.journal import Damaged, ResetDriver, UndoStep
from accelplane.dra.model import DeviceName
from accelplane.host import pci_address

_ADDRESS = re.compile(r"([0-9a-f]{4,8})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])(?:-.*)?")


def completed(
    file: Damaged, devices: Mapping[str, Sequence[str]], names: Mapping[str, DeviceName], *, manage_binding: bool
) -> Damaged:
    """The file with units and undo steps that were lost. `devices` is the result of `CdiDirectory.claim_devices`.

    A function with VFIO nodes gets the driver that the kernel selects, also if it was bound to a VFIO driver before the
    claim: nothing else says which one it had. Without `manage_binding` it was.
    """
    units = dict.fromkeys(file.units)
    undo: list[UndoStep] = []
    for name, nodes in devices.items():
        unit = _unit(name, names)
        if not unit:
            continue
        units[unit] = None
        address = pci_address(unit.partition("-")[0])
        if address and manage_binding and any(node.startswith("/dev/vfio/") for node in nodes):
            undo.append(ResetDriver(address=address))
    return file._replace(units=tuple(units), undo=undo if file.undo_lost else file.undo)


def _unit(name: str, names: Mapping[str, DeviceName]) -> str:
    """The unit of a CDI device, empty if it has none or does not hold it.

    The name of a share ends with `-` and the share ID, that of a device with admin access with `-admin`. A unit that
    the node does not have any more, such as a function without its driver, has the PCI address of its name.
    """
    for each in (name, name.rpartition("-")[0]):
        if each in names:
            return "" if name == f"{each}-admin" else names[each].unit
    match = _ADDRESS.fullmatch(name)
    if match is None or name.endswith("-admin"):
        return ""
    return "{}:{}:{}.{}".format(*match.groups())
