"""Drop-in commands: the names and flags of the Go programs, so that existing DaemonSets only change the image."""

import sys

from accelplane.cli import signals


def gpu() -> None:
    """`intel_gpu_device_plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin  # noqa: PLC0415 - signals are handled before the work is imported
    from accelplane.plugins.gpu import GpuPlugin  # noqa: PLC0415 - each command imports its own family only

    sys.exit(dropin("intel_gpu_device_plugin", GpuPlugin, "gpu"))


def npu() -> None:
    """`intel_npu_device_plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin  # noqa: PLC0415 - signals are handled before the work is imported
    from accelplane.plugins.npu import NpuPlugin  # noqa: PLC0415 - each command imports its own family only

    sys.exit(dropin("intel_npu_device_plugin", NpuPlugin, "npu"))
