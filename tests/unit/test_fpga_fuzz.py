"""Untrusted FPGA input that is similar to valid input, so that it passes the first checks.

Files of users, OCI states, pods, and the objects that map names to functions. `make fuzz` tests
hundreds of thousands of each. Tests of random bytes are beside the other tests of the modules.
"""

import gzip
import json
import os
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bitstreams import GBS_MAGIC, HASH, INTERFACE, NLB0, NLB3, elf, gbs, metadata
from fpgadocuments import JUNK, Json, damaged_documents
from hypothesis import given
from hypothesis import strategies as st
from trees import link, write

from accelplane.fpga import FpgaError
from accelplane.fpga.allocation import HOOK
from accelplane.fpga.bitstream import open_bitstream
from accelplane.fpga.gbs import HEAD_LIMIT, parse
from accelplane.fpga.hook import read_request
from accelplane.fpga.request import parse_config, parse_state
from accelplane.fpga.store import STORE, find, install_path
from accelplane.host import Host, HostError

T = TypeVar("T")

# The memory limit for inspecting a file with any stated sizes, and for reading it in addition to its content.
LOOKING = 8 * 1024 * 1024
READING = 2 * 1024 * 1024


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
    st.sampled_from(["FPGA_REGION_", "FPGA_AFU_", "FPGA_REGIONS", "FPGA_REGION", "PATH"]),
    st.sampled_from(["1", "2", "3", "01", "", "9999", "99999", "x"]),
    st.sampled_from(["=", "=", "=", "", " = "]),
    IDS | st.text(max_size=4),
)
CONFIGS = st.fixed_dictionaries(
    {
        "process": st.fixed_dictionaries(
            {"env": st.lists(ENTRIES, max_size=3).map(
                lambda more: ["FPGA_REGIONS=1", f"FPGA_REGION_1={INTERFACE}", f"FPGA_AFU_1={NLB0}", *more])}
        ),
        "linux": st.fixed_dictionaries(
            {"devices": st.lists(
                st.sampled_from(["/dev/dfl-port.0", "/dev/intel-fpga-port.1", "/dev/dfl-fme.0", "dfl-port.2", "/", ""])
                .map(lambda path: {"path": path, "type": "c", "major": 244, "minor": 0}), max_size=3)}
        ),
        "hooks": st.just({"createRuntime": [{"path": HOOK, "args": ["x", "-ports=dfl-port.0,intel-fpga-port.1"]}]}),
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
    assert {port.name for port in found.ports} <= {"dfl-port.0", "intel-fpga-port.1"}


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
