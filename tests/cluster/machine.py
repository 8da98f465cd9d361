"""A machine made of namespaces: its first process, its daemons, commands run in it, its cgroups and its network.

This module is independent of Kubernetes. A machine ends with its first process (``boot.py``), which ends on request and
when the owner ends, which has one end of a pipe. Only the cgroups and the disk directory must then be removed.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .build import ClusterError

BOOT = Path(__file__).with_name("boot.py")
REPOSITORY = Path(__file__).resolve().parents[2]
_CGROUPS = Path("/sys/fs/cgroup")
_CLONE_NEWNET = 0x40000000
_NETLINK_KOBJECT_UEVENT = 15
_ACK_FLAGS = 1 | 4  # NLM_F_REQUEST | NLM_F_ACK
_uevent_numbers = itertools.count(1)
# Garbage collection uses a sixth of the processor time of a short-lived control plane. The limit is a soft one.
GO = {"GOGC": "400", "GOMEMLIMIT": "1GiB"}

Argument = str | Path


def wait_until(
    condition: Callable[[], object], description: str, timeout: float = 60, *, every: float = 0.05, hint: str = ""
) -> None:
    """Wait until ``condition`` is true; raise a ClusterError with ``description`` after the timeout."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{description}: not within {timeout:g} s" + (f"; {hint}" if hint else ""))
        time.sleep(every)


class Machine:
    """One set of namespaces with a disk that survives ``power_off`` and ``power_on``."""

    def __init__(
        self,
        name: str,
        disk: Path,
        *,
        cgroup: str,
        path: str,
        shares: Sequence[Path] = (),
        owned: bool = True,
        variables: Mapping[str, str] = GO,
    ) -> None:
        self.name = name
        self.disk = disk
        self.cgroup = cgroup
        self.daemons: dict[str, Daemon] = {}
        self._path = path
        self._variables = variables
        self._shares = shared_directories(shares)
        self._owned = owned
        self._first: subprocess.Popen[bytes] | None = None
        self._pid = 0

    @property
    def pid(self) -> int:
        """The PID of the machine's first process on the host; its namespaces are below /proc/PID/ns."""
        if not self._pid:
            raise ClusterError(f"{self.name}: is powered off")
        return self._pid

    @property
    def powered(self) -> bool:
        return bool(self._pid)

    @property
    def root(self) -> Path:
        """The machine's file system on the host, including sockets."""
        return Path(f"/proc/{self.pid}/root")

    def path(self, inside: Argument) -> Path:
        """The path on the host of a path of the machine."""
        return self.root / Path(inside).relative_to("/")

    def etc(self, name: str) -> Path:
        """A file below the machine's /etc, which can be written while it is powered off."""
        target = self.disk / "etc-upper" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def log(self, name: str) -> Path:
        target = self.disk / "logs" / f"{name}.log"
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def power_on(self) -> None:
        """Start the first process and wait until the file system is made; no daemon runs yet."""
        make_cgroup(self.cgroup)
        plan = {
            "disk": str(self.disk),
            "hostname": self.name,
            "shares": list(map(str, self._shares)),
            "owned": self._owned,
        }
        namespaces = ["--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        with self.log("boot").open("ab") as log:
            self._first = subprocess.Popen(
                ["unshare", *namespaces, sys.executable, "-IS", BOOT, "boot", json.dumps(plan)],
                stdin=subprocess.PIPE if self._owned else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._first.stdout
        with self._first.stdout as answer:
            ready = answer.readline() == b"ready\n"
        self._pid = _only_child(self._first.pid) or 0
        if not ready or not self._pid:
            self.power_off()
            raise ClusterError(f"{self.name}: did not boot\n{_tail(self.log('boot'))}")

    def power_off(self) -> None:
        """Kill all processes of the machine; mounts and network are removed, the disk stays."""
        if self._first:
            if self._pid:
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            else:
                self._first.kill()
            if self._first.stdin:
                self._first.stdin.close()
            self._first.wait()
        self._first, self._pid = None, 0
        for daemon in self.daemons.values():
            daemon.reap()
        remove_cgroup(self.cgroup)

    def enter(self, command: Sequence[Argument]) -> list[str]:
        """The command line that runs ``command`` in the machine's namespaces."""
        inside = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--uts", "--ipc", "--wd=/", "--"]
        return inside + [str(word) for word in command]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        variables = {"PATH": self._path, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}
        return variables | dict(self._variables) | dict(extra or {})

    def run(
        self,
        *command: Argument,
        check: bool = True,
        text: str | None = None,
        timeout: float | None = 60,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine to its end, ``text`` being its standard input."""
        result = subprocess.run(
            self.enter(command),
            input=text or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=self.environment(environment),
        )
        if check and result.returncode:
            words = " ".join(map(str, command))
            raise ClusterError(f"{self.name}: {words}: ended with {result.returncode}\n{result.stdout}{result.stderr}")
        return result

    def add_daemon(
        self,
        name: str,
        command: Sequence[Argument],
        *,
        ready: Callable[[], object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Daemon:
        """Describe a long-running program of the machine; it runs from its ``start`` on."""
        if name in self.daemons:
            raise ClusterError(f"{self.name}: has a daemon {name} already")
        self.daemons[name] = Daemon(self, name, command, ready, environment)
        return self.daemons[name]

    def socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """A socket in the machine's network namespace."""
        sockets: list[socket.socket] = []
        failed: list[OSError] = []

        # Which network a new socket belongs to is a property of the thread, so one thread changes it and ends.
        def make() -> None:
            try:
                with Path(f"/proc/{self.pid}/ns/net").open("rb") as network:
                    libc = ctypes.CDLL(None, use_errno=True)
                    if libc.setns(network.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), f"cannot enter the network of {self.name}")
                sockets.append(socket.socket(family, kind, protocol))
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return sockets[0]

    def uevent(self, action: str, device: Argument, subsystem: str, **properties: str) -> None:
        """Send a uevent of a device as a driver does: with sender port 0 and a SEQNUM.

        ``device`` is its directory below /sys/devices, with or without the leading /sys.
        """
        path = "/" + str(device).removeprefix("/sys").lstrip("/")
        fields = {"ACTION": action, "DEVPATH": path, "SUBSYSTEM": subsystem, **properties}
        words = [f"{action}@{path}", *(f"{key}={value}" for key, value in fields.items())]
        payload = b"".join(word.encode() + b"\0" for word in words)
        header = b"".join(
            number.to_bytes(size, sys.byteorder)
            for number, size in ((16 + len(payload), 4), (0x10, 2), (_ACK_FLAGS, 2), (next(_uevent_numbers), 4), (0, 4))
        )
        with self.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_KOBJECT_UEVENT) as kernel:
            kernel.settimeout(5)
            kernel.sendto(header + payload, (0, 0))
            problem = -int.from_bytes(kernel.recv(4096)[16:20], sys.byteorder, signed=True)
        if problem:
            raise ClusterError(f"{self.name}: uevent {words[0]}: {os.strerror(problem)}")

    def uevent_listener(self) -> socket.socket:
        """A socket that receives the machine's uevents: ``recvfrom`` gives payload and (sender port, groups)."""
        listener = self.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_KOBJECT_UEVENT)
        listener.bind((0, 1))
        return listener


