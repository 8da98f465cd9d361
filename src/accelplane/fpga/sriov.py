"""SR-IOV of FPGA cards: a virtual function for each port that is released from the physical function.

Ports are released first; then their number is written to `sriov_numvfs`. To disable virtual functions the order is
reversed (kernel document Documentation/fpga/dfl.rst, "FPGA virtualization"). Released ports are not listed in sysfs:
they are missing from the physical function while virtual functions are disabled.

    steps = plan(read_state(host, fme), 2)
    apply(host, fme, steps)
"""

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

from accelplane.fpga import FpgaError, quote
from accelplane.fpga.ioctl import Call, system_call
from accelplane.fpga.program import DEFAULT_RETRY, RetryPolicy, move, time_limit
from accelplane.fpga.sysfs import Fme
from accelplane.host import Host, HostError


class State(NamedTuple):
    """A card: number of ports, ports of the physical function, number and limit of virtual functions."""

    ports: int
    physical: tuple[int, ...]
    vfs: int
    limit: int


class Step(NamedTuple):
    """A step: releases or assigns the port `number`, or writes `number` to sriov_numvfs, which was `before`."""

    what: Literal["release", "assign", "vfs"]
    number: int
    before: int = 0

    def inverse(self) -> "Step":
        """Returns the step that rolls this one back."""
        if self.what == "vfs":
            return Step("vfs", self.before, self.number)
        return Step("assign" if self.what == "release" else "release", self.number)

    def __str__(self) -> str:
        if self.what == "vfs":
            return f"write {self.number} to sriov_numvfs (was {self.before})"
        return f"{self.what} port {self.number}"


def read_state(host: Host, fme: Fme) -> State:
    """Reads the state of the card. Raises `FpgaError` or `HostError`."""
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
    """Returns the steps to that number of virtual functions. The last ports are released first. Raises `FpgaError`."""
    most = min(state.ports, state.limit)
    if not 0 <= vfs <= most:
        raise FpgaError(
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
    host: Host, fme: Fme, steps: Sequence[Step], *, call: Call = system_call, retry: RetryPolicy = DEFAULT_RETRY
) -> None:
    """Performs the steps. If one fails, rolls back those before it and raises `FpgaError`.

    Steps and rollback each have the timeout of `retry`. Only in the main thread.
    """
    done: list[Step] = []
    try:
        with time_limit(retry.timeout, "creating virtual functions"):
            for step in steps:
                _perform(host, fme, step, call)
                done.append(step)
    except (FpgaError, HostError) as error:
        problems = _rollback(host, fme, done[::-1], call, retry)
        raise FpgaError(f"{error}; {problems or 'rolled back'}") from error


def _rollback(host: Host, fme: Fme, done: Sequence[Step], call: Call, retry: RetryPolicy) -> str:
    """Rolls back steps. Returns the failed ones with their errors."""
    problems: list[str] = []
    for step in done:
        try:
            with time_limit(retry.timeout / len(done), "rollback"):
                _perform(host, fme, step.inverse(), call)
        except (FpgaError, HostError) as error:
            problems.append(f"not rolled back: {step} ({error})")
    return "; ".join(problems)


def _perform(host: Host, fme: Fme, step: Step, call: Call) -> None:
    if step.what == "vfs":
        host.write(_numvfs(fme), f"{step.number}\n")
    else:
        move(host, fme, step.what, step.number, call=call)


def _numvfs(fme: Fme) -> str:
    return f"{fme.pci.path}/sriov_numvfs"


def _count(text: str, path: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 9:
        raise FpgaError(f"{path}: {quote(text)}, expected a number")
    return int(text)
