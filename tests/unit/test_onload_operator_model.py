"""Rollouts on a model of a cluster that knows what each node has loaded, with any order of events.

The model has KMM, which compares the images of a version as KMM does, the kubelet and the DaemonSet controller. The
operator is its pure functions in the order of the reconciler.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onloadcluster import Cluster, app_pod
from onloadresources import onload

from accelplane.onload.children import Existing
from accelplane.onload.models import DevicePluginStatus, Onload, OnloadStatus, Revision, Status
from accelplane.onload.modules import KmmApi, module
from accelplane.onload.names import Names
from accelplane.onload.observed import NodeView
from accelplane.onload.obstacles import find_obstacles
from accelplane.onload.plan import DONE, Action, Plan, Target
from accelplane.onload.rollout import Outcome, Rollout, first_mapping, known_history, plan_rollout, record_outcome

NAMES, OTHER = Names("n", "onload"), Names("n", "other")
KERNEL, LIMIT = "5.14", 300.0
BROKEN = "8.2-broken"


def spec(version: str, build: str, *, appended: bool) -> Onload:
    mappings = [{"regexp": "^5", "kernelModuleImage": f"{version}-{build}"}]
    mappings += [{"regexp": "^6", "kernelModuleImage": "six"}] if appended else []
    return onload(onload__version=version, onload__kernelMappings=mappings, upgrade__autoRollback=True)


class World(Cluster):
    """The cluster with the contents of nodes and Modules, and the state of one resource."""

    def __init__(self, count: int, limit: int) -> None:
        super().__init__([NodeView(name=f"n{index}", kernel=KERNEL) for index in range(count)])
        self.spec = spec("8.1", "a", appended=False)
        self.limit, self.paused, self.is_senior = limit, False, False
        self.now = 1e6
        self.history: tuple[Revision, ...] = ()
        self.live = self.module_of(self.rollout())
        self.contents: dict[str, str] = {}
        self.may_fail = False
        self.lagging: dict[str, int] = {}
        self.lags = 0

    def rollout(self) -> Rollout:
        status = Status(onload=OnloadStatus(history=self.history), device_plugin=DevicePluginStatus())
        resource = msgspec.structs.replace(self.spec, status=status)
        existing, nodes = Existing(getattr(self, "live", None), None, None), [*self.nodes.values()]
        return plan_rollout(resource, known_history(resource, existing, nodes), nodes)

    def module_of(self, rollout: Rollout) -> Any:
        mappings = msgspec.to_builtins(rollout.target.kernel_mappings)
        fields = {"onload__version": rollout.target.version, "onload__kernelMappings": mappings}
        return module(onload(**fields), rollout.target.label, KmmApi())

    def live_image(self, label: str | None) -> str | None:
        """The image that KMM loads on nodes with a label now."""
        container: Any = self.live.spec["moduleLoader"]["container"]  # type: ignore[index]
        return container["kernelMappings"][0]["containerImage"] if container["version"] == label else None

    def reconcile(self) -> Plan:
        rollout, nodes = self.rollout(), [*self.nodes.values()]
        self.live = self.module_of(rollout)
        seniority = [NAMES, OTHER] if self.is_senior else [OTHER, NAMES]
        target = Target(
            version=rollout.target.label,
            revision="r",
            max_unavailable=self.limit,
            paused=self.paused,
            node_timeout=LIMIT,
            rolls_back=rollout.rolls_back,
            others=rollout.others,
            obstacles=find_obstacles(NAMES, rollout.target, nodes, seniority=seniority, reachable=None),
        )
        known = {each.label for each in rollout.history}
        for node in nodes if rollout.rolls_back else ():
            if node.selected and node.verified is not None and node.verified.label in known:
                label = rollout.others.get(node.name, rollout.target.label)
                assert label == node.verified.label, f"{node.name} does not return to what it was verified on"
        plan = self.decide(target)
        mapping = first_mapping(rollout.target.kernel_mappings, KERNEL)
        assert mapping is not None
        self.may_fail = self.may_fail or mapping.kernel_module_image == BROKEN
        for action in plan.actions:
            self.check_drain(action, mapping.kernel_module_image)
            self.apply(action)
        failed = any(
            node.selected and node.progress is not None and node.progress.upgrade
            for node in nodes
            if node.name in {step.node for step in plan.overdue}
        )
        done = plan.is_complete and any(step.step == "Verified" for step in plan.steps)
        outcome: Outcome = "failed" if failed else "complete" if done else "progressing"
        self.history = record_outcome(rollout, outcome, "now")
        assert self.may_fail or all(each.state != "Failed" for each in self.history), "failed by waiting alone"
        for step in plan.steps:
            assert step.step in DONE or step.message, "the reason has no name"
        return plan

    def check_drain(self, action: Action, image: str) -> None:
        node = self.nodes[action.node]
        healthy = node.progress is None and node.selected and node.module == node.gate is not None
        if action.labels.get("gate", "") is None and healthy:
            assert self.contents.get(node.name) != image, f"{node.name} is drained and has {image} already"
        if node.others and not node.selected:
            assert not action.evict, "pods of another resource are evicted"
        if node.others and node.is_clean:
            assert not any(action.labels.values()), "the node of another resource is labelled"

    def _load(self, name: str) -> None:
        node = self.nodes[name]
        image, loaded = self.live_image(node.module), self.contents.get(name)
        if loaded is not None and (node.module is None or (image is not None and image != loaded)):
            assert not node.apps or node.others, f"{name}: {loaded} is unloaded or reloaded under {node.apps}"
            del self.contents[name]
            self.change(name, module_loaded=False, module_loaded_version=None)
        elif loaded is None and image is not None and image != BROKEN:
            self.contents[name] = image
            self.change(name, module_loaded=True, module_loaded_version=node.module)

    def _run_plugin(self, name: str) -> None:
        node = self.nodes[name]
        self.broken_versions = {label for label in (node.gate,) if label and name not in self.contents}
        super()._run_plugin(name)

    def tick(self) -> bool:
        """A reconciliation and the reactions to it. Returns whether anything moves."""
        plan = self.reconcile()
        changed = [self.react_with_lag(name) for name in self.nodes]
        self.now += 5
        acts = any(action.patches or action.delete or action.evict for action in plan.actions)
        return acts or any(changed) or not plan.is_complete

    def react_with_lag(self, name: str) -> bool:
        lag = self.lagging.get(name, 0)
        self.lagging[name] = lag - 1
        return lag > 0 or self.react(name)

    def event(self, kind: str, value: Any) -> None:
        name = f"n{value % len(self.nodes)}" if isinstance(value, int) else ""
        node = self.nodes.get(name, NodeView(name=""))
        match kind:
            case "spec":
                self.spec = spec(*value[:2], appended=value[2])
            case "clock":
                self.now += float(value)
            case "restart":
                self.waits = {}
            case "app" if node.advertised and len(node.apps) < 2:
                self.change(name, apps=(*node.apps, app_pod()))
            case "lag" if self.lags < 2:
                self.lags += 1
                self.lagging[name] = 3
            case "protect":
                self.protected ^= {name}
            case "ready" | "held" | "cordoned" | "selected":
                self.may_fail = self.may_fail or kind == "ready"
                self.change(name, **{kind: not getattr(node, kind)})
            case "unlabel" if not node.apps:
                self.change(name, module=None)
                self._load(name)  # KMM unloads at once. The operator cannot prevent that.
            case "other":
                self.change(name, others=() if node.others else (OTHER,))
            case "senior" | "paused":
                attribute = "is_senior" if kind == "senior" else kind
                setattr(self, attribute, not getattr(self, attribute))
            case _:
                pass


# A mapping that no node uses can give two labels to content that is the same for the nodes: only an example has one.
SPECS = st.sampled_from([("8.1", "a", False), ("8.1", "b", False), ("8.2", "a", False), ("8.2", "broken", False)])
NODE = st.integers(0, 2)
EVENTS = st.one_of(
    st.tuples(st.just("tick"), st.integers(1, 12)),
    st.tuples(st.just("tick"), st.integers(1, 12)),
    st.tuples(st.just("spec"), SPECS),
    st.tuples(st.just("spec"), SPECS),
    st.tuples(st.just("clock"), st.sampled_from([20.0, 3600.0, -3600.0])),
    st.tuples(st.sampled_from(["restart", "senior", "paused"]), st.none()),
    st.tuples(
        st.sampled_from(["app", "app", "protect", "ready", "held", "cordoned", "selected", "unlabel", "other", "lag"]),
        NODE,
    ),
)


SECOND, OTHER_BUILD, BACK = ("spec", ("8.2", "a", False)), ("spec", ("8.1", "b", False)), ("spec", ("8.1", "a", False))
FAILS = ("spec", ("8.2", "broken", False))
REINSTALLED = [("app", 1), ("protect", 1), SECOND, ("tick", 4), OTHER_BUILD, ("tick", 12)]
REVERTED = [("app", 0), ("protect", 0), OTHER_BUILD, ("tick", 4), BACK, ("tick", 12)]
APPENDED = [("spec", ("8.1", "a", True)), ("tick", 4), ("app", 0), ("protect", 0), OTHER_BUILD, ("tick", 4), BACK]
LONG_EVICTION = [("app", 0), ("protect", 0), SECOND, ("tick", 90), ("protect", 0), ("tick", 12)]
CLOCK = [SECOND, ("tick", 1), ("lag", 0), ("tick", 2), ("clock", 3600.0), ("tick", 2)]
HELD = [("held", 1), OTHER_BUILD, ("tick", 20), FAILS, ("tick", 90)]
SHARED = [("selected", 0), ("tick", 12), ("other", 0), ("selected", 0), ("tick", 3)]
RELEASED = [("app", 0), ("other", 0), ("selected", 0), ("tick", 9)]


@pytest.mark.untraced
@example(events=REINSTALLED, count=2, limit=1)
@example(events=REVERTED, count=2, limit=1)
@example(events=APPENDED, count=2, limit=1)
@example(events=LONG_EVICTION, count=1, limit=1)
@example(events=CLOCK, count=1, limit=1)
@example(events=HELD, count=2, limit=1)
@example(events=SHARED, count=2, limit=1)
@example(events=RELEASED, count=2, limit=1)
@settings(deadline=None, max_examples=60)
@given(events=st.lists(EVENTS, max_size=40), count=st.integers(1, 3), limit=st.integers(1, 2))
def test_any_order_of_events_keeps_applications_running_and_ends_in_the_desired_state(
    events: list[tuple[str, Any]], count: int, limit: int
) -> None:
    world = World(count, limit)
    for _ in range(12):
        world.tick()
    for kind, value in events:
        if kind == "tick":
            for _ in range(value):
                world.tick()
        else:
            world.event(kind, value)
        assert world.most_down <= limit
    world.protected.clear()
    world.paused = False
    for name in world.nodes:
        world.change(name, ready=True, held=False, cordoned=False, others=())
    if world.spec.spec.onload.kernel_mappings[0].kernel_module_image == BROKEN:
        world.spec = spec("8.1", "b", appended=False)
    passes = 0
    while world.tick():
        passes += 1
        assert passes < 300, [(each.node, each.step, each.message) for each in world.reconcile().steps]
    image = world.spec.spec.onload.kernel_mappings[0].kernel_module_image
    for name, node in world.nodes.items():
        if not node.selected:
            assert node.is_clean
        elif not world.rollout().rolls_back:
            assert (world.contents[name], node.module, node.progress) == (image, node.gate, None)
