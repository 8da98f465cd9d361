"""Drop-in commands with the names and flags of the Go programs, so that existing DaemonSets change only the image.

Each command installs signal handlers before it imports other modules, and imports only its own device family.
"""

import importlib
import sys
from functools import partial
from typing import NoReturn

from accelplane.cli import signals


def _run(program: str, name: str, plugin: str) -> NoReturn:
    """Runs the plugin, a class `module:Class` of `accelplane.plugins`. Its method `absence`, if any, may prevent it."""
    signals.end_at_once()
    from accelplane.cli.node import dropin  # noqa: PLC0415 - after the signal handlers

    module, _, class_name = plugin.partition(":")
    plugin_type = getattr(importlib.import_module(f"accelplane.plugins.{module}"), class_name)
    sys.exit(dropin(program, plugin_type, name, absence=getattr(plugin_type, "absence", None)))


def generic() -> NoReturn:
    """`generic-device-plugin`, whose flags are not the options of its plugin."""
    signals.end_at_once()
    from accelplane.cli.genericplugin import main  # noqa: PLC0415 - after the signal handlers

    sys.exit(main())


gpu = partial(_run, "intel_gpu_device_plugin", "gpu", "gpu:GpuPlugin")
npu = partial(_run, "intel_npu_device_plugin", "npu", "npu:NpuPlugin")
dsa = partial(_run, "intel_dsa_device_plugin", "dsa", "idxd:DsaPlugin")
iaa = partial(_run, "intel_iaa_device_plugin", "iaa", "idxd:IaaPlugin")
dlb = partial(_run, "intel_dlb_device_plugin", "dlb", "dlb:DlbPlugin")
qat = partial(_run, "intel_qat_device_plugin", "qat", "qat:QatPlugin")
sgx = partial(_run, "intel_sgx_device_plugin", "sgx", "sgx:SgxPlugin")
fpga = partial(_run, "intel_fpga_device_plugin", "fpga", "fpga:FpgaPlugin")
onload = partial(_run, "onload-device-plugin", "onload", "onload:OnloadDropin")
