"""The emulated kernel on a machine: all devices except GPUs and NPUs, at the real paths.

    plan = NodePlan(hardware=[emulated(NodeSpec(qats=[QatSpec()]))])     # at every boot
    kernel = kernel_of(node)
    kernel.fail(f"{qat}/qat/state", errno.EIO, times=1)

Its daemon is stopped and started like the machine's others. Without it, accesses below its mounts fail with ENOTCONN.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from accelplane.simulate import DlbSpec, DsaSpec, IaaSpec, NodeSpec, QatSpec
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.mounting import parts
from accelplane.simulate.offload import FpgaSpec, NicSpec

from .build import ClusterError
from .hardware import copy_tree
from .machine import Argument, Daemon, Machine, wait_until

DAEMON = "emulated-kernel"
_WHOLE = Path("/run/emulated-kernel")
_DESCRIPTION = Path("/run/emulated-kernel.yaml")
_NULL = "1:3"
IOCTLS = "/run/emulated-kernel-ioctls"
# A command whose ioctls the emulated kernel answers, after the socket.
SUPERVISOR = "import sys; from accelplane.simulate.seccomp import run; sys.exit(run(sys.argv[2:], sys.argv[1]))"
_FAMILIES = {QatSpec: "qat", DsaSpec: "dsa", IaaSpec: "iaa", DlbSpec: "dlb", FpgaSpec: "fpga", NicSpec: "nic"}


class EmulatedKernel:
    """The interface of tests to the emulated kernel of a machine. Paths are the machine's."""

    def __init__(self, machine: Machine, daemon: Daemon) -> None:
        self.machine = machine
        self.daemon = daemon

    def read(self, path: Argument) -> str:
        """The content that a process on the machine reads. Raises ``OSError``."""
        return self.machine.path(path).read_bytes().decode(errors="surrogateescape")

    def write(self, path: Argument, text: str) -> None:
        """Writes like ``echo -n`` on the machine. Raises ``OSError``."""
        descriptor = os.open(self.machine.path(path), os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def do(self, description: str, **more: object) -> str:
        """Execute a command of the control file; return its result. Raises ``ClusterError``."""
        control = _WHOLE / "control"
        try:
            self.write(control, json.dumps({"do": description, **more}))
        except OSError as error:
            raise ClusterError(f"{self.machine.name}: {description} {more}: {error}: {self.read(control)}") from None
        return self.read(control).strip()

    def fail(self, path: Argument, code: int, **more: object) -> None:
        """Let reads (``on="read"``) or writes fail, always or ``times`` times."""
        self.do("fail", path=str(path), errno=errno.errorcode[code], **more)

    def clear_faults(self, path: Argument | None = None) -> None:
        """Remove the faults of that path, or all."""
        self.do("clear_faults", path=path and str(path))

    def hold(self, name: str) -> None:
        """Mark a function, queue or node as in use: ``0000:61:00.1``, ``wq0.0``, ``vfio/12``."""
        self.do("hold", name=name)

    def release(self, name: str) -> None:
        """Remove a user added by ``hold``."""
        self.do("release", name=name)

    def plug(self, spec: QatSpec | DsaSpec | IaaSpec | DlbSpec | FpgaSpec | NicSpec) -> str:
        """Plug a device in; its address."""
        address = self.do("plug", family=_FAMILIES[type(spec)], spec=_without_nulls(spec))
        # New directories below /sys/devices are mounted after the answer.
        device = self.machine.path(f"/sys/bus/pci/devices/{address}")
        wait_until((device / "vendor").exists, f"{device}: exists", every=0.01)
        return address

    def unplug(self, address: str) -> None:
        """Unplug a device, also one in use."""
        self.do("unplug", bdf=address)


def supervised_command(*command: Argument) -> list[Argument]:
    """The command line that runs a command with ioctls of the emulated kernel."""
    return [sys.executable, "-c", SUPERVISOR, IOCTLS, *command]


def emulated(description: NodeSpec, *, openable: bool = True) -> Callable[[Machine], None]:
    """Hardware of a node, for its plan."""

    def copy_emulation(machine: Machine) -> None:
        emulated_kernel(machine, description, openable=openable)

    return copy_emulation


def emulated_kernel(machine: Machine, description: NodeSpec, *, openable: bool = True) -> EmulatedKernel:
    """Start the emulated kernel on the machine; the files exist on return.

    Device nodes that are openable have the numbers of /dev/null, others those of sysfs, by which queues of DSA
    and IAA are looked up in /dev/char, and FPGAs by the hook.
    """
    with tempfile.TemporaryDirectory() as tree:
        # Where the host's own /sys is visible, directories for the mounts can only be created from outside.
        for part in parts(Kernel(description)):
            if not part.startswith("/sys/devices/system/") or machine.path(part).parent.is_dir():
                Path(tree, part[1:]).mkdir(parents=True)
        copy_tree(machine, Path(tree))
    machine.path(_DESCRIPTION).write_text(json.dumps(_without_nulls(description)))
    daemon = machine.daemons.get(DAEMON)
    if daemon is None:
        numbers = ["--numbers", _NULL] if openable else []
        command = [sys.executable, "-m", "accelplane.simulate.kernel", _DESCRIPTION, "--directory", _WHOLE, *numbers]
        daemon = machine.add_daemon(
            DAEMON,
            [*command, "--uevents", "--ioctls", IOCTLS],
            ready=lambda: _text(machine.path(_WHOLE / "control")).startswith("ready"),
        )
    daemon.start()
    return EmulatedKernel(machine, daemon)


def kernel_of(machine: Machine) -> EmulatedKernel:
    """The emulated kernel of the machine's plan."""
    if DAEMON not in machine.daemons:
        raise ClusterError(f"{machine.name}: has no emulated kernel")
    return EmulatedKernel(machine, machine.daemons[DAEMON])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _without_nulls(spec: msgspec.Struct) -> object:
    """The specification as JSON without null members, which some readers reject."""
    fields = msgspec.to_builtins(spec)
    return _plain_value(fields)


def _plain_value(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain_value(entry) for key, entry in value.items() if entry is not None}
    return [_plain_value(entry) for entry in value] if isinstance(value, list | tuple) else value
