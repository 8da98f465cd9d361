"""The size of the enclave page cache: sysfs trees, and CPUs simulated by tables."""

import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import write

from accelplane.host import Host
from accelplane.host.epc import Cpuid, CpuSgx, Epc, cpu_sgx, device, numa_epc, read_epc

pytestmark = pytest.mark.memory

MIB = 1 << 20
Registers = tuple[int, int, int, int]

HIGHEST = {(0, 0): (0x1B, 0, 0, 0)}
WITH_SGX = HIGHEST | {(7, 0): (0, 1 << 2, 1 << 30, 0), (0x12, 0): (0b11, 0, 0, 0x241F)}


def cpuid(table: Mapping[tuple[int, int], Registers]) -> Cpuid:
    """A CPU that returns the values of the table, and zeros for other leaves."""
    return lambda leaf, subleaf: table.get((leaf, subleaf), (0, 0, 0, 0))


def section(size: int, kind: int = 1, base: int = 0x70200000) -> Registers:
    return (base & 0xFFFFF000) | kind, base >> 32, size & 0xFFFFF000 | kind, size >> 32


def with_sections(*sections: Registers) -> Cpuid:
    return cpuid(WITH_SGX | {(0x12, number): registers for number, registers in enumerate(sections, 2)})


def no_cpuid(leaf: int, subleaf: int) -> Registers:
    raise OSError(13, "Permission denied")


def numa_node(root: Path, number: int, text: str | bytes | None) -> None:
    directory = root / f"sys/devices/system/node/node{number}"
    directory.mkdir(parents=True)
    if text is not None:
        write(directory / "x86/sgx_total_bytes", text)


# CPUID


@pytest.mark.parametrize(
    ("sections", "sizes"),
    [
        ([], ()),
        ([section(93 * MIB)], (93 * MIB,)),
        ([section(64 << 30, base=0x20_7000_0000), section(64 << 30, base=0x40_7000_0000)], (64 << 30, 64 << 30)),
        ([section(0xF_FFFF_FFFF_F000)], (0xF_FFFF_FFFF_F000,)),
        ([section(MIB), (0, 0, 0, 0), section(2 * MIB)], (MIB,)),
        ([section(MIB), section(4 * MIB, kind=2), section(2 * MIB)], (MIB, 2 * MIB)),
        ([(0x70200001, 0xFFF00000, 0x00100FFF, 0xFFF00000)], (MIB,)),
        ([section(MIB)] * 9, (MIB,) * 8),
    ],
    ids=["none", "one", "above 4 GiB", "largest", "ends at zero", "other kinds", "reserved bits", "no ninth"],
)
def test_sections_are_counted_as_the_cpu_lists_them(sections: Sequence[Registers], sizes: Sequence[int]) -> None:
    assert cpu_sgx(with_sections(*sections)).sections == sizes


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, CpuSgx()),
        ({(0, 0): (0x6, 0, 0, 0), (7, 0): (0, 4, 0, 0)}, CpuSgx()),
        (HIGHEST, CpuSgx()),
        (HIGHEST | {(7, 0): (0, 0xFFFFFFFB, 0, 0), (0x12, 2): section(MIB)}, CpuSgx()),
        (HIGHEST | {(7, 0): (0, 4, 0, 0)}, CpuSgx(present=True)),
        (HIGHEST | {(7, 0): (0, 4, 0, 0), (0x12, 0): (1, 0, 0, 0)}, CpuSgx(present=True)),
        (WITH_SGX, CpuSgx(present=True, flexible=True)),
        (
            WITH_SGX | {(0, 0): (0x11, 0, 0, 0), (0x12, 2): section(MIB)},
            CpuSgx(present=True, flexible=True),
        ),
    ],
    ids=["zeros", "no leaf 7", "no SGX", "all but SGX", "locked", "SGX1", "SGX2 with FLC", "no leaf 0x12"],
)
def test_only_existing_cpuid_leaves_are_read(table: Mapping[tuple[int, int], Registers], expected: CpuSgx) -> None:
    assert cpu_sgx(cpuid(table)) == expected


REGISTER = st.integers(0, 0xFFFFFFFF)


@given(st.dictionaries(st.tuples(st.sampled_from([0, 7, 0x12]), st.integers(0, 12)), st.tuples(*[REGISTER] * 4)))
def test_any_cpu_is_evaluated(table: dict[tuple[int, int], Registers]) -> None:
    found = cpu_sgx(cpuid(table))
    assert len(found.sections) <= 8
    assert all(0 <= size < 1 << 52 and size % 4096 == 0 for size in found.sections)
    assert found.present or not found.sections


