"""Hardware that isn't there: trees of files, services and notices that a node with accelerators would have."""

from accelplane.simulate.description import DescriptionError
from accelplane.simulate.specs import GpuSpec, NodeSpec, NpuSpec
from accelplane.simulate.tree import SimulatedDevice, SimulatedNode, TreeError

__all__ = [
    "DescriptionError",
    "GpuSpec",
    "NodeSpec",
    "NpuSpec",
    "SimulatedDevice",
    "SimulatedNode",
    "TreeError",
]
