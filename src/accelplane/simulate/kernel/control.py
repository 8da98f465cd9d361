"""The control file, for tests in another process: one JSON object a write, such as

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


class Say(_Command, frozen=True, kw_only=True):
    """See `Kernel.say`; `content` is in base64."""

    path: str
    content: bytes
    times: int | None = None


class Mend(_Command, frozen=True, kw_only=True):
    """See `Kernel.mend`."""

    path: str | None = None


class Hold(_Command, frozen=True, kw_only=True):
    """See `Kernel.hold`."""

    name: str


class Release(_Command, frozen=True, kw_only=True):
    """See `Kernel.release`."""

    name: str


class Udev(_Command, frozen=True, kw_only=True):
    """See `Kernel.let_udev_wait`."""

    wait: bool


class Qat(_Command, frozen=True, kw_only=True):
    """What befalls a QAT device: its heartbeat, and whether it starts."""

    bdf: str
    healthy: bool | None = None
    starts: bool | None = None


class Fpga(_Command, frozen=True, kw_only=True):
    """What becomes of the next attempts to program a card; `go_on` ends those that hang, `crash` is its firmware's."""

    bdf: str
    outcomes: Sequence[Outcome] = ()
    go_on: bool = False
    crash: bool = False


class Plug(_Command, frozen=True, kw_only=True):
    """See `Kernel.plug`; the answer is the address."""

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
    """See `Kernel.usermode_calls`; the answer is a JSON list."""


Command = Fail | Say | Mend | Hold | Release | Udev | Qat | Fpga | Plug | Unplug | Load | Unload | Stack | Calls
_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


class Control:
    """The file, at `/control` of the kernel's tree. `afterwards` is called when a command was obeyed."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.says = ""
        self.afterwards: list[Callable[[], None]] = []
        kernel.tree.put(CONTROL, Attribute(read=lambda: self.says, write=self._write, mode=0o600))

    def _write(self, text: str) -> None:
        try:
            self.says = obey(self._kernel, text)
        except (msgspec.DecodeError, TreeError) as error:
            self.says = str(error)
            raise oserror(errno.EINVAL) from None
        except OSError as error:
            self.says = str(error)
            raise
        for call in self.afterwards:
            call()


def obey(kernel: Kernel, text: str) -> str:
    """Does it; returns what there is to say. Raises `msgspec.DecodeError`, `TreeError` or `OSError`."""
    match _decoder.decode(text):
        case Fail(path=path, errno=name, on=on, times=times, text=only):
            kernel.fail(path, _number(name), on=on, times=times, text=only)
        case Say(path=path, content=content, times=times):
            kernel.say(path, content, times=times)
        case Mend(path=path):
            kernel.mend(path)
        case Hold(name=name):
            kernel.hold(name)
        case Release(name=name):
            kernel.release(name)
        case Udev(wait=wait):
            kernel.let_udev_wait(wait=wait)
        case Qat() | Fpga() as what:
            _befall(kernel, what)
        case Plug(family=family, spec=spec):
            return kernel.plug(msgspec.json.decode(spec, type=SPECS[family]))
        case Unplug(bdf=bdf):
            kernel.unplug(bdf)
        case Load() | Unload() | Stack() as what:
            _change_modules(kernel, what)
        case Calls():
            return msgspec.json.encode(kernel.usermode_calls()).decode()
    return "done"


def _change_modules(kernel: Kernel, what: Load | Unload | Stack) -> None:
    """Raises `TreeError` or `OSError`."""
    if isinstance(what, Stack):
        kernel.create_stack(what.network_namespace)
    elif isinstance(what, Unload):
        kernel.unload(what.module)
    elif what.errno:
        kernel.fail_load(what.module, _number(what.errno), times=what.times)
    else:
        kernel.load(what.module, first_time=what.first_time)


def _befall(kernel: Kernel, what: Qat | Fpga) -> None:
    """Raises `TreeError`."""
    if isinstance(what, Qat):
        device = kernel.qat(what.bdf)
        device.healthy = device.healthy if what.healthy is None else what.healthy
        device.refuses_to_start = device.refuses_to_start if what.starts is None else not what.starts
        return
    card = kernel.fpga(what.bdf)
    card.outcomes.extend(what.outcomes)
    if what.go_on:
        card.let_go.set()
    if what.crash:
        card.crash()


def _number(name: str) -> int:
    numbers = {spelled: number for number, spelled in errno.errorcode.items()}
    if name not in numbers:
        raise TreeError(f"{name[:40]!a}: no errno of that name")
    return numbers[name]
