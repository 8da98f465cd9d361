"""The watches of the fleet: nodes, waiting pods, pods of agents, and assigned pods if required.

Quotas, device plugins, claims and their classes are optional: they are shown while the API server has them and the
account may read them.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Literal

import msgspec

from accelplane.apiserver import ApiError, Gone, StatusError, WatchIdleTimeout
from accelplane.kube.cache import Cache, UnreadableObject
from accelplane.kube.client import Client, Selection, Watched
from accelplane.kube.informer import Informer, WatchTimeouts
from accelplane.kube.kinds import Node, Pod
from accelplane.kube.metrics import Metrics
from accelplane.kube.objects import Object, Request
from accelplane.kube.tasks import Supervisor
from accelplane.report.inventory import Holder

from . import families
from .claims import Classes, DeviceClass, ResourceClaim, read_classes, relevant_claim
from .deviceplugins import KINDS, PluginResource, device_plugin, problems_first, relevant_plugin, unreadable_plugin
from .model import DevicePlugin, Quota, Waiting
from .objects import (
    AGENT_LABELS,
    NodeFacts,
    ResourceQuota,
    agent_pod,
    holders_of,
    node_facts,
    quotas_of,
    relevant_node,
    relevant_pod,
    waiting_pod,
)
from .options import FleetOptions

log = logging.getLogger(__name__)

UNSERVED_RETRY = 300.0
# A request to a server that does not answer ends after 15 s, and is repeated after at most 7.5 s.
_FAILURE_AGE = 30.0
_NODE = "node"
_MAX_DEVICE_PLUGINS = 50
NOT_LISTED = "nodes and pods have not been listed yet"

_UNASSIGNED = Selection(fields="spec.nodeName=,status.phase=Pending")
_ASSIGNED = Selection(fields="spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed")
_AGENTS = Selection(labels=",".join(f"{name}={value}" for name, value in AGENT_LABELS.items()))


Part = Literal["waiting", "quotas", "device_plugins"]


class Listeners(msgspec.Struct, frozen=True):
    """Callbacks after a change: with the name of the node, the old and the new pod of the agent, or the part."""

    node: Callable[[str], None]
    agent: Callable[[Pod | None, Pod | None], None]
    part: Callable[[Part], None]


class Source:
    """The caches of a fleet, and questions to them."""

    def __init__(
        self,
        client: Client,
        options: FleetOptions,
        listeners: Listeners,
        *,
        watch_timeouts: WatchTimeouts,
        unserved_retry: float = UNSERVED_RETRY,
    ) -> None:
        self._client = client
        self._known = partial(families.is_known, prefixes=options.resource_prefixes)
        self._listeners = listeners
        self._watched = observed = _Observed(client)
        pod_transform = relevant_pod(self._known)
        nodes = Informer(observed, watch_timeouts=watch_timeouts)
        self._nodes = nodes.cache(Node, transform=relevant_node(self._known))
        waiting = Informer(observed, _UNASSIGNED, watch_timeouts=watch_timeouts)
        self._waiting = waiting.cache(Pod, transform=pod_transform)
        agents = Informer(observed, _AGENTS, watch_timeouts=watch_timeouts)
        self._agents = agents.cache(Pod, transform=agent_pod)
        self._informers = [nodes, waiting, agents]
        self._assigned = None
        if options.pods == "all":
            assigned = Informer(observed, _ASSIGNED, watch_timeouts=watch_timeouts)
            self._assigned = assigned.cache(Pod, transform=pod_transform)
            self._assigned.add_index(_NODE, _node_of)
            self._assigned.subscribe(self._on_assigned)
            self._informers.append(assigned)
        self._unserved_retry = unserved_retry
        quotas = Informer(client, watch_timeouts=watch_timeouts) if options.quotas else None
        self._quotas = quotas.cache(ResourceQuota) if quotas else None
        self._plugins: dict[str, Cache[PluginResource]] = {}
        claims = [Informer(client, watch_timeouts=watch_timeouts) for _kind in (ResourceClaim, DeviceClass)]
        self._claims = claims[0].cache(ResourceClaim, transform=relevant_claim)
        self._device_classes = claims[1].cache(DeviceClass)
        self._known_driver = partial(families.is_known_driver, prefixes=options.resource_prefixes)
        self._classes = Classes(self._known_driver)
        plugins: list[Informer] = []
        for kind in KINDS if options.device_plugins else ():
            plugins.append(Informer(client, watch_timeouts=watch_timeouts))
            self._plugins[kind.__name__] = plugins[-1].cache(kind, transform=relevant_plugin)
        self._optional = (
            (_RejectionLog("resource quotas"), [quotas] if quotas else []),
            (_RejectionLog("device plugins of the operator"), plugins),
            (_RejectionLog("pods that wait for claims"), claims),
        )
        self._nodes.subscribe(self._on_node, on_unreadable=lambda request: listeners.node(request.name))
        self._waiting.subscribe(self._on_waiting)
        self._agents.subscribe(listeners.agent)
        if self._quotas is not None:
            self._quotas.subscribe(lambda _old, _new: listeners.part("quotas"))
        self._claims.subscribe(self._on_claim)
        self._device_classes.subscribe(self._on_class)
        notify = partial(listeners.part, "device_plugins")
        for cache in self._plugins.values():
            cache.subscribe(lambda _old, _new: notify(), on_unreadable=lambda _request: notify())

    def start(self, tasks: Supervisor) -> None:
        """Starts the watches."""
        for informer in self._informers:
            tasks.start(f"cache {informer}", informer.run())
        for rejections, informers in self._optional:
            for informer in informers:
                tasks.start(f"cache {informer}", self._run_optional(informer, rejections))

    async def _run_optional(self, informer: Informer, rejections: "_RejectionLog") -> None:
        # Without the API server, the messages of the required watches are enough.
        for required in self._informers:
            await required.synced.wait()
        await informer.run_while_served(rejections.add, retry=self._unserved_retry)

    @property
    def synced(self) -> bool:
        """Whether everything was listed once that is not optional."""
        return all(informer.synced.is_set() for informer in self._informers)

    def problem(self) -> str:
        """Why the state may be old or incomplete; empty if everything was listed and the API server answers."""
        problem = self._watched.problem(time.time())
        return problem or ("" if self.synced else NOT_LISTED)

    def node(self, name: str) -> NodeFacts | None:
        """The facts of a node; None if it does not exist or cannot be read."""
        try:
            found = self._nodes.get(Request(name))
        except UnreadableObject:
            return None
        return node_facts(found, self._known) if found is not None else None

    def waiting(self) -> tuple[Waiting, ...]:
        """The pods that wait for resources of ours."""
        present: set[str] = set()
        if self._classes.resources:
            present.update(each.name for node in self._nodes for each in node_facts(node, self._known).resources)

        def requested(pod: Pod) -> Mapping[str, int]:
            namespace = pod.metadata.namespace or ""
            return self._classes.requests(pod, self._known, present.__contains__, partial(self._claim, namespace))

        return tuple(found for pod in self._waiting if (found := waiting_pod(pod, self._known, requested)) is not None)

    def quotas(self) -> tuple[Quota, ...]:
        """The quotas of resources of ours."""
        return tuple(quota for each in self._quotas or () for quota in quotas_of(each, self._known))

    def device_plugins(self) -> tuple[tuple[DevicePlugin, ...], int]:
        """The custom resources of the operator, those with problems first and with a limit, and how many are more."""
        found: list[DevicePlugin] = []
        for kind, cache in self._plugins.items():
            found += [device_plugin(kind, each) for each in cache]
            found += [unreadable_plugin(kind, each.name, reason) for each, reason in cache.unreadable.items()]
        return problems_first(found)[:_MAX_DEVICE_PLUGINS], max(0, len(found) - _MAX_DEVICE_PLUGINS)

    def holders(self, node: str) -> tuple[Holder, ...] | None:
        """The holders on a node by the watched pods; None if assigned pods are not watched."""
        if self._assigned is None:
            return None
        return self._holders(self._assigned.by_index(_NODE, node))

    async def list_holders(self, node: str) -> tuple[Holder, ...]:
        """The holders on a node by a list of its pods. Raises `ApiError`."""
        listing = await self._client.list(Pod, Selection(fields=f"spec.nodeName={node}"))
        return self._holders(listing.items)

    def _holders(self, pods: Sequence[Pod]) -> tuple[Holder, ...]:
        return tuple(holder for pod in pods for holder in holders_of(pod, self._known))

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        before, after = (node_facts(node, self._known) if node is not None else None for node in (old, new))
        changed = new or old
        if changed is not None and before != after:
            self._listeners.node(changed.metadata.name or "")

    def _on_waiting(self, old: Pod | None, new: Pod | None) -> None:
        before, after = (waiting_pod(pod, self._known) if pod is not None else None for pod in (old, new))
        if before != after or any(pod is not None and pod.spec.resourceClaims for pod in (old, new)):
            self._listeners.part("waiting")

    def _on_claim(self, old: ResourceClaim | None, new: ResourceClaim | None) -> None:
        if any(claim is not None and claim.status.allocation is None for claim in (old, new)):
            self._listeners.part("waiting")

    def _on_class(self, _old: DeviceClass | None, _new: DeviceClass | None) -> None:
        self._classes = read_classes(self._device_classes, self._known_driver)
        self._listeners.part("waiting")

    def _claim(self, namespace: str, name: str) -> ResourceClaim | None:
        try:
            return self._claims.get(Request(name, namespace))
        except UnreadableObject:
            return None

    def _on_assigned(self, old: Pod | None, new: Pod | None) -> None:
        for node in {name for pod in (old, new) if pod is not None for name in _node_of(pod)}:
            self._listeners.node(node)


class _Observed:
    """A client that notes whether its lists and watches fail. An informer does not show that to its owner."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._failing_since = 0.0
        self._failed = 0.0
        self._error = ""

    @property
    def metrics(self) -> Metrics:
        return self._client.metrics

    def problem(self, now: float) -> str:
        if now - self._failed > _FAILURE_AGE:
            self._failing_since = 0.0
        if not self._failing_since:
            return ""
        since = datetime.fromtimestamp(self._failing_since, UTC)
        return f"requests to the API server have failed since {since:%Y-%m-%d %H:%M:%S} UTC: {self._error}"

    async def list_pages(
        self, kind: type[Object], selection: Selection, consume: Callable[[Sequence[msgspec.Raw]], None]
    ) -> str:
        try:
            version = await self._client.list_pages(kind, selection, consume)
        except ApiError as error:
            self._note(error)
            raise
        return version

    async def watch(
        self, kind: type[Object], selection: Selection, resource_version: str, *, duration: float, idle: float
    ) -> AsyncGenerator[Watched, None]:
        events = self._client.watch(kind, selection, resource_version, duration=duration, idle=idle)
        try:
            async for event in events:
                yield event
        except ApiError as error:
            self._note(error)
            raise
        finally:
            await events.aclose()

    def _note(self, error: ApiError) -> None:
        if isinstance(error, Gone | WatchIdleTimeout):
            return
        now = time.time()
        if now - self._failed > _FAILURE_AGE or not self._failing_since:
            self._failing_since = now
        self._failed, self._error = now, str(error)


def _node_of(pod: Pod) -> list[str]:
    return [pod.spec.nodeName] if pod.spec.nodeName else []


class _RejectionLog:
    """Logs the first missing right to read `subject`. Resources that are not installed are no reason for a message."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._logged = False

    def add(self, error: StatusError) -> None:
        if error.code == HTTPStatus.FORBIDDEN and not self._logged:
            self._logged = True
            log.info("%s are not shown: %s", self._subject, error)
