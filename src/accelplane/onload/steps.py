"""The next actions on the nodes of one Onload resource: `decide(target, nodes, now) -> Plan`. A pure function.

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
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from accelplane.onload.observed import NodeView, PodView, Progress
from accelplane.onload.plan import Action, NodeStep, Plan, Role, StepName, Target

# Seconds for which a node may not report a loaded module before the next step, unless verification is strict.
READY_WAIT = 30
# Seconds for which a node may still advertise the resource after the removal of the gate. A kubelet updates the status
# every 10 s. Until then the scheduler assigns pods to the node, and the kubelet rejects them.
STATUS_WAIT = 30
# Pods and nodes are watched. This interval is for pods whose eviction was rejected.
EVICTION_RETRY = 5.0
# A probe pod that failed is created again this many seconds after its creation. This does not extend the time limit.
PROBE_RETRY = 60.0


def decide(target: Target, nodes: Sequence[NodeView], now: float) -> Plan:
    """The actions of this pass."""
    ordered = sorted(nodes, key=lambda each: each.name)
    steps = [_Node(target, node, now).step() for node in ordered]
    pairs = list(zip(ordered, steps, strict=True))
    deadlines = [_deadline(target, node, step) for node, step in pairs]
    overdue = tuple(step for step, deadline in zip(steps, deadlines, strict=True) if now > deadline)
    # A node that was lost during an upgrade must not prevent the rollback of the others.
    counted = [(node, step) for node, step in pairs if node.ready or not target.rolls_back]
    down = [node.name for node, step in counted if _is_taken_down(target, node, step)]
    failed = any(node.progress is not None and node.progress.upgrade for node, step in counted if step in overdue)
    free = target.max_unavailable - len(down)
    if not target.deleting and (target.paused or failed):
        free = 0
    decided: list[NodeStep] = []
    for node, step in pairs:
        if _is_on_hold(target, node, step):
            decided.append(_waiting(node, "Held", "the node has the annotation onload.amd.com/hold"))
        elif not step.starts or target.deleting:
            decided.append(step)
        elif not node.ready:
            decided.append(_waiting(node, "NodeNotReady", "the node is not ready"))
        elif free > 0:
            free -= 1
            decided.append(step)
        else:
            decided.append(_waiting(node, "Pending", _pending(target, failed=failed)))
    actions = tuple(step.action for step in decided if step.action is not None)
    retry = _retry(decided, deadlines, now)
    return Plan(steps=tuple(decided), actions=actions, overdue=overdue, unavailable=len(down), retry=retry)


class _Node:
    """Computes the step of one node without regard to limits."""

    def __init__(self, target: Target, node: NodeView, now: float) -> None:
        self.target = target
        self.node = node
        self.now = int(now)

    def step(self) -> NodeStep:
        node, target = self.node, self.target
        if target.deleting or not node.selected:
            return self._removal()
        if node.progress is not None and node.progress.target != target.version:
            action = self._patch("Pending", f"the change to {target.version} begins", progress=self._progress(new=True))
            return self._acting(action)
        if self._must_be_taken_down():
            return self._taking_down()
        return self._bringing_up()

    # Taking down

    def _sfc_differs(self) -> bool:
        node, target = self.node, self.target
        if node.sfc is not None:
            return not target.kmm or not target.sfc or node.sfc != target.version
        return target.kmm and target.sfc and node.module is not None

    def _module_differs(self) -> bool:
        return self.node.module is not None and (not self.target.kmm or self.node.module != self.target.version)

    def _must_be_taken_down(self) -> bool:
        node, target = self.node, self.target
        # A gate without the module's label: others removed it, so KMM unloads a module that may be in use.
        gate_differs = node.gate is not None and (node.gate != target.version or (target.kmm and node.module is None))
        return self._module_differs() or self._sfc_differs() or gate_differs

    def _taking_down(self) -> NodeStep:
        """The gate label, the plugin pod, the resource, applications, `onload`, and `sfc`, in this order."""
        node = self.node
        if node.gate is not None:
            return self._start("RemovingGate", "the device plugin stops", labels={"gate": None})
        if node.plugins:
            return self._waiting("WaitingForPluginPod", "the device plugin pod is being deleted")
        if self._may_be_assigned_pods() and (node.module is not None or node.apps):
            return self._waiting_for_status()
        if node.apps:
            return self._evicting()
        if node.module is not None:
            return self._unloading("the module onload is unloaded")
        if node.module_pods or node.module_loaded:
            step = self._waiting("WaitingForUnload", "the module onload is being unloaded")
            if self.target.kmm:
                return step
            # KMM may have been removed.
            if not self._waited(READY_WAIT):
                return msgspec.structs.replace(step, until=float(self._since() + READY_WAIT))
        action = self._patch("RemovingSfc", "the module sfc is unloaded", labels={"sfc": None}, unloads=True)
        return self._acting(msgspec.structs.replace(action, progress=self._progress(new=True)))

    def _may_be_assigned_pods(self) -> bool:
        """Whether the scheduler assigns pods that use Onload to the node although the device plugin has ended."""
        return self.node.ready and self.node.advertised and not self._waited(STATUS_WAIT)

    def _waiting_for_status(self) -> NodeStep:
        step = self._waiting("WaitingForNodeStatus", "the node still advertises amd.com/onload")
        return msgspec.structs.replace(step, until=float(self._since() + STATUS_WAIT))

    def _evicting(self) -> NodeStep:
        node = self.node
        names = ", ".join(str(each.key) for each in node.apps[:3])
        more = f" and {len(node.apps) - 3} more" if len(node.apps) > 3 else ""
        evict = tuple(each for each in node.apps if not each.is_terminating)
        message = f"evicts pods that use Onload: {names}{more}"
        action = Action(node=node.name, step="Evicting", message=message, evict=evict) if evict else None
        return NodeStep(
            node=node.name, step="Evicting", message=message, action=action, until=self.now + EVICTION_RETRY
        )

    def _unloading(self, message: str) -> NodeStep:
        action = self._patch("RemovingModule", message, labels={"module": None}, unloads=True)
        return self._acting(msgspec.structs.replace(action, progress=self._progress(new=True)))

    def _removal(self) -> NodeStep:
        """The node loses everything that belongs to the resource."""
        node, target = self.node, self.target
        if node.is_clean:
            return NodeStep(node=node.name, step="Removed")
        if target.deleting and not node.ready:
            # Nothing on this node can be observed or changed. Its pods must not prevent the deletion.
            everything: dict[Role, str | None] = {"module": None, "sfc": None, "gate": None}
            return self._acting(
                self._patch(
                    "RemovingSfc", "the node is not ready: removes its labels", labels=everything, removes_progress=True
                )
            )
        if node.gate is not None:
            return self._start("RemovingGate", "the device plugin stops", labels={"gate": None})
        if node.plugins:
            return self._waiting("WaitingForPluginPod", "the device plugin pod is being deleted")
        if self._may_be_assigned_pods() and node.module is not None:
            return self._waiting_for_status()
        if node.apps and (node.module is not None or node.sfc is not None):
            return self._evicting()
        if node.module is not None:
            return self._unloading("the module onload is unloaded")
        if node.sfc is not None and (node.module_pods or node.module_loaded):
            step = self._waiting("WaitingForUnload", "the module onload is being unloaded")
            if not (target.deleting and self._waited(READY_WAIT)):
                return msgspec.structs.replace(step, until=self._since() + READY_WAIT)
        labels: dict[Role, str | None] = {"sfc": None} if node.sfc is not None else {}
        action = self._patch("RemovingSfc", "the node is released", labels=labels, unloads=bool(labels))
        return self._acting(msgspec.structs.replace(action, progress=None, removes_progress=True))

    # Bringing up

    def _bringing_up(self) -> NodeStep:
        node, target = self.node, self.target
        skipped = False
        if target.kmm and target.sfc and node.sfc is None:
            if node.sfc_pods or node.sfc_loaded or node.module_pods or node.module_loaded:
                return self._waiting_for_unload()
            return self._label("LabellingSfc", "the module sfc is loaded", "sfc")
        if target.kmm and node.module is None:
            if node.module_pods or node.module_loaded:
                return self._waiting_for_unload()
            if target.sfc and not self._is_loaded(loaded=node.sfc_loaded, version=node.sfc_loaded_version):
                if not self._may_skip():
                    return self._waiting_for_module("WaitingForSfc", "sfc")
                skipped = True
            return self._label("LabellingModule", "the module onload is loaded", "module", skipped=skipped)
        if node.gate is None:
            if not target.kmm and node.has_kmm_modules and not self._waited(READY_WAIT):
                step = self._waiting("WaitingForModulePods", "the modules of KMM are being unloaded")
                return msgspec.structs.replace(step, until=float(self._since() + READY_WAIT))
            if node.plugins:
                return self._waiting("WaitingForPluginPod", "the former device plugin pod is being deleted")
            if target.kmm and not self._is_loaded(loaded=node.module_loaded, version=node.module_loaded_version):
                if not self._may_skip():
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
            action = Action(
                node=node.name, step="ReplacingPluginPod", message="the device plugin pod is replaced", delete=deleted
            )
            return self._acting(action)
        missing = self._unverified()
        if not missing:
            if node.progress is None:
                return NodeStep(node=node.name, step="Verified")
            if (until := self._ready_until()) > self.now:
                message = f"the device plugin pod has to be ready for {self.target.min_ready} s"
                return msgspec.structs.replace(self._waiting("Verifying", message), until=until)
            if self.target.probe and node.probe != "succeeded":
                return self._probing()
            action = self._patch("Verified", f"version {self.target.version} is verified", removes_progress=True)
            return self._acting(msgspec.structs.replace(action, progress=None))
        return self._waiting("Verifying", f"waits for {', '.join(missing)}")

    def _probing(self) -> NodeStep:
        """The probe pod has to succeed. The last step of the progress is its creation."""
        if self.node.probe == "none":
            action = self._patch("Verifying", "a probe pod is created", progress=self._progress())
            return self._acting(msgspec.structs.replace(action, create_probe=True))
        if self.node.probe != "failed":
            return self._waiting("Verifying", f"the probe pod is {self.node.probe}")
        if self._waited(PROBE_RETRY):
            message = "the probe pod failed, so it is created again"
            return self._acting(Action(node=self.node.name, step="Verifying", message=message, delete_probe=True))
        step = self._waiting("Verifying", "the probe pod failed; it is created again a minute after its creation")
        return msgspec.structs.replace(step, until=self._since() + PROBE_RETRY)

    def _ready_until(self) -> float:
        """When the plugin pod of an upgraded node has been ready for long enough. A failing one is ready repeatedly."""
        if self.node.progress is None or not self.node.progress.upgrade:
            return 0
        ready = (each.ready_since for each in self.node.plugins if each.is_ready and not each.is_terminating)
        return float(min(ready, default=0) + self.target.min_ready)

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

    def _may_skip(self) -> bool:
        return not self.target.strict and self._waited(READY_WAIT)

    def _since(self) -> int:
        """When the last step began. A node without progress was labelled by another program: that wait is over."""
        return self.node.progress.since if self.node.progress is not None else 0

    def _waited(self, seconds: float) -> bool:
        return self.now - self._since() >= seconds

    # Results

    def _progress(self, *, new: bool = False, upgrade: bool | None = None) -> Progress:
        """The progress after an action of now. With `new`, the time limit begins again."""
        known = self.node.progress
        works = known.upgrade if known is not None else _was_stopped(self.target, self.node)
        return Progress(
            target=self.target.version,
            started=self.now if new or known is None else known.started,
            since=self.now,
            upgrade=works if upgrade is None else upgrade,
            advertised=known.advertised if known is not None else self.node.advertised,
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
    ) -> Action:
        return Action(
            node=self.node.name,
            step=step,
            message=message,
            labels=labels or {},
            progress=progress,
            removes_progress=removes_progress,
            unloads=unloads,
        )

    def _start(self, step: StepName, message: str, *, labels: Mapping[Role, str | None]) -> NodeStep:
        """The first step of a node that may work now. A node whose change is under way has started already."""
        under_way = self.node.progress is not None and self.node.progress.upgrade
        action = self._patch(step, message, labels=labels, progress=self._progress(new=not under_way, upgrade=True))
        return NodeStep(node=self.node.name, step=step, message=message, action=action, starts=not under_way)

    def _label(self, step: StepName, message: str, role: Role, *, skipped: bool = False) -> NodeStep:
        action = self._patch(step, message, labels={role: self.target.version}, progress=self._progress())
        return NodeStep(node=self.node.name, step=step, message=message, action=action, skipped_wait=skipped)

    def _acting(self, action: Action) -> NodeStep:
        return NodeStep(node=self.node.name, step=action.step, message=action.message, action=action)

    def _waiting(self, step: StepName, message: str) -> NodeStep:
        return _waiting(self.node, step, message)

    def _waiting_for_module(self, step: StepName, module: str) -> NodeStep:
        found = _waiting(self.node, step, f"waits until KMM has loaded the module {module}")
        return found if self.target.strict else msgspec.structs.replace(found, until=float(self._since() + READY_WAIT))


def _waiting(node: NodeView, step: StepName, message: str) -> NodeStep:
    return NodeStep(node=node.name, step=step, message=message)


def _pending(target: Target, *, failed: bool) -> str:
    if failed:
        return "a node exceeded its time limit, so no other node starts"
    if target.paused:
        return "the upgrade is paused"
    return f"at most {target.max_unavailable} nodes are changed at the same time"


def _is_on_hold(target: Target, node: NodeView, step: NodeStep) -> bool:
    """Whether the annotation prevents that a change of the node begins. The installation on a new node is a change."""
    begins = step.starts or (step.action is not None and node.progress is None and not _was_stopped(target, node))
    return node.held and node.selected and begins and not target.deleting


def _is_taken_down(target: Target, node: NodeView, step: NodeStep) -> bool:
    """Whether the operator made the node unavailable. Without an annotation, the Go operator has started the change."""
    if step.starts or (step.step in {"Verified", "Removed"} and node.progress is None):
        return False
    return node.progress.upgrade if node.progress is not None else _was_stopped(target, node)


def _was_stopped(target: Target, node: NodeView) -> bool:
    """Whether a node without progress has modules of another version and no device plugin."""
    return target.kmm and node.gate is None and not {node.module, node.sfc} <= {None, target.version}


def _deadline(target: Target, node: NodeView, step: NodeStep) -> float:
    """When a node exceeds its time limit. A node that does not wait for anything of the operator has none."""
    progress = node.progress
    if progress is None or progress.target != target.version or step.starts or target.deleting:
        return math.inf
    if step.action is not None and step.action.removes_progress:
        return math.inf
    limit = target.node_timeout
    if step.step == "Evicting":
        limit = target.eviction_timeout or math.inf
    return progress.started + limit


def _retry(steps: Sequence[NodeStep], deadlines: Sequence[float], now: float) -> float:
    """The seconds until something happens without a change of the cluster; 0 for never."""
    # A limit is exceeded when it has passed.
    times = [*(step.until for step in steps if step.until), *(each + 1 for each in deadlines if each >= now)]
    following = min(times, default=math.inf)
    return max(0.1, following - now) if following < math.inf else 0.0
