"""Additions to the DaemonSet of a plugin whose devices are for claims: as in `deploy/dra/components/plugin`."""

from collections.abc import Collection, Sequence

from accelplane.operator.daemonsets.objects import Variable
from accelplane.operator.daemonsets.skeletons import CDI, Path, from_fields
from accelplane.operator.models import (
    DevicePlugin,
    GenericSpec,
    PluginSpec,
    QatSpec,
    RollingUpdate,
    UpdateStrategy,
)
from accelplane.plugins.generic.config import DEFAULT_DOMAIN

# The new pod serves claims before the old one ends.
UPDATE_STRATEGY = UpdateStrategy(type="RollingUpdate", rolling_update=RollingUpdate(max_surge=1, max_unavailable=0))
_PATHS = (
    Path("dra-drivers", "/var/lib/kubelet/plugins"),
    Path("dra-registration", "/var/lib/kubelet/plugins_registry"),
    # Which containers have devices of the device plugin.
    Path("podresources", "/var/lib/kubelet/pod-resources", read_only=True),
)
# The links of /sys/bus/pci lead to /sys/devices.
_BINDING_PATHS = (
    Path("pcidir", "/sys/bus/pci"),
    Path("sysdevices", "/sys/devices"),
    Path("vfiodir", "/dev/vfio", read_only=True, type="DirectoryOrCreate"),
)
# The bitstreams of FPGAs.
_BITSTREAMS = Path("bitstreams", "/srv/intel.com/fpga", read_only=True, type="DirectoryOrCreate")


def uses_dra(plugin: DevicePlugin) -> bool:
    """Whether its pods prepare claims."""
    return plugin.spec.dra is not None and plugin.spec.dra.is_used


def account(plugin: DevicePlugin) -> str:
    """The service account of pods that prepare claims. The policies of `deploy/dra/policies` match its name."""
    status = plugin.spec.dra is not None and plugin.spec.dra.device_status
    return account_of(plugin.family, status=status)


def account_of(family: str, *, status: bool) -> str:
    """The account of a family; `status`: it writes the device status of claims."""
    return f"accelplane-dra-{family}{'-status' if status else ''}"


def driver(plugin: DevicePlugin) -> str:
    """The DRA driver of its pods: the namespace of the resources that they would have."""
    if isinstance(plugin.spec, GenericSpec):
        return plugin.spec.domain or DEFAULT_DOMAIN
    return f"{plugin.family}.intel.com"


def arguments(spec: PluginSpec) -> tuple[str, ...]:
    """The options of the plugin."""
    dra = spec.dra
    if dra is None:
        return ()
    devices = (f"{address}={api}" for address, api in sorted(dra.devices.items()))
    return (
        *("-dra-api", ",".join((dra.api or "dra", *devices))),
        *(("-dra-evict", dra.evict) if dra.evict else ()),
        *(() if manages_binding(spec) else ("-dra-manage-binding=false",)),
        *(("-dra-device-status",) if dra.device_status else ()),
        *(("-dra-take-over",) if dra.take_over else ()),
    )


def manages_binding(spec: PluginSpec) -> bool:
    """Whether the plugin binds devices for claims. Without `manageBinding` only that of QAT, which does so anyway."""
    if spec.dra is None or spec.dra.manage_binding is None:
        return isinstance(spec, QatSpec)
    return spec.dra.manage_binding


def paths(spec: PluginSpec, family: str, existing: Collection[str]) -> Sequence[Path]:
    """Directories of the node in addition to the mounted ones, whose paths are `existing`."""
    wanted = [*_PATHS, CDI]
    if spec.dra is not None and spec.dra.manage_binding:
        wanted += _BINDING_PATHS
    if family == "fpga":
        wanted.append(_BITSTREAMS)
    return [path for path in wanted if path.path not in existing and path.path.rpartition("/")[0] not in existing]


def variables(present: Sequence[Variable]) -> Sequence[Variable]:
    """Variables in addition to the present ones."""
    names = {each.name for each in present}
    fields = {"NODE_NAME": "spec.nodeName", "POD_UID": "metadata.uid"}
    return from_fields({name: path for name, path in fields.items() if name not in names})
