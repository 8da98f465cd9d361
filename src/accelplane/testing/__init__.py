"""For tests of plugins: a host of plain files, and an agent with an embedded kubelet. Needs `accelplane[simulate]`."""

from accelplane.testing.claims import ClaimedContainer, PublishedDevice
from accelplane.testing.kubelet import Kubelet, node
from accelplane.testing.tree import Tree

__all__ = ["ClaimedContainer", "Kubelet", "PublishedDevice", "Tree", "node"]
