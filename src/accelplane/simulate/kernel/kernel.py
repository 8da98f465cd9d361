"""The emulated kernel: created from a node's description, read and written by path.

A `Kernel` can be used from several threads; calls are serialized.
"""

import errno
import posixpath
from collections.abc import Callable
from typing import Literal

import msgspec

from accelplane.host.uevent import Uevent
from accelplane.simulate.journal import TreeError
from accelplane.simulate.kernel.hardware import Hardware
from accelplane.simulate.kernel.model import Attribute, Link, link_text, oserror
from accelplane.simulate.kernel.usermode import Usermode
from accelplane.simulate.specs import NodeSpec


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


class Kernel(Hardware):
    """The files of the devices of `spec` and their reactions to writes, without GPUs and NPUs.

    `listen` is called with every later uevent. Raises `TreeError` for an impossible description.
    """

    def __init__(
        self,
        spec: NodeSpec | None = None,
        *,
        listen: Callable[[Uevent], None] | None = None,
        usermode: Usermode | None = None,
    ) -> None:
        super().__init__(spec or NodeSpec(), usermode or Usermode())
        self._faults: list[Fault] = []  # the latest first
        self._blocked: list[str] = []
        self.core.listen = listen

    def read(self, path: str) -> str:
        """The text of the attribute. Raises `OSError`."""
        return self.read_bytes(path).decode(errors="surrogateescape")

    def read_bytes(self, path: str) -> bytes:
        """The content of the attribute. Raises `OSError`."""
        with self.lock:
            return self.read_attribute(*self.tree.resolved_attribute(path))

    def read_attribute(self, canonical: str, attribute: Attribute) -> bytes:
        """As `read_bytes`, for a resolved attribute."""
        with self.lock:
            if not attribute.mode & 0o444:
                raise oserror(errno.EACCES, canonical)
            content = self._apply_fault(canonical, "read")
            return attribute.content() if content is None else content

    def write(self, path: str, text: str) -> None:
        """Writes to the attribute. Raises `OSError`."""
        with self.lock:
            self.write_attribute(*self.tree.resolved_attribute(path), text)

    def write_attribute(self, canonical: str, attribute: Attribute, text: str) -> None:
        """As `write`, for a resolved attribute."""
        with self.lock:
            if attribute.write is None:
                raise oserror(errno.EACCES, canonical)
            self._apply_fault(canonical, "write", text)
            attribute.write(text)

    def exists(self, path: str) -> bool:
        """Whether the path exists; follows links."""
        with self.lock:
            return self.tree.has(path)

    def list(self, path: str) -> list[str]:
        """The names in the directory, sorted. Raises `OSError`."""
        with self.lock:
            return self.tree.names(path)

    def readlink(self, path: str) -> str:
        """The text of the link. Raises `OSError`."""
        with self.lock:
            entry = self.tree.entry(path)
            if not isinstance(entry, Link):
                raise oserror(errno.EINVAL, path)
            parent = self.tree.resolve(posixpath.dirname(path))
            return link_text(f"{parent}/{posixpath.basename(path)}", entry.target)

    def resolve(self, path: str) -> str:
        """The path without links. Raises `OSError`."""
        with self.lock:
            return self.tree.resolve(path)

    def fail(
        self,
        path: str,
        number: int,
        *,
        on: Literal["read", "write"] = "write",
        times: int | None = None,
        text: str | None = None,
    ) -> None:
        """Makes reads or writes of matching attributes fail with this errno, `times` times or until `clear_faults`.

        The path may contain links and wildcards. With `text`, only writes of this text fail, apart from white space.
        """
        with self.lock:
            self._faults.insert(0, Fault(path, on, errno=number, times=times, text=text))

    def set_content(self, path: str, content: bytes, *, times: int | None = None) -> None:
        """Makes reads return this content."""
        with self.lock:
            self._faults.insert(0, Fault(path, "read", content=content, times=times))

    def clear_faults(self, path: str | None = None) -> None:
        """Removes the faults with this path, or all."""
        with self.lock:
            self._faults = [fault for fault in self._faults if path not in (None, fault.path)]

    def block(self, path: str) -> None:
        """Makes reads and writes of matching attributes of a mount wait until `unblock`.

        The path may contain links and wildcards. `read` and `write` of this object do not wait.
        """
        with self.lock:
            self._blocked.append(path)

    def unblock(self, path: str | None = None) -> None:
        """Removes the blocks with this path, or all. The calls that wait continue after the next call of the mount."""
        with self.lock:
            self._blocked = [blocked for blocked in self._blocked if path not in (None, blocked)]

    def blocks(self, canonical: str) -> bool:
        """Whether reads and writes of this attribute wait."""
        return any(canonical in self.tree.glob(path) for path in self._blocked)

    def hold(self, name: str) -> None:
        """Marks as used the device, queue or VFIO group: `0000:61:00.0`, `wq0.1`, `vfio/12`, `dlb3`.

        Raises `TreeError` if there is none of that name.
        """
        with self.lock:
            if not self.has_device(name):
                raise TreeError(f"{name[:80]!a}: no device, queue or node of that name")
            self.core.users[name] += 1

    def release(self, name: str) -> None:
        """Removes a user added by `hold`."""
        with self.lock:
            self.core.users[name] = max(0, self.core.users[name] - 1)

    def pause_udev(self, *, wait: bool) -> None:
        """Delays the links in `/dev/char` until it is called with `wait=False`."""
        with self.lock:
            self.core.udev_paused = wait
            if not wait:
                self.core.create_pending_links()

    def _apply_fault(self, canonical: str, on: Literal["read", "write"], text: str = "") -> bytes | None:
        """Returns the content that replaces that of the attribute, or None. Raises the `OSError` of a fault."""
        for place, fault in enumerate(self._faults):
            if fault.on != on or fault.text not in (None, text.strip()) or canonical not in self.tree.glob(fault.path):
                continue
            if fault.times is not None:
                self._faults[place : place + 1] = (
                    [msgspec.structs.replace(fault, times=fault.times - 1)] if fault.times > 1 else []
                )
            if fault.errno:
                raise oserror(fault.errno, canonical)
            return fault.content
        return None
