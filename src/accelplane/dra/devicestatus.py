"""`status.devices` of claims: the devices that are prepared, for users and other programs.

Facts: Kubernetes API `resource.k8s.io`, AllocatedDeviceStatus. The key is driver, pool, device and share ID, and the
device must be allocated; the server wipes the entries when the claim is deallocated. The status is replaced by an
update with the resource version: a merge patch replaces the list, which has entries of other drivers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from accelplane.apiserver import ApiError, ApiServer, Conflict, NotFound
from accelplane.dra.claims import MAX_CLAIM, ClaimReader
from accelplane.dra.journal import Entry
from accelplane.dra.model import ClaimRef

log = logging.getLogger(__name__)

_ATTEMPTS = 4
_DEADLINE = 10.0


class DeviceStatus:
    """Writes the status of the devices of one driver and pool. `entry` returns the entry of a claim by its UID."""

    def __init__(
        self, api: ApiServer, reader: ClaimReader, driver: str, pool: str, entry: Callable[[str], Entry | None]
    ) -> None:
        self._api = api
        self._reader = reader
        self._driver = driver
        self._pool = pool
        self._entry = entry

    async def update(self, ref: ClaimRef) -> None:
        """Writes what is prepared of the claim now. Errors are logged."""
        try:
            for _attempt in range(_ATTEMPTS):
                try:
                    return await self._update(ref)
                except Conflict:
                    continue
            log.warning("claim %s/%s: status.devices was changed by others at each attempt", ref.namespace, ref.name)
        except NotFound:
            pass  # without a claim there is no status
        except (ApiError, ValueError) as error:
            log.warning("claim %s/%s: status.devices not written: %s", ref.namespace, ref.name, error)

    async def _update(self, ref: ClaimRef) -> None:
        claim = await self._api.get(await self._reader.path(ref), dict[str, Any], deadline=_DEADLINE, limit=MAX_CLAIM)
        entry = self._entry(ref.uid)
        status: dict[str, Any] = claim.get("status") or {}
        if claim["metadata"].get("uid") != ref.uid or not status.get("allocation"):
            return
        present: Sequence[Mapping[str, Any]] = status.get("devices") or []
        prepared = entry if entry is not None and entry.state == "prepared" else None
        desired = desired_devices(present, prepared, self._driver, self._pool, datetime.now(UTC))
        if desired != present:
            claim["status"] = {**status, "devices": desired}
            path = await self._reader.path(ref, "status")
            await self._api.put(path, claim, dict[str, Any], deadline=_DEADLINE)


def desired_devices(
    present: Sequence[Mapping[str, Any]], entry: Entry | None, driver: str, pool: str, now: datetime
) -> list[Mapping[str, Any]]:
    """`status.devices` with the devices of the entry, none of this driver and pool without one.

    Entries of others are not changed, and those that are correct keep their times.
    """
    others = [each for each in present if (each.get("driver"), each.get("pool")) != (driver, pool)]
    known = {(each.get("device"), each.get("shareID", "")): each for each in present if each not in others}
    own: list[Mapping[str, Any]] = []
    for holding in entry.devices if entry is not None else ():
        before = known.get((holding.device, holding.share_id), {})
        data = {"unit": holding.unit, "cdiDeviceIDs": list(holding.prepared.cdi_ids)}
        if before.get("data") == data and any(_is_ready(each) for each in before.get("conditions") or ()):
            own.append(before)
            continue
        condition = {
            "type": "Ready", "status": "True", "reason": "Prepared", "message": "",
            "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }  # fmt: skip
        key = {"driver": driver, "pool": pool, "device": holding.device}
        share = {"shareID": holding.share_id} if holding.share_id else {}
        own.append({**key, **share, "conditions": [condition], "data": data})
    return [*others, *own]


def _is_ready(condition: Mapping[str, Any]) -> bool:
    return condition.get("type") == "Ready" and condition.get("status") == "True"
