"""The fleet: watches and agents in, snapshots out.

A change marks its node. A moment later the marked nodes are composed again, and those that differ make the next
snapshot. All else of a snapshot is shared with the one before.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from accelplane.kube.client import Client
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.kinds import Pod
from accelplane.kube.tasks import Supervisor
from accelplane.report.inventory import Holder

from .agents import Agents, AgentTimes, Place
from .compose import compose
from .events import DeviceEvents
from .metrics import FleetMetrics
from .model import Cluster, Node, NodeReadings
from .objects import agent_identity, agent_place
from .ondemand import OnDemand
from .options import FleetOptions
from .source import NOT_LISTED, UNSERVED_RETRY, Listeners, Part, Source
from .usage import Usage
from .use import UseHistory

log = logging.getLogger(__name__)

_MIN_INTERVAL = 0.1
_HOLDERS_AGE = 60.0
_READINGS_AGE = 2.0
_AT_ONCE = 8
_USE_AT_ONCE = 4  # the others are for viewers
_USE_PAUSE = 0.05
_MAX_IGNORED = 16
_FIRST_CHECK = 0.5


class Fleet:
    """The accelerators of a cluster, as a `FleetView`. `run` keeps it current."""

    def __init__(
        self,
        client: Client,
        options: FleetOptions = FleetOptions(),  # noqa: B008 - a frozen value
        *,
        agent_times: AgentTimes = AgentTimes(),  # noqa: B008 - a frozen value
        watch_timeouts: WatchTimeouts = WatchTimeouts(),  # noqa: B008 - a frozen value
        unserved_retry: float = UNSERVED_RETRY,
    ) -> None:
        self._options = options
        # Namespaces and accounts of pods that are no agents, each of which is logged once.
        self._ignored: set[tuple[str, str]] = set()
        started = time.time()
        # Greater than those of an earlier process, so that its viewers notice the new one.
        self._cluster = Cluster(int(started * 1000), started, started, {}, problem=NOT_LISTED)
        self._published = asyncio.Event()
        self._dirty: set[str] = set()
        self._marked = asyncio.Event()
        self._changed_parts: set[Part] = set()
        self._usage = Usage(started)
        self._metrics = FleetMetrics(client.metrics.registry, self._counts)
        self._agents = Agents(options, self._mark, times=agent_times, on_answer=self._metrics.observe)
        listeners = Listeners(self._mark, self._on_agent, self._mark_part)
        self._source = Source(client, options, listeners, watch_timeouts=watch_timeouts, unserved_retry=unserved_retry)
        self._events = DeviceEvents(client) if options.events else None
        self._holders = OnDemand(self._source.list_holders, max_age=_HOLDERS_AGE, at_once=_AT_ONCE)
        self._readings = OnDemand(self._read, max_age=_READINGS_AGE, at_once=_AT_ONCE)
        self.use = UseHistory()

    @property
    def synced(self) -> bool:
        """Whether nodes and pods were listed once."""
        return self._source.synced

    async def run(self) -> None:
        """Keeps the snapshot current until cancelled. Raises the exception of a part that fails."""
        tasks = Supervisor()
        try:
            self._source.start(tasks)
            tasks.start("agents", self._agents.run())
            tasks.start("snapshots", self._publish_changes())
            tasks.start("checks", self._check())
            if self._options.use_interval:
                tasks.start("use", self._read_use())
            if self._events is not None:
                tasks.start("events", self._events.run())
            await tasks.wait()
        finally:
            await tasks.cancel_all()
            await self._holders.close()
            await self._readings.close()
            self._metrics.close()

    def cluster(self) -> Cluster:
        """The current snapshot."""
        return self._cluster

    async def changed(self, after: int) -> int:
        """Waits until the generation is greater than `after`, and returns it."""
        while self._cluster.generation <= after:
            await self._published.wait()
        return self._cluster.generation

    async def holders(self, node: str) -> tuple[Holder, ...]:
        """The containers on a node that request resources of ours, by the API server, at most a minute old.

        Empty for a node that is not in the snapshot. Raises `accelplane.apiserver.ApiError`.
        """
        if node not in self._cluster.nodes:
            return ()
        watched = self._source.holders(node)
        return watched if watched is not None else await self._holders.get(node)

    async def readings(self, node: str) -> NodeReadings:
        """The current values of a node's devices, at most two seconds old."""
        if node not in self._cluster.nodes:
            return NodeReadings(time.time(), problem="no such node")
        return await self._readings.get(node)

    async def _read(self, node: str) -> NodeReadings:
        found = await self._agents.readings(node)
        self.use.add(node, found, time.time())
        return found

    async def _read_use(self) -> None:
        """Reads all nodes in turn, each one in the interval, and at most 20 a second."""
        turn = asyncio.Semaphore(_USE_AT_ONCE)

        async def read(node: str) -> None:
            try:
                await self._readings.get(node)
            finally:
                turn.release()

        async with asyncio.TaskGroup() as group:
            while True:
                nodes = [name for name, node in self._cluster.nodes.items() if _state(node) != "no_agent"]
                self.use.retain(self._cluster.nodes)
                interval = self._options.use_interval
                pause = max(interval / len(nodes), _USE_PAUSE) if nodes else min(interval, 1.0)
                for node in nodes:
                    await turn.acquire()
                    group.create_task(read(node), name=f"use {node}")
                    await asyncio.sleep(pause)
                if not nodes:
                    await asyncio.sleep(pause)

    # Changes

    def _mark(self, node: str) -> None:
        self._dirty.add(node)
        self._marked.set()

    def _mark_part(self, part: Part) -> None:
        self._changed_parts.add(part)
        self._marked.set()

    def _on_agent(self, old: Pod | None, new: Pod | None) -> None:
        before, after = (self._agent_place(pod) if pod is not None else None for pod in (old, new))
        # A watch that was interrupted may show a new pod of the same name, on another node, as a change of the old one.
        if before is not None and (after is None or after.node != before.node):
            self._agents.remove(before.node, before.name)
        if after is not None:
            self._agents.set(after)

    def _agent_place(self, pod: Pod) -> Place | None:
        identity = namespace, account = agent_identity(pod)
        namespaces, accounts = self._options.agent_namespaces, self._options.agent_accounts
        if (not namespaces or namespace in namespaces) and (not accounts or account in accounts):
            return agent_place(pod, loopback=self._options.loopback_agents)
        if identity not in self._ignored and len(self._ignored) < _MAX_IGNORED:
            self._ignored.add(identity)
            log.warning(
                "pod %s/%s is ignored: found labels of an agent with service account %s, expected a namespace of "
                "-agent-namespaces (%s) and an account of -agent-accounts (%s)",
                namespace, pod.metadata.name, account, ", ".join(namespaces) or "all", ", ".join(accounts) or "all",
            )  # fmt: skip
        return None

    async def _publish_changes(self) -> None:
        while True:
            await self._marked.wait()
            self._marked.clear()
            self._publish()
            # Changes that come together make one snapshot.
            await asyncio.sleep(_MIN_INTERVAL)

    async def _check(self) -> None:
        while True:
            # The first screens say that nothing is listed yet, and must not do so for long after the lists.
            check = self._agents.times.check
            await asyncio.sleep(min(check, _FIRST_CHECK) if self._cluster.problem == NOT_LISTED else check)
            self._agents.expire(time.time())
            if self._source.problem() != self._cluster.problem:
                self._marked.set()

    def _publish(self) -> None:
        known, now = self._cluster, time.time()
        nodes = self._composed_nodes()
        changed, self._changed_parts = self._changed_parts, set()
        parts: dict[str, Any] = {"problem": self._source.problem()}
        if "waiting" in changed:
            parts["waiting"] = self._source.waiting()
        if "quotas" in changed:
            parts["quotas"] = self._source.quotas()
        if "device_plugins" in changed:
            parts["device_plugins"], parts["more_device_plugins"] = self._source.device_plugins()
        if nodes is None and all(getattr(known, name) == part for name, part in parts.items()):
            return
        if nodes is not None:
            self._usage.update(known.nodes, nodes, now)
            parts["nodes"] = nodes
        self._cluster = replace(
            known, generation=known.generation + 1, time=now, held_seconds=self._usage.seconds(now), **parts
        )
        if self._events is not None and nodes is not None:
            self._events.update(nodes)
        published, self._published = self._published, asyncio.Event()
        published.set()

    def _composed_nodes(self) -> Mapping[str, Node] | None:
        """The nodes with the changes of those that are marked; None without changes."""
        known, changes = self._cluster.nodes, dict[str, Node | None]()
        marked, self._dirty = self._dirty, set()
        for name in marked:
            node = compose(name, self._source.node(name), self._agents.reports(name), self._source.holders(name))
            if node != known.get(name):
                changes[name] = node
        if not changes:
            return None
        nodes = {**known, **{name: node for name, node in changes.items() if node is not None}}
        for name in [name for name, node in changes.items() if node is None]:
            nodes.pop(name, None)
        return nodes

    def _counts(self) -> tuple[int, Mapping[str, int], Mapping[str, int]]:
        """The generation, the number of nodes by state, and of agents by state."""
        nodes = Counter(_state(node) for node in self._cluster.nodes.values())
        agents = Counter(report.state for report in self._agents.all_reports())
        return self._cluster.generation, nodes, agents


def _state(node: Node) -> str:
    """The state of a node in metrics: whether its numbers are those of agents."""
    if not node.agents:
        return "no_agent"
    return "connected" if all(agent.state == "connected" for agent in node.agents) else "incomplete"