class Daemon:
    """A program that runs on a machine until a test stops or kills it."""

    def __init__(
        self,
        machine: Machine,
        name: str,
        command: Sequence[Argument],
        ready: Callable[[], object] | None,
        environment: Mapping[str, str] | None,
    ) -> None:
        self.machine = machine
        self.name = name
        self.command = list(command)
        self._ready = ready
        self._environment = dict(environment or {})
        self._entered: subprocess.Popen[bytes] | None = None
        self._pid = 0

    @property
    def log(self) -> Path:
        return self.machine.log(self.name)

    @property
    def running(self) -> bool:
        return self._entered is not None and self._entered.poll() is None

    @property
    def pid(self) -> int:
        """The PID of the daemon on the host."""
        if not self.running:
            raise ClusterError(f"{self}: is not running\n{_tail(self.log)}")
        return self._pid

    def __str__(self) -> str:
        return f"{self.name} on {self.machine.name}"

    def start(self, *, wait: bool = True) -> None:
        """Start it, and wait until it is ready, unless disabled."""
        if self.running:
            raise ClusterError(f"{self}: is running already")
        with self.log.open("ab") as log:
            self._entered = subprocess.Popen(
                self.machine.enter(self.command),
                env=self.machine.environment(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        entered = self._entered
        # nsenter forks to get into the pid namespace; the daemon proper is its child.
        wait_until(lambda: _only_child(entered.pid) or entered.poll() is not None, f"{self}: start", every=0.002)
        self._pid = _only_child(entered.pid) or 0
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout: float = 60) -> None:
        """Wait until it is ready. If the daemon ends instead, the error has the end of its log."""
        ready = self._ready
        if ready:
            wait_until(lambda: not self.running or ready(), f"{self}: answer", timeout, hint=f"log: {self.log}")
        if not self.running:
            raise ClusterError(f"{self}: ended right away\n{_tail(self.log)}")

    def kill(self, number: int = signal.SIGKILL, *, wait: bool = True) -> None:
        """Send a signal, by default SIGKILL, and wait for the end."""
        os.kill(self.pid, number)
        if wait:
            self.reap()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop the process for the duration of the block."""
        assert self._entered
        pids = (self._entered.pid, self.pid)
        self.kill(signal.SIGSTOP, wait=False)
        try:
            yield
        finally:
            # nsenter stops itself together with its child.
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def stop(self, timeout: float = 20) -> None:
        """Stop it with SIGTERM, and with SIGKILL after a timeout."""
        if not self.running:
            self.reap()
            return
        with suppress(ClusterError, ProcessLookupError):
            self.kill(signal.SIGTERM, wait=False)
        try:
            self.reap(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def reap(self, timeout: float | None = 30) -> None:
        if self._entered:
            self._entered.wait(timeout)
        self._entered, self._pid = None, 0

    def tail(self, lines: int = 40) -> str:
        return _tail(self.log, lines)


def shared_directories(more: Sequence[Path]) -> list[Path]:
    """The read-only directories that a machine shares with the host: this repository and its Python."""
    paths = {path.resolve() for path in (REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), *more)}
    outermost = [path for path in sorted(paths) if not any(parent in paths for parent in path.parents)]
    return [path for path in outermost if path != Path("/usr") and Path("/usr") not in path.parents]


def make_cgroup(name: str) -> None:
    """A separate cgroup in every hierarchy, so that limits apply and all processes can be found and removed."""
    for hierarchy in _hierarchies():
        _delegate(hierarchy)
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        # A new cpuset has no processors, and nothing can run in it.
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (group / setting).exists() and (hierarchy / setting).exists():
                (group / setting).write_text((hierarchy / setting).read_text())


def remove_cgroup(name: str) -> None:
    for hierarchy in _hierarchies():
        if (top := hierarchy / name).is_dir():
            wait_until(lambda top=top: _remove_tree_of_cgroups(top), f"{top}: becoming empty", every=0.02)


def cgroups_named(prefix: str) -> set[str]:
    """Top-level cgroups whose name starts like this, in any hierarchy."""
    return {group.name for hierarchy in _hierarchies() for group in hierarchy.glob(f"{prefix}*") if group.is_dir()}


def _hierarchies() -> Iterator[Path]:
    if (_CGROUPS / "cgroup.controllers").exists():
        yield _CGROUPS
        return
    for hierarchy in sorted(_CGROUPS.iterdir()):
        # cpu and cpuacct are often links to the one hierarchy that has both.
        if hierarchy.is_dir() and not hierarchy.is_symlink() and hierarchy.is_mount():
            yield hierarchy


def _delegate(hierarchy: Path) -> None:
    """Enables the controllers that a kubelet needs in a cgroup of version 2."""
    if (control := hierarchy / "cgroup.subtree_control").exists():
        available = set((hierarchy / "cgroup.controllers").read_text().split())
        for controller in sorted(available & {"cpu", "cpuset", "hugetlb", "io", "memory", "pids"}):
            control.write_text(f"+{controller}")


def _remove_tree_of_cgroups(top: Path) -> bool:
    for directory, _, _ in os.walk(top, topdown=False):
        try:
            Path(directory).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            _kill_members(Path(directory))
            return False
    return True


def _kill_members(group: Path) -> None:
    with suppress(OSError):
        for line in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)


def remove_disk(disk: Path) -> None:
    """Delete a machine's disk; mounts of containers below it ended with its namespaces."""
    wait_until(lambda: _removed(disk), f"{disk}: removal", 20, every=0.1)


def _removed(tree: Path) -> bool:
    shutil.rmtree(tree, ignore_errors=True)
    return not tree.exists()


def _only_child(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(children[0]) if children else None


def _tail(log: Path, lines: int = 30) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return f"{log}: no log"
