"""How a device's files reach a container: in the kubelet's own answer, through CDI, or both."""

from collections.abc import Sequence
from typing import NamedTuple

from accelplane.devices import CdiDevice, CdiHook, CdiMount, CdiNode, DeviceNode, Mount

CDI_MODES = ("auto", "all", "only", "off")


class Delivery(NamedTuple):
    """What a `Device` carries; the fields are named as there."""

    nodes: tuple[DeviceNode, ...]
    mounts: tuple[Mount, ...]
    cdi: CdiDevice | None


def delivered(
    mode: str,
    kind: str,
    name: str,
    nodes: tuple[DeviceNode, ...],
    *,
    mounts: tuple[Mount, ...] = (),
    hooks: Sequence[CdiHook] = (),
    cdi_by_default: bool = False,
) -> Delivery:
    """The files divided as the `cdi` option says; `cdi_by_default` is what its value `auto` means here."""
    if mode == "off" or (mode == "auto" and not cdi_by_default):
        return Delivery(nodes, mounts, None)
    cdi = CdiDevice(
        kind=kind,
        name=name,
        nodes=tuple([CdiNode(node.container_path, node.host_path, node.permissions) for node in nodes]),
        mounts=tuple([_bound(mount) for mount in mounts]),
        hooks=hooks,
    )
    return Delivery((), (), cdi) if mode == "only" else Delivery(nodes, mounts, cdi)


def _bound(mount: Mount) -> CdiMount:
    return CdiMount(
        mount.host_path, mount.container_path, type="none", options=("bind", "ro" if mount.read_only else "rw")
    )
