"""The steps of `accelplane demo`: the real agent on a simulated node, with an embedded kubelet.

Each step performs one action and waits until the kubelet shows its effect. A missing effect fails the demo. The agent
runs in a separate process with the command line that a user would type.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import msgspec
from msgspec import Struct

from accelplane.kubelet.embedded import AdmissionError, EmbeddedKubelet, Pod, PodStartError, RunningContainer
from accelplane.processes import end_process
from accelplane.simulate.claimserver import ClaimServer
from accelplane.simulate.levelzero import LevelZeroService
from accelplane.simulate.specs import GpuSpec, NodeSpec
from accelplane.simulate.tree import SimulatedNode

I915, XE, NPU = "gpu.intel.com/i915", "gpu.intel.com/xe", "npu.intel.com/accel"
CY, DC = "qat.intel.com/cy", "qat.intel.com/dc"
DSA, DSA_SHARED = "dsa.intel.com/wq-user-dedicated", "dsa.intel.com/wq-user-shared"
IAA = "iaa.intel.com"
DLB_PF, DLB_VF = "dlb.intel.com/pf", "dlb.intel.com/vf"
ENCLAVE, PROVISION = "sgx.intel.com/enclave", "sgx.intel.com/provision"

_STEP_TIMEOUT = 20.0
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
dra:
  api: {iaa: dra}
"""
# The number of devices per resource that the agent advertises for configs/demo.yaml with these options.
_EXPECTED = {
    I915: 6,
    XE: 4,
    NPU: 1,
    CY: 4,
    DC: 2,
    DSA: 3,
    DSA_SHARED: 4,
    DLB_PF: 1,
    DLB_VF: 2,
    ENCLAVE: 8,
    PROVISION: 2,
}


class DemoError(Exception):
    """A step did not have its expected effect. The message says what was found instead."""


class Step(Struct, frozen=True):
    """One step: a title of one line, and a coroutine function that returns a description of the result.

    The demo prints the kubelet's resources after steps with `show_resources`. The `--svg` picture shows the last one.
    """

    title: str
    run: Callable[[], Awaitable[str]]
    show_resources: bool = False


class _CdiNode(Struct):
    path: str


class _CdiEdits(Struct, rename="camel"):
    device_nodes: list[_CdiNode] = []


class _CdiDevice(Struct, rename="camel"):
    name: str
    container_edits: _CdiEdits


class _CdiFile(Struct):
    kind: str
    devices: list[_CdiDevice]


