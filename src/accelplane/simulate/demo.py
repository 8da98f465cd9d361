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
CY, DC = "qat.intel.com/cy", "qat.intel.com/dc"
DSA, DSA_SHARED, IAA = (
    "dsa.intel.com/wq-user-dedicated",
    "dsa.intel.com/wq-user-shared",
    "iaa.intel.com/wq-user-dedicated",
)
DLB_PF, DLB_VF = "dlb.intel.com/pf", "dlb.intel.com/vf"
ENCLAVE, PROVISION = "sgx.intel.com/enclave", "sgx.intel.com/provision"

_PATIENCE = 10.0
_CONFIG = """\
plugins:
  gpu:
    shared-dev-num: 2
    allocation-policy: balanced
    health-management: true
  dsa:
    shared-dev-num: 4
  sgx:
    enclave-limit: 8
    provision-limit: 2
health-interval: 1
"""
# What the agent makes of the node in configs/demo.yaml with these options.
_FOUND = {
    I915: 6,
    XE: 4,
    NPU: 1,
    CY: 4,
    DC: 2,
    DSA: 3,
    DSA_SHARED: 4,
    IAA: 2,
    DLB_PF: 1,
    DLB_VF: 2,
    ENCLAVE: 8,
    PROVISION: 2,
}


class DemoError(Exception):
    """A step did not do what it should; the text says what was seen instead."""


