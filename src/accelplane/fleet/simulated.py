"""A simulated fleet: a `FleetView` whose devices fail, recover and change holders, for demos and tests.

Each node has the document of an agent, which is encoded, decoded and composed as that of a real agent. The shares of
devices that are unhealthy, held and idle stay the same however long it runs.
"""

import asyncio
import itertools
import math
import random
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from accelplane.kube.kinds import Taint
from accelplane.report.decoding import decode_inventory
from accelplane.report.inventory import (
    AdvertisedResource,
    Change,
    Holder,
    HoldersSource,
    NodeInventory,
    PluginInventory,
    ReportedUnit,
    SkippedHardware,
)
from accelplane.report.limits import VERSION
from accelplane.report.readings import DeviceReadings, Value

from .agents import Place, Report
from .compose import compose
from .deviceplugins import missing_pods, problems_first
from .families import family_of
from .model import Agent, Cluster, DevicePlugin, Node, NodeReadings, NodeResource, Quota, Waiting
from .objects import NodeFacts
from .usage import Usage
from .use import UseHistory

_HISTORY = 32
_DEDICATED = Taint("dedicated", "genomics", "NoSchedule")
_FAULTS = (
    ("temperature", "the package has 103 °C, the limit is 100 °C"),
    ("memory", "2 uncorrectable errors of the memory since the last reset"),
    ("heartbeat", "the firmware has not answered the heartbeat for 12 s"),
    ("wedged", "the driver declared the device wedged"),
    ("pci-recovery", "the PCI bus is resetting the device"),
)
# The shares of devices by state, at the start and for ever: a changed device enters such a state by this probability.
_UNHEALTHY, _SUSPECT, _HELD, _IDLE = 0.012, 0.006, 0.72, 0.06
_TEAMS = ("vision", "speech", "video", "search", "billing", "genomics", "weather", "ci")


class Kind(Struct, frozen=True):
    """Nodes of a kind: their share of 20 nodes, and the devices and IDs of a resource per node."""

    name: str
    share: int
    plugin: str
    resource: str
    model: str
    devices: int
    ids: int
    unit: str


_KINDS = (
    Kind("gpu", 8, "gpu", "gpu.intel.com/i915", "Data Center GPU Flex 170", 8, 4, "card{}"),
    Kind("max", 3, "gpu", "gpu.intel.com/xe", "Data Center GPU Max 1550", 4, 1, "card{}"),
    Kind("crypto", 4, "qat", "qat.intel.com/cy", "QuickAssist 4xxx", 4, 16, "0000:6{}:00.0"),
    Kind("data", 3, "dsa", "dsa.intel.com/wq-user-dedicated", "Data Streaming Accelerator", 8, 1, "wq{}.0"),
    Kind("edge", 1, "npu", "npu.intel.com/accel", "Lunar Lake NPU", 1, 1, "accel{}"),
    Kind("trade", 1, "onload", "amd.com/onload", "X2522", 2, 10, "eth{}"),
)


class _Meter(Struct):
    """The counters of a device: seconds and joules until a time."""

    time: float
    busy: float = 0.0
    idle: float = 0.0
    joules: float = 0.0

    def advance(self, now: float, busy: float) -> None:
        passed = max(0.0, now - self.time)
        self.time += passed
        self.busy += busy * passed
        self.idle += (1 - busy) * passed
        self.joules += (32 + 105 * busy) * passed


