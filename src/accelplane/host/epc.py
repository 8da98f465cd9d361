"""The enclave page cache (EPC): how much protected memory Intel SGX has.

The size comes from the first of these sources that has one:

1. `/sys/devices/system/node/node<N>/x86/sgx_total_bytes`: the memory that the kernel's driver manages, by NUMA node
   (Documentation/ABI/stable/sysfs-devices-node). Linux 5.17 or newer.
2. `/dev/cpu/<N>/cpuid`: CPUID leaf 0x12 (Intel SDM volume 3D) by the kernel's module cpuid (cpuid(4)), for older
   kernels and drivers from outside the kernel. Usually readable by root only. CPUID reports EPC even if the firmware
   has SGX locked. Below a root other than `/` this machine's CPU is not read.

Machines without SGX have 0 bytes. The flags `sgx` and `sgx_lc` come from `/proc/cpuinfo`.
"""

import contextlib
import os
import re
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from accelplane.host import Host, HostError, Missing

Source: TypeAlias = Literal["sysfs", "cpuid", "none"]

# Reads CPUID: (leaf, sub-leaf) to (EAX, EBX, ECX, EDX). Raises `OSError`.
Cpuid: TypeAlias = Callable[[int, int], tuple[int, int, int, int]]

_NUMA = "/sys/devices/system/node"
_NUMA_NODE = re.compile(r"node([0-9]{1,6})")
_DECIMAL = re.compile(r"[0-9]{1,20}")
_ADDRESSABLE = 1 << 52  # no CPU has more bytes of memory
_CPUID_DEVICES = "/dev/cpu/[0-9]*/cpuid"
_CPUINFO = "/proc/cpuinfo"
_CPUINFO_LIMIT = 16 * 1024  # the first processor takes 2 or 3 KiB

_EXTENDED_FEATURES, _SGX = 0x07, 0x12
_PAGES, _HIGH = 0xFFFFF000, 0x000FFFFF


class CpuSgx(msgspec.Struct, frozen=True, kw_only=True):
    """SGX in CPUID; `flexible` is flexible launch control, without which Linux has no enclaves."""

    present: bool = False
    flexible: bool = False
    sections: Sequence[int] = ()


class Epc(msgspec.Struct, frozen=True, kw_only=True):
    """The size in bytes and its source.

    `numa` is the size by NUMA node, if the kernel reports it. `disagreements` are sentences for the log: sources that
    contradict each other or cannot be read. `cpu` is None if CPUID cannot be read, `cpu_flags` contains `sgx` and
    `sgx_lc` if `/proc/cpuinfo` does (None: unreadable).
    """

    total: int = 0
    source: Source = "none"
    numa: Mapping[int, int] = {}
    disagreements: Sequence[str] = ()
    cpu: CpuSgx | None = None
    cpu_flags: Sequence[str] | None = None


def read_epc(host: Host, cpuid: Cpuid | None = None) -> Epc:
    """Reads all sources; `cpuid` replaces this machine's CPU. Raises nothing: errors are `disagreements`."""
    numa, problems = numa_epc(host)
    complete = bool(numa) and not problems
    cpu = _cpu(host, cpuid)
    flags = _cpu_flags(host)
    managed = sum(numa.values())
    reported = sum(cpu.sections) if cpu is not None else 0
    if cpu is not None and numa and managed != reported:
        problems.append(f"the kernel manages {managed} bytes of EPC, CPUID reports {reported}")
    total, source = 0, "none"
    if complete or (numa and not reported):
        total, source = managed, "sysfs"
    elif reported:
        total, source = reported, "cpuid"
    elif cpu is None and flags and "sgx" in flags:
        problems.append(
            f"EPC size unknown: {_CPUINFO} has the flag sgx, but neither {_NUMA}/node*/x86/sgx_total_bytes "
            "(Linux 5.17 or newer) nor /dev/cpu/*/cpuid (module cpuid) can be read"
        )
    return Epc(total=total, source=source, numa=numa, disagreements=tuple(problems), cpu=cpu, cpu_flags=flags)


def numa_epc(host: Host) -> tuple[dict[int, int], list[str]]:
    """The bytes of EPC by NUMA node in sysfs, and the errors of files that cannot be read or parsed."""
    found: dict[int, int] = {}
    problems: list[str] = []
    try:
        names = host.optional_names(_NUMA)
    except HostError as error:
        return {}, [str(error)]
    for name in names:
        node = _NUMA_NODE.fullmatch(name)
        if node is None:
            continue
        path = f"{_NUMA}/{name}/x86/sgx_total_bytes"
        try:
            text = host.text(path)
        except Missing:
            continue  # a NUMA node without EPC
        except HostError as error:
            problems.append(str(error))
            continue
        if not _DECIMAL.fullmatch(text) or int(text) >= _ADDRESSABLE:
            problems.append(f"{path}: {text[:40]!a}, expected a number of bytes")
            continue
        found[int(node[1])] = int(text)
    return dict(sorted(found.items())), problems


def cpu_sgx(cpuid: Cpuid) -> CpuSgx:
    """SGX in CPUID. Raises what `cpuid` raises."""
    highest = cpuid(0, 0)[0]
    if highest < _EXTENDED_FEATURES:
        return CpuSgx()
    _eax, ebx, ecx, _edx = cpuid(_EXTENDED_FEATURES, 0)
    present = bool(ebx >> 2 & 1)
    sections = _sections(cpuid) if present and highest >= _SGX else ()
    return CpuSgx(present=present, flexible=bool(ecx >> 30 & 1), sections=tuple(sections))


def device(read: Callable[[int, int], bytes]) -> Cpuid:
    """CPUID by cpuid(4): `read` takes a size and an offset, which is the leaf and, above it, the sub-leaf."""

    def query(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        # A longer read continues with the next leaf.
        data = read(16, subleaf << 32 | leaf)
        if len(data) != 16:
            raise OSError(f"cpuid: {len(data)} bytes, expected 16")
        eax, ebx, ecx, edx = struct.unpack("<4I", data)
        return eax, ebx, ecx, edx

    return query


def _cpu(host: Host, cpuid: Cpuid | None) -> CpuSgx | None:
    """SGX of the CPU; None if CPUID cannot be read."""
    if cpuid is not None:
        with contextlib.suppress(OSError):
            return cpu_sgx(cpuid)
        return None
    # CPUID reports the sections of the complete platform on every CPU; an offline CPU returns ENXIO.
    for path in host.glob(_CPUID_DEVICES) if host.root == "/" else ():
        with contextlib.suppress(OSError, HostError), contextlib.ExitStack() as stack:
            descriptor = host.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                return cpu_sgx(device(partial(os.pread, descriptor)))
    return None


def _sections(cpuid: Cpuid) -> list[int]:
    sizes: list[int] = []
    for number in range(2, 10):
        eax, _ebx, ecx, edx = cpuid(_SGX, number)
        if not eax & 0xF:
            break
        if eax & 0xF == 1:
            sizes.append((ecx & _PAGES) + ((edx & _HIGH) << 32))
    return sizes


def _cpu_flags(host: Host) -> tuple[str, ...] | None:
    """Which of the two flags the first processor has; None if it cannot be read."""
    try:
        # The file is as long as the machine has processors; all have the same flags.
        text = host.read_once(_CPUINFO, _CPUINFO_LIMIT).decode("ascii", "replace")
    except HostError:
        return None
    flags = re.search(r"^flags[ \t]*:(.*)$", text, re.MULTILINE)
    words = flags[1].split() if flags else []
    return tuple(flag for flag in ("sgx", "sgx_lc") if flag in words)
