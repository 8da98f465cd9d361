"""The custom resources of `deviceplugin.intel.com/v1` as types.

They have all fields of the Go operator's releases from 0.31 to 0.36, and optional fields of this project. `crds` makes
the definitions for the API server from these types, so this is the only place that limits the values of a field; rules
about several fields are in `rules` and `validation`. Unknown fields are ignored, as the API server prunes them.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from accelplane.kube.conditions import Condition
from accelplane.kube.jsontypes import JsonObject
from accelplane.kube.wire import Int32, Toleration, Wire
from accelplane.operator.dramodels import Dra
from accelplane.operator.genericmodels import Cdi, Devices, Domain, NodeSelector, Policy

GROUP, VERSION = "deviceplugin.intel.com", "v1"
API_VERSION = f"{GROUP}/{VERSION}"

Count = Annotated[int, Meta(ge=1)]
# A quantity may be written as a number.
Quantity = Annotated[
    int | str,
    Meta(
        extra_json_schema={
            "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
            r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
        }
    ),
]
# The VF drivers of devices that a ConfigMap can configure.
PROVISIONED_VF_DRIVERS = ("4xxxvf", "420xxvf", "6xxxvf")
AMD64 = {"kubernetes.io/arch": "amd64"}
PCI_IDS = "^0x[0-9a-f]{4}(,0x[0-9a-f]{4})*$"
KernelVfDriver = Literal["dh895xccvf", "c6xxvf", "c3xxxvf", "d15xxvf", "4xxxvf", "420xxvf", "c4xxxvf", "6xxxvf"]


def _limited(description: str, max_length: int) -> Meta:
    """A limit for the API server only: admission explains a longer value in its own words."""
    return Meta(description=description, extra_json_schema={"maxLength": max_length})


# Parts of Kubernetes' own types


class SecretReference(Wire, frozen=True):
    name: Annotated[str, _limited("Name of a Secret in the namespace of the plugin pods.", 253)]


class Resources(Wire, frozen=True):
    limits: Annotated[Mapping[str, Quantity], Meta(description="Maximum that the container can use, by resource.")] = {}
    requests: Annotated[
        Mapping[str, Quantity], Meta(description="Amount that the scheduler reserves for the container, by resource.")
    ] = {}


class RollingUpdate(Wire, frozen=True):
    max_surge: Annotated[
        int | str | None,
        Meta(
            description="Must be 0 without dra: two plugin pods on a node register the same resources. 0 when not set, "
            "1 if all devices are for claims."
        ),
    ] = None
    max_unavailable: Annotated[
        int | str | None,
        Meta(description="Maximum of nodes updated at the same time, as a number or a percentage. 1 when not set."),
    ] = None


class UpdateStrategy(Wire, frozen=True):
    type: Annotated[
        Literal["RollingUpdate", "OnDelete"] | None,
        Meta(description="DaemonSet update strategy: RollingUpdate or OnDelete. RollingUpdate when not set."),
    ] = None
    rolling_update: Annotated[RollingUpdate | None, Meta(description="Parameters of the strategy RollingUpdate.")] = (
        None
    )


class ObjectReference(Wire, frozen=True):
    api_version: Annotated[str, Meta(description="API version of the object.")] = ""
    kind: Annotated[str, Meta(description="Kind of the object.")] = ""
    namespace: Annotated[str, Meta(description="Namespace of the object.")] = ""
    name: Annotated[str, Meta(description="Name of the object.")] = ""
    uid: Annotated[str, Meta(description="UID of the object.")] = ""
    resource_version: Annotated[
        str, Meta(description="Resource version of the object when the reference was written.")
    ] = ""
    field_path: Annotated[str, Meta(description="Not used.")] = ""


class Metadata(Wire, frozen=True):
    """The metadata that the operator reads."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: str = ""
    annotations: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}


# Status


