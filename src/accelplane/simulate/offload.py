"""Descriptions of simulated QAT, DSA, IAA, DLB, FPGA, Solarflare and SGX hardware in its initial state.

Defaults follow from the number of the device, so `{}` is a complete description. Sources: the PCI ID tables of the
kernel's qat_*, idxd and vfio_pci drivers, and of Intel's dlb2 driver.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from accelplane.simulate.checks import MAX_INDEX, MAX_VFS, Form, PciDeviceSpec, Range, Spec

MAX_QUEUES = 8  # of one DSA or IAA device
_SERVICES = re.compile(r"[a-z]+(;[a-z]+)*")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INTERFACE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,14}")
_FPGA_ID = re.compile(r"[0-9a-f]{32}")
_INTERFACE_ID, _AFU_ID = "69528db6eb31577a8c3668f9faa081f6", "d8424dc4a4a3c413f89e433683f9040b"

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


class QatSpec(PciDeviceSpec, frozen=True, kw_only=True):
    """One QAT physical function.

    `vfs` is the number of enabled VFs, `vf_driver` their driver: the kernel's, another one, or none. The default of
    `total_vfs` is `vfs`, or the number of the product if that is 0. `services` has the format of `qat/cfg_services`;
    its default is that of the driver. `bridge` puts the device behind a root port.
    """

    model: QatModel = "4xxx"
    services: Annotated[str | None, Form(_SERVICES, "sym;asym")] = None
    state: Literal["up", "down"] = "up"
    vfs: Annotated[int, Range(0, MAX_VFS)] = 0
    total_vfs: int | None = None
    vf_driver: VfDriver = "kernel"
    bridge: bool | None = None
    auto_reset: bool = False

    def problems(self) -> Iterator[str | None]:
        yield from super().problems()
        yield Range(self.vfs, MAX_VFS).problem("total-vfs", self.total_vfs)

    @property
    def product(self) -> QatProduct:
        return QAT_PRODUCTS[self.model]

    @property
    def could_have(self) -> int:
        """The value of `sriov_totalvfs`."""
        return self.product.total_vfs if self.total_vfs is None and not self.vfs else self.total_vfs or self.vfs


class QueueSpec(Spec, frozen=True, kw_only=True):
    """One configured work queue, in the group of the same number with the engine of the same number."""

    type: Literal["user", "kernel"] = "user"
    mode: Literal["dedicated", "shared"] = "dedicated"
    name: Annotated[str | None, Form(_NAME, "app00")] = None
    size: Annotated[int, Range(1, 128)] = 16
    enabled: bool = True


class _IdxdSpec(PciDeviceSpec, frozen=True, kw_only=True):
    index: Annotated[int | None, Range(0, MAX_INDEX)] = None
    queues: Sequence[QueueSpec] = ()
    driver: Literal["idxd", "vfio-pci", "none"] = "idxd"
    max_queues: Annotated[int, Range(1, 128)] = MAX_QUEUES
    max_groups: Annotated[int, Range(1, 128)] = 4
    max_engines: Annotated[int, Range(1, 128)] = 4
    driver_name_file: bool = True

    def problems(self) -> Iterator[str | None]:
        yield from super().problems()
        yield Range(0, self.max_queues).problem("number of queues", len(self.queues))


class DsaSpec(_IdxdSpec, frozen=True, kw_only=True):
    """One DSA. `index` is the number in `dsaN`, default the lowest free one. `queues` are configured.

    Without `driver_name_file`, queues have the attributes of kernels before 6.7.
    """

    model: DsaModel = "0b25"


class IaaSpec(_IdxdSpec, frozen=True, kw_only=True):
    """One IAA. `index` is the number in `iaxN`. DSAs and IAAs share one sequence of numbers."""

    model: IaaModel = "0cfe"


class DlbSpec(PciDeviceSpec, frozen=True, kw_only=True):
    """One DLB physical function with `vfs` enabled VFs. VFs have device nodes once they have resources."""

    vfs: int = 0
    total_vfs: Annotated[int, Range(0, 16)] = 16
    provisioned: bool = True

    def problems(self) -> Iterator[str | None]:
        yield from super().problems()
        yield Range(0, self.total_vfs).problem("vfs", self.vfs)


class SgxSpec(Spec, frozen=True, kw_only=True):
    """SGX of the machine. `epc` is in bytes per NUMA node. Without `loaded` the driver has failed to start."""

    epc: Annotated[int, Range(0, 2**63 - 1)] = 64 * 1024**2
    loaded: bool = True
    provision: bool = True


class FpgaSpec(PciDeviceSpec, frozen=True, kw_only=True):
    """One FPGA card with one port per entry of `afus`, programmed with that AFU. `interface` is the interface ID.

    The last `vfs` ports belong to VFs. Programming takes `seconds`.
    """

    driver: Literal["dfl", "opae"] = "dfl"
    interface: Annotated[str, Form(_FPGA_ID, _INTERFACE_ID)] = _INTERFACE_ID
    afus: Annotated[Sequence[str], Form(_FPGA_ID, _AFU_ID)] = (_AFU_ID,)
    vfs: int = 0
    seconds: Annotated[float, Range(0, 3600)] = 0.0

    def problems(self) -> Iterator[str | None]:
        yield from super().problems()
        yield Range(1, 16).problem("number of afus", len(self.afus))
        yield Range(0, len(self.afus)).problem("vfs", self.vfs)


class NicSpec(PciDeviceSpec, frozen=True, kw_only=True):
    """One Solarflare NIC with one port. The default of `interface` is `sfcN` with the lowest free number."""

    model: Literal["0a03", "0b03"] = "0b03"
    interface: Annotated[str | None, Form(_INTERFACE, "ens1f0")] = None


class OnloadSpec(Spec, frozen=True, kw_only=True):
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
