"""The custom resources as types: eight kinds of `deviceplugin.intel.com/v1`, two of `fpga.intel.com/v2`.

They hold all fields of the Go operator's releases from 0.31 to 0.36, and those of ours, which are optional. The
definitions for the API server are made from these types (`crds`), so what a field may hold is said here and nowhere
else; rules about several fields are in `validation`. Fields that are unknown are passed over, as the API server does.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from accelplane.kube.jsontypes import JsonObject

GROUP, VERSION = "deviceplugin.intel.com", "v1"
FPGA_GROUP, FPGA_VERSION, FPGA_OLD_VERSION = "fpga.intel.com", "v2", "v1"

Count = Annotated[int, Meta(ge=1)]
Int32 = Annotated[int, Meta(extra_json_schema={"format": "int32"})]
Int64 = Annotated[int, Meta(extra_json_schema={"format": "int64"})]
# A quantity may be written as a number; so may how many nodes are updated at once.
Quantity = Annotated[
    int | str,
    Meta(
        extra_json_schema={
            "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
            r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
        }
    ),
]
# The drivers of those functions whose devices can be told what to do, by a ConfigMap.
PROVISIONED_VF_DRIVERS = ("4xxxvf", "420xxvf", "6xxxvf")
PCI_IDS = "^0x[0-9a-f]{4}(,0x[0-9a-f]{4})*$"
KernelVfDriver = Literal["dh895xccvf", "c6xxvf", "c3xxxvf", "d15xxvf", "4xxxvf", "420xxvf", "c4xxxvf", "6xxxvf"]


class Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Written as the API writes it: names in camel case, what is not set left out."""


# Parts of Kubernetes' own types


class Toleration(Wire, frozen=True):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: Int64 | None = None


class SecretReference(Wire, frozen=True):
    name: Annotated[str, Meta(description="Name of a secret in the plugins' namespace.")]


class Resources(Wire, frozen=True):
    limits: Annotated[Mapping[str, Quantity], Meta(description="The most that the container may use.")] = {}
    requests: Annotated[Mapping[str, Quantity], Meta(description="What is set aside for the container.")] = {}


class RollingUpdate(Wire, frozen=True):
    max_surge: Annotated[
        int | str | None,
        Meta(description="0: two plugins of a kind on a node would both register the same resources."),
    ] = None
    max_unavailable: Annotated[
        int | str | None, Meta(description="How many nodes, or what share of them (10%), are updated at once.")
    ] = None


class UpdateStrategy(Wire, frozen=True):
    type: Annotated[
        Literal["RollingUpdate", "OnDelete"] | None, Meta(description="Whether pods are replaced as nodes go on.")
    ] = None
    rolling_update: RollingUpdate | None = None


class ObjectReference(Wire, frozen=True):
    api_version: str = ""
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    field_path: str = ""


