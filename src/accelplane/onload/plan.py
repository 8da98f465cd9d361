"""The values of an upgrade: its target, the steps and actions of nodes, and the plan of one pass."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from accelplane.onload.observed import PodView, Progress

Role = Literal["module", "sfc", "gate"]
StepName = Literal[
    "Verified",
    "Held",
    "NodeOwned",
    "ReleasePending",
    "NoKernelMapping",
    "Cordoned",
    "NodeNotReady",
    "Pending",
    "RemovingGate",
    "WaitingForPluginPod",
    "WaitingForProbePod",
    "WaitingForNodeStatus",
    "Evicting",
    "RemovingModule",
    "WaitingForUnload",
    "RemovingSfc",
    "WaitingForModulePods",
    "LabellingSfc",
    "WaitingForSfc",
    "LabellingModule",
    "WaitingForModule",
    "SettingGate",
    "ReplacingPluginPod",
    "Verifying",
    "Removed",
    "NotReachable",
]


# Steps after which nothing is left to do on a node. A node that is not selected and not ready cannot be released now.
DONE = frozenset[StepName]({"Verified", "Removed", "NotReachable"})
# Steps of nodes whose change has not begun and does not begin now.
NOT_STARTED = frozenset[StepName](
    {"Pending", "Held", "NodeNotReady", "NodeOwned", "ReleasePending", "NoKernelMapping", "Cordoned"}
)


class Problem(NamedTuple):
    """Something that needs attention: the reason of a condition, and its message."""

    reason: str
    message: str


class Obstacle(NamedTuple):
    """Why a selected node must not change now.

    `blocks`: `start` is the begin of a change, `loading` also the loading of modules, `all` every step.
    """

    step: StepName
    message: str
    blocks: Literal["start", "loading", "all"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of the nodes. `version` is that of all labels, `revision` that of the plugin pods.

    Plugin pods without a revision count as pods of `adopted_revision`. An `eviction_timeout` of 0 means no limit. The
    plugin pod of an upgraded node has to be ready for `min_ready` seconds. `others` has the labels of nodes that keep
    or get another version, and `keeps` those of nodes that have the version with another label, by name: `rollout`
    explains both. `without_sfc` are nodes whose kernel needs no `sfc`.
    """

    version: str
    sfc: bool = False
    kmm: bool = True
    revision: str = ""
    adopted_revision: str = ""
    max_unavailable: int = 1
    paused: bool = False
    node_timeout: float = 900.0
    eviction_timeout: float = 0.0
    min_ready: int = 0
    strict: bool = False
    probe: bool = False
    deleting: bool = False
    rolls_back: bool = False
    others: Mapping[str, str] = {}
    keeps: Mapping[str, str] = {}
    without_sfc: frozenset[str] = frozenset()
    obstacles: Mapping[str, Obstacle] = {}

    def label_of(self, node: str) -> str:
        """The label that a node should have."""
        return self.others.get(node) or self.keeps.get(node) or self.version


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """The writes for one node: labels (None removes one) and progress, evictions, or a pod.

    `unloads` means that no pod on the node may use Onload, which has to be checked again immediately before.
    """

    node: str
    step: StepName
    message: str
    labels: Mapping[Role, str | None] = {}
    progress: Progress | None = None
    removes_progress: bool = False
    evict: tuple[PodView, ...] = ()
    delete: tuple[PodView, ...] = ()
    create_probe: bool = False
    delete_probe: bool = False
    unloads: bool = False

    @property
    def patches(self) -> bool:
        """Whether the node itself is changed."""
        return bool(self.labels) or self.removes_progress or self.progress is not None


class Wait(msgspec.Struct, frozen=True):
    """What a waiting step has: steps that write labels or replace pods have none.

    The node is overdue after `limit` seconds in this step. `retry` is the number of seconds after which the step may
    change although nothing in the cluster does.
    """

    limit: float = math.inf
    retry: float = math.inf


class ObservedWait(msgspec.Struct, frozen=True):
    """How long the operator has observed that a node waits, in seconds by step.

    It begins again when the `stage` of the node changes: its labels, its target, or whether it is cordoned. `step` is
    the step in which the node waited when it was last observed, at `time`; empty if it did not wait.
    """

    stage: tuple[object, ...]
    time: float
    step: str = ""
    seconds: Mapping[str, float] = {}


class NodeStep(msgspec.Struct, frozen=True, kw_only=True):
    """The step of one node, with its action or what it waits for.

    `problem` is what an administrator has to correct: the reason and message of the condition Degraded.
    """

    node: str
    step: StepName
    message: str = ""
    action: Action | None = None
    wait: Wait | None = None
    starts: bool = False
    problem: Problem | None = None
    skipped_wait: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of all nodes, and the actions of this pass.

    `overdue` are the nodes that exceeded their time limit. `waits` is the input of the next pass. `retry` is the time
    after which to decide again at the latest, in seconds; 0 if only a change matters.
    """

    steps: tuple[NodeStep, ...] = ()
    actions: tuple[Action, ...] = ()
    overdue: tuple[NodeStep, ...] = ()
    waits: Mapping[str, ObservedWait] = {}
    unavailable: int = 0
    retry: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all selected nodes are verified, and no other node that is ready has anything left."""
        return all(each.step in DONE for each in self.steps)
