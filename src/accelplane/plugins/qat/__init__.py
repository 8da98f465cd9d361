"""QuickAssist accelerators (QAT), `qat.intel.com`: virtual functions for user space, or kernel-mode instances."""

from accelplane.plugins.qat.config import QatConfig
from accelplane.plugins.qat.plugin import QatPlugin

__all__ = ["QatConfig", "QatPlugin"]
