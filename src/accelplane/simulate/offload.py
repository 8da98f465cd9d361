"""What a simulated node has of QAT, DSA, IAA, DLB, FPGAs and SGX, as values: the state in which the kernel is found.

Whatever is left out follows from the number of the device, so that `{}` is a complete one. Facts: the PCI id tables of
the kernel's qat_*, idxd and vfio_pci drivers, and of Intel's dlb2 driver.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from accelplane.simulate.checks import BDF, MAX_INDEX, MAX_NUMA_NODES, MAX_VFS, bounded, check, spelled

MAX_QUEUES = 8  # of one DSA or IAA device
_SERVICES = re.compile(r"[a-z]+(;[a-z]+)*")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FPGA_ID = re.compile(r"[0-9a-f]{32}")

QatModel = Literal["4xxx", "401xx", "402xx", "420xx", "6xxx", "c6xx", "c3xxx", "d15xx", "dh895xcc", "c4xxx"]
DsaModel = Literal["0b25", "11fb", "1212"]
IaaModel = Literal["0cfe", "1216"]
VfDriver = Literal["kernel", "vfio-pci", "igb_uio", "none"]


class QatProduct(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel knows of one QAT product. `services`: how many it runs at once, 0 where there is no choice."""

    device_id: str
    vf_device_id: str
    driver: str
    module: str
    total_vfs: int = 16
    generation: int = 2
    services: int = 0

    @property
    def vf_driver(self) -> str:
        return self.driver + "vf"


QAT_PRODUCTS: Mapping[str, QatProduct] = {
    "4xxx": QatProduct(
        device_id="4940", vf_device_id="4941", driver="4xxx", module="qat_4xxx", generation=4, services=2
    ),
    "401xx": QatProduct(
        device_id="4942", vf_device_id="4943", driver="4xxx", module="qat_4xxx", generation=4, services=2
    ),
    "402xx": QatProduct(
        device_id="4944", vf_device_id="4945", driver="4xxx", module="qat_4xxx", generation=4, services=2
    ),
    "420xx": QatProduct(
        device_id="4946", vf_device_id="4947", driver="420xx", module="qat_420xx", generation=4, services=2
    ),
    "6xxx": QatProduct(
        device_id="4948", vf_device_id="4949", driver="6xxx", module="qat_6xxx", generation=6, services=3
    ),
    "c6xx": QatProduct(device_id="37c8", vf_device_id="37c9", driver="c6xx", module="qat_c62x"),
    "c3xxx": QatProduct(device_id="19e2", vf_device_id="19e3", driver="c3xxx", module="qat_c3xxx"),
    "d15xx": QatProduct(device_id="6f54", vf_device_id="6f55", driver="d15xx", module="qat_d15xx"),
    "dh895xcc": QatProduct(
        device_id="0435", vf_device_id="0443", driver="dh895xcc", module="qat_dh895xcc", total_vfs=32
    ),
    "c4xxx": QatProduct(device_id="18a0", vf_device_id="18a1", driver="c4xxx", module="qat_c4xxx", total_vfs=127),
}


