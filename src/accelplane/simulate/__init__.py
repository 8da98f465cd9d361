"""Simulated hardware: the file trees, the Level-Zero service and uevents of a node with accelerators.

The emulated kernel is in `accelplane.simulate.kernel`. It is not part of the images for nodes.
"""

from accelplane.simulate.description import DescriptionError
from accelplane.simulate.offload import DlbSpec, DsaSpec, IaaSpec, NicSpec, OnloadSpec, QatSpec, QueueSpec, SgxSpec
from accelplane.simulate.specs import GpuSpec, NodeSpec, NpuSpec
from accelplane.simulate.tree import SimulatedDevice, SimulatedNode, TreeError

__all__ = [
    "DescriptionError",
    "DlbSpec",
    "DsaSpec",
    "GpuSpec",
    "IaaSpec",
    "NicSpec",
    "NodeSpec",
    "NpuSpec",
    "OnloadSpec",
    "QatSpec",
    "QueueSpec",
    "SgxSpec",
    "SimulatedDevice",
    "SimulatedNode",
    "TreeError",
]
