"""The demo's story: a simulated node, an embedded kubelet, the real agent, and what happens to them.

Each step acts and then waits for an effect that a user could see at the kubelet; a step whose effect does not come
fails the demo. The agent is a process of its own, started as a user would start it.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from importlib import resources

from msgspec import Struct

from accelplane.kubelet.embedded import AdmissionError, EmbeddedKubelet, Pod, RunningContainer
from accelplane.simulate.levelzero import LevelZeroService
from accelplane.simulate.specs import GpuSpec, NodeSpec
from accelplane.simulate.tree import SimulatedNode

I915, XE, NPU = "gpu.intel.com/i915", "gpu.intel.com/xe", "npu.intel.com/accel"

_PATIENCE = 10.0
_CONFIG = """\
plugins:
  gpu:
    shared-dev-num: 2
    allocation-policy: balanced
    health-management: true
health-interval: 1
"""


class DemoError(Exception):
    """A step did not do what it should; the text says what was seen instead."""


class Step(Struct, frozen=True):
    """One step of the story: what happens, in a line, and the work, which returns what was seen.

    `picture` marks the step after which the screen shows most.
    """

    title: str
    work: Callable[[], Awaitable[str]]
    picture: bool = False


class Demo:
    """The world of the demo below one directory; enter it with `running`."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.node = SimulatedNode(os.path.join(directory, "host"))
        self.kubelet = EmbeddedKubelet(os.path.join(directory, "kubelet"))
        self.health = LevelZeroService(os.path.join(directory, "host/var/lib/levelzero/server.sock"))
        self.log = os.path.join(directory, "agent.log")
        self.agent: asyncio.subprocess.Process | None = None
        self._plugged = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """The services that the agent finds on its node, from beginning to end; no process is left behind."""
        await self.health.start()
        try:
            yield
        finally:
            if self.agent is not None and self.agent.returncode is None:
                self.agent.kill()
                await self.agent.wait()
            await self.kubelet.stop()
            await self.health.stop()

    def steps(self) -> Sequence[Step]:
        """The story, in order; each step builds on those before it."""
        return (
            Step("a node with four GPUs, two virtual functions and an NPU", self._build),
            Step("the agent starts and finds them; there is no kubelet yet", self._start_agent),
            Step("the kubelet starts, the agent registers its resources", self._start_kubelet),
            Step("a pod asks for a GPU and gets its device nodes", self._allocate_gpu),
            Step("a pod asks for two xe GPUs and an NPU", self._allocate_more),
            Step("a fifth card is plugged in", self._plug),
            Step("a card in use falls sick", self._sicken, picture=True),
            Step("the sick card heals", self._heal),
            Step("the kubelet restarts and removes every socket", self._restart_kubelet),
            Step("the fifth card is pulled out", self._unplug),
            Step("the agent is told to stop", self._stop_agent),
        )

    def holders(self) -> Mapping[tuple[str, str], str]:
        """Pod names by resource and device id."""
        return {
            (resource, id_): pod.name
            for pod in self.kubelet.pods()
            for container in pod.containers.values()
            for resource, ids in container.device_ids.items()
            for id_ in ids
        }

    async def _build(self) -> str:
        with resources.as_file(resources.files("accelplane.simulate") / "configs/demo.yaml") as path:
            names = self.node.build(NodeSpec.load(path))
        return f"{', '.join(names)} under {self.node.root}"

    async def _start_agent(self) -> str:
        config = os.path.join(self.directory, "accelplane.yaml")
        _write(config, _CONFIG)
        command = [
            *(sys.executable, "-m", "accelplane", "node", "-v=2", "--plugins", "gpu,npu", "--config", config),
            *("--root", str(self.node.root), "--kubelet-dir", os.path.join(self.directory, "kubelet")),
            *("--cdi-dir", os.path.join(self.directory, "cdi")),
        ]
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self.agent = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stderr=log)
        finally:
            os.close(log)
        cdi = os.path.join(self.directory, "cdi")
        await self._eventually(lambda: len(_listing(cdi)) == 5, "no CDI files were written")
        return f"process {self.agent.pid}; {len(_listing(cdi))} CDI files written, waiting for a kubelet"

    async def _start_kubelet(self) -> str:
        start = time.monotonic()
        await self.kubelet.start()
        await self._until(lambda: self._counts() == {I915: (6, 6), XE: (4, 4), NPU: (1, 1)})
        return f"{self._summary()} after {_ms(start)}"

    async def _allocate_gpu(self) -> str:
        pod = await self._run("render", {I915: 1})
        return f"pod render holds {pod.device_ids[I915][0]}: {_nodes(pod)}"

    async def _allocate_more(self) -> str:
        pod = await self._run("training", {XE: 2, NPU: 1})
        cards = {id_.partition("-")[0] for id_ in pod.device_ids[XE]}
        if len(cards) != 2:
            raise DemoError(f"the balanced policy gave shares of {len(cards)} card, expected two: {pod.device_ids}")
        return f"pod training holds {', '.join((*pod.device_ids[XE], *pod.device_ids[NPU]))}: {_nodes(pod)}"

    async def _plug(self) -> str:
        start = time.monotonic()
        self._plugged = self.node.plug_gpu(GpuSpec(driver="xe", numa_node=0))
        await self._until(lambda: self._counts().get(XE) == (6, 6))
        return f"{self._plugged} advertised after {_ms(start)}: {self._summary()}"

    async def _sicken(self) -> str:
        card = self._card_of("render")
        self.health.set_health(self.node.device(card).bdf, memory=False)
        await self._until(lambda: self._unhealthy(I915, card) == 2)
        if "render" not in {pod.name for pod in self.kubelet.pods()}:
            raise DemoError("the running pod was lost")
        for number in range(self._counts()[I915][1] - len([key for key in self.holders() if key[0] == I915]) + 1):
            other = await self._run(f"other-{number}", {I915: 1})
            if any(id_.startswith(f"{card}-") for id_ in other.device_ids[I915]):
                raise DemoError(f"a new pod was placed on the sick {card}")
        try:
            await self.kubelet.run_pod(Pod("too-late", "default", {"main": {I915: 1}}))
        except AdmissionError:
            pass
        else:
            raise DemoError(f"a new pod was placed on the sick {card}")
        for name in [pod.name for pod in self.kubelet.pods() if pod.name.startswith("other-")]:
            self.kubelet.delete_pod(name)
        return f"{card} unhealthy, pod render keeps it, new pods wait: {self._summary()}"

    async def _heal(self) -> str:
        self.health.set_health(self.node.device(self._card_of("render")).bdf)
        await self._until(lambda: self._counts()[I915] == (6, 6))
        return self._summary()

    async def _restart_kubelet(self) -> str:
        before, held = self._counts(), dict(self.holders())
        start = time.monotonic()
        await self.kubelet.restart()
        await self._until(lambda: self._counts() == before)
        if dict(self.holders()) != held:
            raise DemoError(f"allocations changed from {held} to {dict(self.holders())}")
        return f"all registered again after {_ms(start)}, {len(self.kubelet.pods())} pods keep their devices"

    async def _unplug(self) -> str:
        start = time.monotonic()
        self.node.unplug(self._plugged)
        await self._until(lambda: self._counts()[XE][1] == 4)
        noticed = _ms(start)
        await self._until(lambda: self._counts()[XE] == (4, 4))
        return f"{self._plugged} unhealthy after {noticed}, then gone: {self._summary()}"

    async def _stop_agent(self) -> str:
        if self.agent is None:
            raise DemoError("the agent was never started")
        self.agent.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_PATIENCE):
            code = await self.agent.wait()
        left = [
            name for name in _listing(os.path.join(self.directory, "kubelet/device-plugins")) if "intel.com" in name
        ]
        if code or left:
            raise DemoError(f"exit code {code}, expected 0; sockets left: {left or 'none'}")
        return "exit code 0, its sockets are gone"

    async def _run(self, name: str, wanted: Mapping[str, int]) -> RunningContainer:
        try:
            pod = await self.kubelet.run_pod(Pod(name, "default", {"main": dict(wanted)}))
        except AdmissionError as error:
            raise DemoError(str(error)) from error
        container = pod.containers["main"]
        if not container.devices:
            raise DemoError(f"pod {name} got no device nodes")
        return container

    async def _until(self, seen: Callable[[], bool]) -> None:
        try:
            await self.kubelet.until(lambda _kubelet: seen(), _PATIENCE)
        except TimeoutError as error:
            raise DemoError(str(error)) from error

    async def _eventually(self, seen: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not seen():
            if time.monotonic() > deadline:
                raise DemoError(f"{otherwise} within {_PATIENCE:g} s")
            await asyncio.sleep(0.01)

    def _counts(self) -> dict[str, tuple[int, int]]:
        return {name: (one.capacity, one.allocatable) for name, one in self.kubelet.resources().items()}

    def _unhealthy(self, resource: str, card: str) -> int:
        devices = self.kubelet.resources()[resource].devices
        return sum(not status.healthy for id_, status in devices.items() if id_.startswith(f"{card}-"))

    def _card_of(self, pod: str) -> str:
        return next(id_ for (_, id_), name in self.holders().items() if name == pod).partition("-")[0]

    def _summary(self) -> str:
        return ", ".join(f"{name} {free}/{all_}" for name, (all_, free) in self._counts().items())


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _listing(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def _nodes(container: RunningContainer) -> str:
    return " ".join(node.container_path for node in container.devices)


def _ms(start: float) -> str:
    return f"{(time.monotonic() - start) * 1000:.0f} ms"
