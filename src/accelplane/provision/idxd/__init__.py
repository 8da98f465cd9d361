"""DSA and IAA: devices, groups, work queues and engines as the templates have them, through sysfs alone."""

from accelplane.provision.idxd.config import IdxdConfig, read_config
from accelplane.provision.idxd.planners import planners

__all__ = ["IdxdConfig", "planners", "read_config"]
