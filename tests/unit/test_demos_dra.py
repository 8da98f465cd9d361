"""Demos with claims: their classes exist, and a node with all families has the devices that they select."""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cel
import pytest
import yaml
from dradevices import published_devices
from manifests import DEPLOY, REPOSITORY, Object, own_image, render

from accelplane.dra import configuration

DEMOS = sorted((REPOSITORY / "demo/dra").glob("*.yaml"))
FAMILIES = ("dlb", "dsa", "fpga", "gpu", "iaa", "npu", "qat", "sgx")
GROUP = "resource.k8s.io/v1"


def objects(demo: Path) -> list[Object]:
    return list(yaml.safe_load_all(demo.read_text()))


def claims(demo: Path) -> dict[tuple[str, str], Object]:
    """The devices of claims and templates, by kind and name."""
    found: dict[tuple[str, str], Object] = {}
    for each in objects(demo):
        if each["apiVersion"] == GROUP:
            spec = each["spec"]["spec"] if each["kind"].endswith("Template") else each["spec"]
            found[each["kind"], each["metadata"]["name"]] = spec["devices"]
    return found


def pods(demo: Path) -> list[Object]:
    return [each for each in objects(demo) if each["kind"] == "Pod"]


def selected(request: Object) -> list[Mapping[str, Any]]:
    """The published devices that the class and the selectors of a request match, in the order of the scheduler."""
    (spec,) = (
        each["spec"]
        for each in render(DEPLOY / "dra")
        if each["metadata"]["name"] == request["exactly"]["deviceClassName"]
    )
    selectors = [*spec["selectors"], *request["exactly"].get("selectors", ())]
    devices = itertools.chain.from_iterable(published_devices().values())
    return [
        device for device, _ in devices if all(cel.matches(each["cel"]["expression"], device) for each in selectors)
    ]


def test_every_family_has_a_demo_of_a_single_pod() -> None:
    assert {f"{family}-pod.yaml" for family in FAMILIES} <= {demo.name for demo in DEMOS}


@pytest.mark.parametrize("demo", DEMOS, ids=lambda demo: demo.name)
def test_containers_refer_to_claims_and_requests_of_the_demo(demo: Path) -> None:
    used: set[tuple[str, str]] = set()
    for pod in pods(demo):
        assert pod["spec"]["restartPolicy"] == "Never"
        (source,) = pod["spec"]["resourceClaims"]
        template = source.get("resourceClaimTemplateName")
        key = ("ResourceClaimTemplate", template) if template else ("ResourceClaim", source["resourceClaimName"])
        used.add(key)
        requests = {each["name"] for each in claims(demo)[key]["requests"]}
        for container in pod["spec"]["containers"]:
            assert container["image"] == own_image("accelplane")
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            compile(container["command"][-1], demo.name, "exec")
            (claim,) = container["resources"]["claims"]
            assert claim["name"] == source["name"]
            assert claim.get("request", next(iter(requests))) in requests
    assert used == {*claims(demo)}


@pytest.mark.parametrize("demo", DEMOS, ids=lambda demo: demo.name)
def test_a_node_with_all_families_has_the_requested_devices(demo: Path) -> None:
    for devices in claims(demo).values():
        found = {each["name"]: selected(each) for each in devices["requests"]}
        for request in devices["requests"]:
            assert len(found[request["name"]]) >= request["exactly"].get("count", 1)
        for constraint in devices.get("constraints", ()):
            domain, _, name = constraint["matchAttribute"].partition("/")
            values = [
                {device["attributes"][domain].get(name) for device in found[each]} - {None}
                for each in constraint["requests"]
            ]
            assert set.intersection(*values), constraint


def configurations() -> Iterator[tuple[str, Object]]:
    for demo in DEMOS:
        for devices in claims(demo).values():
            for each in devices.get("config", ()):
                assert {*each["requests"]} <= {request["name"] for request in devices["requests"]}
                yield demo.name, each["opaque"]


def test_configurations_of_claims_are_valid() -> None:
    found = [*configurations()]
    assert len(found) > 1
    for _, opaque in found:
        configuration.parse(opaque["driver"], json.dumps(opaque["parameters"]).encode(), "FromClaim")


def test_monitoring_selects_all_complete_gpus_with_admin_access() -> None:
    (demo,) = (each for each in DEMOS if each.name == "gpu-monitor.yaml")
    ((request,),) = (each["requests"] for each in claims(demo).values())
    assert request["exactly"]["adminAccess"] is True
    assert request["exactly"]["allocationMode"] == "All"
    names = [device["attributes"]["gpu.intel.com"]["pciAddress"] for device in selected(request)]
    assert names == ["0000:03:00.0", "0000:04:00.0"]


def test_a_tile_is_a_part_of_a_gpu_and_no_other_demo_gets_one() -> None:
    for demo in DEMOS:
        for devices in claims(demo).values():
            for request in devices["requests"]:
                types = {device["attributes"][device["driver"]]["type"] for device in selected(request)}
                assert ("tile" in types) == (demo.name == "gpu-tile.yaml")
