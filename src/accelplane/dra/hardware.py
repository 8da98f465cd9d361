"""What a claim changes on the node, by family: checks, undo steps, actions and the files of a container.

Everything else about a device comes from the plugin (`Offers.allocation`). The functions block and raise `ClaimError`,
`HostError` or `FpgaError`. `undo_steps` is called before the first change for a claim, `apply` makes the changes and
reads them back, and `undo` reverts one step, also one that was made in part or not at all.
"""

import os
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from accelplane.devices import CdiMount, CdiNode, Unit, natural
from accelplane.dra import vfio
from accelplane.dra.cdi import Edits
from accelplane.dra.configuration import (
    DeviceConfig,
    FpgaConfig,
    GpuConfig,
    QatConfig,
    SgxConfig,
    WorkQueueConfig,
)
from accelplane.dra.journal import Holding, Rebind, ResetDriver, ResetPort, UndoStep
from accelplane.dra.model import ClaimError
from accelplane.host import Host, pci_address
from accelplane.host.drivers import driver_of
from accelplane.host.pci import DEVICES
from accelplane.plugins.vfio import iommufd_nodes

AFFINITY_MASK = "ZE_AFFINITY_MASK"
_BY_PATH = "/dev/dri/by-path"
_AESMD = "/var/run/aesmd"
_QUEUES = {"dsa.intel.com": "dsa", "iaa.intel.com": "iax"}


class ClaimDevice(Struct, frozen=True, kw_only=True):
    """A device of a claim with its unit and configuration. `tile` is the number of the tile as in `DeviceName`."""

    driver: str
    holding: Holding
    unit: Unit
    config: DeviceConfig
    tile: int | None = None

    @property
    def vfio(self) -> bool:
        return isinstance(self.config, GpuConfig) and self.config.access == "vfio" and not self.holding.admin

    @property
    def from_plugin(self) -> bool:
        """Whether the plugin says what a container gets. It does not know GPUs that a claim has bound to VFIO."""
        bound = isinstance(self.config, GpuConfig) and self.unit.text("driver") in vfio.VFIO_DRIVERS
        return not self.vfio and not (self.holding.admin and bound)

    @property
    def programmed(self) -> bool:
        return isinstance(self.config, FpgaConfig) and bool(self.config.afu) and not self.holding.admin

    @property
    def address(self) -> str:
        """The address of the PCI function, empty if there is none."""
        return pci_address(self.unit.text("pciAddress")) or ""


def undo_steps(
    host: Host, device: ClaimDevice, holders: Mapping[str, str], *, manage_binding: bool
) -> Sequence[UndoStep]:
    """Checks the device, and returns what undoes the changes that `apply` will make."""
    config = device.config
    if device.driver in _QUEUES:
        _check_queue(host, device)
    if isinstance(config, QatConfig) and config.driver is not None:
        found = driver_of(host, device.address)
        if found != config.driver:
            raise ClaimError(
                f"{device.holding.device} is bound to {found or 'no driver'}, the claim requires {config.driver}; "
                "change dpdk-driver of the QAT plugin, or the configuration of the claim"
            )
    if device.vfio:
        if not device.address:
            raise ClaimError(f"{device.holding.device} is not a PCI function, expected one for access: vfio")
        step = vfio.plan(host, device.address, holders, manage_binding=manage_binding)
        return (step,) if step is not None else ()
    if isinstance(config, FpgaConfig) and device.programmed:
        from accelplane.dra import programming  # noqa: PLC0415 - only nodes with FPGAs

        ports = programming.ports_of(device.unit)
        programming.check(host, ports, config.afu)
        address = device.address
        return [ResetPort(address=address, node=port) for port in ports] if config.release == "reset" else ()
    return ()


def action(device: ClaimDevice, steps: Iterable[UndoStep]) -> str:
    """What `apply` does, in one word for messages; empty if it does nothing."""
    if any(isinstance(step, Rebind) and step.address == device.address for step in steps):
        return "binding"
    return "programming" if device.programmed else ""


def apply(host: Host, device: ClaimDevice, steps: Iterable[UndoStep]) -> str:
    """Makes the changes for the device. Returns the function that an FPGA port has to keep, empty for any."""
    for step in steps:
        if isinstance(step, Rebind) and step.address == device.address:
            vfio.do(host, step)
    if isinstance(device.config, FpgaConfig) and device.programmed:
        from accelplane.dra import programming  # noqa: PLC0415 - as above

        afu = programming.program_ports(host, programming.ports_of(device.unit), device.config.afu)
        return afu if device.config.verify else ""
    return ""


def undo(host: Host, step: UndoStep) -> None:
    match step:
        case Rebind():
            vfio.undo(host, step)
        case ResetDriver():
            vfio.reset(host, step.address)
        case ResetPort():
            from accelplane.dra import programming  # noqa: PLC0415 - as above

            programming.reset(host, step)


def changed_function(host: Host, holding: Holding, unit: Unit | None) -> str:
    """Why the FPGA port of a prepared device has to be programmed again, empty if it has its function."""
    if not holding.afu or unit is None:
        return ""
    from accelplane.dra import programming  # noqa: PLC0415 - as above

    return programming.mismatch(host, programming.ports_of(unit), holding.afu)


