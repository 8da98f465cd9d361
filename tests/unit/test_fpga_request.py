"""The request of a container, from its OCI state and its bundle's configuration."""

import json
from collections.abc import Sequence

import pytest
from bitstreams import HASH, INTERFACE, NLB0, NLB3
from hypothesis import given
from hypothesis import strategies as st

from accelplane.fpga import FpgaError
from accelplane.fpga.allocation import HOOK, annotations, hook_arguments
from accelplane.fpga.ids import IdError
from accelplane.fpga.request import (
    CONFIG_LIMIT,
    STATE_LIMIT,
    Json,
    Pair,
    PortDevice,
    Request,
    State,
    parse_config,
    parse_state,
    requested_pairs,
)

ANNOTATIONS: Json = {"com.intel.fpga.mode": "fpga.intel.com/region", "io.kubernetes.cri.container-name": "c"}
PAIR = [f"FPGA_REGION_1={INTERFACE}", f"FPGA_AFU_1={NLB0}"]
ENVIRONMENT = ["PATH=/bin", "FPGA_REGIONS=1", *PAIR]
PORT: Json = {"path": "/dev/dfl-port.0", "type": "c", "major": 244, "minor": 0}
OPAE_PORT: Json = {"path": "/dev/intel-fpga-port.3", "type": "c", "major": 243, "minor": 3}
PORTS = ("dfl-port.0", "intel-fpga-port.3")

