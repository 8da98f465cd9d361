"""The emulated kernel: created from a node's description, read and written by path.

A `Kernel` can be used from several threads; calls are serialized.
"""

import errno
import posixpath
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from accelplane.simulate.journal import TreeError
from accelplane.simulate.kernel.core import Core, Uevent
from accelplane.simulate.kernel.faults import Fault, Faults
from accelplane.simulate.kernel.fpga import Card, FpgaDriver, Memory
from accelplane.simulate.kernel.hardware import Hardware, Loadable, Spec
from accelplane.simulate.kernel.model import Attribute, Link, Tree, link_text, oserror
from accelplane.simulate.kernel.qat import QatDevice, QatDriver
from accelplane.simulate.kernel.usermode import Call, Usermode
from accelplane.simulate.specs import NodeSpec


class Kernel:
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
        spec = spec or NodeSpec()
        self.lock = threading.RLock()
        self._core = Core()
        self._faults = Faults(self.tree)
        self._hardware = Hardware(self._core, spec, usermode or Usermode())
        # Directories with changing entries, which cannot be mounted separately.
        self.mounted_directories: Sequence[str] = ("/sys/module",) if spec.onload else ()
        if listen:
            self._core.listeners.append(listen)

    @property
    def tree(self) -> Tree:
        return self._core.tree

    # Files

    def read(self, path: str) -> str:
        """The text of the attribute. Raises `OSError`."""
        return self.read_bytes(path).decode(errors="surrogateescape")

    def read_bytes(self, path: str) -> bytes:
        """The content of the attribute. Raises `OSError`."""
        with self.lock:
            canonical = self.tree.resolve(path)
            attribute = self.tree.attribute(canonical)
            return self.read_attribute(canonical, attribute)

    def read_attribute(self, canonical: str, attribute: Attribute) -> bytes:
        """As `read_bytes`, for a resolved attribute."""
        with self.lock:
            if not attribute.mode & 0o444:
                raise oserror(errno.EACCES, canonical)
            content = self._faults.apply(canonical, "read")
            return attribute.content() if content is None else content

    def write(self, path: str, text: str) -> None:
        """Writes to the attribute. Raises `OSError`."""
        with self.lock:
            canonical = self.tree.resolve(path)
            self.write_attribute(canonical, self.tree.attribute(canonical), text)

    def write_attribute(self, canonical: str, attribute: Attribute, text: str) -> None:
        """As `write`, for a resolved attribute."""
        with self.lock:
            if attribute.write is None:
                raise oserror(errno.EACCES, canonical)
            self._faults.apply(canonical, "write", text)
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

    # Fault injection, users of devices, and hot-plug

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
            self._faults.add(Fault(path, on, errno=number, times=times, text=text))

    def set_content(self, path: str, content: bytes, *, times: int | None = None) -> None:
        """Makes reads return this content."""
        with self.lock:
            self._faults.add(Fault(path, "read", content=content, times=times))

    def clear_faults(self, path: str | None = None) -> None:
        """Removes the faults with this path, or all."""
        with self.lock:
            self._faults.clear(path)

    def hold(self, name: str) -> None:
        """Marks as used the device, queue or VFIO group: `0000:61:00.0`, `wq0.1`, `vfio/12`, `dlb3`.

        Raises `TreeError` if there is none of that name.
        """
        with self.lock:
            if not self._hardware.exists(name):
                raise TreeError(f"{name[:80]!a}: no device, queue or node of that name")
            self._core.holds.hold(name)

    def release(self, name: str) -> None:
        """Removes a user added by `hold`."""
        with self.lock:
            self._core.holds.release(name)

    def pause_udev(self, *, wait: bool) -> None:
        """Delays the links in `/dev/char` until it is called with `wait=False`."""
        with self.lock:
            self._core.udev_paused = wait
            if not wait:
                self._core.create_pending_links()

    def qat(self, bdf: str) -> QatDevice:
        """The QAT device, whose `healthy` and `refuses_to_start` may be set. Raises `TreeError`."""
        for driver in self._hardware.pci.drivers.values():
            if isinstance(driver, QatDriver) and bdf in driver.devices:
                return driver.devices[bdf]
        raise TreeError(f"{bdf[:80]!a}: not a QAT function bound to its driver")

    def fpga(self, bdf: str) -> Card:
        """The FPGA card, whose result of programming can be set. Raises `TreeError`."""
        for driver in self._fpga_drivers():
            if bdf in driver.cards:
                return driver.cards[bdf]
        raise TreeError(f"{bdf[:80]!a}: not an FPGA card bound to its driver")

    def fpgas(self) -> Sequence[Card]:
        return [card for driver in self._fpga_drivers() for card in driver.cards.values()]

    def has_node(self, node: str) -> bool:
        """Whether a node below `/dev` has this name and supports ioctls."""
        with self.lock:
            return any(driver.has(node) for driver in self._fpga_drivers())

    def ioctl(self, node: str, request: int, argument: int, memory: Memory) -> int:
        """An ioctl on the node below `/dev` of that name; `argument` is a number, or an address in `memory`.

        Other calls continue meanwhile. Raises `OSError`.
        """
        with self.lock:
            driver = next((driver for driver in self._fpga_drivers() if driver.has(node)), None)
            if driver is None:
                raise oserror(errno.ENOTTY, node)
            answer = driver.ioctl(node, request, argument, memory)
        if isinstance(answer, int):
            return answer
        answer.wait()
        with self.lock:
            return answer.finish()

    def _fpga_drivers(self) -> Sequence[FpgaDriver]:
        return tuple(self._hardware.fpga.values())

    def plug(self, spec: Spec) -> str:
        """Adds a device at its address, by default the first free one; returns the address. Raises `TreeError`."""
        with self.lock:
            return self._hardware.plug(spec)

    def unplug(self, bdf: str) -> None:
        """Removes a function, also one in use. Raises `TreeError` if there is none."""
        with self.lock:
            self._hardware.unplug(bdf)

    def load(self, module: Loadable, *, first_time: bool = False) -> None:
        """Loads a module. A loaded module is an error only with `first_time`, as in modprobe(8).

        Raises `OSError`, EEXIST for a loaded module.
        """
        with self.lock:
            self._hardware.load(module, first_time=first_time)

    def fail_load(self, module: Loadable, number: int, *, times: int = 1) -> None:
        """Makes the next `times` attempts to load the module fail with this errno."""
        with self.lock:
            self._hardware.load_faults[module] = [number] * times

    def create_stack(self, network_namespace: str = "") -> None:
        """Creates a stack of an application. `network_namespace` is the file, empty for the host's namespace.

        Raises `OSError` ENODEV if the module is not loaded.
        """
        with self.lock:
            self._hardware.onload.create_stack(network_namespace)

    def usermode_calls(self) -> Sequence[Call]:
        """The programs that the kernel has started."""
        with self.lock:
            return self._hardware.onload.usermode.calls()

    def unload(self, module: Loadable) -> None:
        """Unloads a module. Raises `OSError` EBUSY if one of its devices is in use."""
        with self.lock:
            self._hardware.unload(module)