class Step(Struct, frozen=True):
    """One step of the story: what happens, in a line, and the work, which returns what was seen.

    `picture` marks the steps after which what the kubelet knows is worth a look, the last one most.
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
        self._counted: dict[str, tuple[int, int]] = {}

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
            Step("a node with accelerators of seven families", self._build),
            Step("the agent starts and finds them; there is no kubelet yet", self._start_agent),
            Step("the kubelet starts, the agent registers its resources", self._start_kubelet, picture=True),
            Step("a pod asks for a GPU and gets its device nodes", self._allocate_gpu),
            Step("a pod asks for two xe GPUs and an NPU", self._allocate_more),
            Step("a pod asks for QAT, DSA and SGX at once", self._allocate_offload),
            Step("a fifth GPU is plugged in", self._plug),
            Step("a GPU in use falls sick", self._sicken),
            Step("a DSA work queue is disabled", self._disable_queue),
            Step("a QAT device in use has no heartbeat", self._stop_heart, picture=True),
            Step("all three are well again", self._heal),
            Step("SGX's device node vanishes", self._lose_sgx),
            Step("it is back", self._find_sgx),
            Step("the kubelet restarts and removes every socket", self._restart_kubelet),
            Step("the fifth GPU is pulled out", self._unplug),
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
            spec = NodeSpec.load(path)
        self.node.build(spec)
        return f"{_described(spec)} under {self.node.root}"

    async def _start_agent(self) -> str:
        config = os.path.join(self.directory, "accelplane.yaml")
        _write(config, _CONFIG)
        command = [
            *(sys.executable, "-m", "accelplane", "node", "-v=2", "--plugins", "gpu,npu,qat,dsa,iaa,dlb,sgx"),
            *("--config", config, "--root", str(self.node.root)),
            *("--kubelet-dir", os.path.join(self.directory, "kubelet")),
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
        await self._become({name: (count, count) for name, count in _FOUND.items()})
        return f"{len(_FOUND)} resources, {sum(_FOUND.values())} devices after {_ms(start)}"

    async def _allocate_gpu(self) -> str:
        pod = await self._run("render", {I915: 1})
        return f"pod render holds {pod.device_ids[I915][0]}: {_nodes(pod)}"

    async def _allocate_more(self) -> str:
        pod = await self._run("training", {XE: 2, NPU: 1})
        cards = {id_.partition("-")[0] for id_ in pod.device_ids[XE]}
        if len(cards) != 2:
            raise DemoError(f"the balanced policy gave shares of {len(cards)} card, expected two: {pod.device_ids}")
        return f"pod training holds {', '.join((*pod.device_ids[XE], *pod.device_ids[NPU]))}: {_nodes(pod)}"

    async def _allocate_offload(self) -> str:
        pod = await self._run("gateway", {CY: 1, DSA: 1, ENCLAVE: 1})
        if pod.envs != {"QAT0": pod.device_ids[CY][0]}:
            raise DemoError(f"pod gateway got the variables {pod.envs}, expected QAT0, the address of its function")
        return f"pod gateway gets {_nodes(pod)} and the variable QAT0={pod.envs['QAT0']}"

    async def _plug(self) -> str:
        start = time.monotonic()
        self._plugged = self.node.plug_gpu(GpuSpec(driver="xe", numa_node=0))
        summary = await self._become({XE: (6, 6)})
        return f"{self._plugged} advertised after {_ms(start)}: {summary}"

    async def _sicken(self) -> str:
        card = self._card_of("render")
        self.health.set_health(self.node.device(card).bdf, memory=False)
        summary = await self._become({I915: (6, 4)})
        self._require_pod("render")
        for number in range(4):
            other = await self._run(f"other-{number}", {I915: 1})
            if any(id_.startswith(f"{card}-") for id_ in other.device_ids[I915]):
                raise DemoError(f"a new pod was placed on the sick {card}")
        await self._require_waiting(I915)
        for number in range(4):
            self.kubelet.delete_pod(f"other-{number}")
        return f"{card} is unhealthy, pod render keeps it, new pods wait: {summary}"

    async def _disable_queue(self) -> str:
        start = time.monotonic()
        queue = self._free_queue()
        _write(self._queue_state(queue), "disabled\n")
        await self._become({DSA: (3, 2)})
        noticed = _ms(start)
        summary = await self._become({DSA: (2, 2)})
        return f"{queue} is unhealthy after {noticed}, then gone: {summary}"

    async def _stop_heart(self) -> str:
        pf = self._qat_of("gateway")
        _write(self._heartbeat(pf), "-1\n\0")
        summary = await self._become({CY: (4, 0)})
        self._require_pod("gateway")
        await self._require_waiting(CY)
        return f"{pf} is sick with all its functions, pod gateway keeps its own, new pods wait: {summary}"

    async def _heal(self) -> str:
        self.health.set_health(self.node.device(self._card_of("render")).bdf)
        _write(self._heartbeat(self._qat_of("gateway")), "0\n\0")
        _write(self._queue_state(self._free_queue()), "enabled\n")
        return await self._become({I915: (6, 6), CY: (4, 4), DSA: (3, 3)})

    async def _lose_sgx(self) -> str:
        start = time.monotonic()
        os.rename(os.path.join(self.node.root, "dev/sgx_enclave"), os.path.join(self.directory, "sgx_enclave"))
        summary = await self._become({ENCLAVE: (8, 0), PROVISION: (2, 0)})
        self._require_pod("gateway")
        return f"unhealthy after {_ms(start)}, but still listed: {summary}"

    async def _find_sgx(self) -> str:
        start = time.monotonic()
        os.rename(os.path.join(self.directory, "sgx_enclave"), os.path.join(self.node.root, "dev/sgx_enclave"))
        summary = await self._become({ENCLAVE: (8, 8), PROVISION: (2, 2)})
        return f"healthy after {_ms(start)}: {summary}"

    async def _restart_kubelet(self) -> str:
        held = dict(self.holders())
        start = time.monotonic()
        await self.kubelet.restart()
        await self._become({})
        if dict(self.holders()) != held:
            raise DemoError(f"allocations changed from {held} to {dict(self.holders())}")
        return f"all registered again after {_ms(start)}, {len(self.kubelet.pods())} pods keep their devices"

    async def _unplug(self) -> str:
        start = time.monotonic()
        self.node.unplug(self._plugged)
        await self._become({XE: (6, 4)})
        noticed = _ms(start)
        summary = await self._become({XE: (4, 4)})
        return f"{self._plugged} is unhealthy after {noticed}, then gone: {summary}"

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

    def _require_pod(self, name: str) -> None:
        if name not in {pod.name for pod in self.kubelet.pods()}:
            raise DemoError(f"the running pod {name} was lost")

    async def _require_waiting(self, resource: str) -> None:
        try:
            await self.kubelet.run_pod(Pod("too-late", "default", {"main": {resource: 1}}))
        except AdmissionError:
            return
        raise DemoError(f"a new pod was given a sick device of {resource}")

    async def _become(self, changes: Mapping[str, tuple[int, int]]) -> str:
        """Waits until these resources have that capacity and so many usable devices, and all others are as before."""
        self._counted |= changes
        try:
            await self.kubelet.until(lambda _kubelet: self._counts() == self._counted, _PATIENCE)
        except TimeoutError as error:
            raise DemoError(str(error)) from error
        changed = ", ".join(f"{name} {usable}/{all_}" for name, (all_, usable) in changes.items())
        return f"{changed}, all else as before"

    async def _eventually(self, seen: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not seen():
            if self.agent is not None and self.agent.returncode is not None:
                raise DemoError(f"the agent ended with exit code {self.agent.returncode}: {_end_of(self.log)}")
            if time.monotonic() > deadline:
                raise DemoError(f"{otherwise} within {_PATIENCE:g} s")
            await asyncio.sleep(0.01)

    def _counts(self) -> dict[str, tuple[int, int]]:
        return {name: (one.capacity, one.allocatable) for name, one in self.kubelet.resources().items()}

    def _held(self, pod: str, resource: str) -> str:
        """The first device of the resource that the pod holds."""
        return next(id_ for (name, id_), holder in self.holders().items() if (name, holder) == (resource, pod))

    def _card_of(self, pod: str) -> str:
        return self._held(pod, I915).partition("-")[0]

    def _qat_of(self, pod: str) -> str:
        """The physical function behind the virtual one that the pod holds."""
        return os.path.basename(
            os.readlink(os.path.join(self.node.root, "sys/bus/pci/devices", self._held(pod, CY), "physfn"))
        )

    def _heartbeat(self, pf: str) -> str:
        return os.path.join(self.node.root, "sys/kernel/debug", f"qat_4xxx_{pf}", "heartbeat/status")

    def _free_queue(self) -> str:
        """A dedicated DSA queue that no pod holds, the same at each call."""
        held = {id_ for resource, id_ in self.holders() if resource == DSA}
        return next(queue for queue in ("wq0.2", "wq0.1") if not any(f"-{queue}-" in id_ for id_ in held))

    def _queue_state(self, queue: str) -> str:
        return os.path.join(self.node.root, "sys/bus/dsa/devices", queue, "state")


def _described(spec: NodeSpec) -> str:
    gpu_vfs, qat_vfs = sum(gpu.vfs for gpu in spec.gpus), sum(qat.vfs for qat in spec.qats)
    queues = sum(len(device.queues) for device in (*spec.dsas, *spec.iaas))
    return (
        f"{len(spec.gpus)} GPUs with {gpu_vfs} virtual functions, {len(spec.npus)} NPU, {len(spec.qats)} QAT with "
        f"{qat_vfs} virtual functions, {len(spec.dsas)} DSA and {len(spec.iaas)} IAA with {queues} work queues, "
        f"{len(spec.dlbs)} DLB, SGX"
    )


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _end_of(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()[-500:].strip()


def _listing(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def _nodes(container: RunningContainer) -> str:
    return " ".join(node.container_path for node in container.devices)


def _ms(start: float) -> str:
    return f"{(time.monotonic() - start) * 1000:.0f} ms"
