"""The webhook for opaque device configuration: the rules of the node, when objects are created."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accelplane.admission.deviceconfig import validator
from accelplane.dra.configuration import KINDS, parse
from accelplane.dra.model import ClaimError
from accelplane.kube.admission import Decision, Kind, Review

Json = dict[str, Any]
GPU, FPGA = "gpu.intel.com", "fpga.intel.com"
PLACES = {
    "ResourceClaim": "spec.devices.config",
    "ResourceClaimTemplate": "spec.spec.devices.config",
    "DeviceClass": "spec.config",
}


def opaque(driver: str = GPU, /, **fields: Any) -> Json:
    kind = KINDS[driver].__name__ if driver in KINDS else "Config"
    return {"opaque": {"driver": driver, "parameters": {"apiVersion": f"{driver}/v1alpha1", "kind": kind, **fields}}}


def containing(kind: str, configurations: object) -> Json:
    """An object of the kind with this list of configurations."""
    found: Any = configurations
    for name in reversed(PLACES[kind].split(".")):
        found = {name: found}
    return found


def review(kind: str, found: object, group: str = "resource.k8s.io") -> Decision:
    text = json.dumps(found).encode()
    return validator().handle(Review("u", "CREATE", Kind(group, "v1", kind), object=msgspec.Raw(text)))


def message(kind: str, configurations: Sequence[Json]) -> str:
    """Why an object with these configurations is denied; empty if it is not."""
    denial = review(kind, containing(kind, configurations)).denial
    assert denial is None or (denial.code, denial.reason) == (422, "Invalid")
    return denial.message if denial is not None else ""


@pytest.mark.parametrize("kind", PLACES)
def test_a_misspelt_field_is_denied_with_its_place_and_the_nearest_field(kind: str) -> None:
    text = message(kind, [{}, opaque(access="vfio"), opaque(acess="vfio")])
    assert text.startswith(f"{PLACES[kind]}[2].opaque.parameters: configuration of the ")
    assert "unknown field 'acess' of GpuConfig; did you mean access?" in text


def test_fields_of_classes_are_denied_in_claims_and_templates_only() -> None:
    assert message("DeviceClass", [opaque(FPGA, release="reset")]) == ""
    for kind in ("ResourceClaim", "ResourceClaimTemplate"):
        assert "release can only be set in a device class" in message(kind, [opaque(FPGA, release="reset")])


def test_all_problems_of_an_object_are_in_one_message() -> None:
    text = message("ResourceClaim", [opaque(acess="vfio"), opaque(FPGA, afu="../x"), opaque()])
    assert "config[0]" in text
    assert "config[1]" in text
    assert "config[2]" not in text


@pytest.mark.parametrize("kind", PLACES)
def test_objects_without_our_configuration_are_allowed(kind: str) -> None:
    foreign = {"opaque": {"driver": "net.example.com", "parameters": {"acess": 1}}}
    for configurations in (None, [], [{}], [foreign], [opaque()], [{"requests": ["gpu"], **foreign}]):
        assert review(kind, containing(kind, configurations)).denial is None
    for found in ({}, {"spec": None}, {"spec": {}}, {"spec": {"spec": None, "devices": None}}):
        assert review(kind, found).denial is None


def test_an_update_that_does_not_change_an_invalid_configuration_is_allowed() -> None:
    configuration = opaque(acess="vfio")
    reordered = {"opaque": dict(reversed(configuration["opaque"].items()))}
    for before, allowed in (([reordered], True), ([opaque(access="vfio")], False), (None, False)):
        found, old = (
            msgspec.Raw(json.dumps(containing("DeviceClass", each)).encode()) for each in ([configuration], before)
        )
        kind = Kind("resource.k8s.io", "v1", "DeviceClass")
        decision = validator().handle(Review("u", "UPDATE", kind, object=found, old_object=old))
        assert (decision.denial is None) == allowed


def test_other_kinds_are_denied() -> None:
    for group, kind in (("", "Pod"), ("example.com", "ResourceClaim")):
        denial = review(kind, {}, group).denial
        assert denial is not None
        assert denial.code == 400
        assert "expected DeviceClass, ResourceClaim, ResourceClaimTemplate of resource.k8s.io" in denial.message


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=20)
    | st.sampled_from(["vfio", "reset"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=4,
)
FIELDS = sorted({field.encode_name for kind in KINDS.values() for field in msgspec.structs.fields(kind)})


@given(
    kind=st.sampled_from(sorted(PLACES)),
    driver=st.sampled_from(sorted(KINDS)),
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=9), VALUES, max_size=3),
    replaced=st.none() | VALUES,
)
@example(kind="ResourceClaim", driver=GPU, fields={"access": "vfio", "iommufd": True}, replaced=None)
def test_an_object_is_denied_exactly_if_the_node_would_refuse_its_configuration(
    kind: str, driver: str, fields: Json, replaced: object
) -> None:
    configuration = opaque(driver, **fields)
    if replaced is not None:
        configuration["opaque"]["parameters"] = replaced
    parameters = json.dumps(configuration["opaque"]["parameters"]).encode()
    try:
        parse(driver, parameters, "FromClass" if kind == "DeviceClass" else "FromClaim")
    except ClaimError as error:
        expected = f"{PLACES[kind]}[0].opaque.parameters: {error}"
    else:
        expected = ""
    assert message(kind, [configuration]) == expected


@given(found=VALUES, kind=st.sampled_from(sorted(PLACES)), part=st.sampled_from(range(4)))
def test_any_object_gets_a_decision(found: object, kind: str, part: int) -> None:
    names = PLACES[kind].split(".")[:part]
    for name in reversed(names):
        found = {name: found}
    assert review(kind, found).patch == ()
