"""The state of a cluster in the fleet server, as immutable values.

The sources (API server and agents) make a `Cluster`; screens and command-line views read it. Times are seconds since
the epoch, counts are numbers of device IDs. An empty text means that the fact does not exist or is not known.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field

from accelplane.kube.kinds import NO_SPEC, PodSpec, Taint
from accelplane.report.inventory import AdvertisedResource, Holder, ReportedUnit, SkippedHardware
from accelplane.report.readings import DeviceReadings

AgentState = Literal["connected", "connecting", "stale", "invalid", "none"]


class NodeResource(AdvertisedResource, frozen=True, kw_only=True):
    """A resource of a node. `capacity` and `allocatable` are those of the Node status; the others are an agent's."""

    capacity: int = 0
    allocatable: int = 0


class Agent(Struct, frozen=True):
    """A pod of ours on a node that serves an inventory, and the state of the connection to it.

    `answered` is the time of its last answer when the node was composed: the age of the inventory of an agent that is
    not connected. The inventory of a connected agent is current.
    """

    pod: str
    name: str
    version: str
    state: AgentState
    problem: str = ""
    answered: float = 0.0
    holders_source: str = ""
    holders_age: float = 0.0


class Node(Struct, frozen=True):
    """A node with a resource of ours or with an agent; without connected agents its counts are the API server's."""

    name: str
    labels: Mapping[str, str] = {}
    ready: bool = True
    cordoned: bool = False
    taints: tuple[Taint, ...] = ()
    agents: tuple[Agent, ...] = ()
    resources: tuple[NodeResource, ...] = ()
    units: tuple[ReportedUnit, ...] = ()
    skipped: tuple[SkippedHardware, ...] = ()
    # Containers that request resources, by the API server: only with `-pods=all`, and only without units of an agent.
    holders: tuple[Holder, ...] = ()
    # Whether `holders` are all, so that none means that nothing is held.
    holders_known: bool = False


class Waiting(Struct, frozen=True):
    """A pod that is not assigned to a node and requests resources of ours. `spec` has its rules for nodes."""

    namespace: str
    name: str
    since: float
    requests: Mapping[str, int]
    message: str = ""
    gates: tuple[str, ...] = ()
    spec: PodSpec = NO_SPEC


class Quota(Struct, frozen=True):
    """The rest of a resource by a ResourceQuota of a namespace."""

    namespace: str
    name: str
    resource: str
    hard: int
    used: int


class DevicePlugin(Struct, frozen=True):
    """A custom resource of the operator. `desired` and `ready` are pods, `nodes` those that have a pod."""

    kind: str = field(name="resourceKind")
    name: str
    desired: int = 0
    ready: int = 0
    nodes: int = 0
    problem: str = ""


class Cluster(Struct, frozen=True):
    """All that is known at one moment. `generation` grows with each change; `problem` is that of the API server.

    `device_plugins` are those with problems first, and `more_device_plugins` is the number of others.
    """

    generation: int
    time: float
    started: float
    nodes: Mapping[str, Node]
    waiting: tuple[Waiting, ...] = ()
    quotas: tuple[Quota, ...] = ()
    problem: str = ""
    # Device seconds held since `started` until `time`, by namespace and resource.
    held_seconds: Mapping[tuple[str, str], float] = {}
    device_plugins: tuple[DevicePlugin, ...] = ()
    more_device_plugins: int = 0


class NodeReadings(Struct, frozen=True):
    """The current values of a node's devices. `problem` is the reason if devices are missing."""

    time: float
    devices: tuple[DeviceReadings, ...] = ()
    problem: str = ""
