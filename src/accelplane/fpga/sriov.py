"""Virtual functions of an FPGA card: as many as ports are released from the physical one, no more and no fewer.

A port that is to be a virtual function's is released first; `sriov_numvfs` is then written with the number of released
ports, and the way back is the reverse (kernel document Documentation/fpga/dfl.rst, "FPGA virtualization"). Which ports
are released, no file says: they are those that the physical function lacks once its virtual ones are off.

    steps = plan(read_state(host, fme), 2)
    apply(host, fme, steps)
"""

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

from accelplane.fpga import FpgaError, shown
from accelplane.fpga.ioctl import Call, system_call
from accelplane.fpga.program import PATIENCE, Patience, assign, limited, release
from accelplane.fpga.sysfs import Fme, SysfsError
from accelplane.host import Host, HostError


class SriovError(FpgaError):
    """The number of virtual functions cannot be had, or was not reached; what was done is undone."""


class State(NamedTuple):
    """A card: how many ports there are, which the physical function has, how many virtual functions are and can be."""

    ports: int
    physical: tuple[int, ...]
    vfs: int
    limit: int


class Step(NamedTuple):
    """One thing to do: a port of that number to release or assign, or the number of virtual functions to write.

    `before` is the number that was written before, of which only `vfs` has one.
    """

    what: Literal["release", "assign", "vfs"]
    number: int
    before: int = 0

    def undone(self) -> "Step":
        """What takes it back."""
        if self.what == "vfs":
            return Step("vfs", self.before, self.number)
        return Step("assign" if self.what == "release" else "release", self.number)

    def __str__(self) -> str:
        if self.what == "vfs":
            return f"write {self.number} to sriov_numvfs (was {self.before})"
        return f"{self.what} port {self.number}"


def read_state(host: Host, fme: Fme) -> State:
    """What the card's files say. Raises `SysfsError` or `HostError`."""
    home = os.path.dirname(fme.path)
    physical = [
        _count(host.text(f"{home}/{name}/id"), f"{home}/{name}/id")
        for name in host.names(home)
        if fme.driver.port.fullmatch(name)
    ]
    return State(
        _count(fme.ports_num, f"{fme.path}/ports_num"),
        tuple(sorted(physical)),
        _count(host.text(_numvfs(fme)), _numvfs(fme)),
        _count(host.text(f"{fme.pci.path}/sriov_totalvfs"), f"{fme.pci.path}/sriov_totalvfs"),
    )


def plan(state: State, vfs: int) -> tuple[Step, ...]:
    """The steps to so many virtual functions, none when it is so. The last ports are released first.

    Raises `SriovError`.
    """
    most = min(state.ports, state.limit)
    if not 0 <= vfs <= most:
        raise SriovError(
            f"{vfs} virtual functions: expected 0 to {most}, the card has {state.ports} ports and can have "
            f"{state.limit} virtual functions"
        )
    released = [port for port in range(state.ports) if port not in state.physical]
    if state.vfs == vfs == len(released):
        return ()
    steps: list[Step] = []
    if state.vfs:
        steps.append(Step("vfs", 0, state.vfs))
    steps += [Step("release", port) for port in state.physical[len(state.physical) - (vfs - len(released)) :]
              if vfs > len(released)]  # fmt: skip
    steps += [Step("assign", port) for port in released[: len(released) - vfs]]
    if vfs:
        steps.append(Step("vfs", vfs))
    return tuple(steps)


def apply(
    host: Host,
    fme: Fme,
    steps: Sequence[Step],
    *,
    call: Call = system_call,
    patience: Patience = PATIENCE,
) -> None:
    """Takes the steps, or none of them: when one fails those before it are taken back. Raises `SriovError`.

    Neither the steps nor the way back takes longer than `patience`. Only in the main thread.
    """
    done: list[Step] = []
    try:
        with limited(patience.seconds, "making virtual functions"):
            for step in steps:
                _take(host, fme, step, call)
                done.append(step)
    except (FpgaError, HostError) as error:
        left = _undo(host, fme, done[::-1], call, patience)
        raise SriovError(f"{error}; {left or 'all is as before'}") from error


def _undo(host: Host, fme: Fme, done: Sequence[Step], call: Call, patience: Patience) -> str:
    """Empty, or what could not be taken back, and why."""
    problems: list[str] = []
    for step in done:
        try:
            with limited(patience.seconds / len(done), "taking it back"):
                _take(host, fme, step.undone(), call)
        except (FpgaError, HostError) as error:
            problems.append(f"not taken back: {step} ({error})")
    return "; ".join(problems)


def _take(host: Host, fme: Fme, step: Step, call: Call) -> None:
    if step.what == "vfs":
        host.write(_numvfs(fme), f"{step.number}\n")
    else:
        (release if step.what == "release" else assign)(host, fme, step.number, call=call)


def _numvfs(fme: Fme) -> str:
    return f"{fme.pci.path}/sriov_numvfs"


def _count(text: str, path: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 9:
        raise SysfsError(f"{path}: {shown(text)}, expected a number")
    return int(text)
