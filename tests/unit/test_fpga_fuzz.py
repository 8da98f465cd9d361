"""Untrusted FPGA input that is similar to valid input, so that it passes the first checks.

Files of users, OCI states, pods, and the objects that map names to functions. `make fuzz` tests
hundreds of thousands of each. Tests of random bytes are beside the other tests of the modules.
"""

import base64
import contextlib
import gzip
import json
import os
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from bitstreams import GBS_MAGIC, HASH, INTERFACE, NLB0, NLB3, elf, gbs, metadata
from hypothesis import given
from hypothesis import strategies as st
from trees import link, write

from accelplane.admission import fpga
from accelplane.admission.mappings import AcceleratorFunction, FpgaRegion, Names, checker, names_of
from accelplane.fpga import FpgaError
from accelplane.fpga.bitstream import open_bitstream
from accelplane.fpga.gbs import HEAD_LIMIT, parse
from accelplane.fpga.hook import read_request
from accelplane.fpga.ids import IdError, af_type, region_type, requested_id
from accelplane.fpga.request import parse_config, parse_state
from accelplane.fpga.store import STORE, find, install_path
from accelplane.host import Host, HostError
from accelplane.http.messages import HttpError, Request, Response
from accelplane.kube.admission import AdmissionServer, Mutator, Validator
from accelplane.kube.testing import apply_json_patch

T = TypeVar("T")
Json = dict[str, Any]

