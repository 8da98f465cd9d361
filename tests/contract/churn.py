"""Random operations on an agent, its node and its kubelet, in virtual time: `make churn`, `test_churn.py`.

At rest the kubelet's lists equal the node's devices and their health, a device that blocks affects only itself, and
nothing has leaked. Equal seeds give equal operations.
"""

import argparse
import asyncio
import gc
import logging
import operator
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from scripted import UNITS, Setup
from trees import gpu_card, write

from accelplane.plugins import Plugin
from accelplane.plugins.gpu import GpuConfig, GpuPlugin

log = logging.getLogger("churn")

Choose = Callable[[Sequence[Any]], Any]

NAMES = "a", "b", "gpu"
IDS = "d0", "d1", "d2"
LABELS = "", "x"
_XE = "gpu.intel.com/xe"
MAX_FILES = 60  # about 30 in use, and directories that hosts keep open
MAX_NAMES = 4  # of a socket: its historic one and three that were registered
_SHARED = 2  # containers that share a GPU with another option
_CLASS, _NODES = "sys/class/drm", "dev/dri"


class ChurnSetup(Setup):
    """A node with GPUs too, of which the driver reports the health: the unit with the index 1 has `card1`."""

    def plugin(self, name: str, label: str) -> Plugin[Any]:
        if name != "gpu":
            return super().plugin(name, label)
        return GpuPlugin(GpuConfig(shared_dev_num=_SHARED if label else 1))

    def resource(self, name: str) -> str:
        return _XE if name == "gpu" else super().resource(name)

    def plug(self, name: str, unit: str, id_: str) -> None:
        if name != "gpu":
            super().plug(name, unit, id_)
        elif not (self.root / _CLASS / _card(unit)).exists():
            function = gpu_card(self.root, UNITS.index(unit), driver="xe", address=unit)
            write(function / "gpu_health", "critical" if unit in self.bad else "ok")
            self.unit_of.update({(name, f"{_card(unit)}-{number}"): unit for number in range(_SHARED)})

    def unplug(self, name: str, unit: str, id_: str) -> None:
        if name != "gpu":
            super().unplug(name, unit, id_)
        elif (self.root / _CLASS / _card(unit)).exists():
            for path in (self.root / _NODES / "by-path").iterdir():
                if unit in path.name:
                    path.unlink()
            for path in (_CLASS, _NODES):
                (self.root / path / _card(unit)).unlink()
            (self.root / _NODES / f"renderD{128 + UNITS.index(unit)}").unlink()
            shutil.rmtree(next(self.root.glob(f"sys/devices/pci*/{unit}")))

    def set_health(self, unit: str, *, good: bool) -> None:
        super().set_health(unit, good=good)
        for path in self.root.glob(f"sys/devices/pci*/{unit}/gpu_health"):
            path.write_text("ok" if good else "critical")

    def block(self, unit: str) -> None:
        super().block(unit)
        self.threads.blocks.add(_card(unit))

    def unblock(self, unit: str) -> None:
        self.threads.blocks.discard(_card(unit))
        super().unblock(unit)

    def plugged(self, name: str) -> Iterable[tuple[str, str]]:
        if name != "gpu":
            yield from super().plugged(name)
            return
        for unit in UNITS:
            if (self.root / _CLASS / _card(unit)).exists():
                yield from ((unit, f"{_card(unit)}-{number}") for number in range(_SHARED if self.labels[name] else 1))


def _card(unit: str) -> str:
    return f"card{UNITS.index(unit)}"


# Operations. `choose` returns one of several values.


def plug(setup: Setup, choose: Choose) -> None:
    name, unit, id_ = choose(NAMES), choose(UNITS), choose(IDS)
    for other in UNITS:
        if other != unit and name != "gpu":
            setup.unplug(name, other, id_)  # an ID is in one place only
    setup.plug(name, unit, id_)


def unplug(setup: Setup, choose: Choose) -> None:
    setup.unplug(choose(NAMES), choose(UNITS), choose(IDS))


def set_health(setup: Setup, choose: Choose) -> None:
    setup.set_health(choose(UNITS), good=choose((False, True)))


def block(setup: Setup, choose: Choose) -> None:
    setup.block(choose(UNITS))


def unblock(setup: Setup, choose: Choose) -> None:
    setup.unblock(choose(UNITS))


def wedge(setup: Setup, choose: Choose) -> None:
    setup.wedge(choose(UNITS))


def rebind(setup: Setup, choose: Choose) -> None:
    setup.rebind(choose(UNITS), lost=choose((False, True)))


def hold(setup: Setup, choose: Choose) -> None:
    setup.hold()


def execute_thread(setup: Setup, choose: Choose) -> None:
    if setup.threads.running:
        choose(setup.threads.running).execute()


def deliver_thread(setup: Setup, choose: Choose) -> None:
    if setup.threads.running:
        setup.threads.deliver(choose(range(len(setup.threads.running))))


def answer_health(setup: Setup, choose: Choose) -> None:
    if setup.replies:
        setup.answer_health(choose(range(len(setup.replies))))


def enable(setup: Setup, choose: Choose) -> None:
    setup.enable(choose(NAMES), choose(LABELS))


def disable(setup: Setup, choose: Choose) -> None:
    setup.disable(choose(NAMES))


