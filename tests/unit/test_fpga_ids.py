"""Ids of FPGA interfaces and functions, and the resource names with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.devices.names import check_resource_name
from accelplane.fpga.ids import (
    CRASHED,
    NAMESPACE,
    IdError,
    Naming,
    af_type,
    canonical,
    hardware_id,
    region_type,
    requested_id,
    resource,
)

INTERFACE = "69528db6eb31577a8c3668f9faa081f6"
NLB0 = "d8424dc4a4a3c413f89e433683f9040b"
HASH = "40007c0623210742000ebc58df6f5343e668b03a"
hexadecimal = st.text("0123456789abcdef", max_size=48)


@pytest.mark.parametrize(
    ("interface", "afu", "naming", "name"),
    [
        (INTERFACE, NLB0, "default", "af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs"),
        (CRASHED, CRASHED, "default", "af-fff.fff.__________________________________________8"),
        (INTERFACE, HASH, "default", "af-695.400.aVKNtusxV3qMNmj5-qCB9kAAfAYjIQdCAA68WN9vU0PmaLA6"),
        ("12345678", "12345678", "default", "af-123.123.EjRWeBI0Vng"),
        (INTERFACE, NLB0, "legacy63", "69528db6eb31577a8c3668f9faa081fd8424dc4a4a3c413f89e433683f9040b"),
        (INTERFACE[:31], NLB0, "legacy63", "69528db6eb31577a8c3668f9faa081fd8424dc4a4a3c413f89e433683f9040b"),
    ],
)
def test_the_name_of_an_af_has_both_ids(interface: str, afu: str, naming: Naming, name: str) -> None:
    assert af_type(interface, afu, naming) == name
    assert check_resource_name(NAMESPACE, name) == resource(name) == f"fpga.intel.com/{name}"


@pytest.mark.parametrize(
    ("interface", "afu", "naming", "problem"),
    [
        ("1", NLB0, "default", "interface id '1': expected at least 3"),
        (INTERFACE, "", "default", "AFU id '': expected at least 3"),
        (INTERFACE, NLB0[:31], "default", "63 digits together, expected an even number"),
        (INTERFACE, "xyz" + NLB0[3:], "default", "AFU id 'xyz24dc4.*hexadecimal"),
        (INTERFACE.upper(), NLB0, "default", "lower-case"),
        (INTERFACE, HASH + "00000000", "default", "at most 63"),
        ("f" * 32, "f" * 40, "default", "expected a letter or digit at its end"),
        (INTERFACE[:30], NLB0, "legacy63", "need at least 31 digits"),
        (INTERFACE, HASH, "legacy63", "71 characters, expected at most 63"),
    ],
)
def test_invalid_object_names_are_never_generated(interface: str, afu: str, naming: Naming, problem: str) -> None:
    with pytest.raises(IdError, match=problem):
        af_type(interface, afu, naming)


def test_the_name_of_a_region_has_the_interface_id() -> None:
    assert region_type(INTERFACE) == f"region-{INTERFACE}"
    assert region_type(CRASHED) == "region-ffffffffffffffffffffffffffffffff"
    with pytest.raises(IdError, match="interface id ''"):
        region_type("")


@given(hexadecimal, hexadecimal, st.sampled_from(["default", "legacy63"]))
def test_every_name_is_valid_for_the_kubelet(interface: str, afu: str, naming: Naming) -> None:
    try:
        name = af_type(interface, afu, naming)
    except IdError:
        return
    assert check_resource_name(NAMESPACE, name) == f"fpga.intel.com/{name}"


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_names_of_hardware_ids_fit_into_a_socket_path(interface: bytes, afu: bytes) -> None:
    name = af_type(interface.hex(), afu.hex())
    assert len(f"/var/lib/kubelet/device-plugins/fpga.intel.com-{name}.sock") <= 107


@pytest.mark.parametrize(
    "text", [NLB0, f" {NLB0}\n", NLB0.upper(), "d8424dc4-a4a3-c413-f89e-433683f9040b", "-" + NLB0 + "-"]
)
def test_ids_are_normalized(text: str) -> None:
    assert canonical(text) == hardware_id(text) == requested_id(text) == NLB0


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, HASH, "g" * 32, "٣" * 32, "0" * 31 + "\n" * 2 + "0"])
def test_hardware_ids_have_32_digits(text: str) -> None:
    with pytest.raises(IdError, match=r"^AFU id .*: expected 32 hexadecimal digits"):
        hardware_id(text, "AFU id")


@pytest.mark.parametrize("text", ["", "1234567", "0" * 41, "../../etc", "12345678/", "1234567\0", "x" * 500])
def test_requested_ids_have_8_to_40_digits(text: str) -> None:
    with pytest.raises(IdError, match="expected 8 to 40 hexadecimal digits") as caught:
        requested_id(text)
    assert len(str(caught.value)) < 150


@given(st.text())
def test_invalid_ids_are_rejected_in_one_line(text: str) -> None:
    for check in (hardware_id, requested_id):
        with pytest.raises(IdError) as caught:
            check(f"x{text}")
        assert str(caught.value).isprintable()
