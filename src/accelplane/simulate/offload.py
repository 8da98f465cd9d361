"""Descriptions of simulated QAT, DSA, IAA, DLB, FPGA, Solarflare and SGX hardware in its initial state.

Defaults follow from the number of the device, so `{}` is a complete description. Sources: the PCI ID tables of the
kernel's qat_*, idxd and vfio_pci drivers, and of Intel's dlb2 driver.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from accelplane.simulate.checks import MAX_INDEX, MAX_VFS, Described, Placed, bounded, spelled

MAX_QUEUES = 8  # of one DSA or IAA device
_SERVICES = re.compile(r"[a-z]+(;[a-z]+)*")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INTERFACE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,14}")
_FPGA_ID = re.compile(r"[0-9a-f]{32}")

QatModel = Literal["4xxx", "401xx", "402xx", "420xx", "6xxx", "c6xx", "c3xxx", "d15xx", "dh895xcc", "c4xxx"]
DsaModel = Literal["0b25", "11fb", "1212"]
IaaModel = Literal["0cfe", "1216"]
VfDriver = Literal["kernel", "vfio-pci", "igb_uio", "none"]
Family = Literal["qat", "dsa", "iaa", "dlb", "fpga", "nic"]


class QatProduct(msgspec.Struct, frozen=True):
    """The kernel's data of one QAT product. `services` is the maximum number of services, 0 if not configurable."""

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
    "4xxx": QatProduct("4940", "4941", "4xxx", "qat_4xxx", generation=4, services=2),
    "401xx": QatProduct("4942", "4943", "4xxx", "qat_4xxx", generation=4, services=2),
    "402xx": QatProduct("4944", "4945", "4xxx", "qat_4xxx", generation=4, services=2),
    "420xx": QatProduct("4946", "4947", "420xx", "qat_420xx", generation=4, services=2),
    "6xxx": QatProduct("4948", "4949", "6xxx", "qat_6xxx", generation=6, services=3),
    "c6xx": QatProduct("37c8", "37c9", "c6xx", "qat_c62x"),
    "c3xxx": QatProduct("19e2", "19e3", "c3xxx", "qat_c3xxx"),
    "d15xx": QatProduct("6f54", "6f55", "d15xx", "qat_d15xx"),
    "dh895xcc": QatProduct("0435", "0443", "dh895xcc", "qat_dh895xcc", total_vfs=32),
    "c4xxx": QatProduct("18a0", "18a1", "c4xxx", "qat_c4xxx", total_vfs=127),
}


class QatSpec(Placed, frozen=True, kw_only=True):
    """One QAT physical function.

    `vfs` is the number of enabled VFs, `vf_driver` their driver: the kernel's, another one, or none. The default of
    `total_vfs` is `vfs`, or the number of the product if that is 0. `services` has the format of `qat/cfg_services`;
    its default is that of the driver. `bridge` puts the device behind a root port.
    """

    model: QatModel = "4xxx"
    services: str | None = None
    state: Literal["up", "down"] = "up"
    vfs: int = 0
    total_vfs: int | None = None
    vf_driver: VfDriver = "kernel"
    bridge: bool | None = None
    auto_reset: bool = False

    def problems(self) -> Iterator[str | None]:
        yield from super().problems()
        yield spelled("services", self.services, _SERVICES, "sym;asym")
        yield bounded("vfs", self.vfs, MAX_VFS)
        yield bounded("total-vfs", self.total_vfs, MAX_VFS, least=self.vfs)

    @property
    def product(self) -> QatProduct:
        return QAT_PRODUCTS[self.model]

    @property
    def could_have(self) -> int:
        """The value of `sriov_totalvfs`."""
        return self.product.total_vfs if self.total_vfs is None and not self.vfs else self.total_vfs or self.vfs


class QueueSpec(Described, frozen=True, kw_only=True):
    """One configured work queue, in the group of the same number with the engine of the same number."""

    type: Literal["user", "kernel"] = "user"
    mode: Literal["dedicated", "shared"] = "dedicated"
    name: str | None = None
    size: int = 16
    enabled: bool = True

    def problems(self) -> Iterator[str | None]:
        yield spelled("name", self.name, _NAME, "app00")
        yield bounded("size", self.size, 128, least=1)


