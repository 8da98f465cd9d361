"""Device families. `base` says what a plugin is; one module or package per family stands beside it."""

from accelplane.plugins.base import Config, Plugin, Sample, ScanError, Watch

__all__ = ["Config", "Plugin", "Sample", "ScanError", "Watch"]
