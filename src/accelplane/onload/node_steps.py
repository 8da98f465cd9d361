"""The step of one node of an Onload resource, without regard to the other nodes. A pure function of what is observed.

Each node is in one step, which follows from its labels, its pods and the annotation with its progress:

    taken down      gate label removed -> plugin pod gone -> resource not advertised -> pods that use Onload evicted
                    -> label of `onload` removed -> `onload` unloaded -> label of `sfc` removed
    brought up      label of `sfc` -> `sfc` loaded -> label of `onload` -> `onload` loaded -> gate label
                    -> plugin pod ready, resource advertised, probe succeeded -> verified

A node is taken down if a label has another version, if `sfc` is added or removed, because `onload` uses it, or if KMM
does not manage the modules any more. A node that keeps its label (`Target.keeps`) has that label as version. A plugin
pod of another revision is replaced while the modules stay. Nodes that are not selected any more, and all nodes of a
deleted resource, are taken down and not brought up.

A step that waits has a `Wait`, whose time limit counts observed waiting (`waits`). One that writes labels or replaces
pods has none, so it has no time limit.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from accelplane.onload.observed import NodeView, PodView, Progress
from accelplane.onload.plan import Action, NodeStep, Problem, Role, StepName, Target, Wait

# Seconds for which a node may not report a loaded module before the next step, unless verification is strict.
READY_WAIT = 30
# Seconds for which a node may still advertise the resource after the removal of the gate. A kubelet updates the status
# every 10 s. Until then the scheduler assigns pods to the node, and the kubelet rejects them.
STATUS_WAIT = 30
# Pods and nodes are watched. This interval is for pods whose eviction was rejected.
EVICTION_RETRY = 5.0
# Seconds after which pods that are being deleted are a problem.
TERMINATING_WAIT = 120.0
# A probe pod is created again this many seconds after it was observed that it failed.
PROBE_RETRY = 60.0

_KMM_STEPS = frozenset[StepName]({"WaitingForUnload", "WaitingForModulePods", "WaitingForSfc", "WaitingForModule"})


class NodeSteps:
    """Computes the step of one node without regard to the other nodes."""

    def __init__(self, target: Target, node: NodeView, now: float, waited: Mapping[str, float]) -> None:
        self.node = node
        self.now = now
        self.waited = waited
        self.kept = target.keeps.get(node.name)
        if self.kept is not None and (node.module_loaded or not self._waited("WaitingForModule", target.node_timeout)):
            target = msgspec.structs.replace(target, version=self.kept)
        self.target = target
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
        return blocked(node, "Pending", f"returns to version {label} after nodes that return to {self.target.version}")

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
        if node.probe == "terminating" or (node.probe == "running" and node.module is not None):
            return self._ending_probe()
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
        static = tuple(each for each in node.apps if each.is_static)
        evict = tuple(each for each in node.apps if not each.is_terminating and not each.is_static)
        problem = None
        if evict:
            message = f"evicts pods that use Onload: {_listed(evict)}"
        elif static:
            message = f"static pods use Onload: {_listed(static)}; remove their manifests from the node"
            problem = Problem("StaticPods", message)
        else:
            message = f"waits for the end of pods that use Onload and are being deleted: {_listed(node.apps)}"
            if self._waited("Evicting", TERMINATING_WAIT):
                problem = Problem("PodsTerminating", f"{message}; correct what prevents their end")
        action = Action(node=node.name, step="Evicting", message=message, evict=evict) if evict else None
        wait = Wait(
            self._limit(self.target.eviction_timeout or math.inf), EVICTION_RETRY if evict else TERMINATING_WAIT
        )
        return NodeStep(node=node.name, step="Evicting", message=message, action=action, wait=wait, problem=problem)

    def _ending_probe(self) -> NodeStep:
        """The probe pod uses the modules. It is deleted, not evicted."""
        message = "the probe pod is being deleted"
        step = self._waiting("WaitingForProbePod", message)
        if self.node.probe == "terminating":
            return step
        action = Action(node=self.node.name, step="WaitingForProbePod", message=message, delete_probe=True)
        return msgspec.structs.replace(step, action=action, wait=None)

    def _removal(self) -> NodeStep:
        """The node loses everything that belongs to the resource."""
        node, target = self.node, self.target
        if node.is_clean:
            return NodeStep(node=node.name, step="Removed")
        if not target.deleting and not node.ready:
            message = "the node is not selected and not ready: it is released when it is ready"
            return blocked(node, "NotReachable", message)
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
        return self._starting_plugin() if node.gate is None else self._running()

    def _starting_plugin(self) -> NodeStep:
        node, target, skipped = self.node, self.target, False
        if not target.kmm and node.has_kmm_modules and not self._waited("WaitingForModulePods", READY_WAIT):
            message = "the modules of KMM are being unloaded"
            return self._waiting("WaitingForModulePods", message, within=READY_WAIT)
        if node.plugins:
            return self._waiting("WaitingForPluginPod", "the former device plugin pod is being deleted")
        if target.kmm and node.apps and node.module_loaded_version not in {None, target.version}:
            return self._waiting_for_unload()
        if target.kmm and not self._is_loaded(loaded=node.module_loaded, version=node.module_loaded_version):
            if not self._may_skip("WaitingForModule"):
                return self._waiting_for_module("WaitingForModule", "onload")
            skipped = True
        return self._label("SettingGate", "the device plugin starts", "gate", skipped=skipped)

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
        if self.kept is not None and not node.module_loaded:
            # KMM loads it after a restart of the node, but not for another kernel than before.
            message = f"waits until KMM has loaded the module onload of version {self.kept}"
            return self._waiting("WaitingForModule", message, within=self.target.node_timeout)
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
            users = f", used by {_listed(node.apps)}" if node.apps else ""
            found.append(f"module version {target.version}, found {node.module_loaded_version}{users}")
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
        problem = None
        if self.node.failed_module_pods and step in _KMM_STEPS:
            message += f"; pods of KMM failed: {', '.join(self.node.failed_module_pods[:3])}"
            problem = Problem("ModulePodsFailed", f"{message}; see their logs")
        wait = Wait(self._limit(self.target.node_timeout), min(retry, within - self.waited.get(step, 0.0)))
        return NodeStep(node=self.node.name, step=step, message=message, wait=wait, problem=problem)

    def _waiting_for_module(self, step: StepName, module: str) -> NodeStep:
        within = math.inf if self.target.strict else READY_WAIT
        return self._waiting(step, f"waits until KMM has loaded the module {module}", within=within)

    # Acting

    def _progress(self, *, upgrade: bool | None = None) -> Progress:
        """The progress after an action. The time of its start is added when it is written."""
        known = self.node.progress
        works = known.upgrade if known is not None else was_stopped(self.target, self.node)
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


def was_stopped(target: Target, node: NodeView) -> bool:
    """Whether a node without progress has modules of another version and no device plugin."""
    return target.kmm and node.gate is None and not {node.module, node.sfc} <= {None, target.version}


def blocked(node: NodeView, step: StepName, message: str) -> NodeStep:
    return NodeStep(node=node.name, step=step, message=message)


def _listed(pods: Sequence[PodView]) -> str:
    more = f" and {len(pods) - 3} more" if len(pods) > 3 else ""
    return f"{', '.join(str(each.key) for each in pods[:3])}{more}"
