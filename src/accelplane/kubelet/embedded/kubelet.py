"""The embedded kubelet: sockets, registrations, device lists, admission of pods.

Facts are from the device plugin and pod resources documentation of Kubernetes 1.28 to 1.37 and from the behaviour of
their kubelets.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import grpc.aio
import msgspec

from accelplane.devices import natural
from accelplane.kubelet import checkpoint, sockets
from accelplane.kubelet import podresources_v1_pb2 as podresources_pb2
from accelplane.kubelet.checkpoint import Checkpoint, CheckpointError, Holding
from accelplane.kubelet.embedded import podresources_server, topology
from accelplane.kubelet.embedded.allocations import Allocations
from accelplane.kubelet.embedded.device_manager import DeviceManager
from accelplane.kubelet.embedded.dra_claims import CheckpointError as DraCheckpointError
from accelplane.kubelet.embedded.dra_manager import DraManager
from accelplane.kubelet.embedded.dra_model import DRA_BEHAVIOURS, ClaimApi
from accelplane.kubelet.embedded.endpoints import Endpoints, remove_sockets
from accelplane.kubelet.embedded.model import (
    AdmissionError,
    KubeletError,
    NoSuchPod,
    Pod,
    Registration,
    ResourceStatus,
    RunningContainer,
    RunningPod,
    healthy_ids,
)
from accelplane.kubelet.notifier import Notifier

log = logging.getLogger(__name__)

_SOCKET = "kubelet.sock"
# The first tested versions of Kubernetes with each behaviour; later versions up to the next one behave equally.
BEHAVIOURS = ("1.34", "1.37")


class EmbeddedKubelet:
    """A kubelet's device manager below `directory`: sockets in its `device-plugins` and `pod-resources`.

    `topology_policy` is none, best-effort, restricted or single-numa-node, on a machine of `numa_nodes` nodes.
    `endpoint_grace` is how many seconds a resource keeps its capacity after its plugin has disconnected.

    `call_timeout` bounds PreStartContainer and the calls for which a real kubelet has no deadline. `seed` makes the
    random order of IDs repeatable. `behaviour` is the version of Kubernetes, one of `BEHAVIOURS`: until 1.36 (`1.34`)
    a kubelet identifies a plugin by its resource, and the end of an old stream disconnects the plugin that has
    registered since; from `1.37` it identifies a plugin by its resource and the path of its socket, several can be
    connected, and a path that is connected is rejected.

    With `claim_api`, the kubelet prepares the claims of pods with the DRA drivers below `plugins_registry`. `behaviour`
    is then one of `DRA_BEHAVIOURS`. `wipe_delay` is how many seconds after the loss of a driver its ResourceSlices are
    deleted, `unprepare_interval` how often the claims of ended pods are unprepared again.
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
        behaviour: str = BEHAVIOURS[-1],
        claim_api: ClaimApi | None = None,
        wipe_delay: float = 30.0,
        unprepare_interval: float = 60.0,
    ) -> None:
        """Raises `ValueError` for an unknown policy or behaviour or an impossible number of NUMA nodes."""
        behaviours = BEHAVIOURS if claim_api is None else DRA_BEHAVIOURS
        if behaviour not in behaviours:
            raise ValueError(f"unknown behaviour {behaviour!r}, expected one of {', '.join(behaviours)}")
        policy = topology.checked_policy(topology_policy)
        if not 1 <= numa_nodes <= topology.MAX_NUMA_NODES:
            raise ValueError(f"{numa_nodes} NUMA nodes, a kubelet works with 1 to {topology.MAX_NUMA_NODES}")
        self.directory = os.path.abspath(directory)
        self.plugin_directory = os.path.join(self.directory, "device-plugins")
        self.pod_resources_socket = os.path.join(self.directory, "pod-resources", _SOCKET)
        self._kubelet_socket = os.path.join(self.plugin_directory, _SOCKET)
        self._private = os.path.join(self.directory, ".embedded")
        self._state_changed = Notifier()
        self._endpoints = Endpoints(
            self.plugin_directory,
            grace=endpoint_grace,
            connect_timeout=connect_timeout,
            call_timeout=call_timeout,
            identified_by_path=behaviour == "1.37",
            on_list=self._on_list,
            on_registration=self._state_changed.notify_all,
        )
        self._manager = DeviceManager(self._endpoints, policy, numa_nodes, seed)
        self.dra: DraManager | None = None
        if claim_api is not None:
            self.dra = DraManager(
                self.directory,
                behaviour,
                claim_api,
                wipe_delay=wipe_delay,
                unprepare_interval=unprepare_interval,
                active_pods=lambda: [*(pod.uid for pod in self.pods()), *self._admitting],
                on_change=self._state_changed.notify_all,
            )
        self._pods: dict[tuple[str, str], tuple[Pod, RunningPod]] = {}
        self._admitting: dict[str, RunningPod] = {}
        self._admission = asyncio.Lock()
        self._running = False
        self._servers: list[grpc.aio.Server] = []
        # A kubelet keeps the holdings of deleted pods until the next admission or pod resources List.
        self._ended: list[Holding] = []
        # Resources of pods from before the start whose hints have not been renewed yet.
        self._renewals_due: set[str] = set()

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
            remove_sockets(self.plugin_directory)
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
            if self.dra:
                self.dra.start()
        except OSError as error:
            await self.stop()
            raise KubeletError(
                f"cannot start a kubelet: {error.filename or self.directory}: {error.strerror}"
            ) from error
        except (RuntimeError, sockets.SocketPathError, DraCheckpointError) as error:
            await self.stop()
            raise KubeletError(f"cannot start a kubelet: {self.directory}: {error}") from error
        self._state_changed.notify_all()

    async def stop(self) -> None:
        """Ends like a killed kubelet: streams break, the sockets and the checkpoint stay."""
        self._running = False
        if self.dra:
            await self.dra.close()
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
        return tuple(self._manager.crashes)

    def resources(self) -> Mapping[str, ResourceStatus]:
        """The resources as in the node's status, in the order of their names."""
        return {
            name: ResourceStatus(
                capacity=len(endpoint.devices),
                allocatable=len(healthy_ids(endpoint.devices)),
                devices=endpoint.devices,
                in_use=tuple(sorted(self._manager.allocations.in_use(name), key=natural)),
            )
            for name, endpoint in sorted(self._endpoints.by_name.items())
            if endpoint.devices is not None
        }

    def pods(self) -> Sequence[RunningPod]:
        """The admitted pods, oldest first."""
        return tuple(running for _, running in self._pods.values())

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
            for holding in self._manager.allocations
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
        if self.dra:
            lines.extend(self.dra.describe())
        lines.extend(
            f"registration {record.number}: {record.resource} at {record.endpoint}: {record.outcome}"
            for record in self.registrations[-5:]
        )
        return "\n".join(lines)

    async def run_pod(self, pod: Pod) -> RunningPod:
        """Admits a pod that was bound to this node and starts its containers.

        A running pod is admitted again, as after a reboot of the node: it keeps its devices if they are still healthy.
        Raises `AdmissionError`, after which the pod is removed, `PodStartError`, after which it waits for `run_pod`,
        and `ContainerStartError`, after which it waits for `start_container`.
        """
        self._require_running()
        if pod.claims and self.dra is None:
            raise KubeletError(f"pod {pod.name} has claims, but the kubelet has no API server")
        async with self._admission:
            running = await self._admit(pod)
        if pod.claims and self.dra:
            await self.dra.prepare(pod, running.uid)
            running = self._start(pod, running.uid)
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
        claim = self._manager.claim(pod, running.uid, container)
        await self._manager.pre_start(claim)
        if not self._manager.holds_all(claim):
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
                await self._manager.admit(self._manager.claim(pod, running.uid, container))

    def delete_pod(self, name: str, namespace: str = "default") -> None:
        """Ends a pod; its devices are free immediately, its claims after the drivers' answers. Raises `NoSuchPod`.

        As in a real kubelet, the checkpoint names the pod until it is written for the first time after an admission or
        a pod resources List.
        """
        pod, running = self._pod(name, namespace)
        del self._pods[namespace, name]
        self._ended.extend(holding for holding in self._manager.allocations if holding.pod_uid == running.uid)
        self._manager.allocations.forget(running.uid)
        if self.dra and pod.claims:
            self.dra.end_pod(running.uid)
        self._state_changed.notify_all()

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
        self._manager.allocations.forget_all_but((uid, *(running.uid for _, running in self._pods.values())))
        containers = (*pod.init_containers, *pod.containers)
        # Pod resources name a pod from the beginning of its admission on.
        self._admitting[uid] = RunningPod(
            name=pod.name, namespace=pod.namespace, uid=uid, containers=dict.fromkeys(containers, RunningContainer())
        )
        try:
            for container in containers:
                await self._manager.admit(self._manager.claim(pod, uid, container))
            try:
                self._save()
            except OSError as error:
                raise AdmissionError.unexpected(pod.name, error) from error
        except BaseException:
            self._pods.pop((pod.namespace, pod.name), None)
            self._manager.allocations.forget(uid)
            self._save_and_notify()
            raise
        finally:
            del self._admitting[uid]
        return self._start(pod, uid)

    def _start(self, pod: Pod, uid: str) -> RunningPod:
        """The pod with what its containers get by now."""
        found: dict[str, RunningContainer] = {}
        for name in (*pod.init_containers, *pod.containers):
            container = found[name] = self._manager.allocations.container(uid, name)
            if self.dra:
                cdi_devices = dict.fromkeys((*container.cdi_devices, *self.dra.cdi_ids(pod, name)))
                found[name] = msgspec.structs.replace(container, cdi_devices=tuple(cdi_devices))
        running = RunningPod(name=pod.name, namespace=pod.namespace, uid=uid, containers=found)
        self._pods[pod.namespace, pod.name] = (pod, running)
        self._state_changed.notify_all()
        return running

    def _list_pods(self) -> podresources_pb2.ListPodResourcesResponse:
        self._ended.clear()
        known = [pod for pod in self.pods() if pod.uid not in self._admitting]
        return podresources_server.pod_list(
            (*known, *self._admitting.values()), self._manager.allocations, self._dynamic_resources
        )

    def _dynamic_resources(self, pod: RunningPod, container: str) -> Iterator[podresources_pb2.DynamicResource]:
        if self.dra and (known := self._pods.get((pod.namespace, pod.name))):
            yield from self.dra.dynamic_resources(known[0], container)

    def _pod(self, name: str, namespace: str) -> tuple[Pod, RunningPod]:
        try:
            return self._pods[namespace, name]
        except KeyError:
            raise NoSuchPod(f"no pod {namespace}/{name} runs here") from None

    def _restore(self) -> None:
        """Restores the state from the checkpoint."""
        try:
            found = checkpoint.read_checkpoint(self.plugin_directory) or Checkpoint()
        except CheckpointError as error:
            log.warning("starting without a checkpoint: %s", error)
            found = Checkpoint()
        self._manager.allocations = Allocations(found.holdings)
        self._renewals_due = {one.resource for one in found.holdings} if self._manager.policy != "none" else set()
        self._endpoints.restore(found.registered)

    def _save(self) -> None:
        """Raises `OSError`."""
        if self._running:
            registered = {
                name: tuple(sorted(healthy_ids(endpoint.devices or {}), key=natural))
                for name, endpoint in self._endpoints.by_name.items()
                if endpoint.listed
            }
            checkpoint.write_checkpoint(
                self.plugin_directory, Checkpoint((*self._manager.allocations, *self._ended), registered)
            )

    def _on_list(self) -> None:
        """Saves a list, and admits pods from before the start again when their resource has devices.

        A real kubelet does this once after its start, usually a moment after the plugins have registered.
        """
        self._save_and_notify()
        for resource in [each for each in self._renewals_due if topology.has_topology(self._manager.devices_of(each))]:
            self._renewals_due.remove(resource)
            for pod, running in [*self._pods.values()]:
                holding = [
                    name for name in running.containers if self._manager.allocations.find(running.uid, name, resource)
                ]
                if not all(self._manager.decide(self._manager.claim(pod, running.uid, name))[1] for name in holding):
                    log.warning("pod %s/%s: TopologyAffinityError after the restart", pod.namespace, pod.name)
                    self.delete_pod(pod.name, pod.namespace)

    def _save_and_notify(self) -> None:
        try:
            self._save()
        except OSError as error:
            log.warning("%s: checkpoint not written: %s", self.plugin_directory, error)
        self._state_changed.notify_all()

    def _require_running(self) -> None:
        if not self._running:
            raise KubeletError(f"{self.directory}: the kubelet is not running")