class Status(Wire, frozen=True):
    desired_number_scheduled: Annotated[Int32, Meta(description="Number of nodes that should run a plugin pod.")]
    number_ready: Annotated[Int32, Meta(description="Number of nodes with a ready plugin pod.")]
    controlled_daemon_set: Annotated[
        ObjectReference | None,
        Meta(
            description="DaemonSet of the plugin pods.",
            extra_json_schema={"x-kubernetes-map-type": "atomic"},
        ),
    ] = None
    node_names: Annotated[tuple[str, ...], Meta(description="Nodes that have a plugin pod.")] = ()
    observed_generation: Annotated[
        int,
        Meta(
            description="Generation of the resource that the status describes.",
            extra_json_schema={"format": "int64"},
        ),
    ] = 0
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(
            description="Conditions of the device plugin, such as Available and Degraded.",
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = ()
    effective_image: Annotated[str, Meta(description="Image of the plugin, if it is not the image of the spec.")] = ""
    effective_init_image: Annotated[
        str, Meta(description="Image of the init container, if it is not the init image of the spec.")
    ] = ""


# Specs

InitImage = Annotated[
    str, Meta(description="Image of the init container, which configures the devices of the node. None when not set.")
]
SharedDevNum = Annotated[Count, Meta(description="Number of containers that can share a device. 1 when not set.")]
ProvisioningConfig = Annotated[
    str,
    Meta(description="Name of a ConfigMap in the namespace of the plugin pods that the init container reads."),
]


class PluginSpec(Wire, frozen=True):
    """The fields of every kind."""

    image: Annotated[
        str, Meta(description="Image of the device plugin. The image of the operator's release when not set.")
    ] = ""
    node_selector: Annotated[
        Mapping[str, str],
        Meta(description="Labels of the nodes that run the plugin. kubernetes.io/arch=amd64 when not set."),
    ] = {}
    tolerations: Annotated[tuple[Toleration, ...], Meta(description="Tolerations of the plugin pods.")] = ()
    log_level: Annotated[int, Meta(ge=0, description="Log verbosity of the plugin. 0 when not set.")] | None = None
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"] | None,
        Meta(description="Pull policy of all images. IfNotPresent when not set."),
    ] = None
    image_pull_secrets: Annotated[
        tuple[SecretReference, ...],
        Meta(
            description="Secrets for image pulls, in addition to the Secret of the operator's installation.",
            extra_json_schema={"maxItems": 64},
        ),
    ] = ()
    priority_class_name: Annotated[str, _limited("Priority class of the plugin pods.", 253)] = ""
    resources: Annotated[
        Resources | None,
        Meta(description="Resource limits and requests of the plugin container, instead of the built-in ones."),
    ] = None
    update_strategy: Annotated[
        UpdateStrategy | None,
        Meta(description="Update strategy of the DaemonSet. One node after the other when not set."),
    ] = None
    pod_annotations: Annotated[Mapping[str, str], Meta(description="Annotations of the plugin pods.")] = {}
    dra: Annotated[
        Dra | None,
        Meta(description="Devices for claims (dynamic resource allocation). All devices have resources when not set."),
    ] = None


class InitSpec(PluginSpec, frozen=True):
    init_image: InitImage = ""


class DlbSpec(InitSpec, frozen=True):
    pass


class DsaSpec(InitSpec, frozen=True):
    shared_dev_num: SharedDevNum | None = None
    provisioning_config: ProvisioningConfig = ""
    driver: Annotated[
        Literal["idxd", "vfio-pci"],
        Meta(
            description="Driver of the resources: idxd (work queues) or vfio-pci (whole devices).",
            extra_json_schema={"default": "idxd"},
        ),
    ] = "idxd"


class FpgaSpec(InitSpec, frozen=True):
    mode: Annotated[
        Literal["af", "region", "regiondevel"] | None,
        Meta(description="Resources to publish: af (functions), region or regiondevel (regions). af when not set."),
    ] = None


class GenericSpec(PluginSpec, frozen=True):
    node_selector: NodeSelector = {}  # noqa: RUF012 - as those of fields whose type is written out
    domain: Domain = ""
    devices: Devices = ()
    preferred_allocation_policy: Policy = None
    cdi: Cdi = None


