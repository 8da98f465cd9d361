"""Intel GPUs: `gpu.intel.com/i915`, `/xe`, `/dxg` and the resources for monitoring."""

from accelplane.plugins.gpu.config import GpuConfig
from accelplane.plugins.gpu.plugin import GpuPlugin

__all__ = ["GpuConfig", "GpuPlugin"]
