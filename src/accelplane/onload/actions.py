"""Performs the actions of a plan, and reports them as log lines and Events."""

import logging
from collections.abc import Sequence

from accelplane.apiserver import ApiError
from accelplane.kube.customresource import CustomResource
from accelplane.kube.events import Recorder
from accelplane.onload.models import Onload
from accelplane.onload.names import Names
from accelplane.onload.nodes import Nodes
from accelplane.onload.observed import BlockedEviction, NodeView
from accelplane.onload.plan import Action, Plan
from accelplane.onload.resources import owner_of

log = logging.getLogger(__name__)

# The status and other resources wait until a pass ends: with many new nodes, it ends early, and another one follows.
_MAX_PER_PASS = 50
_PROBE_ENDS = ("Pending", "RemovingGate", "ReplacingPluginPod")


class Actions:
    """The actions on nodes, for all resources."""

    def __init__(self, nodes: Nodes, events: Recorder) -> None:
        self._nodes = nodes
        self._events = events

    async def perform(
        self,
        names: Names,
        plan: Plan,
        views: Sequence[NodeView],
        resource: CustomResource | None,
        onload: Onload | None = None,
    ) -> tuple[tuple[BlockedEviction, ...], ApiError | None]:
        """Performs actions: an error of one node does not affect the others.

        Returns the pods whose eviction a PodDisruptionBudget does not allow now, and the first error. The resource is
        None if it was deleted; `onload` is only needed for probe pods.
        """
        by_name = {each.name: each for each in views}
        blocked: list[BlockedEviction] = []
        failure: ApiError | None = None
        performed = 0
        for action in plan.actions:
            if performed == _MAX_PER_PASS:
                break
            node = by_name[action.node]
            try:
                blocked += await self._perform(names, action, node, resource, onload)
            except ApiError as error:
                log.debug("node %s: %s: %s", action.node, action.step, error)
                failure = failure or error
                continue
            performed += 1
            self._report(action, node, resource)
        return tuple(blocked), failure

    async def _perform(
        self, names: Names, action: Action, node: NodeView, resource: CustomResource | None, onload: Onload | None
    ) -> Sequence[BlockedEviction]:
        ends = action.removes_progress or action.step in _PROBE_ENDS
        if action.delete_probe or (node.probe != "none" and ends):
            await self._nodes.delete_probe(names, action.node)
        if action.create_probe and resource is not None and onload is not None:
            await self._nodes.create_probe(onload, owner_of(resource), action.node)
        if action.patches:
            await self._nodes.patch(names, action, node.version)
        await self._nodes.delete(action.delete)
        return await self._nodes.evict(action.evict)

    def _report(self, action: Action, node: NodeView, resource: CustomResource | None) -> None:
        """Steps of an upgrade and evictions are Events. The first steps of a new node are log lines only."""
        note = f"node {action.node}: {action.message}"
        log.info("%s: %s", action.step, note)
        progress = action.progress or node.progress
        if resource is not None and ((progress is not None and progress.upgrade) or action.evict):
            self._events.record(resource, "Normal", action.step, note)
