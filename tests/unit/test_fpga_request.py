"""The request of a container, from its OCI state and its bundle's configuration."""

import json
from collections.abc import Sequence

import pytest
from bitstreams import HASH, INTERFACE, NLB0, NLB3
from hypothesis import given
from hypothesis import strategies as st

from accelplane.fpga import FpgaError
from accelplane.fpga.ids import IdError
from accelplane.fpga.request import (
    CONFIG_LIMIT,
    STATE_LIMIT,
    Json,
    Pair,
    Request,
    State,
    parse_config,
    parse_state,
    requested_pairs,
)

ANNOTATIONS: Json = {"com.intel.fpga.mode": "fpga.intel.com/region", "io.kubernetes.cri.container-name": "c"}
ENVIRONMENT = ["PATH=/bin", f"FPGA_REGION_1={INTERFACE}", f"FPGA_AFU_1={NLB0}"]
PORT: Json = {"path": "/dev/dfl-port.0", "type": "c", "major": 244, "minor": 0}

documents = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.sampled_from(["/dev/dfl-port.1", *ENVIRONMENT]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["process", "env", "linux", "devices", "path", "bundle", "annotations"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def config(environment: Sequence[Json] = ENVIRONMENT, devices: Json = [PORT]) -> bytes:  # noqa: B006 - read only
    return json.dumps({"process": {"env": environment}, "linux": {"devices": devices}}).encode()


def test_the_state_has_the_bundle_and_the_annotation() -> None:
    state = {"ociVersion": "1.0.2", "id": "x", "pid": 3, "bundle": "/run/b", "annotations": ANNOTATIONS, "more": [1]}
    assert parse_state(json.dumps(state).encode()) == State("/run/b", "fpga.intel.com/region")


@pytest.mark.parametrize("annotations", ["null", "[]", "{}", '{"com.intel.fpga.mode": 1}', '{"other": "x"}'])
def test_annotations_may_be_missing(annotations: str) -> None:
    assert parse_state(f'{{"bundle": "/b", "annotations": {annotations}}}'.encode()) == State("/b", "")


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (b"", "the container's state: not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"[]", "expected a JSON object, found an empty list"),
        (b"{}", "bundle is 'None', expected the path of a directory"),
        (b'{"bundle": ""}', "bundle is '', expected the path"),
        (b'{"bundle": ["/b"]}', "bundle is"),
        (b'{"bundle": "/b\\u0000"}', r"bundle is '/b\\x00'"),
        (b" " * (STATE_LIMIT + 1), "more than 1048576 bytes"),
    ],
    ids=["empty", "cut", "no text", "deep", "a list", "nothing", "no bundle", "bundles", "zero byte", "long"],
)
def test_invalid_states_are_rejected(state: bytes, problem: str) -> None:
    with pytest.raises(FpgaError, match=problem):
        parse_state(state)


def test_the_configuration_has_the_regions_and_ports() -> None:
    devices: Json = [{"path": "/dev/null"}, PORT, {"path": "/dev/dfl-fme.0"}, {"path": "/dev/intel-fpga-port.3"}, PORT]
    assert parse_config(config(devices=devices), "c") == Request(
        (Pair(1, INTERFACE, NLB0),), ("dfl-port.0", "intel-fpga-port.3")
    )


@pytest.mark.parametrize(
    ("environment", "pairs"),
    [
        (ENVIRONMENT, [(1, INTERFACE, NLB0)]),
        ([f"FPGA_AFU_1={NLB0.upper()}", f"FPGA_REGION_1= {INTERFACE[:8]}-{INTERFACE[8:]}"], [(1, INTERFACE, NLB0)]),
        ([*ENVIRONMENT, *ENVIRONMENT], [(1, INTERFACE, NLB0)]),
        ([*ENVIRONMENT, f"FPGA_AFU_7={NLB3}", "FPGA_AFU_x=y", "FPGA_AFU=z", "FPGA_REGION=", "FPGA_REGIONS_1=2"],
         [(1, INTERFACE, NLB0)]),
        (["FPGA_REGION_1=12345678", f"FPGA_AFU_1={HASH}"], [(1, "12345678", HASH)]),
        ([text.replace("_1=", f"_{n}=") for n in (10, 2, 1, 9, 3, 4, 8, 5, 7, 6) for text in ENVIRONMENT],
         [(n, INTERFACE, NLB0) for n in range(1, 11)]),
    ],
    ids=["one", "spelling", "twice the same", "others", "lengths", "ten"],
)  # fmt: skip
def test_pairs_are_ordered_by_their_numbers(environment: list[str], pairs: list[tuple[int, str, str]]) -> None:
    assert requested_pairs(environment) == tuple(Pair(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (["PATH=/bin"], "no variable FPGA_REGION_1; check that the FPGA admission webhook runs"),
        ([f"FPGA_AFU_1={NLB0}"], "no variable FPGA_REGION_1"),
        ([f"FPGA_REGION_1={INTERFACE}"], "variable FPGA_REGION_1 without FPGA_AFU_1, expected both"),
        ([*ENVIRONMENT, f"FPGA_REGION_2={INTERFACE}"], "variable FPGA_REGION_2 without FPGA_AFU_2"),
        ([*ENVIRONMENT, f"FPGA_REGION_3={INTERFACE}", f"FPGA_AFU_3={NLB0}"],
         "variables FPGA_REGION_1, FPGA_REGION_3: expected them numbered from 1 without gaps"),
        ([f"FPGA_REGION_2={INTERFACE}", f"FPGA_AFU_2={NLB0}"], "variables FPGA_REGION_2: expected"),
        ([f"FPGA_REGION_0={INTERFACE}"], "variable 'FPGA_REGION_0': expected a number from 1"),
        ([f"FPGA_REGION_01={INTERFACE}"], "expected a number from 1"),
        ([f"FPGA_REGION_={INTERFACE}"], "expected a number from 1"),
        (["FPGA_REGION_x\n=y"], r"variable 'FPGA_REGION_x\\n': expected a number"),
        ([*ENVIRONMENT, f"FPGA_AFU_1={NLB3}"], "variable 'FPGA_AFU_1' is set twice with different values"),
        ([*ENVIRONMENT, "FPGA_AFU_2"], "variable 'FPGA_AFU_2' has no value"),
    ],
)  # fmt: skip
def test_invalid_variables_are_rejected(environment: list[str], problem: str) -> None:
    with pytest.raises(FpgaError, match=problem):
        requested_pairs(environment)


@pytest.mark.parametrize("value", ["", "../../../../etc/passwd", "1234567", "0" * 41, "d8424dc4 a4a3c413", "$(X)"])
def test_values_that_are_no_ids_are_rejected(value: str) -> None:
    with pytest.raises(IdError, match=r"FPGA_AFU_1 .*: expected 8 to 40 hexadecimal digits"):
        requested_pairs([f"FPGA_REGION_1={INTERFACE}", f"FPGA_AFU_1={value}"])
    with pytest.raises(IdError, match=r"FPGA_REGION_1 .*: expected 8 to 40 hexadecimal digits"):
        requested_pairs([f"FPGA_REGION_1={value}", f"FPGA_AFU_1={NLB0}"])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "^/b/config.json: not JSON"),
        (b"7", "expected a JSON object, found '7'"),
        (b"{}", "process is nothing, expected an object"),
        (b'{"process": {}}', r"process\.env: expected a list of strings, found nothing"),
        (config([]), r"process\.env: expected a list of strings, found an empty list"),
        (config(["A=b", 7]), r"process\.env: expected only strings"),
        (b'{"process": {"env": ["FPGA_REGION_1=12345678", "FPGA_AFU_1=12345678"]}}', "linux is nothing"),
        (config(devices=[]), r"linux\.devices: expected a list of devices, found an empty list"),
        (config(devices=None), r"linux\.devices: expected a list of devices, found nothing"),
        (config(devices=[{}]), r"linux\.devices: a device without a path"),
        (config(devices=["/dev/dfl-port.0"]), r"linux\.devices: a device without a path"),
        (config(devices=[{"path": "/dev/null"}]), r"AFUs requested: 1 .*, FPGA ports .*: 0 \(none\)"),
        (config([text.replace("_1", f"_{n}") for n in (1, 2) for text in ENVIRONMENT]),
         r"requested: 2 \(up to FPGA_REGION_2\), FPGA ports of the container: 1 \(dfl-port\.0\); expected at least"),
        (b" " * (CONFIG_LIMIT + 1), "more than 16777216 bytes"),
    ],
    ids=["empty", "number", "no process", "no env", "empty env", "env", "no linux", "no devices", "null devices",
         "no path", "texts", "no port", "more pairs than ports", "long"],
)  # fmt: skip
def test_invalid_configurations_are_rejected(content: bytes, problem: str) -> None:
    with pytest.raises(FpgaError, match=problem):
        parse_config(content, "/b/config.json")


@given(st.one_of(st.binary(max_size=300), documents.map(lambda found: json.dumps(found).encode())))
def test_any_document_is_parsed_or_rejected_in_one_line(document: bytes) -> None:
    for parse in (parse_state, lambda data: parse_config(data, "config")):
        try:
            parse(document)
        except FpgaError as error:
            message = str(error)
            assert message.isprintable()


@given(st.lists(st.tuples(st.sampled_from(["FPGA_REGION_", "FPGA_AFU_"]), st.text(max_size=3), st.text(max_size=12))))
def test_any_environment_is_parsed_or_rejected(
    variables: list[tuple[str, str, str]],
) -> None:
    try:
        pairs = requested_pairs([f"{prefix}{suffix}={value}" for prefix, suffix, value in variables])
    except FpgaError as error:
        message = str(error)
        assert message.isprintable()
        return
    assert [pair.number for pair in pairs] == list(range(1, len(pairs) + 1))
    assert all(set(pair.region + pair.afu) <= set("0123456789abcdef") for pair in pairs)
