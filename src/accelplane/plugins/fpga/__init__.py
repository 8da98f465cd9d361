"""The FPGA plugin for the OPAE and DFL drivers: options, the scan of sysfs, the mode in the node's annotation."""

from accelplane.plugins.fpga.plugin import FpgaPlugin

__all__ = ["FpgaPlugin"]
