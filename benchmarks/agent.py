"""The agent as a process on a simulated node, and what the kernel says of it.

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
_MEMORY = "/dev/shm"  # noqa: S108 - directories in it get names that nobody can guess


def _offload(each: int) -> NodeSpec:
    """What a server with so many devices of each kind has beside cards."""
    return NodeSpec(
        qats=[QatSpec(vfs=16, vf_driver="vfio-pci", services="sym;asym")] * each,
        dsas=[DsaSpec(queues=[QueueSpec()] * 8)] * each,
        iaas=[IaaSpec(queues=[QueueSpec()] * 8)] * each,
        dlbs=[DlbSpec()] * min(each, 4),
        sgx=SgxSpec(),
        numa_nodes=2,
    )


def _offloaded(each: int) -> Mapping[str, int]:
    """What the kubelet then has; of virtual functions of QAT the plugin publishes 64 by default."""
    return {QAT: min(16 * each, 64), DSA: 8 * each, IAA: 8 * each, DLB: min(each, 4), ENCLAVE: 110, PROVISION: 110}


class World(Struct, frozen=True):
    """A node, and the directories that an agent on it uses.

    `more` is what the kubelet should have beside cards, by resource. Each card has `shares` IDs.
    """

    directory: str
    node: SimulatedNode
    plugins: Sequence[str] = ("gpu", "npu")
    more: Mapping[str, int] = {}
    config: str = ""
    shares: int = 1

    @property
    def root(self) -> str:
        return self.node.root

    @property
    def kubelet_dir(self) -> str:
        return f"{self.directory}/k"

    @property
    def log(self) -> str:
        return f"{self.directory}/log"

    @property
    def arguments(self) -> Sequence[str]:
        directories = ("--root", self.root, "--kubelet-dir", self.kubelet_dir, "--cdi-dir", f"{self.directory}/cdi")
        config = ("--config", self.config) if self.config else ()
        return ("node", "--plugins", ",".join(self.plugins), *directories, *config)

    def has_everything(self, kubelet: EmbeddedKubelet) -> bool:
        """Whether the kubelet can give away all that is plugged in."""
        kinds = [device.kind for device in self.node.devices()]
        allocatable = {name: status.allocatable for name, status in kubelet.resources().items()}
        found = {GPU: kinds.count("gpu") * self.shares, NPU: kinds.count("npu"), **self.more}
        return allocatable == {name: count for name, count in found.items() if count}

    @property
    def resources(self) -> int:
        """How many resources are registered."""
        return 2 + len(self.more)


@contextlib.contextmanager
def world(cards: int = CARDS, npus: int = NPUS) -> Iterator[World]:
    """A node that is gone afterwards."""
    # Like sysfs the node's files are in memory: from a disk each look would have to read again what was let go.
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
        yield World(directory, node)


@contextlib.contextmanager
def health_world() -> Iterator[World]:
    """The same node with health management. The caller serves `LevelZeroService` below its root."""
    with world() as here:
        config = f"{here.directory}/agent.yaml"
        with open(config, "w") as file:
            file.write("plugins: {gpu: {health-management: true}}\n")
        yield msgspec.structs.replace(here, config=config)


@contextlib.contextmanager
def whole_world(each: int = 8) -> Iterator[World]:
    """A node with hardware of all families: the same cards, `each` QAT with 16 virtual functions, DSA and IAA with 8
    work queues, at most 4 DLB, SGX. As it is, it is the largest that there is."""
    with world() as here:
        here.node.build(_offload(each))
        yield msgspec.structs.replace(here, plugins=FAMILIES, more=_offloaded(each))


@contextlib.contextmanager
def ordinary_world() -> Iterator[World]:
    """Such a node with two sockets and a device of each kind on either."""
    with whole_world(2) as here:
        yield here


class Memory(Struct, frozen=True):
    """In MiB, as the kernel counts pages."""

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
        """Raises `RuntimeError` with the end of the log when it runs no more."""
        if (code := self._process.poll()) is not None:
            with open(self._log, errors="replace") as log:
                raise RuntimeError(f"the agent ended with {code}:\n{log.read()[-4000:]}")

    def memory(self) -> Memory:
        sizes: dict[str, float] = {}
        for line in self._read("smaps_rollup").splitlines()[1:]:
            key, value, *_ = line.split()
            sizes[key] = int(value) * 1024 / _MIB
        return Memory(sizes["Rss:"], sizes["Anonymous:"], sizes["Pss:"])

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def cpu_seconds(self) -> float:
        """Of all threads, those that have ended included, which schedstat would leave out."""
        return time.clock_gettime(~self.pid << 3 | 2)

    def schedstat_seconds(self) -> float:
        """Of the threads that live, as the scheduler counts it."""
        return sum(int(text.split()[0]) for text in self._of_threads("schedstat")) / 1e9

    def voluntary_switches(self) -> int:
        """How many times a living thread went to sleep."""
        lines = [line for text in self._of_threads("status") for line in text.splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    def end(self) -> None:
        """Ends it as Kubernetes does. Raises `RuntimeError` unless it goes with 0."""
        self.check()
        self._process.send_signal(signal.SIGTERM)
        if (code := self._process.wait(10)) != 0:
            raise RuntimeError(f"the agent answered SIGTERM with {code}, expected 0")

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
    here: World,
    *more: str,
    program: Sequence[str] = PROGRAM,
    env: Mapping[str, str] | None = None,
) -> Iterator[AgentProcess]:
    """An agent on that node, ended afterwards. `program` is what to start with the agent's arguments."""
    with open(here.log, "ab") as log:
        process = subprocess.Popen(
            [*program, *here.arguments, *more],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(env or {})},
        )
    running = AgentProcess(process, here.log)
    try:
        yield running
        running.end()
    finally:
        running.kill()


@contextlib.asynccontextmanager
async def registered(
    here: World,
    *more: str,
    program: Sequence[str] = PROGRAM,
    env: Mapping[str, str] | None = None,
    seconds: float = 30.0,
) -> AsyncIterator[tuple[AgentProcess, EmbeddedKubelet]]:
    """An agent of which the embedded kubelet has everything."""
    async with EmbeddedKubelet(here.kubelet_dir) as kubelet:
        with agent(here, *more, program=program, env=env) as running:
            try:
                await kubelet.until(here.has_everything, seconds)
            except TimeoutError:
                running.check()
                raise
            yield running, kubelet


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
