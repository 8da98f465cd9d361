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
_NOTHING = msgspec.Raw(b"{}")


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=str.lower, forbid_unknown_fields=True):
    pass


class Fail(_Command, frozen=True, kw_only=True):
    """See `Kernel.fail`; `errno` is a name such as EIO."""

    path: str
    errno: str
    on: Literal["read", "write"] = "write"
    times: int | None = None
    text: str | None = None


class SetContent(_Command, frozen=True, kw_only=True, tag="set_content"):
    """See `Kernel.set_content`; `content` is in base64."""

    path: str
    content: bytes
    times: int | None = None


class ClearFaults(_Command, frozen=True, kw_only=True, tag="clear_faults"):
    """See `Kernel.clear_faults`."""

    path: str | None = None


class Hold(_Command, frozen=True, kw_only=True):
    """See `Kernel.hold`."""

    name: str


class Release(_Command, frozen=True, kw_only=True):
    """See `Kernel.release`."""

    name: str


class Udev(_Command, frozen=True, kw_only=True):
    """See `Kernel.pause_udev`."""

    wait: bool


class Qat(_Command, frozen=True, kw_only=True):
    """The state of a QAT device: its heartbeat, and whether it starts."""

    bdf: str
    healthy: bool | None = None
    starts: bool | None = None


class Fpga(_Command, frozen=True, kw_only=True):
    """The results of the next programming operations; `resume` ends those that hang, `crash` crashes the firmware."""

    bdf: str
    outcomes: Sequence[Outcome] = ()
    resume: bool = False
    crash: bool = False


class Plug(_Command, frozen=True, kw_only=True):
    """See `Kernel.plug`; the result is the address."""

    family: Family
    spec: msgspec.Raw = _NOTHING


class Unplug(_Command, frozen=True, kw_only=True):
    """See `Kernel.unplug`."""

    bdf: str


class Load(_Command, frozen=True, kw_only=True):
    """See `Kernel.load`. With `errno`, the next `times` attempts fail instead."""

    module: Loadable
    first_time: bool = False
    errno: str = ""
    times: int = 1


class Unload(_Command, frozen=True, kw_only=True):
    """See `Kernel.unload`."""

    module: Loadable


class Stack(_Command, frozen=True, kw_only=True):
    """See `Kernel.create_stack`."""

    network_namespace: str = ""


class Calls(_Command, frozen=True, kw_only=True):
    """See `Kernel.usermode_calls`; the result is a JSON list."""


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
    match _decoder.decode(text):
        case Fail(path=path, errno=name, on=on, times=times, text=only):
            kernel.fail(path, _number(name), on=on, times=times, text=only)
        case SetContent(path=path, content=content, times=times):
            kernel.set_content(path, content, times=times)
        case ClearFaults(path=path):
            kernel.clear_faults(path)
        case Hold(name=name):
            kernel.hold(name)
        case Release(name=name):
            kernel.release(name)
        case Udev(wait=wait):
            kernel.pause_udev(wait=wait)
        case Qat() | Fpga() as command:
            _configure_device(kernel, command)
        case Plug(family=family, spec=spec):
            return kernel.plug(msgspec.json.decode(spec, type=SPECS[family]))
        case Unplug(bdf=bdf):
            kernel.unplug(bdf)
        case Load() | Unload() | Stack() as command:
            _change_modules(kernel, command)
        case Calls():
            return msgspec.json.encode(kernel.usermode_calls()).decode()
    return "done"


def _change_modules(kernel: Kernel, command: Load | Unload | Stack) -> None:
    """Raises `TreeError` or `OSError`."""
    if isinstance(command, Stack):
        kernel.create_stack(command.network_namespace)
    elif isinstance(command, Unload):
        kernel.unload(command.module)
    elif command.errno:
        kernel.fail_load(command.module, _number(command.errno), times=command.times)
    else:
        kernel.load(command.module, first_time=command.first_time)


def _configure_device(kernel: Kernel, command: Qat | Fpga) -> None:
    """Raises `TreeError`."""
    if isinstance(command, Qat):
        device = kernel.qat(command.bdf)
        device.healthy = device.healthy if command.healthy is None else command.healthy
        device.refuses_to_start = device.refuses_to_start if command.starts is None else not command.starts
        return
    card = kernel.fpga(command.bdf)
    card.outcomes.extend(command.outcomes)
    if command.resume:
        card.resume.set()
    if command.crash:
        card.crash()


def _number(name: str) -> int:
    numbers = {spelled: number for number, spelled in errno.errorcode.items()}
    if name not in numbers:
        raise TreeError(f"{name[:40]!a}: unknown errno name")
    return numbers[name]
