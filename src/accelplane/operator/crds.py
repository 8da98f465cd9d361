"""The CustomResourceDefinitions, made from the types in `models`.

`python -m accelplane.operator.crds deploy/operator/crd/bases` writes one file for each; a test holds them to the types.

    definitions()       the objects of all kinds
    schema_of(model)    the schema of a kind alone
    files()             file name -> text, named as Go's operator named them
    write(directory)    what the command does

Rules about several fields are held by the API server where it can (CEL), so that they hold without a webhook. They
refuse nothing that every release of Go's operator let pass, and `validation` says the same in its own order.
"""

import copy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import inspect

from accelplane.kube.crds import definition, plural_of, resource_schema, struct_type, structural_schema, version
from accelplane.kube.jsontypes import Json, JsonObject
from accelplane.operator import models

_PROVISIONED = models.PROVISIONED_VF_DRIVERS
_NO_CONFIG = "!has(self.provisioningConfig) || self.provisioningConfig == ''"


class Rule(msgspec.Struct, frozen=True):
    """What must hold of a spec, in CEL, and the text of the refusal, in CEL as well."""

    holds: str
    message: str


def _needs_init_image(image: str) -> Rule:
    return Rule(
        f"{_NO_CONFIG} || has(self.initImage) && self.initImage != ''",
        "'provisioningConfig is ' + self.provisioningConfig + ' and initImage is empty, "
        f"expected an image of {image} in initImage'",
    )


def _ids(field: str) -> Rule:
    return Rule(
        f"!has(self.{field}) || self.{field} == '' || self.{field}.matches('{models.PCI_IDS}')",
        f"'{field} is \"' + self.{field} + '\", expected PCI device ids like 0x56c0,0x56c1: lower case, no spaces'",
    )


_RULES: Mapping[type[msgspec.Struct], tuple[Rule, ...]] = {
    models.DsaSpec: (_needs_init_image("intel-idxd-config-initcontainer"),),
    models.IaaSpec: (_needs_init_image("intel-idxd-config-initcontainer"),),
    models.QatSpec: (
        _needs_init_image("intel-qat-initcontainer"),
        Rule(
            # One look for each of them costs the server less than one at each of the list.
            f"{_NO_CONFIG} || has(self.kernelVfDrivers) && "
            f"({' || '.join(f'{driver!r} in self.kernelVfDrivers' for driver in _PROVISIONED)})",
            "'provisioningConfig is ' + self.provisioningConfig + ' and kernelVfDrivers is ' + "
            "(has(self.kernelVfDrivers) ? self.kernelVfDrivers.join(',') : 'empty') + "
            f"', expected one of {', '.join(_PROVISIONED)} in it'",
        ),
    ),
    models.GpuSpec: (
        Rule(
            "!(has(self.sharedDevNum) && self.sharedDevNum == 1 && has(self.preferredAllocationPolicy) && "
            "self.preferredAllocationPolicy in ['balanced', 'packed'])",
            "'preferredAllocationPolicy is ' + self.preferredAllocationPolicy + ' and sharedDevNum is 1, "
            "expected none or sharedDevNum above 1'",
        ),
        Rule(
            "!(has(self.sharedDevNum) && self.sharedDevNum == 1 && has(self.resourceManager) && self.resourceManager)",
            "'resourceManager is true and sharedDevNum is 1, expected false or sharedDevNum above 1'",
        ),
        _ids("allowIDs"),
        _ids("denyIDs"),
        Rule(
            "!(has(self.allowIDs) && self.allowIDs != '' && has(self.denyIDs) && self.denyIDs != '')",
            "'allowIDs is ' + self.allowIDs + ' and denyIDs is ' + self.denyIDs + ', expected one of them or none'",
        ),
        Rule(
            "!(has(self.healthManagement) && self.healthManagement && has(self.xpumdEndpoint) && "
            "self.xpumdEndpoint != '')",
            "'healthManagement is true and xpumdEndpoint is ' + self.xpumdEndpoint + ', expected one of them or none'",
        ),
    ),
}

