"""The controller of Onload resources: Modules, the DaemonSet, the steps of the nodes, and the status.

A reconcile reads what exists, decides (`decision`), writes, and reports (`status`). The decisions are pure functions;
this module has the reads, the writes and the handling of errors. A reconcile is triggered by resources, owned objects,
pods that concern Onload, and by changes of nodes that matter: heartbeats do not.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from accelplane.apiserver import ApiError, NotFound, StatusError
from accelplane.apiserver.clock import loop_time
from accelplane.kube.client import Selection
from accelplane.kube.controller import Result, TerminalError
from accelplane.kube.customresource import CustomResource, compact
from accelplane.kube.ensure import NameConflict
from accelplane.kube.finalizers import add_finalizer, remove_finalizer
from accelplane.kube.jsontypes import as_mapping
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Metadata, Request, request_of, untrimmed
from accelplane.kube.predicates import any_of, field_changed, generation_changed
from accelplane.kube.status import apply_status
from accelplane.onload import status
from accelplane.onload.actions import Actions
from accelplane.onload.children import Children, DesiredObjects, Existing
from accelplane.onload.daemonset import node_selector_of
from accelplane.onload.decision import ClusterState, Decision, make_decision
from accelplane.onload.kmm import Kmm
from accelplane.onload.models import DevicePluginStatus, Onload, OnloadStatus, Revision, Status, uses_kmm
from accelplane.onload.names import FINALIZER, GROUP, MANAGED_BY, MANAGED_BY_LABEL, Names, owner_of_label
from accelplane.onload.node_steps import EVICTION_RETRY
from accelplane.onload.nodes import InUse, Nodes
from accelplane.onload.observed import BlockedEviction, NodeView
from accelplane.onload.plan import ObservedWait, Plan, Problem, Target
from accelplane.onload.requirements import load_order_problems, overlaps, problem_of
from accelplane.onload.resources import ONLOAD, DaemonSet, Node, Pod, concerns_onload, pod_state, read, relevant
from accelplane.onload.rollout import Rollout, record_outcome
from accelplane.onload.status import Observation
from accelplane.onload.steps import decide

log = logging.getLogger(__name__)

# Many nodes and pods may change one after the other.
_DEBOUNCE = 0.2
_AFTER_ACTION = 0.05
_KMM_RETRY = 5.0
_CONFLICT_RETRY = 60.0


class _Written(NamedTuple):
    """What a reconciliation wrote: the plan that was performed, pods whose eviction was rejected, and errors.

    `postponed` are the seconds until the correction of a field that another program changes.
    """

    plan: Plan
    blocked: Sequence[BlockedEviction]
    problems: Sequence[Problem]
    failure: ApiError | None
    postponed: float = 0.0


class OnloadController:
    """The controller, added to a manager. `image` has the device plugin and the worker."""

    def __init__(self, manager: Manager, image: str, *, clock: Callable[[], float] = time.time) -> None:
        self._client = manager.client
        self._events = manager.events
        self._image = image
        self._clock = clock
        self._resources = manager.cache(ONLOAD, transform=compact, optional=True)
        self._nodes = Nodes(manager, clock)
        self._actions = Actions(self._nodes, manager.events)
        self._kmm = Kmm(manager)
        ours = Selection(labels=f"{MANAGED_BY_LABEL}={MANAGED_BY}")
        daemonsets = manager.cache(DaemonSet, ours, transform=untrimmed)
        self._children = Children(manager, self._kmm, daemonsets)
        self._waits: dict[Names, Mapping[str, ObservedWait]] = {}
        changed = any_of(generation_changed, field_changed(_finalizers))
        (
            manager.controller("onload", self.reconcile)
            .for_object(self._resources, predicate=changed)
            .watches(self._resources, lambda _resource: self._resources.requests(), predicate=generation_changed)
            .owns(daemonsets, ONLOAD, debounce=_DEBOUNCE)
            .owns(self._kmm.modules, ONLOAD)
            .watches(self._nodes.nodes, self._requests_of, predicate=field_changed(relevant), debounce=_DEBOUNCE)
            .watches(self._nodes.pods, self._requests_of_pod, predicate=field_changed(pod_state), debounce=_DEBOUNCE)
        )

    def onloads(self) -> list[Onload]:
        """All resources that can be read."""
        found = (_readable(resource) for resource in self._resources)
        return [each for each in found if each is not None]

    def node_labels(self) -> Mapping[str, Mapping[str, str]]:
        """The labels of all nodes by name."""
        return {node.metadata.name or "": node.labels for node in self._nodes.nodes}

    def _requests_of(self, node: Node) -> Iterable[Request]:
        """All resources, and deleted ones that left labels or annotations on the node."""
        keys = (key for key in (*node.labels, *node.annotations) if key.startswith(f"{GROUP}/"))
        deleted = (names for key in keys if (names := owner_of_label(key)) is not None)
        return {*self._resources.requests(), *(Request(names.name, names.namespace) for names in deleted)}

    def _requests_of_pod(self, pod: Pod) -> Iterable[Request]:
        return self._resources.requests() if concerns_onload(pod) else ()

    # Reconcile

    async def reconcile(self, request: Request) -> Result | None:
        """Reconciles the cluster with one resource."""
        resource = self._resources.get(request)
        names = Names(request.namespace, request.name)
        if resource is None:
            return await self._clean_up(names)
        if resource.metadata.deletionTimestamp:
            return await self._delete(resource, names)
        try:
            onload = read(resource)
        except msgspec.ValidationError as error:
            note = f"the resource is malformed: {error}; its objects stay as they are"
            self._events.record(resource, "Warning", "Malformed", note)
            raise TerminalError(note) from error
        if (problem := problem_of(onload)) is not None:
            await self._report_problem(resource, onload, problem)
            raise TerminalError(problem.message)
        if FINALIZER not in (resource.metadata.finalizers or ()):
            resource = await add_finalizer(self._client, resource, FINALIZER)
        if uses_kmm(onload.spec.onload) and await self._kmm.state() is None:
            await self._report_problem(resource, onload, _KMM_MISSING)
            return Result(requeue_after=_KMM_RETRY)
        return await self._reconcile_onload(resource, onload, names)

    async def _reconcile_onload(self, resource: CustomResource, onload: Onload, names: Names) -> Result | None:
        state = await self._observe(onload, names)
        decision = make_decision(onload, state, self._image, loop_time(), self._waits.get(names))
        await self._record_labels(resource, onload, decision.rollout)
        written = await self._write(resource, names, state, decision)
        conflicts = [Problem("FieldConflict", each) for each in self._children.conflicts(names)]
        order = load_order_problems(names, decision.target, state.nodes)
        observed = Observation(
            target=decision.target,
            plan=written.plan,
            nodes=state.nodes,
            daemonset=state.existing.daemonset.status if state.existing.daemonset is not None else None,
            history=decision.history(written.plan, self._time()),
            rolled_back=decision.rollout.desired.label if decision.rollout.rolls_back else "",
            blocking=written.blocked,
            problems=[*written.problems, *conflicts, *order, *self._overlaps(onload)],
        )
        await self._update_status(resource, onload, observed)
        self._warn(resource, onload, observed)
        if written.failure is not None:
            raise written.failure
        if [*map(_state, observed.history)] != [*map(_state, decision.rollout.history)]:
            return Result(requeue_after=_AFTER_ACTION)
        result = _result(written.plan)
        delays = filter(None, (result.requeue_after if result else 0.0, written.postponed))
        delay = min(delays, default=_CONFLICT_RETRY if conflicts else 0.0)
        return Result(requeue_after=delay) if delay else None

    async def _observe(self, onload: Onload, names: Names) -> ClusterState:
        """Reads what the decision depends on."""
        kmm = await self._kmm.state() if uses_kmm(onload.spec.onload) else None
        existing = await self._children.existing(onload, kmm)
        seniority = self._seniority()
        nodes = self._nodes.views(names, onload.spec.selector, seniority)
        reachable = self._reachable(existing) if any(node.must_be_released for node in nodes) else None
        return ClusterState(kmm=kmm, existing=existing, nodes=nodes, seniority=seniority, reachable=reachable)

    async def _write(self, resource: CustomResource, names: Names, state: ClusterState, decision: Decision) -> _Written:
        """Writes objects, and then performs the actions of nodes. Time counts as waiting only if objects are written.

        What was observed of waiting nodes is only in memory: it begins again at a restart.
        """
        problems, failure, postponed = await self._ensure(resource, decision.objects, state.existing, state.nodes)
        if failure is not None:
            return _Written(Plan(), (), problems, failure)
        self._waits[names] = decision.plan.waits
        blocked, failure = await self._actions.perform(names, decision.plan, state.nodes, resource, decision.onload)
        return _Written(decision.plan, blocked, _rejections(failure), failure, postponed)

    async def _record_labels(self, resource: CustomResource, onload: Onload, rollout: Rollout) -> None:
        """Writes the content of a new label into the status before a Module or a node has the label."""
        before = onload.status.onload.history if onload.status else ()
        known = {(each.label, each.digest) for each in before}
        history = record_outcome(rollout, "progressing", self._time())
        if {(each.label, each.digest) for each in history} <= known:
            return
        current = onload.status or Status(onload=OnloadStatus(), device_plugin=DevicePluginStatus())
        changed = msgspec.structs.replace(current.onload, history=history)
        await self._apply_status(resource, msgspec.structs.replace(current, onload=changed))

    async def _ensure(
        self, resource: CustomResource, made: DesiredObjects, existing: Existing, views: Sequence[NodeView]
    ) -> tuple[Sequence[Problem], ApiError | None, float]:
        """Writes the owned objects.

        Returns the problems that the API server reports, the error to retry, and the seconds until a correction that
        was postponed.
        """
        try:
            postponed = await self._children.ensure(resource, made, existing)
            if made.sfc is None and existing.sfc is not None and all(node.sfc is None for node in views):
                await self._children.delete_module(resource, existing.sfc)
            if made.module is None and existing.module is not None and all(node.module is None for node in views):
                await self._children.delete_module(resource, existing.module)
        except NameConflict as error:
            return [Problem("NameConflict", str(error))], error, 0.0
        except StatusError as error:
            if not error.permanent:
                return (), error, 0.0
            reason = "ModuleRejected" if "/modules" in str(error) else "WriteRejected"
            return [Problem(reason, str(error))], error, 0.0
        return (), None, postponed

    def _seniority(self) -> list[Names]:
        """All resources, in the order of their creation. Those that are being deleted are the last."""
        ordered = sorted(
            self._resources,
            key=lambda each: (
                bool(each.metadata.deletionTimestamp),
                each.metadata.creationTimestamp or "",
                request_of(each),
            ),
        )
        return [Names(each.metadata.namespace or "", each.metadata.name or "") for each in ordered]

    def _reachable(self, existing: Existing) -> frozenset[str]:
        """The nodes that the existing DaemonSet selects."""
        if existing.daemonset is None:
            return frozenset(self.node_labels())
        selector = as_mapping(node_selector_of(existing.daemonset)) or {}
        return frozenset(name for name, labels in self.node_labels().items() if selector.items() <= labels.items())

    def _overlaps(self, onload: Onload) -> list[Problem]:
        """Other resources that select nodes of this one."""
        if len(self._resources) < 2:
            return []
        return overlaps(onload, self.onloads(), self.node_labels())

    # Deletion

    async def _delete(self, resource: CustomResource, names: Names) -> Result | None:
        """Releases all nodes of a resource that is being deleted, and then the resource."""
        if FINALIZER not in (resource.metadata.finalizers or ()):
            return None
        observed, failure = await self._release(resource, names)
        plan = observed.plan
        if observed.blocking:
            self._events.record(resource, "Warning", "EvictionBlocked", status.blocked_message(observed.blocking))
        await self._report_deletion(resource, observed)
        if failure is not None:
            raise failure
        if plan.is_complete and not plan.actions:
            log.info("Onload %s: all nodes are released", request_of(resource))
            await remove_finalizer(self._client, resource, FINALIZER)
            return None
        return _result(plan)

    async def _clean_up(self, names: Names) -> Result | None:
        """Removes labels and annotations of a resource that was deleted without a running operator, or by Go's."""
        if not self._nodes.views(names, None):
            self._waits.pop(names, None)
            return None
        try:
            await self._client.get(ONLOAD, names.name, names.namespace)
        except NotFound:
            log.info("Onload %s/%s was deleted: releasing its nodes", names.namespace, names.name)
        else:
            return None
        observed, failure = await self._release(None, names)
        if failure is not None:
            raise failure
        return _result(observed.plan)

    async def _release(self, resource: CustomResource | None, names: Names) -> tuple[Observation, ApiError | None]:
        """One pass of releasing all nodes. Returns the observed state, and the first error."""
        views, goal = self._nodes.views(names, None, self._seniority()), Target(version="", deleting=True)
        plan = decide(goal, views, loop_time(), self._waits.get(names))
        self._waits[names] = plan.waits
        blocked, failure = await self._actions.perform(names, plan, views, resource)
        observed = Observation(target=goal, plan=plan, nodes=views, blocking=blocked, problems=_rejections(failure))
        return observed, failure

    # Reports

    async def _report_deletion(self, resource: CustomResource, observed: Observation) -> None:
        """Writes the status while nodes are released: it names the pods that delay the deletion."""
        onload = _readable(resource)
        if onload is None or observed.plan.is_complete:
            return
        history = onload.status.onload.history if onload.status else ()
        goal = msgspec.structs.replace(observed.target, version=onload.spec.onload.version)
        await self._update_status(resource, onload, msgspec.structs.replace(observed, target=goal, history=history))

    async def _report_problem(self, resource: CustomResource, onload: Onload, problem: Problem) -> None:
        self._events.record(resource, "Warning", problem.reason, problem.message)
        history = onload.status.onload.history if onload.status else ()
        goal = Target(version=onload.spec.onload.version)
        await self._update_status(resource, onload, Observation(target=goal, history=history, problems=[problem]))

    def _warn(self, resource: CustomResource, onload: Onload, observed: Observation) -> None:
        """Problems are Events when they begin; blocked evictions as long as they last."""
        before = onload.status.conditions if onload.status is not None else ()
        degraded = {each.message for each in before if each.type == status.DEGRADED and each.status == "True"}
        problems = status.problems(observed)
        if problems and "; ".join(each.message for each in problems) not in degraded:
            for each in problems:
                self._events.record(resource, "Warning", each.reason, each.message)
        for step in observed.plan.steps:
            if step.skipped_wait and step.action is not None:
                note = f"node {step.node}: KMM does not report that the module is loaded; continues without"
                self._events.record(resource, "Warning", "ModuleNotReported", note)

    async def _update_status(self, resource: CustomResource, onload: Onload, observed: Observation) -> None:
        new = status.status(onload, observed, self._time())
        if new != onload.status:
            await self._apply_status(resource, new)

    async def _apply_status(self, resource: CustomResource, new: Status) -> None:
        try:
            await apply_status(self._client, resource, new, as_mapping(resource.document().get("status")))
        except NotFound:
            log.info("Onload %s: deleted, so its status is not written", request_of(resource))

    def _time(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_KMM_MISSING = Problem(
    "KmmMissing",
    "Kernel Module Management is not installed: found no definition of its kind Module; install it, or set "
    "spec.onload.moduleManagement to External",
)


def _state(revision: Revision) -> tuple[str, ...]:
    return revision.label, revision.digest, revision.user_image, revision.state


def _finalizers(resource: CustomResource) -> object:
    metadata: Metadata = resource.metadata
    return metadata.finalizers


def _readable(resource: CustomResource) -> Onload | None:
    try:
        return read(resource)
    except msgspec.ValidationError:
        return None


def _rejections(failure: ApiError | None) -> list[Problem]:
    """The problem of a write that fails again until a role, a webhook or an object changes."""
    if isinstance(failure, InUse):
        return [Problem("ModuleInUse", str(failure))]
    if isinstance(failure, StatusError) and failure.permanent:
        return [Problem("WriteRejected", str(failure))]
    return []


def _result(plan: Plan) -> Result | None:
    """When to decide again: soon after an action, and at the next deadline."""
    if any(action.patches or action.delete or action.delete_probe for action in plan.actions):
        return Result(requeue_after=_AFTER_ACTION)
    if plan.actions:
        return Result(requeue_after=EVICTION_RETRY)
    return Result(requeue_after=plan.retry) if plan.retry else None
