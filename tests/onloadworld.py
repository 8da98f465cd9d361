"""A cluster with one Onload resource and its operator, for tests of rollouts with any order of events.

The model has KMM, which compares images and labels as KMM does, the kubelet and the DaemonSet controller. It knows
which images each node has loaded. The operator is its pure functions in the order of the reconciler. Invariants are
checked at each action and reaction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from onloadcluster import APP, Cluster, app_pod
from onloadresources import onload

from accelplane.onload.children import DesiredObjects, Existing
from accelplane.onload.decision import ClusterState, Decision, make_decision
from accelplane.onload.models import DevicePluginStatus, Onload, OnloadStatus, Revision, Status
from accelplane.onload.modules import KmmApi
from accelplane.onload.names import Names
from accelplane.onload.observed import NodeView
from accelplane.onload.plan import DONE, Action, NodeStep, Plan
from accelplane.onload.rollout import Rollout, first_mapping

NAMES, OTHER = Names("n", "onload"), Names("n", "other")
KERNELS = ("5.14", "6.1")
LIMIT = 300
BROKEN = "broken"
# More passes without a change than any step waits that ends by itself.
IDLE = 20

Role = Literal["module", "sfc"]
ROLES: tuple[Role, Role] = ("module", "sfc")


class Spec(NamedTuple):
    """The version, the builds of the images for kernels 5 and 6, a mapping that no node uses, and the userland.

    An empty build means that no mapping matches the kernel.
    """

    version: str = "8.1"
    five: str = "a"
    six: str = "a"
    appended: bool = False
    sfc: bool = False
    user: str = "u"

    def resource(self, *, limit: int, paused: bool, history: tuple[Revision, ...]) -> Onload:
        builds = {"5": self.five, "6": self.six, **({"7": "a"} if self.appended else {})}
        mappings = [
            {"regexp": f"^{kernel}", "kernelModuleImage": f"{self.version}-{kernel}-{build}"}
            | ({"sfc": {}} if self.sfc and kernel == "5" else {})
            for kernel, build in builds.items()
            if build
        ]
        fields = {
            "onload__version": self.version,
            "onload__userImage": self.user,
            "onload__kernelMappings": mappings,
            "upgrade__autoRollback": True,
            "upgrade__maxUnavailable": limit,
            "upgrade__paused": paused,
            "upgrade__nodeTimeout": f"{LIMIT}s",
        }
        status = Status(onload=OnloadStatus(history=history), device_plugin=DevicePluginStatus())
        return msgspec.structs.replace(onload(NAMES.name, NAMES.namespace, **fields), status=status)

    @property
    def is_correct(self) -> bool:
        return {self.five, self.six}.isdisjoint({BROKEN, ""})


class Loaded(NamedTuple):
    """What a node has loaded: the image, and the label with which KMM loaded it."""

    image: str
    label: str


class World(Cluster):
    """The cluster with the contents of nodes and Modules, and the state of one resource."""

    def __init__(self, count: int, limit: int) -> None:
        super().__init__([NodeView(name=f"n{index}", kernel=KERNELS[index % 2]) for index in range(count)])
        self.spec, self.limit, self.paused, self.is_senior = Spec(), limit, False, False
        self.now = 1e6
        self.history: tuple[Revision, ...] = ()
        self.existing = Existing(None, None, None)
        self.rollout: Rollout | None = None
        self.loaded: dict[tuple[str, Role], Loaded] = {}
        self.may_fail = False
        self.hanging: set[str] = set()
        self.lagging: dict[str, int] = {}
        self.lags = 0
        self.idle = 0

    # The operator

    def resource(self) -> Onload:
        return self.spec.resource(limit=self.limit, paused=self.paused, history=self.history)

    def state(self) -> ClusterState:
        seniority = [NAMES, OTHER] if self.is_senior else [OTHER, NAMES]
        nodes = [*self.nodes.values()]
        return ClusterState(kmm=KmmApi(in_tree_list=True), existing=self.existing, nodes=nodes, seniority=seniority)

    def decision(self) -> Decision:
        return make_decision(self.resource(), self.state(), "image", self.now, self.waits)

    def reconcile(self) -> Plan:
        decision = self.decision()
        self.rollout = rollout = decision.rollout
        self.write(decision.objects)
        self.user_image = rollout.target.user_image
        self.check_rollback(rollout)
        self.waits = decision.plan.waits
        self.may_fail = self.may_fail or BROKEN in {self.spec.five, self.spec.six}
        for action in decision.plan.actions:
            self.check_action(action, rollout)
            self.apply(action)
        self.history = decision.history(decision.plan, "now")
        assert self.may_fail or all(each.state != "Failed" for each in self.history), "failed by waiting alone"
        return decision.plan

    def write(self, made: DesiredObjects) -> None:
        """Writes the Modules. That of `sfc` is deleted when no node needs it."""
        keeps_sfc = made.sfc is None and any(node.sfc is not None for node in self.nodes.values())
        self.existing = Existing(made.module, self.existing.sfc if keeps_sfc else made.sfc, None)
        self.revision = made.revision

    def check_rollback(self, rollout: Rollout) -> None:
        known = {each.label for each in rollout.history}
        for node in self.nodes.values() if rollout.rolls_back else ():
            if node.selected and node.verified is not None and node.verified.label in known:
                label = rollout.others.get(node.name, rollout.target.label)
                assert label == node.verified.label, f"{node.name} does not return to what it was verified on"
                image = node.verified.user_image or rollout.target.user_image
                is_next = node.name not in rollout.others
                assert not is_next or image == rollout.target.user_image, f"{node.name} gets another userland"

    def wanted(self, name: str, rollout: Rollout) -> tuple[str, str]:
        """The images of `onload` and `sfc` that a node should have. Without `sfc`, the second one is empty."""
        label = rollout.others.get(name)
        revision = next((each for each in rollout.history if each.label == label), rollout.target)
        mapping = first_mapping(revision.kernel_mappings, self.nodes[name].kernel)
        image = mapping.kernel_module_image if mapping is not None else ""
        return image, image if mapping is not None and mapping.sfc is not None else ""

    def has(self, name: str) -> tuple[str, str]:
        main, sfc = (self.loaded.get((name, role), Loaded("", "")).image for role in ROLES)
        return main, sfc

    def check_action(self, action: Action, rollout: Rollout) -> None:
        node = self.nodes[action.node]
        works = node.selected and not node.others and node.module is not None
        healthy = works and node.progress is None and node.module == node.gate
        if (action.evict and works) or (action.labels.get("gate", "") is None and healthy):
            found = self.has(node.name)
            assert found != self.wanted(node.name, rollout), f"{node.name} is drained and has {found} already"
        if node.others and not node.selected:
            assert not action.evict, "pods of another resource are evicted"
        if node.others and node.is_clean:
            assert not any(action.labels.values()), "the node of another resource is labelled"

    # The reactions of the cluster

    def live_image(self, role: Role, label: str | None, kernel: str) -> str | None:
        """The image that KMM loads on nodes with a label: empty for none. None if KMM leaves the node as it is."""
        live: Any = self.existing.module if role == "module" else self.existing.sfc
        if live is None:
            return ""
        container = live.spec["moduleLoader"]["container"]
        if container["version"] != label:
            return None
        matching = (each for each in container["kernelMappings"] if re.search(each["regexp"], kernel))
        return next((each["containerImage"] for each in matching), "")

    def _load(self, name: str) -> None:
        for role in ROLES:
            node, loaded = self.nodes[name], self.loaded.get((name, role))
            label = getattr(node, role)
            image = self.live_image(role, label, node.kernel)
            if loaded is not None and (label != loaded.label or image not in {None, loaded.image}):
                if role == "sfc" and (name, "module") in self.loaded:
                    continue
                assert not node.apps or node.others, f"{name}: {loaded} is unloaded or reloaded under {node.apps}"
                del self.loaded[name, role]
                self.change(name, **{f"{role}_loaded": False, f"{role}_loaded_version": None})
            elif loaded is None and label is not None and image and not image.endswith(BROKEN):
                self.loaded[name, role] = Loaded(image, label)
                self.change(name, **{f"{role}_loaded": True, f"{role}_loaded_version": label})

    def _run_plugin(self, name: str) -> None:
        node = self.nodes[name]
        self.broken_versions = {label for label in (node.gate,) if label and (name, "module") not in self.loaded}
        super()._run_plugin(name)

    def _terminate(self, name: str) -> None:
        apps = self.nodes[name].apps
        super()._terminate(name)
        if name in self.hanging:
            self.change(name, apps=apps)

    def tick(self) -> bool:
        """A reconciliation and the reactions to it. Returns whether anything is left to do."""
        before = dict(self.nodes)
        plan = self.reconcile()
        for name in self.nodes:
            lag = self.lagging.get(name, 0)
            self.lagging[name] = lag - 1
            if lag <= 0:
                self.react(name)
        self.now += 5
        self.idle = self.idle + 1 if before == self.nodes else 0
        if self.idle > IDLE:
            for step in plan.steps:
                assert step.step in DONE or self.is_explained(step, plan), f"the reason has no name: {step}"
        return before != self.nodes or not plan.is_complete

    def is_explained(self, step: NodeStep, plan: Plan) -> bool:
        """Whether the message of a node that does not continue names something that really prevents it."""
        node = self.nodes[step.node]
        assert self.rollout is not None
        first = first_mapping(self.rollout.target.kernel_mappings, node.kernel)
        is_broken = first is None or first.kernel_module_image.endswith(BROKEN)
        others = [each for each in plan.steps if each.node != node.name and each.step not in DONE]
        causes: Mapping[str, object] = {
            "the upgrade is paused": self.paused,
            "onload.amd.com/hold": node.held,
            "cordoned": node.cordoned,
            "not ready": not node.ready,
            f"Onload {OTHER.namespace}/{OTHER.name} has the node": node.others,
            str(APP): node.apps and node.name in self.protected | self.hanging,
            "no entry of spec.onload.kernelMappings matches": first is None,
            "waits until KMM has loaded the module": is_broken,
            "a ready device plugin pod": is_broken,
            "a node exceeded its time limit": plan.overdue,
            "nodes are changed at the same time": others,
            "returns to version": others,
        }
        return any(text in step.message and holds for text, holds in causes.items())

    # Events

    def event(self, kind: str, value: Any) -> None:
        name = f"n{value % len(self.nodes)}" if isinstance(value, int) else ""
        node = self.nodes.get(name, NodeView(name=""))
        match kind:
            case "spec" | "senior" | "paused":
                attribute = "is_senior" if kind == "senior" else kind
                setattr(self, attribute, value or not getattr(self, attribute))
            case "clock":
                self.now += float(value)
            case "restart":
                self.waits = {}
            case "lag" if self.lags < 2:
                self.lags += 1
                self.lagging[name] = 3
            case "protect" | "hang":
                chosen = self.protected if kind == "protect" else self.hanging
                chosen ^= {name}
            case _:
                self.change_node(kind, node)
        self.idle = 0

    def change_node(self, kind: str, node: NodeView) -> None:
        name = node.name
        match kind:
            case "app" if node.advertised and len(node.apps) < 2:
                self.change(name, apps=(*node.apps, app_pod()))
            case "ready" | "held" | "cordoned" | "selected":
                self.may_fail = self.may_fail or kind == "ready"
                self.change(name, **{kind: not getattr(node, kind)})
            case "kernel" if node.ready:
                self.restart_with_other_kernel(name)
            case "unlabel" if not node.apps:
                self.change(name, module=None)
                self._load(name)  # KMM unloads at once. The operator cannot prevent that.
            case "ungate":
                self.change(name, gate=None)
            case "other":
                self.change(name, others=() if node.others else (OTHER,))
            case _:
                pass

    def restart_with_other_kernel(self, name: str) -> None:
        """The modules of a node whose label is not that of the Module are not loaded for another kernel."""
        for role in ROLES:
            self.loaded.pop((name, role), None)
        kernel = KERNELS[1 - KERNELS.index(self.nodes[name].kernel)]
        gone = {f"{role}_loaded": False for role in ROLES} | {f"{role}_loaded_version": None for role in ROLES}
        self.change(name, kernel=kernel, apps=(), plugins=(), advertised=False, **gone)

    def remove_obstacles(self) -> None:
        self.protected.clear()
        self.hanging.clear()
        self.paused = False
        for name in self.nodes:
            self.change(name, ready=True, held=False, cordoned=False, others=())
        if not self.spec.is_correct:
            self.spec = Spec(five="b", six="b")
        self.idle = 0
