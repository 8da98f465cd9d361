"""Pods that wait for an FPGA which no node will ever give them, and a word to their users about it.

While the webhook is away pods are let in as they are. One that asks for a name of its namespace then goes on asking for
it, and as no node has a resource of that name it waits for ever. It is told so by an event, one for all replicas.

Only pods without a node are followed, and of each only what it asks for.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from accelplane.admission.fpga_offers import Offers
from accelplane.admission.mappings import PREFIX, Mappings, Names
from accelplane.apiserver import StatusError
from accelplane.kube.client import Selection
from accelplane.kube.controller import Result
from accelplane.kube.informer import Informer
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Identity, NamespacedResource, Request, api, request_of

log = logging.getLogger(__name__)

NOT_REPLACED, UNKNOWN = "FpgaNameNotReplaced", "FpgaNameUnknown"

# An event is forgotten after an hour, and the pod still waits.
_TELL_AGAIN = 1200.0


class _Resources(Struct, frozen=True, gc=False):
    limits: Mapping[str, object] | None = None


class _Container(Struct, frozen=True, gc=False):
    resources: _Resources | None = None


class _Spec(Struct, frozen=True, rename="camel"):
    containers: Sequence[_Container] | None = None
    init_containers: Sequence[_Container] | None = None


_EMPTY = _Spec()


class PendingPod(NamespacedResource, Struct, kw_only=True):
    """A pod: the FPGA resources that it `asks` for, which are found in its spec."""

    metadata: Identity
    spec: _Spec = field(default_factory=_Spec)
    asks: tuple[str, ...] = ()
    _api_info = api("", "v1", "Pod", "pods")


def asks_only(pod: PendingPod) -> None:
    """Keeps of a pod which FPGAs it asks for; of one that asks for none, that it is there."""
    found: set[str] = set()
    for container in (*(pod.spec.containers or ()), *(pod.spec.init_containers or ())):
        limits = container.resources.limits if container.resources is not None else None
        found.update(name for name in limits or () if name.startswith(PREFIX))
    pod.asks = tuple(sorted(found))
    pod.spec = _EMPTY
    pod.metadata.ownerReferences = None
    if not found:
        pod.metadata.uid = None


class Problem(Struct, frozen=True):
    """Why a pod waits: in a word for programs, and for its user."""

    reason: str
    note: str


def problem_of(pod: PendingPod, names: Names, listed: Callable[[str], bool] | None) -> Problem | None:
    """What is wrong with what a pod asks for, which was let in and has no node, in a namespace of these names.

    `listed` says whether some node has a resource of a name; it is None when nobody knows.
    """
    namespace = pod.metadata.namespace
    for name in pod.asks:
        if name in names.resources or (listed is not None and listed(name)):
            continue
        shown = ascii(name[:120])
        if name in names.targets or name in names.faulty:
            return Problem(
                NOT_REPLACED,
                f"{shown} is a name of namespace {namespace}, and no node has a resource that is called so: the FPGA "
                "webhook was not reached when this pod was made, and it will wait for ever. Delete the pod so that it "
                "is made anew, once the webhook runs",
            )
        if listed is not None:
            return Problem(
                UNKNOWN,
                f"no node has {shown}, and namespace {namespace} has no AcceleratorFunction and no FpgaRegion that "
                "gives it: the FPGA webhook was not reached when this pod was made, or it would have been refused. "
                "Delete the pod, and make it anew with a name that is there",
            )
    return None


class PendingPods:
    """Tells each pod whose names were not replaced, when it has had no node for `settle` seconds."""

    def __init__(
        self, manager: Manager, mappings: Mappings, offers: Offers, *, again: float, settle: float = 10.0
    ) -> None:
        self._events = manager.events
        self._mappings = mappings
        self._offers = offers
        self._again = again
        self._settle = settle
        selection = Selection(fields="spec.nodeName=,status.phase=Pending")
        # None of the manager's: not everybody's role allows to list pods, and the rest works without.
        self._informer = Informer(manager.client, selection, watch_timeouts=manager.watch_timeouts)
        self._pods = self._informer.cache(PendingPod, transform=asks_only)
        self._controller = manager.controller("fpgapendingpod", self.reconcile)
        self._pods.subscribe(self._pod_changed)

    async def run(self) -> None:
        """Follows the pods until cancelled, from when that is allowed."""
        await self._informer.run_when_permitted(_refused, retry=self._again)

    async def reconcile(self, request: Request) -> Result | None:
        """Looks at one pod."""
        if not self._offers.settled.is_set():
            return Result(requeue_after=self._settle)
        pod = self._pods.get(request)
        if pod is None:
            return None
        listed = self._offers.lists if self._offers.counts is not None else None
        problem = problem_of(pod, self._mappings.of(request.namespace), listed)
        if problem is None:
            return None
        self._events.record(pod, "Warning", problem.reason, problem.note, action="Schedule", once=True)
        return Result(requeue_after=_TELL_AGAIN)

    def _pod_changed(self, old: PendingPod | None, new: PendingPod | None) -> None:
        # A name may have been made a moment before the pod, and news of it may come after: there is no hurry.
        if old is None and new is not None and new.asks:
            self._controller.enqueue(request_of(new), after=self._settle)


def _refused(error: StatusError) -> None:
    log.warning("pods whose FPGA names were not replaced are not told so: %s", error)
