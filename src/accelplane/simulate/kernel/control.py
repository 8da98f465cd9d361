"""The control file, for tests in another process: one JSON object per write, such as

    {"do": "fail", "path": "/sys/bus/pci/devices/0000:61:00.0/qat/state", "errno": "EIO", "times": 1}
    {"do": "hold", "name": "wq0.0"}
    {"do": "plug", "family": "dsa", "spec": {"queues": [{}]}}

Reading it returns the result of the last command. Only root can write it.
"""

import errno
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_type_hints

import msgspec

from accelplane.simulate.journal import TreeError
from accelplane.simulate.kernel.fpga import Outcome
from accelplane.simulate.kernel.hardware import SPECS, Loadable
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.model import Attribute, oserror
from accelplane.simulate.offload import Family

CONTROL = "/control"


def _fail(
    kernel: Kernel,
    path: str,
    errno: str,
    *,
    on: Literal["read", "write"] = "write",
    times: int | None = None,
    text: str | None = None,
) -> None:
    kernel.fail(path, _number(errno), on=on, times=times, text=text)


def _set_qat(kernel: Kernel, bdf: str, healthy: bool | None = None, starts: bool | None = None) -> None:
    """Sets the state of a QAT device: its heartbeat, and whether it starts."""
    device = kernel.qat(bdf)
    device.healthy = device.healthy if healthy is None else healthy
    device.refuses_to_start = device.refuses_to_start if starts is None else not starts


def _set_fpga(
    kernel: Kernel, bdf: str, outcomes: Sequence[Outcome] = (), resume: bool = False, crash: bool = False
) -> None:
    """Adds results of programming operations; `resume` ends those that hang, `crash` crashes the firmware."""
    card = kernel.fpga(bdf)
    card.outcomes.extend(outcomes)
    if resume:
        card.resume.set()
    if crash:
        card.crash()


def _plug(kernel: Kernel, family: Family, spec: msgspec.Raw = msgspec.Raw(b"{}")) -> str:  # noqa: B008 - immutable
    return kernel.plug(msgspec.json.decode(spec, type=SPECS[family]))


def _load(kernel: Kernel, module: Loadable, first_time: bool = False, errno: str = "", times: int = 1) -> None:
    """Loads a module. With `errno`, the next `times` attempts fail instead."""
    if errno:
        kernel.fail_load(module, _number(errno), times=times)
    else:
        kernel.load(module, first_time=first_time)


def _list_calls(kernel: Kernel) -> str:
    return msgspec.json.encode(kernel.usermode_calls()).decode()


# The keys of a command are the parameters of its function; bytes are in base64, an errno is a name such as EIO.
_COMMANDS: Mapping[str, Callable[..., str | None]] = {
    "fail": _fail,
    "set_content": Kernel.set_content,
    "clear_faults": Kernel.clear_faults,
    "block": Kernel.block,
    "unblock": Kernel.unblock,
    "hold": Kernel.hold,
    "release": Kernel.release,
    "udev": Kernel.pause_udev,
    "qat": _set_qat,
    "fpga": _set_fpga,
    "plug": _plug,
    "unplug": Kernel.unplug,
    "load": _load,
    "unload": Kernel.unload,
    "stack": Kernel.create_stack,
    "calls": _list_calls,
}


def _message(name: str, function: Callable[..., object]) -> type[msgspec.Struct]:
    """The JSON object of a command. Its result is that of the function, or `done`."""
    types = get_type_hints(function)
    _kernel, *parameters = inspect.signature(function).parameters.values()
    fields = [
        (each.name, types[each.name], msgspec.NODEFAULT if each.default is each.empty else each.default)
        for each in parameters
    ]
    return msgspec.defstruct(name, fields, tag_field="do", tag=name, kw_only=True, forbid_unknown_fields=True)


_messages = tuple(_message(name, function) for name, function in _COMMANDS.items())
_decoder = msgspec.json.Decoder[Any](Union[_messages])  # noqa: UP007 - the types do not exist before


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
    command: msgspec.Struct = _decoder.decode(text)
    return _COMMANDS[type(command).__name__](kernel, **msgspec.structs.asdict(command)) or "done"


def _number(name: str) -> int:
    numbers = {spelled: number for number, spelled in errno.errorcode.items()}
    if name not in numbers:
        raise TreeError(f"{name[:40]!a}: unknown errno name")
    return numbers[name]