# The memory limit for inspecting a file with any stated sizes, and for reading it in addition to its content.
LOOKING = 8 * 1024 * 1024
READING = 2 * 1024 * 1024

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def places(found: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values in a document."""
    if path:
        yield path
    steps = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for step, inner in steps:
        yield from places(inner, (*path, step))


@st.composite
def damaged_documents(draw: st.DrawFn, good: st.SearchStrategy[Json], most: int = 2) -> Json:
    """A mostly valid document: some values are replaced or removed."""
    document = json.loads(json.dumps(draw(good)))
    for _ in range(draw(st.integers(0, most))):
        ways = list(places(document))
        if not ways:
            break
        *proxy, last = draw(st.sampled_from(ways))
        parent = document
        for step in proxy:
            parent = parent[step]
        if draw(st.booleans()):
            del parent[last]
        else:
            parent[last] = draw(JUNK)
    return document


def peak(act: Callable[[], T]) -> tuple[T, int]:
    """The result of the function, and its peak memory."""
    tracemalloc.start()
    try:
        return act(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Bitstreams

IDS = st.sampled_from([INTERFACE, INTERFACE.upper(), NLB0, NLB3, HASH, "", "../../../../etc", "a/b", "12345678"])
METADATA = st.builds(
    lambda interface, afu, more: json.loads(metadata(interface, afu, **more)),
    IDS | st.text(max_size=45),
    IDS | st.text(max_size=45),
    st.dictionaries(st.sampled_from(["power", "magic-no", "name"]), JUNK, max_size=2),
)
NUMBERS = st.sampled_from(
    [0, 1, 2, 8, 63, 64, 255, 256, 4095, 4096, 4097, 65535, 2**20, 2**20 + 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
)


@st.composite
def designs(draw: st.DrawFn) -> bytes:
    """GBS files with any metadata."""
    text = json.dumps(draw(damaged_documents(METADATA))).encode() + draw(
        st.sampled_from([b"", b"\0\0", b" {", b"\xff"])
    )
    length = draw(st.none() | st.integers(0, len(text) + 5) | NUMBERS.filter(lambda number: number < 2**32))
    content = gbs(text[:4095], draw(st.sampled_from([b"raw", b"", b"r" * 5000])), length=length)
    return content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content


@st.composite
def resized(draw: st.DrawFn, content: bytes) -> bytes:
    """An ELF file with changed numbers in its header or section table."""
    if len(content) < 64:
        return content
    wide = content[4] == 2
    order = "<" if content[5] == 1 else ">"
    table = struct.unpack_from(order + ("Q" if wide else "I"), content, 40 if wide else 32)[0]
    entry = 64 if wide else 40
    fields = [(0, "I"), (4, "I"), *([(8, "Q"), (24, "Q"), (32, "Q")] if wide else [(8, "I"), (16, "I"), (20, "I")])]
    header = [(40, "Q"), (58, "H"), (60, "H"), (62, "H")] if wide else [(32, "I"), (46, "H"), (48, "H"), (50, "H")]
    known = [
        *header,
        *((at + step, kind) for at in range(table, len(content) - entry + 1, entry) for step, kind in fields),
    ]
    changed = bytearray(content)
    for _ in range(draw(st.integers(0, 3))):
        at, kind = draw(st.sampled_from(known))
        number = draw(NUMBERS | st.integers(0, len(content) + 1))
        struct.pack_into(order + kind, changed, at, number % 256 ** struct.calcsize(order + kind))
    return bytes(changed)


@st.composite
def packages(draw: st.DrawFn) -> bytes:
    """AOCX files with errors in one of their layers."""
    packed = gzip.compress(draw(designs()), 1) + draw(st.sampled_from([b"", b"", b"\0"]))
    flavour = {"bits": draw(st.sampled_from([64, 32])), "order": draw(st.sampled_from("<>"))}
    inner = draw(resized(elf({".acl.gbs.gz": packed}, **flavour)))
    texts = {".acl.rand_hash": draw(IDS).encode(), ".acl.board": draw(st.binary(max_size=9))}
    outer = elf({**texts, ".acl.fpga.bin": inner}, **flavour)
    return draw(resized(outer))


@given(designs())
def test_any_gbs_is_parsed_or_rejected_in_one_line(content: bytes) -> None:
    try:
        found = parse(content[:HEAD_LIMIT], "x.gbs")
    except FpgaError as error:
        refused = str(error)
        assert refused.startswith("x.gbs: ")
        assert "\n" not in refused
        return
    assert content.startswith(GBS_MAGIC)
    assert 20 < found.offset <= len(content)


@given(content=designs() | packages(), hole=st.sampled_from([0, 0, 1, 2**20, 2**33, 2**40]), data=st.data())
def test_parsing_any_file_is_cheap_and_reading_is_proportional_to_its_size(
    content: bytes, hole: int, data: st.DataObject, tmp_path: Path
) -> None:
    path = write(tmp_path / ("x.gbs" if content.startswith(GBS_MAGIC) else "x.aocx"), content)
    if hole:
        os.truncate(path, len(content) + hole)

    def look() -> tuple[str, int] | None:
        try:
            with open_bitstream(str(path)) as bitstream:
                return install_path(bitstream), bitstream.size() if bitstream.programmable else 0
        except FpgaError as error:
            refused = str(error)
            assert refused.startswith(f"{path}")
            assert "\n" not in refused
            return None

    def read() -> int:
        with open_bitstream(str(path)) as bitstream:
            return len(bitstream.read())

    looked, usage = peak(look)
    assert usage < LOOKING
    if looked is None:
        return
    place, size = looked
    assert not place or re.fullmatch(rf"{STORE}/[0-9a-f]{{8,40}}/[0-9a-f]{{8,40}}\.(gbs|aocx)", place)
    if 0 < size < 2**24:
        length, usage = peak(read)
        assert length == size
        assert usage < 2 * size + READING


# The store

NEAR_IDS = (
    st.sampled_from([INTERFACE, NLB0, NLB3, HASH, "..", "."])
    | st.from_regex(r"[0-9a-fA-F\-]{6,42}", fullmatch=True)
    | st.text(alphabet="0123456789abcdef./-\0\n ٣", max_size=42)
    | st.builds("../{}".format, st.sampled_from([NLB0, f"{INTERFACE}/{NLB0}", "outside"]))
)
# Files at the path of a bitstream.
KINDS = {
    "file": lambda place: write(place, gbs()),
    "directory": lambda place: place.mkdir(parents=True, exist_ok=True),
    "a link within": lambda place: link(place, "kept"),
    "a link to its region": lambda place: link(place, f"../{INTERFACE}/kept"),
    "a link out": lambda place: link(place, "/outside.gbs"),
    "a link out by steps": lambda place: link(place, "../../../../../outside.gbs"),
    "a link of a link out": lambda place: link(place, "leaving"),
    "a circle": lambda place: link(place, place.name),
}


@given(region=NEAR_IDS, afu=NEAR_IDS, kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=3))
def test_no_ids_and_no_links_resolve_outside_the_store(region: str, afu: str, kinds: list[str], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    write(tmp_path / "outside.gbs", b"secret")
    home = tmp_path / STORE[1:]
    write(home / INTERFACE / "kept", gbs())
    link(home / INTERFACE / "leaving", "/outside.gbs")
    for name, kind in zip((f"{NLB0}.gbs", f"{NLB3}.gbs", f"{HASH}.aocx"), kinds, strict=True):
        KINDS[kind](home / INTERFACE / name)
    try:
        found = find(Host(tmp_path), region, afu)
    except (FpgaError, HostError) as error:
        assert "\n" not in str(error)  # noqa: PT017 - results are checked below
        return
    assert os.path.realpath(tmp_path / found[1:]).startswith(f"{os.path.realpath(home)}/")


# The hook

ENTRIES = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["FPGA_REGION_", "FPGA_AFU_", "FPGA_REGION", "PATH"]),
    st.sampled_from(["1", "2", "3", "01", "", "9999", "99999", "x"]),
    st.sampled_from(["=", "=", "=", "", " = "]),
    IDS | st.text(max_size=4),
)
CONFIGS = st.fixed_dictionaries(
    {
        "process": st.fixed_dictionaries(
            {"env": st.lists(ENTRIES, max_size=3).map(
                lambda more: [f"FPGA_REGION_1={INTERFACE}", f"FPGA_AFU_1={NLB0}", *more])}
        ),
        "linux": st.fixed_dictionaries(
            {"devices": st.lists(
                st.sampled_from(["/dev/dfl-port.0", "/dev/intel-fpga-port.1", "/dev/dfl-fme.0", "dfl-port.2", "/", ""])
                .map(lambda path: {"path": path, "type": "c"}), max_size=3)}
        ),
    }
)  # fmt: skip
BUNDLES = st.sampled_from(["/proc/self", "/dev/null", "", ".", "bundle", "\ud800", "/\udcff", "x" * 5000]) | st.text()
STATES = st.fixed_dictionaries(
    {"bundle": BUNDLES, "annotations": st.dictionaries(st.just("com.intel.fpga.mode"), JUNK)}
)


@given(damaged_documents(CONFIGS))
def test_any_configuration_requests_ids_for_its_ports_or_is_rejected(config: Json) -> None:
    try:
        found = parse_config(json.dumps(config).encode(), "config.json")
    except FpgaError as error:
        assert str(error).isprintable()  # noqa: PT017 - results are checked below
        return
    assert 1 <= len(found.pairs) <= len(found.ports)
    assert all(re.fullmatch("[0-9a-f]{8,40}", each) for pair in found.pairs for each in (pair.region, pair.afu))
    assert all(re.fullmatch(r"(dfl-port\.|intel-fpga-port\.)[0-9]+", port) for port in found.ports)


@given(state=damaged_documents(STATES), config=damaged_documents(CONFIGS), mode=st.booleans())
def test_any_state_is_a_request_or_rejected_in_one_line(state: Json, config: Json, mode: bool, tmp_path: Path) -> None:
    if state.get("bundle") == "bundle":
        state["bundle"] = str(tmp_path)
        write(tmp_path / "config.json", json.dumps(config))
    text = json.dumps(state).encode()
    try:
        parse_state(text)
        read_request(text, require_mode=mode)
    except FpgaError as error:
        assert str(error).isprintable()  # noqa: PT017 - no other exception is allowed


# Pods, and the objects of their namespace

PREFIX = "fpga.intel.com/"
OTHER = "9926ab6d6c925a68aabca7d84c545738"
# Valid values are more frequent, otherwise hardly any pod would be admitted.
INTERFACES = st.sampled_from([*[INTERFACE] * 9, *[OTHER] * 4, "12345678", "", "A" * 32, "f" * 63])
AFUS = st.sampled_from([*[NLB0] * 6, *[NLB3] * 4, HASH, "123456789", "", "x"])
WORDS = st.sampled_from([*["a", "b", "c"] * 5, "r", f"region-{INTERFACE}", "", "x/y~1"])
METADATAS = st.fixed_dictionaries({"name": WORDS, "namespace": st.just("n")})
FUNCTIONS = st.fixed_dictionaries(
    {
        "metadata": METADATAS,
        "spec": st.fixed_dictionaries(
            {
                "afuId": AFUS,
                "interfaceId": INTERFACES,
                "mode": st.sampled_from([*["region"] * 6, *["af"] * 2, "afx", ""]),
            }
        ),
    }
)
REGIONS = st.fixed_dictionaries({"metadata": METADATAS, "spec": st.fixed_dictionaries({"interfaceId": INTERFACES})})


def by_name(found: Json) -> str:
    return found["metadata"]["name"]


# The API server guarantees unique names per kind.
NAMESPACES = st.tuples(
    st.lists(FUNCTIONS, min_size=1, max_size=4, unique_by=by_name),
    st.lists(REGIONS, max_size=4, unique_by=by_name),
)

RESOURCES = [f"{PREFIX}{name}" for name in ("r", "", "x/y~1", f"region-{OTHER}", af_type(INTERFACE, NLB0))]
QUANTITIES = [0, "1000m", "3e0", 1.5, -1, "1k", "many", "1e999999999", 10**30]
REQUESTS = st.dictionaries(
    st.sampled_from(
        [
            *[f"{PREFIX}a", f"{PREFIX}b", "cpu"] * 4,
            *[f"{PREFIX}region-{INTERFACE}"] * 2,
            *RESOURCES,
            "fpga.intel.company/a",
        ]
    ),
    st.sampled_from([*[1, "1", 2, "2"] * 9, *QUANTITIES]),
    max_size=2,
)
VARIABLES = st.fixed_dictionaries(
    {"name": st.sampled_from(["FPGA_REGION_1", "FPGA_AFU_1", "FPGA_REGION_2", "FPGA_AFU_2", "FPGA_AFU", "V", "W", ""])},
    optional={
        "value": st.sampled_from([INTERFACE, OTHER, NLB0, NLB3, "$(V)"]),
        "valueFrom": st.just({"fieldRef": {"fieldPath": "metadata.name"}}),
    },
)
CONTAINERS = st.fixed_dictionaries(
    {
        "name": st.just("c"),
        "resources": st.builds(
            lambda limits, requests, same: {"limits": limits, "requests": dict(limits if same else requests)},
            REQUESTS,
            REQUESTS,
            st.sampled_from([*[True] * 9, False]),
        ),
    },
    optional={"env": st.lists(VARIABLES, max_size=4), "envFrom": st.just([{"configMapRef": {"name": "m"}}])},
)
PODS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries({"name": st.just("p")}, optional={"namespace": st.just("n")}),
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(CONTAINERS, min_size=1, max_size=2)},
            optional={"initContainers": st.lists(CONTAINERS, max_size=1)},
        ),
    }
)


def named(functions: list[Json], regions: list[Json]) -> Names:
    return names_of(msgspec.convert(functions, list[AcceleratorFunction]), msgspec.convert(regions, list[FpgaRegion]))


def allowed_by(functions: list[Json], regions: list[Json]) -> tuple[set[str], set[tuple[str, str]]]:
    """The resources and functions by region that these objects allow for pods."""
    resources: set[str] = set()
    for each in (*functions, *regions):
        spec = each["spec"]
        try:
            result = af_type(spec["interfaceId"], spec["afuId"]) if spec.get("mode") == "af" else None
            if spec.get("mode") == "region":
                requested_id(spec["afuId"])
            resources.add(f"{PREFIX}{result or region_type(spec['interfaceId'])}")
        except IdError:
            continue
    specs = [each["spec"] for each in functions if each["spec"]["mode"] == "region"]
    return resources, {(spec["interfaceId"], spec["afuId"]) for spec in specs}


def reviewed(hook: Mutator[Any] | Validator[Any], of: Any, kind: str = "Pod") -> Json:
    """The response to a review, with its patch decoded."""
    request = {"uid": "u", "kind": {"kind": kind}, "namespace": "n", "operation": "CREATE", "object": of}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
    answer = AdmissionServer([hook]).handle(Request("POST", hook.path, "application/json", body))
    assert isinstance(answer, Response)
    response = json.loads(answer.body)["response"]
    assert response["allowed"] or response["status"]["code"] == 400
    assert response["allowed"] or "\n" not in response["status"]["message"]
    return {**response, "patch": json.loads(base64.b64decode(response.get("patch", "")) or b"[]")}


def containers_of(pod: Json) -> list[Json]:
    spec = pod.get("spec", {})
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def requested(container: Json, field: str) -> Mapping[str, Any]:
    found = ((container.get("resources") or {}).get(field)) or {}
    return {name: units for name, units in found.items() if name.startswith(PREFIX)}


def is_ours(variable: Json) -> bool:
    name = variable.get("name")
    return isinstance(name, str) and name.startswith(("FPGA_REGION", "FPGA_AFU"))


def env_of(container: Json) -> list[Json]:
    """The variables. Invalid entries are unchanged in containers without FPGAs."""
    return [each for each in container.get("env") or [] if isinstance(each, dict)]


@given(namespace=NAMESPACES, pod=PODS | damaged_documents(PODS))
def test_pods_get_only_functions_of_their_namespace_and_mutation_is_idempotent(
    namespace: tuple[list[Json], list[Json]], pod: Json
) -> None:
    names = named(*namespace)
    resources, pairs = allowed_by(*namespace)
    hook = fpga.mutator(lambda _namespace: names)
    first = reviewed(hook, pod)
    if not first["allowed"]:
        return
    after = apply_json_patch(pod, first["patch"])
    for old, new in zip(containers_of(pod), containers_of(after), strict=True):
        limits = requested(new, "limits")
        if not limits and not requested(old, "limits"):
            assert new == old
            continue
        assert set(limits) <= resources
        assert set(limits) == set(requested(new, "requests"))
        variables = {each["name"]: each.get("value") for each in env_of(new) if is_ours(each)}
        count = len(variables) // 2
        assert set(variables) == {f"FPGA_{prefix}_{n}" for prefix in ("REGION", "AFU") for n in range(1, count + 1)}
        for n in range(1, count + 1):
            pair = (variables[f"FPGA_REGION_{n}"], variables[f"FPGA_AFU_{n}"])
            assert pair in pairs
            assert f"{PREFIX}region-{pair[0]}" in limits
        assert [each for each in env_of(new) if not is_ours(each)] == [
            each for each in env_of(old) if not is_ours(each)
        ]
        strangers = (old.get("resources") or {}).get("limits") or {}
        for name in strangers:
            assert name.startswith(PREFIX) or new["resources"]["limits"][name] == strangers[name]
    second = reviewed(hook, after)
    assert (second["allowed"], second["patch"], second.get("warnings")) == (True, [], first.get("warnings"))


@given(NAMESPACES)
def test_any_objects_have_valid_resource_names_and_distinct_pairs(
    namespace: tuple[list[Json], list[Json]],
) -> None:
    names = named(*namespace)
    resources, pairs = allowed_by(*namespace)
    assert names.resources == resources
    assert all(re.fullmatch(rf"{PREFIX}[a-z0-9][A-Za-z0-9_.\-]{{0,61}}[A-Za-z0-9]", name) for name in names.resources)
    assert {target.resource for target in names.targets.values()} <= resources
    assert {(pair.interface_id, pair.afu_id) for found in names.programmable.values() for pair in found} <= pairs
    assert not set(names.targets) & set(names.faulty)
    written = [f"{PREFIX}{each['metadata']['name']}" for group in namespace for each in group]
    assert {*names.targets, *names.faulty} == set(written)


@given(damaged_documents(FUNCTIONS, 3), st.sampled_from(["default", "legacy63"]))
def test_any_function_is_stored_with_a_warning_if_it_is_unusable(function: Json, naming: Any) -> None:
    response = reviewed(checker(naming), function, "AcceleratorFunction")
    assert not response["patch"]
    assert all(text.isprintable() for text in response.get("warnings", ()))
    assert response["allowed"] or "cannot be decoded" in response["status"]["message"]


@given(st.integers(0, 3000), st.sampled_from([("[", "]"), ('{"a":', "}")]), st.integers(0, 1))
def test_no_depth_of_nesting_is_too_deep_for_an_answer(depth: int, brackets: tuple[str, str], missing: int) -> None:
    deep = f"{brackets[0] * depth}1{brackets[1] * (depth - missing)}"
    container = f'{{"name": "c", "env": [{{"name": "V", "value": {deep}}}, {{"name": "FPGA_AFU_1"}}]}}'
    review = f'{{"uid": "u", "kind": {{"kind": "Pod"}}, "object": {{"spec": {{"containers": [{container}]}}}}}}'
    body = f'{{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {review}}}'.encode()
    server = AdmissionServer([fpga.mutator(lambda _namespace: Names())])
    with contextlib.suppress(HttpError):
        server.handle(Request("POST", fpga.PATH, "application/json", body))
    for act in (
        lambda: parse_state(f'{{"bundle": {deep}}}'.encode()),
        lambda: parse_config(f'{{"process": {{"env": {deep}}}}}'.encode(), "config.json"),
        lambda: parse(gbs(f'{{"afu-image": {deep}}}'.encode()[:4095]), "x.gbs"),
        lambda: parse(gbs(metadata("INTERFACE").replace(b'"INTERFACE"', deep.encode())[:4095]), "x.gbs"),
    ):
        with contextlib.suppress(FpgaError):
            act()
