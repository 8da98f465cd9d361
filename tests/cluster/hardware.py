"""Hardware as a directory tree: adds it to a node's /sys and /dev, and removes it."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path

from .machine import BOOT, Argument, Machine

# The target of a link in a class or bus directory must exist before the link.
_ORDER = ("sys/devices", "sys/bus", "sys", "dev", "")
_NULL = (1, 3)


def copy_tree(machine: Machine, tree: Path, before: frozenset[Path] = frozenset()) -> frozenset[Path]:
    """Copy the files below ``tree`` (``sys/…``, ``dev/…``) to the machine; return the copied paths.

    Paths in ``before``, the result of an earlier call, that are no longer in the tree are removed from the machine.
    Files with other content are overwritten. If the tree has files below a part that shows the host's own /sys, that
    part is replaced by the machine's own first.
    """
    now = frozenset(path.relative_to(tree) for path in tree.rglob("*"))
    for entry in sorted(before - now, key=_rank, reverse=True):
        _remove(machine, Path("/") / entry)
    put_in = {entry for entry in sorted(now, key=_rank) if _copy_in(machine, tree / entry, Path("/") / entry)}
    return frozenset(put_in | (before & now))


def _copy_in(machine: Machine, source: Path, inside: Path) -> bool:
    """False for a directory that existed before and remains after the tree is removed."""
    details = source.lstat()
    if not stat.S_ISDIR(details.st_mode):
        _copy_file(machine, source, inside, details)
        return True
    if machine.path(inside).is_dir():
        return False
    target = _writable(machine, inside)
    target.mkdir()
    target.chmod(stat.S_IMODE(details.st_mode))
    return True


def _copy_file(machine: Machine, source: Path, inside: Path, details: os.stat_result) -> None:
    target = _writable(machine, inside)
    if stat.S_ISREG(details.st_mode):
        # A write without a change would still notify watchers of the file.
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            shutil.copy(source, target)
        return
    if _same(target, source):
        return
    target.unlink(missing_ok=True)
    if stat.S_ISLNK(details.st_mode):
        target.symlink_to(os.readlink(source))
    else:
        os.mknod(target, details.st_mode, details.st_rdev)
        target.chmod(stat.S_IMODE(details.st_mode))


def _same(target: Path, source: Path) -> bool:
    try:
        existing, target_status = target.lstat(), source.lstat()
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(existing.st_mode) and stat.S_ISLNK(target_status.st_mode):
        return os.readlink(target) == os.readlink(source)
    return (existing.st_mode, existing.st_rdev) == (target_status.st_mode, target_status.st_rdev)


def _remove(machine: Machine, inside: Path) -> None:
    target = machine.path(inside)
    if not target.is_dir() or target.is_symlink():
        _writable(machine, inside).unlink(missing_ok=True)
    # From outside the machine's mount namespace, removing a mount point also removes its mount.
    elif not target.is_mount():
        # It may contain other files.
        with suppress(OSError):
            target.rmdir()


def mknod(machine: Machine, path: Argument, major: int, minor: int, *, mode: int = 0o666) -> None:
    """Make a character device node, for example with null's numbers (1, 3)."""
    target = machine.path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(target, stat.S_IFCHR, os.makedev(major, minor))
    target.chmod(mode)


def write(machine: Machine, path: Argument, text: str) -> None:
    """Set a file below /sys or /dev, for example an attribute, to this content."""
    target = _writable(machine, Path(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def remove(machine: Machine, path: Argument) -> None:
    """Remove a file, a link, or a directory with its content; a missing one is ignored."""
    target = _writable(machine, Path(path))
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def _rank(path: Path) -> tuple[int, str]:
    position = next(rank for rank, prefix in enumerate(_ORDER) if not prefix or path.is_relative_to(prefix))
    return position, str(path)


def _writable(machine: Machine, inside: Path) -> Path:
    """The path from outside, after every real sysfs directory above it has been replaced by the machine's own."""
    target = machine.path(inside)
    if not inside.is_relative_to("/sys"):
        return target
    own = machine.path("/sys").stat().st_dev
    for parent in reversed(inside.parents):
        if not parent.is_relative_to("/sys") or parent.is_relative_to("/sys/fs/cgroup"):
            continue
        path = machine.path(parent)
        if path.is_dir() and path.stat().st_dev != own:
            machine.run(sys.executable, "-IS", BOOT, "open-up", parent)
    if target.is_mount():
        machine.run("umount", inside)
    return target


def sample_gpu(tree: Path, *, first: int = 0, cards: int = 1) -> Path:
    """A small tree of i915 cards with the files that a GPU plugin reads, without other code."""
    pci = tree / "sys/bus/pci"
    for card in range(first, first + cards):
        address = f"0000:00:{2 + card:02x}.0"
        device = tree / f"sys/devices/pci0000:00/{address}"
        driver = pci / "drivers/i915"
        driver.mkdir(parents=True, exist_ok=True)
        for name in (f"card{card}", f"renderD{128 + card}"):
            (device / "drm" / name).mkdir(parents=True)
            _link(tree / "sys/class/drm" / name, device / "drm" / name)
            _link(device / "drm" / name / "device", device)
        attributes = {"vendor": "0x8086", "device": "0x56c0", "class": "0x038000", "numa_node": "0",
                      "local_cpulist": f"0-{(os.cpu_count() or 1) - 1}"}  # fmt: skip
        for name, value in attributes.items():
            (device / name).write_text(value + "\n")
        _link(pci / "devices" / address, device)
        _link(driver / address, device)
        _link(device / "driver", driver)
        by_path = tree / "dev/dri/by-path"
        by_path.mkdir(parents=True, exist_ok=True)
        (by_path / f"pci-{address}-card").symlink_to(f"../card{card}")
        (by_path / f"pci-{address}-render").symlink_to(f"../renderD{128 + card}")
    return tree


def plug_sample_gpu(machine: Machine, tree: Path, *, cards: int = 1) -> None:
    """Add the sample cards to the machine, with device nodes that can be opened."""
    copy_tree(machine, sample_gpu(tree, cards=cards))
    for card in range(cards):
        for name in (f"card{card}", f"renderD{128 + card}"):
            mknod(machine, f"/dev/dri/{name}", *_NULL)


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
