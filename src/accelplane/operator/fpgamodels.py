"""The custom resources of `fpga.intel.com/v2`, names for FPGA functions and regions, as types for their definitions.

The patterns are those of the Go operator.
"""

from typing import Annotated

from msgspec import Meta

from accelplane.kube.conditions import Condition
from accelplane.operator.models import Int32, Metadata, Wire

GROUP, VERSION, OLD_VERSION = "fpga.intel.com", "v2", "v1"

InterfaceId = Annotated[
    str,
    Meta(pattern=r"^[0-9a-f]{8,32}$", description="Interface id of the region that the bitstreams were compiled for."),
]


class AcceleratorFunctionSpec(Wire, frozen=True):
    afu_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,40}$", description="Id of the accelerator function.")]
    interface_id: InterfaceId
    # The alternation is not grouped, as in the original: all that starts with af or ends with region matches.
    mode: Annotated[
        str,
        Meta(pattern=r"^af|region$", description="af (already programmed) or region (programmed for the container)."),
    ]


class FpgaRegionSpec(Wire, frozen=True):
    interface_id: InterfaceId


class MappingStatus(Wire, frozen=True):
    """The status that `admission.mapping_status` writes."""

    resource: Annotated[str, Meta(description="Resource that pods get when they request the name.")] = ""
    nodes: Annotated[Int32 | None, Meta(description="Number of nodes that offer the resource.")] = None
    observed_generation: Annotated[
        int,
        Meta(description="Generation of the object that the status describes.", extra_json_schema={"format": "int64"}),
    ] = 0
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(
            description="Conditions of the name, such as Ready.",
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