def test_the_cpuid_device_is_read_leaf_by_leaf() -> None:
    leaves: list[tuple[int, int]] = []

    def read(size: int, offset: int) -> bytes:
        leaves.append((size, offset))
        return struct.pack("<4I", 1, 2, 3, 4)

    assert device(read)(0x12, 3) == (1, 2, 3, 4)
    assert leaves == [(16, (3 << 32) + 0x12)]


@pytest.mark.parametrize("data", [b"", bytes(15)])
def test_a_cpuid_device_with_short_reads_is_no_source(data: bytes) -> None:
    with pytest.raises(OSError, match=f"cpuid: {len(data)} bytes, expected 16"):
        device(lambda _size, _offset: data)(0, 0)


@pytest.mark.skipif(not os.access("/dev/cpu/0/cpuid", os.R_OK), reason="needs the module cpuid, and root")
def test_the_cpuid_device_of_this_machine_reports_the_vendor() -> None:
    with open("/dev/cpu/0/cpuid", "rb", buffering=0) as file, open("/proc/cpuinfo") as cpuinfo:
        _highest, ebx, ecx, edx = device(partial(os.pread, file.fileno()))(0, 0)
        vendor = next(line.split(":")[1].strip() for line in cpuinfo if line.startswith("vendor_id"))
    assert struct.pack("<3I", ebx, edx, ecx).decode() == vendor


# sysfs


@pytest.mark.parametrize(
    ("nodes", "numa"),
    [
        ({}, {}),
        ({0: None}, {}),
        ({0: "67645734912\n"}, {0: 67645734912}),
        ({0: "100\n", 1: None, 10: "7\n", 2: "0\n"}, {0: 100, 2: 0, 10: 7}),
    ],
)
def test_epc_of_the_kernel_is_read_by_numa_node(
    tmp_path: Path, nodes: Mapping[int, str | None], numa: Mapping[int, int]
) -> None:
    for number, text in nodes.items():
        numa_node(tmp_path, number, text)
    assert numa_epc(Host(tmp_path)) == (numa, [])


@pytest.mark.parametrize(
    "text", ["", "\n", "-1\n", "12 kB\n", "0x10\n", "٣\n", "9" * 30, str(1 << 52), b"\xff\xfe", b"\0"]
)
def test_an_invalid_number_of_bytes_is_reported_with_its_file(tmp_path: Path, text: str | bytes) -> None:
    numa_node(tmp_path, 0, text)
    numa_node(tmp_path, 1, "4096\n")
    numa, (problem,) = numa_epc(Host(tmp_path))
    assert numa == {1: 4096}
    assert problem.startswith("/sys/devices/system/node/node0/x86/sgx_total_bytes: ")


@given(text=st.one_of(st.binary(max_size=40), st.text(max_size=30).map(str.encode)))
def test_any_content_is_a_size_or_a_problem(tmp_path: Path, text: bytes) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    numa_node(root, 0, text)
    numa, problems = numa_epc(Host(root))
    assert len(numa) + len(problems) == 1
    assert all(0 <= size < 1 << 52 for size in numa.values())


def test_other_entries_beside_the_device_nodes_are_skipped(tmp_path: Path) -> None:
    for name in ("has_cpu", "nodes", "node", "node0x", "node-1", "power"):
        write(tmp_path / "sys/devices/system/node" / name / "x86/sgx_total_bytes", "4096")
    assert numa_epc(Host(tmp_path)) == ({}, [])


def test_an_unreadable_directory_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "sys/devices/system/node", "")
    numa, (problem,) = numa_epc(Host(tmp_path))
    assert numa == {}
    assert "/sys/devices/system/node: Not a directory" in problem


# Priority of the sources