def crash(setup: Setup, choose: Choose) -> None:
    name = choose(NAMES[:2])
    if name in setup.enabled:
        setup.enabled[name].crash = True


def restart_agent(setup: Setup, choose: Choose) -> None:
    setup.restart_agent()


def restart_kubelet(setup: Setup, choose: Choose) -> None:
    setup.restart_kubelet()


def delete_socket(setup: Setup, choose: Choose) -> None:
    name = setup.resource(choose(NAMES)).replace("/", "-")
    Path(setup.kubelet.directory, f"{name}.sock").unlink(missing_ok=True)


def set_registration(setup: Setup, choose: Choose) -> None:
    setup.kubelet.answers_register = choose((False, True))


def allocate(setup: Setup, choose: Choose) -> None:
    resource = setup.resource(choose(NAMES))
    ids = setup.kubelet.allocated.get(resource, set())
    listed = setup.kubelet.lists.get(resource, {}).items()
    if free := sorted(id_ for id_, good in listed if good and id_ not in ids):
        setup.loop.create_task(setup.kubelet.allocate(resource, choose(free)))


def release(setup: Setup, choose: Choose) -> None:
    resource = setup.resource(choose(NAMES))
    if ids := sorted(setup.kubelet.allocated.get(resource, ())):
        setup.kubelet.release(resource, choose(ids))


def step(setup: Setup, choose: Choose) -> None:
    setup.step(choose(range(1, 31)))


def advance(setup: Setup, choose: Choose) -> None:
    setup.advance(choose((0.01, 1.5, 6.0, 11.0)))


def complete_work(setup: Setup, choose: Choose) -> None:
    setup.complete_work()
    setup.check_rest()


OPERATIONS = (
    plug, unplug, set_health, block, unblock, wedge, rebind, hold, execute_thread, deliver_thread, answer_health,
    enable, disable, crash, restart_agent, restart_kubelet, delete_socket, set_registration, allocate, release, step,
    advance, complete_work,
)  # fmt: skip
# Frequent operations, so that about every twentieth completes all work.
WEIGHTS = {plug: 4, unplug: 3, step: 3, advance: 2, allocate: 2, execute_thread: 2, deliver_thread: 2}


def usage() -> tuple[int, int]:
    """The open files and threads of this process."""
    gc.collect()  # an exception and the frame that raised it refer to each other
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _open_files() -> str:
    names = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return ", ".join(sorted(os.readlink(name) for name in names if os.path.lexists(name)))


def check(setup: Setup) -> None:
    """What holds at each time."""
    assert all(setup.scans(name) <= 1 for name in NAMES), "one scan for each plugin"
    assert setup.kubelet.crashes == []


def run(seed: int, count: int, *, report: Callable[[str], None] = lambda _text: None) -> None:
    """Performs `count` operations. Raises an error with the last ones."""
    choice = random.Random(seed)  # noqa: S311 - repeatable, no secret
    weights = [WEIGHTS.get(operation, 1) for operation in OPERATIONS]
    before, last, trace = usage(), time.monotonic(), list[str]()
    first: dict[object, tuple[int, int]] = {}
    with closing(ChurnSetup()) as setup:
        try:
            for number in range(count):
                operation = choice.choices(OPERATIONS, weights)[0]
                trace.append(operation.__name__)
                log.info("%d: %s at %g s", number, operation.__name__, setup.loop.now)
                operation(setup, choice.choice)
                check(setup)
                if operation is complete_work and not setup.threads.blocks:
                    _check_usage(setup, first)
                if time.monotonic() - last > 5:
                    last = time.monotonic()
                    report(f"{number} operations")
            complete_work(setup, choice.choice)
        except BaseException as error:
            error.add_note(f"seed {seed}, operation {len(trace)}, the last ones: {', '.join(trace[-40:])}")
            raise
    del setup
    after = usage()  # threads of earlier tests may have ended meanwhile
    assert all(map(operator.le, after, before)), f"{before} files and threads before, {after} after: {_open_files()}"


def _check_usage(setup: Setup, first: dict[object, tuple[int, int]]) -> None:
    """The same state has the same number of tasks and threads as when it was reached first. Files are limited."""
    served = [name for runner in setup.agent.runners.values() for name in runner.publisher.served]
    state = tuple(sorted(setup.enabled)), tuple(sorted(served))
    files, threads = usage()
    found = len(asyncio.all_tasks(setup.loop)), threads
    expected = first.setdefault(state, found)
    assert found == expected, f"{state}: {found} tasks and threads, expected {expected}"
    assert files <= MAX_FILES, f"{state}: {files} open files"
    sockets = [name for name in os.listdir(setup.kubelet.directory) if name.endswith(".sock")]
    assert len(sockets) <= 1 + MAX_NAMES * len(served), sockets


def main() -> None:
    parser = argparse.ArgumentParser(prog="churn", description="Random operations on an agent, with invariants.")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))  # noqa: S311
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--verbose", action="store_true", help="print operations and the log of the agent")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    else:
        logging.disable()
    print(f"seed {options.seed}", flush=True)
    run(options.seed, options.operations, report=lambda text: print(text, flush=True))
    print(f"{options.operations} operations without a violation")


if __name__ == "__main__":
    main()
