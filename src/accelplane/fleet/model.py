"""The state of a cluster in the fleet server, as immutable values.

The sources (API server and agents) make a `Cluster`; screens and command-line views read it. Times are seconds since
the epoch, counts are numbers of device IDs. An empty text means that the fact does not exist or is not known.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

Phase = Literal["healthy", "suspect", "unhealthy", "recovering"]
AgentState = Literal["connected", "connecting", "stale", "invalid", "none"]


class Holder(Struct, frozen=True):
    """A container with at least one ID of a unit; `namespace` and `pod` are empty if the source does not name it.

    With `via` "dra" it has the unit by a claim, and `resource` is the driver of the claim.
    """

    namespace: str
    pod: str
    container: str
    resource: str
    count: int
    since: float = 0.0
    via: str = ""


class Change(Struct, frozen=True):
    """One entry of a unit's health history."""

    time: float
    phase: Phase
    reason: str = ""
    text: str = ""


class Unit(Struct, frozen=True):
    """A physical thing whose IDs an agent advertises. `ids` has the number of IDs per resource.

    If a healthy unit has a `reason`, it is a warning; `text` describes it.
    """

    plugin: str
    unit: str
    device: str = ""
    bdf: str = ""
    model: str = ""
    numa: int | None = None
    phase: Phase = "healthy"
    known: bool = True
    reason: str = ""
    text: str = ""
    since: float = 0.0
    idle_since: float = 0.0
    ids: Mapping[str, int] = {}
    holders: tuple[Holder, ...] = ()
    history: tuple[Change, ...] = ()


class Skipped(Struct, frozen=True):
    """Hardware that a plugin found and does not advertise."""

    plugin: str
    subject: str
    reason: str


class Resource(Struct, frozen=True):
    """A resource of a node. `capacity` and `allocatable` are those of the Node status; the others are an agent's."""

    name: str
    capacity: int = 0
    allocatable: int = 0
    ids: int = 0
    healthy: int = 0
    allocated: int = 0
    stage: str = ""
    problem: str = ""


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
    agents: tuple[Agent, ...] = ()
    resources: tuple[Resource, ...] = ()
    units: tuple[Unit, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    # Containers that request resources, by the API server: only with `-pods=all`, and only without units of an agent.
    holders: tuple[Holder, ...] = ()
    # Whether `holders` are all, so that none means that nothing is held.
    holders_known: bool = False


class Waiting(Struct, frozen=True):
    """A pod that is not assigned to a node and requests resources of ours."""

    namespace: str
    name: str
    since: float
    requests: Mapping[str, int]
    message: str = ""
    gates: tuple[str, ...] = ()


class Quota(Struct, frozen=True):
    """The rest of a resource by a ResourceQuota of a namespace."""

    namespace: str
    name: str
    resource: str
    hard: int
    used: int


class DevicePlugin(Struct, frozen=True):
    """A custom resource of the operator. `desired` and `ready` are pods, `nodes` those that have a pod."""

    kind: str
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


class Value(Struct, frozen=True):
    """A current value of a device, under the name and with the labels of its metric."""

    name: str
    labels: Mapping[str, str]
    value: float


class DeviceReadings(Struct, frozen=True):
    """The current values of a device. `outcomes` counts its reads by outcome; a missing value is explained by these."""

    plugin: str
    device: str
    bdf: str = ""
    awake: bool = True
    stuck: bool = False
    values: tuple[Value, ...] = ()
    outcomes: Mapping[str, int] = {}


class NodeReadings(Struct, frozen=True):
    """The current values of a node's devices. `problem` is the reason if devices are missing."""

    time: float
    devices: tuple[DeviceReadings, ...] = ()
    problem: str = ""
