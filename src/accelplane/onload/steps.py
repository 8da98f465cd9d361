"""The next actions on the nodes of one Onload resource: `decide(target, nodes, now, waits) -> Plan`. A pure function.

Each node is in one step, which follows from its labels, its pods and the annotation with its progress:

    taken down      gate label removed -> plugin pod gone -> resource not advertised -> pods that use Onload evicted
                    -> label of `onload` removed -> `onload` unloaded -> label of `sfc` removed
    brought up      label of `sfc` -> `sfc` loaded -> label of `onload` -> `onload` loaded -> gate label
                    -> plugin pod ready, resource advertised, probe succeeded -> verified

A node is taken down if a label has another version, if `sfc` is added or removed, because `onload` uses it, or if KMM
does not manage the modules any more. A plugin
pod of another revision is replaced while the modules stay. Nodes that are not selected any more, and all nodes of a
deleted resource, are taken down and not brought up.

The first step of a node that works counts as its start. At most `max_unavailable` nodes are between start and
verification. No node starts while the upgrade is paused, or if a node exceeded its time limit.

A step that waits has a `Wait`, whose time limit counts observed waiting (`waits`). One that writes labels or replaces
pods has none, so it has no time limit. `now` is a monotonic clock.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from accelplane.onload.observed import NodeView, PodView, Progress
from accelplane.onload.plan import DONE, Action, NodeStep, ObservedWait, Obstacle, Plan, Role, StepName, Target, Wait
from accelplane.onload.waits import is_overdue, observe, retry_after, waiting_in

# Seconds for which a node may not report a loaded module before the next step, unless verification is strict.
READY_WAIT = 30
# Seconds for which a node may still advertise the resource after the removal of the gate. A kubelet updates the status
# every 10 s. Until then the scheduler assigns pods to the node, and the kubelet rejects them.
STATUS_WAIT = 30
# Pods and nodes are watched. This interval is for pods whose eviction was rejected.
EVICTION_RETRY = 5.0
# A probe pod is created again this many seconds after it was observed that it failed.
PROBE_RETRY = 60.0

# One phase per node: nothing changes, its change would start now, it is unavailable because of its change, or it is a
# new node that gets its first version.
Phase = Literal["steady", "starting", "down", "joining"]


def decide(
    target: Target, nodes: Sequence[NodeView], now: float, waits: Mapping[str, ObservedWait] | None = None
) -> Plan:
    """The actions of this pass. `waits` are those of the plan before; without them, all waiting begins now."""
    ordered = sorted(nodes, key=lambda each: each.name)
    observed = {node.name: observe(target, node, now, (waits or {}).get(node.name)) for node in ordered}
    steps = [_Node(target, node, now, observed[node.name].seconds).step() for node in ordered]
    observed = {step.node: waiting_in(step, observed[step.node]) for step in steps}
    pairs = list(zip(ordered, steps, strict=True))
    overdue = tuple(step for step in steps if is_overdue(step, observed[step.node]))
    down = [(node, step) for node, step in pairs if _phase(target, node, step) == "down"]
    # A node that was lost during an upgrade must not prevent the rollback of the others.
    down = [(node, step) for node, step in down if node.ready or not target.rolls_back]
    # Nor must a node that was excluded by the selector prevent the change of the others.
    counted = [(node, step) for node, step in down if node.selected or (node.ready and step not in overdue)]
    failed = any(step in overdue for node, step in counted if node.selected)
    free = target.max_unavailable - len(counted)
    if not target.deleting and (target.paused or failed):
        free = 0
    decided: list[NodeStep] = []
    for node, step in pairs:
        if (obstacle := _obstacle(target, node, step)) is not None:
            decided.append(_blocked(node, obstacle.step, obstacle.message))
        elif not step.starts or target.deleting:
            decided.append(step)
        elif not node.ready:
            decided.append(_blocked(node, "NodeNotReady", "the node is not ready"))
        elif free > 0:
            free -= 1
            decided.append(step)
        else:
            decided.append(_blocked(node, "Pending", _pending(target, failed=failed)))
    return Plan(
        steps=tuple(decided),
        actions=tuple(step.action for step in decided if step.action is not None),
        overdue=overdue,
        waits=observed,
        unavailable=len(counted),
        retry=retry_after(decided, observed),
    )


# Phases


def _phase(target: Target, node: NodeView, step: NodeStep) -> Phase:
    """Without an annotation, the Go operator has started the change of a node."""
    if step.starts:
        return "starting"
    if step.step in DONE and node.progress is None:
        return "steady"
    is_down = node.progress.upgrade if node.progress is not None else _was_stopped(target, node)
    return "down" if is_down else "joining"


def _was_stopped(target: Target, node: NodeView) -> bool:
    """Whether a node without progress has modules of another version and no device plugin."""
    return target.kmm and node.gate is None and not {node.module, node.sfc} <= {None, target.version}


def _obstacle(target: Target, node: NodeView, step: NodeStep) -> Obstacle | None:
    """What prevents the step of a selected node. The installation on a new node is a change that begins."""
    if target.deleting or not node.selected:
        return None
    phase, found = _phase(target, node, step), target.obstacles.get(node.name)
    begins = phase == "starting" or (phase == "joining" and step.action is not None and node.progress is None)
    loads = step.step in {"LabellingSfc", "LabellingModule"}
    if found is not None and (found.blocks == "all" or begins or (found.blocks == "loading" and loads)):
        return found
    if node.held and begins:
        return Obstacle("Held", "the node has the annotation onload.amd.com/hold", "start")
    return None


def _blocked(node: NodeView, step: StepName, message: str) -> NodeStep:
    return NodeStep(node=node.name, step=step, message=message)


def _pending(target: Target, *, failed: bool) -> str:
    if failed:
        return "a node exceeded its time limit, so no other node starts"
    if target.paused:
        return "the upgrade is paused"
    return f"at most {target.max_unavailable} nodes are changed at the same time"


class _Node:
    """Computes the step of one node without regard to the other nodes."""

    def __init__(self, target: Target, node: NodeView, now: float, waited: Mapping[str, float]) -> None:
        self.target = target
        self.node = node
        self.now = now
        self.waited = waited
        self.wants_sfc = target.sfc and node.name not in target.without_sfc

    def step(self) -> NodeStep:
        node, target = self.node, self.target
        if target.deleting or not node.selected:
            return self._removal()
        if (label := target.others.get(node.name)) is not None:
            return self._other_version(label)
        if node.progress is not None and node.progress.target != target.version:
            progress = msgspec.structs.replace(self._progress(), started=0)
            return self._patch("Pending", f"the change to {target.version} begins", progress=progress)
        if self._must_be_taken_down():
            return self._taking_down() or self._patch(
                "RemovingSfc", "the module sfc is unloaded", labels={"sfc": None}, unloads=True
            )
        return self._bringing_up()

    def _other_version(self, label: str) -> NodeStep:
        """The target does not concern the node during a rollback: it keeps its version, or returns to it later."""
        node = self.node
        if node.progress is None and node.verified is not None and node.verified.label == label:
            return NodeStep(node=node.name, step="Verified", message=f"keeps version {label}")
        return _blocked(node, "Pending", f"returns to version {label} after nodes that return to {self.target.version}")

    # Taking down

    def _sfc_differs(self) -> bool:
        node, target = self.node, self.target
        if node.sfc is not None:
            return not target.kmm or not self.wants_sfc or node.sfc != target.version
        return target.kmm and self.wants_sfc and node.module is not None

    def _module_differs(self) -> bool:
        return self.node.module is not None and (not self.target.kmm or self.node.module != self.target.version)

    def _must_be_taken_down(self) -> bool:
        node, target = self.node, self.target
        # A gate without the module's label: others removed it, so KMM unloads a module that may be in use.
        gate_differs = node.gate is not None and (node.gate != target.version or (target.kmm and node.module is None))
        return self._module_differs() or self._sfc_differs() or gate_differs

    def _taking_down(self) -> NodeStep | None:
        """The gate label, the plugin pod, the resource, applications, and `onload`, in this order. None at the end."""
        node = self.node
        # The pods on a node that another resource has as well use the modules of that resource.
        has_labels = (node.module is not None or node.sfc is not None) and not node.others
        if node.gate is not None:
            return self._start("RemovingGate", "the device plugin stops", labels={"gate": None})
        if node.plugins:
            return self._waiting("WaitingForPluginPod", "the device plugin pod is being deleted")
        # While the node advertises the resource, the scheduler assigns pods that use Onload to it.
        advertises = node.ready and node.advertised and not self._waited("WaitingForNodeStatus", STATUS_WAIT)
        if advertises and has_labels and (node.module is not None or node.apps):
            message = "the node still advertises amd.com/onload"
            return self._waiting("WaitingForNodeStatus", message, within=STATUS_WAIT)
        if has_labels and node.apps:
            return self._evicting()
        if node.module is not None:
            message = "the module onload is unloaded"
            return self._patch("RemovingModule", message, labels={"module": None}, unloads=not node.others)
        if node.sfc is not None and (node.module_pods or node.module_loaded):
            # KMM may have been removed.
            within = READY_WAIT if self.target.deleting or not self.target.kmm else math.inf
            if not self._waited("WaitingForUnload", within):
                return self._waiting("WaitingForUnload", "the module onload is being unloaded", within=within)
        return None

    def _evicting(self) -> NodeStep:
        node = self.node
        names = ", ".join(str(each.key) for each in node.apps[:3])
        more = f" and {len(node.apps) - 3} more" if len(node.apps) > 3 else ""
        evict = tuple(each for each in node.apps if not each.is_terminating)
        message = f"evicts pods that use Onload: {names}{more}"
        action = Action(node=node.name, step="Evicting", message=message, evict=evict) if evict else None
        wait = Wait(self._limit(self.target.eviction_timeout or math.inf), EVICTION_RETRY if evict else math.inf)
        return NodeStep(node=node.name, step="Evicting", message=message, action=action, wait=wait)

    def _removal(self) -> NodeStep:
        """The node loses everything that belongs to the resource."""
        node, target = self.node, self.target
        if node.is_clean:
            return NodeStep(node=node.name, step="Removed")
        if not target.deleting and not node.ready:
            message = "the node is not selected and not ready: it is released when it is ready"
            return _blocked(node, "NotReachable", message)
        if target.deleting and not node.ready:
            # Nothing on this node can be observed or changed. Its pods must not prevent the deletion.
            everything: dict[Role, str | None] = {"module": None, "sfc": None, "gate": None}
            message = "the node is not ready: removes its labels"
            return self._patch("RemovingSfc", message, labels=everything, removes_progress=True)
        if (step := self._taking_down()) is not None:
            return step
        labels: dict[Role, str | None] = {"sfc": None} if node.sfc is not None else {}
        return self._patch(
            "RemovingSfc",
            "the node is released",
            labels=labels,
            unloads=bool(labels) and not node.others,
            removes_progress=True,
        )

    # Bringing up

    def _bringing_up(self) -> NodeStep:
        node, target = self.node, self.target
        skipped = False
        if target.kmm and self.wants_sfc and node.sfc is None:
            if node.sfc_pods or node.sfc_loaded or node.module_pods or node.module_loaded:
                return self._waiting_for_unload()
            return self._label("LabellingSfc", "the module sfc is loaded", "sfc")
        if target.kmm and node.module is None:
            if node.module_pods or node.module_loaded:
                return self._waiting_for_unload()
            if self.wants_sfc and not self._is_loaded(loaded=node.sfc_loaded, version=node.sfc_loaded_version):
                if not self._may_skip("WaitingForSfc"):
                    return self._waiting_for_module("WaitingForSfc", "sfc")
                skipped = True
            return self._label("LabellingModule", "the module onload is loaded", "module", skipped=skipped)
        if node.gate is None:
            if not target.kmm and node.has_kmm_modules and not self._waited("WaitingForModulePods", READY_WAIT):
                message = "the modules of KMM are being unloaded"
                return self._waiting("WaitingForModulePods", message, within=READY_WAIT)
            if node.plugins:
                return self._waiting("WaitingForPluginPod", "the former device plugin pod is being deleted")
            if target.kmm and not self._is_loaded(loaded=node.module_loaded, version=node.module_loaded_version):
                if not self._may_skip("WaitingForModule"):
                    return self._waiting_for_module("WaitingForModule", "onload")
                skipped = True
            return self._label("SettingGate", "the device plugin starts", "gate", skipped=skipped)
        return self._running()

    def _waiting_for_unload(self) -> NodeStep:
        """Applications that are still there after a change of labels by others prevent that a module is unloaded."""
        if self.node.apps and (self.node.progress is None or not self.node.progress.upgrade):
            return self._start("Pending", "pods use a module that has to be unloaded", labels={})
        if self.node.apps:
            return self._evicting()
        return self._waiting("WaitingForModulePods", "the former modules are being unloaded")

    def _running(self) -> NodeStep:
        """All labels are as they should be: the plugin pod has to be of the revision, and the node to be verified."""
        node = self.node
        outdated = tuple(each for each in node.plugins if self._is_outdated(each))
        if outdated and node.progress is None:
            return self._start("ReplacingPluginPod", "the device plugin pod is replaced", labels={})
        deleted = tuple(each for each in outdated if not each.is_terminating)
        if deleted:
            return self._acting(
                Action(
                    node=node.name,
                    step="ReplacingPluginPod",
                    message="the device plugin pod is replaced",
                    delete=deleted,
                )
            )
        missing = self._unverified()
        if missing:
            return self._waiting("Verifying", f"waits for {', '.join(missing)}")
        if node.progress is None:
            return NodeStep(node=node.name, step="Verified")
        if (remaining := self._ready_until() - self.now) > 0:
            message = f"the device plugin pod has to be ready for {self.target.min_ready} s"
            return self._waiting("Verifying", message, retry=remaining)
        if self.target.probe and node.probe != "succeeded":
            return self._probing()
        return self._patch("Verified", f"version {self.target.version} is verified", removes_progress=True)

    def _probing(self) -> NodeStep:
        """The probe pod has to succeed. It is created again while the node is in this step."""
        node, wait = self.node, Wait(self._limit(self.target.node_timeout))
        if node.probe == "none":
            message = "a probe pod is created"
            action = Action(node=node.name, step="Verifying", message=message, create_probe=True)
            return NodeStep(node=node.name, step="Verifying", message=message, action=action, wait=wait)
        if node.probe != "failed":
            return self._waiting("Verifying", f"the probe pod is {node.probe}")
        remaining = node.probe_since + PROBE_RETRY - self.now
        if remaining > 0:
            return self._waiting("Verifying", "the probe pod failed; it is created again after a minute", remaining)
        message = "the probe pod failed, so it is created again"
        action = Action(node=node.name, step="Verifying", message=message, delete_probe=True)
        return NodeStep(node=node.name, step="Verifying", message=message, action=action, wait=wait)

    def _ready_until(self) -> float:
        """When the plugin pod of an upgraded node has been ready for long enough. A failing one is ready repeatedly."""
        if self.node.progress is None or not self.node.progress.upgrade:
            return self.now
        ready = (each.ready_since for each in self.node.plugins if each.is_ready and not each.is_terminating)
        return min(ready, default=0.0) + self.target.min_ready

    def _unverified(self) -> list[str]:
        """The missing conditions of verification, apart from the probe."""
        node, target = self.node, self.target
        found: list[str] = []
        if not any(each.is_ready and not each.is_terminating for each in node.plugins):
            found.append("a ready device plugin pod")
        if target.kmm and node.module_loaded_version not in {None, target.version}:
            found.append(f"module version {target.version}, found {node.module_loaded_version}")
        elif target.kmm and target.strict and not node.module_loaded:
            found.append("the module onload")
        wants_resource = target.strict or (node.progress is not None and node.progress.advertised)
        if wants_resource and not node.advertised:
            found.append("the resource amd.com/onload")
        return found

    def _is_outdated(self, pod: PodView) -> bool:
        found = self.target.adopted_revision if pod.revision is None else pod.revision
        return bool(self.target.revision) and found != self.target.revision

    def _is_loaded(self, *, loaded: bool, version: str | None) -> bool:
        return loaded and version in {None, self.target.version}

    # Waiting

    def _waited(self, step: StepName, seconds: float) -> bool:
        return self.waited.get(step, 0.0) >= seconds

    def _may_skip(self, step: StepName) -> bool:
        return not self.target.strict and self._waited(step, READY_WAIT)

    def _limit(self, seconds: float) -> float:
        """The time limit of a step. Only a change that is under way has one. KMM does nothing on a cordoned node."""
        node = self.node
        return math.inf if node.progress is None or node.cordoned or self.target.deleting else seconds

    def _waiting(self, step: StepName, message: str, retry: float = math.inf, *, within: float = math.inf) -> NodeStep:
        """A waiting step. It ends by itself after `retry` seconds from now, or `within` seconds of waiting."""
        if self.node.cordoned:
            message += "; the node is cordoned"
        wait = Wait(self._limit(self.target.node_timeout), min(retry, within - self.waited.get(step, 0.0)))
        return NodeStep(node=self.node.name, step=step, message=message, wait=wait)

    def _waiting_for_module(self, step: StepName, module: str) -> NodeStep:
        within = math.inf if self.target.strict else READY_WAIT
        return self._waiting(step, f"waits until KMM has loaded the module {module}", within=within)

    # Acting

    def _progress(self, *, upgrade: bool | None = None) -> Progress:
        """The progress after an action. The time of its start is added when it is written."""
        known = self.node.progress
        works = known.upgrade if known is not None else _was_stopped(self.target, self.node)
        verified = self.node.verified
        return Progress(
            target=self.target.version,
            started=known.started if known is not None else 0,
            upgrade=works if upgrade is None else upgrade,
            advertised=known.advertised if known is not None else self.node.advertised,
            verified=verified.label if verified is not None else "",
            user_image=verified.user_image if verified is not None else "",
        )

    def _patch(
        self,
        step: StepName,
        message: str,
        *,
        labels: Mapping[Role, str | None] | None = None,
        progress: Progress | None = None,
        removes_progress: bool = False,
        unloads: bool = False,
    ) -> NodeStep:
        """A step that writes labels and progress."""
        return self._acting(
            Action(
                node=self.node.name,
                step=step,
                message=message,
                labels=labels or {},
                progress=None if removes_progress else progress or self._progress(),
                removes_progress=removes_progress,
                unloads=unloads,
            )
        )

    def _start(self, step: StepName, message: str, *, labels: Mapping[Role, str | None]) -> NodeStep:
        """The first step of a node that may work now. A node whose change is under way has started already."""
        under_way = self.node.progress is not None and self.node.progress.upgrade
        found = self._patch(step, message, labels=labels, progress=self._progress(upgrade=True))
        return msgspec.structs.replace(found, starts=not under_way)

    def _label(self, step: StepName, message: str, role: Role, *, skipped: bool = False) -> NodeStep:
        found = self._patch(step, message, labels={role: self.target.version})
        return msgspec.structs.replace(found, skipped_wait=skipped)

    def _acting(self, action: Action) -> NodeStep:
        return NodeStep(node=self.node.name, step=action.step, message=action.message, action=action)
