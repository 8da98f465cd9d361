"""Drop-in commands with the names and flags of the Go programs, so that existing DaemonSets change only the image.

Each command installs signal handlers before it imports other modules, and imports only its own device family.
"""

import importlib
import sys
from typing import NoReturn

from accelplane.cli import signals


def _run(program: str, name: str, plugin: str, *, needs_hardware: bool = False) -> NoReturn:
    """Runs the plugin, a class `module:Class` of `accelplane.plugins`.

    With `needs_hardware` its method `absence` has the reason why the command must not run on this host.
    """
    signals.end_at_once()
    from accelplane.cli.node import dropin  # noqa: PLC0415 - after the signal handlers

    module, _, class_name = plugin.partition(":")
    plugin_type = getattr(importlib.import_module(f"accelplane.plugins.{module}"), class_name)
    sys.exit(dropin(program, plugin_type, name, absence=plugin_type.absence if needs_hardware else None))


def gpu() -> None:
    """`intel_gpu_device_plugin`."""
    _run("intel_gpu_device_plugin", "gpu", "gpu:GpuPlugin")


def npu() -> None:
    """`intel_npu_device_plugin`."""
    _run("intel_npu_device_plugin", "npu", "npu:NpuPlugin")


def dsa() -> None:
    """`intel_dsa_device_plugin`."""
    _run("intel_dsa_device_plugin", "dsa", "idxd:DsaPlugin")


def iaa() -> None:
    """`intel_iaa_device_plugin`."""
    _run("intel_iaa_device_plugin", "iaa", "idxd:IaaPlugin")


def dlb() -> None:
    """`intel_dlb_device_plugin`."""
    _run("intel_dlb_device_plugin", "dlb", "dlb:DlbPlugin")


def qat() -> None:
    """`intel_qat_device_plugin`."""
    _run("intel_qat_device_plugin", "qat", "qat:QatPlugin")


def sgx() -> None:
    """`intel_sgx_device_plugin`."""
    _run("intel_sgx_device_plugin", "sgx", "sgx:SgxPlugin")


def fpga() -> None:
    """`intel_fpga_device_plugin`."""
    _run("intel_fpga_device_plugin", "fpga", "fpga:FpgaPlugin", needs_hardware=True)


def onload() -> None:
    """`onload-device-plugin`."""
    _run("onload-device-plugin", "onload", "onload:OnloadDropin", needs_hardware=True)
