"""Events about devices that become unhealthy or recover, on the Node and on the pods that hold them.

What is written follows the state: a device that changes too often gets its next Event when its time has come, with the
state of that moment, and none if that is the state of the last Event. Facts: events of nodes have the node's name as
their UID, as those of the kubelet; `kubectl describe` finds them by it.
"""

import asyncio
import contextlib
import logging
import re
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from accelplane.apiserver import ApiError
from accelplane.kube.client import Client, Selection
from accelplane.kube.events import Recorder
from accelplane.kube.kinds import NarrowMetadata, Node, Pod
from accelplane.kube.objects import Object
from accelplane.kube.tasks import Supervisor

from . import model

log = logging.getLogger(__name__)

PER_MINUTE = 10
DEVICE_INTERVAL = 600.0
_WINDOW = 60.0

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


class DeviceKey(NamedTuple):
    """A device of a node."""

    node: str
    plugin: str
    device: str


class DeviceState(Struct, frozen=True):
    """The content of an Event about a device: whether one of its units is unhealthy, why, and the holders."""

    unhealthy: bool
    problem: str
    ids: int
    held: int
    pods: tuple[tuple[str, str], ...] = ()


class _Known(Struct):
    state: DeviceState
    written: bool  # whether the last Event, or the state at first sight, said unhealthy
    written_at: float


class EventPlan:
    """Which devices get an Event when. Times are those of one monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[DeviceKey, _Known] = {}
        self._written: deque[float] = deque()

    def update(self, node: str, states: Mapping[DeviceKey, DeviceState]) -> None:
        """Takes over the states of a node's devices. The first state of a device is no change."""
        for key in [key for key in self._known if key.node == node and key not in states]:
            del self._known[key]
        for key, state in states.items():
            if known := self._known.get(key):
                known.state = state
            else:
                self._known[key] = _Known(state, state.unhealthy, float("-inf"))

    def due(self, now: float) -> list[tuple[DeviceKey, DeviceState]]:
        """The Events to write now, which count as written."""
        found: list[tuple[DeviceKey, DeviceState]] = []
        while self._written and self._written[0] <= now - _WINDOW:
            self._written.popleft()
        for key, known in self._changed():
            count = 1 + min(len(known.state.pods), PER_MINUTE - 1)
            if known.written_at > now - DEVICE_INTERVAL or len(self._written) + count > PER_MINUTE:
                continue
            self._written.extend([now] * count)
            known.written, known.written_at = known.state.unhealthy, now
            found.append((key, known.state))
        return found

    def next_time(self, now: float) -> float | None:
        """When the next Event may be due; None without one that waits."""
        times = [known.written_at + DEVICE_INTERVAL for _, known in self._changed()]
        if not times:
            return None
        soonest = max(now, min(times))
        return max(soonest, self._written[0] + _WINDOW) if self._written else soonest

    def _changed(self) -> Iterable[tuple[DeviceKey, _Known]]:
        return [(key, known) for key, known in self._known.items() if known.written != known.state.unhealthy]


class DeviceEvents:
    """Writes the Events of a fleet."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # The pages and the agents' logs have the same facts.
        self._recorder = Recorder(client, client.field_manager, socket.gethostname(), log_notes=False)
        self._plan = EventPlan()
        self._nodes: Mapping[str, model.Node] = {}
        self._updated = asyncio.Event()

    def update(self, nodes: Mapping[str, model.Node]) -> None:
        """Takes over the nodes of a snapshot."""
        for name, node in nodes.items():
            if node is self._nodes.get(name):
                continue
            # Without a response of the agent, the state of its devices is unknown.
            if not node.agents or all(agent.state == "connected" for agent in node.agents):
                self._plan.update(name, device_states(node))
        for name in self._nodes.keys() - nodes.keys():
            self._plan.update(name, {})
        self._nodes = nodes
        self._updated.set()

    async def run(self) -> None:
        """Writes Events until cancelled."""
        tasks = Supervisor()
        try:
            tasks.start("event recorder", self._recorder.run())
            tasks.start("device events", self._write())
            await tasks.wait()
        finally:
            await tasks.cancel_all()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for key, state in self._plan.due(loop.time()):
                await self._record(key, state)
            next_time = self._plan.next_time(loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_time):
                    await self._updated.wait()
            self._updated.clear()

    async def _record(self, key: DeviceKey, state: DeviceState) -> None:
        kind: Literal["Normal", "Warning"] = "Warning" if state.unhealthy else "Normal"
        reason = "DeviceUnhealthy" if state.unhealthy else "DeviceRecovered"
        note = note_of(key, state)
        things: list[Object] = [Node(metadata=NarrowMetadata(name=key.node, uid=key.node))]
        for namespace, name in state.pods[: PER_MINUTE - 1]:
            if (pod := await self._pod(key.node, namespace, name)) is not None:
                things.append(pod)
        for thing in things:
            self._recorder.record(thing, kind, reason, note, action="MonitorDevice")

    async def _pod(self, node: str, namespace: str, name: str) -> Pod | None:
        """A pod that an agent names, if it is on the agent's node: agents must not write about other pods."""
        if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
            return None
        try:
            listing = await self._client.list(Pod, Selection(namespace, fields=f"metadata.name={name}"))
        except ApiError as error:
            log.warning("pod %s/%s: no event is written: %s", namespace, name, error)
            return None
        return next((pod for pod in listing.items if pod.spec.nodeName == node), None)


def device_states(node: model.Node) -> dict[DeviceKey, DeviceState]:
    """The states of a node's devices by its units."""
    devices: dict[DeviceKey, list[model.ReportedUnit]] = {}
    for unit in node.units:
        devices.setdefault(DeviceKey(node.name, unit.plugin, unit.device or unit.unit), []).append(unit)
    return {key: _device_state(units) for key, units in devices.items()}


def note_of(key: DeviceKey, state: DeviceState) -> str:
    """The text of an Event."""
    change = f"is unhealthy: {state.problem}" if state.unhealthy else "has recovered"
    return f"{key.plugin} device {key.device} of node {key.node} {change}; {state.held} of {state.ids} IDs are held"


def _device_state(units: list[model.ReportedUnit]) -> DeviceState:
    # A recovering device is still advertised as unhealthy.
    bad = [unit for unit in units if unit.phase in ("unhealthy", "recovering")]
    holders = [holder for unit in units for holder in unit.holders]
    words = (": ".join(part for part in (unit.reason, unit.text) if part) for unit in bad)
    return DeviceState(
        unhealthy=bool(bad),
        problem=next((text for text in words if text), "no reason known"),
        ids=sum(sum(unit.ids.values()) for unit in units),
        held=sum(holder.count for holder in holders),
        pods=tuple(sorted({(each.namespace, each.pod) for each in holders if each.namespace and each.pod})),
    )
