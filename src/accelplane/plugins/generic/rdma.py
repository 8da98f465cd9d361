"""RDMA devices: InfiniBand, RoCE and iWARP, with their device nodes below /dev/infiniband.

Kernel documents: Documentation/ABI/stable/sysfs-class-infiniband, Documentation/infiniband/user_verbs.rst and
user_mad.rst. A container needs the node uverbs of its device, and rdma_cm, which all devices share, for connections.
"""

import fnmatch
from collections.abc import Iterator

from accelplane.devices import DeviceNode, Skipped
from accelplane.host import Host, HostError, SysfsDevice
from accelplane.plugins.generic.config import Group, Rdma, normal_id
from accelplane.plugins.generic.match import Found, Match, printable

CLASS = "infiniband"
CM_NODE = "/dev/infiniband/rdma_cm"


def find(host: Host, name: str, group: Group) -> Found:
    """The matches of a group of RDMA devices: one for each device."""
    skipped: list[Skipped] = []
    matches: dict[str, Match] = {}
    present = host.class_devices(CLASS)
    nodes = _nodes(host) if present else {}
    for spec in group.rdma:
        found = False
        for device in present:
            try:
                if not _fits(host, spec, device):
                    continue
                found = True
                verbs = nodes.get(device.name, [])
                if not any("/uverbs" in node for node in verbs):
                    problem = "has no device node uverbs; load the kernel module ib_uverbs"
                    skipped.append(Skipped(device.name, problem, warning=True))
                elif device.name not in matches:
                    matches[device.name] = _match(host, spec, device, verbs)
            except HostError as error:
                skipped.append(Skipped(device.name, str(error), warning=True))
        if not found:
            skipped.append(Skipped(f"{name}: RDMA {', '.join(spec.names) or 'devices'}", "no such RDMA device"))
    return Found(list(matches.values()), skipped)


def _nodes(host: Host) -> dict[str, list[str]]:
    """The device nodes of each RDMA device by its name."""
    found: dict[str, list[str]] = {}
    for subsystem in ("infiniband_verbs", "infiniband_mad"):
        for entry in host.class_devices(subsystem):
            owner = host.text_or_empty(f"{entry.path}/ibdev")
            if owner:
                found.setdefault(owner, []).append(f"/dev/infiniband/{entry.name}")
    return found


def _interfaces(host: Host, device: SysfsDevice) -> list[str]:
    """The network interfaces of a device. Software devices (rxe, siw) name theirs in `parent`."""
    names = host.entries(f"{device.path}/device/net")
    parent = host.text_or_empty(f"{device.path}/parent")
    return [*names, parent] if parent else names


def _fits(host: Host, spec: Rdma, device: SysfsDevice) -> bool:
    return all(_conditions(host, spec, device))


def _conditions(host: Host, spec: Rdma, device: SysfsDevice) -> Iterator[bool]:
    if spec.names:
        yield any(fnmatch.fnmatchcase(device.name, pattern) for pattern in spec.names)
    if spec.interfaces:
        yield any(name in spec.interfaces for name in _interfaces(host, device))
    for number, file in ((spec.vendor, "vendor"), (spec.device, "device")):
        if wanted := normal_id(number):
            yield host.text_or_empty(f"{device.path}/device/{file}") == f"0x{wanted}"
    if spec.link_layer:
        yield host.text_or_empty(f"{device.path}/ports/1/link_layer") == spec.link_layer


def _match(host: Host, spec: Rdma, device: SysfsDevice, found: list[str]) -> Match:
    """Raises `HostError`."""
    names = [path for path in found if spec.umad or "/uverbs" in path]
    if host.exists(CM_NODE):
        names.append(CM_NODE)
    else:
        host.note(f"{CM_NODE} does not exist, so containers with RDMA devices do not get it; load rdma_ucm")
    nodes = [DeviceNode(path) for path in names]
    function = host.function_of(f"{device.path}/device") if host.exists(f"{device.path}/device") else ""
    interfaces = _interfaces(host, device)
    texts = {
        "link-layer": host.text_or_empty(f"{device.path}/ports/1/link_layer"),
        "node-guid": host.text_or_empty(f"{device.path}/node_guid"),
        "firmware": host.text_or_empty(f"{device.path}/fw_ver"),
        "interface": ",".join(interfaces),
    }
    return Match(
        unit=device.name,
        nodes=nodes,
        path=host.resolve(device.path),
        topology=host.topology_of(device.path),
        attributes={
            "kind": "rdma",
            "name": device.name,
            **{key: printable(text) for key, text in texts.items() if text},
        },
        values={
            "path": names[0],
            "containerPath": names[0],
            "name": device.name,
            "serial": "",
            "address": function.rpartition("/")[2],
        },
    )
