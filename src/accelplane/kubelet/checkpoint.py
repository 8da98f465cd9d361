"""The device manager's checkpoint: the file `kubelet_internal_checkpoint` in the plugin directory.

It is JSON in the layout of the real kubelet. `Checksum` is written as the CRC-32 of the text of `Data` and ignored when
reading: the real kubelet hashes a dump of its memory layout, which other programs cannot reproduce.
"""

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from google.protobuf.message import DecodeError
from msgspec import Struct, field

from accelplane.descriptors import read_limited
from accelplane.devices import natural
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb

FILE_NAME = "kubelet_internal_checkpoint"
# Four times the size for a node with 110 pods of 16 devices and large responses.
MAX_BYTES = 16 * 1024 * 1024
NO_NODE = -1


class CheckpointError(Exception):
    """The checkpoint cannot be read, or is not one."""


class Holding(Struct, frozen=True):
    """The devices of one resource that one container holds: IDs by NUMA node (-1: none), and the plugin's response."""

    pod_uid: str
    container: str
    resource: str
    devices: Mapping[int, tuple[str, ...]]
    response: bytes

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(sorted({key for keys in self.devices.values() for key in keys}, key=natural))

    def numa_nodes(self, id_: str) -> tuple[int, ...]:
        """The NUMA nodes of a device, ascending; empty if it has none."""
        return tuple(sorted(node for node, ids in self.devices.items() if id_ in ids and node != NO_NODE))

    @property
    def answer(self) -> pb.ContainerAllocateResponse:
        return pb.ContainerAllocateResponse.FromString(self.response)


def by_node(ids: Iterable[str], placed: Mapping[str, Sequence[int]]) -> dict[int, tuple[str, ...]]:
    """Ids by NUMA node; a device of several nodes is under each of them."""
    nodes: dict[int, tuple[str, ...]] = {}
    for key in sorted(ids, key=natural):
        for node in placed.get(key) or (NO_NODE,):
            nodes[node] = (*nodes.get(node, ()), key)
    return nodes


class Checkpoint(Struct, frozen=True):
    """The content of the file: holdings, and the healthy IDs of each registered resource."""

    holdings: tuple[Holding, ...] = ()
    registered: Mapping[str, tuple[str, ...]] = {}


class _Entry(Struct):
    pod_uid: str = field(name="PodUID")
    container: str = field(name="ContainerName")
    resource: str = field(name="ResourceName")
    devices: dict[int, tuple[str, ...] | None] | None = field(name="DeviceIDs")
    response: bytes | None = field(name="AllocResp")


class _Data(Struct):
    entries: list[_Entry] | None = field(name="PodDeviceEntries")
    registered: dict[str, tuple[str, ...] | None] | None = field(name="RegisteredDevices")


class _File(Struct):
    data: _Data = field(name="Data")
    checksum: int = field(name="Checksum", default=0)


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    entries = [
        _Entry(each.pod_uid, each.container, each.resource, dict(each.devices), each.response)
        for each in checkpoint.holdings
    ]
    data = _Data(entries or None, dict(checkpoint.registered))
    return msgspec.json.encode(_File(data, zlib.crc32(msgspec.json.encode(data))))


def decode_checkpoint(text: bytes) -> Checkpoint:
    """Raises `CheckpointError` on anything that is not a checkpoint."""
    try:
        data = msgspec.json.decode(text, type=_File).data
        for entry in data.entries or ():
            pb.ContainerAllocateResponse.FromString(entry.response or b"")
    except (msgspec.DecodeError, DecodeError, RecursionError) as error:
        raise CheckpointError(f"not a device manager checkpoint: {error}") from error
    holdings: list[Holding] = []
    for entry in data.entries or ():
        devices = {node: ids or () for node, ids in (entry.devices or {}).items()}
        holdings.append(Holding(entry.pod_uid, entry.container, entry.resource, devices, entry.response or b""))
    return Checkpoint(tuple(holdings), {name: ids or () for name, ids in (data.registered or {}).items()})


def read_checkpoint(directory: str) -> Checkpoint | None:
    """The directory's checkpoint, None if there is none. Raises `CheckpointError`, which names the file."""
    path = os.path.join(directory, FILE_NAME)
    try:
        return decode_checkpoint(read_limited(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, CheckpointError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: {problem}") from error


def write_checkpoint(directory: str, checkpoint: Checkpoint) -> None:
    """Replaces the directory's checkpoint atomically. Raises `OSError`."""
    path = os.path.join(directory, FILE_NAME)
    temporary = os.path.join(directory, f".{FILE_NAME}")
    with open(temporary, "wb") as file:
        file.write(encode_checkpoint(checkpoint))
    os.replace(temporary, path)
