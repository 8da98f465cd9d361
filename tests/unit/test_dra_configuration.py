"""Opaque configuration of claims and classes: precedence, fields of classes, messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from accelplane.dra.claims import AllocatedConfig
from accelplane.dra.configuration import KINDS, DeviceConfig, FpgaConfig, GpuConfig, for_request, parse
from accelplane.dra.model import ClaimError

GPU, FPGA = "gpu.intel.com", "fpga.intel.com"


def config(
    source: str, driver: str, *, kind: str = "", requests: Sequence[str] | None = None, **fields: Any
) -> AllocatedConfig:
    parameters = {"apiVersion": f"{driver}/v1alpha1", "kind": kind or KINDS[driver].__name__, **fields}
    found: Mapping[str, Any] = {
        "source": source, "requests": requests, "opaque": {"driver": driver, "parameters": parameters}
    }  # fmt: skip
    return msgspec.json.decode(json.dumps(found), type=AllocatedConfig)


def gpu(*configs: AllocatedConfig, request: str = "gpu", device_class: str = GPU) -> GpuConfig:
    return for_request(GPU, request, device_class, configs, GpuConfig)


def problem(driver: str, fields: Mapping[str, Any]) -> str:
    parameters = {"apiVersion": f"{driver}/v1alpha1", "kind": KINDS[driver].__name__, **fields}
    with pytest.raises(ClaimError) as raised:
        parse(driver, json.dumps(parameters).encode(), "FromClaim")
    return str(raised.value)


def test_claim_wins_over_class_as_a_whole_and_the_last_one_wins() -> None:
    by_class = config("FromClass", GPU, byPath="all", affinityMask="0.0")
    claims = [config("FromClaim", GPU, affinityMask=mask) for mask in ("0.1", "1")]

    found = gpu(*claims, by_class)

    assert (found.affinity_mask, found.by_path) == ("1", None)
    assert gpu(by_class).by_path == "all"
    assert gpu() == GpuConfig()


def test_configuration_applies_to_its_requests_and_to_subrequests_of_a_main_request() -> None:
    one = config("FromClaim", GPU, requests=["gpu"], affinityMask="1")

    assert gpu(one, request="gpu/fast").affinity_mask == "1"
    assert gpu(one, request="other").affinity_mask == ""
    part = config("FromClaim", GPU, requests=["gpu/fast"], affinityMask="2")
    assert gpu(one, part, request="gpu/fast").affinity_mask == "2"
    assert gpu(one, part, request="gpu/slow").affinity_mask == "1"
    every = config("FromClaim", GPU, requests=[], affinityMask="3")
    assert gpu(every, request="other").affinity_mask == "3"


def test_other_drivers_are_ignored() -> None:
    foreign = msgspec.json.decode(
        '{"source": "FromClaim", "opaque": {"driver": "net.example.com", "parameters": [1]}}', type=AllocatedConfig
    )

    assert gpu(foreign) == GpuConfig()


def test_field_of_a_class_cannot_be_set_in_a_claim_and_is_not_lost_by_its_configuration() -> None:
    by_class = config("FromClass", FPGA, release="reset", afu="a" * 32)
    by_claim = config("FromClaim", FPGA, afu="b" * 32)

    found = for_request(FPGA, "r", FPGA, [by_class, by_claim], FpgaConfig)

    assert (found.afu, found.release) == ("b" * 32, "reset")
    message = problem(FPGA, {"release": "reset"})
    assert "release can only be set in a device class" in message


def test_class_of_intel_is_a_default() -> None:
    assert gpu(device_class="gpu-vfio.intel.com").access == "vfio"
    assert gpu(config("FromClaim", GPU), device_class="gpu-vfio.intel.com").access == "drm"


@pytest.mark.parametrize(
    ("driver", "fields", "parts"),
    [
        (GPU, {"acess": "vfio"}, ("unknown field 'acess' of GpuConfig", "did you mean access?", "affinityMask")),
        (GPU, {"by_path": "all"}, ("did you mean byPath?",)),
        ("npu.intel.com", {"access": "drm"}, ("unknown field 'access' of NpuConfig", "it has no fields")),
        (GPU, {"access": "vfoi"}, ("access is 'vfoi'", "did you mean vfio?", "expected drm, vfio")),
        (GPU, {"byPath": "al"}, ("byPath is 'al'", "did you mean all?")),
        (GPU, {"iommufd": "yes"}, ("iommufd", "bool")),
        (GPU, {"iommufd": True}, ("needs access: vfio",)),
        (GPU, {"affinityMask": "0;rm"}, ("affinityMask is '0;rm'",)),
        (FPGA, {"afu": "../x"}, ("afu is '../x'",)),
        ("dsa.intel.com", {"requireClientsZero": 1}, ("requireClientsZero", "bool")),
        (GPU, {"kind": "GpuConfg"}, ("kind is 'GpuConfg', expected GpuConfig",)),
        (GPU, {"apiVersion": f"{GPU}/v1"}, ("apiVersion is 'gpu.intel.com/v1', expected gpu.intel.com/v1alpha1",)),
        (GPU, {"kind": 3}, ("expected an object with apiVersion and kind",)),
        (GPU, {"affinityMask": "0," * 6000}, ("expected at most 10240",)),
    ],
)
def test_invalid_configuration_names_the_field_and_what_is_valid(
    driver: str, fields: dict[str, Any], parts: Sequence[str]
) -> None:
    message = problem(driver, fields)

    assert message.startswith(f"configuration of the claim for {driver}: ")
    assert all(part in message for part in parts), message
    assert len(message) <= 300


def test_configuration_of_a_driver_without_kinds_is_refused() -> None:
    with pytest.raises(ClaimError, match="this driver has no configuration"):
        parse("tpu.example.com", b'{"apiVersion": "tpu.example.com/v1", "kind": "TpuConfig"}', "FromClaim")


def test_each_invalid_configuration_is_an_error_also_if_it_does_not_apply() -> None:
    with pytest.raises(ClaimError, match="of the device class"):
        gpu(config("FromClass", GPU, requests=["other"], acess="vfio"))


@pytest.mark.parametrize("kind", KINDS.values())
def test_no_field_is_a_host_path(kind: type[DeviceConfig]) -> None:
    names = [each.encode_name for each in msgspec.structs.fields(kind)]

    assert {name for name in names if "path" in name.lower()} <= {"byPath"}
    assert set(names) >= kind.CLASS_ONLY