@pytest.mark.parametrize(
    ("nodes", "cpu", "answer", "problems"),
    [
        ((), None, (0, "none"), []),
        ((), with_sections(section(MIB)), (MIB, "cpuid"), []),
        ((), cpuid({}), (0, "none"), []),
        ((), no_cpuid, (0, "none"), []),
        ((str(MIB), str(MIB)), None, (2 * MIB, "sysfs"), []),
        ((str(MIB), str(MIB)), no_cpuid, (2 * MIB, "sysfs"), []),
        ((str(MIB), str(MIB)), with_sections(section(2 * MIB)), (2 * MIB, "sysfs"), []),
        (
            (str(MIB),),
            with_sections(section(2 * MIB)),
            (MIB, "sysfs"),
            [f"the kernel manages {MIB} bytes of EPC, CPUID reports {2 * MIB}"],
        ),
        ((str(MIB), "x"), None, (MIB, "sysfs"), ["node1/x86/sgx_total_bytes: 'x', expected a number of bytes"]),
        ((str(MIB), "x"), with_sections(section(2 * MIB)), (2 * MIB, "cpuid"), ["'x', expected", "CPUID reports"]),
        (("x",), with_sections(section(MIB)), (MIB, "cpuid"), ["'x', expected"]),
        (("0",), with_sections(section(MIB)), (0, "sysfs"), ["the kernel manages 0 bytes"]),
    ],
)
def test_epc_of_the_kernel_has_priority_over_the_cpu(
    tmp_path: Path, nodes: Sequence[str], cpu: Cpuid | None, answer: tuple[int, str], problems: Sequence[str]
) -> None:
    for number, text in enumerate(nodes):
        numa_node(tmp_path, number, text)
    epc = read_epc(Host(tmp_path), cpu)
    assert (epc.total, epc.source) == answer
    assert len(epc.disagreements) == len(problems)
    assert all(part in problem for part, problem in zip(problems, epc.disagreements, strict=True))


def test_an_incomplete_cpuid_is_no_source(tmp_path: Path) -> None:
    def breaking(leaf: int, subleaf: int) -> Registers:
        if leaf == 0x12:
            raise OSError(6, "No such device or address")
        return with_sections(section(MIB))(leaf, subleaf)

    assert read_epc(Host(tmp_path), breaking) == Epc()


@pytest.mark.parametrize(
    ("flags", "cpu", "problems"),
    [("fpu sgx", None, 1), ("fpu sgx", cpuid({}), 0), ("fpu", None, 0), ("fpu", no_cpuid, 0)],
)
def test_sgx_without_a_source_of_its_size_is_reported(
    tmp_path: Path, flags: str, cpu: Cpuid | None, problems: int
) -> None:
    write(tmp_path / "proc/cpuinfo", f"flags\t: {flags}\n")
    epc = read_epc(Host(tmp_path), cpu)
    assert (epc.total, epc.source) == (0, "none")
    assert len(epc.disagreements) == problems
    assert all("EPC size unknown" in problem and "module cpuid" in problem for problem in epc.disagreements)


def test_a_root_directory_never_uses_the_cpu_of_this_machine(tmp_path: Path) -> None:
    write(tmp_path / "dev/cpu/0/cpuid", bytes(4096))
    assert read_epc(Host(tmp_path)) == Epc()


def test_sgx_of_this_machine_is_evaluated() -> None:
    epc = read_epc(Host("/"))
    assert (epc.total > 0) == (epc.source != "none")
    assert epc.cpu_flags is not None


# Explanation


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor\t: 0\nflags\t\t: fpu sgx sse sgx_lc\nbugs\t\t:\n", ("sgx", "sgx_lc")),
        ("flags\t\t: fpu sgx\n", ("sgx",)),
        ("flags\t\t: fpu sgx1 sgx_lcx\nvmx flags\t: sgx\n", ()),
        ("vmx flags\t: sgx\n", ()),
        ("flags :sgx_lc sgx", ("sgx", "sgx_lc")),
        ("Features\t: fp asimd\n", ()),
        ("", ()),
        (b"\xff\nflags\t: sgx\n", ("sgx",)),
        ("flags\t: sgx\n" * 1_000_000, ("sgx",)),
    ],
)
def test_the_flags_are_those_of_the_first_processor(
    tmp_path: Path, text: str | bytes, flags: tuple[str, ...] | None
) -> None:
    write(tmp_path / "proc/cpuinfo", text)
    assert read_epc(Host(tmp_path)).cpu_flags == flags


@pytest.mark.parametrize("make", ["mkdir", "missing", "loop"])
def test_unreadable_cpu_flags_are_unknown(tmp_path: Path, make: str) -> None:
    cpuinfo = tmp_path / "proc/cpuinfo"
    cpuinfo.parent.mkdir()
    if make == "mkdir":
        cpuinfo.mkdir()
    elif make == "loop":
        cpuinfo.symlink_to("cpuinfo")
    assert read_epc(Host(tmp_path)).cpu_flags is None
