"""The tree of `intel_gpu_fakedev`: class directories without links, the minimum for plugin and labeler.

Additions of `description` that need PCI functions select the layout of the kernel. Both layouts have the files of the
original: capabilities, memory and Xe-Link labels.
"""

import os
import random
import re
import shutil
import stat
from collections.abc import Callable, Iterator

from accelplane.simulate.description import Description
from accelplane.simulate.journal import TreeError
from accelplane.simulate.specs import NodeSpec
from accelplane.simulate.tree import SimulatedNode

LABEL_FILE = "xpum-sidecar-labels.txt"
LABEL = "xpumanager.intel.com/xe-links"
_LABEL_LENGTH = 63
_MARK = "Z"
_NULL = (1, 3)  # the device numbers of /dev/null, so that the node can be opened
_DEVICE_ID = "0x4905"
_OWN_DEV = re.compile(r"dri|accel|mei[0-9]+")
_OWN_SYS = frozenset(("bus", "class", "dev", "devices", "kernel"))


class FakedevError(Exception):
    """The tree cannot be created. The message names the file and a solution."""


def generate(description: Description, directory: str, report: Callable[[str], None] | None = None) -> list[str]:
    """Creates `sys`, `dev` and the label file in `directory`. Replaces the result of an earlier call.

    Calls `report` with progress messages. Returns the lines of the label file. Raises `FakedevError`.
    """
    report = report or (lambda _text: None)
    try:
        # Both are checked before one is removed.
        old = [path for path in (f"{directory}/dev", f"{directory}/sys") if _is_ours(path)]
        for path in old:
            report(f"removing old {path}")
            shutil.rmtree(path)
        if description.kernel_layout:
            kind = "files" if description.unprivileged else "char"
            SimulatedNode(directory, device_nodes=kind, numbers=_NULL).build(NodeSpec.of(description))
            report("created PCI functions below sys/devices")
        for index in range(description.devcount):
            if not description.kernel_layout:
                _class_layout(description, directory, index)
            _capabilities(description, directory, index)
            report(f"created card{index}")
        lines = label_lines(links(description))
        _write(f"{directory}/{LABEL_FILE}", "".join(f"{line}\n" for line in lines))
    except PermissionError as error:
        hint = "; device nodes need CAP_MKNOD, or use -unprivileged" if not description.unprivileged else ""
        raise FakedevError(f"{error.filename or directory}: {error.strerror}{hint}") from None
    except OSError as error:
        raise FakedevError(f"{error.filename or directory}: {error.strerror}") from None
    except TreeError as error:
        raise FakedevError(str(error)) from None
    return lines


def links(description: Description) -> str:
    """Returns the Xe-Links in the format of the label, each as `GPU.tile-GPU.tile`."""
    if description.capabilities.get("connection-topology") != "FULL":
        return description.capabilities.get("connections", "")
    ends = [f"{gpu}.{tile}" for gpu in range(description.devcount) for tile in range(description.tilesperdev)]
    return "_".join(f"{late}-{early}" for place, early in enumerate(ends) for late in ends[place + 1 :])


def label_lines(text: str) -> list[str]:
    """Returns the label for `text`, split into numbered labels of limited length."""
    lines = [f"{LABEL}={text[:_LABEL_LENGTH]}"]
    step = _LABEL_LENGTH - len(_MARK)
    for number, start in enumerate(range(_LABEL_LENGTH, len(text), step), 2):
        lines.append(f"{LABEL}{number}={_MARK}{text[start : start + step]}")
    return lines


def _is_ours(path: str) -> bool:
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(kind):
        raise FakedevError(f"{path}: not a directory; remove it first")
    names = sorted(os.listdir(path))
    if path.endswith("/dev"):
        is_own = bool(names) and all(_OWN_DEV.fullmatch(name) for name in names)
    else:
        is_own = len(names) <= 3 or _OWN_SYS.issuperset(names)
    if not is_own:
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        raise FakedevError(
            f"{path}: found {shown or 'nothing'}, expected a tree of an earlier call; run in another directory"
        )
    return True


def _class_layout(description: Description, directory: str, index: int) -> None:
    driver = description.driver or "i915"
    card = f"{directory}/sys/class/drm/card{index}"
    names = (f"card{index}", f"renderD{128 + index}")
    _write(f"{card}/lmem_total_bytes", str(description.devmemsize))
    for name in names:
        _make_directory(f"{card}/device/drm/{name}")
    for path, text in _device_files(description, index):
        _write(f"{card}/device/{path}", text)
    for tile in range(description.tilesperdev):
        _make_directory(f"{card}/gt/gt{tile}")
    if description.driver:
        os.symlink(f"../../../../bus/pci/drivers/{driver}", f"{card}/device/driver")
    function = f"{directory}/sys/bus/pci/drivers/{driver}/0000:00:0{index}.0"
    _write(f"{function}/device", description.device_id or _DEVICE_ID)
    for name in names:
        _node(f"{directory}/dev/dri/{name}", description)
        _node(f"{function}/drm/{name}", description)


def _device_files(description: Description, index: int) -> Iterator[tuple[str, str]]:
    yield "vendor", "0x8086"
    yield "numa_node", str(index // description.devspernode if description.devspernode else 0)
    if description.vfsperpf and index % (description.vfsperpf + 1) == 0:
        yield "sriov_numvfs", str(description.vfsperpf)
    if description.device_id:
        yield "device", description.device_id


def _capabilities(description: Description, directory: str, index: int) -> None:
    lines = [f"{key}: {value}\n" for key, value in description.capabilities.items()]
    if description.seed is not None:
        random.Random(description.seed + index).shuffle(lines)  # noqa: S311 - a reproducible order, no secret
    _write(f"{directory}/sys/kernel/debug/dri/{index}/i915_capabilities", "".join(lines), mode="x")


def _make_directory(directory: str) -> None:
    os.makedirs(directory, mode=0o775, exist_ok=True)


def _write(path: str, text: str, mode: str = "w") -> None:
    _make_directory(os.path.dirname(path))
    with open(path, mode, encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o644)) as file:
        file.write(text)


def _node(path: str, description: Description) -> None:
    if description.unprivileged:
        _write(path, "", mode="x")
        return
    _make_directory(os.path.dirname(path))
    try:
        os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(*_NULL))
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from None
