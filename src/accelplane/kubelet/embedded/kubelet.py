"""The embedded kubelet: sockets, registrations, device lists, admission of pods.

Facts are from the device plugin and pod resources documentation of Kubernetes 1.28 to 1.37 and from the behaviour of
their kubelets.
"""

import asyncio
import contextlib
import logging
import os
import random
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

import grpc.aio

from accelplane.devices import natural
from accelplane.kubelet import checkpoint, sockets
from accelplane.kubelet import podresources_v1_pb2 as podresources_pb2
from accelplane.kubelet.checkpoint import Checkpoint, CheckpointError, Holding
from accelplane.kubelet.embedded import podresources_server, topology
from accelplane.kubelet.embedded.allocations import Allocations
from accelplane.kubelet.embedded.connection import PluginError
from accelplane.kubelet.embedded.device_choice import NotEnough, complete, plan
from accelplane.kubelet.embedded.endpoints import Endpoint, Endpoints
from accelplane.kubelet.embedded.model import (
    AdmissionError,
    ContainerStartError,
    DeviceStatus,
    KubeletError,
    NoSuchPod,
    Pod,
    Registration,
    ResourceStatus,
    RunningContainer,
    RunningPod,
)
from accelplane.kubelet.notifier import Notifier

log = logging.getLogger(__name__)

_SOCKET = "kubelet.sock"


class _Claim:
    """A container in admission: its pod, its requests, and those for the device manager (`wants`)."""

    def __init__(self, pod: Pod, uid: str, container: str) -> None:
        self.pod = pod
        self.uid = uid
        self.container = container
        self.name = f"pod {pod.namespace}/{pod.name}, container {container}"
        self.requested = pod.wants(container)
        self.wants: Mapping[str, int] = {}