class GpuSpec(InitSpec, frozen=True):
    shared_dev_num: SharedDevNum | None = None
    preferred_allocation_policy: Annotated[
        Literal["balanced", "packed", "none"] | None,
        Meta(description="Order in which shared GPUs are allocated: balanced, packed or none. none when not set."),
    ] = None
    enable_monitoring: Annotated[
        bool, Meta(description="Whether to publish a monitoring resource, which gives access to all GPUs.")
    ] = False
    monitoring_mode: Annotated[
        Literal["split", "single"] | None,
        Meta(description="One monitoring resource for all GPUs (single) or one per driver (split)."),
    ] = None
    resource_manager: Annotated[
        bool, Meta(description="Whether to publish fractional resources, which the Go project removed in 0.34.0.")
    ] = False
    allow_ids: Annotated[
        str, Meta(description="PCI device ids of the only GPUs to publish, for example 0x56c0,0x56c1.")
    ] = msgspec.field(name="allowIDs", default="")
    deny_ids: Annotated[str, Meta(description="PCI device ids of GPUs not to publish, for example 0x56c0,0x56c1.")] = (
        msgspec.field(name="denyIDs", default="")
    )
    bypath_mode: Annotated[
        Literal["none", "single", "all"] | None,
        Meta(description="Links of /dev/dri/by-path in containers: none, those of their GPUs (single) or all."),
    ] = None
    health_management: Annotated[
        bool, Meta(description="Whether GPU health is checked with Level-Zero, in an additional container.")
    ] = False
    level_zero_image: Annotated[
        str,
        _limited("Image of the Level-Zero container. If it is set, the container runs without healthManagement.", 1024),
    ] = ""
    xpumd_endpoint: Annotated[
        str, _limited("Unix socket of the XPU Manager daemon on the nodes, for checks of GPU health.", 107)
    ] = ""


class IaaSpec(InitSpec, frozen=True):
    shared_dev_num: SharedDevNum | None = None
    provisioning_config: ProvisioningConfig = ""


class NpuSpec(PluginSpec, frozen=True):
    shared_dev_num: SharedDevNum | None = None


class QatSpec(InitSpec, frozen=True):
    provisioning_config: ProvisioningConfig = ""
    dpdk_driver: Annotated[
        Literal["igb_uio", "vfio-pci"] | None,
        Meta(description="Driver that virtual functions are bound to. vfio-pci when not set."),
    ] = None
    kernel_vf_drivers: Annotated[
        tuple[KernelVfDriver, ...],
        Meta(description="Kernel drivers of the virtual functions to publish. c6xxvf and 4xxxvf when not set."),
    ] = ()
    max_num_devices: (
        Annotated[Count, Meta(description="Maximum number of virtual functions to publish per node. 32 when not set.")]
        | None
    ) = None
    preferred_allocation_policy: Annotated[
        Literal["balanced", "packed"] | None,
        Meta(description="Whether a container gets functions of different devices (balanced) or of one (packed)."),
    ] = None


class SgxSpec(InitSpec, frozen=True):
    enclave_limit: (
        Annotated[Count, Meta(description="Number of containers per node that can use enclaves. 1 when not set.")]
        | None
    ) = None
    provision_limit: (
        Annotated[Count, Meta(description="Number of containers per node that can use provisioning. 1 when not set.")]
        | None
    ) = None
    dcap_infra_resources: Annotated[
        bool, Meta(description="Whether to publish the resources of the DCAP infrastructure. Deprecated.")
    ] = False


# Kinds


class DevicePlugin(Wire, frozen=True):
    """One custom resource. `family` is its kind in other names, for example `intel-<family>-plugin`."""

    family: ClassVar[str]
    about: ClassVar[str]

    kind: str = ""
    metadata: Metadata = Metadata()
    spec: PluginSpec = PluginSpec()
    status: Status | None = None

    @property
    def name(self) -> str:
        return self.metadata.name


class DlbDevicePlugin(DevicePlugin, frozen=True):
    family = "dlb"
    about = "The device plugin for Intel Dynamic Load Balancers."
    kind: str = "DlbDevicePlugin"
    spec: DlbSpec = DlbSpec()


class DsaDevicePlugin(DevicePlugin, frozen=True):
    family = "dsa"
    about = "The device plugin for Intel Data Streaming Accelerators."
    kind: str = "DsaDevicePlugin"
    spec: DsaSpec = DsaSpec()


