"""Drop-in commands: the names and flags of the Go programs, so that existing DaemonSets only change the image."""

import sys

from accelplane.cli.node import dropin


def gpu() -> None:
    """`intel_gpu_device_plugin`."""
    from accelplane.plugins.gpu import GpuPlugin  # noqa: PLC0415 - each command imports its own family only

    sys.exit(dropin("intel_gpu_device_plugin", GpuPlugin, "gpu"))


def npu() -> None:
    """`intel_npu_device_plugin`."""
    from accelplane.plugins.npu import NpuPlugin  # noqa: PLC0415 - each command imports its own family only

    sys.exit(dropin("intel_npu_device_plugin", NpuPlugin, "npu"))
