"""What a test sees of a plugin's devices for claims: the devices in ResourceSlices, and the container of a claim."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from accelplane.devices import CdiMount, CdiNode, DeviceNode, Mount
from accelplane.dra.resourceslice import Device
from accelplane.kubelet.embedded import Pod
from accelplane.kubelet.embedded.kubelet import EmbeddedKubelet
from accelplane.simulate.claimserver import ClaimServer

_POLL_INTERVAL = 0.02


class PublishedDevice(Struct, frozen=True):
    """A device in a ResourceSlice. Names of attributes without a domain have that of the driver. `taints` are keys.

    `capacities` are quantities of Kubernetes, such as `16Gi`.
    """

    attributes: Mapping[str, str | bool | int]
    capacities: Mapping[str, str]
    taints: Sequence[str] = ()


class ClaimedContainer(Struct, frozen=True):
    """What the container runtime gives to a container of the pod `pod` by CDI."""

    pod: str
    devices: Sequence[DeviceNode]
    mounts: Sequence[Mount]
    envs: Mapping[str, str]


class _Edits(Struct, rename="camel"):
    device_nodes: Sequence[CdiNode] = ()
    mounts: Sequence[CdiMount] = ()
    env: Sequence[str] = ()


class _CdiDevice(Struct, rename="camel"):
    name: str
    container_edits: _Edits


class _CdiFile(Struct):
    kind: str
    devices: Sequence[_CdiDevice]


class Claims:
    """The API server of a test's node, with the driver of one plugin."""

    def __init__(self, server: ClaimServer, driver: str, cdi_dir: str) -> None:
        self._server = server
        self._driver = driver
        self._cdi_dir = cdi_dir
        self._pods: set[str] = set()

    def devices(self) -> dict[str, PublishedDevice]:
        """The devices in the slices now, by name."""
        return {each.name: _published(each) for each in self._server.devices(self._driver)}

    async def wait(self, count: int, timeout: float) -> dict[str, PublishedDevice]:  # noqa: ASYNC109 - names the state
        end = time.monotonic() + timeout
        while len(found := self.devices()) != count:
            if time.monotonic() > end:
                raise TimeoutError(f"{self._driver}: found {len(found)} devices in slices {[*found]}, expected {count}")
            await asyncio.sleep(_POLL_INTERVAL)
        return found

    async def run_pod(self, kubelet: EmbeddedKubelet, name: str, device: str) -> ClaimedContainer:
        """Raises `LookupError` and `PodStartError`."""
        for pod in self._pods - {each.name for each in kubelet.pods()}:
            self._server.release(pod)
            self._pods.discard(pod)
        self._server.allocate(name, self._driver, pod=name, device=device)
        self._pods.add(name)
        pod = Pod(name, containers={"main": {}}, claims={"device": name}, container_claims={"main": ["device"]})
        running = await kubelet.run_pod(pod)
        return self._container(name, running.containers["main"].cdi_devices)

    def _container(self, pod: str, names: Sequence[str]) -> ClaimedContainer:
        files = (msgspec.json.decode(path.read_bytes(), type=_CdiFile) for path in Path(self._cdi_dir).glob("*.json"))
        edits = {f"{file.kind}={each.name}": each.container_edits for file in files for each in file.devices}
        found = [edits[name] for name in names]
        return ClaimedContainer(
            pod,
            [DeviceNode(node.host_path, node.path, node.permissions) for each in found for node in each.device_nodes],
            [
                Mount(mount.host_path, mount.container_path, "ro" in mount.options)
                for each in found
                for mount in each.mounts
            ],
            dict(variable.split("=", 1) for each in found for variable in each.env),
        )


def _published(device: Device) -> PublishedDevice:
    attributes: dict[str, str | bool | int] = {}
    for name, value in (device.attributes or {}).items():
        found = (value.string, value.boolean, value.integer, value.version)
        attributes[name] = next(each for each in found if each is not None)
    capacities = {name: each.value for name, each in (device.capacity or {}).items()}
    return PublishedDevice(attributes, capacities, [taint.key for taint in device.taints or ()])