documents = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.sampled_from(["/dev/dfl-port.1", *ENVIRONMENT]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["process", "env", "linux", "devices", "path", "bundle", "annotations", "hooks", "args"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def config(
    environment: Sequence[Json] = ENVIRONMENT,
    devices: Json = [PORT],  # noqa: B006 - read only
    allocated: Sequence[str] = PORTS,
    **more: Json,
) -> bytes:
    """The configuration of a container, whose hook by CDI has these ports."""
    hook: Json = {"path": HOOK, "args": [*hook_arguments(allocated)]}
    sections: dict[str, Json] = {"process": {"env": [*environment]}, "linux": {"devices": devices}}
    return json.dumps({**sections, "hooks": {"createRuntime": [hook]}, **more}).encode()


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
    devices: Json = [{"path": "/dev/null"}, PORT, {"path": "/dev/dfl-fme.0", "type": "c"}, OPAE_PORT, PORT]
    assert parse_config(config(devices=devices), "c") == Request(
        (Pair(1, INTERFACE, NLB0),), (PortDevice("dfl-port.0", "244:0"), PortDevice("intel-fpga-port.3", "243:3"))
    )


@pytest.mark.parametrize(
    "change",
    [{"type": "b"}, {"type": "p"}, {"type": None}, {"path": "/x/dfl-port.1"}, {"path": "/dev/x/dfl-port.1"},
     {"path": "//dev/dfl-port.1"}, {"path": "/dev/./dfl-port.1"}, {"path": "dfl-port.1"}, {"major": "244"},
     {"major": None}, {"minor": 1.0}],
    ids=str,
)  # fmt: skip
def test_only_character_devices_of_ports_in_dev_are_ports(change: dict[str, Json]) -> None:
    other: dict[str, Json] = {"path": "/dev/dfl-port.1", "type": "c", "major": 244, "minor": 1}
    allocated = ("dfl-port.0", "dfl-port.1")
    assert [port.name for port in parse_config(config(devices=[other, PORT], allocated=allocated), "c").ports] == [
        "dfl-port.1",
        "dfl-port.0",
    ]
    found = parse_config(config(devices=[{**other, **change}, PORT], allocated=allocated), "c")
    assert found.ports == (PortDevice("dfl-port.0", "244:0"),)


def test_only_ports_in_the_record_of_a_hook_are_used() -> None:
    assert parse_config(config(devices=[OPAE_PORT, PORT], allocated=["dfl-port.0"]), "c").ports == (
        PortDevice("dfl-port.0", "244:0"),
    )
    assert len(parse_config(config(devices=[OPAE_PORT, PORT], allocated=["any"]), "c").ports) == 2
    hooks: list[Json] = [{"path": HOOK, "args": [*hook_arguments([name])]} for name in PORTS]
    both = config(devices=[OPAE_PORT, PORT], hooks={"createRuntime": [{"path": HOOK}, *hooks, {"path": "/bin/x"}]})
    assert len(parse_config(both, "c").ports) == 2


FORGED = json.dumps(dict(annotations("dfl-fme.0", ["dfl-port.0"])))
NO_RECORD: list[dict[str, Json]] = [
    {"hooks": None},
    {"hooks": {"createRuntime": [{"path": HOOK}]}},
    {"hooks": {"createRuntime": [{"path": "/tmp/hook", "args": ["x", "-ports=dfl-port.0"]}]}},
    {"hooks": {"poststop": [{"path": HOOK, "args": ["x", "-ports=dfl-port.0"]}]}},
    {
        "hooks": {"createRuntime": [{"path": HOOK}]},
        "annotations": {"io.kubernetes.cri-o.Annotations": FORGED, "io.kubernetes.cri.container-type": "container"},
    },
    {"hooks": None, "annotations": {"com.intel.fpga.ports/dfl-fme.0": "dfl-port.0"}},
    {"hooks": None, "annotations": {"io.kubernetes.cri-o.Annotations": "{}"}},
    {"hooks": None, "annotations": {"io.kubernetes.cri-o.Annotations": '{"other": "dfl-port.0"}'}},
]


@pytest.mark.parametrize("more", NO_RECORD, ids=str)
def test_a_container_without_a_record_of_allocated_ports_is_rejected(more: dict[str, Json]) -> None:
    with pytest.raises(FpgaError, match=r"^no record of allocated ports: found neither -ports in arguments of /opt"):
        parse_config(config(**more), "c")


# CRI-O 1.34 runs hooks for prestart as createRuntime.
@pytest.mark.parametrize("stage", ["createRuntime", "prestart"])
def test_crio_has_the_record_in_its_copy_of_the_annotations_of_the_kubelet(stage: str) -> None:
    crio = "io.kubernetes.cri-o.Annotations"
    copy: dict[str, str] = {**annotations("dfl-fme.0", ["dfl-port.0"]), **annotations("dfl-fme.1", ["dfl-port.7"])}
    of_pod = annotations("dfl-fme.2", ["intel-fpga-port.3"])
    merged: dict[str, Json] = {**of_pod, **copy, crio: json.dumps(copy)}
    hooks: dict[str, Json] = {stage: [{"path": HOOK}]}
    found = parse_config(config(devices=[OPAE_PORT, PORT], hooks=hooks, annotations=merged), "c")
    assert found.ports == (PortDevice("dfl-port.0", "244:0"),)
    # Other runtimes may give a container all annotations of its pod.
    forged: dict[str, Json] = {crio: json.dumps({**of_pod})}
    found = parse_config(config(devices=[OPAE_PORT, PORT], allocated=["dfl-port.0"], annotations=forged), "c")
    assert found.ports == (PortDevice("dfl-port.0", "244:0"),)
    with pytest.raises(FpgaError, match=r"^annotation io\.kubernetes\.cri-o\.Annotations: not JSON"):
        parse_config(config(hooks=None, annotations={crio: "{"}), "c")


@pytest.mark.parametrize(
    ("environment", "pairs"),
    [
        (ENVIRONMENT, [(1, INTERFACE, NLB0)]),
        (["FPGA_REGIONS=1", f"FPGA_AFU_1={NLB0.upper()}", f"FPGA_REGION_1= {INTERFACE[:8]}-{INTERFACE[8:]}"],
         [(1, INTERFACE, NLB0)]),
        ([*ENVIRONMENT, *ENVIRONMENT], [(1, INTERFACE, NLB0)]),
        ([*ENVIRONMENT, f"FPGA_AFU_7={NLB3}", "FPGA_AFU_x=y", "FPGA_AFU=z", "FPGA_REGION=", "FPGA_REGIONS_1=2"],
         [(1, INTERFACE, NLB0)]),
        (["FPGA_REGIONS=1", "FPGA_REGION_1=12345678", f"FPGA_AFU_1={HASH}"], [(1, "12345678", HASH)]),
        (["FPGA_REGIONS=10",
          *[text.replace("_1=", f"_{n}=") for n in (10, 2, 1, 9, 3, 4, 8, 5, 7, 6) for text in PAIR]],
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
        (["FPGA_REGIONS=1", f"FPGA_REGION_1={INTERFACE}"], "variable FPGA_REGION_1 without FPGA_AFU_1, expected both"),
        (["FPGA_REGIONS=2", *PAIR, f"FPGA_REGION_2={INTERFACE}"], "variable FPGA_REGION_2 without FPGA_AFU_2"),
        (PAIR, "^no variable FPGA_REGIONS; the FPGA admission webhook did not grant FPGA_REGION_1$"),
        ([*ENVIRONMENT, f"FPGA_REGION_2={INTERFACE}", f"FPGA_AFU_2={NLB0}"],
         r"^AFUs requested: 2 \(up to FPGA_REGION_2\), granted by the FPGA admission webhook: 1 \(FPGA_REGIONS\); exp"),
        (["FPGA_REGIONS=0", *PAIR], r"granted by the FPGA admission webhook: 0 \(FPGA_REGIONS\); expected the same"),
        (["FPGA_REGIONS=2", *PAIR], r"AFUs requested: 1 .*, granted by the FPGA admission webhook: 2"),
        (["FPGA_REGIONS=0"], "no variable FPGA_REGION_1"),
        (["FPGA_REGIONS=01", *PAIR], "variable FPGA_REGIONS is '01', expected a number"),
        (["FPGA_REGIONS=", *PAIR], "variable FPGA_REGIONS is '', expected a number"),
        (["FPGA_REGIONS=2", *ENVIRONMENT], "variable 'FPGA_REGIONS' is set to '2' and to '1'; expected one value"),
        ([*ENVIRONMENT, f"FPGA_REGION_3={INTERFACE}", f"FPGA_AFU_3={NLB0}"],
         "variables FPGA_REGION_1, FPGA_REGION_3: expected them numbered from 1 without gaps"),
        ([f"FPGA_REGION_2={INTERFACE}", f"FPGA_AFU_2={NLB0}"], "variables FPGA_REGION_2: expected"),
        ([f"FPGA_REGION_0={INTERFACE}"], "variable 'FPGA_REGION_0': expected a number from 1"),
        ([f"FPGA_REGION_01={INTERFACE}"], "expected a number from 1"),
        ([f"FPGA_REGION_={INTERFACE}"], "expected a number from 1"),
        (["FPGA_REGION_x\n=y"], r"variable 'FPGA_REGION_x\\n': expected a number"),
        ([*ENVIRONMENT, f"FPGA_AFU_1={NLB3}"],
         f"variable 'FPGA_AFU_1' is set to '{NLB0}' and to '{NLB3}'; expected one value"),
        ([*ENVIRONMENT, "FPGA_AFU_2"], "variable 'FPGA_AFU_2' has no value"),
    ],
)  # fmt: skip
def test_invalid_variables_are_rejected(environment: list[str], problem: str) -> None:
    with pytest.raises(FpgaError, match=problem):
        requested_pairs(environment)


@pytest.mark.parametrize("value", ["", "../../../../etc/passwd", "1234567", "0" * 41, "d8424dc4 a4a3c413", "$(X)"])
def test_values_that_are_no_ids_are_rejected(value: str) -> None:
    with pytest.raises(IdError, match=r"FPGA_AFU_1 .*: expected 8 to 40 hexadecimal digits"):
        requested_pairs(["FPGA_REGIONS=1", f"FPGA_REGION_1={INTERFACE}", f"FPGA_AFU_1={value}"])
    with pytest.raises(IdError, match=r"FPGA_REGION_1 .*: expected 8 to 40 hexadecimal digits"):
        requested_pairs(["FPGA_REGIONS=1", f"FPGA_REGION_1={value}", f"FPGA_AFU_1={NLB0}"])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "^/b/config.json: not JSON"),
        (b"7", "expected a JSON object, found '7'"),
        (b"{}", "process is nothing, expected an object"),
        (b'{"process": {}}', r"process\.env: expected a list of strings, found nothing"),
        (config([]), r"process\.env: expected a list of strings, found an empty list"),
        (config(["A=b", 7]), r"process\.env: expected only strings"),
        (config(linux=None), "linux is nothing"),
        (config(devices=[]), r"linux\.devices: expected a list of devices, found an empty list"),
        (config(devices=None), r"linux\.devices: expected a list of devices, found nothing"),
        (config(devices=[{}]), r"linux\.devices: a device without a path"),
        (config(devices=["/dev/dfl-port.0"]), r"linux\.devices: a device without a path"),
        (config(devices=[{"path": "/dev/null"}]), r"AFUs requested: 1 .*, FPGA ports .*: 0 \(none\)"),
        (config(["FPGA_REGIONS=2", *[text.replace("_1", f"_{n}") for n in (1, 2) for text in PAIR]]),
         r"requested: 2 \(up to FPGA_REGION_2\), FPGA ports of the container: 1 \(dfl-port\.0\); .*allocated: dfl"),
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
