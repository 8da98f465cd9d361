"""A host's features, named as node-feature-discovery (NFD) names those that its rules ask for.

What is the same as there: PCI functions with the first four digits of their class, modules loaded (names with
underscores) and enabled (also those built in, by the names of their files), kernel options, SGX and its memory. What
is better: a kernel without a readable configuration has `X86_SGX` when its SGX driver is there to be seen, and built-in
modules are known by `/sys/module` where `/lib/modules` is not. What is not known here is what other programs tell NFD.
"""

import errno
import re
from collections.abc import Iterator, Mapping

import msgspec

from accelplane.host import Host, HostError, Missing
from accelplane.host.epc import Epc, read_epc

# Kernel options that a rule asks for; there are ten thousand.
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
    """A PCI function of Intel's: four hexadecimal digits of its class, and its device id."""

    cls: str
    device: str


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """`pci` in the order of their addresses; `elements` by feature (`kernel.loadedmodule`) and name, with values."""

    pci: tuple[Function, ...] = ()
    elements: Mapping[str, Mapping[str, str]] = {}

    def element(self, feature: str, name: str) -> str | None:
        """Its value, empty for what is simply there; None for what is not."""
        return self.elements.get(feature, {}).get(name)


def look(host: Host) -> Features:
    """The host's features. What cannot be read is noted, and counts as not there."""
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
                f"PCI function {function.address} left out: class {function.cls[:20]!a}, device "
                f"{function.device[:20]!a}, expected hexadecimal numbers"
            )
            continue
        yield Function(cls[1], device[1])


def _modules(host: Host, release: str) -> tuple[set[str], set[str]]:
    """Those loaded, and those loaded or built in."""
    there = _names(host, "/sys/module")
    listed = _content(host, "/proc/modules")
    if listed is None:
        loaded = {name for name in there if host.exists(f"/sys/module/{name}/initstate")}
    else:
        loaded = set(_MODULE.findall(_text(listed)))
    # Loaded or not, a name in /sys/module has underscores; those of files may have either.
    enabled = loaded | there | {name.replace("_", "-") for name in there - loaded}
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
            data = _unpacked(host, place, data)
        # Something else may lie there, or an empty file.
        if b"CONFIG_" in data:
            return set(_OPTION.findall(_text(data)))
    if epc.numa or host.exists("/sys/class/misc/sgx_enclave"):
        return {"X86_SGX"}
    return set()


def _unpacked(host: Host, path: str, data: bytes) -> bytes:
    import zlib  # noqa: PLC0415 - memory of those who never look

    try:
        return zlib.decompressobj(wbits=31).decompress(data, _LIMIT)
    except zlib.error as error:
        host.note(f"{path}: not what gzip makes: {error}")
        return b""


def _cpu_flags(epc: Epc) -> list[str]:
    """The kernel's word before the CPU's own: it takes the flags away where firmware has SGX locked."""
    if epc.cpu_flags is not None:
        names = {"sgx": "SGX", "sgx_lc": "SGXLC"}
        return [names[flag] for flag in epc.cpu_flags if flag in names]
    if epc.cpu is None or not epc.cpu.present:
        return []
    return ["SGX", "SGXLC"] if epc.cpu.flexible else ["SGX"]


def _release(host: Host) -> str:
    text = _text(_content(host, "/proc/sys/kernel/osrelease") or b"").strip()
    if text and (not _RELEASE.fullmatch(text) or text in (".", "..")):
        host.note(f"/proc/sys/kernel/osrelease: {text[:40]!a}, expected a kernel's release")
        return ""
    return text


def _names(host: Host, path: str) -> set[str]:
    try:
        return {name for name in host.names(path) if name.isascii() and name.isprintable()}
    except Missing:
        return set()
    except HostError as error:
        host.note(str(error))
        return set()


def _content(host: Host, path: str) -> bytes | None:
    try:
        return host.read_bytes(path, _LIMIT)
    except HostError as error:
        if not isinstance(error, Missing) and error.errno != errno.ENOTDIR:
            host.note(str(error))
        return None


def _text(data: bytes) -> str:
    return data.decode("ascii", "replace")