class _IdxdSpec(Placed, frozen=True, kw_only=True):
    index: int | None = None
    queues: Sequence[QueueSpec] = ()
    driver: Literal["idxd", "vfio-pci", "none"] = "idxd"
    max_queues: int = MAX_QUEUES
    max_groups: int = 4
    max_engines: int = 4
    driver_name_file: bool = True

    def problems(self) -> Iterator[str | None]:
        yield from super().problems()
        yield bounded("index", self.index, MAX_INDEX)
        yield bounded("max-queues", self.max_queues, 128, least=1)
        yield bounded("max-groups", self.max_groups, 128, least=1)
        yield bounded("max-engines", self.max_engines, 128, least=1)
        yield bounded("number of queues", len(self.queues), self.max_queues)


class DsaSpec(_IdxdSpec, frozen=True, kw_only=True):
    """One DSA. `index` is the number in `dsaN`, default the lowest free one. `queues` are configured.

    Without `driver_name_file`, queues have the attributes of kernels before 6.7.
    """

    model: DsaModel = "0b25"


class IaaSpec(_IdxdSpec, frozen=True, kw_only=True):
    """One IAA. `index` is the number in `iaxN`. DSAs and IAAs share one sequence of numbers."""

    model: IaaModel = "0cfe"


class DlbSpec(Placed, frozen=True, kw_only=True):
    """One DLB physical function with `vfs` enabled VFs. VFs have device nodes once they have resources."""

    vfs: int = 0
    total_vfs: int = 16
    provisioned: bool = True

    def problems(self) -> Iterator[str | None]:
        yield from super().problems()
        yield bounded("vfs", self.vfs, self.total_vfs)
        yield bounded("total-vfs", self.total_vfs, 16)


class SgxSpec(Described, frozen=True, kw_only=True):
    """SGX of the machine. `epc` is in bytes per NUMA node. Without `loaded` the driver has failed to start."""

    epc: int = 64 * 1024**2
    loaded: bool = True
    provision: bool = True

    def problems(self) -> Iterator[str | None]:
        yield bounded("epc", self.epc, 2**63 - 1)


class FpgaSpec(Placed, frozen=True, kw_only=True):
    """One FPGA card with one port per entry of `afus`, programmed with that AFU. `interface` is the interface ID.

    The last `vfs` ports belong to VFs. Programming takes `seconds`.
    """

    driver: Literal["dfl", "opae"] = "dfl"
    interface: str = "69528db6eb31577a8c3668f9faa081f6"
    afus: Sequence[str] = ("d8424dc4a4a3c413f89e433683f9040b",)
    vfs: int = 0
    seconds: float = 0.0

    def problems(self) -> Iterator[str | None]:
        yield from super().problems()
        yield spelled("interface", self.interface, _FPGA_ID, "69528db6eb31577a8c3668f9faa081f6")
        yield from (spelled("afus", afu, _FPGA_ID, "d8424dc4a4a3c413f89e433683f9040b") for afu in self.afus)
        yield bounded("number of afus", len(self.afus), 16, least=1)
        yield bounded("vfs", self.vfs, len(self.afus))
        yield bounded("seconds", self.seconds, 3600)


class NicSpec(Placed, frozen=True, kw_only=True):
    """One Solarflare NIC with one port. The default of `interface` is `sfcN` with the lowest free number."""

    model: Literal["0a03", "0b03"] = "0b03"
    interface: str | None = None

    def problems(self) -> Iterator[str | None]:
        yield from super().problems()
        yield spelled("interface", self.interface, _INTERFACE, "ens1f0")


class OnloadSpec(Described, frozen=True, kw_only=True):
    """Onload can be loaded on the machine. With `loaded` its modules are loaded at boot."""

    loaded: bool = True


def offload_address(family: Family, index: int, numa_nodes: int) -> str:
    """Returns the default PCI address of a device. As on real processors, one device of each kind forms a group.

    Each group has four buses, from 60 on even NUMA nodes and from e0 on odd ones.
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
        "nic": (3, "10.0"),
    }[family]
    return f"{domain:04x}:{0x60 + 0x80 * (numa_node % 2) + 4 * place + bus:02x}:{function}"