class EmbeddedKubelet:
    """A kubelet's device manager below `directory`: sockets in its `device-plugins` and `pod-resources`.

    `topology_policy` is none, best-effort, restricted or single-numa-node, on a machine of `numa_nodes` nodes.
    `endpoint_grace` is how many seconds a resource keeps its capacity after its plugin has disconnected.

    `call_timeout` bounds PreStartContainer and the calls for which a real kubelet has no deadline. `seed` makes the
    random order of IDs repeatable. `drops_successor` is a race in kubelets: when the old stream of a resource ends
    after a new registration, the new plugin is disconnected instead.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        topology_policy: str = "none",
        numa_nodes: int = 2,
        endpoint_grace: float = 300.0,
        connect_timeout: float = 10.0,
        call_timeout: float = 30.0,
        seed: int | None = None,
        drops_successor: bool = True,
    ) -> None:
        """Raises `ValueError` for an unknown policy or an impossible number of NUMA nodes."""
        self._policy: topology.Policy = topology.checked_policy(topology_policy)
        if not 1 <= numa_nodes <= topology.MAX_NUMA_NODES:
            raise ValueError(f"{numa_nodes} NUMA nodes, a kubelet works with 1 to {topology.MAX_NUMA_NODES}")
        self.directory = os.path.abspath(directory)
        self.plugin_directory = os.path.join(self.directory, "device-plugins")
        self.pod_resources_socket = os.path.join(self.directory, "pod-resources", _SOCKET)
        self._kubelet_socket = os.path.join(self.plugin_directory, _SOCKET)
        self._private = os.path.join(self.directory, ".embedded")
        self._numa_nodes = numa_nodes
        self._random = random.Random(seed)  # noqa: S311 - an order, not a secret

        self._endpoints = Endpoints(
            self.plugin_directory,
            grace=endpoint_grace,
            connect_timeout=connect_timeout,
            call_timeout=call_timeout,
            drops_successor=drops_successor,
            on_list=self._on_list,
            on_registration=self._notify,
        )
        self._allocations = Allocations()
        self._pods: dict[tuple[str, str], tuple[Pod, RunningPod]] = {}
        self._admitting: dict[str, RunningPod] = {}
        self._admission = asyncio.Lock()
        self._running = False
        self._servers: list[grpc.aio.Server] = []
        self._notified: Mapping[str, ResourceStatus] = {}
        self._crashes: list[str] = []
        # A kubelet keeps the holdings of deleted pods until the next admission or pod resources List.
        self._ended: list[Holding] = []
        # Resources of pods from before the start whose hints have not been renewed yet.
        self._renewals_due: set[str] = set()
        self._state_changed = Notifier()
        self._resources_changed = Notifier()

    async def start(self) -> None:
        """Starts like a kubelet: reads the checkpoint, removes all sockets of plugins, creates its own.

        Raises `KubeletError` when another kubelet serves the directory or the sockets cannot be made.
        """
        if self._running:
            raise KubeletError(f"{self.directory}: this kubelet is already running")
        try:
            for path in (self._kubelet_socket, self.pod_resources_socket):
                sockets.checked_path(path)
            if (owner := sockets.listener(self._kubelet_socket)) is not None:
                raise KubeletError(
                    f"{self._kubelet_socket} is answered by another kubelet (process {owner or 'unknown'}); "
                    "use a separate directory, or stop the other kubelet"
                )
            for directory in (self.plugin_directory, os.path.dirname(self.pod_resources_socket)):
                os.makedirs(directory, mode=0o750, exist_ok=True)
            self._restore()
            _remove_sockets(self.plugin_directory)
            shutil.rmtree(self._private, ignore_errors=True)
            os.mkdir(self._private, mode=0o700)
            self._running = True
            await self._serve(self._endpoints.handlers(), "r", self._kubelet_socket)
            await self._serve(
                podresources_server.handlers(
                    self._list_pods, lambda: podresources_server.allocatable(self.resources())
                ),
                "p",
                self.pod_resources_socket,
            )
        except OSError as error:
            await self.stop()
            raise KubeletError(
                f"cannot start a kubelet: {error.filename or self.directory}: {error.strerror}"
            ) from error
        except (RuntimeError, sockets.SocketPathError) as error:
            await self.stop()
            raise KubeletError(f"cannot start a kubelet: {self.directory}: {error}") from error
        self._notify()

    async def stop(self) -> None:
        """Ends like a killed kubelet: streams break, the sockets and the checkpoint stay."""
        self._running = False
        await self._endpoints.close()
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        self._servers.clear()
        shutil.rmtree(self._private, ignore_errors=True)

    async def restart(self) -> None:
        """Stops and starts. Pods keep running with their devices; plugins have to register again.

        Under a topology policy, pods whose devices are not aligned in the new list end, as with a real kubelet.
        """
        await self.stop()
        await self.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.stop()

    @property
    def registrations(self) -> Sequence[Registration]:
        """The calls of `Register` since the first start, rejected ones included, oldest first."""
        return self._endpoints.registrations

    @property
    def would_crash(self) -> Sequence[str]:
        """Where a kubelet 1.28 to 1.36 would have dereferenced nil because a device ID is not listed, oldest first.

        Two cases: Allocate is answered for an ID that left the list before the answer; topology hints are renewed for a
        pod that holds such an ID. See docs/kubelet-defects.md.
        """
        return tuple(self._crashes)

    def resources(self) -> Mapping[str, ResourceStatus]:
        """The resources as in the node's status, in the order of their names."""
        return {
            name: ResourceStatus(
                capacity=len(endpoint.devices),
                allocatable=len(_healthy(endpoint.devices)),
                devices=endpoint.devices,
                in_use=tuple(sorted(self._allocations.in_use(name), key=natural)),
            )
            for name, endpoint in sorted(self._endpoints.by_name.items())
            if endpoint.devices is not None
        }

    def pods(self) -> Sequence[RunningPod]:
        """The admitted pods, oldest first."""
        return tuple(running for _, running in self._pods.values())

    async def changed(self) -> None:
        """Returns at the next change of anything in `resources()`."""
        await self._resources_changed.wait()

    async def until(
        self,
        predicate: Callable[["EmbeddedKubelet"], bool],
        timeout: float | None = 10.0,  # noqa: ASYNC109 - the error has to describe the state
    ) -> None:
        """Returns when `predicate(self)` is true; checks at each change of resources, pods, registrations.

        Raises `TimeoutError` with the current state in its text.
        """
        try:
            async with asyncio.timeout(timeout):
                while not predicate(self):
                    await self._state_changed.wait()
        except TimeoutError:
            raise TimeoutError(f"not within {timeout} s; the kubelet's state is:\n{self.describe()}") from None

    def describe(self) -> str:
        """The state as plain text: resources with their devices, pods, the last registrations."""
        lines: list[str] = []
        names = {pod.uid: f"{pod.namespace}/{pod.name}" for pod in self.pods()}
        holders = {
            (holding.resource, key): f"{holding.container} of {names.get(holding.pod_uid, 'a deleted pod')}"
            for holding in self._allocations
            for key in holding.ids
        }
        for name, status in self.resources().items():
            lines.append(f"{name}: capacity {status.capacity}, allocatable {status.allocatable}")
            for key, device in status.devices.items():
                nodes = f"  NUMA {','.join(map(str, device.nodes))}" if device.nodes else ""
                holder = f"  held by {holders[name, key]}" if (name, key) in holders else ""
                lines.append(f"  {key}  {device.health}{nodes}{holder}")
        if not lines:
            lines.append("no resources")
        lines.extend(f"pod {pod.namespace}/{pod.name}" for pod in self.pods())
        lines.extend(
            f"registration {record.number}: {record.resource} at {record.endpoint}: {record.outcome}"
            for record in self.registrations[-5:]
        )
        return "\n".join(lines)

    async def run_pod(self, pod: Pod) -> RunningPod:
        """Admits a pod that was bound to this node and starts its containers.

        A running pod is admitted again, as after a reboot of the node: it keeps its devices if they are still healthy.
        Raises `AdmissionError`, after which the pod is removed, and `ContainerStartError`, after which it
        waits for `start_container`.
        """
        self._require_running()
        async with self._admission:
            running = await self._admit(pod)
        for container in (*pod.init_containers, *pod.containers):
            await self.start_container(pod.name, container, pod.namespace)
        return running

    async def start_container(self, name: str, container: str, namespace: str = "default") -> RunningContainer:
        """Starts or restarts a container of an admitted pod, after PreStartContainer where a plugin requires it.

        The container gets the answer of its admission: `Allocate` is not called again. Raises `NoSuchPod`,
        `ContainerStartError`.
        """
        self._require_running()
        pod, running = self._pod(name, namespace)
        if container not in running.containers:
            raise NoSuchPod(f"pod {namespace}/{name} has no container {container}, only {list(running.containers)}")
        wants = [resource for resource in pod.wants(container) if self._is_ours(resource)]
        for resource in wants:
            await self._pre_start(running, container, resource)
        if not all(self._allocations.held(running.uid, container, resource) for resource in wants):
            # The checkpoint was lost: a kubelet then allocates again for a running pod.
            async with self._admission:
                running = await self._admit(pod)
        return running.containers[container]

    async def resize_pod(self, name: str, namespace: str = "default") -> None:
        """Changes CPU or memory of a running pod in place: the kubelet admits the pod again with the devices it holds.

        The pod runs on in any case. Raises `NoSuchPod`, and `AdmissionError` where a kubelet defers the resize.
        """
        self._require_running()
        async with self._admission:
            pod, running = self._pod(name, namespace)
            for container in running.containers:
                await self._admit_container(_Claim(pod, running.uid, container))

    def delete_pod(self, name: str, namespace: str = "default") -> None:
        """Ends a pod; its devices are free immediately. Raises `NoSuchPod`.

        As in a real kubelet, the checkpoint names the pod until it is written for the first time after an admission or
        a pod resources List.
        """
        _, running = self._pod(name, namespace)
        del self._pods[namespace, name]
        self._ended.extend(holding for holding in self._allocations if holding.pod_uid == running.uid)
        self._allocations.forget(running.uid)
        self._notify()

    async def _serve(self, handlers: grpc.GenericRpcHandler, name: str, path: str) -> None:
        """Serves at a hard link `path`: gRPC removes its own path at the end, but a killed kubelet's sockets stay."""
        private = os.path.join(self._private, name)
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers((handlers,))
        server.add_insecure_port(sockets.address(private))
        await server.start()
        self._servers.append(server)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.link(private, path)

    async def _admit(self, pod: Pod) -> RunningPod:
        known = self._pods.get((pod.namespace, pod.name))
        uid = known[1].uid if known else str(uuid.uuid4())
        self._ended.clear()
        # The checkpoint may name pods that ended while no kubelet ran.
        self._allocations.forget_all_but((uid, *(running.uid for _, running in self._pods.values())))
        containers = (*pod.init_containers, *pod.containers)
        # Pod resources name a pod from the beginning of its admission on.
        self._admitting[uid] = RunningPod(
            name=pod.name, namespace=pod.namespace, uid=uid, containers=dict.fromkeys(containers, RunningContainer())
        )
        try:
            for container in containers:
                await self._admit_container(_Claim(pod, uid, container))
            try:
                self._save()
            except OSError as error:
                raise _unexpected(pod, str(error)) from error
        except BaseException:
            self._pods.pop((pod.namespace, pod.name), None)
            self._allocations.forget(uid)
            self._save_and_notify()
            raise
        finally:
            del self._admitting[uid]
        running = RunningPod(
            name=pod.name,
            namespace=pod.namespace,
            uid=uid,
            containers={container: self._allocations.container(uid, container) for container in containers},
        )
        self._pods[pod.namespace, pod.name] = (pod, running)
        self._notify()
        return running

    async def _admit_container(self, claim: _Claim) -> None:
        for resource, size in claim.requested.items():
            # A kubelet ignores resources that the node's status does not have.
            if resource in self._endpoints.by_name and not self._is_ours(resource):
                raise AdmissionError(
                    claim.pod.name,
                    f"OutOf{resource}",
                    f"Node didn't have enough resource: {resource}, requested: {size}, used: 0, capacity: 0",
                )
        affinity, admitted = self._decide(claim)
        if not admitted:
            raise AdmissionError(
                claim.pod.name, "TopologyAffinityError", "Resources cannot be allocated with Topology locality"
            )
        for resource in claim.wants:
            await self._allocate(claim, resource, affinity)

    def _decide(self, claim: _Claim) -> tuple[int | None, bool]:
        """The topology manager's decision: NUMA nodes, and whether the container is admitted."""
        claim.wants = {resource: size for resource, size in claim.requested.items() if self._is_ours(resource)}
        # A kubelet without a policy computes no hints.
        hints = [self._hints(claim, resource) for resource in claim.wants] if self._policy != "none" else ()
        return topology.decide(self._policy, hints, self._numa_nodes)

    def _hints(self, claim: _Claim, resource: str) -> Sequence[topology.Hint] | None:
        devices = self._devices_of(resource)
        if not topology.has_topology(devices):
            return None
        size = claim.wants[resource]
        recorded = self._allocations.held(claim.uid, claim.container, resource)
        if recorded is not None:
            available, reusable = frozenset(recorded.ids), frozenset[str]()
            if len(available) != size:
                return ()
        else:
            available = _healthy(devices) - self._allocations.in_use(resource)
            reusable = self._allocations.reusable(claim.uid, claim.pod, resource)
            if len(available | reusable) < size:
                return ()
        self._check_listed(resource, available | reusable, f"renewing the topology hints of {claim.name}")
        return topology.resource_hints(
            devices, size, available=available, reusable=reusable, numa_nodes=self._numa_nodes
        )

    async def _allocate(self, claim: _Claim, resource: str, affinity: int | None) -> None:
        """Allocates devices of one resource to a container that does not hold them yet."""
        size = claim.wants[resource]
        recorded = self._allocations.held(claim.uid, claim.container, resource)
        if recorded is not None and len(recorded.ids) != size:
            raise _unexpected(
                claim.pod,
                f'pod "{claim.uid}" container "{claim.container}" changed request for resource "{resource}" '
                f"from {len(recorded.ids)} to {size}",
            )
        endpoint = self._endpoints.by_name.get(resource)
        if endpoint is None or not endpoint.listed:
            raise _unexpected(claim.pod, f"cannot allocate unregistered device {resource}")
        healthy = _healthy(self._devices_of(resource))
        if not healthy:
            raise _unexpected(claim.pod, f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if recorded is not None:
            if not healthy.issuperset(recorded.ids):
                raise _unexpected(
                    claim.pod,
                    f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}",
                )
            return
        chosen = await self._choose(claim, resource, endpoint, affinity)
        if endpoint.connection is None:
            raise _unexpected(claim.pod, f"endpoint {resource} has been stopped")
        try:
            answer = await endpoint.connection.allocate(self._shuffle(chosen))
        except PluginError as error:
            raise _unexpected(claim.pod, str(error)) from error
        self._check_listed(resource, chosen, f"Allocate was answered for {claim.name}")
        self._allocations.record(
            Holding(
                claim.uid,
                claim.container,
                resource,
                checkpoint.by_node(chosen, {id_: status.nodes for id_, status in self._devices_of(resource).items()}),
                answer.SerializeToString(deterministic=True),
            )
        )

    async def _choose(self, claim: _Claim, resource: str, endpoint: Endpoint, affinity: int | None) -> tuple[str, ...]:
        size = claim.wants[resource]
        try:
            draft = plan(
                self._devices_of(resource),
                size,
                reusable=self._allocations.reusable(claim.uid, claim.pod, resource),
                in_use=self._allocations.in_use(resource),
                affinity=affinity,
                shuffled=self._shuffle,
            )
        except NotEnough as error:
            raise _unexpected(
                claim.pod,
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {error.needed}, Available: {error.available}",
            ) from error
        if draft.is_complete or not endpoint.options.get_preferred_allocation_available:
            return complete(draft, ())
        problem = "device plugin GetPreferredAllocation rpc failed with err:"
        if endpoint.connection is None:
            raise _unexpected(claim.pod, f"{problem} endpoint {resource} has been stopped")
        try:
            preferred = await endpoint.connection.preferred(
                self._shuffle((*draft.selected, *draft.choice)), self._shuffle(draft.selected), size
            )
        except PluginError as error:
            raise _unexpected(claim.pod, f"{problem} {error}") from error
        return complete(draft, preferred)

    async def _pre_start(self, running: RunningPod, container: str, resource: str) -> None:
        endpoint = self._endpoints.by_name.get(resource)
        holding = self._allocations.held(running.uid, container, resource)
        problem = ""
        if endpoint is None or endpoint.expired:
            problem = f"endpoint not found in cache for a registered resource: {resource}"
        elif not endpoint.options.pre_start_required:
            return
        elif holding is None:
            problem = f"no devices found allocated in local cache for resource {resource}"
        elif endpoint.connection is None:
            problem = f"endpoint {resource} has been stopped"
        else:
            try:
                await endpoint.connection.pre_start(self._shuffle(holding.ids))
            except PluginError as error:
                problem = f"device plugin PreStartContainer rpc failed with err: {error}"
        if problem:
            raise ContainerStartError(f"pod {running.namespace}/{running.name}, container {container}: {problem}")

    def _devices_of(self, resource: str) -> Mapping[str, DeviceStatus]:
        endpoint = self._endpoints.by_name.get(resource)
        return endpoint.devices or {} if endpoint else {}

    def _check_listed(self, resource: str, ids: Iterable[str], event: str) -> None:
        """Records a crash if one of the IDs is not listed."""
        devices = self._devices_of(resource)
        if unlisted := sorted((id_ for id_ in ids if id_ not in devices), key=natural):
            self._crashes.append(f"{resource}: {event}, but {', '.join(unlisted)} is not listed")
            log.error("a real kubelet would crash: %s", self._crashes[-1])

    def _list_pods(self) -> podresources_pb2.ListPodResourcesResponse:
        self._ended.clear()
        known = [pod for pod in self.pods() if pod.uid not in self._admitting]
        return podresources_server.pod_list((*known, *self._admitting.values()), self._allocations)

    def _is_ours(self, resource: str) -> bool:
        """Whether the device manager counts a resource as its own: it is listed, or pods hold devices of it."""
        endpoint = self._endpoints.by_name.get(resource)
        return bool((endpoint and endpoint.listed) or self._allocations.in_use(resource))

    def _pod(self, name: str, namespace: str) -> tuple[Pod, RunningPod]:
        try:
            return self._pods[namespace, name]
        except KeyError:
            raise NoSuchPod(f"no pod {namespace}/{name} runs here") from None

    def _shuffle(self, ids: Iterable[str]) -> list[str]:
        """IDs in random order, like a Go map's keys."""
        order = sorted(ids, key=natural)
        self._random.shuffle(order)
        return order

    def _restore(self) -> None:
        """Restores the state from the checkpoint."""
        try:
            found = checkpoint.read_checkpoint(self.plugin_directory) or Checkpoint()
        except CheckpointError as error:
            log.warning("starting without a checkpoint: %s", error)
            found = Checkpoint()
        self._allocations = Allocations(found.holdings)
        self._renewals_due = {one.resource for one in found.holdings} if self._policy != "none" else set()
        self._endpoints.restore(found.registered)

    def _save(self) -> None:
        """Raises `OSError`."""
        if self._running:
            registered = {
                name: tuple(sorted(_healthy(endpoint.devices or {}), key=natural))
                for name, endpoint in self._endpoints.by_name.items()
                if endpoint.listed
            }
            checkpoint.write_checkpoint(
                self.plugin_directory, Checkpoint((*self._allocations, *self._ended), registered)
            )

    def _on_list(self) -> None:
        """Saves a list, and admits pods from before the start again when their resource has devices.

        A real kubelet does this once after its start, usually a moment after the plugins have registered.
        """
        self._save_and_notify()
        for resource in [each for each in self._renewals_due if topology.has_topology(self._devices_of(each))]:
            self._renewals_due.remove(resource)
            for pod, running in [*self._pods.values()]:
                holding = [name for name in running.containers if self._allocations.held(running.uid, name, resource)]
                if not all(self._decide(_Claim(pod, running.uid, name))[1] for name in holding):
                    log.warning("pod %s/%s: TopologyAffinityError after the restart", pod.namespace, pod.name)
                    self.delete_pod(pod.name, pod.namespace)

    def _save_and_notify(self) -> None:
        try:
            self._save()
        except OSError as error:
            log.warning("%s: checkpoint not written: %s", self.plugin_directory, error)
        self._notify()

    def _notify(self) -> None:
        self._state_changed.notify_all()
        shown = self.resources()
        if shown != self._notified:
            self._notified = shown
            self._resources_changed.notify_all()

    def _require_running(self) -> None:
        if not self._running:
            raise KubeletError(f"{self.directory}: the kubelet is not running")


def _unexpected(pod: Pod, problem: str) -> AdmissionError:
    return AdmissionError(
        pod.name, "UnexpectedAdmissionError", f"Allocate failed due to {problem}, which is unexpected"
    )


def _healthy(devices: Mapping[str, DeviceStatus]) -> frozenset[str]:
    return frozenset(key for key, device in devices.items() if device.healthy)


def _remove_sockets(directory: str) -> None:
    """Removes every socket, and nothing else."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                os.unlink(entry.path)
