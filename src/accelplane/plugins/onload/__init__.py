"""Onload on Solarflare NICs: `amd.com/onload`, a number of containers that may use the kernel module."""

from accelplane.plugins.onload.config import OnloadConfig
from accelplane.plugins.onload.plugin import OnloadDropin, OnloadPlugin

__all__ = ["OnloadConfig", "OnloadDropin", "OnloadPlugin"]
