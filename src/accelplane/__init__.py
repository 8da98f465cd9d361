"""Accelplane puts a Kubernetes cluster's accelerators to work."""

__version__ = "0.1.0"
