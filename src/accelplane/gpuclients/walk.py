"""Walks over the processes of a host and finds the open files of GPUs in containers.

Only `/proc/<pid>/fdinfo` is read, never `/proc/<pid>/fd`: the latter needs CAP_DAC_READ_SEARCH for processes of other
users, the former only CAP_SYS_PTRACE. Reading a file of xe may block for as long as the driver waits for the GPU.
"""

import os
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from accelplane.descriptors import closing
from accelplane.gpuclients.cgroup import ContainerCgroup, container_cgroup
from accelplane.gpuclients.fdinfo import MARK, parse_fdinfo
from accelplane.gpuclients.mountinfo import container_name
from accelplane.gpuclients.usage import Container, Found, Walk

_CGROUP_LIMIT = 8 * 1024
_FDINFO_LIMIT = 8 * 1024
_MOUNTINFO_LIMIT = 256 * 1024
_MOUNTINFO_PARTS = 256  # procfs returns about a page per read
_MAX_NAMES = 4096
_CPU_CHECK = 32  # descriptors between two checks of the processor time


class Limits(Struct, frozen=True, kw_only=True):
    """What one walk reads at most: processes, GPU files and descriptors of each process, seconds of processor time."""

    processes: int = 4096
    files: int = 256
    descriptors: int = 4096
    cpu: float = 0.05


class _Process(NamedTuple):
    """A process of a pod, and the processor time at which the walk began."""

    pid: int
    cgroup: ContainerCgroup
    start: float


class ContainerNames:
    """Names of containers by their runtime IDs: read once per container."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}

    def container(self, directory: int, pid: int, cgroup: ContainerCgroup) -> Container:
        key = (cgroup.pod, cgroup.id)
        name = self._names.get(key)
        if name is None:
            content = read_bytes(f"{pid}/mountinfo", _MOUNTINFO_LIMIT, directory, parts=_MOUNTINFO_PARTS)
            name = container_name(content.decode("utf-8", "replace"), cgroup.pod)
            if content and cgroup.id:
                if len(self._names) >= _MAX_NAMES:
                    self._names.clear()
                self._names[key] = name
        return Container(cgroup.pod, name) if name else Container(cgroup.pod, "", cgroup.id)


class Pass:
    """One walk in a thread. `reading` is the process whose files it reads now, 0 while it reads none.

    `last` is the process at which it stopped, `denied` the number of processes of pods that it may not read. The
    thread may block in the driver. The owner then sets `abandoned` and uses `result`, which has the results until
    then.
    """

    def __init__(self, proc: str, limits: Limits, names: ContainerNames) -> None:
        self.reading = 0
        self.last = 0
        self.denied = 0
        self.abandoned = False
        self._proc = proc
        self._limits = limits
        self._names = names
        self._found: list[Found] = []
        self._present: frozenset[int] = frozenset()
        self._visited: set[int] = set()
        self._complete = True

    def run(self, pods: Collection[str], first: Collection[int], after: int, skip: Collection[int]) -> None:
        """Reads the processes `first`, then the others with those above `after` first, without `skip`.

        Raises `OSError` if the processes cannot be listed.
        """
        start = time.thread_time()
        with closing(os.open(self._proc, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
            pids = sorted(int(name) for name in os.listdir(directory) if name.isascii() and name.isdigit())
            self._present = frozenset(pids)
            for count, pid in enumerate(order_of(pids, first, after)):
                if self.abandoned or count >= self._limits.processes or self._is_over_limit(start):
                    self._complete = False
                    break
                if pid not in first:
                    self.last = pid
                if pid not in skip and self._visit(directory, pid, pods, start):
                    self._visited.add(pid)
                else:
                    self._complete = False

    def result(self) -> Walk:
        complete = self._complete and not self.abandoned
        return Walk(
            found=list(self._found), present=self._present, visited=frozenset(list(self._visited)), complete=complete
        )

    @property
    def processes(self) -> int:
        return len(self._visited)

    def _visit(self, directory: int, pid: int, pods: Collection[str], start: float) -> bool:
        """Reads a process. Returns whether all of its files were read."""
        content = read_bytes(f"{pid}/cgroup", _CGROUP_LIMIT, directory)
        cgroup = container_cgroup(content.decode("utf-8", "replace")) if b"pod" in content else None
        if cgroup is None or cgroup.pod not in pods:
            return True
        self.reading = pid
        try:
            return self._read_files(directory, pid, cgroup, start)
        finally:
            self.reading = 0

    def _read_files(self, directory: int, pid: int, cgroup: ContainerCgroup, start: float) -> bool:
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            with closing(os.open(f"{pid}/fdinfo", flags, dir_fd=directory)) as files:
                descriptors = sorted(int(name) for name in os.listdir(files) if name.isascii() and name.isdigit())
                return self._read_descriptors(directory, files, descriptors, _Process(pid, cgroup, start))
        except OSError as error:  # usually the process has ended
            self.denied += isinstance(error, PermissionError)
            return True

    def _read_descriptors(self, directory: int, files: int, descriptors: Sequence[int], process: "_Process") -> bool:
        container = None
        found = 0
        for count, descriptor in enumerate(descriptors):
            if self.abandoned or count >= self._limits.descriptors or found >= self._limits.files:
                return False
            if count % _CPU_CHECK == 0 and self._is_over_limit(process.start):
                return False
            content = read_bytes(str(descriptor), _FDINFO_LIMIT, files)
            client = parse_fdinfo(content.decode("ascii", "replace")) if MARK in content else None
            if client is not None:
                found += 1
                container = container or self._names.container(directory, process.pid, process.cgroup)
                self._found.append(Found(container, process.pid, client, time.monotonic()))
        return True

    def _is_over_limit(self, start: float) -> bool:
        return time.thread_time() - start > self._limits.cpu


def order_of(pids: Sequence[int], first: Collection[int], after: int) -> Iterator[int]:
    """Each process once: `first`, then from the end of the last walk on, so that walks with limits read all in turn."""
    known = set(first)
    yield from (pid for pid in pids if pid in known)
    yield from (pid for pid in pids if pid > after and pid not in known)
    yield from (pid for pid in pids if pid <= after and pid not in known)


def read_bytes(path: str, limit: int, directory: int, *, parts: int = 1) -> bytes:
    """The beginning of a file below `directory`, from at most `parts` reads; empty if it cannot be read."""
    content = b""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
        try:
            for _ in range(parts):
                part = os.read(descriptor, limit - len(content))
                content += part
                if not part or len(content) >= limit:
                    break
        finally:
            os.close(descriptor)
    except OSError:
        return b""
    return content