class Demo:
    """The simulated node, the embedded kubelet and the agent, with all files below one directory."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.node = SimulatedNode(self.directory / "host")
        self.api = ClaimServer("demo")
        self.kubelet = EmbeddedKubelet(self.directory / "kubelet", claim_api=self.api)
        self.health = LevelZeroService(self.directory / "host/var/lib/levelzero/server.sock")
        self.log = self.directory / "agent.log"
        self._host = Path(self.node.root)
        self.agent: asyncio.subprocess.Process | None = None
        self._fifth_gpu = ""
        self._expected_counts: dict[str, tuple[int, int]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Runs the node's services. Stops them, the kubelet and the agent on exit."""
        await self.health.start()
        try:
            await self.api.start()
            yield
        finally:
            if self.agent is not None:
                await end_process(self.agent)
            await self.kubelet.stop()
            await self.api.stop()
            await self.health.stop()

    def steps(self) -> Sequence[Step]:
        """All steps in order. Each step requires the state that the previous steps leave."""
        return (
            Step("create a simulated node with accelerators of seven families", self._build),
            Step("start the agent before there is a kubelet", self._start_agent),
            Step("start the kubelet", self._start_kubelet, show_resources=True),
            Step("run a pod that requests one GPU", self._allocate_gpu),
            Step("run a pod that requests two xe GPUs and one NPU", self._allocate_gpus_and_npu),
            Step("run a pod that requests QAT, DSA and SGX", self._allocate_offload),
            Step("run a pod that claims an IAA work queue", self._claim_queue),
            Step("plug in a fifth GPU", self._plug_gpu),
            Step("fail a GPU that a pod uses", self._fail_gpu),
            Step("disable a DSA work queue", self._disable_queue),
            Step("stop the heartbeat of a QAT device that a pod uses", self._stop_heartbeat, show_resources=True),
            Step("repair all three devices", self._repair),
            Step("remove the SGX device node", self._remove_sgx_node),
            Step("restore the SGX device node", self._restore_sgx_node),
            Step("restart the kubelet, which deletes all sockets", self._restart_kubelet),
            Step("unplug the fifth GPU", self._unplug_gpu),
            Step("stop the agent with SIGTERM", self._stop_agent),
        )

    def pods_by_device(self) -> Mapping[tuple[str, str], str]:
        """The name of the pod that holds a device, by resource and device ID."""
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
        return f"{_describe(spec)}; sysfs and devfs are in {self.node.root}"

    async def _start_agent(self) -> str:
        config, cdi = self.directory / "accelplane.yaml", self.directory / "cdi"
        config.write_text(_CONFIG)
        command = [
            *(sys.executable, "-m", "accelplane", "node", "-v=2", "--plugins", "gpu,npu,qat,dsa,iaa,dlb,sgx"),
            *("--config", config, "--root", self._host, "--kubelet-dir", self.kubelet.directory, "--cdi-dir", cdi),
        ]
        self.log.touch(0o600)
        kubeconfig = self.directory / "kubeconfig"
        kubeconfig.write_text(self.api.kubeconfig())
        with self.log.open("w") as log:
            self.agent = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "KUBECONFIG": str(kubeconfig), "NODE_NAME": self.api.node},
            )
        deadline = time.monotonic() + _STEP_TIMEOUT
        while len(list(cdi.glob("*"))) < 5:
            if self.agent.returncode is not None:
                raise DemoError(f"the agent ended with exit code {self.agent.returncode}: {self._end_of_log()}")
            if time.monotonic() > deadline:
                raise DemoError(f"no CDI files within {_STEP_TIMEOUT:g} s")
            await asyncio.sleep(0.01)
        return f"process {self.agent.pid}, 2 shares per GPU; the agent has written 5 CDI files and waits for a kubelet"

    async def _start_kubelet(self) -> str:
        start = time.monotonic()
        await self.kubelet.start()
        await self._wait_for_counts({name: (count, count) for name, count in _EXPECTED.items()})
        return f"{len(_EXPECTED)} resources with {sum(_EXPECTED.values())} devices are registered after {_ms(start)}"

    async def _allocate_gpu(self) -> str:
        pod = await self._run("render", {I915: 1})
        return f"pod render gets {pod.device_ids[I915][0]}: {_nodes(pod)}"

    async def _allocate_gpus_and_npu(self) -> str:
        pod = await self._run("training", {XE: 2, NPU: 1})
        cards = {id_.partition("-")[0] for id_ in pod.device_ids[XE]}
        if len(cards) != 2:
            raise DemoError(f"policy balanced: found shares of {len(cards)} card, expected 2 cards: {pod.device_ids}")
        return f"pod training gets {', '.join((*pod.device_ids[XE], *pod.device_ids[NPU]))}: {_nodes(pod)}"

    async def _allocate_offload(self) -> str:
        pod = await self._run("gateway", {CY: 1, DSA: 1, ENCLAVE: 1})
        if pod.envs != {"QAT0": pod.device_ids[CY][0]}:
            raise DemoError(f"pod gateway: found variables {pod.envs}, expected QAT0 with the address of its function")
        return f"pod gateway gets {_nodes(pod)} and QAT0={pod.envs['QAT0']}"

    async def _claim_queue(self) -> str:
        start = time.monotonic()
        while not (devices := self.api.devices(IAA)):
            if time.monotonic() - start > _STEP_TIMEOUT:
                raise DemoError(f"no ResourceSlice of {IAA} within {_STEP_TIMEOUT:g} s: {self._end_of_log()}")
            await asyncio.sleep(0.05)
        device = self.api.allocate("queue", IAA, pod="compression")
        pod = Pod(
            "compression", "default", {"main": {}}, claims={"queue": "queue"}, container_claims={"main": ["queue"]}
        )
        try:
            running = await self.kubelet.run_pod(pod)
        except PodStartError as error:
            raise DemoError(str(error)) from error
        nodes = self._cdi_nodes(running.containers["main"].cdi_devices)
        if len(nodes) != 1:
            raise DemoError(f"pod compression: found the device nodes {nodes} of its claim, expected one")
        return f"claim queue has {device}, one of {len(devices)} devices of {IAA}; pod compression gets {nodes[0]}"

    def _cdi_nodes(self, names: Sequence[str]) -> Sequence[str]:
        """The device nodes of CDI devices, as a container runtime finds them."""
        found: list[str] = []
        for file in (self.directory / "cdi").glob("*.json"):
            document = msgspec.json.decode(file.read_bytes(), type=_CdiFile)
            for device in document.devices:
                if f"{document.kind}={device.name}" in names:
                    found += [node.path for node in device.container_edits.device_nodes]
        return found

    async def _plug_gpu(self) -> str:
        start = time.monotonic()
        self._fifth_gpu = self.node.plug_gpu(GpuSpec(driver="xe", numa_node=0))
        summary = await self._wait_for_counts({XE: (6, 6)})
        return f"{self._fifth_gpu} is advertised after {_ms(start)}: {summary}"

    async def _fail_gpu(self) -> str:
        card = self._card_of("render")
        self.health.set_health(self.node.device(card).bdf, memory=False)
        summary = await self._wait_for_counts({I915: (6, 4)})
        self._require_running("render")
        for number in range(4):
            other = await self._run(f"other-{number}", {I915: 1})
            if any(id_.startswith(f"{card}-") for id_ in other.device_ids[I915]):
                raise DemoError(f"pod other-{number} got the unhealthy {card}, expected another card")
        await self._require_rejected(I915)
        for number in range(4):
            self.kubelet.delete_pod(f"other-{number}")
        return f"{card} is unhealthy; pod render keeps running, new pods do not get {card}: {summary}"

    async def _disable_queue(self) -> str:
        start = time.monotonic()
        queue = self._free_queue()
        self._queue_state(queue).write_text("disabled\n")
        return f"{queue} {await self._wait_for_removal(start, DSA, 3, 2)}"

    async def _stop_heartbeat(self) -> str:
        pf = self._qat_of("gateway")
        self._heartbeat(pf).write_text("-1\n\0")
        summary = await self._wait_for_counts({CY: (4, 0)})
        self._require_running("gateway")
        await self._require_rejected(CY)
        return f"{pf} and its virtual functions are unhealthy; pod gateway keeps running: {summary}"

    async def _repair(self) -> str:
        self.health.set_health(self.node.device(self._card_of("render")).bdf)
        self._heartbeat(self._qat_of("gateway")).write_text("0\n\0")
        self._queue_state(self._free_queue()).write_text("enabled\n")
        return await self._wait_for_counts({I915: (6, 6), CY: (4, 4), DSA: (3, 3)})

    async def _remove_sgx_node(self) -> str:
        start = time.monotonic()
        (self._host / "dev/sgx_enclave").rename(self.directory / "sgx_enclave")
        summary = await self._wait_for_counts({ENCLAVE: (8, 0), PROVISION: (2, 0)})
        self._require_running("gateway")
        return f"unhealthy after {_ms(start)}, still listed: {summary}"

    async def _restore_sgx_node(self) -> str:
        start = time.monotonic()
        (self.directory / "sgx_enclave").rename(self._host / "dev/sgx_enclave")
        summary = await self._wait_for_counts({ENCLAVE: (8, 8), PROVISION: (2, 2)})
        return f"healthy after {_ms(start)}: {summary}"

    async def _restart_kubelet(self) -> str:
        before = dict(self.pods_by_device())
        start = time.monotonic()
        await self.kubelet.restart()
        await self._wait_for_counts({})
        if dict(self.pods_by_device()) != before:
            raise DemoError(f"allocations changed from {before} to {dict(self.pods_by_device())}")
        return f"all resources are registered after {_ms(start)}; {len(self.kubelet.pods())} pods keep their devices"

    async def _unplug_gpu(self) -> str:
        start = time.monotonic()
        self.node.unplug(self._fifth_gpu)
        return f"{self._fifth_gpu} {await self._wait_for_removal(start, XE, 6, 4)}"

    async def _stop_agent(self) -> str:
        if self.agent is None:
            raise DemoError("the agent is not running")
        self.agent.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_STEP_TIMEOUT):
            code = await self.agent.wait()
        left = [path.name for path in (self.directory / "kubelet/device-plugins").glob("*intel.com*")]
        if code or left:
            raise DemoError(f"exit code {code}, expected 0; sockets left: {left or 'none'}")
        return "exit code 0; the agent has removed its sockets"

    async def _run(self, name: str, requests: Mapping[str, int]) -> RunningContainer:
        try:
            pod = await self.kubelet.run_pod(Pod(name, "default", {"main": dict(requests)}))
        except AdmissionError as error:
            raise DemoError(str(error)) from error
        container = pod.containers["main"]
        if not container.devices:
            raise DemoError(f"pod {name}: found no device nodes in the answer to Allocate, expected at least one")
        return container

    def _require_running(self, name: str) -> None:
        if name not in {pod.name for pod in self.kubelet.pods()}:
            raise DemoError(f"pod {name} is not running any more")

    async def _require_rejected(self, resource: str) -> None:
        try:
            await self.kubelet.run_pod(Pod("rejected", "default", {"main": {resource: 1}}))
        except AdmissionError:
            return
        raise DemoError(f"{resource}: a new pod got an unhealthy device, expected a rejection")

    async def _wait_for_counts(self, changes: Mapping[str, tuple[int, int]]) -> str:
        """Waits until the resources have this (capacity, allocatable) and all other resources are unchanged."""
        self._expected_counts |= changes
        try:
            await self.kubelet.until(lambda _kubelet: self._counts() == self._expected_counts, _STEP_TIMEOUT)
        except TimeoutError as error:
            raise DemoError(f"{error}\nend of the agent's log: {self._end_of_log()}") from error
        return ", ".join(f"{name} {allocatable}/{capacity}" for name, (capacity, allocatable) in changes.items())

    async def _wait_for_removal(self, start: float, resource: str, before: int, after: int) -> str:
        """Waits until the removed devices are unhealthy, and then until they are not listed."""
        await self._wait_for_counts({resource: (before, after)})
        detected = _ms(start)
        return (
            f"is unhealthy after {detected} and then removed: {await self._wait_for_counts({resource: (after, after)})}"
        )

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-500:].strip()

    def _counts(self) -> dict[str, tuple[int, int]]:
        return {name: (one.capacity, one.allocatable) for name, one in self.kubelet.resources().items()}

    def _device_of(self, pod: str, resource: str) -> str:
        """The first device ID of the resource that the pod holds."""
        return next(id_ for (name, id_), holder in self.pods_by_device().items() if (name, holder) == (resource, pod))

    def _card_of(self, pod: str) -> str:
        return self._device_of(pod, I915).partition("-")[0]

    def _qat_of(self, pod: str) -> str:
        """The physical function of the virtual function that the pod holds."""
        return (self._host / "sys/bus/pci/devices" / self._device_of(pod, CY) / "physfn").readlink().name

    def _heartbeat(self, pf: str) -> Path:
        return self._host / f"sys/kernel/debug/qat_4xxx_{pf}/heartbeat/status"

    def _free_queue(self) -> str:
        """A dedicated DSA queue that no pod holds. The result is the same at each call."""
        held = {id_ for resource, id_ in self.pods_by_device() if resource == DSA}
        return next(queue for queue in ("wq0.2", "wq0.1") if not any(f"-{queue}-" in id_ for id_ in held))

    def _queue_state(self, queue: str) -> Path:
        return self._host / f"sys/bus/dsa/devices/{queue}/state"


def _describe(spec: NodeSpec) -> str:
    gpu_vfs, qat_vfs = sum(gpu.vfs for gpu in spec.gpus), sum(qat.vfs for qat in spec.qats)
    queues = sum(len(device.queues) for device in (*spec.dsas, *spec.iaas))
    return (
        f"{len(spec.gpus)} GPUs with {gpu_vfs} VFs, {len(spec.npus)} NPU, {len(spec.qats)} QAT with {qat_vfs} VFs, "
        f"{len(spec.dsas)} DSA and {len(spec.iaas)} IAA with {queues} queues, {len(spec.dlbs)} DLB, SGX"
    )


def _nodes(container: RunningContainer) -> str:
    return " ".join(node.container_path for node in container.devices)


def _ms(start: float) -> str:
    return f"{(time.monotonic() - start) * 1000:.0f} ms"
