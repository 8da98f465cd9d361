"""A node with the emulated idxd driver."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kernelhost import KernelHost, snapshot

from accelplane.provision.idxd import planners, read_config
from accelplane.provision.steps import Outcome, apply, preview
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import DsaSpec, QueueSpec

DSA = {"NODE_NAME": "node1"}
BUS = "/sys/bus/dsa"


class Node:
    """An emulated node, its configuration directory, and the provisioning outcomes."""

    def __init__(self, kernel: Kernel, conf: Path) -> None:
        self.kernel = kernel
        self.conf = conf
        self.host = KernelHost(kernel, [])

    def apply(self, environment: dict[str, str] = DSA, *, force: bool = False) -> list[Outcome]:
        config = read_config(str(self.conf), environment, force=force)
        return list(apply("/", planners(self.host, config), timeout=0, host=lambda _root: self.host))

    def preview(self, environment: dict[str, str] = DSA) -> list[Outcome]:
        config = read_config(str(self.conf), environment)
        return list(preview("/", planners(self.host, config), host=lambda _root: self.host))

    def read(self, path: str) -> str:
        return self.kernel.read(f"{BUS}/devices/{path}").strip()

    def write(self, path: str, text: str) -> None:
        self.kernel.write(f"{BUS}/devices/{path}", text)

    def configure(self, name: str, text: str) -> None:
        (self.conf / name).write_text(text)

    def driver(self, address: str) -> str:
        path = f"/sys/bus/pci/devices/{address}/driver"
        return os.path.basename(self.kernel.readlink(path)) if self.kernel.exists(path) else ""

    def all_text(self, device: str = "") -> dict[str, str]:
        """All attributes and links in sysfs and /dev of the device, or of all devices."""
        found = snapshot(self.kernel) | dict.fromkeys((path for path, _entry in self.kernel.tree.walk("/dev")), "")
        return {path: text for path, text in found.items() if device in path and not path.endswith("/cmd_status")}

    def text_without_numbers(self) -> dict[str, str]:
        """The same without device numbers, which depend on the order in which queues are enabled."""
        numbers = ("/char", "/char/", "/cdev_minor", "/dev", "/uevent")
        return {
            path: text for path, text in self.all_text().items() if not path.rstrip("0123456789:").endswith(numbers)
        }


MakeNode = Callable[..., Node]


def states(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {outcome.device: outcome.state for outcome in outcomes}


def only(outcomes: Sequence[Outcome]) -> Outcome:
    assert len(outcomes) == 1
    return outcomes[0]


def configured(*names: str, size: int = 16, mode: str = "dedicated") -> DsaSpec:
    """A device with a configuration that differs from all templates here."""
    queues = [QueueSpec(name=name, size=size, mode=mode) for name in names]  # type: ignore[arg-type] # the tests' words
    return DsaSpec(index=0, queues=queues)


def writes(machine: Node, environment: dict[str, str] = DSA) -> list[tuple[str, str]]:
    """Records all writes of provisioning."""
    writes_: list[tuple[str, str]] = []
    config = read_config(str(machine.conf), environment)
    for planner in planners(machine.host, config):
        while steps := planner(machine.host).steps:
            for step in steps:
                machine.kernel.write(step.path, step.text)
                writes_.append((step.path, step.text))
    return writes_
