"""Devices of the configured resources."""

from collections.abc import Callable, Iterator

from accelplane.devices import CdiDevice, Device, DeviceNode, Mount, Resource, Skipped
from accelplane.host import Host, HostError
from accelplane.plugins.base import ScanResult
from accelplane.plugins.cdi_mode import split_by_cdi_mode
from accelplane.plugins.generic import paths, pci, rdma, usb
from accelplane.plugins.generic.commands import Check
from accelplane.plugins.generic.config import MAX_DEVICES, DeviceSpec, GenericConfig, Group, expand
from accelplane.plugins.generic.match import Found, Match

CDI_CLASS = "generic"


def scan(host: Host, config: GenericConfig, bind_problem: Callable[[str], str], checks: dict[str, Check]) -> ScanResult:
    """Each resource with its devices. A resource without devices is advertised as well.

    Adds the commands to run to `checks`, by unit.
    """
    for spec in config.devices:
        yield Resource(spec.name)
        ids: set[str] = set()
        for group in spec.groups:
            found = find(host, spec.name, group, bind_problem)
            yield from found.skipped
            for match in found.matches:
                devices = [device for device in _devices(config, spec, group, match, checks) if device.id not in ids]
                if len(ids) + len(devices) > MAX_DEVICES:
                    problem = f"{spec.name} has more than {MAX_DEVICES} device IDs, expected at most that"
                    yield Skipped(match.unit, f"{problem}; reduce count", warning=True)
                    continue
                ids.update(device.id for device in devices)
                yield from devices


def find(host: Host, name: str, group: Group, bind_problem: Callable[[str], str]) -> Found:
    """The matches of a group of the resource `name`. What cannot be read is skipped."""
    try:
        if group.usb:
            return usb.find(host, name, group)
        if group.pci:
            return pci.find(host, name, group, bind_problem)
        if group.rdma:
            return rdma.find(host, name, group)
        return paths.find(host, name, group)
    except HostError as error:
        return Found([], [Skipped(name, str(error), warning=True)])


def _devices(
    config: GenericConfig, spec: DeviceSpec, group: Group, match: Match, checks: dict[str, Check]
) -> Iterator[Device]:
    """The IDs of a match."""
    ids = match.ids(group.shares)
    mounts = (*match.mounts, *(Mount(each.path, each.mount_path, each.read_only) for each in group.mounts))
    inside = {**match.values, "path": match.values["containerPath"]}
    nodes, mounts, cdi = _split(config, f"{spec.name}-{ids[0]}", match, mounts)
    # Groups with different commands may have the same hardware.
    unit = f"{spec.name}:{match.unit}" if group.health else match.unit
    if group.health:
        checks[unit] = Check(group.health, match.values)
    for device_id in ids:
        yield Device(
            resource=spec.name,
            id=device_id,
            unit=unit,
            health=match.health,
            reason=match.reason,
            nodes=nodes,
            mounts=mounts,
            envs={name: expand(value, inside) for name, value in group.env.items()},
            cdi=cdi,
            topology=match.topology if group.numa_nodes is None else group.numa_nodes or None,
            attributes=match.attributes,
            path=match.path,
            part=match.part,
        )


def _split(
    config: GenericConfig, name: str, match: Match, mounts: tuple[Mount, ...]
) -> tuple[tuple[DeviceNode, ...], tuple[Mount, ...], CdiDevice | None]:
    """Nodes, mounts and CDI device of a match. CDI gets the device nodes behind links and directories."""
    behind = tuple(each for node in match.nodes for each in match.links.get(node, (node,)))
    kind = f"{config.domain}/{CDI_CLASS}"
    _nodes, _mounts, cdi = split_by_cdi_mode(config.cdi, kind, name, behind, mounts=mounts)
    return ((), (), cdi) if config.cdi == "only" else (tuple(match.nodes), mounts, cdi)
