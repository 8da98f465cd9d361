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

from accelplane.operator import models
from accelplane.operator.jsontypes import Json, JsonObject

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
    fields = {field.encode_name: field.type for field in _struct(model).fields}
    spec = _schema(fields["spec"])
    spec["description"] = "What is wanted of the device plugin."
    spec_model = fields["spec"]
    if isinstance(spec_model, inspect.StructType) and (rules := _RULES.get(spec_model.cls)):
        spec["x-kubernetes-validations"] = [_rule(rule) for rule in rules]
    status = _schema(fields["status"])
    status["description"] = "What there is of the device plugin, as the operator saw it last."
    return _object(model.about, {"spec": spec, "status": status})


def files() -> dict[str, str]:
    """The definitions as YAML, by the names of their files."""
    import yaml  # noqa: PLC0415 - the operator itself has no use for it

    found: dict[str, str] = {}
    for kind, definition in zip(_kinds(), definitions(), strict=True):
        group = models.FPGA_GROUP if kind in _MAPPINGS else models.GROUP
        found[f"{group}_{_plural(kind)}.yaml"] = yaml.safe_dump(definition, sort_keys=False, width=110)
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


def _plural(kind: str) -> str:
    return f"{kind.lower()}s"


def _plugin(model: type[models.DevicePlugin]) -> JsonObject:
    return _definition(
        model.__name__,
        models.GROUP,
        scope="Cluster",
        versions=[_version(models.VERSION, _COLUMNS, schema_of(model))],
    )


def _mapping(
    model: type[models.AcceleratorFunction] | type[models.FpgaRegion],
    short_name: str,
    about: str,
    columns: tuple[Mapping[str, str], ...],
) -> JsonObject:
    """Served as of April 2020, too: the fields are the same, and what is stored as such can be read."""
    fields = {field.encode_name: field.type for field in _struct(model).fields}
    status = _schema(fields["status"])
    status["description"] = "What it stands for, and who has that, as it was seen last."
    top = _object(about, {"spec": _schema(fields["spec"]), "status": status})
    top["required"] = ["spec"]
    kind = model.__name__
    old, new = (f"{models.FPGA_GROUP}/{version} {kind}" for version in (models.FPGA_OLD_VERSION, models.FPGA_VERSION))
    deprecated: JsonObject = {
        "deprecated": True,
        "deprecationWarning": f"{old} is deprecated: write {new}, its fields are the same",
    }
    return _definition(
        model.__name__,
        models.FPGA_GROUP,
        scope="Namespaced",
        versions=[
            _version(models.FPGA_VERSION, columns, top),
            # A copy, lest it be written as a reference.
            _version(models.FPGA_OLD_VERSION, columns, copy.deepcopy(top), stored=False) | deprecated,
        ],
        short_names=[short_name],
        # The definition of 2020, of an API that is gone, has it otherwise, and would keep that when this is applied.
        more={"conversion": {"strategy": "None"}, "preserveUnknownFields": False},
    )


def _version(
    name: str, columns: tuple[Mapping[str, str], ...], schema: JsonObject, *, stored: bool = True
) -> JsonObject:
    return {
        "name": name,
        "served": True,
        "storage": stored,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [dict[str, Json](column) for column in columns],
        "schema": {"openAPIV3Schema": schema},
    }


def _definition(
    kind: str,
    group: str,
    *,
    scope: str,
    versions: list[Json],
    short_names: list[Json] | None = None,
    more: JsonObject | None = None,
) -> JsonObject:
    names: JsonObject = {"kind": kind, "listKind": f"{kind}List", "plural": _plural(kind), "singular": kind.lower()}
    if short_names:
        names["shortNames"] = short_names
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{_plural(kind)}.{group}"},
        "spec": {"group": group, "names": names, "scope": scope, "versions": versions, **(more or {})},
    }


def _object(about: str, properties: JsonObject) -> JsonObject:
    return {
        "description": about,
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            **properties,
        },
    }


def _rule(rule: Rule) -> Json:
    return {"rule": rule.holds, "messageExpression": rule.message}


def _struct(model: type[msgspec.Struct]) -> inspect.StructType:
    found = inspect.type_info(model)
    if not isinstance(found, inspect.StructType):
        raise TypeError(f"{model} is no struct")
    return found


def _schema(kind: inspect.Type) -> JsonObject:
    """The structural schema of a type."""
    match kind:
        case inspect.Metadata(type=inner):
            return _described(_schema(inner), kind)
        case inspect.StructType(fields=fields):
            return _structure(fields)
        case inspect.DictType(value_type=value):
            return {"type": "object", "additionalProperties": _schema(value)}
        case inspect.VarTupleType(item_type=item):
            return {"type": "array", "items": _schema(item)}
        case inspect.UnionType(types=types):
            choices = [each for each in types if not isinstance(each, inspect.NoneType)]
            if len(choices) == 1:
                return _schema(choices[0])
            return {"anyOf": [_schema(each) for each in choices], "x-kubernetes-int-or-string": True}
        case inspect.LiteralType(values=values):
            return {"type": "string", "enum": [str(value) for value in values]}
        case inspect.IntType(ge=minimum):
            return _with({"type": "integer"}, minimum=minimum)
        case inspect.StrType(pattern=pattern, max_length=longest):
            return _with({"type": "string"}, pattern=pattern, maxLength=longest)
        case inspect.BoolType():
            return {"type": "boolean"}
        case _:
            raise TypeError(f"no schema for {kind}")


def _structure(fields: tuple[inspect.Field, ...]) -> JsonObject:
    ordered = sorted(fields, key=lambda each: each.encode_name)
    found: JsonObject = {"type": "object", "properties": {each.encode_name: _schema(each.type) for each in ordered}}
    if required := [each.encode_name for each in ordered if each.required]:
        found["required"] = [*required]
    return found


def _with(schema: JsonObject, **limits: Json) -> JsonObject:
    return schema | {name: limit for name, limit in limits.items() if limit is not None}


class _Annotated(msgspec.Struct):
    """The part of msgspec's `Metadata` that is wanted, with its type."""

    extra_json_schema: dict[str, str | list[str]] | None


def _described(schema: JsonObject, metadata: inspect.Metadata) -> JsonObject:
    """With the description first, where a reader looks for it."""
    more: JsonObject = {}
    for name, value in (msgspec.convert(metadata, _Annotated, from_attributes=True).extra_json_schema or {}).items():
        more[name] = [*value] if isinstance(value, list) else value
    return {name: more[name] for name in ("description",) if name in more} | schema | more


if __name__ == "__main__":
    write(Path(sys.argv[1]))
