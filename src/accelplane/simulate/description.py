"""The JSON descriptions of simulated GPU nodes, in the format of `intel_gpu_fakedev` with optional additions.

Keys are case-insensitive and unknown keys are ignored, as in the Go program. The keys after `Capabilities` are
additions; a description without them has the same meaning as in the Go program.
"""

import os
from collections.abc import Mapping
from typing import Literal

import msgspec

from accelplane import descriptors
from accelplane.simulate.checks import PCI_ID, Form, Range

MAX_SIZE = 1024 * 1024
MAX_CARDS = 128
MAX_TILES = 64
MAX_LINK_ENDS = 512
MIB = 1024 * 1024


class DescriptionError(ValueError):
    """A description of simulated hardware is invalid. The message names the file and the key."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """One description. The keys are those of the Go program in lower case.

    `driver`, `device_id`, `by_path`, `mei` and `npus` are additions. `pci_links` selects the layout of the kernel; the
    last three imply it. `unprivileged` creates plain files instead of device nodes. `seed` shuffles the capabilities
    and the PCI addresses of the cards.
    """

    info: str = ""
    devcount: int = 0
    tilesperdev: int = 0
    devmemsize: int = 0
    devspernode: int = 0
    vfsperpf: int = 0
    capabilities: Mapping[str, str] = {}
    driver: Literal["i915", "xe", ""] = ""
    device_id: str = msgspec.field(default="", name="deviceid")
    pci_links: bool = msgspec.field(default=False, name="pcilinks")
    by_path: bool = msgspec.field(default=False, name="bypath")
    mei: bool = False
    npus: int = 0
    unprivileged: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ValueError(problem)

    @property
    def kernel_layout(self) -> bool:
        """Whether the tree has the layout of the kernel, with PCI functions and links."""
        return self.pci_links or self.by_path or self.mei or self.npus > 0


def read_description(path: str | os.PathLike[str]) -> Description:
    """Reads a description from a file. Raises `DescriptionError`."""
    try:
        raw = msgspec.json.decode(read_limited(path), type=dict[str, object])
        # As in Go, null means the default, and the last of several keys that differ only in case counts.
        given = {key.lower(): value for key, value in raw.items() if value is not None}
        return msgspec.convert(given, Description)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DescriptionError(f"{os.fspath(path)}: {error}") from None


def read_limited(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a file. Raises `DescriptionError` if it is unreadable or larger than `MAX_SIZE`."""
    try:
        return descriptors.read_limited(path, MAX_SIZE, regular=False)
    except OSError as error:
        raise DescriptionError(f"{os.fspath(path)!a}: cannot be read: {error.strerror}") from None


def _problem(description: Description) -> str:
    for key, value, least, most in (
        ("DevCount", description.devcount, 1, MAX_CARDS),
        ("TilesPerDev", description.tilesperdev, 0, MAX_TILES),
        ("DevMemSize", description.devmemsize, 0, 2**63 - 1),
        ("DevsPerNode", description.devspernode, 0, description.devcount),
        ("VfsPerPf", description.vfsperpf, 0, description.devcount - 1),
        ("Npus", description.npus, 0, MAX_CARDS),
    ):
        if problem := Range(least, most).problem(key, value):
            return problem
    if problem := Form(PCI_ID, "0x56c0").problem("DeviceId", description.device_id or None):
        return problem
    ends = description.devcount * description.tilesperdev
    if description.capabilities.get("connection-topology") == "FULL" and ends > MAX_LINK_ENDS:
        return f"connection-topology is FULL with {ends} tiles, expected at most {MAX_LINK_ENDS}"
    if description.devmemsize % MIB:
        return f"DevMemSize is {description.devmemsize}, expected a multiple of 1 MiB ({MIB})"
    if description.vfsperpf:
        if description.tilesperdev or description.devspernode:
            return "VfsPerPf cannot be combined with TilesPerDev or DevsPerNode"
        if description.devcount % (description.vfsperpf + 1):
            return (
                f"DevCount is {description.devcount}, expected a multiple of VfsPerPf + 1 ({description.vfsperpf + 1})"
            )
    return ""
