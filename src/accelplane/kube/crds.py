"""CustomResourceDefinitions made from msgspec types.

    definition(kind, group, scope=…, versions=…)    the object to apply
    version(name, schema, columns=…)                an entry of its `spec.versions`
    resource_schema(description, properties)        the schema of a version
    structural_schema(type)                         the schema of a struct, a field or a part of it
    write(directory, definitions)                   YAML files with the names that controller-gen gives them

Limits and formats are `msgspec.Meta` annotations of the fields. Programs do not import this module at start:
`msgspec.inspect` costs memory that a running operator does not need.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import inspect

from .jsontypes import Json, JsonObject


def definition(
    kind: str,
    group: str,
    *,
    scope: Literal["Cluster", "Namespaced"],
    versions: Sequence[JsonObject],
    short_names: Sequence[str] = (),
    more: Mapping[str, Json] | None = None,
) -> JsonObject:
    """The definition of a kind. `more` are further fields of its `spec`."""
    plural = plural_of(kind)
    names: JsonObject = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    if short_names:
        names["shortNames"] = [*short_names]
    spec: JsonObject = {"group": group, "names": names, "scope": scope, "versions": [*versions]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {**spec, **(more or {})},
    }


def plural_of(kind: str) -> str:
    """The plural of a kind whose English plural ends with s."""
    return f"{kind.lower()}s"


def version(
    name: str, schema: JsonObject, *, columns: Sequence[Mapping[str, str]] = (), storage: bool = True
) -> JsonObject:
    """A served version with a status subresource and printer columns."""
    return {
        "name": name,
        "served": True,
        "storage": storage,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [dict[str, Json](column) for column in columns],
        "schema": {"openAPIV3Schema": schema},
    }


def resource_schema(description: str, properties: JsonObject) -> JsonObject:
    """The schema of a complete resource with these properties besides apiVersion, kind and metadata."""
    return {
        "description": description,
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            **properties,
        },
    }


def files(definitions: Iterable[JsonObject]) -> dict[str, str]:
    """The definitions as YAML, by file name."""
    import yaml  # noqa: PLC0415 - programs do not need it at start

    found: dict[str, str] = {}
    for definition in definitions:
        plural, _, group = msgspec.convert(definition, _Definition).metadata.name.partition(".")
        found[f"{group}_{plural}.yaml"] = yaml.safe_dump(definition, sort_keys=False, width=110)
    return found


def write(directory: Path, definitions: Iterable[JsonObject]) -> None:
    """Writes the definitions to a directory and deletes all other YAML files in it."""
    directory.mkdir(parents=True, exist_ok=True)
    desired = files(definitions)
    for file in directory.glob("*.yaml"):
        if file.name not in desired:
            file.unlink()
    for name, text in desired.items():
        (directory / name).write_text(text, encoding="utf-8")


def struct_type(model: type[msgspec.Struct]) -> inspect.StructType:
    """The description of a struct, with the types of its fields."""
    found = inspect.type_info(model)
    if not isinstance(found, inspect.StructType):
        raise TypeError(f"{model}: found {type(found).__name__}, expected a struct")
    return found


def structural_schema(kind: inspect.Type) -> JsonObject:
    """The structural schema of a type. Raises `TypeError` for a type that no structural schema can express."""
    match kind:
        case inspect.Metadata(type=inner):
            return _annotated(structural_schema(inner), kind)
        case inspect.StructType(fields=fields):
            return _struct_schema(fields)
        case inspect.DictType(value_type=value, max_length=most):
            return _with({"type": "object", "additionalProperties": structural_schema(value)}, maxProperties=most)
        case (
            inspect.VarTupleType(item_type=item, min_length=least, max_length=most)
            | inspect.ListType(item_type=item, min_length=least, max_length=most)
        ):
            return _with({"type": "array", "items": structural_schema(item)}, minItems=least, maxItems=most)
        case inspect.UnionType(types=types):
            choices = [each for each in types if not isinstance(each, inspect.NoneType)]
            if len(choices) == 1:
                return structural_schema(choices[0])
            return {"anyOf": [structural_schema(each) for each in choices], "x-kubernetes-int-or-string": True}
        case inspect.LiteralType(values=values):
            return {"type": "string", "enum": [str(value) for value in values]}
        case inspect.IntType(ge=minimum, le=maximum):
            return _with({"type": "integer"}, minimum=minimum, maximum=maximum)
        case inspect.StrType(pattern=pattern, max_length=longest):
            return _with({"type": "string"}, pattern=pattern, maxLength=longest)
        case inspect.BoolType():
            return {"type": "boolean"}
        case _:
            raise TypeError(f"no structural schema for {kind}")


def _struct_schema(fields: Sequence[inspect.Field]) -> JsonObject:
    ordered = sorted(fields, key=lambda each: each.encode_name)
    found: JsonObject = {"type": "object"}
    if ordered:
        found["properties"] = {each.encode_name: structural_schema(each.type) for each in ordered}
    if required := [each.encode_name for each in ordered if each.required]:
        found["required"] = [*required]
    return found


def _with(schema: JsonObject, **limits: Json) -> JsonObject:
    return schema | {name: limit for name, limit in limits.items() if limit is not None}


class _Name(msgspec.Struct):
    name: str


class _Definition(msgspec.Struct):
    """The part of a definition that names its file."""

    metadata: _Name


class _Extra(msgspec.Struct):
    """The part of `inspect.Metadata` that is used, with its type."""

    extra_json_schema: dict[str, bool | int | str | list[str]] | None


def _annotated(schema: JsonObject, metadata: inspect.Metadata) -> JsonObject:
    """The schema with the extra keys of its annotation, the description first."""
    more: JsonObject = {}
    for name, value in (msgspec.convert(metadata, _Extra, from_attributes=True).extra_json_schema or {}).items():
        more[name] = [*value] if isinstance(value, list) else value
    return {name: more[name] for name in ("description",) if name in more} | schema | more
