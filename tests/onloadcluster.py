"""A model of the nodes of a cluster with KMM and a DaemonSet controller, for tests of the decisions of the operator.

Nodes are values of `observed.NodeView`. `Cluster.apply` performs actions as the API server would, and `Cluster.react`
performs what KMM, the DaemonSet controller and the kubelet do next on one node. Invariants are checked at each action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from accelplane.kube.objects import Request
from accelplane.onload.node_steps import STATUS_WAIT
from accelplane.onload.observed import NodeView, PodView, Progress
from accelplane.onload.plan import Action, ObservedWait, Plan, Target
from accelplane.onload.steps import decide

PLUGIN = Request("plugin", "n")
APP = Request("app", "default")


def plugin_pod(
    revision: str | None = "r", *, is_ready: bool = True, is_terminating: bool = False, user_image: str = ""
) -> PodView:
    return PodView(
        PLUGIN, "uid", is_terminating=is_terminating, is_ready=is_ready, revision=revision, user_image=user_image
    )


def app_pod(name: str = "app", *, is_terminating: bool = False) -> PodView:
    return PodView(Request(name, "default"), is_terminating=is_terminating)


def working(name: str, version: str, *, sfc: bool = False, revision: str = "r", **more: Any) -> NodeView:
    """A node on which a version works."""
    node = NodeView(
        name=name,
        module=version,
        sfc=version if sfc else None,
        gate=version,
        module_loaded=True,
        module_loaded_version=version,
        sfc_loaded=sfc,
        plugins=(plugin_pod(revision),),
        advertised=True,
    )
    return msgspec.structs.replace(node, **more)


class Cluster:
    """Nodes, and the reactions of the cluster's controllers."""

    def __init__(self, nodes: list[NodeView], *, revision: str = "r") -> None:
        self.nodes = {node.name: node for node in nodes}
        self.revision = revision
        self.user_image = ""
        self.now = 1000.0
        self.waits: Mapping[str, ObservedWait] = {}
        self.gate_removed: dict[str, float] = {}
        self.protected: set[str] = set()
        self.broken_versions: set[str] = set()
        self.reports_modules = True
        self.uses_kmm = True
        self.failing_probes = 0
        self.taken_down: set[str] = set()
        self.most_down = 0

    def decide(self, target: Target) -> Plan:
        self.uses_kmm = target.kmm
        plan = decide(target, list(self.nodes.values()), self.now, self.waits)
        self.waits = plan.waits
        return plan

    def change(self, name: str, **changes: Any) -> None:
        self.nodes[name] = msgspec.structs.replace(self.nodes[name], **changes)

    def apply(self, action: Action) -> None:
        """Performs an action after checks for violations."""
        node = self.nodes[action.node]
        labels: Mapping[str, str | None] = action.labels
        self._check(node, labels)
        if labels.get("gate", "") is None and is_available(node) and node.selected:
            self.taken_down.add(node.name)
        if labels.get("gate", "") is None:
            self.gate_removed[node.name] = self.now
        changes: dict[str, Any] = dict(labels)
        if action.progress is not None or action.removes_progress:
            changes["progress"] = action.progress
        if action.evict and node.name not in self.protected:
            changes["apps"] = tuple(msgspec.structs.replace(pod, is_terminating=True) for pod in node.apps)
        if action.delete:
            changes["plugins"] = tuple(msgspec.structs.replace(pod, is_terminating=True) for pod in node.plugins)
            if is_available(node):
                self.taken_down.add(node.name)
        if action.create_probe:
            assert node.probe == "none"
            changes["probe"] = "running"
        if action.delete_probe:
            assert node.probe in {"failed", "running"}
            changes["probe"] = "none"
        if action.removes_progress:
            changes["probe"] = "none"
            self.taken_down.discard(node.name)
        self.change(node.name, **changes)
        self.most_down = max(self.most_down, len(self.taken_down))

    def _check(self, node: NodeView, labels: Mapping[str, str | None]) -> None:
        """Fails if the labels that are written violate an invariant."""
        if node.others:
            return  # The pods use the modules of the resource that has the node.
        for role in ("module", "sfc"):
            if role in labels and labels[role] is None and getattr(node, role) is not None and node.ready:
                assert not node.apps, f"{node.name}: label of {role} removed while {node.apps} runs"
        if labels.get("module", "") is None and node.ready and node.name in self.gate_removed:
            waited = self.now - self.gate_removed[node.name] >= STATUS_WAIT
            assert waited or not node.advertised, f"{node.name}: pods may be assigned to it while onload is unloaded"
        # Without KMM, the operator waits for a limited time.
        if labels.get("sfc", "") is None and node.ready and node.selected and self.uses_kmm:
            assert not node.module_loaded, f"{node.name}: sfc unloaded before onload"

    def react(self, name: str) -> bool:
        """One reaction on a node. Returns whether anything changed."""
        before = self.nodes[name]
        if not before.ready:
            return False
        self._terminate(name)
        self._load(name)
        self._run_plugin(name)
        if self.nodes[name].probe == "running":
            self.change(name, probe="failed" if self.failing_probes > 0 else "succeeded", probe_since=self.now)
            self.failing_probes -= 1
        return self.nodes[name] != before

    def _terminate(self, name: str) -> None:
        node = self.nodes[name]
        self.change(
            name,
            apps=tuple(pod for pod in node.apps if not pod.is_terminating),
            plugins=tuple(pod for pod in node.plugins if not pod.is_terminating),
        )

    def _load(self, name: str) -> None:
        """KMM: unloads modules that are not desired or have another version, then loads the desired ones."""
        node = self.nodes[name]
        for role in ("module", "sfc"):
            role_version = getattr(node, role)
            loaded, version = getattr(node, f"{role}_loaded"), getattr(node, f"{role}_loaded_version")
            if loaded and (not role_version or version not in {None, role_version}):
                # modprobe refuses to unload a module that is in use.
                in_use = bool(node.apps) or (role == "sfc" and node.module_loaded)
                if not in_use:
                    self.change(name, **{f"{role}_loaded": False, f"{role}_loaded_version": None})
            elif role_version and not loaded and role_version not in self.broken_versions and self.reports_modules:
                self.change(name, **{f"{role}_loaded": True, f"{role}_loaded_version": role_version})
            node = self.nodes[name]

    def _run_plugin(self, name: str) -> None:
        """The DaemonSet controller, and the kubelet."""
        node = self.nodes[name]
        if node.gate is None:
            self.change(name, advertised=False)
            if node.plugins:
                self.change(
                    name, plugins=tuple(msgspec.structs.replace(pod, is_terminating=True) for pod in node.plugins)
                )
        elif not node.plugins:
            self.change(name, plugins=(plugin_pod(self.revision, is_ready=False, user_image=self.user_image),))
        elif node.gate not in self.broken_versions:
            self.change(
                name,
                advertised=True,
                plugins=tuple(msgspec.structs.replace(pod, is_ready=True) for pod in node.plugins),
            )

    def run(self, target: Target, passes: int = 400) -> Plan:
        """Decides, performs and reacts until nothing changes any more, with time passing."""
        for _ in range(passes):
            plan = self.decide(target)
            for action in plan.actions:
                self.apply(action)
            changed = [self.react(name) for name in self.nodes]
            acted = any(action.patches or action.delete or action.delete_probe for action in plan.actions)
            if not acted and not any(changed) and not 0 < plan.retry < 100:
                return plan
            self.now += 5
        return self.decide(target)


def is_available(node: NodeView) -> bool:
    """Whether applications can use the node."""
    return node.gate is not None and any(pod.is_ready and not pod.is_terminating for pod in node.plugins)


def progress(target: str, started: int = 1000, **more: Any) -> Progress:
    return Progress(target=target, started=started, **more)
