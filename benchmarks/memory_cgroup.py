"""A memory cgroup, of version 1 or 2, depending on the hierarchy that has the memory controller.

Facts: the kernel's documents of both versions. Swap is disabled, as in Kubernetes by default.
"""

import contextlib
import glob
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from typing import Self

from msgspec import Struct

_MIB = 1024 * 1024
_numbers = itertools.count()


class CgroupUnavailable(Exception):
    """No memory cgroup can be created; the message has the reason."""


class CgroupUsage(Struct, frozen=True):
    """Used memory in MiB, and how often the limit was reached. `peak` is None if the kernel does not report it."""

    anonymous: float
    files: float
    peak: float | None
    at_limit: int
    killed: int


class MemoryCgroup(Struct, frozen=True):
    """A cgroup at `path`."""

    path: str
    version: int

    def command(self) -> tuple[str, ...]:
        """The command prefix that runs a program in the cgroup from its first page on."""
        return ("/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', self.path)

    def usage(self) -> CgroupUsage:
        stat = _pairs(f"{self.path}/memory.stat")
        if self.version == 1:
            return CgroupUsage(
                anonymous=stat["rss"] / _MIB,
                files=stat["cache"] / _MIB,
                peak=_number(f"{self.path}/memory.max_usage_in_bytes") / _MIB,
                # With swap accounting, the counter of memory and swap is checked first.
                at_limit=sum(map(_number, glob.glob(f"{self.path}/memory.*failcnt"))),
                killed=_pairs(f"{self.path}/memory.oom_control").get("oom_kill", 0),
            )
        events = _pairs(f"{self.path}/memory.events")
        peak = f"{self.path}/memory.peak"
        return CgroupUsage(
            anonymous=stat["anon"] / _MIB,
            files=stat["file"] / _MIB,
            peak=_number(peak) / _MIB if os.path.exists(peak) else None,
            at_limit=events["max"],
            killed=events["oom_kill"],
        )

    @classmethod
    def create(cls, limit: int) -> Self:
        """Raises `CgroupUnavailable`."""
        name = f"accelplane-benchmark-{os.getpid()}-{next(_numbers)}"
        try:
            parent, version = _hierarchy()
            path = f"{parent}/{name}"
            if version == 1:
                os.mkdir(path)
                _write(f"{path}/memory.limit_in_bytes", limit)
                with contextlib.suppress(FileNotFoundError):  # a kernel without swap accounting
                    _write(f"{path}/memory.memsw.limit_in_bytes", limit)
                return cls(path, 1)
            if "memory" not in _text(f"{parent}/cgroup.subtree_control").split():
                _write(f"{parent}/cgroup.subtree_control", "+memory")
            os.mkdir(path)
            _write(f"{path}/memory.max", limit)
            with contextlib.suppress(FileNotFoundError):
                _write(f"{path}/memory.swap.max", 0)
            return cls(path, 2)
        except OSError as error:
            raise CgroupUnavailable(f"{error.filename}: {error.strerror}; memory cgroups need root") from error


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[MemoryCgroup]:
    """A cgroup for the duration of the block. Raises `CgroupUnavailable`."""
    group = MemoryCgroup.create(limit)
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                os.rmdir(group.path)
                break
            except OSError:  # its last process has not been reaped yet
                time.sleep(0.1)


def _hierarchy() -> tuple[str, int]:
    """The parent of new memory cgroups, and the version: this process's cgroup in version 1, the root in version 2."""
    mounts = {kind: (path, options) for path, kind, options in _cgroup_mounts() if kind == "cgroup2"}
    for path, kind, options in _cgroup_mounts():
        if kind == "cgroup" and "memory" in options.split(","):
            own = next(line.split(":", 2)[2].strip() for line in _lines("/proc/self/cgroup") if ":memory:" in line)
            below = f"{path}{own}".rstrip("/")
            return (below if os.path.isdir(below) else path), 1
    if "cgroup2" in mounts and "memory" in _text(f"{mounts['cgroup2'][0]}/cgroup.controllers").split():
        return mounts["cgroup2"][0], 2
    raise CgroupUnavailable("no cgroup hierarchy with a memory controller is mounted")


def _cgroup_mounts() -> Iterator[tuple[str, str, str]]:
    for line in _lines("/proc/self/mounts"):
        _source, path, kind, options, *_ = line.split()
        if kind.startswith("cgroup"):
            yield path, kind, options


def _pairs(path: str) -> Mapping[str, int]:
    return {key: int(value) for key, value in (line.split() for line in _lines(path))}


def _number(path: str) -> int:
    return int(_text(path))


def _lines(path: str) -> list[str]:
    return _text(path).splitlines()


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, value: object) -> None:
    with open(path, "w") as file:
        file.write(str(value))
