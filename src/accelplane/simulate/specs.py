"""What a simulated node has: GPUs, NPUs, NUMA nodes and more, as values, and how they are written down in YAML.

Whatever is left out follows from the number of the card, so that `{}` is a complete GPU.
"""

import os
import random
import re
from collections.abc import Sequence
from typing import Literal, Self

import msgspec

from accelplane.simulate.checks import (
    BDF,
    MAX_INDEX,
    MAX_NUMA_NODES,
    MAX_VFS,
    PCI_CLASS,
    PCI_ID,
    bounded,
    check,
    spelled,
)
from accelplane.simulate.description import (
    Description,
    DescriptionError,
    read_description,
    read_limited,
)
from accelplane.simulate.offload import DlbSpec, DsaSpec, FpgaSpec, IaaSpec, QatSpec, SgxSpec

MAX_TILES = 64

_CONNECTOR = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,30}")


class Model(msgspec.Struct, frozen=True):
    """What the PCI function of a product says of itself."""

    device_id: str
    pci_class: str


FLEX_170 = Model("0x56c0", "0x038000")
ARC_B580 = Model("0xe20b", "0x030000")
LUNAR_LAKE_NPU = Model("0x643e", "0x120000")


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """One GPU. `index` is the number in `cardN`, the lowest free one when left out.

    `vfs` virtual functions are enabled, each a card of its own after this one. `memory` is in bytes and per tile, 0
    for an integrated GPU. `mei` adds the firmware interface, `by_path` the links that udev makes. `numa_node` -1 means
    that the machine does not tell.
    """

    driver: Literal["i915", "xe"] = "i915"
    index: int | None = None
    device_id: str | None = None
    pci_class: str | None = None
    bdf: str | None = None
    numa_node: int | None = None
    vfs: int = 0
    tiles: int = 1
    memory: int = 16 * 1024**3
    mei: bool = True
    by_path: bool = True
    connectors: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check(
            bounded("index", self.index, MAX_INDEX),
            spelled("device-id", self.device_id, PCI_ID, "0x56c0"),
            spelled("pci-class", self.pci_class, PCI_CLASS, "0x030000"),
            spelled("bdf", self.bdf, BDF, "0000:03:00.0"),
            bounded("numa-node", self.numa_node, MAX_NUMA_NODES - 1, least=-1),
            bounded("vfs", self.vfs, MAX_VFS),
            bounded("tiles", self.tiles, MAX_TILES, least=1),
            bounded("memory", self.memory, 2**63 - 1),
            *(spelled("connectors", name, _CONNECTOR, "DP-1") for name in self.connectors or ()),
        )

    @property
    def model(self) -> Model:
        """The ids of the product: those given, else those of a usual one for the driver."""
        usual = FLEX_170 if self.driver == "i915" else ARC_B580
        return Model(self.device_id or usual.device_id, self.pci_class or usual.pci_class)

    @property
    def outputs(self) -> Sequence[str]:
        """The names of its connectors: those given, else one if it is a display controller."""
        if self.connectors is not None:
            return self.connectors
        return ("DP-1",) if self.model.pci_class.startswith("0x0300") else ()


