"""The custom resource `onload.amd.com/v1alpha1` `Onload` as types.

They have all fields of version 3.0.1 of the Onload operator, with its spelling, and optional fields of this project.
The definition for the API server is made from these types. Rules about several fields are in `validation`. Unknown
fields are ignored, as the API server prunes them.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from accelplane.kube.conditions import Condition
from accelplane.kube.wire import Int32, Int64, Toleration, Wire

KIND = "Onload"
DEFAULT_HOST_PATH = "/opt/onload"
DEFAULT_PARAMETERS = ("-K",)
DEFAULT_NODE_TIMEOUT = 900.0
# A container that fails at its start is ready for a moment. The kubelet updates its node every 10 s.
DEFAULT_MIN_READY = 10

_DURATION = r"^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$"
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

Duration = Annotated[str, Meta(extra_json_schema={"pattern": _DURATION, "maxLength": 32})]


def _about(description: str, **schema: int | str | list[str]) -> Meta:
    """A description, and keywords of the schema in the definition only."""
    more: dict[str, int | str | list[str]] = {**schema}
    return Meta(description=description, extra_json_schema=more or None)


# spec.onload


class ConfigMapName(Wire, frozen=True):
    name: Annotated[str, _about("Name of a ConfigMap in the namespace of the resource, with the key dockerfile.")] = ""


class BuildArgument(Wire, frozen=True):
    name: Annotated[str, _about("Name of the build argument.")]
    value: Annotated[str, _about("Value of the build argument.")]


class Build(Wire, frozen=True):
    dockerfile_config_map: Annotated[
        ConfigMapName,
        Meta(
            description="ConfigMap with the build recipe.",
            extra_json_schema={"x-kubernetes-map-type": "atomic"},
        ),
    ]
    build_args: Annotated[
        tuple[BuildArgument, ...] | None, _about("Arguments of the build, in the order of their use.")
    ] = None


class Sfc(Wire, frozen=True):
    """An empty object: its presence requests the `sfc` module."""


class KernelMapping(Wire, frozen=True):
    regexp: Annotated[str, _about("Regular expression of the kernel versions, or a kernel version.")]
    kernel_module_image: Annotated[
        str, _about("Image with the kernel modules. May contain variables of KMM such as ${KERNEL_FULL_VERSION}.")
    ]
    sfc: Annotated[Sfc | None, _about("If set, even to an empty object, the sfc driver is loaded as well.")] = None
    build: Annotated[Build | None, _about("How KMM builds the image if it does not exist. Not built when not set.")] = (
        None
    )


class ControlPlane(Wire, frozen=True):
    parameters: Annotated[
        tuple[str, ...] | None,
        _about("Parameters of the control plane server, each without white space.", default=["-K"]),
    ] = None


class ModuleParameters(Wire, frozen=True):
    onload: Annotated[tuple[str, ...], _about("Parameters of the module onload, for example oof_use_all=1.")] = ()
    sfc: Annotated[tuple[str, ...], _about("Parameters of the module sfc.")] = ()


class OnloadSpec(Wire, frozen=True):
    kernel_mappings: Annotated[
        tuple[KernelMapping, ...], _about("Images of the kernel modules by kernel version. The first match is used.")
    ]
    user_image: Annotated[str, _about("Image with the Onload userland.")]
    version: Annotated[str, _about("Version of Onload, as a label value. A change starts an ordered upgrade.")]
    image_pull_policy: Annotated[
        str, _about("Pull policy of the userland and module images: Always, IfNotPresent or Never.")
    ] = ""
    control_plane: Annotated[ControlPlane | None, _about("Options of the control plane.")] = None
    module_management: Annotated[
        Literal["KMM", "External"],
        Meta(
            description="KMM: Kernel Module Management loads the modules. External: they are loaded by other means, "
            "and kernelMappings is empty.",
            extra_json_schema={"default": "KMM"},
        ),
    ] = "KMM"
    module_parameters: Annotated[ModuleParameters | None, _about("Parameters of the kernel modules.")] = None


# spec.devicePlugin


class DevicePluginSpec(Wire, frozen=True):
    """`libMountPath` and `preload` are aliases. `options_of` returns the values that count."""

    image_pull_policy: Annotated[
        str, _about("Pull policy of the device plugin image: Always, IfNotPresent or Never.")
    ] = ""
    max_pods_per_node: Annotated[int | None, _about("Number of pods per node that can use Onload.", default=100)] = None
    set_preload: Annotated[bool | None, _about("Whether LD_PRELOAD is set in pods that use Onload.", default=True)] = (
        None
    )
    mount_onload: Annotated[
        bool | None,
        _about("Whether the script onload is mounted into pods. Requires setPreload false.", default=False),
    ] = None
    host_onload_path: Annotated[
        str | None, _about("Directory of the nodes for the Onload files.", default="/opt/onload/")
    ] = None
    base_mount_path: Annotated[str | None, _about("Prefix of all paths in pods.", default="/opt/onload")] = None
    bin_mount_path: Annotated[
        str | None, _about("Directory of programs in pods, below baseMountPath.", default="/usr/bin")
    ] = None
    lib_mounth_path: Annotated[
        str | None, _about("Directory of libraries in pods, below baseMountPath.", default="/usr/lib64")
    ] = None
    lib_mount_path: Annotated[str | None, _about("Alias of libMounthPath. Takes precedence over its default.")] = None
    preload: Annotated[bool | None, _about("Alias of setPreload. Takes precedence over its default.")] = None


# spec.upgrade


class ProbePod(Wire, frozen=True):
    image: Annotated[str, _about("Image of the probe pod.", maxLength=1024)]
    command: Annotated[tuple[str, ...], _about("Command of the probe pod. Exit status 0 means success.")] = ()
    args: Annotated[tuple[str, ...], _about("Arguments of the command.")] = ()


class Verify(Wire, frozen=True):
    min_ready_seconds: Annotated[
        int | None,
        _about(
            "Seconds for which the device plugin pod of an upgraded node must be ready before the node is verified. "
            "10 when not set.",
            minimum=0,
            maximum=3600,
        ),
    ] = None
    strict: Annotated[
        bool,
        _about(
            "Whether a node must report that the modules are loaded before the device plugin starts there. Otherwise "
            "the device plugin starts after a wait of 30 s."
        ),
    ] = False
    probe: Annotated[
        ProbePod | None, _about("Pod with one amd.com/onload that must succeed on each node. None when not set.")
    ] = None


class UpgradeSpec(Wire, frozen=True):
    max_unavailable: Annotated[
        int | str | None,
        _about("Maximum of nodes upgraded at the same time, as a number or a percentage. 1 when not set."),
    ] = None
    paused: Annotated[bool, _about("Whether no upgrade starts on further nodes.")] = False
    node_timeout: Annotated[
        Duration | None,
        _about("Time for each step in which a node waits, except evictions, for example 15m. 15m when not set."),
    ] = None
    eviction_timeout: Annotated[
        Duration | None,
        _about("Time for the eviction of the pods of one node, for example 5m. No limit when not set."),
    ] = None
    auto_rollback: Annotated[
        bool,
        _about("Whether nodes return to the version on which they were last verified if the upgrade of a node fails."),
    ] = False
    verify: Annotated[Verify | None, _about("Verification of a node after its upgrade.")] = None


class SecretName(Wire, frozen=True):
    name: Annotated[str, _about("Name of a Secret in the namespace of the resource.", maxLength=253)]


class Spec(Wire, frozen=True):
    onload: Annotated[OnloadSpec, _about("Version and images of Onload.")]
    device_plugin: Annotated[DevicePluginSpec, _about("Options of the device plugin.")]
    selector: Annotated[Mapping[str, str], _about("Labels of the nodes with Onload.")]
    service_account_name: Annotated[
        str, _about("Service account of the module loader pods and the device plugin pods.")
    ]
    image_pull_secret: Annotated[SecretName | None, _about("Secret for pulls of all images.")] = None
    tolerations: Annotated[tuple[Toleration, ...], _about("Tolerations of the device plugin and module pods.")] = ()
    upgrade: Annotated[UpgradeSpec | None, _about("Control of upgrades.")] = None


# Status

RevisionState = Literal["Progressing", "Verified", "Failed"]


class Revision(Wire, frozen=True):
    """A version of Onload with everything that a rollback needs."""

    version: Annotated[str, _about("Version of Onload.")]
    user_image: Annotated[str, _about("Image with the Onload userland.")]
    kernel_mappings: Annotated[tuple[KernelMapping, ...], _about("Images of the kernel modules.")] = ()
    module_parameters: Annotated[
        ModuleParameters | None, _about("Parameters of the kernel modules. None when not set.")
    ] = None
    image_pull_policy: Annotated[str, _about("Pull policy of the images of the kernel modules.")] = ""
    label: Annotated[str, _about("Value of the labels of nodes with this version: the version, or with a suffix.")] = ""
    digest: Annotated[str, _about("Digest of the kernel mappings and the parameters that the label stands for.")] = ""
    nodes: Annotated[Int32, _about("Number of nodes with this label.")] = 0
    state: Annotated[
        RevisionState,
        _about("Progressing, Verified (complete on all nodes) or Failed (a node failed, with autoRollback)."),
    ] = "Progressing"
    time: Annotated[str, _about("Time of the last change of the state.", format="date-time")] = ""


class CurrentNode(Wire, frozen=True):
    name: Annotated[str, _about("Name of the node.")]
    step: Annotated[str, _about("Step of the node.")] = ""
    since: Annotated[str, _about("Time at which the change of the node began.", format="date-time")] = ""
    message: Annotated[str, _about("What the node waits for.")] = ""
    verified: Annotated[str, _about("Label of the version on which the node was last verified.")] = ""
    target: Annotated[str, _about("Label of the version that the node gets.")] = ""


class OnloadStatus(Wire, frozen=True, omit_defaults=False):
    version: Annotated[str, _about("Version that the nodes have or get.")] = ""
    nodes_matching: Annotated[Int32, _about("Number of nodes that the selector matches.")] = 0
    nodes_labelled: Annotated[Int32, _about("Number of these nodes with the labels of the version.")] = 0
    nodes_module_ready: Annotated[Int32, _about("Number of these nodes on which the kernel modules are loaded.")] = 0
    nodes_upgraded: Annotated[Int32, _about("Number of these nodes on which the version is verified.")] = 0
    current_nodes: Annotated[tuple[CurrentNode, ...], _about("Nodes that are changed now.")] = ()
    blocking_pods: Annotated[
        tuple[str, ...], _about("Pods that use Onload and cannot be evicted, as namespace/name.")
    ] = ()
    history: Annotated[tuple[Revision, ...], _about("Last versions, the newest first.")] = ()


class DevicePluginStatus(Wire, frozen=True, omit_defaults=False):
    desired: Annotated[Int32, _about("Number of nodes that should run a device plugin pod.")] = 0
    ready: Annotated[Int32, _about("Number of nodes with a ready device plugin pod.")] = 0


class Status(Wire, frozen=True, omit_defaults=False):
    """`onload` and `devicePlugin` are always present."""

    onload: Annotated[OnloadStatus, _about("State of Onload on the nodes.")]
    device_plugin: Annotated[DevicePluginStatus, _about("State of the device plugin.")]
    conditions: Annotated[
        tuple[Condition, ...],
        # A plain list, as in the definition of the Go operator.
        _about("Conditions Ready, Progressing and Degraded."),
    ] = ()
    observed_generation: Annotated[Int64, _about("Generation of the resource that the status describes.")] = 0


class Metadata(Wire, frozen=True):
    """The metadata that the operator reads."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    deletion_timestamp: str = ""


