"""The definitions are made from the types, and accept what those of the Go operator accept."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from customresources import ACCEPTED_BY_THE_ORIGINAL, ACCEPTED_WITH_DRA, BROKEN_RULES, SAMPLES, plugin, sample
from manifests import own_image

from accelplane.admission.mapping_status import MappingStatus
from accelplane.kube.conditions import condition
from accelplane.kube.crds import write
from accelplane.kube.rules import broken
from accelplane.kube.schemas import violations
from accelplane.operator import crds, models, rules

BASES = Path(__file__).parents[2] / "deploy" / "operator" / "crd" / "bases"
Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
SWITCH: Schema = {"type": "boolean"}
FROM_0: Schema = {"type": "integer", "minimum": 0}
FROM_1: Schema = {"type": "integer", "minimum": 1}
INT32: Schema = {"type": "integer", "format": "int32"}
LABELS: Schema = {"type": "object", "additionalProperties": STRING}
TOLERATION: Schema = {
    "type": "object",
    "properties": {
        **dict.fromkeys(("effect", "key", "operator", "value"), STRING),
        "tolerationSeconds": {"type": "integer", "format": "int64"},
    },
}
ALL = "dlb dsa fpga generic gpu iaa npu qat sgx"


def one_of(words: str) -> Schema:
    return {"type": "string", "enum": sorted(words.split())}


# The specification's table: field, schema, kinds.
FIELDS: list[tuple[str, Schema, str]] = [
    ("image", STRING, ALL),
    ("initImage", STRING, ALL.replace("npu ", "").replace("generic ", "")),
    ("nodeSelector", LABELS, ALL),
    ("tolerations", {"type": "array", "items": TOLERATION}, ALL),
    ("logLevel", FROM_0, ALL),
    ("sharedDevNum", FROM_1, "dsa iaa gpu npu"),
    ("provisioningConfig", STRING, "dsa iaa qat"),
    ("mode", one_of("af region regiondevel"), "fpga"),
    ("preferredAllocationPolicy", one_of("balanced packed none"), "generic gpu"),
    ("preferredAllocationPolicy", one_of("balanced packed"), "qat"),
    ("enableMonitoring", SWITCH, "gpu"),
    ("resourceManager", SWITCH, "gpu"),
    ("dpdkDriver", one_of("igb_uio vfio-pci"), "qat"),
    (
        "kernelVfDrivers",
        {"type": "array", "items": one_of("dh895xccvf c6xxvf c3xxxvf d15xxvf 4xxxvf 420xxvf c4xxxvf 6xxxvf")},
        "qat",
    ),
    ("maxNumDevices", FROM_1, "qat"),
    ("enclaveLimit", FROM_1, "sgx"),
    ("provisionLimit", FROM_1, "sgx"),
    ("driver", {**one_of("idxd vfio-pci"), "default": "idxd"}, "dsa"),
    ("allowIDs", STRING, "gpu"),
    ("denyIDs", STRING, "gpu"),
    ("bypathMode", one_of("none single all"), "gpu"),
    ("monitoringMode", one_of("split single"), "gpu"),
    ("dcapInfraResources", SWITCH, "sgx"),
]
# Fields that the Go project does not have.
OURS = {
    *("dra", "imagePullPolicy", "imagePullSecrets", "podAnnotations", "priorityClassName", "resources"),
    "updateStrategy",
}
OURS_OF_GENERIC = {"cdi", "devices", "domain"}
OURS_OF_GPU = {"healthManagement", "levelZeroImage", "xpumdEndpoint"}


def plain(schema: Any) -> Any:
    """Without descriptions and rules, and with sorted choices."""
    if isinstance(schema, dict):
        return {
            name: sorted(each) if name == "enum" else plain(each)
            for name, each in schema.items()
            if name not in ("description", "x-kubernetes-validations")
        }
    return [plain(each) for each in schema] if isinstance(schema, list) else schema


DEFINITIONS: dict[str, Any] = {each["spec"]["names"]["kind"]: each for each in crds.definitions()}  # type: ignore[index]


def version_of(kind: str) -> Schema:
    """The version that is stored."""
    (version,) = (each for each in DEFINITIONS[kind]["spec"]["versions"] if each["storage"])
    return version


def spec_of(family: str) -> Schema:
    kind = models.KINDS[family].__name__
    return version_of(kind)["schema"]["openAPIV3Schema"]["properties"]["spec"]


def test_the_files_are_up_to_date_with_the_types(tmp_path: Path) -> None:
    stale = tmp_path / "deviceplugin.intel.com_old.yaml"
    stale.touch()
    write(tmp_path, crds.definitions())
    documents = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert documents == {file.name: file.read_text() for file in BASES.iterdir()}
    listed = yaml.safe_load((BASES.parent / "kustomization.yaml").read_text())["resources"]
    assert listed == [f"bases/{name}" for name in sorted(documents)]


@pytest.mark.parametrize("family", ALL.split())
def test_each_kind_has_its_names_and_columns(family: str) -> None:
    kind = f"{family.capitalize()}DevicePlugin"
    definition, version = DEFINITIONS[kind], version_of(kind)
    assert definition["metadata"] == {"name": f"{kind.lower()}s.deviceplugin.intel.com"}
    assert definition["spec"]["group"] == "deviceplugin.intel.com"
    assert definition["spec"]["scope"] == "Cluster"
    assert definition["spec"]["names"] == {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": f"{kind.lower()}s",
        "singular": kind.lower(),
    }
    assert (version["name"], version["served"], version["storage"]) == ("v1", True, True)
    assert version["subresources"] == {"status": {}}
    assert [(each["name"], each["type"], each["jsonPath"]) for each in version["additionalPrinterColumns"]] == [
        ("Desired", "integer", ".status.desiredNumberScheduled"),
        ("Ready", "integer", ".status.numberReady"),
        ("Node Selector", "string", ".spec.nodeSelector"),
        ("Age", "date", ".metadata.creationTimestamp"),
        ("Available", "string", '.status.conditions[?(@.type=="Available")].status'),
        ("Degraded", "string", '.status.conditions[?(@.type=="Degraded")].status'),
    ]
    top = version["schema"]["openAPIV3Schema"]
    assert "required" not in top
    assert "required" not in top["properties"]["spec"]


@pytest.mark.parametrize("family", ALL.split())
def test_a_spec_has_the_fields_of_the_table_and_ours(family: str) -> None:
    expected = {field: schema for field, schema, kinds in FIELDS if family in kinds.split()}
    found = plain(spec_of(family)["properties"])
    further = OURS | {"gpu": OURS_OF_GPU, "generic": OURS_OF_GENERIC}.get(family, set())
    assert set(found) == set(expected) | further
    assert {field: schema for field, schema in found.items() if field in expected} == expected


@pytest.mark.parametrize("family", ALL.split())
def test_a_status_has_the_fields_of_the_original(family: str) -> None:
    kind = models.KINDS[family].__name__
    status = plain(version_of(kind)["schema"]["openAPIV3Schema"]["properties"]["status"])
    assert status["required"] == ["desiredNumberScheduled", "numberReady"]
    assert status["properties"]["desiredNumberScheduled"] == status["properties"]["numberReady"] == INT32
    assert status["properties"]["nodeNames"] == {"type": "array", "items": STRING}
    words = ("apiVersion", "kind", "namespace", "name", "uid", "resourceVersion", "fieldPath")
    assert status["properties"]["controlledDaemonSet"] == {
        "type": "object",
        "x-kubernetes-map-type": "atomic",
        "properties": dict.fromkeys(words, STRING),
    }


@pytest.mark.parametrize(
    ("kind", "short", "fields"),
    [
        (
            "AcceleratorFunction", "af",
            {"afuId": "^[0-9a-f]{8,40}$", "interfaceId": "^[0-9a-f]{8,32}$", "mode": "^af|region$"},
        ),
        ("FpgaRegion", "fpga", {"interfaceId": "^[0-9a-f]{8,32}$"}),
    ],
)  # fmt: skip
def test_a_mapping_has_the_fields_of_the_original(kind: str, short: str, fields: dict[str, str]) -> None:
    definition, version = DEFINITIONS[kind], version_of(kind)
    assert definition["metadata"] == {"name": f"{kind.lower()}s.fpga.intel.com"}
    assert definition["spec"]["scope"] == "Namespaced"
    assert definition["spec"]["names"]["shortNames"] == [short]
    assert (version["name"], version["served"]) == ("v2", True)
    top = plain(version["schema"]["openAPIV3Schema"])
    assert top["required"] == ["spec"]
    assert top["properties"]["status"]["type"] == "object"
    assert "required" not in top["properties"]["status"]
    assert top["properties"]["spec"] == {
        "type": "object",
        "required": sorted(fields),
        "properties": {name: {"type": "string", "pattern": pattern} for name, pattern in fields.items()},
    }


# Additions to the original, which serves only v2 with name and age, and has a status without fields.
COLUMNS_OF_MAPPINGS = [
    ("Resource", "string", ".status.resource"),
    ("Mode", "string", ".spec.mode"),
    ("Nodes", "integer", ".status.nodes"),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
    ("Age", "date", ".metadata.creationTimestamp"),
]


@pytest.mark.parametrize("kind", ["AcceleratorFunction", "FpgaRegion"])
def test_a_mapping_has_a_status_columns_and_the_version_of_2020(kind: str) -> None:
    spec = DEFINITIONS[kind]["spec"]
    assert (spec["conversion"], spec["preserveUnknownFields"]) == ({"strategy": "None"}, False)
    stored, old = spec["versions"]
    assert (old["name"], old["served"], old["storage"], old["deprecated"]) == ("v1", True, False, True)
    assert f"fpga.intel.com/v1 {kind} is deprecated: write fpga.intel.com/v2 {kind}" in old["deprecationWarning"]
    for field in ("schema", "subresources", "additionalPrinterColumns"):
        assert old[field] == stored[field]
    assert stored["subresources"] == {"status": {}}
    columns = [each for each in COLUMNS_OF_MAPPINGS if kind == "AcceleratorFunction" or each[0] != "Mode"]
    assert [(each["name"], each["type"], each["jsonPath"]) for each in stored["additionalPrinterColumns"]] == columns


@pytest.mark.parametrize("kind", ["AcceleratorFunction", "FpgaRegion"])
def test_the_status_of_a_mapping_has_the_fields_that_are_written(kind: str) -> None:
    status = version_of(kind)["schema"]["openAPIV3Schema"]["properties"]["status"]
    assert {*status["properties"]} == {*MappingStatus.__struct_encode_fields__}
    written = MappingStatus("fpga.intel.com/x", 3, 1, [condition("Ready", True, "Offered", "said", generation=1)])
    assert [*violations(json.loads(msgspec.json.encode(written)), status)] == []


def undescribed(schema: Schema, path: str) -> Iterator[str]:
    """The fields below a schema that have no description which is a sentence."""
    for name, each in schema.get("properties", {}).items():
        if not re.search(r"\S\.$", each.get("description", "")):
            yield f"{path}.{name}"
        yield from undescribed(each, f"{path}.{name}")
    if "items" in schema:
        yield from undescribed(schema["items"], f"{path}[]")


@pytest.mark.parametrize("kind", sorted(DEFINITIONS))
def test_every_field_at_every_depth_has_a_description(kind: str) -> None:
    for version in DEFINITIONS[kind]["spec"]["versions"]:
        top = version["schema"]["openAPIV3Schema"]
        assert top["description"].endswith(".")
        found = {*undescribed(top, kind)}
        # The API server describes these itself.
        assert found == {f"{kind}.{name}" for name in ("apiVersion", "kind", "metadata")}


@pytest.mark.parametrize("family", ALL.split())
def test_rules_of_the_api_server_concern_only_fields_that_the_original_does_not_have(family: str) -> None:
    entries = spec_of(family)["x-kubernetes-validations"]
    used = {
        name
        for entry in entries
        for name in re.findall(r"self\.(\w+)", f"{entry['rule']} {entry.get('messageExpression', '')}")
    }
    assert used <= OURS | OURS_OF_GPU
    assert "updateStrategy" in used


@pytest.mark.parametrize(("family", "spec"), ACCEPTED_BY_THE_ORIGINAL)
def test_a_schema_accepts_what_that_of_the_original_accepts(family: str, spec: Schema) -> None:
    assert [*violations(spec, spec_of(family))] == []


@pytest.mark.parametrize(("family", "spec"), ACCEPTED_WITH_DRA)
def test_the_fields_of_dra_are_accepted(family: str, spec: Schema) -> None:
    assert [*violations(spec, spec_of(family))] == []
    assert [*broken(plugin(family, **spec).spec, (*rules.UPDATE_STRATEGY, *rules.DRA))] == []


@pytest.mark.parametrize(("family", "spec"), BROKEN_RULES)
def test_a_violated_rule_has_a_one_line_message_with_the_remedy(family: str, spec: Schema) -> None:
    found = plugin(family, **spec).spec
    of_gpu = rules.GPU_HEALTH if isinstance(found, models.GpuSpec) else ()
    (message, *_) = [*broken(found, (*rules.UPDATE_STRATEGY, *rules.DRA)), *broken(found, of_gpu)]
    assert re.fullmatch(r".+ is .+, expected .+; \S.+", message)


# Family: fields of the sample, init image, label.
SAMPLE_SPECS: dict[str, tuple[dict[str, Any], str, str]] = {
    "dlb": ({}, "intel-dlb-initcontainer", "dlb"),
    "dsa": ({"sharedDevNum": 10}, "intel-idxd-config-initcontainer", "dsa"),
    "fpga": ({"mode": "region"}, "intel-fpga-initcontainer", "fpga-arria10"),
    "generic": (
        {
            "domain": "devices.example.com",
            "devices": [
                {"name": "kvm", "groups": [{"count": 100, "paths": [{"path": "/dev/kvm"}]}]},
                {"name": "serial", "groups": [{"paths": [{"path": f"/dev/tty{kind}*"}]} for kind in ("USB", "ACM")]},
            ],
        },
        "", "generic",
    ),
    "gpu": ({"sharedDevNum": 10, "enableMonitoring": True}, "", "gpu"),
    "iaa": ({"sharedDevNum": 10}, "intel-idxd-config-initcontainer", "iaa"),
    "npu": ({"sharedDevNum": 1}, "", "npu"),
    "qat": (
        {"dpdkDriver": "vfio-pci", "kernelVfDrivers": ["4xxxvf", "420xxvf"], "maxNumDevices": 1},
        "intel-qat-initcontainer", "qat",
    ),
    "sgx": ({"enclaveLimit": 110, "provisionLimit": 110}, "", "sgx"),
}  # fmt: skip


@pytest.mark.parametrize("family", ALL.split())
def test_a_sample_equals_its_table(family: str) -> None:
    own, init_image, label = SAMPLE_SPECS[family]
    init = {"initImage": own_image(init_image)} if init_image else {}
    assert sample(family) == {
        "apiVersion": "deviceplugin.intel.com/v1",
        "kind": f"{family.capitalize()}DevicePlugin",
        "metadata": {"name": f"{family}deviceplugin-sample"},
        "spec": {
            "image": own_image(f"intel-{family}-plugin"),
            "logLevel": 4,
            "nodeSelector": {f"intel.feature.node.kubernetes.io/{label}": "true"},
            **init,
            **own,
        },
    }


def test_the_tree_of_samples_includes_all_samples() -> None:
    listed = yaml.safe_load((SAMPLES / "kustomization.yaml").read_text())["resources"]
    assert listed == [
        *(f"deviceplugin_v1_{family}deviceplugin.yaml" for family in ALL.split()),
        "mappings-collection.yaml",
    ]


def test_the_sample_mappings_are_those_of_the_table() -> None:
    documents = list(yaml.load_all((SAMPLES / "mappings-collection.yaml").read_text(), yaml.CSafeLoader))
    found = {document["metadata"]["name"]: document["spec"] for document in documents}
    boards = {
        "arria10.dcp1.0": "ce48969398f05f33946d560708be108a",
        "arria10.dcp1.1": "9926ab6d6c925a68aabca7d84c545738",
        "arria10.dcp1.2": "69528db6eb31577a8c3668f9faa081f6",
        "d5005": "bfac4d851ee856fe8c95865ce1bbaa2d",
    }
    functions = {"nlb0": "d8424dc4a4a3c413f89e433683f9040b", "nlb3": "f7df405cbd7acf7222f144b0b93acd18"}
    expected: dict[str, Schema] = {board: {"interfaceId": region} for board, region in boards.items()}
    for board, region in boards.items():
        for function, afu in functions.items():
            for how, mode in (("orchestrated", "region"), ("preprogrammed", "af")):
                expected[f"{board}-{function}-{how}"] = {"afuId": afu, "interfaceId": region, "mode": mode}
    matrix = "40007c0623210742000ebc58df6f5343e668b03a"
    expected["d5005-matrix-mult-orchestrated"] = {"afuId": matrix, "interfaceId": boards["d5005"], "mode": "region"}
    assert found == expected
    assert len(documents) == 21
