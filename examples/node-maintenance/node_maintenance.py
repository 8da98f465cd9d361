"""An example controller: drains the nodes that a NodeMaintenance selects, one at a time, and runs a script on each.

The script runs in the pod of an owned DaemonSet, from an owned ConfigMap. A node is done when that pod is ready; then
it is schedulable again. All progress is recorded on the nodes, so the controller can be restarted at any time.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from lightkube.models import core_v1 as core
from lightkube.models.apps_v1 import DaemonSetSpec
from lightkube.models.meta_v1 import LabelSelector, ObjectMeta
from lightkube.resources.apps_v1 import DaemonSet
from lightkube.resources.core_v1 import ConfigMap, PodEviction
from msgspec import Struct, field, to_builtins

from accelplane.apiserver.errors import NotFound, TooManyRequests
from accelplane.kube.client import Client, Selection, load_config
from accelplane.kube.conditions import Condition, condition, with_transition_times
from accelplane.kube.controller import Result
from accelplane.kube.ensure import NameConflict, ensure
from accelplane.kube.finalizers import add_finalizer, remove_finalizer
from accelplane.kube.leader import Election
from accelplane.kube.manager import Manager
from accelplane.kube.objects import ApiInfo, GlobalResource, Metadata, NamespacedResource, Request, api, request_of
from accelplane.kube.owners import controller_of
from accelplane.kube.predicates import any_of, field_changed, generation_changed, labels_changed
from accelplane.kube.status import apply_status

GROUP = "maintenance.example.com"
FINALIZER = f"{GROUP}/nodes"
# Label of the node that is drained now: the UID of its NodeMaintenance. It selects the node for the DaemonSet, too.
ACTIVE = f"{GROUP}/active"
# Prefix of the annotation of a finished node. The name is the UID, the value is the generation.
DONE = f"done.{GROUP}/"
# Label of owned objects and their pods: the UID. Annotation of the pods: the generation.
MANAGED = f"{GROUP}/managed"
REVISION = f"{GROUP}/generation"
EVICTION_RETRY = 5.0


class MaintenanceSpec(Struct, rename="camel"):
    node_selector: dict[str, str]
    image: str
    script: str


class MaintenanceStatus(Struct, rename="camel", omit_defaults=True):
    """The status. Fields with their defaults are not written."""

    observed_generation: int = 0
    nodes: int | None = None
    nodes_done: int | None = None
    active_node: str = ""
    conditions: tuple[Condition, ...] = ()


class NodeMaintenance(NamespacedResource, Struct):
    metadata: Metadata
    spec: MaintenanceSpec
    status: MaintenanceStatus = field(default_factory=MaintenanceStatus)
    _api_info: ClassVar[ApiInfo] = api(GROUP, "v1", "NodeMaintenance", "nodemaintenances")


class NodeSpec(Struct):
    unschedulable: bool = False


class Node(GlobalResource, Struct):
    """The fields of a Node that this controller reads."""

    metadata: Metadata
    spec: NodeSpec = field(default_factory=NodeSpec)
    _api_info: ClassVar[ApiInfo] = api("", "v1", "Node", "nodes")


class PodPlace(Struct, rename="camel"):
    node_name: str = ""


class PodStatus(Struct):
    phase: str = ""
    conditions: list[dict[str, object]] = []


class Pod(NamespacedResource, Struct):
    """The fields of a Pod that this controller reads."""

    metadata: Metadata
    spec: PodPlace = field(default_factory=PodPlace)
    status: PodStatus = field(default_factory=PodStatus)
    _api_info: ClassVar[ApiInfo] = api("", "v1", "Pod", "pods")


class Step(Struct, frozen=True):
    """The next action, its node, and the pods to evict."""

    action: Literal["cordon", "evict", "wait", "uncordon", "none"]
    node: Node | None = None
    evict: Sequence[Pod] = ()
    message: str = ""


def next_step(plan: NodeMaintenance, nodes: Sequence[Node], pods: Sequence[Pod]) -> Step:
    """Decides from the selected nodes and all pods. It requests nothing, so its test is a table."""
    active = next((node for node in nodes if (node.metadata.labels or {}).get(ACTIVE) == plan.metadata.uid), None)
    if active is None:
        waiting = [node for node in nodes if not is_done(plan, node)]
        free = [node for node in waiting if not node.spec.unschedulable and ACTIVE not in (node.metadata.labels or {})]
        if free:
            return Step("cordon", free[0], message=f"drains node {free[0].metadata.name}")
        return Step("none", message=f"{len(waiting)} nodes are unschedulable or in maintenance" if waiting else "")
    name = active.metadata.name or ""
    here = [pod for pod in pods if pod.spec.node_name == name]
    if evict := [pod for pod in here if must_leave(pod)]:
        return Step("evict", active, evict, f"node {name}: {len(evict)} pods must leave")
    if any(is_ready(plan, pod) for pod in here):
        return Step("uncordon", active, message=f"node {name}: done")
    return Step("wait", active, message=f"node {name}: the script runs")


def is_done(plan: NodeMaintenance, node: Node) -> bool:
    done = (node.metadata.annotations or {}).get(f"{DONE}{plan.metadata.uid}")
    return done == str(plan.metadata.generation)


def must_leave(pod: Pod) -> bool:
    """Whether a drain evicts a pod: not pods of DaemonSets, static pods and finished pods."""
    owner = controller_of(pod)
    static = "kubernetes.io/config.mirror" in (pod.metadata.annotations or {})
    return not (static or pod.status.phase in {"Succeeded", "Failed"} or (owner and owner.kind == "DaemonSet"))


def is_ready(plan: NodeMaintenance, pod: Pod) -> bool:
    """Whether this is the pod that runs the current script, and the script has succeeded."""
    labels, annotations = pod.metadata.labels or {}, pod.metadata.annotations or {}
    is_current = labels.get(MANAGED) == plan.metadata.uid and annotations.get(REVISION) == str(plan.metadata.generation)
    return is_current and any(
        each.get("type") == "Ready" and each.get("status") == "True" for each in pod.status.conditions
    )


def config_map(plan: NodeMaintenance) -> ConfigMap:
    return ConfigMap(metadata=child_metadata(plan), data={"run.sh": plan.spec.script})


def daemon_set(plan: NodeMaintenance) -> DaemonSet:
    """Runs the script on the active node. A change of the script replaces the pod, because the annotation changes."""
    uid = plan.metadata.uid or ""
    command = ["sh", "-c", "sh /maintenance/run.sh && touch /tmp/done && exec sleep infinity"]
    probe = core.Probe(exec=core.ExecAction(command=["test", "-e", "/tmp/done"]), periodSeconds=2)  # noqa: S108 - in its container
    container = core.Container(
        name="maintenance", image=plan.spec.image, command=command, readinessProbe=probe,
        volumeMounts=[core.VolumeMount(name="script", mountPath="/maintenance")],
    )  # fmt: skip
    volume = core.Volume(name="script", configMap=core.ConfigMapVolumeSource(name=plan.metadata.name))
    labels = ObjectMeta(labels={MANAGED: uid}, annotations={REVISION: str(plan.metadata.generation)})
    pod = core.PodSpec(
        containers=[container], volumes=[volume], nodeSelector={ACTIVE: uid}, terminationGracePeriodSeconds=1
    )
    template = core.PodTemplateSpec(metadata=labels, spec=pod)
    spec = DaemonSetSpec(selector=LabelSelector(matchLabels={MANAGED: uid}), template=template)
    return DaemonSet(metadata=child_metadata(plan), spec=spec)


def child_metadata(plan: NodeMaintenance) -> ObjectMeta:
    return ObjectMeta(
        name=plan.metadata.name, namespace=plan.metadata.namespace, labels={MANAGED: plan.metadata.uid or ""}
    )


class Reconciler:
    """The controller of NodeMaintenances. Its caches and its registration are in one place."""

    def __init__(self, manager: Manager) -> None:
        self.client = manager.client
        self.events = manager.events
        self.plans = manager.cache(NodeMaintenance)
        self.nodes = manager.cache(Node)
        self.pods = manager.cache(Pod)
        self.configs = manager.cache(ConfigMap, Selection(labels=MANAGED))
        self.sets = manager.cache(DaemonSet, Selection(labels=MANAGED))
        schedulable = field_changed(lambda node: node.spec.unschedulable)
        (
            manager.controller("nodemaintenance", self.reconcile)
            .for_object(self.plans, predicate=generation_changed)
            .owns(self.configs, NodeMaintenance)
            .owns(self.sets, NodeMaintenance)
            # A heartbeat of a node changes neither.
            .watches(self.nodes, lambda _node: self.plans.requests(), predicate=any_of(labels_changed, schedulable))
            .watches(self.pods, self.plans_of_pod)
        )

    def plans_of_pod(self, pod: Pod) -> Iterable[Request]:
        """The NodeMaintenance for whose node a pod matters."""
        node = self.nodes.get(Request(pod.spec.node_name))
        uid = (node.metadata.labels or {}).get(ACTIVE) if node else None
        return [request_of(plan) for plan in self.plans if uid and plan.metadata.uid == uid]

    async def reconcile(self, request: Request) -> Result | None:
        plan = self.plans.get(request)
        if plan is None:
            return None
        if plan.metadata.deletionTimestamp:
            await self.release(plan)
            await remove_finalizer(self.client, plan, FINALIZER)
            return None
        await add_finalizer(self.client, plan, FINALIZER)
        try:
            await ensure(self.client, config_map(plan), plan, existing=self.configs.get(request))
            await ensure(self.client, daemon_set(plan), plan, existing=self.sets.get(request))
        except NameConflict as error:
            await self.write_status(plan, Step("none", message=str(error)), reason="NameConflict")
            return Result(requeue_after=60)
        step = next_step(plan, self.selected(plan), list(self.pods))
        retry = await self.perform(plan, step)
        await self.write_status(plan, step)
        return retry

    def selected(self, plan: NodeMaintenance) -> list[Node]:
        desired = plan.spec.node_selector.items()
        found = [node for node in self.nodes if desired <= (node.metadata.labels or {}).items()]
        return sorted(found, key=lambda node: node.metadata.name or "")

    async def perform(self, plan: NodeMaintenance, step: Step) -> Result | None:
        if step.action == "cordon" and step.node:
            self.events.record(plan, "Normal", "Draining", step.message)
            await self.patch(step.node, {"labels": {ACTIVE: plan.metadata.uid}}, unschedulable=True)
        elif step.action == "uncordon" and step.node:
            done = {f"{DONE}{plan.metadata.uid}": str(plan.metadata.generation)}
            await self.patch(step.node, {"labels": {ACTIVE: None}, "annotations": done}, unschedulable=None)
        for pod in step.evict:
            metadata = ObjectMeta(name=pod.metadata.name, namespace=pod.metadata.namespace)
            try:
                await self.client.create(PodEviction(metadata=metadata))
            except NotFound:  # the cache is behind
                continue
            except TooManyRequests as error:  # a PodDisruptionBudget does not allow it now
                return Result(requeue_after=max(EVICTION_RETRY, error.retry_after))
        return None

    async def release(self, plan: NodeMaintenance) -> None:
        """Removes all that a deleted NodeMaintenance has written to nodes."""
        done = f"{DONE}{plan.metadata.uid}"
        for node in self.nodes:
            if (node.metadata.labels or {}).get(ACTIVE) == plan.metadata.uid:
                await self.patch(node, {"labels": {ACTIVE: None}, "annotations": {done: None}}, unschedulable=None)
            elif done in (node.metadata.annotations or {}):
                await self.patch(node, {"annotations": {done: None}})

    async def patch(self, node: Node, metadata: dict[str, object], **spec: bool | None) -> None:
        """Changes a node. Raises `Conflict` if it has changed since the decision."""
        change = {"metadata": {"resourceVersion": node.metadata.resourceVersion, **metadata}, "spec": spec}
        await self.client.patch(Node, node.metadata.name or "", change)

    async def write_status(self, plan: NodeMaintenance, step: Step, reason: str = "") -> None:
        nodes, generation = self.selected(plan), plan.metadata.generation or 0
        complete = step.action == "none" and not step.message
        reason = reason or ("AllNodesDone" if complete else "InProgress")
        new = condition("Complete", complete, reason, step.message, generation=generation)
        status = MaintenanceStatus(
            observed_generation=generation,
            nodes=len(nodes),
            nodes_done=sum(is_done(plan, node) for node in nodes),
            active_node=(step.node.metadata.name or "") if step.node and step.action != "uncordon" else "",
            conditions=with_transition_times(plan.status.conditions, [new]),
        )
        await apply_status(self.client, plan, status, to_builtins(plan.status))


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    client = Client(load_config(), field_manager="node-maintenance")
    manager = Manager(client, election=Election.of(f"node-maintenance.{GROUP}", client.namespace))
    Reconciler(manager)
    asyncio.run(manager.run())


if __name__ == "__main__":
    main()