class QatSpec(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """One QAT physical function.

    `vfs` are enabled already and have `vf_driver`: the kernel's own for them, another, or none. It could have
    `total_vfs`: unless told, those that are enabled, else the product's number. `services` are written as in
    `qat/cfg_services`; unless told, those that the driver starts with. `bridge` puts it behind a root port.
    """

    model: QatModel = "4xxx"
    bdf: str | None = None
    numa_node: int | None = None
    services: str | None = None
    state: Literal["up", "down"] = "up"
    vfs: int = 0
    total_vfs: int | None = None
    vf_driver: VfDriver = "kernel"
    bridge: bool | None = None
    auto_reset: bool = False

    def __post_init__(self) -> None:
        check(
            spelled("bdf", self.bdf, BDF, "0000:6b:00.0"),
            bounded("numa-node", self.numa_node, MAX_NUMA_NODES - 1, least=-1),
            spelled("services", self.services, _SERVICES, "sym;asym"),
            bounded("vfs", self.vfs, MAX_VFS),
            bounded("total-vfs", self.total_vfs, MAX_VFS, least=self.vfs),
        )

    @property
    def product(self) -> QatProduct:
        return QAT_PRODUCTS[self.model]

    @property
    def could_have(self) -> int:
        """The number in `sriov_totalvfs`."""
        return self.product.total_vfs if self.total_vfs is None and not self.vfs else self.total_vfs or self.vfs


class QueueSpec(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """One work queue that is set up already, in a group of its own number with the engine of that number."""

    type: Literal["user", "kernel"] = "user"
    mode: Literal["dedicated", "shared"] = "dedicated"
    name: str | None = None
    size: int = 16
    enabled: bool = True

    def __post_init__(self) -> None:
        check(spelled("name", self.name, _NAME, "app00"), bounded("size", self.size, 128, least=1))


class _IdxdSpec(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    index: int | None = None
    bdf: str | None = None
    numa_node: int | None = None
    queues: Sequence[QueueSpec] = ()
    driver: Literal["idxd", "vfio-pci", "none"] = "idxd"
    max_queues: int = MAX_QUEUES
    max_groups: int = 4
    max_engines: int = 4
    driver_name_file: bool = True

    def __post_init__(self) -> None:
        check(
            bounded("index", self.index, MAX_INDEX),
            spelled("bdf", self.bdf, BDF, "0000:6a:01.0"),
            bounded("numa-node", self.numa_node, MAX_NUMA_NODES - 1, least=-1),
            bounded("max-queues", self.max_queues, 128, least=1),
            bounded("max-groups", self.max_groups, 128, least=1),
            bounded("max-engines", self.max_engines, 128, least=1),
            bounded("number of queues", len(self.queues), self.max_queues),
        )


class DsaSpec(_IdxdSpec, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """One DSA. `index` is the number in `dsaN`, the lowest free one when left out; `queues` are set up already.

    Without `driver_name_file` it has queues as kernels before 6.7 show them.
    """

    model: DsaModel = "0b25"


class IaaSpec(_IdxdSpec, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """One IAA. `index` is the number in `iaxN`, shared with the DSAs' as the driver counts both."""

    model: IaaModel = "0cfe"


class DlbSpec(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """One DLB physical function, whose `vfs` are enabled already; they have nodes once they are given resources."""

    bdf: str | None = None
    numa_node: int | None = None
    vfs: int = 0
    total_vfs: int = 16
    provisioned: bool = True

    def __post_init__(self) -> None:
        check(
            spelled("bdf", self.bdf, BDF, "0000:72:00.0"),
            bounded("numa-node", self.numa_node, MAX_NUMA_NODES - 1, least=-1),
            bounded("vfs", self.vfs, self.total_vfs),
            bounded("total-vfs", self.total_vfs, 16),
        )


class SgxSpec(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """SGX of the whole machine. `epc` is in bytes and per NUMA node; without `loaded` the driver refused to start."""

    epc: int = 64 * 1024**2
    loaded: bool = True
    provision: bool = True

    def __post_init__(self) -> None:
        check(bounded("epc", self.epc, 2**63 - 1))


class FpgaSpec(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """One FPGA card: a port for each of `afus`, programmed with it; `interface` is what its regions are built for.

    The last `vfs` ports belong to virtual functions. Programming takes `seconds`.
    """

    driver: Literal["dfl", "opae"] = "dfl"
    bdf: str | None = None
    numa_node: int | None = None
    interface: str = "69528db6eb31577a8c3668f9faa081f6"
    afus: Sequence[str] = ("d8424dc4a4a3c413f89e433683f9040b",)
    vfs: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        check(
            spelled("bdf", self.bdf, BDF, "0000:63:00.0"),
            bounded("numa-node", self.numa_node, MAX_NUMA_NODES - 1, least=-1),
            spelled("interface", self.interface, _FPGA_ID, "69528db6eb31577a8c3668f9faa081f6"),
            *(spelled("afus", afu, _FPGA_ID, "d8424dc4a4a3c413f89e433683f9040b") for afu in self.afus),
            bounded("number of afus", len(self.afus), 16, least=1),
            bounded("vfs", self.vfs, len(self.afus)),
            bounded("seconds", self.seconds, 3600),
        )


def offload_address(kind: Literal["qat", "dsa", "iaa", "dlb", "fpga"], index: int, numa_nodes: int) -> str:
    """Where the device of that number sits unless told otherwise: as on real processors, devices of one place together.

    Each place has four buses, from 60 on even NUMA nodes and from e0 on odd ones.
    """
    place, numa_node = divmod(index, max(numa_nodes, 1))
    overflow, place = divmod(place, 8)
    domain = numa_node // 2 + 0x100 * overflow
    bus, function = {
        "dsa": (0, "01.0"),
        "iaa": (0, "02.0"),
        "qat": (1, "00.0"),
        "dlb": (2, "00.0"),
        "fpga": (3, "00.0"),
    }[kind]
    return f"{domain:04x}:{0x60 + 0x80 * (numa_node % 2) + 4 * place + bus:02x}:{function}"
