"""The clusters on this computer, and their removal, also after a crash of their owner.

A cluster is a numbered directory; its number also names its network and its cgroups, so that the directory is
enough to find everything else. The owner of a cluster holds a lock on its directory; without a lock it is a leftover.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .build import ClusterError
from .machine import BOOT, cgroups_named, remove_cgroup, remove_disk, wait_until

_MOST_CLUSTERS = 64
_RECORD = "cluster.json"


@dataclass
class Claim:
    """A cluster's directory, created first and removed last."""

    directory: Path
    name: str
    owned: bool
    left_running: bool = False

    @property
    def number(self) -> int:
        return int(self.directory.name)

    @property
    def host_port(self) -> str:
        """The host's end of the veth pair to the cluster."""
        return f"accelplane{self.number}"

    def cgroups(self) -> set[str]:
        """The names of the machines' cgroups, which are the same in every hierarchy."""
        return cgroups_named(f"accelplane-{self.number}-")

    def machines(self) -> dict[str, int]:
        """The running machines by name, with the first process of each."""
        found: dict[str, int] = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                words = (process / "cmdline").read_bytes().decode().split("\0")
                if words[0] == "unshare" and str(BOOT) in words:
                    disk = Path(json.loads(words[words.index("boot") + 1])["disk"])
                    if disk.parent == self.directory:
                        found[disk.name] = int(process.name)
        return found


def state_directory() -> Path:
    """Disks and logs of clusters; needs ext4, xfs or tmpfs, because nodes mount overlays on it."""
    return Path(os.environ.get("ACCELPLANE_CLUSTER_DIR") or "/var/tmp/accelplane-clusters").absolute()


def clusters() -> list[Claim]:
    """All clusters, including leftovers."""
    found: list[Claim] = []
    for directory in sorted(path for path in state_directory().glob("[0-9]*") if path.is_dir()):
        try:
            record = json.loads((directory / _RECORD).read_text())
        except (FileNotFoundError, ValueError):
            record = {"name": "", "owned": True}
        found.append(Claim(directory, record["name"], record["owned"]))
    return found


def find(name: str) -> Claim | None:
    """The running cluster without an owner that has this name."""
    return next((claim for claim in clusters() if not claim.owned and claim.name == name), None)


@contextmanager
def claimed(name: str, *, owned: bool) -> Iterator[Claim]:
    """A new cluster's directory; the cluster is removed at the end of the block, unless it is kept running."""
    with _state_lock():
        _remove_stale()
        claim = _claim(name, owned=owned)
        lock = os.open(claim.directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield claim
    finally:
        if not claim.left_running:
            remove(claim)
        os.close(lock)


def remove(claim: Claim) -> None:
    """End the cluster's machines and delete their network, cgroups and files."""
    _end(claim)
    with _state_lock():
        remove_disk(claim.directory)
        with suppress(OSError):
            state_directory().rmdir()


def _end(claim: Claim) -> None:
    for process in claim.machines().values():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    wait_until(lambda: not claim.machines(), f"{claim.directory}: end of all machines", every=0.02)
    # The kernel removes it asynchronously with the control machine's network.
    subprocess.run(["ip", "link", "delete", claim.host_port], capture_output=True, check=False)
    for name in claim.cgroups():
        remove_cgroup(name)


def _claim(name: str, *, owned: bool) -> Claim:
    if not owned and find(name):
        raise ClusterError(f"a cluster named {name} is there already; take it down first, or choose another name")
    # Numbers are used in turns, so that leftovers of one cluster do not affect the next one.
    first = os.getpid()
    for number in ((first + step) % _MOST_CLUSTERS for step in range(_MOST_CLUSTERS)):
        claim = Claim(state_directory() / str(number), name, owned)
        if not _is_free(claim):
            continue
        claim.directory.mkdir(mode=0o700)
        (claim.directory / _RECORD).write_text(json.dumps({"name": name, "owned": owned}))
        return claim
    raise ClusterError(f"there are {_MOST_CLUSTERS} clusters already; see python -m tests.cluster status")


def _is_free(claim: Claim) -> bool:
    """Another state directory may have a cluster of this number."""
    network = Path("/sys/class/net") / claim.host_port
    return not (claim.directory.exists() or network.exists() or claim.cgroups())


def _remove_stale() -> None:
    for claim in clusters():
        if claim.owned and not _is_held(claim.directory):
            _end(claim)
            remove_disk(claim.directory)


def _is_held(directory: Path) -> bool:
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def _state_lock() -> Iterator[None]:
    """Hold the lock of the state directory, which is removed with the last cluster."""
    while True:
        state_directory().mkdir(parents=True, exist_ok=True)
        lock = os.open(state_directory(), os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                current = state_directory().stat().st_ino
            except FileNotFoundError:
                continue
            if current == os.fstat(lock).st_ino:
                yield
                return
        finally:
            os.close(lock)
