"""The labels of a node's Intel GPUs for schedulers: number, memory, tiles, NUMA nodes and PCI groups.

GPU Aware Scheduling reads them, and a rule of node-feature-discovery turns three of them into extended resources.
`read_gpus` reads sysfs, `gpu_labels` is a function of the result. Physical functions with virtual functions do not
count, as in the plugin; its filters have no effect here.

Facts: sysfs code of the drivers i915 and xe. `lmem_total_bytes` is an attribute of Intel's out-of-tree i915, and
`physical_vram_size_bytes` one of xe.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from accelplane.host import Host, HostError, Unreadable, pci_address
from accelplane.nodelabels.labelvalues import number_labels, split

PREFIX = "gpu.intel.com"
DRM = "/sys/class/drm"
# The labels that are also extended resources.
FRACTIONS = ("millicores", "memory.max", "tiles")
# Of node-feature-discovery. The Go plugin writes this file.
FEATURES_DIRECTORY = "/etc/kubernetes/node-feature-discovery/features.d"
FEATURE_FILE = "intel-gpu-resources.txt"

_INTEL = "0x8086"
_CARD = re.compile(r"card([0-9]+)")
_XE_TILE = re.compile(r"tile.", re.DOTALL)
# As sysfs and as C write integers.
_INTEGER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|0[oO]?[0-7]{1,22}|0[bB][01]{1,64}|[1-9][0-9]{0,19}|0")
_DECIMAL = re.compile(r"[0-9]{1,20}")
_NUMA_NODE = re.compile(r"\+?[0-9]{1,10}")
_WRAP = 2**64
# Larger sums are no valid quantities.
_TOO_LARGE = 2**63 - 1
_LAST_NUMA_NODE = 32767
_MAX_CARDS = 1024


class Gpu(NamedTuple):
    """A card. `bdf` is its PCI address or empty, `path` its directory without links.

    `local_memory` is the size of the memory of one tile as i915 shows it, None if it does not. `vram` is that of all
    tiles as xe shows it, 0 if it does not. `numa` is -1 if unknown.
    """

    number: str
    bdf: str
    path: str
    tiles: int
    local_memory: int | None
    numa: int
    vram: int = 0


class LabelOptions(NamedTuple):
    """The variables of the environment, whose names are in `of`; 0 if unset or invalid."""

    memory_override: int = 0
    memory_reserved: int = 0
    pci_grouping_level: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "LabelOptions":
        names = ("GPU_MEMORY_OVERRIDE", "GPU_MEMORY_RESERVED", "GPU_PCI_GROUPING_LEVEL")
        return cls(*(_unsigned(environment.get(name, "")) for name in names))


def read_gpus(host: Host, drm: str = DRM) -> tuple[Gpu, ...]:
    """The cards in byte-wise order of their names, none without the directory.

    Raises `HostError` if a card of Intel has no readable directory `drm`: its driver may be starting.
    """
    found: list[Gpu] = []
    for name in host.optional_names(drm):
        card = _CARD.fullmatch(name)
        if card is None or not _counts(host, f"{drm}/{name}"):
            continue
        found.append(_gpu(host, f"{drm}/{name}", card[1]))
        if len(found) > _MAX_CARDS:
            raise Unreadable(drm, f"more than {_MAX_CARDS} Intel GPUs")
    return tuple(found)


def gpu_labels(gpus: Sequence[Gpu], options: LabelOptions, sizes: Mapping[str, int] | None = None) -> dict[str, str]:
    """The labels of the cards. `sizes` are the bytes of memory by PCI address that the Level-Zero service reports."""
    labels = {"tiles": str(sum(gpu.tiles for gpu in gpus))}
    if numbers := [gpu.number for gpu in gpus]:
        labels["millicores"] = str(1000 * len(gpus))
        amounts = [amount for gpu in gpus if (amount := _memory(gpu, options, sizes or {})) < _TOO_LARGE]
        if amounts:
            labels["memory.max"] = str(sum(amounts))
        # Deprecated, and therefore incomplete on nodes with many cards.
        labels["cards"] = split(".".join(f"card{number}" for number in numbers))[0]
        labels.update(number_labels("gpu-numbers", ".".join(numbers)))
    if nodes := _numa_map(gpus):
        labels.update(number_labels("numa-gpu-map", nodes))
    if groups := _pci_groups(gpus, options.pci_grouping_level):
        labels.update(number_labels("pci-groups", groups))
    return {f"{PREFIX}/{name}": value for name, value in labels.items()}


def feature_text(labels: Mapping[str, str]) -> str:
    """The labels as lines that node-feature-discovery reads."""
    return "".join(f"{key}={value}\n" for key, value in sorted(labels.items()))


def _counts(host: Host, entry: str) -> bool:
    """Whether the card is from Intel and not a physical function whose virtual functions are cards too."""
    try:
        vendor = host.text(f"{entry}/device/vendor")
    except HostError as error:
        host.note(f"no labels for {entry}: {error}")
        return False
    return vendor == _INTEL and host.vf_count(f"{entry}/device") in ("0", "-1")


def _gpu(host: Host, entry: str, number: str) -> Gpu:
    """Raises `HostError`."""
    host.names(f"{entry}/device/drm")
    i915_tiles = [name for name in host.entries(f"{entry}/gt") if name.startswith("gt")]
    xe_tiles = [name for name in host.entries(f"{entry}/device") if _XE_TILE.fullmatch(name)]
    return Gpu(
        number=number,
        bdf=_bdf(host, entry),
        path=_path(host, entry),
        tiles=len(i915_tiles) + len(xe_tiles) or 1,
        local_memory=_integer(host, f"{entry}/lmem_total_bytes"),
        numa=_numa_node(host, entry),
        vram=sum(_integer(host, f"{entry}/device/{tile}/physical_vram_size_bytes") or 0 for tile in xe_tiles),
    )


def _bdf(host: Host, entry: str) -> str:
    try:
        return pci_address(host.link(f"{entry}/device").rstrip("/").rpartition("/")[2]) or ""
    except HostError:
        return ""


def _path(host: Host, entry: str) -> str:
    try:
        return host.resolve(entry)
    except HostError as error:
        host.note(f"no PCI group for {entry}: {error}")
        return ""


def _integer(host: Host, path: str) -> int | None:
    text = host.text_or_empty(path)
    if not _INTEGER.fullmatch(text):
        return None
    # A leading zero makes an octal number in C, and is invalid in Python.
    octal = text.startswith("0") and text[1:].isdecimal()
    size = int(text, 8 if octal else 0)
    return size if size < _WRAP else None


def _numa_node(host: Host, entry: str) -> int:
    text = host.text_or_empty(f"{entry}/device/numa_node")
    return int(text) if _NUMA_NODE.fullmatch(text) and int(text) <= _LAST_NUMA_NODE else -1


def _memory(gpu: Gpu, options: LabelOptions, sizes: Mapping[str, int]) -> int:
    """Of all tiles. The arithmetic is that of unsigned 64-bit integers: more reserved than there is becomes huge."""
    if gpu.bdf and sizes.get(gpu.bdf, 0) > 0:
        return sizes[gpu.bdf]
    if gpu.local_memory is not None:
        return (gpu.local_memory * gpu.tiles - options.memory_reserved) % _WRAP
    if options.memory_override or not gpu.vram:
        return options.memory_override
    return (gpu.vram - options.memory_reserved) % _WRAP


def _numa_map(gpus: Sequence[Gpu]) -> str:
    nodes: dict[int, list[str]] = {}
    for gpu in gpus:
        if gpu.numa >= 0:
            nodes.setdefault(gpu.numa, []).append(gpu.number)
    return "_".join(f"{node}-{'.'.join(nodes[node])}" for node in sorted(nodes))


def _pci_groups(gpus: Sequence[Gpu], level: int) -> str:
    """Cards below the same bridge: their paths have the first `level` components from the host bridge in common."""
    groups: dict[str, list[str]] = {}
    for gpu in gpus:
        parts = gpu.path.split("/")
        start = next((index for index, part in enumerate(parts) if part.startswith("pci")), len(parts))
        group = parts[start : start + level] if 0 < level <= len(parts) - start else []
        if group:
            groups.setdefault("/".join(group), []).append(gpu.number)
    return "_".join(".".join(groups[path]) for path in sorted(groups))


def _unsigned(text: str) -> int:
    number = int(text) if _DECIMAL.fullmatch(text) else 0
    return number if number < _WRAP else 0
