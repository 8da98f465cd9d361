"""Descriptions of simulated nodes (GPUs, NPUs, NUMA nodes and more), and their YAML format.

Defaults follow from the number of the card, so `{}` is a complete GPU.
"""

import os
import random
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

import msgspec

from accelplane.simulate import checks
from accelplane.simulate.checks import Form, PciDeviceSpec, Range, Spec
from accelplane.simulate.description import Description, DescriptionError, read_description, read_limited
from accelplane.simulate.offload import DlbSpec, DsaSpec, FpgaSpec, IaaSpec, NicSpec, OnloadSpec, QatSpec, SgxSpec

MAX_TILES = 64

_CONNECTOR = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,30}")


class Model(msgspec.Struct, frozen=True):
    """The PCI device ID, class and vendor of a product."""

    device_id: str
    pci_class: str
    vendor: str = "0x8086"


FLEX_170 = Model("0x56c0", "0x038000")
ARC_B580 = Model("0xe20b", "0x030000")
LUNAR_LAKE_NPU = Model("0x643e", "0x120000")


class GpuSpec(PciDeviceSpec, frozen=True, kw_only=True):
    """One GPU. `index` is the number in `cardN`, default the lowest free one.

    `vfs` is the number of enabled VFs, each of them a card. `memory` is in bytes per tile, 0 for an integrated GPU.
    `mei` adds the firmware interface, `by_path` the links of udev. `numa_node` -1 means that it is unknown.
    """

    driver: Literal["i915", "xe"] = "i915"
    index: Annotated[int | None, Range(0, checks.MAX_INDEX)] = None
    device_id: Annotated[str | None, Form(checks.PCI_ID, "0x56c0")] = None
    pci_class: Annotated[str | None, Form(checks.PCI_CLASS, "0x030000")] = None
    vfs: Annotated[int, Range(0, checks.MAX_VFS)] = 0
    tiles: Annotated[int, Range(1, MAX_TILES)] = 1
    memory: Annotated[int, Range(0, 2**63 - 1)] = 16 * 1024**3
    mei: bool = True
    by_path: bool = True
    connectors: Annotated[Sequence[str] | None, Form(_CONNECTOR, "DP-1")] = None

    @property
    def model(self) -> Model:
        """The PCI device ID and class; default: those of a common product with this driver."""
        usual = FLEX_170 if self.driver == "i915" else ARC_B580
        return Model(self.device_id or usual.device_id, self.pci_class or usual.pci_class)

    @property
    def outputs(self) -> Sequence[str]:
        """The names of the connectors; default: one for a display controller, else none."""
        if self.connectors is not None:
            return self.connectors
        return ("DP-1",) if self.model.pci_class.startswith("0x0300") else ()


class NpuSpec(PciDeviceSpec, frozen=True, kw_only=True):
    """One NPU. `index` is the number in `accelN`, default the lowest free one."""

    driver: Literal["intel_vpu"] = "intel_vpu"
    index: Annotated[int | None, Range(0, checks.MAX_INDEX)] = None
    device_id: Annotated[str | None, Form(checks.PCI_ID, "0x643e")] = None

    @property
    def model(self) -> Model:
        return Model(self.device_id or LUNAR_LAKE_NPU.device_id, LUNAR_LAKE_NPU.pci_class)


class NodeSpec(Spec, frozen=True, kw_only=True):
    """A node. Devices without a NUMA node are distributed over `numa_nodes`; 0 means a machine without NUMA.

    `iommu`: `scalable` allows user queues and VFs, `legacy` only VFs, `off` neither. `loaded` lists additional drivers.
    `noiommu` and `disable_denylist` are module parameters of vfio.
    """

    gpus: Sequence[GpuSpec] = ()
    npus: Sequence[NpuSpec] = ()
    qats: Sequence[QatSpec] = ()
    dsas: Sequence[DsaSpec] = ()
    iaas: Sequence[IaaSpec] = ()
    dlbs: Sequence[DlbSpec] = ()
    fpgas: Sequence[FpgaSpec] = ()
    nics: Sequence[NicSpec] = ()
    onload: OnloadSpec | None = None
    sgx: SgxSpec | None = None
    numa_nodes: Annotated[int, Range(0, checks.MAX_NUMA_NODES)] = 1
    iommu: Literal["scalable", "legacy", "off"] = "scalable"
    loaded: Sequence[Literal["vfio-pci", "igb_uio"]] = ("vfio-pci",)
    noiommu: bool = False
    disable_denylist: bool = False

    def problems(self) -> Iterator[str | None]:
        yield from super().problems()
        lists = ("gpus", "npus", "qats", "dsas", "iaas", "dlbs", "fpgas", "nics")
        for key in lists:
            yield Range(0, checks.MAX_INDEX + 1).problem(f"number of {key}", len(getattr(self, key)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a node from YAML, or from JSON of `intel_gpu_fakedev` if the name ends in `.json`.

        Raises `DescriptionError` with the file and the key.
        """
        if os.fspath(path).endswith(".json"):
            return cls.of(read_description(path))
        import yaml  # noqa: PLC0415 - not needed for nodes that are described in Python

        try:
            # YAML 1.1 parses `0000:03:00.0` as a number in base 60, so read every scalar as text.
            document: object = yaml.load(read_limited(path).decode(), yaml.BaseLoader)  # noqa: S506 - creates only text
            return msgspec.convert(document or {}, cls, strict=False)
        except yaml.YAMLError as error:
            raise DescriptionError(f"{os.fspath(path)}: not YAML: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise DescriptionError(f"{os.fspath(path)}: nested too deeply") from None
        except (msgspec.ValidationError, UnicodeDecodeError) as error:
            raise DescriptionError(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def of(cls, description: Description) -> Self:
        """Converts a description of `intel_gpu_fakedev` to a node with PCI functions."""
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
            random.Random(description.seed).shuffle(places)  # noqa: S311 - a reproducible order, no secret
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
    """Returns the default PCI address of a card: behind its own root port, on its NUMA node.

    Even nodes have the host bridges 00 to 70 of a PCI domain, odd ones 80 to f0, each with 15 root ports.
    """
    numa_node = max(numa_node, 0)
    overflow, place = divmod(index, 8 * 15)
    bridge, port = divmod(place, 15)
    domain = numa_node // 2 + 0x100 * overflow
    return f"{domain:04x}:{0x80 * (numa_node % 2) + 0x10 * bridge + port + 1:02x}:00.0"


def npu_address(index: int) -> str:
    """Returns the default PCI address of an NPU, on the bus of the processor."""
    domain, function = divmod(index, 8)
    return f"{domain:04x}:00:0b.{function}"
