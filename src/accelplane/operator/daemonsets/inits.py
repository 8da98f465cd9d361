"""The init container of a custom resource, and its volumes."""

from collections.abc import Mapping
from typing import NamedTuple

from accelplane.operator.daemonsets.arguments import vf_drivers
from accelplane.operator.daemonsets.objects import (
    ConfigMapVolume,
    Container,
    EmptyDir,
    Mount,
    SecurityContext,
    SELinuxOptions,
    Variable,
    Volume,
)
from accelplane.operator.daemonsets.skeletons import PULL_POLICY, Path, from_fields
from accelplane.operator.models import (
    DlbSpec,
    DsaSpec,
    FpgaSpec,
    GpuSpec,
    IaaSpec,
    InitSpec,
    PluginSpec,
    QatSpec,
    SgxSpec,
)
from accelplane.operator.settings import ImagePolicy
from accelplane.plugins.qat.models import BY_VF_DRIVER

_NFD = "/etc/kubernetes/node-feature-discovery/source.d/"
_NODE_NAME = from_fields({"NODE_NAME": "spec.nodeName"})
_MADE_IF_MISSING = "DirectoryOrCreate"


class Init(NamedTuple):
    """An init container with the volumes that only it uses."""

    container: Container
    volumes: tuple[Volume, ...]


class _Own(NamedTuple):
    """The parts of an init container that depend on the kind."""

    name: str
    paths: tuple[Path, ...]
    variables: tuple[Variable, ...] = ()
    privileged: bool | None = None
    allow_privilege_escalation: bool | None = None
    selinux: bool = True


def init(spec: PluginSpec, policy: ImagePolicy) -> Init | None:
    """The init container, None if the resource has none."""
    if not isinstance(spec, InitSpec):
        return None
    # It installs the programs that the FPGA plugin needs to program a region.
    needed = policy.reference("intel-fpga-initcontainer") if isinstance(spec, FpgaSpec) else ""
    image = spec.init_image or needed
    return _made(spec, _of(spec), image) if image else None


def _of(spec: InitSpec) -> _Own:
    match spec:
        case DlbSpec():
            return _Own(
                "enable-vfs",
                (
                    Path("sysfs-devices", "/sys/devices", type=_MADE_IF_MISSING),
                    Path("sysfs-driver-dlb2", "/sys/bus/pci/drivers/dlb2", type=_MADE_IF_MISSING),
                ),
                privileged=True,
                selinux=False,
            )
        case DsaSpec():
            return _idxd("intel-idxd-config-initcontainer", {"DEVICE_TYPE": "dsa", "DSA_DRIVER": spec.driver}, pci=True)
        case IaaSpec():
            return _idxd("intel-iaa-initcontainer", {"DEVICE_TYPE": "iaa"}, pci=False)
        case FpgaSpec():
            return _Own(
                "intel-fpga-initcontainer",
                (Path("intel-fpga-sw", "/opt/intel/fpga-sw", type=_MADE_IF_MISSING),),
                allow_privilege_escalation=False,
                selinux=False,
            )
        case GpuSpec():
            return _Own("intel-gpu-initcontainer", (Path("nfd-sources", _NFD, type=_MADE_IF_MISSING),))
        case QatSpec():
            # The drivers of the plugin's arguments: both use the same devices.
            ids = " ".join(number for driver in vf_drivers(spec) for number in BY_VF_DRIVER[driver].pf_ids)
            return _Own(
                "intel-qat-initcontainer",
                (Path("sysfs", "/sys", type=_MADE_IF_MISSING),),
                (Variable(name="ENABLED_QAT_PF_PCIIDS", value=ids), *_NODE_NAME),
                privileged=True,
            )
        case SgxSpec():
            return _Own("intel-sgx-initcontainer", (Path("nfd-features", _NFD, type=_MADE_IF_MISSING),))
        case _:
            raise TypeError(f"{type(spec).__name__} has no init container")


def _idxd(name: str, variables: Mapping[str, str], *, pci: bool) -> _Own:
    return _Own(
        name,
        (
            Path("sys-bus-dsa", "/sys/bus/dsa"),
            *((Path("sys-bus-pci", "/sys/bus/pci"),) if pci else ()),
            Path("sys-devices", "/sys/devices"),
        ),
        (*_NODE_NAME, *(Variable(name=key, value=value) for key, value in variables.items())),
        privileged=True,
    )


def _made(spec: InitSpec, own: _Own, image: str) -> Init:
    others = _further_volumes(spec)
    return Init(
        Container(
            name=own.name,
            image=image,
            image_pull_policy=PULL_POLICY,
            env=own.variables,
            security_context=SecurityContext(
                privileged=own.privileged,
                allow_privilege_escalation=own.allow_privilege_escalation,
                read_only_root_filesystem=True,
                se_linux_options=SELinuxOptions(type="container_device_plugin_init_t") if own.selinux else None,
            ),
            volume_mounts=(
                *(path.mount for path in own.paths),
                *(Mount(name=volume.name, mount_path=place) for volume, place in others),
            ),
        ),
        (*(path.volume for path in own.paths), *(volume for volume, _ in others)),
    )


def _further_volumes(spec: InitSpec) -> list[tuple[Volume, str]]:
    """Volumes that are not paths of the node, with their mounts."""
    found: list[tuple[Volume, str]] = []
    if isinstance(spec, DsaSpec | IaaSpec):
        found.append((Volume(name="scratch", empty_dir=EmptyDir()), "/idxd-init/scratch"))
        family = "dsa" if isinstance(spec, DsaSpec) else "iaa"
        if spec.provisioning_config:
            source = ConfigMapVolume(name=spec.provisioning_config)
            found.append((Volume(name=f"intel-{family}-config-volume", config_map=source), "/idxd-init/conf"))
    if isinstance(spec, QatSpec) and spec.provisioning_config:
        source = ConfigMapVolume(name=spec.provisioning_config, default_mode=0o440)
        found.append((Volume(name="intel-qat-config-volume", config_map=source), "/qat-init/conf"))
    return found
