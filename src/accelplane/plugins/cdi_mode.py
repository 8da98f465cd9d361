"""The option `cdi`: whether a container gets a device's files by the Allocate response, by CDI, or by both."""

from collections.abc import Sequence

from accelplane.devices import CdiDevice, CdiHook, CdiMount, CdiNode, DeviceNode, Mount

CDI_MODES = ("auto", "all", "only", "off")


def split_by_cdi_mode(
    mode: str,
    kind: str,
    name: str,
    nodes: tuple[DeviceNode, ...],
    *,
    mounts: tuple[Mount, ...] = (),
    hooks: Sequence[CdiHook] = (),
    cdi_by_default: bool = False,
) -> tuple[tuple[DeviceNode, ...], tuple[Mount, ...], CdiDevice | None]:
    """Returns nodes, mounts and CDI device of a `Device` as the mode divides the files.

    The mode `auto` is `all` with `cdi_by_default`, else `off`.
    """
    if mode == "off" or (mode == "auto" and not cdi_by_default):
        return nodes, mounts, None
    cdi = CdiDevice(
        kind=kind,
        name=name,
        nodes=tuple([CdiNode(node.container_path, node.host_path, node.permissions) for node in nodes]),
        mounts=tuple([_bind_mount(mount) for mount in mounts]),
        hooks=hooks,
    )
    return ((), (), cdi) if mode == "only" else (nodes, mounts, cdi)


def _bind_mount(mount: Mount) -> CdiMount:
    return CdiMount(
        mount.host_path, mount.container_path, type="none", options=("bind", "ro" if mount.read_only else "rw")
    )
