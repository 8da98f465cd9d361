"""The claims that the embedded kubelet has prepared, with their checkpoint, the file `dra_manager_state`."""

import os
import zlib
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct, field

from accelplane.descriptors import read_limited
from accelplane.kubelet.embedded.dra_model import AllocatedClaim, ClaimDevice

FILE_NAME = "dra_manager_state"
_MAX_BYTES = 16 * 1024 * 1024


class ClaimInfo(Struct, kw_only=True):
    """A claim with the UIDs of its pods, and its devices by driver. `prepared` is lost at a restart of the kubelet."""

    namespace: str
    name: str
    uid: str
    pods: set[str]
    devices: dict[str, list[ClaimDevice]]
    prepared: bool = False
    unpreparing: bool = False

    def cdi_ids(self, request: str) -> Iterator[str]:
        """The CDI devices of a request, "" of all."""
        for devices in self.devices.values():
            for device in devices:
                if not request or not device.requests or request in device.requests:
                    yield from device.cdi_ids


class CheckpointError(Exception):
    """The checkpoint cannot be read; a kubelet does not start with it. The text names the file."""


class _Device(Struct, rename="pascal"):
    pool_name: str
    device_name: str
    share_id: str | None = field(name="ShareID", default=None)
    request_names: list[str] | None = None
    cdi_ids: list[str] | None = field(name="CDIDeviceIDs", default=None)


class _Driver(Struct, rename="pascal"):
    devices: list[_Device] | None = None


class _Claim(Struct, rename="pascal"):
    uid: str = field(name="ClaimUID")
    claim_name: str
    namespace: str
    pods: dict[str, dict[str, str]] = field(name="PodUIDs", default_factory=dict[str, dict[str, str]])
    driver_state: dict[str, _Driver] = field(default_factory=dict[str, _Driver])


class _Data(Struct):
    claims: list[_Claim] | None = field(name="ClaimInfoStateList", default=None)
    kind: str = "DRACheckpoint"
    api_version: str = field(name="apiVersion", default="checkpoint.dra.kubelet.k8s.io/v1")


class _File(Struct, rename="pascal"):
    data: str
    checksum: int


class Claims:
    """The claims by namespace and name, with their checkpoint in the directory `root`."""

    def __init__(self, root: str) -> None:
        self._path = os.path.join(root, FILE_NAME)
        self._claims: dict[tuple[str, str], ClaimInfo] = {}

    def __iter__(self) -> Iterator[ClaimInfo]:
        return iter(tuple(self._claims.values()))

    def get(self, namespace: str, name: str) -> ClaimInfo | None:
        return self._claims.get((namespace, name))

    def add(self, claim: AllocatedClaim) -> ClaimInfo:
        info = ClaimInfo(
            namespace=claim.namespace,
            name=claim.name,
            uid=claim.uid,
            pods=set(),
            devices={driver: [] for driver in claim.drivers},
        )
        self._claims[claim.namespace, claim.name] = info
        return info

    def remove(self, info: ClaimInfo) -> None:
        del self._claims[info.namespace, info.name]

    def of_pod(self, uid: str) -> tuple[ClaimInfo, ...]:
        return tuple(info for info in self if uid in info.pods)

    def read(self) -> None:
        """Replaces the claims by those of the checkpoint. Raises `CheckpointError`."""
        self._claims.clear()
        try:
            file = msgspec.json.decode(read_limited(self._path, _MAX_BYTES), type=_File)
            if zlib.crc32(file.data.encode()) != file.checksum:
                raise CheckpointError(f"{self._path}: checkpoint is corrupted")
            data = msgspec.json.decode(file.data, type=_Data)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        for claim in data.claims or ():
            devices = {
                driver: [_device(each) for each in state.devices or ()] for driver, state in claim.driver_state.items()
            }
            self._claims[claim.namespace, claim.claim_name] = ClaimInfo(
                namespace=claim.namespace, name=claim.claim_name, uid=claim.uid, pods=set(claim.pods), devices=devices
            )

    def write(self) -> None:
        """Replaces the checkpoint. Raises `OSError`."""
        data = msgspec.json.encode(_Data([_claim(info) for info in self])).decode()
        temporary = os.path.join(os.path.dirname(self._path), f".{FILE_NAME}")
        with open(temporary, "wb") as file:
            file.write(msgspec.json.encode(_File(data, zlib.crc32(data.encode()))))
        os.replace(temporary, self._path)


def _claim(info: ClaimInfo) -> _Claim:
    drivers = {driver: _Driver(_devices(devices)) for driver, devices in info.devices.items()}
    return _Claim(info.uid, info.name, info.namespace, {pod: {} for pod in sorted(info.pods)}, drivers)


def _devices(devices: Iterable[ClaimDevice]) -> list[_Device]:
    return [
        _Device(each.pool, each.device, each.share_id or None, list(each.requests), list(each.cdi_ids))
        for each in devices
    ]


def _device(device: _Device) -> ClaimDevice:
    requests, cdi_ids = tuple(device.request_names or ()), tuple(device.cdi_ids or ())
    return ClaimDevice(device.pool_name, device.device_name, requests, cdi_ids, device.share_id or "")
