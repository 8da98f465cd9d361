"""Device classes that the operator creates for FPGAs, and conflicts with classes of others."""

import asyncio

import pytest
from customresources import resource
from kubeapi import KubeApi, Object
from manifests import own_image
from pluginoperators import condition, has_condition, operator, put
from waiting import until

from accelplane.operator import classcontroller

pytestmark = pytest.mark.virtual_time

INTERFACE, AFU = "69528db6eb31577a8c3668f9faa081f6", "d8424dc4a4a3c413f89e433683f9040b"
AF_CLASS, REGION_CLASS = f"af-{INTERFACE}-{AFU}.fpga.intel.com", f"region-{INTERFACE}.fpga.intel.com"
REGION = f"fpga.intel.com/region-{INTERFACE}"
CONFLICT = "DeviceClassConflict"


def classes(api: KubeApi) -> set[str]:
    return {each["metadata"]["name"] for each in api.all("deviceclasses")}


def put_names(api: KubeApi) -> None:
    about = {"name": "a", "namespace": "n", "generation": 1}
    function = {"afuId": AFU, "interfaceId": INTERFACE, "mode": "af"}
    api.put("acceleratorfunctions", {"metadata": dict(about), "spec": function})
    api.put("fpgaregions", {"metadata": dict(about) | {"name": "r"}, "spec": {"interfaceId": INTERFACE}})


def put_plugin(api: KubeApi, name: str = "mine", *, generation: int = 1, **spec: Object) -> Object:
    return put(api, resource("fpga", name, image=own_image("intel-fpga-plugin"), **spec), generation=generation)


def put_class(api: KubeApi, name: str, extended: str) -> Object:
    return api.put("deviceclasses", {"metadata": {"name": name}, "spec": {"extendedResourceName": extended}})


def owners(api: KubeApi, name: str) -> list[str]:
    return [each["name"] for each in (api.get("deviceclasses", name) or {})["metadata"]["ownerReferences"]]


def message(api: KubeApi, family: str = "fpga") -> str:
    return (condition(api, CONFLICT, family=family) or {})["message"]


async def test_classes_exist_while_a_name_and_a_resource_for_claims_do(api: KubeApi) -> None:
    put_names(api)
    async with operator(api, "fpga", dra=True):
        put_plugin(api)
        await until(lambda: has_condition(api, "Available", "True", family="fpga"))
        await asyncio.sleep(10)
        assert classes(api) == set()
        put_plugin(api, generation=2, dra={})
        await until(lambda: classes(api) == {AF_CLASS, REGION_CLASS})
        assert owners(api, AF_CLASS) == ["mine"]
        await until(lambda: has_condition(api, CONFLICT, "False", family="fpga"))
        api.remove("acceleratorfunctions", "a", "n")
        await until(lambda: classes(api) == {REGION_CLASS})
        put_plugin(api, generation=3, dra={"api": "none"})
        await until(lambda: classes(api) == set())
        await until(lambda: condition(api, CONFLICT, family="fpga") is None)


async def test_an_operator_without_the_rights_for_claims_reads_no_classes(api: KubeApi) -> None:
    put_names(api)
    async with operator(api, "fpga"):
        put_plugin(api)
        await until(lambda: has_condition(api, "Available", "True", family="fpga"))
    assert api.count("deviceclasses") == 0


async def test_changes_of_a_class_are_corrected_and_a_deleted_class_is_created_again(api: KubeApi) -> None:
    put_names(api)
    async with operator(api, "fpga", dra=True):
        put_plugin(api, dra={})
        await until(lambda: classes(api) == {AF_CLASS, REGION_CLASS})
        found = api.get("deviceclasses", REGION_CLASS) or {}
        selectors = found["spec"]["selectors"]
        api.put("deviceclasses", found | {"spec": found["spec"] | {"selectors": [{"cel": {"expression": "true"}}]}})
        await until(lambda: (api.get("deviceclasses", REGION_CLASS) or {})["spec"]["selectors"] == selectors)
        api.remove("deviceclasses", AF_CLASS)
        await until(lambda: AF_CLASS in classes(api))


async def test_the_classes_of_a_malformed_resource_stay(api: KubeApi) -> None:
    put_names(api)
    async with operator(api, "fpga", dra=True):
        put_plugin(api, dra={})
        await until(lambda: classes(api) == {AF_CLASS, REGION_CLASS})
        put(api, resource("fpga", image=own_image("intel-fpga-plugin"), dra={}, logLevel="x"), generation=2)
        await until(lambda: has_condition(api, "Degraded", "True", family="fpga"))
        put_plugin(api, "second", dra={}, nodeSelector={"a": "b"})
        await until(lambda: has_condition(api, "Available", "True", family="fpga", name="second"))
        await asyncio.sleep(10)
        assert classes(api) == {AF_CLASS, REGION_CLASS}
        assert owners(api, AF_CLASS) == ["mine"]
        assert api.count("DELETE .*deviceclasses") == 0


