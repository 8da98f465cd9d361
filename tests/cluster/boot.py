"""The first process of a simulated machine: creates its file system, then waits until the machine is stopped.

Runs as pid 1 in new mount, network, pid, uts and ipc namespaces, without other modules (standard library only,
no import from this package). When it ends, the kernel ends everything else in the machine.

The root is the machine's own disk, a directory that survives reboots. /usr and /etc are the host's with a
writable layer of the machine's own on top; /run, /tmp, /dev and /sys are new at every boot. Of the host's /sys
only what a kubelet needs is visible, read-only; buses and classes of hardware are empty at first, so that no
real device is visible.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import uuid
from pathlib import Path

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC = 1, 2, 4, 8, 32, 4096, 16384
PRIVATE, SHARED = 1 << 18, 1 << 20
DETACH = 2

REAL_SYSFS = Path("/run/node/sysfs")
_SYSFS_SHOWN = ("devices/system", "devices/virtual", "class/net", "kernel", "module", "firmware", "power")
_SYSFS_EMPTY = ("block", "bus/pci/devices", "bus/pci/drivers", "class", "dev/block", "dev/char", "fs/cgroup")

_DEVICES = {
    "null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "kmsg": (1, 11),
    "tty": (5, 0), "fuse": (10, 229), "net/tun": (10, 200),
}  # fmt: skip
_DEVICE_LINKS = {
    "ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2",
}  # fmt: skip

# These are global on the host. Those that the kubelet would set are mounted with the expected values.
_SYSCTLS = {
    "vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str | Path, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = (str(source).encode(), bytes(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    if _libc.mount(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or 'bind'} {source} ({data}): {os.strerror(number)}", str(target))


def unmount(target: Path) -> None:
    if _libc.umount2(bytes(target), DETACH):
        number = ctypes.get_errno()
        raise OSError(number, f"umount: {os.strerror(number)}", str(target))


def bind(source: Path, target: Path, *, writable: bool = False, flags: int = 0) -> None:
    mount(source, target, flags=BIND | REC)
    if not writable:
        mount("", target, flags=BIND | REMOUNT | RDONLY | flags)


def boot(disk: Path, hostname: str, shares: list[Path]) -> None:
    socket.sethostname(hostname)
    root = disk / "root"
    mount("", Path("/"), flags=REC | PRIVATE)
    root.mkdir(parents=True, exist_ok=True)
    mount(root, root, flags=BIND)
    _create_layout(root)
    for name in ("usr", "etc"):
        upper, work = disk / f"{name}-upper", disk / f"{name}-work"
        upper.mkdir(exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        mount("overlay", root / name, "overlay", data=f"lowerdir=/{name},upperdir={upper},workdir={work}")
    mount("proc", root / "proc", "proc", NOSUID | NODEV | NOEXEC)
    mount("tmpfs", root / "run", "tmpfs", NOSUID | NODEV, "mode=755")
    mount("tmpfs", root / "tmp", "tmpfs", NOSUID | NODEV, "mode=1777")
    _make_sys(root)
    _make_dev(root / "dev")
    for share in shares:
        (target := root / share.relative_to("/")).mkdir(parents=True, exist_ok=True)
        bind(share, target)
    _shadow_sysctls(root)
    (root / "proc/sys/net/ipv4/ip_forward").write_text("1")
    _enter(root)
    mount("", Path("/"), flags=REC | SHARED)


def _create_layout(root: Path) -> None:
    directories = "dev etc home mnt opt proc root run srv sys tmp usr var var/cache var/lib var/log var/tmp"
    for name in directories.split():
        (root / name).mkdir(exist_ok=True)
    (root / "var/tmp").chmod(0o1777)
    links = {"var/run": "/run", "var/lock": "/run/lock"}
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if Path("/", name).is_symlink():
            links[name] = os.readlink(f"/{name}")
        elif Path("/", name).is_dir():
            (root / name).mkdir(exist_ok=True)
            bind(Path("/", name), root / name)
    for name, target in links.items():
        if not (root / name).is_symlink():
            (root / name).symlink_to(target)


def _make_sys(root: Path) -> None:
    real, mounted = root / REAL_SYSFS.relative_to("/"), root / "sys"
    real.mkdir(parents=True)
    mount("sysfs", real, "sysfs", RDONLY | NOSUID | NODEV | NOEXEC)
    mount("tmpfs", mounted, "tmpfs", NOSUID | NODEV | NOEXEC, "mode=755")
    for name in _SYSFS_EMPTY:
        (mounted / name).mkdir(parents=True, exist_ok=True)
    for name in _SYSFS_SHOWN:
        if (real / name).is_dir():
            (mounted / name).mkdir(parents=True, exist_ok=True)
            bind(real / name, mounted / name, flags=NOSUID | NODEV | NOEXEC)
    bind(Path("/sys/fs/cgroup"), mounted / "fs/cgroup", writable=True)


def _make_dev(dev: Path) -> None:
    mount("tmpfs", dev, "tmpfs", NOSUID | NOEXEC, "mode=755")
    for name in ("pts", "shm", "mqueue", "net"):
        (dev / name).mkdir()
    for name, numbers in _DEVICES.items():
        os.mknod(dev / name, stat.S_IFCHR | 0o666, os.makedev(*numbers))
        (dev / name).chmod(0o666)
    for name, target in _DEVICE_LINKS.items():
        (dev / name).symlink_to(target)
    mount("devpts", dev / "pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("tmpfs", dev / "shm", "tmpfs", NOSUID | NODEV, "mode=1777")
    mount("mqueue", dev / "mqueue", "mqueue", NOSUID | NODEV | NOEXEC)


def _shadow_sysctls(root: Path) -> None:
    # Each boot has a new ID, by which the kubelet detects a reboot.
    for name, value in (_SYSCTLS | {"kernel/random/boot_id": str(uuid.uuid4())}).items():
        if (original := root / "proc/sys" / name).exists():
            shadow = root / "run/node/sysctl" / name
            shadow.parent.mkdir(parents=True, exist_ok=True)
            shadow.write_text(value + "\n")
            mount(shadow, original, flags=BIND)


def _enter(root: Path) -> None:
    os.chdir(root)
    (root / ".old").mkdir(exist_ok=True)
    subprocess.run(["pivot_root", ".", ".old"], check=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    os.chdir("/")
    unmount(Path("/.old"))
    Path("/.old").rmdir()


def open_up(directory: Path) -> None:
    """Replace a directory of the real sysfs by a writable one with the same entries."""
    source = REAL_SYSFS / directory.relative_to("/sys")
    if os.path.ismount(directory):
        unmount(directory)
    for entry in sorted(source.iterdir()):
        target = directory / entry.name
        if entry.is_symlink():
            target.symlink_to(os.readlink(entry))
            continue
        if entry.is_dir():
            target.mkdir()
        else:
            target.touch()
        bind(entry, target, flags=NOSUID | NODEV | NOEXEC)


def main() -> None:
    if sys.argv[1] == "open-up":
        open_up(Path(sys.argv[2]))
        return
    plan = json.loads(sys.argv[2])
    boot(Path(plan["disk"]), plan["hostname"], [Path(share) for share in plan["shares"]])
    # With SIGCHLD ignored, the kernel reaps orphans of pid 1. The setting survives the exec below.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b"ready\n")
    null_device = os.open("/dev/null", os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(null_device, descriptor)
    # Standard input is a pipe whose other end only the owner has, so cat ends with the owner in any case.
    command = ["cat"] if plan["owned"] else ["sleep", "infinity"]
    os.execvp(command[0], command)  # noqa: S606  no shell is wanted here


if __name__ == "__main__":
    main()
