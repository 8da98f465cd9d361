"""Names: the kubelet's rules for resources and ids, and their natural order."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.devices import DeviceIdError, ResourceNameError, check_device_id, check_resource_name, natural

LONGEST_NAMESPACE = ("a" * 61 + ".") * 3 + "b" * 58


@pytest.mark.parametrize(
    ("namespace", "resource"),
    [
        ("gpu.intel.com", "i915"),
        ("gpu.intel.com", "i915_monitoring"),
        ("fpga.intel.com", "af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs"),
        ("a", "b"),
        ("a-b.c-d", "A_.-z"),
        ("0", "0"),
        ("requests", "x"),
        ("kubernetes.io.example.com", "x"),
        (LONGEST_NAMESPACE, "x" * 63),
    ],
)
def test_valid_names_are_joined(namespace: str, resource: str) -> None:
    assert check_resource_name(namespace, resource) == f"{namespace}/{resource}"


@pytest.mark.parametrize(
    ("namespace", "resource", "why"),
    [
        ("", "x", "must be a lower-case DNS name"),
        ("GPU.intel.com", "x", "must be a lower-case DNS name"),
        ("gpu_x", "x", "must be a lower-case DNS name"),
        ("-gpu", "x", "must be a lower-case DNS name"),
        ("gpu-.com", "x", "must be a lower-case DNS name"),
        ("gpu..com", "x", "must be a lower-case DNS name"),
        (".com", "x", "must be a lower-case DNS name"),
        ("gpu.com\n", "x", "must be a lower-case DNS name"),
        ("größe", "x", "must be a lower-case DNS name"),
        ("a/b", "x", "must be a lower-case DNS name"),
        (LONGEST_NAMESPACE + "b", "x", "of at most 244 characters"),
        ("kubernetes.io", "x", "reserved by Kubernetes"),
        ("device.kubernetes.io", "x", "reserved by Kubernetes"),
        ("mykubernetes.io", "x", "reserved by Kubernetes"),
        ("requests.example.com", "x", "reserved by Kubernetes"),
        ("gpu.com", "", "1 to 63 characters"),
        ("gpu.com", "x" * 64, "1 to 63 characters"),
        ("gpu.com", "-x", "begin and end with a letter or digit"),
        ("gpu.com", "x_", "begin and end with a letter or digit"),
        ("gpu.com", "a/b", "begin and end with a letter or digit"),
        ("gpu.com", "a b", "begin and end with a letter or digit"),
        ("gpu.com", "x\n", "begin and end with a letter or digit"),
        ("gpu.com", "ö", "begin and end with a letter or digit"),
    ],
)
def test_invalid_names_are_rejected_with_the_violated_rule(namespace: str, resource: str, why: str) -> None:
    with pytest.raises(ResourceNameError, match=why) as caught:
        check_resource_name(namespace, resource)
    assert str(caught.value).isprintable()


@given(st.text(max_size=300), st.text(max_size=80))
def test_any_two_texts_are_a_valid_name_or_rejected(namespace: str, resource: str) -> None:
    try:
        result = check_resource_name(namespace, resource)
        assert re.fullmatch(r"[a-z0-9.-]{1,244}/[A-Za-z0-9_.-]{1,63}", result)
    except ResourceNameError as error:
        result = str(error)
    assert result.isprintable()


@pytest.mark.parametrize("text", ["card0", "card0-15", "0000:3d:00.0", "é", "x" * 253, "a b", "*"])
def test_valid_ids_are_returned(text: str) -> None:
    assert check_device_id(text) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "is empty"), ("x" * 254, "has 254 characters"), ("a\n", "unprintable"), ("\0", "unprintable"),
     ("\udcff", "unprintable"), ("\u200b", "unprintable")],
)  # fmt: skip
def test_invalid_ids_are_rejected(text: str, why: str) -> None:
    with pytest.raises(DeviceIdError, match=why) as caught:
        check_device_id(text)
    assert str(caught.value).isprintable()


@given(st.text(max_size=300))
def test_a_valid_id_can_be_encoded(text: str) -> None:
    try:
        result = check_device_id(text)
    except DeviceIdError as error:
        result = str(error)
    result.encode()
    assert result.isprintable()


@pytest.mark.parametrize(
    "ordered",
    [
        ["card0", "card1", "card2", "card10", "card10-0", "card10-2", "card10-10"],
        ["", "0", "01", "1", "10", "a", "a0", "b"],
        ["wq0.0", "wq0.1", "wq0.10", "wq1.0", "wq10.0"],
        ["x٣", "x10"],
        ["0000:09", "0000:0a", "0000:10", "0000:6b", "0000:70", "0000:7a", "0000:e8"],
        ["0000:6b:00.1", "0000:6b:00.7", "0000:6b:01.0", "0000:6b:0a.0", "0000:6b:10.0", "0000:7a:00.1"],
    ],
)
def test_natural_order(ordered: list[str]) -> None:
    names = ordered[::-1]
    names.sort(key=natural)
    assert names == ordered


TEXTS = (
    st.text(st.sampled_from("a0129.-²٣"), max_size=30)
    | st.text(max_size=10)
    | st.just("9" * 5000)
    | st.from_regex(r"[0-9a-f]{4,5}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", fullmatch=True)
)


@given(TEXTS, TEXTS, TEXTS)
def test_the_order_is_total_and_antisymmetric(one: str, two: str, three: str) -> None:
    a, b, c = natural(one), natural(two), natural(three)
    assert (a == b) == (one == two)
    assert (a < b) + (a == b) + (a > b) == 1
    assert not (a <= b <= c) or a <= c