class FpgaDevicePlugin(DevicePlugin, frozen=True):
    family = "fpga"
    about = "The device plugin for Intel FPGAs."
    kind: str = "FpgaDevicePlugin"
    spec: FpgaSpec = FpgaSpec()


class GenericDevicePlugin(DevicePlugin, frozen=True):
    family = "generic"
    about = "The device plugin for devices that its configuration names: files, USB, PCI and RDMA devices."
    kind: str = "GenericDevicePlugin"
    spec: GenericSpec = GenericSpec()


class GpuDevicePlugin(DevicePlugin, frozen=True):
    family = "gpu"
    about = "The device plugin for Intel GPUs."
    kind: str = "GpuDevicePlugin"
    spec: GpuSpec = GpuSpec()


class IaaDevicePlugin(DevicePlugin, frozen=True):
    family = "iaa"
    about = "The device plugin for Intel In-Memory Analytics Accelerators."
    kind: str = "IaaDevicePlugin"
    spec: IaaSpec = IaaSpec()


class NpuDevicePlugin(DevicePlugin, frozen=True):
    family = "npu"
    about = "The device plugin for Intel neural processing units."
    kind: str = "NpuDevicePlugin"
    spec: NpuSpec = NpuSpec()


class QatDevicePlugin(DevicePlugin, frozen=True):
    family = "qat"
    about = "The device plugin for Intel QuickAssist devices."
    kind: str = "QatDevicePlugin"
    spec: QatSpec = QatSpec()


class SgxDevicePlugin(DevicePlugin, frozen=True):
    family = "sgx"
    about = "The device plugin for Intel Software Guard Extensions."
    kind: str = "SgxDevicePlugin"
    spec: SgxSpec = SgxSpec()


KINDS: Mapping[str, type[DevicePlugin]] = {
    model.family: model
    for model in (
        DlbDevicePlugin,
        DsaDevicePlugin,
        FpgaDevicePlugin,
        GenericDevicePlugin,
        GpuDevicePlugin,
        IaaDevicePlugin,
        NpuDevicePlugin,
        QatDevicePlugin,
        SgxDevicePlugin,
    )
}
BY_KIND: Mapping[str, type[DevicePlugin]] = {model.__name__: model for model in KINDS.values()}
BY_LOWER_KIND: Mapping[str, str] = {kind.lower(): kind for kind in BY_KIND}


def decode(resource: JsonObject) -> DevicePlugin:
    """The custom resource of an object. Raises `msgspec.ValidationError` if it is malformed or of another kind."""
    kind, api_version = resource.get("kind"), resource.get("apiVersion")
    if not isinstance(kind, str) or kind not in BY_KIND:
        expected = BY_LOWER_KIND.get(str(kind).lower()) or f"one of {', '.join(BY_KIND)}"
        raise msgspec.ValidationError(f"kind is {kind!a}, expected {expected}")
    if api_version != API_VERSION:
        raise msgspec.ValidationError(f"apiVersion is {api_version!a}, expected {API_VERSION}")
    return msgspec.convert(resource, BY_KIND[kind])


def effective_selector(plugin: DevicePlugin) -> dict[str, str]:
    """The labels of the nodes that run the plugin: those of the resource, or the default if it has none.

    IAA requires the architecture in addition, as the Go operator does.
    """
    if plugin.family == "iaa":
        return {**plugin.spec.node_selector, **AMD64}
    return dict(plugin.spec.node_selector) or dict(default_selector(plugin.family))


def default_selector(family: str) -> Mapping[str, str]:
    """The labels of the nodes that run a plugin whose resource names none."""
    return {"kubernetes.io/os": "linux"} if family == "generic" else AMD64


def init_image(spec: PluginSpec) -> str:
    """The init container's image; empty for none."""
    return spec.init_image if isinstance(spec, InitSpec) else ""


def provisioning_config(spec: PluginSpec) -> str:
    """Name of the ConfigMap that the init container uses; empty for none."""
    return spec.provisioning_config if isinstance(spec, DsaSpec | IaaSpec | QatSpec) else ""
