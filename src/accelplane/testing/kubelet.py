"""An agent with one plugin and an embedded kubelet, for the duration of a test."""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from accelplane.kubelet.embedded import DeviceStatus, EmbeddedKubelet, Pod, RunningContainer
from accelplane.node.agent import Agent
from accelplane.node.hook_results import check_plugin
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.testing.tree import Tree

_END_TIMEOUT = 30.0


class Kubelet(EmbeddedKubelet):
    """An `EmbeddedKubelet` with short forms of what most tests do, and the agent that `node` runs."""

    agent: Agent

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
        name = next(f"pod-{number}" for number in itertools.count() if f"pod-{number}" not in self._names)
        return (await self.run_pod(Pod(name, containers={"main": {resource: count}}))).containers["main"]

    @property
    def problems(self) -> list[str]:
        """The problems of the plugin's hooks, and the hardware that is skipped with a warning."""
        found: list[str] = []
        for status in self.agent.status().plugins.values():
            found += [*status.problems, *(f"{skip.subject}: {skip.reason}" for skip in status.skipped if skip.warning)]
        return found

    @property
    def _names(self) -> set[str]:
        return {pod.name for pod in self.pods()}


@asynccontextmanager
async def node(
    plugin: Plugin[Any], tree: Tree, *, name: str = "plugin", health_interval: float = 0.1, nfd_dir: str = ""
) -> AsyncGenerator[Kubelet]:
    """Runs an agent with the plugin on the host `tree`, and a kubelet at which it registers.

    Health is checked every `health_interval` seconds. Labels are written into `nfd_dir`, if given. At the end raises
    `AssertionError` if a real kubelet would have crashed. Raises `TypeError` if the agent cannot run the plugin.
    """
    check_plugin(plugin)
    with tempfile.TemporaryDirectory(prefix="node-") as directory:  # the path of a socket has at most 107 bytes
        settings = Settings(
            root=str(tree.root),
            kubelet_dir=directory,
            cdi_dir=f"{directory}/cdi",
            nfd_dir=nfd_dir,
            health_interval=health_interval,
        )
        agent = Agent(settings, {name: plugin})
        async with Kubelet(directory) as kubelet:
            kubelet.agent = agent
            running = asyncio.create_task(agent.run())
            try:
                yield kubelet
            finally:
                agent.stop()
                async with asyncio.timeout(_END_TIMEOUT):
                    await running
            if kubelet.would_crash:
                raise AssertionError(f"a real kubelet would have crashed: {'; '.join(kubelet.would_crash)}")
