"""Options of the QAT plugin: the flags of the Go implementation with their defaults, and additional ones."""

from typing import Annotated

from msgspec import Meta

from accelplane.host.drivers import VFIO_PCI
from accelplane.plugins.base import Config
from accelplane.plugins.options import check_choice
from accelplane.plugins.policies import POLICIES
from accelplane.plugins.qat.models import BY_VF_DRIVER, VENDOR

IGB_UIO = "igb_uio"


class QatConfig(Config, frozen=True, kw_only=True):
    """Options are checked in the order of the Go implementation. All except `mode` are for dpdk mode."""

    mode: Annotated[
        str,
        Meta(description="dpdk (virtual functions for user-space drivers) or kernel (instances that adf_ctl sets up)"),
    ] = "dpdk"
    dpdk_driver: Annotated[str, Meta(description="driver that virtual functions are bound to: vfio-pci or igb_uio")] = (
        VFIO_PCI
    )
    kernel_vf_drivers: Annotated[
        str, Meta(description="publish devices of these kernel drivers of virtual functions (4xxxvf,c6xxvf,...)")
    ] = "4xxxvf,420xxvf"
    max_num_devices: Annotated[int, Meta(description="maximum number of virtual functions to publish on a node")] = 64
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
            description="which virtual functions are not published beyond max-num-devices: order (the last ones in the "
            "order of their names in sysfs) or pf (those with the highest numbers, evenly of all physical functions)"
        ),
    ] = "order"
    new_id: Annotated[
        str,
        Meta(
            description="when to write PCI ids to the driver's new_id, so that it binds all unbound functions with "
            "these ids: auto (if driver_override of a function is not writable), always (at the start) or never"
        ),
    ] = "auto"
    iommufd: Annotated[bool, Meta(description="give the device nodes of IOMMUFD too, if the kernel has them")] = False

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
        """The elements of `kernel_vf_drivers` without duplicates."""
        return tuple(dict.fromkeys(self.kernel_vf_drivers.split(",")))

    @property
    def vf_ids(self) -> tuple[str, ...]:
        """Vendor and device IDs of the virtual functions, as `new_id` of a driver has them."""
        return tuple(f"{VENDOR} {number}" for driver in self.vf_drivers for number in BY_VF_DRIVER[driver].vf_ids)
