"""Resources from configuration, without code: files, USB devices, PCI functions behind vfio-pci and RDMA devices."""

from accelplane.plugins.generic.config import GenericConfig
from accelplane.plugins.generic.plugin import GenericPlugin

__all__ = ["GenericConfig", "GenericPlugin"]