class Onload(Wire, frozen=True):
    """A custom resource. Its spec has to be present for the operator, though not for the API server."""

    metadata: Metadata
    spec: Spec
    status: Status | None = None


# Values that follow from several fields


class PluginOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the device plugin in the order of its flags. None: the flag is not passed."""

    max_pods: int | None
    set_preload: bool | None
    mount_onload: bool | None
    host_onload_path: str | None
    base_mount_path: str | None
    bin_mount_path: str | None
    lib_mount_path: str | None


def options_of(spec: DevicePluginSpec) -> PluginOptions:
    """The options of a device plugin. An alias takes precedence: the API server sets the default of the other name."""
    return PluginOptions(
        max_pods=spec.max_pods_per_node,
        set_preload=spec.set_preload if spec.preload is None else spec.preload,
        mount_onload=spec.mount_onload,
        host_onload_path=spec.host_onload_path,
        base_mount_path=spec.base_mount_path,
        bin_mount_path=spec.bin_mount_path,
        lib_mount_path=spec.lib_mounth_path if spec.lib_mount_path is None else spec.lib_mount_path,
    )


def uses_sfc(spec: OnloadSpec) -> bool:
    """Whether a kernel mapping requests the `sfc` module."""
    return any(mapping.sfc is not None for mapping in spec.kernel_mappings)


def uses_kmm(spec: OnloadSpec) -> bool:
    """Whether KMM loads the modules."""
    return spec.module_management == "KMM"


def seconds(duration: str) -> float:
    """The seconds of a Go duration such as `15m` or `1h30m`. Raises `ValueError`."""
    if not re.fullmatch(_DURATION, duration):
        raise ValueError(f"{duration!a}: expected a duration such as 90s, 15m or 1h30m")
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(duration))
