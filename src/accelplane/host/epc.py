"""The enclave page cache (EPC): how much protected memory Intel SGX has here, found without C.

The kernel's own figures come first (Documentation/ABI/stable/sysfs-devices-node, `sgx_total_bytes`): they are what the
driver manages, and the one source that tells the NUMA nodes apart. Kernels before 5.17 and drivers from outside the
kernel do not give them; there the CPU is asked (Intel SDM volume 3D, leaf 0x12), by the instruction itself or, where a
program may not make its own code, through `/dev/cpu/0/cpuid`. The CPU tells of memory even where the firmware has SGX
locked. Machines without SGX have 0 bytes. Below a root other than `/` only files are asked, never this machine's CPU.
"""

import os
import re
import stat
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from accelplane.host import Host, HostError, Missing

# Who told the size: the kernel, the CPU, the CPU through the kernel's device, or nobody.
Source: TypeAlias = Literal["sysfs", "cpuid", "cpuid-device", "none"]

# Reads CPUID: (leaf, sub-leaf) to (EAX, EBX, ECX, EDX). Raises `OSError`.
Cpuid: TypeAlias = Callable[[int, int], tuple[int, int, int, int]]

DRIVER_NODES = ("/dev/sgx_enclave", "/dev/sgx_provision", "/dev/sgx_vepc")

_NUMA = "/sys/devices/system/node"
_NUMA_NODE = re.compile(r"node([0-9]{1,6})")
_DECIMAL = re.compile(r"[0-9]{1,20}")
_ADDRESSABLE = 1 << 52  # no CPU has more bytes of memory
_CPUID_DEVICE = "/dev/cpu/0/cpuid"
_CPUINFO = "/proc/cpuinfo"
_CPUINFO_LIMIT = 16 * 1024  # the first processor takes 2 or 3 KiB

_EXTENDED_FEATURES, _SGX = 0x07, 0x12
_SECTIONS = range(2, 10)
_PAGES, _HIGH = 0xFFFFF000, 0x000FFFFF

# void f(uint32_t leaf /* edi */, uint32_t subleaf /* esi */, uint32_t out[4] /* rdx */), System V ABI for x86-64
_ROUTINE = bytes.fromhex(
    "53"  # push rbx, which cpuid overwrites and the caller wants back
    "89f8"  # mov eax, edi
    "89f1"  # mov ecx, esi
    "4989d0"  # mov r8, rdx
    "0fa2"  # cpuid
    "418900"  # mov [r8], eax
    "41895804"  # mov [r8+4], ebx
    "41894808"  # mov [r8+8], ecx
    "4189500c"  # mov [r8+12], edx
    "5b"  # pop rbx
    "c3"  # ret
)


class CpuSgx(msgspec.Struct, frozen=True, kw_only=True):
    """What the CPU says of itself; `flexible` is flexible launch control, without which Linux has no enclaves."""

    present: bool = False
    flexible: bool = False
    sgx1: bool = False
    sgx2: bool = False
    sections: Sequence[int] = ()


class Epc(msgspec.Struct, frozen=True, kw_only=True):
    """The size in bytes, where it is from, and what helps to explain it.

    `numa` has the bytes of each NUMA node where the kernel tells them. `disagreements` are sentences for the log:
    sources that contradict each other or could not be read. `cpu` is None where the CPU cannot be asked, `cpu_flags`
    has those of `sgx` and `sgx_lc` that `/proc/cpuinfo` shows (None: unreadable), `driver_nodes` the files in `/dev`.
    """

    total: int = 0
    source: Source = "none"
    numa: Mapping[int, int] = {}
    disagreements: Sequence[str] = ()
    cpu: CpuSgx | None = None
    cpu_flags: Sequence[str] | None = None
    driver_nodes: Sequence[str] = ()


def read_epc(host: Host, cpuid: Cpuid | None = None) -> Epc:
    """Asks everybody. Raises nothing: what cannot be had is told in the value.

    `cpuid` is asked in the place of this machine's CPU.
    """
    numa, problems = numa_epc(host)
    complete = bool(numa) and not problems
    source, cpu = _cpu(host, cpuid)
    told = sum(numa.values())
    counted = sum(cpu.sections) if cpu is not None else 0
    if cpu is not None and numa and told != counted:
        problems.append(f"the kernel manages {told} bytes of EPC, the CPU tells of {counted}")
    if complete or (numa and not counted):
        total, source = told, "sysfs"
    elif counted:
        total = counted
    else:
        total, source = 0, "none"
    return Epc(
        total=total,
        source=source,
        numa=numa,
        disagreements=tuple(problems),
        cpu=cpu,
        cpu_flags=_cpu_flags(host),
        driver_nodes=tuple(path for path in DRIVER_NODES if host.exists(path)),
    )


