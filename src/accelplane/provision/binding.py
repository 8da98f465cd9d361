"""The steps that bind a PCI function to another driver, and that change the number of its virtual functions (VF).

Facts: Documentation/ABI/testing/sysfs-bus-pci. Only the driver that a function's `driver_override` names may bind to
it, also while udev still loads the module of another one: for a function without a driver this is written first, and
the function is bound once that write is settled.
"""

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from accelplane.host import Host, HostError, Unreadable
from accelplane.host.drivers import DRIVERS, driver_of, driver_override, likely_causes
from accelplane.host.pci import DEVICES
from accelplane.provision.config import quote
from accelplane.provision.steps import Step


def bind_steps(host: Host, address: str, driver: str, what: str, *, part: str = "") -> Iterator[Step]:
    """The next writes that bind the function to `driver`; none if it is bound."""
    before = driver_of(host, address)
    if before == driver:
        return
    path = f"{DEVICES}/{address}/driver_override"
    override = driver_override(host, address)
    step = partial(Step, what=what, part=part)
    if before:
        driver_path = f"{DRIVERS}/{before}"
        yield step(path=f"{driver_path}/unbind", text=address, undo=(f"{driver_path}/bind", address))
    if override != driver:
        yield step(path=path, text=driver, undo=(path, override or "\n"))
    if before or override == driver:
        yield step(
            path=f"{DRIVERS}/{driver}/bind",
            text=address,
            undo=(f"{DRIVERS}/{driver}/unbind", address),
            explain=lambda host, _error: "; ".join(likely_causes(host, address, driver)),
        )


def vf_count_step(
    pf: str,
    before: int,
    after: int,
    *,
    skip_on: Sequence[int] = (errno.EBUSY,),
    explain: Callable[[Host, HostError], str] | None = None,
) -> Step:
    """The write that gives the physical function in the directory `pf` `after` VFs."""
    path = f"{pf}/sriov_numvfs"
    what = f"VFs {before} -> {after}"
    return Step(what=what, path=path, text=str(after), undo=(path, str(before)), skip_on=skip_on, explain=explain)


def missing_vfs(count: int, found: int) -> str:
    """The problem of a physical function whose virtual ones are not all in sysfs."""
    return f"sriov_numvfs is {count}, but sysfs shows {found} virtual functions"


def vf_drivers(drivers: Iterable[str]) -> str:
    """How many VFs each driver has, to show them."""
    counts = Counter(driver or "no driver" for driver in drivers)
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def read_number(host: Host, path: str) -> int:
    """The attribute's number. Raises `HostError`."""
    text = host.text(path)
    if not (text.isascii() and text.isdecimal() and len(text) < 11):
        raise Unreadable(path, f"found {quote(text)}, expected a number")
    return int(text)
