"""Values of the embedded kubelet's interface: pods, containers, resources, registrations, errors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from msgspec import Struct

from accelplane.devices import HEALTHY, DeviceNode, Mount
from accelplane.devices.device import HealthName
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb

Requests = Mapping[str, Mapping[str, int]]


class KubeletError(Exception):
    """The kubelet cannot start, or a method is called while it is stopped."""


class NoSuchPod(LookupError):
    """The pod does not run, or does not have the container."""


class AdmissionError(Exception):
    """The kubelet does not admit a pod, which is final for the pod.

    `reason` and `message` are those of the pod's status; reasons are `UnexpectedAdmissionError`,
    `TopologyAffinityError` and `OutOf<resource>`.
    """

    def __init__(self, pod: str, reason: str, message: str) -> None:
        super().__init__(f"pod {pod}: {reason}: {message}")
        self.pod = pod
        self.reason = reason
        self.message = message

    @classmethod
    def unexpected(cls, pod: str, problem: Exception) -> Self:
        return cls(pod, "UnexpectedAdmissionError", f"Allocate failed due to {problem}, which is unexpected")


class ContainerStartError(Exception):
    """A container of an admitted pod cannot start now. A kubelet retries with back-off."""


class Pod(Struct, frozen=True):
    """A pod's requests: container name to resource name to count. Init containers run first, one by one.

    `claims` are its ResourceClaims by the name in the pod. `container_claims` has, by container, which of them it uses:
    `name`, or `name/request` for the devices of one request.
    """

    name: str
    namespace: str = "default"
    containers: Requests = {}
    init_containers: Requests = {}
    claims: Mapping[str, str] = {}
    container_claims: Mapping[str, Sequence[str]] = {}

    def __post_init__(self) -> None:
        for container, wants in (*self.init_containers.items(), *self.containers.items()):
            for resource, count in wants.items():
                if count < 0:
                    raise ValueError(
                        f"pod {self.name}, container {container}: {resource}={count}, expected a count of 0 or more"
                    )
        if both := self.containers.keys() & self.init_containers.keys():
            raise ValueError(f"pod {self.name}: two containers are named {min(both)}")
        for container, references in self.container_claims.items():
            if container not in self.containers and container not in self.init_containers:
                raise ValueError(f"pod {self.name}: claims of container {container}, which the pod does not have")
            if unknown := {reference.partition("/")[0] for reference in references} - self.claims.keys():
                raise ValueError(f"pod {self.name}, container {container}: claim {min(unknown)} is not in the pod")

    def wants(self, container: str) -> dict[str, int]:
        """The devices that a container requests, resources in the order of their names."""
        counts = self.init_containers.get(container) or self.containers.get(container) or {}
        return {resource: counts[resource] for resource in sorted(counts) if counts[resource]}


class RunningContainer(Struct, frozen=True, kw_only=True):
    """The container runtime's input for a container: the merged answers of the plugins, and the IDs that it holds."""

    devices: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    envs: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    cdi_devices: tuple[str, ...] = ()
    device_ids: Mapping[str, tuple[str, ...]] = {}

    @classmethod
    def of(
        cls, responses: Iterable[pb.ContainerAllocateResponse], device_ids: Mapping[str, tuple[str, ...]]
    ) -> "RunningContainer":
        """Merges the answers for the container's resources like the kubelet.

        The first value wins per env name, annotation key and container path; CDI names are given once.
        """
        devices: dict[str, DeviceNode] = {}
        mounts: dict[str, Mount] = {}
        envs: dict[str, str] = {}
        annotations: dict[str, str] = {}
        names: dict[str, None] = {}
        for response in responses:
            for node in response.devices:
                devices.setdefault(
                    node.container_path, DeviceNode(node.host_path, node.container_path, node.permissions)
                )
            for mount in response.mounts:
                mounts.setdefault(mount.container_path, Mount(mount.host_path, mount.container_path, mount.read_only))
            envs = {**response.envs, **envs}
            annotations = {**response.annotations, **annotations}
            names.update(dict.fromkeys(device.name for device in response.cdi_devices))
        return cls(
            devices=tuple(devices.values()),
            mounts=tuple(mounts.values()),
            envs=envs,
            annotations=annotations,
            cdi_devices=tuple(names),
            device_ids=device_ids,
        )


class RunningPod(Struct, frozen=True, kw_only=True):
    """An admitted pod; `containers` includes its init containers."""

    name: str
    namespace: str
    uid: str
    containers: Mapping[str, RunningContainer]


class DeviceStatus(NamedTuple):
    """A device in the kubelet's list; `nodes` are its NUMA nodes as listed."""

    health: HealthName
    nodes: tuple[int, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.health == HEALTHY


def healthy_ids(devices: Mapping[str, DeviceStatus]) -> frozenset[str]:
    """The IDs of the healthy devices."""
    return frozenset(key for key, device in devices.items() if device.healthy)


class ResourceStatus(Struct, frozen=True):
    """A resource as in the node's status, its devices, and the IDs that pods hold."""

    capacity: int
    allocatable: int
    devices: Mapping[str, DeviceStatus]
    in_use: tuple[str, ...] = ()


class PluginOptions(NamedTuple):
    pre_start_required: bool = False
    get_preferred_allocation_available: bool = False

    @classmethod
    def of(cls, message: pb.DevicePluginOptions) -> "PluginOptions":
        return cls(message.pre_start_required, message.get_preferred_allocation_available)


class Registration(Struct, frozen=True):
    """One call of `Register`: the `number`-th since the first start.

    `announced` are the options in the request, which the kubelet ignores; `options` those of GetDevicePluginOptions,
    None if it was not answered. `outcome` is `accepted` or the error that the plugin got.
    """

    number: int
    resource: str
    endpoint: str
    version: str
    announced: PluginOptions
    options: PluginOptions | None
    outcome: str

    @property
    def accepted(self) -> bool:
        return self.outcome == ACCEPTED


ACCEPTED = "accepted"
