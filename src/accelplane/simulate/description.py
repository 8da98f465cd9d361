"""The JSON descriptions of simulated GPU nodes, as `intel_gpu_fakedev` has always read them, and what is new in them.

Keys are matched without case and unknown ones ignored, as the Go program does. The keys after `Capabilities` are
optional additions; a description without them means exactly what it meant before.
"""

import os
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

MAX_SIZE = 1024 * 1024
MAX_CARDS = 128
MAX_TILES = 64
MAX_LINK_ENDS = 512
MIB = 1024 * 1024

_PCI_ID = re.compile(r"0x[0-9a-f]{4}")


class DescriptionError(ValueError):
    """A description of simulated hardware that cannot be used; the message names the file and the key."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """One description; the names of the keys are the Go program's, in lower case.

    `driver`, `device_id`, `by_path`, `mei`, `npus`: what the plain layout lacks. `pci_links` asks for the tree as the
    kernel lays it out, which the last three need. `unprivileged` makes plain files in place of device nodes. `seed`
    shuffles what has no order: the capabilities, and which PCI address a card gets.
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
        """Whether the tree is to be laid out as the kernel does, PCI functions and links and all."""
        return self.pci_links or self.by_path or self.mei or self.npus > 0


def read_description(path: str | os.PathLike[str]) -> Description:
    """The description in a file. Raises `DescriptionError`."""
    try:
        raw = msgspec.json.decode(read_limited(path), type=dict[str, object])
        # A null leaves the key at its default, as in Go; of keys that differ only in case the last one counts.
        given = {key.lower(): value for key, value in raw.items() if value is not None}
        return msgspec.convert(given, Description)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DescriptionError(f"{os.fspath(path)}: {error}") from None


def read_limited(path: str | os.PathLike[str]) -> bytes:
    """The content of a description. Raises `DescriptionError` when it cannot be read or is larger than any can be."""
    try:
        # O_NONBLOCK: a FIFO without a writer must not hold the program.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            data = file.read(MAX_SIZE + 1) or b""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DescriptionError(f"{os.fspath(path)!a}: cannot be read: {reason}") from None
    if len(data) > MAX_SIZE:
        raise DescriptionError(f"{os.fspath(path)}: larger than {MAX_SIZE} bytes, which no description needs")
    return data


def _problem(made: Description) -> str:
    for key, value, least, most in (
        ("DevCount", made.devcount, 1, MAX_CARDS),
        ("TilesPerDev", made.tilesperdev, 0, MAX_TILES),
        ("DevMemSize", made.devmemsize, 0, 2**63 - 1),
        ("DevsPerNode", made.devspernode, 0, made.devcount),
        ("VfsPerPf", made.vfsperpf, 0, made.devcount - 1),
        ("Npus", made.npus, 0, MAX_CARDS),
    ):
        if not least <= value <= most:
            return f"{key} is {value}, expected {least} to {most}"
    if made.device_id and not _PCI_ID.fullmatch(made.device_id):
        return f"DeviceId is {made.device_id[:80]!a}, expected the form 0x56c0"
    ends = made.devcount * made.tilesperdev
    if made.capabilities.get("connection-topology") == "FULL" and ends > MAX_LINK_ENDS:
        return f"connection-topology is FULL with {ends} tiles, expected at most {MAX_LINK_ENDS}"
    if made.devmemsize % MIB:
        return f"DevMemSize is {made.devmemsize}, expected a multiple of 1 MiB ({MIB})"
    if made.vfsperpf:
        if made.tilesperdev or made.devspernode:
            return "VfsPerPf cannot go with TilesPerDev or DevsPerNode"
        if made.devcount % (made.vfsperpf + 1):
            return f"DevCount is {made.devcount}, expected a multiple of VfsPerPf + 1 ({made.vfsperpf + 1})"
    return ""