_COLUMNS: tuple[Mapping[str, str], ...] = (
    {"name": "Desired", "type": "integer", "jsonPath": ".status.desiredNumberScheduled"},
    {"name": "Ready", "type": "integer", "jsonPath": ".status.numberReady"},
    {"name": "Node Selector", "type": "string", "jsonPath": ".spec.nodeSelector"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)


# Of the names for FPGAs; a region has no mode.
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
            models.AcceleratorFunction,
            "af",
            "A name for an accelerator function of an FPGA, to ask for in pods of its namespace.",
            (*_RESOLVED, *_MODE, *_OFFERED),
        ),
        _mapping(
            models.FpgaRegion,
            "fpga",
            "A name for a region of an FPGA, to ask for in pods of its namespace.",
            (*_RESOLVED, *_OFFERED),
        ),
    ]


def schema_of(model: type[models.DevicePlugin]) -> JsonObject:
    """What the API server holds resources of a kind to."""
    fields = {field.encode_name: field.type for field in struct_type(model).fields}
    spec = structural_schema(fields["spec"])
    spec["description"] = "What is wanted of the device plugin."
    spec_model = fields["spec"]
    if isinstance(spec_model, inspect.StructType) and (rules := _RULES.get(spec_model.cls)):
        spec["x-kubernetes-validations"] = [_rule(rule) for rule in rules]
    status = structural_schema(fields["status"])
    status["description"] = "What there is of the device plugin, as the operator saw it last."
    return resource_schema(model.about, {"spec": spec, "status": status})


def files() -> dict[str, str]:
    """The definitions as YAML, by the names of their files."""
    import yaml  # noqa: PLC0415 - the operator itself has no use for it

    found: dict[str, str] = {}
    for kind, made in zip(_kinds(), definitions(), strict=True):
        group = models.FPGA_GROUP if kind in _MAPPINGS else models.GROUP
        found[f"{group}_{plural_of(kind)}.yaml"] = yaml.safe_dump(made, sort_keys=False, width=110)
    return found


def write(directory: Path) -> None:
    """Bring the directory's definitions up to date; what is none of them goes."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = files()
    for file in directory.glob("*.yaml"):
        if file.name not in wanted:
            file.unlink()
    for name, text in wanted.items():
        (directory / name).write_text(text, encoding="utf-8")


_MAPPINGS = ("AcceleratorFunction", "FpgaRegion")


def _kinds() -> Iterator[str]:
    yield from models.BY_KIND
    yield from _MAPPINGS


def _plugin(model: type[models.DevicePlugin]) -> JsonObject:
    return definition(
        model.__name__,
        models.GROUP,
        scope="Cluster",
        versions=[version(models.VERSION, schema_of(model), columns=_COLUMNS)],
    )


def _mapping(
    model: type[models.AcceleratorFunction] | type[models.FpgaRegion],
    short_name: str,
    about: str,
    columns: tuple[Mapping[str, str], ...],
) -> JsonObject:
    """Served as of April 2020, too: the fields are the same, and what is stored as such can be read."""
    fields = {field.encode_name: field.type for field in struct_type(model).fields}
    status = structural_schema(fields["status"])
    status["description"] = "What it stands for, and who has that, as it was seen last."
    top = resource_schema(about, {"spec": structural_schema(fields["spec"]), "status": status})
    top["required"] = ["spec"]
    kind = model.__name__
    old, new = (f"{models.FPGA_GROUP}/{served} {kind}" for served in (models.FPGA_OLD_VERSION, models.FPGA_VERSION))
    deprecated: JsonObject = {
        "deprecated": True,
        "deprecationWarning": f"{old} is deprecated: write {new}, its fields are the same",
    }
    return definition(
        model.__name__,
        models.FPGA_GROUP,
        scope="Namespaced",
        versions=[
            version(models.FPGA_VERSION, top, columns=columns),
            # A copy, lest it be written as a reference.
            version(models.FPGA_OLD_VERSION, copy.deepcopy(top), columns=columns, storage=False) | deprecated,
        ],
        short_names=[short_name],
        # The definition of 2020, of an API that is gone, has it otherwise, and would keep that when this is applied.
        more={"conversion": {"strategy": "None"}, "preserveUnknownFields": False},
    )


def _rule(rule: Rule) -> Json:
    return {"rule": rule.holds, "messageExpression": rule.message}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
