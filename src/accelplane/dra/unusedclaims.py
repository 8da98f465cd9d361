"""Claims in the journal that no pod uses: `UnusedClaims`."""

import logging
from collections.abc import Awaitable, Callable

from accelplane.apiserver import ApiError
from accelplane.apiserver.clock import loop_time
from accelplane.dra.claims import ClaimReader
from accelplane.dra.journal import Entry
from accelplane.kubelet.podresources import NodeHolders, PodResourcesError

log = logging.getLogger(__name__)


class UnusedClaims:
    """Finds claims that are gone or unused and that no container has, both for `delay` seconds.

    The kubelet ends containers of a pod that was deleted by force after it has forgotten the pod. `holders` returns the
    containers of the node that have devices, and raises `PodResourcesError`.
    """

    def __init__(self, claims: ClaimReader, holders: Callable[[], Awaitable[NodeHolders]], delay: float) -> None:
        self._claims = claims
        self._holders = holders
        self.delay = delay
        self._since: dict[str, float] = {}

    @property
    def suspected(self) -> bool:
        """Whether a claim was unused when it was checked, and the delay is not over."""
        return bool(self._since)

    def forget(self, uid: str) -> None:
        self._since.pop(uid, None)

    async def contains(self, entry: Entry) -> bool:
        ids = {name for holding in entry.devices for name in holding.prepared.cdi_ids}
        try:
            claim = await self._claims.find(entry.ref) if entry.name else None
            unused = bool(entry.name) and (claim is None or not claim.in_use)
            used = not unused or any(ids.intersection(each.cdi_names) for each in (await self._holders()).claims)
        except (ApiError, PodResourcesError) as error:
            log.info("claim %s: not known whether a pod uses it: %s", entry.claim, error)
            used = True
        if used:
            self.forget(entry.uid)
            return False
        now = loop_time()
        return now - self._since.setdefault(entry.uid, now) >= self.delay
