"""Injected faults: attributes that fail or have invalid content, and devices in use.

faults.fail("/sys/bus/pci/devices/0000:61:00.0/qat/state", errno.EIO, on="write", times=1)
holds.hold("wq0.0")                      # its `clients` counts one more
"""

from typing import Literal

import msgspec

from accelplane.simulate.kernel.model import Tree, oserror


class Fault(msgspec.Struct, frozen=True):
    """What happens to those who read or write the attributes that `path` means; `times` None is always.

    `path` may lead through links and have wildcards. A read fails with `errno`, or gives `content` when there is some.
    With `text` only those fail who write that.
    """

    path: str
    on: Literal["read", "write"]
    errno: int = 0
    content: bytes | None = None
    times: int | None = None
    text: str | None = None


class Faults:
    """The faults in force, the latest first."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Puts a fault in force."""
        self._faults.insert(0, fault)

    def clear(self, path: str | None = None) -> None:
        """Ends those of that path as it was given, or all."""
        self._faults = [fault for fault in self._faults if path not in (None, fault.path)]

    def meet(self, canonical: str, on: Literal["read", "write"], text: str = "") -> bytes | None:
        """What to give in place of the attribute's own content, if anything. Raises `OSError` when it shall fail."""
        for place, fault in enumerate(self._faults):
            if fault.on != on or fault.text not in (None, text.strip()) or canonical not in self._tree.glob(fault.path):
                continue
            if fault.times is not None:
                self._faults[place : place + 1] = (
                    [msgspec.structs.replace(fault, times=fault.times - 1)] if fault.times > 1 else []
                )
            if fault.errno:
                raise oserror(fault.errno, canonical)
            return fault.content
        return None


class Holds:
    """How many users each device, queue or VFIO group has, by its name: `0000:61:00.1`, `wq0.0`, `vfio/12`."""

    def __init__(self) -> None:
        self._users: dict[str, int] = {}

    def hold(self, name: str) -> None:
        """One more user."""
        self._users[name] = self._users.get(name, 0) + 1

    def release(self, name: str) -> None:
        """One user fewer; that there is none is fine."""
        left = self._users.get(name, 0) - 1
        if left > 0:
            self._users[name] = left
        else:
            self._users.pop(name, None)

    def drop(self, name: str) -> None:
        """All users are gone."""
        self._users.pop(name, None)

    def users(self, name: str) -> int:
        """How many there are."""
        return self._users.get(name, 0)
