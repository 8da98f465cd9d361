"""An agent with one plugin and an embedded kubelet, for the duration of a test."""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from accelplane.apiserver import ApiServer, ClientConfig
from accelplane.kubelet.embedded import DeviceStatus, EmbeddedKubelet, Pod, RunningContainer
from accelplane.node.agent import Agent
from accelplane.node.hook_results import check_plugin
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.simulate.claimserver import ClaimServer
from accelplane.testing.claims import ClaimedContainer, Claims, PublishedDevice
from accelplane.testing.tree import Tree

if TYPE_CHECKING:
    from accelplane.node.dra.driver import NodeAccess

_END_TIMEOUT = 30.0
_NODE = "node"
_POLL_INTERVAL = 0.02


class Kubelet(EmbeddedKubelet):
    """An `EmbeddedKubelet` with short forms of what most tests do, and the agent that `node` runs."""

    agent: Agent
    claims: Claims | None = None

    def __init__(self, directory: str, *, claim_api: ClaimServer | None) -> None:
        super().__init__(directory, claim_api=claim_api)
        self._numbers = itertools.count()

    async def wait_for(self, resource: str, devices: Mapping[str, str], timeout: float = 10.0) -> None:  # noqa: ASYNC109
        """Waits until the kubelet has this list of a resource: the health, Healthy or Unhealthy, by ID.

        An empty list is also that of a resource that is not registered. Raises `TimeoutError` with the state.
        """

        def matches(kubelet: EmbeddedKubelet) -> bool:
            status = kubelet.resources().get(resource)
            listed: Mapping[str, DeviceStatus] = status.devices if status is not None else {}
            return {id_: device.health for id_, device in listed.items()} == dict(devices)

        await self.until(matches, timeout)

    async def allocate(self, resource: str, count: int = 1) -> RunningContainer:
        """What a container gets that requests a resource, after the kubelet has chosen the devices.

        Raises `AdmissionError` and `ContainerStartError`.
        """
        pod = Pod(self._free_name(), containers={"main": {resource: count}})
        return (await self.run_pod(pod)).containers["main"]

    async def published(self, count: int, timeout: float = 10.0) -> Mapping[str, PublishedDevice]:  # noqa: ASYNC109
        """The devices for claims by name, as soon as the node's ResourceSlices have this number of them.

        Raises `TimeoutError` with the devices that there are. Needs `dra` of `node`.
        """
        return await self._claims.wait(count, timeout)

    async def claim(self, device: str = "") -> ClaimedContainer:
        """What a container gets whose pod claims the device of this name, any free one without a name.

        Raises `LookupError` if it is not free, and `PodStartError` if it cannot be prepared. Needs `dra` of `node`.
        """
        async with asyncio.timeout(_END_TIMEOUT):
            while not self._unprepared():  # noqa: ASYNC110 - the driver has no event for it
                await asyncio.sleep(_POLL_INTERVAL)
        return await self._claims.run_pod(self, self._free_name(), device)

    def _unprepared(self) -> bool:
        """Whether no claim of a pod that was deleted is prepared."""
        pods = {f"{pod.namespace}/{pod.name}" for pod in self.pods()}
        units = [unit for driver in self.agent.status().dra.values() for unit in driver.units.values()]
        return all(pods.issuperset(unit.claims) for unit in units)

    @property
    def _claims(self) -> Claims:
        if self.claims is None:
            raise TypeError("the node has no devices for claims, expected node(..., dra=True)")
        return self.claims

    @property
    def problems(self) -> list[str]:
        """The problems of the plugin's hooks and driver, and the hardware that is skipped with a warning."""
        found: list[str] = []
        for status in self.agent.status().plugins.values():
            found += [*status.problems, *(f"{skip.subject}: {skip.reason}" for skip in status.skipped if skip.warning)]
        for driver in self.agent.status().dra.values():
            found += driver.problems
        return found

    def _free_name(self) -> str:
        """A name that no pod has had from this method: the kubelet may not have forgotten a pod that was deleted."""
        names = {pod.name for pod in self.pods()}
        return next(name for number in self._numbers if (name := f"pod-{number}") not in names)


@asynccontextmanager
async def node(
    plugin: Plugin[Any],
    tree: Tree,
    *,
    name: str = "plugin",
    health_interval: float = 0.1,
    nfd_dir: str = "",
    dra: bool = False,
) -> AsyncGenerator[Kubelet]:
    """Runs an agent with the plugin on the host `tree`, and a kubelet at which it registers.

    Health is checked every `health_interval` seconds. Labels are written into `nfd_dir`, if given. With `dra` the
    devices are for claims, and there is a small API server. At the end raises `AssertionError` if a real kubelet would
    have crashed. Raises `TypeError` if the agent cannot run the plugin.
    """
    check_plugin(plugin)
    async with AsyncExitStack() as stack:
        # The path of a socket has at most 107 bytes.
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="node-"))
        settings = Settings(
            root=str(tree.root),
            kubelet_dir=directory,
            cdi_dir=f"{directory}/cdi",
            nfd_dir=nfd_dir,
            health_interval=health_interval,
            dra_api=f"{name}=dra" if dra else "",
        )
        server = ClaimServer(_NODE)
        if dra:
            await server.start()
            stack.push_async_callback(server.stop)
        agent = Agent(settings, {name: plugin}, dra=lambda: _access(server))
        kubelet = await stack.enter_async_context(Kubelet(directory, claim_api=server if dra else None))
        kubelet.agent = agent
        kubelet.claims = Claims(server, plugin.namespace, settings.cdi_dir) if dra else None
        running = asyncio.create_task(agent.run())
        try:
            yield kubelet
        finally:
            agent.stop()
            async with asyncio.timeout(_END_TIMEOUT):
                await running
        if kubelet.would_crash:
            raise AssertionError(f"a real kubelet would have crashed: {'; '.join(kubelet.would_crash)}")


def _access(server: ClaimServer) -> "NodeAccess":
    from accelplane.node.dra.driver import NodeAccess  # noqa: PLC0415 - memory of tests without claims

    return NodeAccess(api=ApiServer(ClientConfig(server=f"http://127.0.0.1:{server.port}")), node=_NODE)
