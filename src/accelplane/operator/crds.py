"""The CustomResourceDefinitions of the operator, made from the types in `models`.

`python -m accelplane.operator.crds deploy/operator/crd/bases` writes one file for each. A test compares the files with
the types.

    definitions()       the objects of all kinds
    schema_of(model)    the schema of one kind

The API server accepts everything that it accepts with the definitions of the Go operator (v0.31.1 and newer). Limits
and CEL rules (`rules`) concern only fields that those do not have.
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelplane.kube.crds import (
    definition,
    resource_schema,
    struct_type,
    structural_schema,
    version,
    write,
)
from accelplane.kube.jsontypes import Json, JsonObject
from accelplane.kube.rules import validations
from accelplane.operator import fpgamodels, models, rules

_COMMON_RULES: Sequence[Json] = [*validations(rules.UPDATE_STRATEGY), *validations(rules.DRA)]
_RULES: Mapping[str, Sequence[Json]] = {"gpu": [*validations(rules.GPU_HEALTH)]}

_COLUMNS: tuple[Mapping[str, str], ...] = (
    {"name": "Desired", "type": "integer", "jsonPath": ".status.desiredNumberScheduled"},
    {"name": "Ready", "type": "integer", "jsonPath": ".status.numberReady"},
    {"name": "Node Selector", "type": "string", "jsonPath": ".spec.nodeSelector"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    # After those of the Go operator, whose positions scripts rely on.
    {"name": "Available", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Available")].status'},
    {"name": "Degraded", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Degraded")].status'},
)


# Columns of AcceleratorFunction and FpgaRegion. A region has no mode.
_RESOLVED = ({"name": "Resource", "type": "string", "jsonPath": ".status.resource"},)
_MODE = ({"name": "Mode", "type": "string", "jsonPath": ".spec.mode"},)
_OFFERED = (
    {"name": "Nodes", "type": "integer", "jsonPath": ".status.nodes"},
    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
    {"name": "Reason", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].reason'},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)


def definitions() -> list[JsonObject]:
    """The definitions of all kinds."""
    plugins = [_plugin(model) for model in models.KINDS.values()]
    return [
        *plugins,
        _mapping(
            fpgamodels.AcceleratorFunction,
            "af",
            "A name for an accelerator function of an FPGA that pods of the namespace can request.",
            (*_RESOLVED, *_MODE, *_OFFERED),
        ),
        _mapping(
            fpgamodels.FpgaRegion,
            "fpga",
            "A name for a region of an FPGA that pods of the namespace can request.",
            (*_RESOLVED, *_OFFERED),
        ),
    ]


def schema_of(model: type[models.DevicePlugin]) -> JsonObject:
    """The schema that the API server validates resources of a kind with."""
    fields = {field.encode_name: field.type for field in struct_type(model).fields}
    spec = structural_schema(fields["spec"])
    spec["description"] = "Desired state of the device plugin."
    spec["x-kubernetes-validations"] = [*_COMMON_RULES, *_RULES.get(model.family, ())]
    status = structural_schema(fields["status"])
    status["description"] = "State of the device plugin that the operator observed last."
    return resource_schema(model.about, {"spec": spec, "status": status})


def _plugin(model: type[models.DevicePlugin]) -> JsonObject:
    return definition(
        model.__name__,
        models.GROUP,
        scope="Cluster",
        versions=[version(models.VERSION, schema_of(model), columns=_COLUMNS)],
    )


def _mapping(
    model: type[fpgamodels.AcceleratorFunction] | type[fpgamodels.FpgaRegion],
    short_name: str,
    about: str,
    columns: tuple[Mapping[str, str], ...],
) -> JsonObject:
    """The definition of a mapping. The version of April 2020, which has the same fields, is served as well."""
    fields = {field.encode_name: field.type for field in struct_type(model).fields}
    status = structural_schema(fields["status"])
    status["description"] = "The resource that pods get, and the nodes that offer it, as observed last."
    spec = structural_schema(fields["spec"])
    spec["description"] = "Function or region that the name identifies."
    top = resource_schema(about, {"spec": spec, "status": status})
    top["required"] = ["spec"]
    kind = model.__name__
    old, new = (f"{fpgamodels.GROUP}/{served} {kind}" for served in (fpgamodels.OLD_VERSION, fpgamodels.VERSION))
    deprecated: JsonObject = {
        "deprecated": True,
        "deprecationWarning": f"{old} is deprecated: write {new}, its fields are the same",
    }
    return definition(
        model.__name__,
        fpgamodels.GROUP,
        scope="Namespaced",
        versions=[
            version(fpgamodels.VERSION, top, columns=columns),
            # A copy, because YAML writes the second use of an object as an alias.
            version(fpgamodels.OLD_VERSION, copy.deepcopy(top), columns=columns, storage=False) | deprecated,
        ],
        short_names=[short_name],
        # Set because the definition of 2020 has other values, which an apply without these fields would keep.
        more={"conversion": {"strategy": "None"}, "preserveUnknownFields": False},
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]), definitions())