class SimulatedFleet:
    """`nodes` simulated nodes, the same for equal seeds. `change` makes random changes, `run` does so every second."""

    def __init__(self, nodes: int = 200, *, seed: int = 7, now: float | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._now = time.time() if now is None else now
        started = self._now
        nodes_by_name = {node.name: node for node in map(self._node, range(nodes))}
        self._usage = Usage(started)
        self._usage.update({}, nodes_by_name, started)
        self._cluster = Cluster(
            int(started * 1000), started, started, nodes_by_name, self._waiting(), self._quotas(), "", {},
            _device_plugins(nodes_by_name.values()),
        )  # fmt: skip
        self._published = asyncio.Event()
        self._meters: dict[tuple[str, str], _Meter] = {}
        self.use = UseHistory()

    # FleetView

    def cluster(self) -> Cluster:
        """The current snapshot."""
        return self._cluster

    async def changed(self, after: int) -> int:
        """Waits until the generation is greater than `after`, and returns it."""
        while self._cluster.generation <= after:
            await self._published.wait()
        return self._cluster.generation

    async def holders(self, node: str) -> tuple[Holder, ...]:
        """The allocations of a node without an agent."""
        found = self._cluster.nodes.get(node)
        return tuple(self._holder(each.name, 1) for each in found.resources) if found is not None else ()

    async def readings(self, node: str) -> NodeReadings:
        """Current values, which depend on the time."""
        return self._read(node, time.time())

    def _read(self, node: str, now: float) -> NodeReadings:
        found = self._cluster.nodes.get(node)
        if found is None or not found.units:
            return NodeReadings(now, problem="no agent answers on this node")
        devices: list[DeviceReadings] = []
        for unit in found.units:
            busy = _busy(unit, zlib.crc32(f"{node} {unit.unit}".encode()), now)
            meter = self._meters.setdefault((node, unit.unit), _Meter(now))
            meter.advance(now, busy)
            devices.append(_readings(unit, meter, busy))
        readings = NodeReadings(now, tuple(devices))
        self.use.add(node, readings, now)
        return readings

    def read_use(self, minutes: int = 60) -> None:
        """Fills the history with the values of the last minutes."""
        for minute in range(minutes, -1, -1):
            for node in self._cluster.nodes:
                self._read(node, self._now - 60 * minute)

    # Changes

    async def run(self, *, changes: int = 3, interval: float = 1.0) -> None:
        """Makes `changes` changes in each interval, and reads each node once a minute, until it is cancelled."""
        for tick in itertools.count():
            await asyncio.sleep(interval)
            self.change(changes)
            for node in list(self._cluster.nodes)[tick % 60 :: 60]:
                self._read(node, time.time())

    def change(self, changes: int = 1, *, now: float | None = None) -> None:
        """Changes one device on each of some nodes."""
        self._now = time.time() if now is None else now
        names = self._random.sample(sorted(self._cluster.nodes), min(changes, len(self._cluster.nodes)))
        self.replace(*(self._changed(self._cluster.nodes[name]) for name in names))

    def replace(
        self,
        *nodes: Node,
        waiting: tuple[Waiting, ...] | None = None,
        problem: str | None = None,
        device_plugins: tuple[DevicePlugin, ...] | None = None,
    ) -> None:
        """Publishes a snapshot in which these nodes replace those of the same names."""
        previous = self._cluster
        changed = {**previous.nodes, **{node.name: node for node in nodes}}
        now = max(self._now, previous.time)
        self._usage.update(previous.nodes, changed, now)
        self._cluster = msgspec.structs.replace(
            previous,
            generation=previous.generation + 1,
            time=now,
            nodes=changed,
            waiting=previous.waiting if waiting is None else waiting,
            problem=previous.problem if problem is None else problem,
            device_plugins=previous.device_plugins if device_plugins is None else device_plugins,
            held_seconds=self._usage.seconds(now),
        )
        published, self._published = self._published, asyncio.Event()
        published.set()

    def _changed(self, node: Node) -> Node:
        if not node.units:
            return node
        index = self._random.randrange(len(node.units))
        units = list(node.units)
        units[index] = self._next(units[index])
        return _composed(node, units)

    def _next(self, unit: ReportedUnit) -> ReportedUnit:
        if unit.phase == "unhealthy":
            return self._in_phase(unit, "recovering")
        if unit.phase in ("recovering", "suspect"):
            return self._in_phase(unit, "healthy")
        chance = self._random.random()
        if chance < _UNHEALTHY + _SUSPECT:
            return self._in_phase(unit, "unhealthy" if chance < _UNHEALTHY else "suspect")
        return self._held(unit)

    def _held(self, unit: ReportedUnit) -> ReportedUnit:
        holders = self._holders(unit.ids)
        idle = self._now - 5400 if holders and self._random.random() < _IDLE else 0.0
        return msgspec.structs.replace(unit, holders=holders, idle_since=idle)

    def _in_phase(self, unit: ReportedUnit, phase: str) -> ReportedUnit:
        reason, text = ("", "") if phase == "healthy" else self._random.choice(_FAULTS)
        # Validates the phase, as for an agent.
        change = msgspec.convert({"time": self._now, "phase": phase, "reason": reason, "text": text}, Change)
        history = (*unit.history, change)[-_HISTORY:]
        return msgspec.structs.replace(
            unit, phase=change.phase, reason=reason, text=text, since=self._now, history=history
        )

    # Initial state

    def _node(self, index: int) -> Node:
        number, kind = index % 20, _KINDS[0]
        for kind in _KINDS:
            if number < kind.share:
                break
            number -= kind.share
        name = f"{kind.name}-{index:04}.example.com"
        zone, rack = f"zone-{'abc'[index % 3]}", f"rack-{index // 16:02}"
        labels = {"topology.kubernetes.io/zone": zone, "example.com/rack": rack}
        if index % 23 == 19:
            total = kind.devices * kind.ids
            bare = NodeResource(kind.resource, capacity=total, allocatable=total)
            return Node(name, labels, resources=(bare,))
        units = [self._unit(kind, each) for each in range(kind.devices)]
        total = kind.devices * kind.ids
        resource = NodeResource(kind.resource, capacity=total, allocatable=total, stage="registered")
        failed = index % 61 == 13
        if failed:
            resource = msgspec.structs.replace(
                resource, stage="failed", problem="the kubelet rejected the registration: version not supported"
            )
        stale = index % 53 == 31
        agent = Agent(
            f"accelplane/accelplane-node-{index:05x}", "accelplane node", "1.0.0", "stale" if stale else "connected",
            "no answer in 5 s" if stale else "", self._now - (140 if stale else 2), "podresources", 1.0,
        )  # fmt: skip
        skipped = (
            SkippedHardware(kind.plugin, "card9", "the driver vfio-pci is bound; expected i915 or xe"),
        ) if index % 31 == 5 else ()  # fmt: skip
        node = Node(
            name=name, labels=labels, cordoned=index % 37 == 3, ready=index % 97 != 60, agents=(agent,),
            resources=(resource,), skipped=skipped, taints=(_DEDICATED,) if kind.name == "max" else (),
        )  # fmt: skip
        return _composed(node, units)

    def _unit(self, kind: Kind, number: int) -> ReportedUnit:
        unit = ReportedUnit(
            plugin=kind.plugin, unit=kind.unit.format(number), device=kind.unit.format(number),
            bdf=f"0000:{0x18 + number * 0x11:02x}:00.0", model=kind.model, numa=number % 2,
            since=self._now - self._random.uniform(3600, 900_000), ids={kind.resource: kind.ids},
        )  # fmt: skip
        if self._random.random() < _UNHEALTHY:
            unit = self._in_phase(unit, "unhealthy")
        elif self._random.random() < _SUSPECT:
            unit = self._in_phase(unit, "suspect")
        return msgspec.structs.replace(self._held(unit), known=self._random.random() > 0.004)

    def _holders(self, ids: Mapping[str, int]) -> tuple[Holder, ...]:
        holders: list[Holder] = []
        for resource, count in ids.items():
            remaining = count if self._random.random() < _HELD else 0
            while remaining > 0 and len(holders) < 4:
                amount = self._random.randint(1, remaining)
                holders.append(self._holder(resource, amount))
                remaining -= amount
                if self._random.random() < 0.4:
                    break
        return tuple(holders)

    def _holder(self, resource: str, count: int) -> Holder:
        team = self._random.choice(_TEAMS)
        pod = f"{self._random.choice(('train', 'serve', 'encode', 'batch'))}-{self._random.randrange(16**5):05x}"
        return Holder(team, pod, "main", resource, count, self._now - self._random.uniform(60, 80_000))

    def _waiting(self) -> tuple[Waiting, ...]:
        message = "0/200 nodes are available: 200 Insufficient {}. preemption: 0/200 nodes are available."
        examples = (
            ("vision", "train-large-0", 900.0, {"gpu.intel.com/i915": 40}, ()),
            ("genomics", "align-7f", 3600.0, {"gpu.intel.com/xe": 8}, ()),
            ("ci", "nightly-gated", 240.0, {"qat.intel.com/cy": 2}, ("example.com/budget",)),
            ("billing", "score-5d", 600.0, {"gpu.intel.com/xe": 1}, ()),
            ("search", "reindex-0", 75.0, {"gpu.intel.com/i915": 2, "dsa.intel.com/wq-user-dedicated": 1}, ()),
        )
        return tuple(
            Waiting(team, name, self._now - age, requests, message.format(next(iter(requests))), gates)
            for team, name, age, requests, gates in examples
        )

    def _quotas(self) -> tuple[Quota, ...]:
        return (Quota("vision", "accelerators", "gpu.intel.com/i915", 64, 51),)


def _device_plugins(nodes: Iterable[Node]) -> tuple[DevicePlugin, ...]:
    """The operator's resources for the simulated plugins: a pod on each node with an agent that answers."""
    problems = {
        "qat": "ProvisioningConfigMissing: ConfigMap qat-config (provisioningConfig) does not exist; create it, "
        "new pods wait for it",
    }
    plugins: list[DevicePlugin] = []
    each_node = list(nodes)
    for family in ("gpu", "qat", "dsa", "sgx"):
        agents = [
            node.agents[0]
            for node in each_node
            if node.agents and any(family_of(resource.name) == family for resource in node.resources)
        ]
        desired, ready = len(agents), sum(agent.state == "connected" for agent in agents)
        missing = missing_pods(desired, ready) if ready < desired else ""
        problem = "; ".join(part for part in (problems.get(family, ""), missing) if part)
        kind = f"{family.capitalize()}DevicePlugin"
        plugins.append(DevicePlugin(kind, f"{family}deviceplugin-sample", desired, ready, desired, problem))
    return problems_first(plugins)


def _composed(node: Node, units: Sequence[ReportedUnit]) -> Node:
    """The node with these units, by the document of its agent, as the fleet's server gets and composes it."""
    (agent,) = node.agents
    plugin = units[0].plugin
    advertised = tuple(_advertised(each, units) for each in node.resources)
    document = NodeInventory(
        VERSION, node.name, agent.name, {"accelplane": agent.version}, "1",
        (PluginInventory(plugin, advertised, tuple(units), node.skipped),),
        HoldersSource(agent.holders_source, agent.holders_age),
    )  # fmt: skip
    inventory = decode_inventory(msgspec.json.encode(document))
    namespace, _, pod = agent.pod.partition("/")
    report = Report(Place(namespace, pod, node.name), agent.state, agent.problem, agent.answered, inventory)
    found = compose(
        node.name, NodeFacts(node.labels, node.ready, node.cordoned, node.resources, node.taints), (report,), None
    )
    assert found is not None  # noqa: S101 - it has an agent
    return found


def _advertised(resource: NodeResource, units: Sequence[ReportedUnit]) -> AdvertisedResource:
    """The resource with the numbers of its devices."""
    own = [unit for unit in units if resource.name in unit.ids]
    healthy = sum(unit.ids[resource.name] for unit in own if unit.phase in ("healthy", "suspect"))
    allocated = sum(holder.count for unit in own for holder in unit.holders if holder.resource == resource.name)
    ids = sum(unit.ids[resource.name] for unit in own)
    return AdvertisedResource(resource.name, resource.stage, resource.problem, ids, healthy, allocated)


def _busy(unit: ReportedUnit, seed: int, now: float) -> float:
    """The busy share of a device: between 0.3 and 1 in waves of some minutes, nothing while it is idle."""
    if not unit.holders or unit.idle_since:
        return 0.0
    waves = 0.12 * math.sin(now / (300 + seed % 400) + seed) + 0.05 * math.sin(now / 70 + seed)
    return max(0.0, min(1.0, 0.4 + seed % 50 / 100 + waves))


def _readings(unit: ReportedUnit, meter: _Meter, busy: float) -> DeviceReadings:
    """Current values of a device, such as a real agent reads; devices without a holder are asleep."""
    if not unit.holders:
        return DeviceReadings(unit.plugin, unit.device, unit.bdf, awake=False, outcomes={"asleep": 6})
    link = (Value("accelplane_pci_link_transfers_per_second", {}, 16e9), Value("accelplane_pci_link_lanes", {}, 16))
    own: tuple[Value, ...] = ()
    if unit.plugin == "gpu":
        package = {"sensor": "package"}
        hot = unit.phase == "unhealthy" and unit.reason == "temperature"
        own = (
            Value("accelplane_device_temperature_celsius", package, 103 if hot else round(42 + 40 * busy, 1)),
            Value("accelplane_device_temperature_limit_celsius", {**package, "limit": "critical"}, 100),
            Value("accelplane_device_energy_joules_total", package, meter.joules),
            Value("accelplane_device_power_limit_watts", {**package, "limit": "sustained"}, 150),
            Value("accelplane_gpu_frequency_hertz", {"gt": "gt0", "kind": "actual"}, round(900 + 1000 * busy) * 1e6),
            Value("accelplane_gpu_idle_seconds_total", {"gt": "gt0"}, meter.idle),
        )
    elif unit.plugin == "npu":
        own = (
            Value("accelplane_npu_busy_seconds_total", {}, meter.busy),
            Value("accelplane_npu_memory_bytes", {}, round(2**31 * (0.2 + busy))),
        )
    return DeviceReadings(
        unit.plugin, unit.device, unit.bdf, values=(*own, *link), outcomes={"ok": 2 + len(own), "denied": 1}
    )
