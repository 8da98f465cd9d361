"""Documents of agents: decoding, and rejection with messages."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.report.decoding import ReportError, decode_inventory, decode_readings
from accelplane.report.inventory import AdvertisedResource, Change, Holder, HoldersSource, ReportedUnit, SkippedHardware
from accelplane.report.limits import MAX_BYTES

I915 = "gpu.intel.com/i915"


def unit(**changes: Any) -> dict[str, Any]:
    return {
        "plugin": "gpu",
        "unit": "card0",
        "device": "card0",
        "bdf": "0000:03:00.0",
        "model": "",
        "numa": 0,
        "phase": "healthy",
        "known": True,
        "reason": "",
        "text": "",
        "since": 1764000001,
        "idle_since": 0,
        "ids": {I915: 8},
        "holders": [
            {"namespace": "a", "pod": "p", "container": "c", "resource": I915, "count": 1, "since": 1764000001}
        ],
        "history": [{"time": 1764000001, "phase": "unhealthy", "reason": "temperature", "text": "93 °C"}],
    } | changes


def plugin(**changes: Any) -> dict[str, Any]:
    resource = {"name": I915, "stage": "registered", "problem": "", "ids": 16, "healthy": 15, "allocated": 3}
    skipped = {"plugin": "gpu", "subject": "card3", "reason": "driver vfio-pci is not supported"}
    return {"name": "gpu", "resources": [resource], "units": [unit()], "skipped": [skipped]} | changes


def inventory(**changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "node": "n1",
        "agent": "accelplane node",
        "versions": {"accelplane": "0.9.0"},
        "generation": "1764000000-17",
        "plugins": [plugin()],
        "holders": {"source": "podresources", "age": 1.2},
    } | changes


def encoded(document: object) -> bytes:
    return msgspec.json.encode(document)


def test_an_inventory_has_all_fields_of_the_agent() -> None:
    found = decode_inventory(encoded(inventory()))
    assert (found.node, found.agent, found.versions) == ("n1", "accelplane node", {"accelplane": "0.9.0"})
    assert (found.generation, found.holders) == ("1764000000-17", HoldersSource("podresources", 1.2))
    (gpus,) = found.plugins
    assert (gpus.name, gpus.resources) == ("gpu", (AdvertisedResource(I915, "registered", "", 16, 15, 3),))
    assert gpus.skipped == (SkippedHardware("gpu", "card3", "driver vfio-pci is not supported"),)
    assert gpus.units == (
        ReportedUnit(
            "gpu",
            "card0",
            device="card0",
            bdf="0000:03:00.0",
            numa=0,
            since=1764000001,
            ids={I915: 8},
            holders=(Holder("a", "p", "c", I915, 1, 1764000001),),
            history=(Change(1764000001, "unhealthy", "temperature", "93 °C"),),
        ),
    )


def test_fields_of_newer_agents_are_ignored() -> None:
    decoded = decode_inventory(encoded(inventory(plugins=[plugin(units=[unit(speed=3)])], cluster={"a": 1})))
    assert decoded == decode_inventory(encoded(inventory()))


def test_an_unknown_numa_node_and_an_unknown_age_are_null() -> None:
    document = inventory(plugins=[plugin(units=[unit(numa=None)])], holders={"source": "", "age": None})
    found = decode_inventory(encoded(document))
    assert [each.numa for each in found.units] == [None]
    assert found.holders.age is None


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (inventory(version=2), "inventory: found version '2', expected 1; run the same version"),
        (inventory(version="x" * 100), "found version 'xxxxxxxxxxxxxxxxxxxx', expected 1"),
        (inventory(generation='1"\r\nX: y'), "$.generation"),
        (inventory(generation="1\n"), "$.generation"),
        (inventory(node="n" * 254), "$.node"),
        (inventory(plugins=[plugin()] * 65), "$.plugins"),
        (inventory(plugins=[plugin(units=[unit(phase="sleeping")])]), "$.plugins[0].units[0].phase"),
        (inventory(plugins=[plugin(units=[unit(since=-1)])]), "units[0].since"),
        (inventory(plugins=[plugin(units=[unit(history=unit()["history"] * 33)])]), "units[0].history"),
        (inventory(plugins=[plugin(units=[unit()] * 3000)] * 3), "inventory: found more than"),
        (inventory(plugins=[plugin(units=[unit(holders=unit()["holders"] * 4096)] * 5)]), "inventory: found more than"),
        ([], "Expected `object`"),
        (None, "Expected `object`"),
    ],
)
def test_a_document_that_is_not_an_inventory_is_rejected(document: object, problem: str) -> None:
    with pytest.raises(ReportError) as caught:
        decode_inventory(encoded(document))
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe", b'{"version": 1', b"[" * 100_000, b'{"version":1e999}'])
def test_content_that_is_not_json_is_rejected(body: bytes) -> None:
    with pytest.raises(ReportError, match=r"^inventory: "):
        decode_inventory(body)


def test_more_than_two_mebibytes_are_rejected_without_decoding() -> None:
    with pytest.raises(ReportError, match=f"^inventory: found more than {MAX_BYTES} bytes"):
        decode_inventory(encoded(inventory()) + b" " * MAX_BYTES)


def test_control_characters_and_changes_of_direction_are_replaced() -> None:
    texts = unit(text="a\x1b[2Jb\u202ec\u2028d", reason="ü ß")
    found = decode_inventory(encoded(inventory(plugins=[plugin(units=[texts])])))
    assert [(each.text, each.reason) for each in found.units] == [("a?[2Jb?c?d", "ü ß")]


def readings(**changes: Any) -> dict[str, Any]:
    value = {"name": "accelplane_device_temperature_celsius", "labels": {"sensor": "package"}, "value": 41.0}
    device = {
        "plugin": "gpu",
        "device": "card0",
        "bdf": "0000:03:00.0",
        "awake": True,
        "stuck": False,
        "values": [value],
        "outcomes": {"ok": 12, "denied": 0},
    }
    return {"version": 1, "node": "n1", "time": 5.5, "plugins": [{"name": "gpu", "devices": [device | changes]}]}


def test_readings_have_values_and_the_outcomes_of_reads() -> None:
    found = decode_readings(encoded(readings()))
    (device,) = found.plugins[0].devices
    assert found.time == 5.5
    assert (device.plugin, device.device, device.bdf, device.awake, device.stuck) == (
        "gpu", "card0", "0000:03:00.0", True, False,
    )  # fmt: skip
    assert [(value.name, value.labels, value.value) for value in device.values] == [
        ("accelplane_device_temperature_celsius", {"sensor": "package"}, 41.0)
    ]
    assert device.outcomes == {"ok": 12, "denied": 0}


def test_invalid_readings_are_rejected() -> None:
    with pytest.raises(ReportError, match=r"^readings: .*awake"):
        decode_readings(encoded(readings(awake="yes")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


def replaced(document: Any, path: list[int], value: Any) -> Any:
    """The document with one of its parts replaced; `path` selects it."""
    if not path or not document or not isinstance(document, dict | list):
        return value
    names = list(document) if isinstance(document, dict) else list(range(len(document)))
    name = names[path[0] % len(names)]
    if isinstance(document, dict):
        return {**document, name: replaced(document[name], path[1:], value)}
    return [*document[:name], replaced(document[name], path[1:], value), *document[name + 1 :]]


def check(body: bytes) -> None:
    for decode in (decode_inventory, decode_readings):
        with contextlib.suppress(ReportError):
            decode(body)


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_rejected(body: bytes) -> None:
    check(body)


@given(st.lists(st.integers(0, 20), max_size=6), JSON)
def test_an_inventory_with_any_wrong_part_is_decoded_or_rejected(path: list[int], value: Any) -> None:
    check(encoded(replaced(inventory(), path, value)))
    check(encoded(replaced(readings(), path, value)))


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=4))
def test_an_inventory_with_wrong_bytes_is_decoded_or_rejected(at: int, wrong: bytes) -> None:
    body = encoded(inventory())
    at %= len(body)
    check(body[:at] + wrong + body[at + len(wrong) :])