def numa_epc(host: Host) -> tuple[dict[int, int], list[str]]:
    """The bytes of EPC by NUMA node as the kernel gives them, and which of its files could not be understood."""
    found: dict[int, int] = {}
    problems: list[str] = []
    try:
        names = host.names(_NUMA)
    except HostError as error:
        return {}, [] if isinstance(error, Missing) else [str(error)]
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
    """What CPUID says of SGX. Raises what `cpuid` raises."""
    highest = cpuid(0, 0)[0]
    if highest < _EXTENDED_FEATURES:
        return CpuSgx()
    _eax, ebx, ecx, _edx = cpuid(_EXTENDED_FEATURES, 0)
    if not ebx >> 2 & 1:
        return CpuSgx(flexible=bool(ecx >> 30 & 1))
    eax = cpuid(_SGX, 0)[0] if highest >= _SGX else 0
    return CpuSgx(
        present=True,
        flexible=bool(ecx >> 30 & 1),
        sgx1=bool(eax & 1),
        sgx2=bool(eax >> 1 & 1),
        sections=tuple(_sections(cpuid)) if highest >= _SGX else (),
    )


def instruction() -> Cpuid:
    """CPUID as this process executes it. Raises `OSError` where that is not possible."""
    import platform  # noqa: PLC0415 - memory of node commands

    if platform.machine() not in ("x86_64", "AMD64") or sys.maxsize < 1 << 32:
        raise OSError("not a 64-bit x86 program")
    try:
        import ctypes  # noqa: PLC0415 - memory of node commands
        import mmap  # noqa: PLC0415 - memory of node commands
    except ImportError as error:  # Python may be built without either
        raise OSError(str(error)) from None

    page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    page.write(_ROUTINE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # Never writable and executable at once.
    if protect(start, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    registers = ctypes.c_uint32 * 4
    routine = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, registers)(start)

    def ask(leaf: int, subleaf: int, _kept: mmap.mmap = page) -> tuple[int, int, int, int]:
        out = registers()
        routine(leaf, subleaf, out)
        return out[0], out[1], out[2], out[3]

    return ask


def device(read: Callable[[int, int], bytes]) -> Cpuid:
    """CPUID as the device gives it (cpuid(4)): `read` takes a size and an offset, which carries the question."""

    def ask(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        # A longer read would go on with the next leaf.
        data = read(16, subleaf << 32 | leaf)
        if len(data) != 16:
            raise OSError(f"{_CPUID_DEVICE}: {len(data)} bytes, expected 16")
        eax, ebx, ecx, edx = struct.unpack("<4I", data)
        return eax, ebx, ecx, edx

    return ask


def _cpu(host: Host, cpuid: Cpuid | None) -> tuple[Source, CpuSgx | None]:
    """Who could be asked first, and what was said."""
    ways: list[tuple[Source, Callable[[], CpuSgx]]] = []
    if cpuid is not None:
        ways.append(("cpuid", lambda: cpu_sgx(cpuid)))
    elif host.root == "/":
        ways.append(("cpuid", lambda: cpu_sgx(instruction())))
        ways.append(("cpuid-device", _told_by_device))
    for source, ask in ways:
        try:
            return source, ask()
        except OSError:
            continue
    return "none", None


def _told_by_device() -> CpuSgx:
    """Raises `OSError`."""
    descriptor = os.open(_CPUID_DEVICE, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISCHR(os.fstat(descriptor).st_mode):
            raise OSError(f"{_CPUID_DEVICE}: not a character device")
        return cpu_sgx(device(lambda size, offset: os.pread(descriptor, size, offset)))
    finally:
        os.close(descriptor)


def _sections(cpuid: Cpuid) -> list[int]:
    sizes: list[int] = []
    for number in _SECTIONS:
        eax, _ebx, ecx, edx = cpuid(_SGX, number)
        if not eax & 0xF:
            break
        if eax & 0xF == 1:
            sizes.append((ecx & _PAGES) + ((edx & _HIGH) << 32))
    return sizes


def _cpu_flags(host: Host) -> tuple[str, ...] | None:
    """Which of the two flags the first processor has; None when it cannot be read."""
    try:
        descriptor = os.open(host.local(_CPUINFO), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, HostError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        # The file is as long as the machine has processors; they are all alike here.
        text = os.read(descriptor, _CPUINFO_LIMIT).decode("ascii", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)
    flags = re.search(r"^flags[ \t]*:(.*)$", text, re.MULTILINE)
    words = flags[1].split() if flags else []
    return tuple(flag for flag in ("sgx", "sgx_lc") if flag in words)