async def test_a_class_does_not_get_a_resource_that_another_class_has(api: KubeApi) -> None:
    put_names(api)
    programmed = {"afuId": AFU, "interfaceId": INTERFACE, "mode": "region"}
    api.put("acceleratorfunctions", {"metadata": {"name": "b", "namespace": "n"}, "spec": programmed})
    async with operator(api, "fpga", dra=True):
        put_plugin(api, dra={})
        await until(lambda: classes(api) == {AF_CLASS, REGION_CLASS})
        assert "extendedResourceName" not in (api.get("deviceclasses", REGION_CLASS) or {})["spec"]
        put_class(api, "mine", REGION)
        api.remove("acceleratorfunctions", "b", "n")
        await until(lambda: has_condition(api, CONFLICT, "True", family="fpga"))
        assert "extendedResourceName" not in (api.get("deviceclasses", REGION_CLASS) or {})["spec"]
        api.remove("deviceclasses", "mine")
        await until(
            lambda: (api.get("deviceclasses", REGION_CLASS) or {})["spec"].get("extendedResourceName") == REGION
        )


async def test_the_classes_of_a_deleted_resource_get_the_other_one_as_owner(api: KubeApi) -> None:
    put_names(api)
    async with operator(api, "fpga", dra=True):
        put_plugin(api, dra={})
        await until(lambda: classes(api) == {AF_CLASS, REGION_CLASS})
        put_plugin(api, "second", dra={}, nodeSelector={"a": "b"})
        api.remove("fpgadeviceplugins", "mine")
        await until(lambda: len(classes(api)) == 2 and owners(api, AF_CLASS) == owners(api, REGION_CLASS) == ["second"])


async def test_a_class_of_the_same_name_is_reported_and_never_changed(api: KubeApi) -> None:
    put_names(api)
    foreign = put_class(api, REGION_CLASS, "example.com/mine")
    async with operator(api, "fpga", dra=True):
        put_plugin(api, dra={})
        await until(lambda: has_condition(api, CONFLICT, "True", family="fpga"))
        assert f"DeviceClass {REGION_CLASS}: found an object of this name without a controller" in message(api)
        await until(lambda: any(each["reason"] == CONFLICT for each in api.all("events")))
        assert classes(api) == {AF_CLASS, REGION_CLASS}
        api.remove("fpgaregions", "r", "n")
        await until(lambda: has_condition(api, CONFLICT, "False", family="fpga"))
        assert api.get("deviceclasses", REGION_CLASS) == foreign
        assert api.count(f"(PATCH|DELETE) .*/deviceclasses/{REGION_CLASS}") == 0


async def test_a_class_whose_resource_another_class_has_is_not_created(api: KubeApi) -> None:
    put_names(api)
    put_class(api, "mine", REGION)
    async with operator(api, "fpga", dra=True):
        put_plugin(api, dra={})
        await until(lambda: has_condition(api, CONFLICT, "True", family="fpga"))
        assert f"{REGION} is that of device class mine; remove it there" in message(api)
        assert classes(api) == {AF_CLASS, "mine"}
        api.remove("deviceclasses", "mine")
        await until(lambda: classes(api) == {AF_CLASS, REGION_CLASS})
        await until(lambda: has_condition(api, CONFLICT, "False", family="fpga"))
        put_class(api, "later", REGION)
        await until(lambda: has_condition(api, CONFLICT, "True", family="fpga"))
        assert f"device classes later, {REGION_CLASS}" in message(api)


async def test_two_classes_with_a_resource_of_another_kind_are_reported(api: KubeApi) -> None:
    for name in ("i915.gpu.intel.com", "mine"):
        put_class(api, name, "gpu.intel.com/i915")
    for name in ("a", "b"):
        put_class(api, name, "devices.example.com/fuse")
    async with operator(api, "gpu", "npu", "generic", dra=True):
        put(api, resource("generic", image=own_image("intel-generic-plugin"), dra={}, domain="devices.example.com"))
        put(api, resource("gpu", image=own_image("intel-gpu-plugin"), dra={}))
        put(api, resource("npu", image=own_image("intel-npu-plugin"), dra={}))
        await until(lambda: has_condition(api, CONFLICT, "True"))
        assert "device classes i915.gpu.intel.com, mine" in message(api, "gpu")
        await until(lambda: has_condition(api, CONFLICT, "False", family="npu"))
        await until(lambda: has_condition(api, CONFLICT, "True", family="generic"))
        api.remove("deviceclasses", "mine")
        await until(lambda: has_condition(api, CONFLICT, "False"))


@pytest.mark.parametrize("status", [403, 404])
async def test_without_device_classes_resources_are_reconciled_as_before(
    api: KubeApi, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rights are those of older manifests, or the API server is older than 1.34."""
    monkeypatch.setattr(classcontroller, "_UNSERVED_RETRY", 5.0)
    put_names(api)
    fault = api.fault("deviceclasses", status, times=1_000_000)
    async with operator(api, "fpga", dra=True):
        put_plugin(api, dra={})
        await until(lambda: has_condition(api, "Available", "True", family="fpga"))
        assert condition(api, CONFLICT, family="fpga") is None
        await asyncio.sleep(20)
        assert api.count("GET .*deviceclasses") < 10
        fault.times = 0
        await until(lambda: classes(api) == {AF_CLASS, REGION_CLASS}, 20)
