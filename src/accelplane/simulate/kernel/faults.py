"""Injected faults: attributes that fail or have invalid content."""

from typing import Literal

import msgspec

from accelplane.simulate.kernel.model import Tree, oserror


class Fault(msgspec.Struct, frozen=True):
    """A fault of reads or writes of the attributes that `path` matches; `times` None is always.

    `path` may contain links and wildcards. A read fails with `errno`, or returns `content` if it is set. With `text`,
    only writes of this text fail.
    """

    path: str
    on: Literal["read", "write"]
    errno: int = 0
    content: bytes | None = None
    times: int | None = None
    text: str | None = None


class Faults:
    """The active faults, the latest first."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        self._faults.insert(0, fault)

    def clear(self, path: str | None = None) -> None:
        """Removes the faults with this `path`, or all."""
        self._faults = [fault for fault in self._faults if path not in (None, fault.path)]

    def apply(self, canonical: str, on: Literal["read", "write"], text: str = "") -> bytes | None:
        """Returns the content that replaces that of the attribute, or None. Raises the `OSError` of a fault."""
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
