"""Discovery of the host features that the rules use, under the names of node-feature-discovery (NFD).

As in NFD: PCI functions with the first four digits of their class, loaded modules (names with underscores), enabled
modules (also built-in ones, by the names of their files), kernel options, SGX and its memory. Unlike in NFD: a kernel
without a readable configuration has `X86_SGX` if sysfs shows the SGX driver, and built-in modules are also read from
`/sys/module`. Features that other programs report to NFD are unknown here.
"""

import errno
import re
from collections.abc import Iterator, Mapping

import msgspec

from accelplane.host import Host, HostError, Missing
from accelplane.host.epc import Epc, read_epc

# Kernel options that rules use.
OPTIONS = ("X86_SGX",)

_INTEL = "0x8086"
_HEX = re.compile(r"0x([0-9a-f]{4})")
_CLASS = re.compile(r"0x([0-9a-f]{4})[0-9a-f]{2}")
_MODULE = re.compile(r"^([A-Za-z0-9_]{1,64}) ", re.MULTILINE)
_BUILT_IN = re.compile(r"([A-Za-z0-9_-]{1,64})\.ko$", re.MULTILINE)
_OPTION = re.compile(rf"^CONFIG_({'|'.join(OPTIONS)})=[ym]$", re.MULTILINE)
_RELEASE = re.compile(r"[A-Za-z0-9._+~-]{1,128}")
_LIMIT = 4 * 1024 * 1024
_CONFIGURATIONS = (
    "/proc/config.gz",
    "/boot/config-{}",
    "/lib/modules/{}/config",
    "/lib/modules/{}/build/.config",
    "/usr/lib/kernel/config-{}",
    "/usr/lib/ostree-boot/config-{}",
)


class Function(msgspec.Struct, frozen=True):
    """An Intel PCI function: four hexadecimal digits of its class, and its device id."""

    cls: str
    device: str


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """`pci` is sorted by address; `elements` are values by feature (`kernel.loadedmodule`) and name."""

    pci: tuple[Function, ...] = ()
    elements: Mapping[str, Mapping[str, str]] = {}

    def element(self, feature: str, name: str) -> str | None:
        """Returns its value, empty for a flag, None if it is missing."""
        return self.elements.get(feature, {}).get(name)


def discover(host: Host) -> Features:
    """Returns the host's features. A file that cannot be read is a note of `host`, and its features are missing."""
    release = _release(host)
    loaded, enabled = _modules(host, release)
    epc = read_epc(host)
    for disagreement in epc.disagreements:
        host.note(disagreement)
    security = {"sgx.enabled": "true", "sgx.epc": str(epc.total)} if epc.total else {}
    return Features(
        pci=tuple(_functions(host)),
        elements={
            "kernel.loadedmodule": dict.fromkeys(sorted(loaded), ""),
            "kernel.enabledmodule": dict.fromkeys(sorted(enabled), ""),
            "kernel.config": dict.fromkeys(_options(host, release, epc), ""),
            "cpu.cpuid": dict.fromkeys(_cpu_flags(epc), ""),
            "cpu.security": security,
        },
    )


def _functions(host: Host) -> Iterator[Function]:
    try:
        functions = host.pci_devices(_INTEL)
    except HostError as error:
        host.note(f"PCI functions unknown: {error}")
        return
    for function in functions:
        cls, device = _CLASS.fullmatch(function.cls), _HEX.fullmatch(function.device)
        if cls is None or device is None:
            host.note(
                f"PCI function {function.address} skipped: class {function.cls[:20]!a}, device "
                f"{function.device[:20]!a}, expected hexadecimal numbers"
            )
            continue
        yield Function(cls[1], device[1])


def _modules(host: Host, release: str) -> tuple[set[str], set[str]]:
    """Returns the loaded modules, and the loaded or built-in ones."""
    present = _names(host, "/sys/module")
    listed = _content(host, "/proc/modules")
    if listed is None:
        loaded = {name for name in present if host.exists(f"/sys/module/{name}/initstate")}
    else:
        loaded = set(_MODULE.findall(_text(listed)))
    # Names in /sys/module have underscores; file names have underscores or hyphens.
    enabled = loaded | present | {name.replace("_", "-") for name in present - loaded}
    if release:
        built_in = _content(host, f"/lib/modules/{release}/modules.builtin")
        enabled.update(_BUILT_IN.findall(_text(built_in or b"")))
    return loaded, enabled


def _options(host: Host, release: str, epc: Epc) -> set[str]:
    for place in _CONFIGURATIONS:
        if "{}" in place and not release:
            continue
        data = _content(host, place.format(release))
        if data is None:
            continue
        if place.endswith(".gz"):
            data = _unpack(host, place, data)
        # The file may be empty or something else.
        if b"CONFIG_" in data:
            return set(_OPTION.findall(_text(data)))
    if epc.numa or host.exists("/sys/class/misc/sgx_enclave"):
        return {"X86_SGX"}
    return set()


def _unpack(host: Host, path: str, data: bytes) -> bytes:
    import zlib  # noqa: PLC0415 - saves memory in programs without feature discovery

    try:
        return zlib.decompressobj(wbits=31).decompress(data, _LIMIT)
    except zlib.error as error:
        host.note(f"{path}: not gzip data: {error}")
        return b""


def _cpu_flags(epc: Epc) -> list[str]:
    """Prefers the kernel's flags to CPUID: the kernel clears them if firmware locks SGX."""
    if epc.cpu_flags is not None:
        names = {"sgx": "SGX", "sgx_lc": "SGXLC"}
        return [names[flag] for flag in epc.cpu_flags if flag in names]
    if epc.cpu is None or not epc.cpu.present:
        return []
    return ["SGX", "SGXLC"] if epc.cpu.flexible else ["SGX"]


def _release(host: Host) -> str:
    text = _text(_content(host, "/proc/sys/kernel/osrelease") or b"").strip()
    if text and (not _RELEASE.fullmatch(text) or text in (".", "..")):
        host.note(f"/proc/sys/kernel/osrelease: {text[:40]!a}, expected a kernel release")
        return ""
    return text


def _names(host: Host, path: str) -> set[str]:
    try:
        return {name for name in host.optional_names(path) if name.isascii() and name.isprintable()}
    except HostError as error:
        host.note(str(error))
        return set()


def _content(host: Host, path: str) -> bytes | None:
    """Returns the content of a file that may be longer than an attribute, None if it cannot be read."""
    try:
        return host.read_bytes(path, _LIMIT)
    except HostError as error:
        if not isinstance(error, Missing) and error.errno != errno.ENOTDIR:
            host.note(str(error))
        return None


def _text(data: bytes) -> str:
    return data.decode("ascii", "replace")
