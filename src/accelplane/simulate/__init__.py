"""Simulated hardware: the file trees, services and uevents of a node with accelerators."""

from accelplane.simulate.description import DescriptionError
from accelplane.simulate.kernel import Kernel, write_tree
from accelplane.simulate.offload import DlbSpec, DsaSpec, IaaSpec, QatSpec, QueueSpec, SgxSpec
from accelplane.simulate.specs import GpuSpec, NodeSpec, NpuSpec
from accelplane.simulate.tree import SimulatedDevice, SimulatedNode, TreeError

__all__ = [
    "DescriptionError",
    "DlbSpec",
    "DsaSpec",
    "GpuSpec",
    "IaaSpec",
    "Kernel",
    "NodeSpec",
    "NpuSpec",
    "QatSpec",
    "QueueSpec",
    "SgxSpec",
    "SimulatedDevice",
    "SimulatedNode",
    "TreeError",
    "write_tree",
]
