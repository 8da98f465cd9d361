"""FPGAs behind OPAE and DFL: options, the scan from sysfs to devices, the mode that a node's annotation names.

`FpgaPlugin` puts them together.
"""

from accelplane.plugins.fpga.plugin import FpgaPlugin

__all__ = ["FpgaPlugin"]
