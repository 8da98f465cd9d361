"""An emulated kernel for a mount namespace: `python -m accelplane.simulate.kernel DESCRIPTION`.

Mounts the devices of a node's description over `/sys` and `/dev` of its mount namespace until SIGTERM. GPUs and NPUs
are plain files. Other processes control it through the file DIRECTORY/control.
"""

import argparse
import queue
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

from accelplane.host.uevent import Uevent
from accelplane.simulate.description import DescriptionError
from accelplane.simulate.journal import TreeError
from accelplane.simulate.kernel.control import Control
from accelplane.simulate.kernel.fuse import FuseUnavailable
from accelplane.simulate.kernel.ioctls import serve_ioctls
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.mounting import mount_over
from accelplane.simulate.kernel.snapshot import adopt_tree
from accelplane.simulate.kernel.usermode import Usermode
from accelplane.simulate.specs import NodeSpec
from accelplane.simulate.tree import SimulatedNode
from accelplane.simulate.uevents import UeventError, uevent_everywhere


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m accelplane.simulate.kernel", description=__doc__)
    parser.add_argument("description", help="a node's description in YAML")
    parser.add_argument(
        "--directory", default="/run/emulated-kernel", help="mount point of the complete kernel and of `control`"
    )
    parser.add_argument(
        "--numbers", metavar="MAJOR:MINOR", type=_numbers, help="numbers of every device node, such as 1:3"
    )
    parser.add_argument("--uevents", action="store_true", help="send uevents, also in the network namespaces of pods")
    parser.add_argument(
        "--ioctls", metavar="SOCKET", help="socket that serves ioctls of processes under simulate.seccomp"
    )
    options = parser.parse_args(arguments)
    try:
        spec = NodeSpec.load(options.description)
        run(spec, options.directory, numbers=options.numbers, uevents=options.uevents, ioctls=options.ioctls)
    except (DescriptionError, TreeError, FuseUnavailable, OSError, ValueError) as error:
        print(f"emulated kernel: {error}", file=sys.stderr)
        return 1
    return 0


def run(
    spec: NodeSpec, directory: str, *, numbers: tuple[int, int] | None, uevents: bool, ioctls: str | None = None
) -> None:
    """Runs until SIGTERM or SIGINT. Raises the exceptions of `mount_over`."""
    events: queue.SimpleQueue[bool] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: events.put(False))
    usermode = Usermode(execute=True)
    kernel = Kernel(spec, listen=_send if uevents else None, usermode=usermode)
    if spec.gpus or spec.npus:
        with tempfile.TemporaryDirectory() as root:
            SimulatedNode(root).build(NodeSpec(gpus=spec.gpus, npus=spec.npus, numa_nodes=spec.numa_nodes))
            adopt_tree(kernel.tree, root)
    control = Control(kernel)
    with ExitStack() as stack:
        stack.callback(usermode.close)
        if ioctls:
            stack.enter_context(serve_ioctls(kernel, ioctls))
        mount_new_parts = stack.enter_context(mount_over(kernel, directory, numbers=numbers))
        control.on_command.append(lambda: events.put(True))
        control.result = "ready"
        while events.get():
            mount_new_parts()


def _send(uevent: Uevent) -> None:
    try:
        uevent_everywhere(uevent.action, uevent.devpath, uevent.subsystem, **uevent.fields)
    except UeventError as error:
        print(f"emulated kernel: {error}", file=sys.stderr)


def _numbers(text: str) -> tuple[int, int]:
    major, _colon, minor = text.partition(":")
    return int(major), int(minor)


if __name__ == "__main__":
    sys.exit(main())
