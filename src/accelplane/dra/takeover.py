"""Claims that a driver of Intel has prepared, from its file `preparedClaims.json`.

Running containers have the CDI names of that driver, and the kubelet keeps them, so the names stay defined until the
claims are unprepared. Facts: Intel's resource drivers for Kubernetes, cmd/kubelet-gpu-plugin/claimPreparations.go. The
file of older releases maps UIDs to results of the Go helper, the newer one is a `PreparedClaimsCheckpoint`. Both have
the field names of Go.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from accelplane.dra.journal import Entry, Holding, valid_uid
from accelplane.dra.model import DeviceName

FILE = "preparedClaims.json"
IMPORTED = f"{FILE}.imported"
MAX_FILE = 4 * 1024 * 1024
KIND, VERSION = "PreparedClaimsCheckpoint", "checkpoint.gpu.intel.com/v1"


class TakeoverError(Exception):
    """A file of another driver that cannot be read. The text has the file and what was expected."""


class Device(Struct, frozen=True):
    """A device in the answer to the kubelet."""

    requests: Sequence[str] | None = msgspec.field(name="Requests", default=None)
    pool: str = msgspec.field(name="PoolName", default="")
    device: str = msgspec.field(name="DeviceName", default="")
    cdi_ids: Sequence[str] | None = msgspec.field(name="CDIDeviceIDs", default=None)
    share_id: str | None = msgspec.field(name="ShareID", default=None)


class PreparedDevice(Struct, frozen=True):
    """A device of a claim as the other driver has answered it."""

    device: Device = msgspec.field(name="KubeletpluginDevice")
    admin: bool = msgspec.field(name="AdminAccess", default=False)


class _Preparation(Struct, frozen=True):
    devices: Sequence[PreparedDevice] | None = msgspec.field(name="PreparedDevices", default=None)


class _Checkpoint(Struct, frozen=True):
    version: str = msgspec.field(name="apiVersion", default="")
    claims: Mapping[str, _Preparation] | None = msgspec.field(name="PreparedClaims", default=None)


class _Result(Struct, frozen=True):
    devices: Sequence[Device] | None = msgspec.field(name="Devices", default=None)


def parse(data: bytes) -> Mapping[str, Sequence[PreparedDevice]]:
    """The prepared devices by UID. Raises `TakeoverError`."""
    try:
        document = msgspec.json.decode(data, type=dict[str, Any])
        if document.get("kind") == KIND:
            checkpoint = msgspec.convert(document, _Checkpoint)
            if checkpoint.version != VERSION:
                raise TakeoverError(f"{FILE}: apiVersion is {checkpoint.version[:80]!a}, expected {VERSION}")
            found = {uid: each.devices or () for uid, each in (checkpoint.claims or {}).items()}
        else:
            results = msgspec.convert(document, dict[str, _Result])
            found = {uid: [PreparedDevice(device) for device in each.devices or ()] for uid, each in results.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TakeoverError(f"{FILE}: expected claims by UID or a {KIND}: {error}") from None
    if invalid := next((uid for uid in found if not valid_uid(uid)), ""):
        raise TakeoverError(f"{FILE}: found {invalid[:80]!a}, expected the UID of a claim")
    return found


def entries(found: Mapping[str, Sequence[PreparedDevice]], names: Mapping[str, DeviceName], boot: str) -> list[Entry]:
    """Entries of the journal for the claims. A device that is not known any more is held under its name."""
    return [
        Entry(uid=uid, state="prepared", boot=boot, devices=[_holding(each, names) for each in devices])
        for uid, devices in found.items()
    ]


def _holding(found: PreparedDevice, names: Mapping[str, DeviceName]) -> Holding:
    device = found.device
    name = names.get(device.device, DeviceName(unit=device.device))
    return Holding(
        request=(device.requests or ("",))[0], pool=device.pool, device=device.device, unit=name.unit, slot=name.slot,
        share_id=device.share_id or "", admin=found.admin, inherited=device.cdi_ids or (),
    )  # fmt: skip
