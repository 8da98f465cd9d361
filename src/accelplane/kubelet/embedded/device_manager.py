"""The device manager of the embedded kubelet: the devices that containers get when their pod is admitted.

Error texts are those of kubelets, because pods' events show them.
"""

import logging
import random
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from accelplane.devices import natural
from accelplane.kubelet.checkpoint import Holding, by_node
from accelplane.kubelet.embedded import topology
from accelplane.kubelet.embedded.allocations import Allocations
from accelplane.kubelet.embedded.connection import PluginError
from accelplane.kubelet.embedded.device_choice import NotEnough, complete, plan
from accelplane.kubelet.embedded.endpoints import Endpoint, Endpoints
from accelplane.kubelet.embedded.model import AdmissionError, ContainerStartError, DeviceStatus, Pod, healthy_ids

log = logging.getLogger(__name__)


class Claim(Struct, frozen=True):
    """A container, and how many devices of each resource of the device manager it requests."""

    pod: Pod
    uid: str
    container: str
    sizes: Mapping[str, int]

    @property
    def name(self) -> str:
        return f"pod {self.pod.namespace}/{self.pod.name}, container {self.container}"


class _AllocationError(Exception):
    """No devices are allocated to the container; the text is the kubelet's."""


class DeviceManager:
    """Decides with `policy` on the NUMA nodes of a container, and allocates devices of `endpoints` to it.

    `crashes` are the events that `EmbeddedKubelet.would_crash` describes.
    """

    def __init__(self, endpoints: Endpoints, policy: topology.Policy, numa_nodes: int, seed: int | None) -> None:
        self.allocations = Allocations()
        self.crashes: list[str] = []
        self.policy: topology.Policy = policy
        self._endpoints = endpoints
        self._numa_nodes = numa_nodes
        self._random = random.Random(seed)  # noqa: S311 - an order, not a secret

    def claim(self, pod: Pod, uid: str, container: str) -> Claim:
        sizes = {resource: size for resource, size in pod.wants(container).items() if self._is_ours(resource)}
        return Claim(pod, uid, container, sizes)

    def devices_of(self, resource: str) -> Mapping[str, DeviceStatus]:
        endpoint = self._endpoints.by_name.get(resource)
        return endpoint.devices or {} if endpoint else {}

    def holds_all(self, claim: Claim) -> bool:
        """Whether the container holds devices of each resource that it requests."""
        return all(self.allocations.find(claim.uid, claim.container, resource) for resource in claim.sizes)

    async def admit(self, claim: Claim) -> None:
        """Allocates devices to a container that does not hold them yet. Raises `AdmissionError`."""
        for resource, size in claim.pod.wants(claim.container).items():
            # A kubelet ignores resources that the node's status does not have.
            if resource in self._endpoints.by_name and resource not in claim.sizes:
                problem = f"{resource}, requested: {size}, used: 0, capacity: 0"
                raise AdmissionError(claim.pod.name, f"OutOf{resource}", f"Node didn't have enough resource: {problem}")
        affinity, admitted = self.decide(claim)
        if not admitted:
            raise AdmissionError(
                claim.pod.name, "TopologyAffinityError", "Resources cannot be allocated with Topology locality"
            )
        try:
            for resource, size in claim.sizes.items():
                await self._allocate(claim, resource, size, affinity)
        except (_AllocationError, PluginError) as error:
            raise AdmissionError.unexpected(claim.pod.name, error) from error

    def decide(self, claim: Claim) -> tuple[int | None, bool]:
        """The topology manager's decision: NUMA nodes, and whether the container is admitted."""
        # A kubelet without a policy computes no hints.
        hints = [self._hints(claim, *item) for item in claim.sizes.items()] if self.policy != "none" else ()
        return topology.decide(self.policy, hints, self._numa_nodes)

    async def pre_start(self, claim: Claim) -> None:
        """Calls PreStartContainer of the plugins that require it. Raises `ContainerStartError`."""
        for resource in claim.sizes:
            endpoint = self._endpoints.by_name.get(resource)
            holding = self.allocations.find(claim.uid, claim.container, resource)
            if endpoint is None or endpoint.expired:
                problem = f"endpoint not found in cache for a registered resource: {resource}"
            elif not endpoint.options.pre_start_required:
                continue
            elif holding is None:
                problem = f"no devices found allocated in local cache for resource {resource}"
            else:
                try:
                    await endpoint.plugin().pre_start(self._shuffle(holding.ids))
                    continue
                except PluginError as error:
                    problem = f"device plugin PreStartContainer rpc failed with err: {error}"
            raise ContainerStartError(f"{claim.name}: {problem}")

    def _is_ours(self, resource: str) -> bool:
        """Whether the device manager counts a resource as its own: it is listed, or pods hold devices of it."""
        endpoint = self._endpoints.by_name.get(resource)
        return bool((endpoint and endpoint.listed) or self.allocations.in_use(resource))

    def _hints(self, claim: Claim, resource: str, size: int) -> Sequence[topology.Hint] | None:
        devices = self.devices_of(resource)
        if not topology.has_topology(devices):
            return None
        recorded = self.allocations.find(claim.uid, claim.container, resource)
        if recorded is not None:
            available, reusable = frozenset(recorded.ids), frozenset[str]()
            if len(available) != size:
                return ()
        else:
            available = healthy_ids(devices) - self.allocations.in_use(resource)
            reusable = self.allocations.reusable(claim.uid, claim.pod, resource)
            if len(available | reusable) < size:
                return ()
        self._check_listed(resource, available | reusable, f"renewing the topology hints of {claim.name}")
        return topology.resource_hints(
            devices, size, available=available, reusable=reusable, numa_nodes=self._numa_nodes
        )

    async def _allocate(self, claim: Claim, resource: str, size: int, affinity: int | None) -> None:
        """Raises `_AllocationError` and `PluginError`."""
        recorded = self.allocations.find(claim.uid, claim.container, resource)
        if recorded is not None and len(recorded.ids) != size:
            raise _AllocationError(
                f'pod "{claim.uid}" container "{claim.container}" changed request for resource "{resource}" '
                f"from {len(recorded.ids)} to {size}"
            )
        endpoint = self._endpoints.by_name.get(resource)
        if endpoint is None or not endpoint.listed:
            raise _AllocationError(f"cannot allocate unregistered device {resource}")
        allocatable = healthy_ids(self.devices_of(resource))
        if not allocatable:
            raise _AllocationError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if recorded is not None:
            if not allocatable.issuperset(recorded.ids):
                raise _AllocationError(
                    f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
                )
            return
        chosen = await self._choose(claim, resource, size, endpoint, affinity)
        answer = await endpoint.plugin().allocate(self._shuffle(chosen))
        self._check_listed(resource, chosen, f"Allocate was answered for {claim.name}")
        devices = by_node(chosen, {id_: status.nodes for id_, status in self.devices_of(resource).items()})
        response = answer.SerializeToString(deterministic=True)
        self.allocations.record(Holding(claim.uid, claim.container, resource, devices, response))

    async def _choose(
        self, claim: Claim, resource: str, size: int, endpoint: Endpoint, affinity: int | None
    ) -> tuple[str, ...]:
        try:
            draft = plan(
                self.devices_of(resource),
                size,
                reusable=self.allocations.reusable(claim.uid, claim.pod, resource),
                in_use=self.allocations.in_use(resource),
                affinity=affinity,
                shuffled=self._shuffle,
            )
        except NotEnough as error:
            raise _AllocationError(f"requested number of devices unavailable for {resource}. {error}") from error
        if draft.is_complete or not endpoint.options.get_preferred_allocation_available:
            return complete(draft, ())
        try:
            preferred = await endpoint.plugin().preferred_allocation(
                self._shuffle((*draft.selected, *draft.choice)), self._shuffle(draft.selected), size
            )
        except PluginError as error:
            raise _AllocationError(f"device plugin GetPreferredAllocation rpc failed with err: {error}") from error
        return complete(draft, preferred)

    def _check_listed(self, resource: str, ids: Iterable[str], event: str) -> None:
        """Records a crash if one of the IDs is not listed."""
        devices = self.devices_of(resource)
        if unlisted := sorted((id_ for id_ in ids if id_ not in devices), key=natural):
            self.crashes.append(f"{resource}: {event}, but {', '.join(unlisted)} is not listed")
            log.error("a real kubelet would crash: %s", self.crashes[-1])

    def _shuffle(self, ids: Iterable[str]) -> list[str]:
        """IDs in random order, like a Go map's keys."""
        order = sorted(ids, key=natural)
        self._random.shuffle(order)
        return order
