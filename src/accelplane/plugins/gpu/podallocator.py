"""The resource manager: answers the kubelet by the annotations of pods, and remembers its answers.

A GetPreferredAllocation call chooses the IDs of a container; the Allocate call for them adds the affinity mask. All
failures end in the default method. Nothing is stored: an Allocate call after a restart gets the default method too.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence

from accelplane.devices import Allocation, Device
from accelplane.logs import v
from accelplane.plugins.base import NodePods, PodsError
from accelplane.plugins.gpu import fractional
from accelplane.plugins.gpu.fractional import Assignment, Candidate, NoCandidate, PodKey
from accelplane.plugins.gpu.scan import AFFINITY_MASK, MONITORING_ID

log = logging.getLogger(__name__)

DEADLINE = 30.0
RETRY_DELAY = 1.0
CLEANUP_INTERVAL = 600
CLEANUP_JITTER = 1200
_MAX_ASSIGNMENTS = 4096


class FractionalAllocator:
    """Implements `PodAllocator`. `tiles_per_card` returns the number that all cards have, 0 if unknown."""

    def __init__(self, pods: NodePods, tiles_per_card: Callable[[], int], *, deadline: float = DEADLINE) -> None:
        self._pods = pods
        self._tiles_per_card = tiles_per_card
        self._deadline = deadline
        self._assignments: dict[tuple[PodKey, int], Assignment] = {}

    async def preferred_allocation(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        if MONITORING_ID in available or MONITORING_ID in must_include:
            return ()
        candidate = await self._candidate()
        if candidate is None:
            return ()
        assignment = fractional.assign(candidate, available, must_include, size, self._tiles_per_card())
        if len(assignment.ids) != size:
            log.warning(
                "pod %s/%s: found %d devices for container %d of its annotation, expected %d; the kubelet adds others",
                candidate.pod.namespace, candidate.pod.name, len(assignment.ids), candidate.number, size,
            )  # fmt: skip
        key = (candidate.pod.key, candidate.number)
        self._assignments.pop(key, None)
        self._assignments[key] = assignment
        while len(self._assignments) > _MAX_ASSIGNMENTS:
            del self._assignments[next(iter(self._assignments))]
        return assignment.ids

    async def allocate(self, ids: Sequence[str], devices: Callable[[], Mapping[str, Device]]) -> Allocation | None:
        if MONITORING_ID in ids:
            return None
        candidate = await self._candidate()
        if candidate is None:
            return None
        pod = candidate.pod
        assignment = self._assignments.get((pod.key, candidate.number))
        if assignment is None:
            log.warning(
                "pod %s/%s: no devices were chosen for container %d, using the default method",
                pod.namespace, pod.name, candidate.number,
            )  # fmt: skip
            return None
        if sorted(ids) != sorted(assignment.ids):
            log.warning("pod %s/%s: the kubelet gives other devices than those chosen", pod.namespace, pod.name)
        listed = devices()
        if any(id_ not in listed for id_ in ids):
            return None
        default = Allocation.of([listed[id_] for id_ in dict.fromkeys(ids)])
        mask = {AFFINITY_MASK: assignment.mask} if assignment.mask else {}
        return Allocation(nodes=default.nodes, mounts=default.mounts, envs={**default.envs, **mask})

    async def run(self) -> None:
        """Reads the pods once, so that a source that fails is known early. Then forgets pods that have ended."""
        while True:
            await self.forget_ended()
            await asyncio.sleep(CLEANUP_INTERVAL + secrets.randbelow(CLEANUP_JITTER))

    async def forget_ended(self) -> None:
        """Forgets the assignments of pods that are neither pending nor running; none if the pods cannot be read."""
        before = list(self._assignments)
        try:
            present = {pod.key for pod in await self._pods.pods(fractional.project)}
        except PodsError as error:
            log.warning("resource manager: %s", error)
            return
        for key in before:
            if key[0] not in present:
                self._assignments.pop(key, None)

    async def _candidate(self) -> Candidate | None:
        """The container that a call is for. The reason is logged if there is none."""
        try:
            async with asyncio.timeout(self._deadline):
                found = await self._find()
                if not isinstance(found, Candidate) and found.retry:
                    log.log(v(2), "resource manager: %s; retrying", found.reason)
                    await asyncio.sleep(RETRY_DELAY)
                    found = await self._find()
        except PodsError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no answer of the kubelet and the API server within {self._deadline:g} s"
        else:
            if isinstance(found, Candidate):
                return found
            reason = found.reason
        log.warning("resource manager: %s; using the default method", reason)
        return None

    async def _find(self) -> Candidate | NoCandidate:
        pods = await self._pods.pods(fractional.project)
        return fractional.find_candidate(pods, await self._pods.holders(fractional.RESOURCES))
