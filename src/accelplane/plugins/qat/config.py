"""Options of the QAT plugin: the Go implementation's flags with their defaults, and what goes beyond them."""

from typing import Annotated

from msgspec import Meta

from accelplane.host.drivers import VFIO_PCI
from accelplane.plugins.base import Config
from accelplane.plugins.options import check_choice
from accelplane.plugins.policies import POLICIES
from accelplane.plugins.qat.models import BY_VF_DRIVER

IGB_UIO = "igb_uio"


class QatConfig(Config, frozen=True, kw_only=True):
    """Checked in the Go implementation's order. All but `mode` is for dpdk mode."""

    mode: Annotated[
        str, Meta(description="dpdk (virtual functions for user space) or kernel (instances set up by adf_ctl)")
    ] = "dpdk"
    dpdk_driver: Annotated[str, Meta(description="driver that virtual functions are given to: vfio-pci or igb_uio")] = (
        VFIO_PCI
    )
    kernel_vf_drivers: Annotated[
        str, Meta(description="kernel drivers of virtual functions (4xxxvf,c6xxvf,...): whose devices to publish")
    ] = "4xxxvf,420xxvf"
    max_num_devices: Annotated[int, Meta(description="most virtual functions to publish on a node")] = 64
    allocation_policy: Annotated[
        str,
        Meta(
            description="which virtual functions a container gets: none (of the least used physical functions), "
            "balanced (of those with most available ones) or packed (of one physical function)"
        ),
    ] = "none"
    max_num_devices_by: Annotated[
        str,
        Meta(
            description="which virtual functions are left out when there are too many: order (the last ones as sysfs "
            "sorts their names) or pf (those with the highest numbers, as many of each physical function)"
        ),
    ] = "order"
    new_id: Annotated[
        str,
        Meta(
            description="tell the driver PCI ids, upon which it takes all unbound functions with them: auto (where a "
            "function's driver_override cannot be written), always (at the start) or never"
        ),
    ] = "auto"
    iommufd: Annotated[bool, Meta(description="give the nodes of IOMMUFD as well, where the kernel has them")] = False

    def __post_init__(self) -> None:
        try:
            if self.mode not in ("dpdk", "kernel"):
                raise ValueError(f"unknown mode {self.mode!a}, valid values: dpdk, kernel")
            check_choice("dpdk-driver", self.dpdk_driver, (VFIO_PCI, IGB_UIO))
            for driver in self.vf_drivers:
                check_choice("kernel-vf-drivers", driver, BY_VF_DRIVER)
            check_choice("allocation-policy", self.allocation_policy, POLICIES)
            if self.max_num_devices < 0:
                raise ValueError(f"max-num-devices is {self.max_num_devices}, expected 0 or more")
            check_choice("max-num-devices-by", self.max_num_devices_by, ("order", "pf"))
            check_choice("new-id", self.new_id, ("auto", "always", "never"))
        except ValueError as error:
            raise ValueError(f"argument error: {error}") from None

    @property
    def vf_drivers(self) -> tuple[str, ...]:
        """The elements of `kernel_vf_drivers`, each once."""
        return tuple(dict.fromkeys(self.kernel_vf_drivers.split(",")))
