"""Virtual functions (VF) of a physical one (PF): which there are, and another number of them.

Facts: Documentation/ABI/testing/sysfs-bus-pci. `virtfn<N>` links to a VF, and writing `sriov_numvfs` makes them.
"""

import errno
import re
from collections.abc import Callable, Sequence

from accelplane.devices import natural
from accelplane.host import Host, HostError, Unreadable, pci_address
from accelplane.provision.config import shown
from accelplane.provision.steps import Step

_LINK = re.compile(r"virtfn[0-9]+")


def vf_links(host: Host, pf: str) -> list[str]:
    """The names of the links in the PF's directory, by their numbers. Raises `HostError`."""
    return sorted((name for name in host.names(pf) if _LINK.fullmatch(name)), key=natural)


def vf_address(host: Host, link: str) -> str:
    """The PCI address of the VF behind the link. Raises `HostError`."""
    target = host.link(link).rstrip("/").rpartition("/")[2]
    address = pci_address(target)
    if address is None:
        raise Unreadable(link, f"leads to {shown(target)}, expected a PCI address")
    return address


def read_number(host: Host, path: str) -> int:
    """What the attribute says. Raises `HostError`."""
    text = host.text(path)
    if not (text.isascii() and text.isdecimal() and len(text) < 11):
        raise Unreadable(path, f"found {shown(text)}, expected a number")
    return int(text)


def resized(
    pf: str,
    before: int,
    after: int,
    *,
    leaves: Sequence[int] = (errno.EBUSY,),
    explain: Callable[[Host, HostError], str] | None = None,
) -> Step:
    """The write after which the PF in that directory has `after` VFs."""
    path = f"{pf}/sriov_numvfs"
    what = f"VFs {before} -> {after}"
    return Step(what=what, path=path, text=str(after), undo=(path, str(before)), leaves=leaves, explain=explain)
