"""Events for pods that stay Pending because they request an FPGA name that no node has.

While the webhook is not available, pods are admitted unchanged. A pod that requests a name of its namespace then stays
Pending, because no node has a resource of that name. It gets an Event, one for all replicas of the operator.

Only pods without a node are watched, and only their resource requests are stored.
"""

import logging
from collections.abc import Callable

from msgspec import Struct

from accelplane.admission.fpga_allocatable import AllocatableByResource
from accelplane.admission.mappings import PREFIX, Mappings, Names
from accelplane.apiserver import StatusError
from accelplane.kube.client import Selection
from accelplane.kube.controller import Result
from accelplane.kube.informer import Informer
from accelplane.kube.kinds import NO_SPEC, NO_STATUS, Pod, pod_requests
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Request, request_of

log = logging.getLogger(__name__)

NOT_REPLACED, UNKNOWN = "FpgaNameNotReplaced", "FpgaNameUnknown"

# The API server deletes Events after an hour.
_EVENT_INTERVAL = 1200.0


class PendingPod(Pod, kw_only=True):
    """A pod with the FPGA resources that it requests."""

    requested: tuple[str, ...] = ()


def keep_requests(pod: PendingPod) -> None:
    """Replaces the spec by the FPGA resources that it requests."""
    pod.requested = tuple(pod_requests(pod.spec, lambda name: name.startswith(PREFIX)))
    pod.spec, pod.status = NO_SPEC, NO_STATUS
    metadata = pod.metadata
    metadata.ownerReferences = metadata.labels = metadata.annotations = metadata.creationTimestamp = None
    if not pod.requested:
        metadata.uid = None


class Problem(Struct, frozen=True):
    """Why a pod stays Pending: reason and note of its Event."""

    reason: str
    note: str


def problem_of(pod: PendingPod, names: Names, listed: Callable[[str], bool] | None) -> Problem | None:
    """The problem of a Pending pod in a namespace with these names, None if there is none.

    `listed` returns whether a node has a resource; it is None if the nodes are not known.
    """
    namespace = pod.metadata.namespace
    for name in pod.requested:
        if name in names.resources or (listed is not None and listed(name)):
            continue
        shown = ascii(name[:120])
        if name in names.targets or name in names.faulty:
            return Problem(
                NOT_REPLACED,
                f"{shown}: found a name of namespace {namespace}, expected a resource of a node: the FPGA webhook was "
                "not available when the pod was created, so the pod stays Pending; delete the pod and create it again "
                "when the webhook runs",
            )
        if listed is not None:
            return Problem(
                UNKNOWN,
                f"{shown}: no node has this resource, and namespace {namespace} has no AcceleratorFunction and no "
                "FpgaRegion of this name; the FPGA webhook was not available when the pod was created; delete the pod "
                "and create it again with an existing name",
            )
    return None


class PendingPods:
    """Records an Event for each pod whose names were not replaced and that has no node after `grace` seconds."""

    def __init__(
        self,
        manager: Manager,
        mappings: Mappings,
        allocatable: AllocatableByResource,
        *,
        retry: float,
        grace: float = 10.0,
    ) -> None:
        self._events = manager.events
        self._mappings = mappings
        self._allocatable = allocatable
        self._retry = retry
        self._grace = grace
        selection = Selection(fields="spec.nodeName=,status.phase=Pending")
        # Not a cache of the manager: some accounts may not list pods, and everything else works without them.
        self._informer = Informer(manager.client, selection, watch_timeouts=manager.watch_timeouts)
        self._pods = self._informer.cache(PendingPod, transform=keep_requests)
        self._controller = manager.controller("fpgapendingpod", self.reconcile)
        self._pods.subscribe(self._pod_changed)

    async def run(self) -> None:
        """Watches the pods until cancelled, as soon as the account may list them."""
        await self._informer.run_when_permitted(_log_forbidden, retry=self._retry)

    async def reconcile(self, request: Request) -> Result | None:
        """Records the Event of one pod, if it needs one."""
        if not self._allocatable.initialized.is_set():
            return Result(requeue_after=self._grace)
        pod = self._pods.get(request)
        if pod is None:
            return None
        listed = self._allocatable.lists if self._allocatable.counts is not None else None
        problem = problem_of(pod, self._mappings.of(request.namespace), listed)
        if problem is None:
            return None
        self._events.record(pod, "Warning", problem.reason, problem.note, action="Schedule", once=True)
        return Result(requeue_after=_EVENT_INTERVAL)

    def _pod_changed(self, old: PendingPod | None, new: PendingPod | None) -> None:
        # The name may be created shortly before the pod, and its event may arrive later.
        if old is None and new is not None and new.requested:
            self._controller.enqueue(request_of(new), after=self._grace)


def _log_forbidden(error: StatusError) -> None:
    log.warning("Pending pods cannot be listed: no Events for FPGA names that were not replaced: %s", error)
