"""Device classes of FPGA functions and regions, and extended resource names that several classes have."""

import json
import re
from typing import Any

import cel
import pytest
from dradevices import published_devices
from manifests import Object

from accelplane.admission.mappings import AcceleratorFunction, FpgaRegion, FunctionSpec, RegionSpec
from accelplane.dra import configuration
from accelplane.dra.configuration import FpgaConfig
from accelplane.fpga.ids import af_type, region_type
from accelplane.kube.objects import Metadata, document_of
from accelplane.operator.deviceclasses import DeviceClass, fpga_classes, name_conflicts

INTERFACE, AFU, OTHER = "69528db6eb31577a8c3668f9faa081f6", "d8424dc4a4a3c413f89e433683f9040b", "f" * 31 + "0"
DRIVER = "fpga.intel.com"
AF_CLASS, REGION_CLASS = f"af-{INTERFACE}-{AFU}.{DRIVER}", f"region-{INTERFACE}.{DRIVER}"


def function(
    mode: str, afu: str = AFU, interface: str = INTERFACE, namespace: str = "a", created: str = ""
) -> AcceleratorFunction:
    spec = FunctionSpec(afu_id=afu, interface_id=interface, mode=mode)
    metadata = Metadata(name="x", namespace=namespace, creationTimestamp=created or None)
    return AcceleratorFunction(metadata=metadata, spec=spec)


def region(interface: str = INTERFACE) -> FpgaRegion:
    return FpgaRegion(metadata=Metadata(name="r", namespace="a"), spec=RegionSpec(interface_id=interface))


def documents(*things: AcceleratorFunction | FpgaRegion, **options: Any) -> dict[str, Object]:
    functions = [each for each in things if isinstance(each, AcceleratorFunction)]
    regions = [each for each in things if isinstance(each, FpgaRegion)]
    return {name: document_of(each) for name, each in fpga_classes(functions, regions, **options).items()}


def selects(document: Object, device: Any) -> bool:
    ((selector,),) = (document["spec"]["selectors"],)
    return cel.matches(selector["cel"]["expression"], device)


def test_functions_and_regions_have_a_class_with_the_resource_of_the_device_plugin() -> None:
    found = documents(function("af"), function("af", namespace="b"), region())
    assert {name: each["spec"]["extendedResourceName"] for name, each in found.items()} == {
        AF_CLASS: f"{DRIVER}/{af_type(INTERFACE, AFU)}",
        REGION_CLASS: f"{DRIVER}/{region_type(INTERFACE)}",
    }
    assert documents(function("af"), naming="legacy63")[AF_CLASS]["spec"]["extendedResourceName"] == (
        f"{DRIVER}/{af_type(INTERFACE, AFU, 'legacy63')}"
    )
    for name, each in found.items():
        assert each["apiVersion"] == "resource.k8s.io/v1"
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", name)
        assert "config" not in each["spec"]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"type": "port", "interfaceId": INTERFACE, "afuId": AFU}, {AF_CLASS}),
        ({"type": "port", "interfaceId": INTERFACE, "afuId": OTHER}, set[str]()),
        ({"type": "port", "interfaceId": OTHER, "afuId": AFU}, set[str]()),
        ({"type": "region", "interfaceId": INTERFACE, "afuId": ""}, {REGION_CLASS}),
        ({"type": "region", "interfaceId": OTHER, "afuId": ""}, set[str]()),
    ],
)
def test_classes_select_the_devices_of_their_ids(attributes: dict[str, object], expected: set[str]) -> None:
    device = cel.device(DRIVER, attributes)
    found = documents(function("af"), region())
    assert {name for name, each in found.items() if selects(each, device)} == expected
    foreign = cel.device("gpu.intel.com", {})
    assert not any(selects(each, foreign) for each in found.values())


def test_the_class_of_a_published_function_has_the_resource_of_its_device() -> None:
    for device, resources in published_devices()[DRIVER]:
        attributes = device["attributes"][DRIVER]
        (found,) = documents(function("af", attributes["afuId"], attributes["interfaceId"])).values()
        assert selects(found, device)
        assert [found["spec"]["extendedResourceName"]] == [f"{DRIVER}/{each}" for each in resources]


def test_a_function_of_mode_region_is_programmed_by_claims_of_its_class() -> None:
    found = documents(function("region"), region())
    ((config,),) = ([each["opaque"] for each in found[AF_CLASS]["spec"]["config"]],)
    assert config["driver"] == DRIVER
    parsed = configuration.parse(DRIVER, json.dumps(config["parameters"]).encode(), "FromClass")
    assert isinstance(parsed, FpgaConfig)
    assert parsed.afu == AFU
    assert selects(found[AF_CLASS], cel.device(DRIVER, {"type": "region", "interfaceId": INTERFACE, "afuId": ""}))
    # The webhook replaces the function's name by the region's resource. A claim for that does not program the function.
    assert not any("extendedResourceName" in each["spec"] for each in found.values())
    assert "extendedResourceName" in documents(function("region", interface=OTHER), region())[REGION_CLASS]["spec"]


@pytest.mark.parametrize("first", ["af", "region"])
def test_a_function_of_another_namespace_does_not_change_the_class_of_an_older_one(first: str) -> None:
    second = {"af": "region", "region": "af"}[first]
    both = [
        function(first, namespace="b", created="2026-01-01T00:00:00Z"),
        function(second, namespace="a", created="2026-01-02T00:00:00Z"),
    ]
    alone = documents(function(first))[AF_CLASS]
    assert documents(*both)[AF_CLASS] == documents(*reversed(both))[AF_CLASS] == alone


@pytest.mark.parametrize(
    "thing", [function("af", afu="0" * 33), function("region", afu="x"), function("afterwards"), region("?")]
)
def test_an_object_without_a_resource_has_no_class(thing: AcceleratorFunction | FpgaRegion) -> None:
    assert documents(thing) == {}


# Extended resource names


def device_class(name: str, resource: str = "") -> DeviceClass:
    return DeviceClass(metadata=Metadata(name=name), spec={"extendedResourceName": resource} if resource else {})


@pytest.mark.parametrize(
    ("classes", "conflict"),
    [
        ({"gpu.intel.com": "", "i915.gpu.intel.com": "gpu.intel.com/i915"}, ""),
        ({"i915.gpu.intel.com": "gpu.intel.com/i915", "mine": "gpu.intel.com/i915"}, "i915.gpu.intel.com, mine"),
        # Intel's name, which an option of its chart sets.
        ({"gpu.intel.com": "intel.com/gpu", "mine": "intel.com/gpu"}, "gpu.intel.com, mine"),
        ({"gpu.example.com": "example.com/gpu", "mine": "example.com/gpu"}, ""),
        ({"cy.qat.intel.com": "qat.intel.com/cy", "mine": "qat.intel.com/cy"}, ""),
        ({"mygpu.intel.com": "example.com/gpu", "mine": "example.com/gpu"}, ""),
    ],
)
def test_an_extended_resource_name_of_several_classes_is_a_conflict_of_the_family(
    classes: dict[str, str], conflict: str
) -> None:
    found = name_conflicts([device_class(*each) for each in classes.items()], "gpu.intel.com")
    assert len(found) == bool(conflict)
    assert all(f"device classes {conflict}, expected one class" in each for each in found)
