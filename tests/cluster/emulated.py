"""An emulated kernel in a machine: QAT, DSA, IAA, DLB and SGX at the real paths, reacting as Linux's do.

It runs in the machine, which its mounts and device nodes end with; here is who talks to it.
"""

from __future__ import annotations

import errno as errnos
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from accelplane.simulate import DlbSpec, DsaSpec, IaaSpec, Kernel, NodeSpec, QatSpec
from accelplane.simulate.kernel.mounting import parts

from . import hardware
from .build import ClusterError
from .machine import Machine

_DIRECTORY = "/run/emulated-kernel"
_DESCRIPTION = "/run/emulated-kernel.yaml"
_FAMILIES = {QatSpec: "qat", DsaSpec: "dsa", IaaSpec: "iaa", DlbSpec: "dlb"}


class EmulatedKernel:
    """What tests tell a machine's kernel; see `accelplane.simulate.Kernel` for what each means."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @property
    def says(self) -> str:
        return self._machine.path(f"{_DIRECTORY}/control").read_text().strip()

    def fail(
        self, path: str, number: int, *, on: str = "write", times: int | None = None, text: str | None = None
    ) -> None:
        self._tell("fail", path=path, errno=errnos.errorcode[number], on=on, times=times, text=text)

    def mend(self, path: str | None = None) -> None:
        self._tell("mend", path=path)

    def hold(self, name: str) -> None:
        self._tell("hold", name=name)

    def release(self, name: str) -> None:
        self._tell("release", name=name)

    def qat(self, bdf: str, *, healthy: bool | None = None, starts: bool | None = None) -> None:
        self._tell("qat", bdf=bdf, healthy=healthy, starts=starts)

    def plug(self, spec: QatSpec | DsaSpec | IaaSpec | DlbSpec) -> str:
        self._tell("plug", family=_FAMILIES[type(spec)], spec=_plain(spec))
        return self.says

    def unplug(self, bdf: str) -> None:
        self._tell("unplug", bdf=bdf)

    def load(self, module: str) -> None:
        self._tell("load", module=module)

    def unload(self, module: str) -> None:
        self._tell("unload", module=module)

    def _tell(self, what: str, **more: object) -> None:
        command = json.dumps({"do": what, **{key: value for key, value in more.items() if value is not None}})
        try:
            self._machine.path(f"{_DIRECTORY}/control").write_text(command)
        except OSError as error:
            raise ClusterError(
                f"{self._machine.name}: emulated kernel: {command}: {error.strerror}: {self.says}"
            ) from None


@contextmanager
def emulated_kernel(machine: Machine, description: NodeSpec) -> Iterator[EmulatedKernel]:
    """The kernel, in the machine until left."""
    for part in parts(Kernel(description)):
        hardware.make_directory(machine, part)
    machine.path(_DESCRIPTION).write_text(json.dumps(_plain(description)))
    command = [
        sys.executable,
        "-m",
        "accelplane.simulate.kernel",
        _DESCRIPTION,
        "--uevents",
        f"--directory={_DIRECTORY}",
    ]
    kernel = EmulatedKernel(machine)

    def ready() -> bool:
        return machine.path(f"{_DIRECTORY}/control").exists() and kernel.says == "ready"

    daemon = machine.add_daemon("emulated-kernel", command, ready=ready)
    try:
        daemon.start()
        yield kernel
    finally:
        if machine.powered:
            daemon.stop()
        machine.daemons.pop("emulated-kernel")


def _plain(spec: object) -> object:
    """Without what is None, which YAML of text only cannot say."""
    return _without_none(msgspec.to_builtins(spec))


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_none(each) for each in value]
    return value
