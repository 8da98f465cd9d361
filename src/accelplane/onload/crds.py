"""The CustomResourceDefinition of Onload, made from the types in `models`.

`python -m accelplane.onload.crds deploy/onload/config/crd/bases` writes it. A test compares the file with the types.

The API server accepts all objects that it accepts with the definition of the Go operator (3.0.1) and that the Go
operator can realize. `rules` lists the additional rules that reject others.
"""

import sys
from pathlib import Path

from accelplane.kube.crds import definition, resource_schema, struct_type, structural_schema, version, write
from accelplane.kube.jsontypes import Json, JsonObject
from accelplane.kube.rules import validations
from accelplane.onload import models, names, rules

_COLUMNS = (
    {"name": "Version", "type": "string", "jsonPath": ".spec.onload.version"},
    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
    {"name": "Nodes", "type": "integer", "jsonPath": ".status.onload.nodesMatching"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)


def onload_definition() -> JsonObject:
    """The object to apply."""
    return definition(
        models.KIND,
        names.GROUP,
        scope="Namespaced",
        versions=[version(names.VERSION, schema(), columns=_COLUMNS)],
    )


def schema() -> JsonObject:
    """The schema that the API server validates resources with."""
    spec = structural_schema(struct_type(models.Spec))
    spec["description"] = "Desired state of Onload on the selected nodes."
    spec["x-kubernetes-validations"] = [*validations(rules.SPEC)]
    _properties(spec)["devicePlugin"] = {
        **_object(_properties(spec)["devicePlugin"]),
        "x-kubernetes-validations": [*validations(rules.DEVICE_PLUGIN)],
    }
    status = structural_schema(struct_type(models.Status))
    status["description"] = "State of Onload that the operator observed last."
    return resource_schema("Onload on nodes with Solarflare network adapters.", {"spec": spec, "status": status})


def _properties(part: JsonObject) -> JsonObject:
    return _object(part["properties"])


def _object(value: Json) -> JsonObject:
    if not isinstance(value, dict):
        raise TypeError(f"found {type(value).__name__}, expected an object")
    return value


if __name__ == "__main__":
    write(Path(sys.argv[1]), [onload_definition()])