class Metadata(Wire, frozen=True):
    """The part of an object's metadata that the operator looks at."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: str = ""
    annotations: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}


# Status


class Condition(Wire, frozen=True):
    type: Annotated[str, Meta(max_length=316, description="What it is about, for example Available.")]
    status: Annotated[Literal["True", "False", "Unknown"], Meta(description="Whether it is so.")]
    reason: Annotated[str, Meta(max_length=1024, description="Why, in one word for programs.")]
    message: Annotated[str, Meta(max_length=32768, description="Why, for people.")]
    last_transition_time: Annotated[
        str, Meta(description="When the status last changed.", extra_json_schema={"format": "date-time"})
    ]
    observed_generation: Annotated[
        int,
        Meta(ge=0, description="The resource's generation that was looked at.", extra_json_schema={"format": "int64"}),
    ] = 0


class Status(Wire, frozen=True):
    desired_number_scheduled: Annotated[
        Int32, Meta(description="The number of nodes that should run the device plugin's pod.")
    ]
    number_ready: Annotated[Int32, Meta(description="The number of nodes whose pod of the device plugin is ready.")]
    controlled_daemon_set: Annotated[
        ObjectReference | None,
        Meta(
            description="The DaemonSet that runs the device plugin.",
            extra_json_schema={"x-kubernetes-map-type": "atomic"},
        ),
    ] = None
    node_names: Annotated[tuple[str, ...], Meta(description="The nodes that have a pod of the device plugin.")] = ()
    observed_generation: Annotated[
        int,
        Meta(
            description="The generation of this resource that the status is about.",
            extra_json_schema={"format": "int64"},
        ),
    ] = 0
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(
            description="What else there is to say about the device plugin.",
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = ()
    effective_image: Annotated[str, Meta(description="The image that runs where it is not the one of the spec.")] = ""
    effective_init_image: Annotated[
        str, Meta(description="The init container's image that runs where it is not the one of the spec.")
    ] = ""


# Specs

InitImage = Annotated[
    str, Meta(description="Image of the init container, which prepares the node's devices. Without one, none runs.")
]
SharedDevNum = Annotated[Count, Meta(description="How many containers may share a device. 1 when not set.")]
ProvisioningConfig = Annotated[
    str,
    Meta(description="Name of a ConfigMap in the plugins' namespace that the init container sets the devices up by."),
]


class PluginSpec(Wire, frozen=True):
    """The fields of every kind."""

    image: Annotated[str, Meta(description="Image of the device plugin.")] = ""
    node_selector: Annotated[
        Mapping[str, str], Meta(description="Labels of the nodes to run on, kubernetes.io/arch=amd64 when not set.")
    ] = {}
    tolerations: Annotated[tuple[Toleration, ...], Meta(description="Taints of nodes to put up with.")] = ()
    log_level: Annotated[int, Meta(ge=0, description="Verbosity of the log. 0 when not set.")] | None = None
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"] | None, Meta(description="IfNotPresent when not set.")
    ] = None
    image_pull_secrets: Annotated[
        tuple[SecretReference, ...], Meta(description="Secrets to pull the images with, besides the operator's own.")
    ] = ()
    priority_class_name: Annotated[str, Meta(description="Priority class of the pods.")] = ""
    resources: Annotated[
        Resources | None, Meta(description="Resources of the plugin's container, in place of the usual ones.")
    ] = None
    update_strategy: Annotated[
        UpdateStrategy | None, Meta(description="How pods are replaced, one node after the other when not set.")
    ] = None
    pod_annotations: Annotated[Mapping[str, str], Meta(description="Annotations of the pods.")] = {}


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
            description="What is handed out: work queues (idxd) or whole devices (vfio-pci).",
            extra_json_schema={"default": "idxd"},
        ),
    ] = "idxd"


class FpgaSpec(InitSpec, frozen=True):
    mode: Annotated[
        Literal["af", "region", "regiondevel"] | None,
        Meta(description="What is handed out: accelerator functions (af, when not set) or regions to program."),
    ] = None


class GpuSpec(InitSpec, frozen=True):
    shared_dev_num: SharedDevNum | None = None
    preferred_allocation_policy: Annotated[
        Literal["balanced", "packed", "none"] | None,
        Meta(description="Which GPUs a container gets best, where they are shared. none when not set."),
    ] = None
    enable_monitoring: Annotated[bool, Meta(description="Publish resources that hold every GPU, for monitoring.")] = (
        False
    )
    monitoring_mode: Annotated[
        Literal["split", "single"] | None,
        Meta(description="One monitoring resource for all GPUs (single) or one per driver (split)."),
    ] = None
    resource_manager: Annotated[
        bool, Meta(description="Fractional resources; for images of releases up to 0.31, later ones have none.")
    ] = False
    allow_ids: Annotated[str, Meta(description="PCI device ids (0x56c0,0x56c1) to publish, and no others.")] = (
        msgspec.field(name="allowIDs", default="")
    )
    deny_ids: Annotated[str, Meta(description="PCI device ids (0x56c0,0x56c1) not to publish.")] = msgspec.field(
        name="denyIDs", default=""
    )
    bypath_mode: Annotated[
        Literal["none", "single", "all"] | None,
        Meta(description="Which links of /dev/dri/by-path containers get: of their GPUs (single), none or all."),
    ] = None
    health_management: Annotated[
        bool, Meta(description="Judge health by Level-Zero, in a container beside the plugin's.")
    ] = False
    level_zero_image: Annotated[
        str, Meta(description="Image of the Level-Zero container, which then runs even without health management.")
    ] = ""
    xpumd_endpoint: Annotated[
        str, Meta(description="Unix socket of XPU Manager's daemon on the nodes, to judge health by it.")
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
        Meta(description="Driver that virtual functions are given to. vfio-pci when not set."),
    ] = None
    kernel_vf_drivers: Annotated[
        tuple[KernelVfDriver, ...],
        Meta(description="Kernel drivers of the virtual functions to publish. c6xxvf and 4xxxvf when not set."),
    ] = ()
    max_num_devices: Annotated[Count, Meta(description="Most virtual functions on a node. 32 when not set.")] | None = (
        None
    )
    preferred_allocation_policy: Annotated[
        Literal["balanced", "packed"] | None,
        Meta(description="Functions a container gets best: of different devices (balanced) or of one (packed)."),
    ] = None


class SgxSpec(InitSpec, frozen=True):
    enclave_limit: Annotated[Count, Meta(description="Containers with enclaves on a node. 1 when not set.")] | None = (
        None
    )
    provision_limit: (
        Annotated[Count, Meta(description="Containers on a node that may provision. 1 when not set.")] | None
    ) = None
    dcap_infra_resources: Annotated[
        bool, Meta(description="Publish resources for the parts of DCAP. Deprecated from the beginning.")
    ] = False


# Kinds


class DevicePlugin(Wire, frozen=True):
    """One custom resource. `family` is the part of names that stands for its kind, as in `intel-<family>-plugin`."""

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
        GpuDevicePlugin,
        IaaDevicePlugin,
        NpuDevicePlugin,
        QatDevicePlugin,
        SgxDevicePlugin,
    )
}
BY_KIND: Mapping[str, type[DevicePlugin]] = {model.__name__: model for model in KINDS.values()}


def decode(resource: JsonObject) -> DevicePlugin:
    """A custom resource from its object. Raises `msgspec.ValidationError` when it is malformed or of no kind here."""
    kind = resource.get("kind")
    model = BY_KIND.get(kind) if isinstance(kind, str) else None
    if model is None or resource.get("apiVersion") != f"{GROUP}/{VERSION}":
        raise msgspec.ValidationError(
            f"found {resource.get('apiVersion')!a} {kind!a}, expected {GROUP}/{VERSION} and one of {', '.join(BY_KIND)}"
        )
    return msgspec.convert(resource, model)


# Mappings of FPGA names. The API server holds them to these patterns as Go's operator wrote them.

InterfaceId = Annotated[
    str, Meta(pattern=r"^[0-9a-f]{8,32}$", description="Interface id of the region that the bitstreams are made for.")
]


class AcceleratorFunctionSpec(Wire, frozen=True):
    afu_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,40}$", description="Id of the accelerator function.")]
    interface_id: InterfaceId
    # The alternation is not grouped, as ever: what starts with af or ends with region passes.
    mode: Annotated[
        str,
        Meta(pattern=r"^af|region$", description="af (programmed before) or region (programmed for the container)."),
    ]


class FpgaRegionSpec(Wire, frozen=True):
    interface_id: InterfaceId


class MappingStatus(Wire, frozen=True):
    """As `admission.mapping_status` writes it."""

    resource: Annotated[str, Meta(description="What pods that ask for it get.")] = ""
    nodes: Annotated[Int32 | None, Meta(description="How many nodes offer that.")] = None
    observed_generation: Annotated[
        int, Meta(description="The generation that this is said of.", extra_json_schema={"format": "int64"})
    ] = 0
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(
            description="Whether pods may ask for it, and whether some node has it.",
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = ()


class AcceleratorFunction(Wire, frozen=True):
    spec: AcceleratorFunctionSpec
    metadata: Metadata = Metadata()
    status: MappingStatus | None = None


class FpgaRegion(Wire, frozen=True):
    spec: FpgaRegionSpec
    metadata: Metadata = Metadata()
    status: MappingStatus | None = None


def effective_selector(plugin: DevicePlugin) -> dict[str, str]:
    """The labels that a node must have for the plugin to run on it.

    Those of the resource as a whole, or the architecture. IAA demands the architecture in any case.
    """
    architecture = {"kubernetes.io/arch": "amd64"}
    if plugin.family == "iaa":
        return {**plugin.spec.node_selector, **architecture}
    return dict(plugin.spec.node_selector) or architecture


def init_image(spec: PluginSpec) -> str:
    """The init container's image; empty for none."""
    return spec.init_image if isinstance(spec, InitSpec) else ""


def provisioning_config(spec: PluginSpec) -> str:
    """Name of the ConfigMap that the init container uses; empty for none."""
    return spec.provisioning_config if isinstance(spec, DsaSpec | IaaSpec | QatSpec) else ""
