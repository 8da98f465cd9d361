"""Accelplane puts a Kubernetes cluster's accelerators to work."""

__version__ = "1.0.0"