class NpuSpec(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """One NPU. `index` is the number in `accelN`, the lowest free one when left out."""

    driver: Literal["intel_vpu"] = "intel_vpu"
    index: int | None = None
    device_id: str | None = None
    bdf: str | None = None
    numa_node: int | None = None

    def __post_init__(self) -> None:
        check(
            bounded("index", self.index, MAX_INDEX),
            spelled("device-id", self.device_id, PCI_ID, "0x643e"),
            spelled("bdf", self.bdf, BDF, "0000:00:0b.0"),
            bounded("numa-node", self.numa_node, MAX_NUMA_NODES - 1, least=-1),
        )

    @property
    def model(self) -> Model:
        return Model(self.device_id or LUNAR_LAKE_NPU.device_id, LUNAR_LAKE_NPU.pci_class)


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """A whole node. Devices that don't say so are dealt to the `numa_nodes` in turn; 0 is a machine without NUMA.

    `iommu`: in `scalable` mode user queues can be enabled, in `legacy` mode virtual functions, when `off` neither.
    `loaded` says which drivers are there when no device brings them: vfio-pci, igb_uio. `noiommu` and
    `disable_denylist` are vfio's module parameters.
    """

    gpus: Sequence[GpuSpec] = ()
    npus: Sequence[NpuSpec] = ()
    qats: Sequence[QatSpec] = ()
    dsas: Sequence[DsaSpec] = ()
    iaas: Sequence[IaaSpec] = ()
    dlbs: Sequence[DlbSpec] = ()
    fpgas: Sequence[FpgaSpec] = ()
    sgx: SgxSpec | None = None
    numa_nodes: int = 1
    iommu: Literal["scalable", "legacy", "off"] = "scalable"
    loaded: Sequence[Literal["vfio-pci", "igb_uio"]] = ("vfio-pci",)
    noiommu: bool = False
    disable_denylist: bool = False

    def __post_init__(self) -> None:
        check(bounded("numa-nodes", self.numa_nodes, MAX_NUMA_NODES))
        lists = ("gpus", "npus", "qats", "dsas", "iaas", "dlbs", "fpgas")
        for key in lists:
            check(bounded(f"number of {key}", len(getattr(self, key)), MAX_INDEX + 1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The node in a YAML file, or in a JSON description of `intel_gpu_fakedev` when the name ends so.

        Raises `DescriptionError` naming the file and the key.
        """
        if os.fspath(path).endswith(".json"):
            return cls.of(read_description(path))
        import yaml  # noqa: PLC0415 - whoever builds the node in Python does without it

        try:
            # Plain YAML 1.1 takes `0000:03:00.0` for a number in base 60: every scalar is read as text.
            given: object = yaml.load(read_limited(path).decode(), yaml.BaseLoader)  # noqa: S506 - makes text only
            return msgspec.convert(given or {}, cls, strict=False)
        except yaml.YAMLError as error:
            raise DescriptionError(f"{os.fspath(path)}: not YAML: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise DescriptionError(f"{os.fspath(path)}: nested too deeply") from None
        except (msgspec.ValidationError, UnicodeDecodeError) as error:
            raise DescriptionError(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def of(cls, description: Description) -> Self:
        """The node that a description of `intel_gpu_fakedev` means, with real PCI functions."""
        functions = description.vfsperpf + 1
        count = description.devcount // functions
        per_node = description.devspernode
        gpus = [
            GpuSpec(
                driver=description.driver or "i915",
                device_id=description.device_id or None,
                numa_node=index // per_node if per_node else 0,
                vfs=description.vfsperpf,
                tiles=max(description.tilesperdev, 1),
                memory=description.devmemsize,
                mei=description.mei,
                by_path=description.by_path,
            )
            for index in range(count)
        ]
        if description.seed is not None:
            places = list(range(count))
            random.Random(description.seed).shuffle(places)  # noqa: S311 - a repeatable order, no secret
            gpus = [
                msgspec.structs.replace(gpu, bdf=gpu_address(place, gpu.numa_node or 0))
                for place, gpu in zip(places, gpus, strict=True)
            ]
        return cls(
            gpus=gpus,
            npus=[NpuSpec(numa_node=0) for _ in range(description.npus)],
            numa_nodes=(count - 1) // per_node + 1 if per_node else 1,
        )


def gpu_address(index: int, numa_node: int) -> str:
    """Where the card of that number sits unless told otherwise: behind a root port of its own, near its NUMA node.

    Even nodes have the host bridges 00 to 70 of a PCI domain, odd ones 80 to f0, each with 15 root ports.
    """
    numa_node = max(numa_node, 0)
    overflow, place = divmod(index, 8 * 15)
    bridge, port = divmod(place, 15)
    domain = numa_node // 2 + 0x100 * overflow
    return f"{domain:04x}:{0x80 * (numa_node % 2) + 0x10 * bridge + port + 1:02x}:00.0"


def npu_address(index: int) -> str:
    """Where the NPU of that number sits unless told otherwise: in the processor itself."""
    domain, function = divmod(index, 8)
    return f"{domain:04x}:00:0b.{function}"
