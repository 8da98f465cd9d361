"""The arguments of the plugin container, in the order of the Go operator.

Fields that are not set have the defaults of the Go operator, which may differ from those of the plugins.
"""

import msgspec

from accelplane.operator import images, versions
from accelplane.operator.daemonsets import dra
from accelplane.operator.models import (
    DsaSpec,
    FpgaSpec,
    GenericSpec,
    GpuSpec,
    IaaSpec,
    NpuSpec,
    PluginSpec,
    QatSpec,
    SgxSpec,
)
from accelplane.operator.settings import Settings

VF_DRIVERS = ("c6xxvf", "4xxxvf")
# The first release whose DSA plugin has the flag -driver.
_DRIVER_SINCE = "0.36.0"


def arguments(spec: PluginSpec, settings: Settings) -> tuple[str, ...]:
    """The arguments of the plugin's container."""
    return ("-v", str(spec.log_level or 0), *_own(spec, settings), *dra.arguments(spec))


def vf_drivers(spec: QatSpec) -> tuple[str, ...]:
    """The kernel drivers of virtual functions whose devices are published."""
    return spec.kernel_vf_drivers or VF_DRIVERS


def _own(spec: PluginSpec, settings: Settings) -> tuple[str, ...]:
    match spec:
        case DsaSpec():
            # An older image rejects the flag, and idxd is its only driver.
            old = spec.driver == "idxd" and versions.is_below(images.parse(spec.image).tag, _DRIVER_SINCE)
            return (*(() if old else ("-driver", spec.driver)), *_shared(spec.shared_dev_num))
        case IaaSpec() | NpuSpec():
            return _shared(spec.shared_dev_num)
        case FpgaSpec():
            naming = "" if settings.fpga_naming == "default" else settings.fpga_naming
            return ("-mode", spec.mode or "af", *_valued("-resource-naming", naming))
        case GenericSpec():
            return _generic(spec)
        case GpuSpec():
            return _gpu(spec)
        case QatSpec():
            return (
                *("-dpdk-driver", spec.dpdk_driver or "vfio-pci"),
                *("-kernel-vf-drivers", ",".join(vf_drivers(spec))),
                *("-max-num-devices", str(spec.max_num_devices or 32)),
                *_valued("-allocation-policy", spec.preferred_allocation_policy),
            )
        case SgxSpec():
            return (
                *("-enclave-limit", str(spec.enclave_limit or 1)),
                *("-provision-limit", str(spec.provision_limit or 1)),
                *_switched("-dcap-infra-resources", spec.dcap_infra_resources),
            )
        case _:
            return ()


def _generic(spec: GenericSpec) -> tuple[str, ...]:
    return (
        "--listen=",  # as the other plugins, it serves no pages
        *_valued("--domain", spec.domain),
        *_valued("--allocation-policy", spec.preferred_allocation_policy),
        *_valued("--cdi", spec.cdi),
        *(word for device in spec.devices for word in ("--device", msgspec.json.encode(device).decode())),
    )


def _gpu(spec: GpuSpec) -> tuple[str, ...]:
    mode = (f"-monitoring-mode={spec.monitoring_mode}",) if spec.enable_monitoring and spec.monitoring_mode else ()
    return (
        *_switched("-enable-monitoring", spec.enable_monitoring),
        *mode,
        *_shared(spec.shared_dev_num),
        *_switched("-resource-manager", spec.resource_manager),
        *("-allocation-policy", spec.preferred_allocation_policy or "none"),
        *_valued("-allow-ids", spec.allow_ids),
        *_valued("-deny-ids", spec.deny_ids),
        *_valued("-bypath", spec.bypath_mode),
        *_switched("-health-management", spec.health_management),
        *((f"-xpumd-endpoint={spec.xpumd_endpoint}",) if spec.xpumd_endpoint else ()),
    )


def _shared(number: int | None) -> tuple[str, ...]:
    return ("-shared-dev-num", str(number or 1))


def _switched(flag: str, on: bool) -> tuple[str, ...]:
    return (flag,) if on else ()


def _valued(flag: str, value: str | None) -> tuple[str, ...]:
    return (flag, value) if value else ()