def files(host: Host, device: ClaimDevice, found: Edits) -> Edits:
    """What a container gets with the device, given what the plugin gives it with the unit."""
    config = device.config
    if device.vfio:
        assert isinstance(config, GpuConfig)  # noqa: S101 - see `vfio`
        return vfio.edits(host, device.address, iommufd=config.iommufd)
    if device.driver == "fpga.intel.com":
        from accelplane.fpga.allocation import HOOK  # noqa: PLC0415 - as above

        # Ports are programmed here, so containers have no pairs of regions and functions for the hook.
        found = replace(found, hooks=tuple([hook for hook in found.hooks if hook.path != HOOK]))
    if isinstance(config, GpuConfig):
        if config.by_path is not None:
            found = _by_path(host, device, found, config.by_path)
        if device.holding.admin:
            found = replace(found, nodes=(*found.nodes, *_engine_nodes(host, device.address)))
    if isinstance(config, QatConfig) and config.iommufd:
        found = _with_iommufd(host, device, found)
    if isinstance(config, SgxConfig) and config.aesmd == "socket":
        if not host.exists(_AESMD):
            raise ClaimError(f"{_AESMD} does not exist, expected the directory of aesmd's socket on this node")
        found = replace(found, mounts=(*found.mounts, CdiMount(_AESMD, _AESMD, "none", ("bind", "rw"))))
    return found


def variables(devices: Sequence[ClaimDevice]) -> dict[str, str]:
    """The variables of a request that depend on slots and configuration."""
    found: dict[str, str] = {}
    if any(device.holding.admin for device in devices):
        found["DRA_ADMIN_ACCESS"] = "true"
    order = sorted({device.unit.id for device in devices}, key=natural)
    if tiles := [device for device in devices if device.tile is not None]:
        # The numbers of complete GPUs have no dot. Without the hierarchy, new drivers count tiles as devices.
        masks = {
            f"{order.index(device.unit.id)}" + ("" if device.tile is None else f".{device.tile}") for device in devices
        }
        found[AFFINITY_MASK] = ",".join(sorted(masks, key=natural))
        found["ZE_FLAT_DEVICE_HIERARCHY"] = "COMPOSITE"
    for device in devices:
        config = device.config
        if isinstance(config, GpuConfig) and config.affinity_mask and not tiles:
            found[AFFINITY_MASK] = config.affinity_mask
        if isinstance(config, SgxConfig) and config.aesmd == "socket":
            found["SGX_AESM_ADDR"] = "1"
    return found


def _check_queue(host: Host, device: ClaimDevice) -> None:
    """Raises `ClaimError` for a work queue that is not enabled, or that is open although it must not be."""
    number = device.unit.id.rpartition("-wq")[2]
    pattern = f"{DEVICES}/{device.address}/{_QUEUES[device.driver]}*/wq*.{number}"
    queue = next(host.glob(pattern), "") if device.address and number.isdecimal() else ""
    if not queue:
        if device.unit.id.endswith(f"-wq{number}"):
            raise ClaimError(f"{device.holding.device} is no longer on this node: its device has no queue {number}")
        return  # a complete function, by VFIO
    state = host.text(f"{queue}/state")
    if state != "enabled":
        raise ClaimError(
            f"{device.holding.device} cannot be used: its state is {state[:20]!a}, expected 'enabled'; enable it"
        )
    if isinstance(device.config, WorkQueueConfig) and device.config.require_clients_zero:
        clients = host.text(f"{queue}/clients")
        if clients != "0":
            raise ClaimError(f"{device.holding.device} is open in {clients[:20]} processes, expected none; end them")


def _by_path(host: Host, device: ClaimDevice, found: Edits, mode: str) -> Edits:
    """The links of udev as the configuration says, in place of those by the plugin's option."""
    hooks = tuple([hook for hook in found.hooks if "create-symlinks" not in hook.args])
    if mode == "links":
        if hooks == tuple(found.hooks):
            raise ClaimError("byPath: links needs the option bypath: links of the GPU plugin, expected single or all")
        hooks = tuple(found.hooks)
    mounts = [mount for mount in found.mounts if not mount.host_path.startswith(_BY_PATH)]
    links: Sequence[str] = ()
    if mode == "all":
        links = (_BY_PATH,)
    elif mode == "single":
        nodes = {host.resolve(node.host_path) for node in found.nodes}
        names = host.glob(f"{_BY_PATH}/pci-{device.address}-*")
        links = [name for name in names if host.resolve(name) in nodes]
    mounts += [CdiMount(link, link, "none", ("bind", "ro")) for link in links]
    return replace(found, mounts=tuple(mounts), hooks=hooks)


def _engine_nodes(host: Host, address: str) -> list[CdiNode]:
    """The nodes of the management engine of a GPU."""
    paths = host.glob(f"{DEVICES}/{address}/*.mei-*/mei/*") if address else ()
    names = [f"/dev/{os.path.basename(path)}" for path in paths]
    return [CdiNode(name, name) for name in names if host.exists(name)]


def _with_iommufd(host: Host, device: ClaimDevice, found: Edits) -> Edits:
    known = {node.host_path for node in found.nodes}
    more = iommufd_nodes(host, device.address)
    if not more:
        raise ClaimError(f"{device.holding.device} has no IOMMUFD node, which needs Linux 6.2 and vfio-pci")
    nodes = [CdiNode(node.container_path, node.host_path) for node in more if node.host_path not in known]
    return replace(found, nodes=(*found.nodes, *nodes))
