"""The control file, for tests in another process: one JSON object per write, such as

    {"do": "fail", "path": "/sys/bus/pci/devices/0000:61:00.0/qat/state", "errno": "EIO", "times": 1}
    {"do": "hold", "name": "wq0.0"}
    {"do": "plug", "family": "dsa", "spec": {"queues": [{}]}}

Reading it returns the result of the last command. Only root can write it.
"""

import errno
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from accelplane.simulate.journal import TreeError
from accelplane.simulate.kernel.fpga import Outcome
from accelplane.simulate.kernel.hardware import SPECS, Loadable
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.model import Attribute, oserror
from accelplane.simulate.offload import Family

CONTROL = "/control"


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=str.lower, forbid_unknown_fields=True):
    def execute(self, kernel: Kernel) -> str | None:
        """Executes the command; returns its result, if it has one. Raises `TreeError` or `OSError`."""
        raise NotImplementedError


class Fail(_Command, frozen=True, kw_only=True):
    """See `Kernel.fail`; `errno` is a name such as EIO."""

    path: str
    errno: str
    on: Literal["read", "write"] = "write"
    times: int | None = None
    text: str | None = None

    def execute(self, kernel: Kernel) -> None:
        kernel.fail(self.path, _number(self.errno), on=self.on, times=self.times, text=self.text)


class SetContent(_Command, frozen=True, kw_only=True, tag="set_content"):
    """See `Kernel.set_content`; `content` is in base64."""

    path: str
    content: bytes
    times: int | None = None

    def execute(self, kernel: Kernel) -> None:
        kernel.set_content(self.path, self.content, times=self.times)


class ClearFaults(_Command, frozen=True, kw_only=True, tag="clear_faults"):
    path: str | None = None

    def execute(self, kernel: Kernel) -> None:
        kernel.clear_faults(self.path)


class Hold(_Command, frozen=True, kw_only=True):
    name: str

    def execute(self, kernel: Kernel) -> None:
        kernel.hold(self.name)


class Release(_Command, frozen=True, kw_only=True):
    name: str

    def execute(self, kernel: Kernel) -> None:
        kernel.release(self.name)


class Udev(_Command, frozen=True, kw_only=True):
    wait: bool

    def execute(self, kernel: Kernel) -> None:
        kernel.pause_udev(wait=self.wait)


class Qat(_Command, frozen=True, kw_only=True):
    """The state of a QAT device: its heartbeat, and whether it starts."""

    bdf: str
    healthy: bool | None = None
    starts: bool | None = None

    def execute(self, kernel: Kernel) -> None:
        device = kernel.qat(self.bdf)
        device.healthy = device.healthy if self.healthy is None else self.healthy
        device.refuses_to_start = device.refuses_to_start if self.starts is None else not self.starts


class Fpga(_Command, frozen=True, kw_only=True):
    """The results of the next programming operations; `resume` ends those that hang, `crash` crashes the firmware."""

    bdf: str
    outcomes: Sequence[Outcome] = ()
    resume: bool = False
    crash: bool = False

    def execute(self, kernel: Kernel) -> None:
        card = kernel.fpga(self.bdf)
        card.outcomes.extend(self.outcomes)
        if self.resume:
            card.resume.set()
        if self.crash:
            card.crash()


class Plug(_Command, frozen=True, kw_only=True):
    """See `Kernel.plug`; the result is the address."""

    family: Family
    spec: msgspec.Raw = msgspec.Raw(b"{}")

    def execute(self, kernel: Kernel) -> str:
        return kernel.plug(msgspec.json.decode(self.spec, type=SPECS[self.family]))


class Unplug(_Command, frozen=True, kw_only=True):
    bdf: str

    def execute(self, kernel: Kernel) -> None:
        kernel.unplug(self.bdf)


class Load(_Command, frozen=True, kw_only=True):
    """See `Kernel.load`. With `errno`, the next `times` attempts fail instead."""

    module: Loadable
    first_time: bool = False
    errno: str = ""
    times: int = 1

    def execute(self, kernel: Kernel) -> None:
        if self.errno:
            kernel.fail_load(self.module, _number(self.errno), times=self.times)
        else:
            kernel.load(self.module, first_time=self.first_time)


class Unload(_Command, frozen=True, kw_only=True):
    module: Loadable

    def execute(self, kernel: Kernel) -> None:
        kernel.unload(self.module)


class Stack(_Command, frozen=True, kw_only=True):
    network_namespace: str = ""

    def execute(self, kernel: Kernel) -> None:
        kernel.create_stack(self.network_namespace)


class Calls(_Command, frozen=True, kw_only=True):
    """See `Kernel.usermode_calls`; the result is a JSON list."""

    def execute(self, kernel: Kernel) -> str:
        return msgspec.json.encode(kernel.usermode_calls()).decode()


Command = (
    Fail | SetContent | ClearFaults | Hold | Release | Udev | Qat | Fpga | Plug | Unplug | Load | Unload | Stack | Calls
)
_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


class Control:
    """The control file `/control` of the kernel's tree. `on_command` is called after each successful command."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.result = ""
        self.on_command: list[Callable[[], None]] = []
        kernel.tree.put(CONTROL, Attribute(read=lambda: self.result, write=self._write, mode=0o600))

    def _write(self, text: str) -> None:
        try:
            self.result = execute(self._kernel, text)
        except (msgspec.DecodeError, TreeError) as error:
            self.result = str(error)
            raise oserror(errno.EINVAL) from None
        except OSError as error:
            self.result = str(error)
            raise
        for call in self.on_command:
            call()


def execute(kernel: Kernel, text: str) -> str:
    """Executes a command; returns its result. Raises `msgspec.DecodeError`, `TreeError` or `OSError`."""
    return _decoder.decode(text).execute(kernel) or "done"


def _number(name: str) -> int:
    numbers = {spelled: number for number, spelled in errno.errorcode.items()}
    if name not in numbers:
        raise TreeError(f"{name[:40]!a}: unknown errno name")
    return numbers[name]
