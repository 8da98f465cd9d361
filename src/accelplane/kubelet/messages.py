"""Conversion of the values of `devices` to messages of the device plugin API v1beta1."""

from collections.abc import Iterable

from msgspec import UnsetType

from accelplane.devices import Allocation, Device
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb

VERSION = "v1beta1"
REGISTER = "/v1beta1.Registration/Register"
# A kubelet accepts messages of up to 4 MiB, the default of gRPC. A longer list would end each stream.
MAX_LIST_BYTES = 4 * 1024 * 1024


def device_list(devices: Iterable[Device]) -> tuple[pb.ListAndWatchResponse, int]:
    """The complete list for `ListAndWatch`, and the number of devices that did not fit into the message."""
    response = pb.ListAndWatchResponse()
    size = left_out = 0
    for device in devices:
        entry = pb.Device(ID=device.id, health=device.health)
        # Older kubelets interpret an empty topology as a constraint.
        if not isinstance(device.topology, UnsetType) and device.topology:
            entry.topology.nodes.extend(pb.NUMANode(ID=node) for node in device.topology)
        # Tag and length prefix of an entry take at most 6 bytes.
        size += entry.ByteSize() + 6
        if size > MAX_LIST_BYTES:
            left_out += 1
            continue
        response.devices.append(entry)
    return response, left_out


def container_response(allocation: Allocation) -> pb.ContainerAllocateResponse:
    return pb.ContainerAllocateResponse(
        # Without None, an empty map takes as long as the rest of the message.
        envs=allocation.envs or None,
        mounts=[
            pb.Mount(container_path=mount.container_path, host_path=mount.host_path, read_only=mount.read_only)
            for mount in allocation.mounts
        ],
        devices=[
            pb.DeviceSpec(container_path=node.container_path, host_path=node.host_path, permissions=node.permissions)
            for node in allocation.nodes
        ],
        annotations=allocation.annotations or None,
        cdi_devices=[pb.CDIDevice(name=name) for name in allocation.cdi_devices],
    )
