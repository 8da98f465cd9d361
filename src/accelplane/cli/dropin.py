"""Drop-in commands with the names and flags of the Go programs, so that existing DaemonSets change only the image.

Each command installs signal handlers before it imports other modules, and imports only its own device family.
"""
# ruff: noqa: PLC0415

import sys

from accelplane.cli import signals


def gpu() -> None:
    """`intel_gpu_device_plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin
    from accelplane.plugins.gpu import GpuPlugin

    sys.exit(dropin("intel_gpu_device_plugin", GpuPlugin, "gpu"))


def npu() -> None:
    """`intel_npu_device_plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin
    from accelplane.plugins.npu import NpuPlugin

    sys.exit(dropin("intel_npu_device_plugin", NpuPlugin, "npu"))


def dsa() -> None:
    """`intel_dsa_device_plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin
    from accelplane.plugins.idxd import DsaPlugin

    sys.exit(dropin("intel_dsa_device_plugin", DsaPlugin, "dsa"))


def iaa() -> None:
    """`intel_iaa_device_plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin
    from accelplane.plugins.idxd import IaaPlugin

    sys.exit(dropin("intel_iaa_device_plugin", IaaPlugin, "iaa"))


def dlb() -> None:
    """`intel_dlb_device_plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin
    from accelplane.plugins.dlb import DlbPlugin

    sys.exit(dropin("intel_dlb_device_plugin", DlbPlugin, "dlb"))


def qat() -> None:
    """`intel_qat_device_plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin
    from accelplane.plugins.qat import QatPlugin

    sys.exit(dropin("intel_qat_device_plugin", QatPlugin, "qat"))


def sgx() -> None:
    """`intel_sgx_device_plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin
    from accelplane.plugins.sgx import SgxPlugin

    sys.exit(dropin("intel_sgx_device_plugin", SgxPlugin, "sgx"))


def fpga() -> None:
    """`intel_fpga_device_plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin
    from accelplane.plugins.fpga import FpgaPlugin

    sys.exit(dropin("intel_fpga_device_plugin", FpgaPlugin, "fpga", absence=FpgaPlugin.absence))


def onload() -> None:
    """`onload-device-plugin`."""
    signals.end_at_once()
    from accelplane.cli.node import dropin
    from accelplane.plugins.onload import OnloadDropin

    sys.exit(dropin("onload-device-plugin", OnloadDropin, "onload", absence=OnloadDropin.absence))
