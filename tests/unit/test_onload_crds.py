"""The definition of Onload: the fields of the specification's tables, what it accepts, and the file."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from onloadresources import DEFAULTS, SPEC

from accelplane.kube.crds import write
from accelplane.kube.schemas import violations
from accelplane.onload import crds, rules

BASES = Path(__file__).parents[2] / "deploy" / "onload" / "config" / "crd" / "bases"
Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
SWITCH: Schema = {"type": "boolean"}
EMPTY: Schema = {"type": "object"}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def struct(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties} | ({"required": sorted(required.split())} if required else {})


# Sections 2.1 to 2.5 of the specification.
BUILD = struct(
    "dockerfileConfigMap",
    buildArgs=array(struct("name value", name=STRING, value=STRING)),
    dockerfileConfigMap=struct(name=STRING) | {"x-kubernetes-map-type": "atomic"},
)
MAPPING = struct("kernelModuleImage regexp", regexp=STRING, kernelModuleImage=STRING, sfc=EMPTY, build=BUILD)
ONLOAD = struct(
    "kernelMappings userImage version",
    kernelMappings=array(MAPPING),
    userImage=STRING,
    version=STRING,
    imagePullPolicy=STRING,
    controlPlane=struct(parameters=array(STRING) | {"default": ["-K"]}),
)
DEVICE_PLUGIN = struct(
    imagePullPolicy=STRING,
    maxPodsPerNode={"type": "integer", "default": 100},
    setPreload=SWITCH | {"default": True},
    mountOnload=SWITCH | {"default": False},
    hostOnloadPath=STRING | {"default": "/opt/onload/"},
    baseMountPath=STRING | {"default": "/opt/onload"},
    binMountPath=STRING | {"default": "/usr/bin"},
    libMounthPath=STRING | {"default": "/usr/lib64"},
)
# Fields that the original does not have. All of them are optional.
OURS = {
    "": {"imagePullSecret", "tolerations", "upgrade"},
    "onload": {"moduleManagement", "moduleParameters"},
    "devicePlugin": {"libMountPath", "preload"},
}


def plain(schema: Any) -> Any:
    """Without descriptions and rules."""
    if isinstance(schema, dict):
        excluded = ("description", "x-kubernetes-validations")
        return {name: plain(each) for name, each in schema.items() if name not in excluded}
    return [plain(each) for each in schema] if isinstance(schema, list) else schema


DEFINITION: Any = crds.onload_definition()
(VERSION,) = DEFINITION["spec"]["versions"]
TOP = VERSION["schema"]["openAPIV3Schema"]
SPEC_SCHEMA, STATUS_SCHEMA = TOP["properties"]["spec"], TOP["properties"]["status"]


def test_the_file_is_up_to_date_with_the_types(tmp_path: Path) -> None:
    write(tmp_path, [DEFINITION])
    documents = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert documents == {file.name: file.read_text() for file in BASES.iterdir()}
    assert [*documents] == ["onload.amd.com_onloads.yaml"]


def test_definitions_have_their_names_and_columns() -> None:
    assert DEFINITION["apiVersion"] == "apiextensions.k8s.io/v1"
    assert DEFINITION["metadata"] == {"name": "onloads.onload.amd.com"}
    names = {"kind": "Onload", "listKind": "OnloadList", "plural": "onloads", "singular": "onload"}
    assert DEFINITION["spec"].keys() == {"group", "names", "scope", "versions"}
    assert (DEFINITION["spec"]["group"], DEFINITION["spec"]["names"]) == ("onload.amd.com", names)
    assert DEFINITION["spec"]["scope"] == "Namespaced"
    assert (VERSION["name"], VERSION["served"], VERSION["storage"]) == ("v1alpha1", True, True)
    assert VERSION["subresources"] == {"status": {}}
    assert [each["name"] for each in VERSION["additionalPrinterColumns"]] == ["Version", "Ready", "Nodes", "Age"]
    assert "required" not in TOP


def test_columns_show_fields_that_exist() -> None:
    for column in VERSION["additionalPrinterColumns"]:
        schema = TOP
        for name in re.sub(r"\[.*?\]", "[]", column["jsonPath"]).strip(".").split("."):
            if schema == {"type": "object"}:
                break  # metadata
            schema = schema["properties"][name.removesuffix("[]")]
            schema = schema["items"] if name.endswith("[]") else schema
        assert schema["type"] in (column["type"], "object")


@pytest.mark.parametrize(
    ("path", "original"), [("onload", ONLOAD), ("devicePlugin", DEVICE_PLUGIN)], ids=["onload", "devicePlugin"]
)
def test_nested_spec_fields_are_those_of_the_table_and_ours(path: str, original: Schema) -> None:
    found = plain(SPEC_SCHEMA["properties"][path])
    further = {name: found["properties"].pop(name) for name in OURS[path]}
    assert found == original
    assert len(further) == 2


def test_the_spec_has_four_required_fields() -> None:
    assert SPEC_SCHEMA["required"] == ["devicePlugin", "onload", "selector", "serviceAccountName"]
    assert {*SPEC_SCHEMA["properties"]} == {*SPEC_SCHEMA["required"]} | OURS[""]
    labels = {"type": "object", "additionalProperties": STRING}
    assert plain(SPEC_SCHEMA["properties"]["selector"]) == labels
    assert plain(SPEC_SCHEMA["properties"]["serviceAccountName"]) == STRING


def test_the_status_has_the_fields_of_the_original() -> None:
    assert STATUS_SCHEMA["required"] == ["devicePlugin", "onload"]
    conditions = STATUS_SCHEMA["properties"]["conditions"]
    assert "x-kubernetes-list-map-keys" not in conditions
    item = plain(conditions["items"])
    assert item["required"] == ["lastTransitionTime", "message", "reason", "status", "type"]
    assert item["properties"]["observedGeneration"] == {"type": "integer", "minimum": 0, "format": "int64"}
    assert item["properties"]["lastTransitionTime"] == {"type": "string", "format": "date-time"}
    assert [*violations({"onload": {}, "devicePlugin": {}}, STATUS_SCHEMA)] == []


def test_the_rule_of_the_original_applies_unless_the_alias_is_set() -> None:
    (rule,) = SPEC_SCHEMA["properties"]["devicePlugin"]["x-kubernetes-validations"]
    assert rule["message"] == "SetPreload and MountOnload mutually exclusive"
    assert rule["rule"].startswith("!(self.setPreload && self.mountOnload)")


def test_other_rules_of_the_api_server_concern_our_fields_or_specs_without_effect() -> None:
    found = [entry["rule"] for entry in SPEC_SCHEMA["x-kubernetes-validations"]]
    of_originals_fields = [rule for rule in found if not re.search(r"self\.(upgrade|onload\.moduleManagement)", rule)]
    assert of_originals_fields == []


def test_messages_of_rules_have_a_remedy() -> None:
    for rule in (*rules.SPEC, *rules.DEVICE_PLUGIN[1:]):
        assert re.fullmatch(r".+ is .+, expected .+; \S.+", rule.message), rule.message


def test_the_defaults_are_those_of_the_table() -> None:
    properties = SPEC_SCHEMA["properties"]["devicePlugin"]["properties"]
    assert {name: each["default"] for name, each in properties.items() if "default" in each} == DEFAULTS


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"serviceAccountName": ""},
        {"devicePlugin": {"maxPodsPerNode": -1, "hostOnloadPath": "x", "imagePullPolicy": "Sometimes"}},
        {"onload": SPEC["onload"] | {"version": "any text", "imagePullPolicy": "x", "userImage": ""}},
        {"onload": SPEC["onload"] | {"controlPlane": {}}},
        {"onload": SPEC["onload"] | {"kernelMappings": [{"regexp": "(", "kernelModuleImage": "", "sfc": {}}]}},
        {"onload": SPEC["onload"] | {"kernelMappings": [{"regexp": "", "kernelModuleImage": "x",
                                                         "build": {"dockerfileConfigMap": {}}}]}},
    ],
)  # fmt: skip
def test_the_schema_accepts_what_that_of_the_original_accepts(change: Schema) -> None:
    assert [*violations(SPEC | change, SPEC_SCHEMA)] == []


def undescribed(schema: Schema, path: str) -> list[str]:
    """The fields below a schema that have no description which is a sentence."""
    found: list[str] = []
    for name, each in schema.get("properties", {}).items():
        if not re.search(r"\S\.$", each.get("description", "")):
            found.append(f"{path}.{name}")
        found += undescribed(each, f"{path}.{name}")
    return found + (undescribed(schema["items"], f"{path}[]") if "items" in schema else [])


def test_every_field_at_every_depth_has_a_description() -> None:
    assert undescribed(SPEC_SCHEMA, "spec") + undescribed(STATUS_SCHEMA, "status") == []


def test_the_kustomization_lists_the_file() -> None:
    listed = yaml.safe_load((BASES.parent / "kustomization.yaml").read_text())["resources"]
    assert listed == [f"bases/{file.name}" for file in BASES.iterdir()]
