"""Accelplane: device plugins, operators and tools for accelerators in Kubernetes clusters."""

__version__ = "1.0.0"
