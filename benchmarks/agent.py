"""The agent as a process on a simulated node, and its memory and processor time as the kernel reports them.

Facts: proc(5), cgroups v1 and v2 documents of the kernel, clock_getcpuclockid(3).
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from accelplane.kubelet.embedded import EmbeddedKubelet
from accelplane.simulate.offload import DlbSpec, DsaSpec, IaaSpec, QatSpec, QueueSpec, SgxSpec
from accelplane.simulate.specs import NodeSpec
from accelplane.simulate.tree import SimulatedNode

# The installed command.
PROGRAM = (os.path.join(os.path.dirname(sys.executable), "accelplane"),)
CARDS, NPUS = 4, 1
GPU, NPU = "gpu.intel.com/i915", "npu.intel.com/accel"
QAT, DSA, IAA, DLB = (
    "qat.intel.com/cy",
    "dsa.intel.com/wq-user-dedicated",
    "iaa.intel.com/wq-user-dedicated",
    "dlb.intel.com/pf",
)
FAMILIES = ("gpu", "npu", "qat", "dsa", "iaa", "dlb", "sgx")
ENCLAVE, PROVISION = "sgx.intel.com/enclave", "sgx.intel.com/provision"
_MIB = 1024 * 1024
_MEMORY = "/dev/shm"  # noqa: S108 - directories in it have unpredictable names


def _offload_devices(each: int) -> NodeSpec:
    """The hardware of a server with `each` devices of each kind in addition to cards."""
    return NodeSpec(
        qats=[QatSpec(vfs=16, vf_driver="vfio-pci", services="sym;asym")] * each,
        dsas=[DsaSpec(queues=[QueueSpec()] * 8)] * each,
        iaas=[IaaSpec(queues=[QueueSpec()] * 8)] * each,
        dlbs=[DlbSpec()] * min(each, 4),
        sgx=SgxSpec(),
        numa_nodes=2,
    )


def _offload_resources(each: int) -> Mapping[str, int]:
    """The allocatable devices of this hardware. The plugin publishes at most 64 QAT virtual functions by default."""
    return {QAT: min(16 * each, 64), DSA: 8 * each, IAA: 8 * each, DLB: min(each, 4), ENCLAVE: 110, PROVISION: 110}


class NodeSetup(Struct, frozen=True):
    """A simulated node, and the directories of an agent on it.

    `expected` is the number of allocatable devices by resource, without GPUs and NPUs. Each card has `shares` IDs.
    """

    directory: str
    node: SimulatedNode
    plugins: Sequence[str] = ("gpu", "npu")
    expected: Mapping[str, int] = {}
    config: str = ""
    shares: int = 1

    @property
    def root(self) -> str:
        return self.node.root

    @property
    def kubelet_dir(self) -> str:
        return f"{self.directory}/k"

    @property
    def cdi_dir(self) -> str:
        """In memory, as /var/run/cdi."""
        return f"{self.root}/var/run/cdi"

    @property
    def log(self) -> str:
        return f"{self.directory}/log"

    @property
    def arguments(self) -> Sequence[str]:
        directories = ("--root", self.root, "--kubelet-dir", self.kubelet_dir, "--cdi-dir", self.cdi_dir)
        config = ("--config", self.config) if self.config else ()
        return ("node", "--plugins", ",".join(self.plugins), *directories, *config)

    def all_allocatable(self, kubelet: EmbeddedKubelet) -> bool:
        """Whether the kubelet has all devices of the node as allocatable."""
        kinds = [device.kind for device in self.node.devices()]
        allocatable = {name: status.allocatable for name, status in kubelet.resources().items()}
        found = {GPU: kinds.count("gpu") * self.shares, NPU: kinds.count("npu"), **self.expected}
        return allocatable == {name: count for name, count in found.items() if count}

    @property
    def resources(self) -> int:
        """The number of resources that the agent registers."""
        return 2 + len(self.expected)


@contextlib.contextmanager
def gpu_npu_node(cards: int = CARDS, npus: int = NPUS) -> Iterator[NodeSetup]:
    """A node with GPUs and NPUs in temporary directories."""
    # The node's files are in memory, as in sysfs. On a disk, scans would read pages again that were evicted.
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory,
        tempfile.TemporaryDirectory(prefix="bench-", dir=memory, ignore_cleanup_errors=True) as root,
    ):
        node = SimulatedNode(root)
        for _ in range(cards):
            node.plug_gpu()
        for _ in range(npus):
            node.plug_npu()
        os.makedirs(f"{directory}/k/device-plugins")
        yield NodeSetup(directory, node)


@contextlib.contextmanager
def health_node() -> Iterator[NodeSetup]:
    """The same node, with GPU health management. The caller runs a `LevelZeroService` below its root."""
    with gpu_npu_node() as setup:
        config = f"{setup.directory}/agent.yaml"
        with open(config, "w") as file:
            file.write("plugins: {gpu: {health-management: true}}\n")
        yield msgspec.structs.replace(setup, config=config)


@contextlib.contextmanager
def large_node(each: int = 8) -> Iterator[NodeSetup]:
    """A node with hardware of all families: the same cards, `each` QAT with 16 virtual functions, DSA and IAA with 8
    work queues, at most 4 DLB, SGX. The default is the largest supported node."""
    with gpu_npu_node() as setup:
        setup.node.build(_offload_devices(each))
        yield msgspec.structs.replace(setup, plugins=FAMILIES, expected=_offload_resources(each))


@contextlib.contextmanager
def ordinary_node() -> Iterator[NodeSetup]:
    """A node with two sockets and one device of each kind per socket."""
    with large_node(2) as setup:
        yield setup


class Memory(Struct, frozen=True):
    """The memory of a process in MiB, from `smaps_rollup`."""

    resident: float
    anonymous: float
    proportional: float


class AgentProcess:
    """A running agent."""

    def __init__(self, process: subprocess.Popen[bytes], log: str) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log

    def check(self) -> None:
        """Raises `RuntimeError` with the end of the log if the agent has exited."""
        if (code := self._process.poll()) is not None:
            with open(self._log, errors="replace") as log:
                raise RuntimeError(f"the agent exited with {code}:\n{log.read()[-4000:]}")

    def memory(self) -> Memory:
        sizes: dict[str, float] = {}
        for line in self._read("smaps_rollup").splitlines()[1:]:
            key, value, *_ = line.split()
            sizes[key] = int(value) * 1024 / _MIB
        return Memory(sizes["Rss:"], sizes["Anonymous:"], sizes["Pss:"])

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def descriptors(self) -> int:
        """The number of open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cpu_seconds(self) -> float:
        """The processor time of all threads, including those that have ended, which schedstat omits."""
        return time.clock_gettime(~self.pid << 3 | 2)

    def schedstat_seconds(self) -> float:
        """The processor time of the running threads, from the scheduler."""
        return sum(int(text.split()[0]) for text in self._of_threads("schedstat")) / 1e9

    def voluntary_switches(self) -> int:
        """The number of voluntary context switches of the running threads."""
        lines = [line for text in self._of_threads("status") for line in text.splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    def end(self) -> None:
        """Sends SIGTERM, as Kubernetes does. Raises `RuntimeError` if the exit code is not 0."""
        self.check()
        self._process.send_signal(signal.SIGTERM)
        if (code := self._process.wait(10)) != 0:
            raise RuntimeError(f"exit code of the agent after SIGTERM: found {code}, expected 0")

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _of_threads(self, name: str) -> Iterator[str]:
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield self._read(f"task/{thread}/{name}")

    def _read(self, name: str) -> str:
        with open(f"/proc/{self.pid}/{name}") as file:
            return file.read()


@contextlib.contextmanager
def agent(
    setup: NodeSetup,
    *options: str,
    program: Sequence[str] = PROGRAM,
    env: Mapping[str, str] | None = None,
) -> Iterator[AgentProcess]:
    """Runs an agent on the node. `program` is the command that gets the agent's arguments."""
    with open(setup.log, "ab") as log:
        process = subprocess.Popen(
            [*program, *setup.arguments, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(env or {})},
        )
    running = AgentProcess(process, setup.log)
    try:
        yield running
        running.end()
    finally:
        running.kill()


@contextlib.asynccontextmanager
async def registered_agent(
    setup: NodeSetup,
    *options: str,
    program: Sequence[str] = PROGRAM,
    env: Mapping[str, str] | None = None,
    seconds: float = 30.0,
) -> AsyncIterator[tuple[AgentProcess, EmbeddedKubelet]]:
    """Runs an agent and the embedded kubelet; all devices are allocatable."""
    async with EmbeddedKubelet(setup.kubelet_dir) as kubelet:
        with agent(setup, *options, program=program, env=env) as running:
            try:
                await kubelet.until(setup.all_allocatable, seconds)
            except TimeoutError:
                running.check()
                raise
            yield running, kubelet


def free_port() -> int:
    """A TCP port that no socket uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
