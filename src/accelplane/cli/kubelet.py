"""`accelplane kubelet`: the embedded kubelet alone, to develop a plugin on a laptop.

It tells what plugins do as it happens and takes commands, one a line, from standard input. Whatever a command may run
into ends up as a line of text, never as the end of the program.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from accelplane.kubelet.embedded import (
    AdmissionError,
    ContainerStartError,
    EmbeddedKubelet,
    KubeletError,
    NoSuchPod,
    Pod,
    Registration,
    ResourceStatus,
    RunningContainer,
)

_HELP = """\
pod NAME RESOURCE=N [RESOURCE=N...]   admit a pod of one container and show what the container gets
delete NAME                           end a pod
status                                resources, devices and who holds them
restart                               restart the kubelet: it removes all sockets, plugins must register again
help                                  this text
quit                                  end"""


_LONGEST_LINE = 4096


class CommandError(Exception):
    """A line that is not a command; the text says what would be."""


def run(kubelet_dir: str, topology_policy: str, numa_nodes: int) -> int:
    """Runs until `quit`, SIGTERM or SIGINT; returns the exit code. The end of the input ends nothing."""
    try:
        kubelet = EmbeddedKubelet(kubelet_dir, topology_policy=topology_policy, numa_nodes=numa_nodes)
        return asyncio.run(_run(kubelet))
    except (KubeletError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


async def _run(kubelet: EmbeddedKubelet) -> int:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    lines: asyncio.Queue[str] = asyncio.Queue(maxsize=16)
    async with kubelet:
        _say(f"kubelet started; plugins register at {kubelet.plugin_directory}/kubelet.sock ('help' lists commands)")
        if sys.__stdin__ is not None:
            _read_lines(sys.__stdin__.fileno(), loop, lines)
        tasks = [loop.create_task(work) for work in (_narrate(kubelet), _obey(kubelet, lines, ended), ended.wait())]
        # A failure of one of them is a defect and must be seen.
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for task in done:
            task.result()
    return 0


def _read_lines(descriptor: int, loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str]) -> None:
    """Puts lines into the queue as they come, from a thread, for nothing else can read any kind of standard input."""
    # Unbuffered: a thread that waits inside a buffer would hold its lock when the interpreter ends.
    source = open(descriptor, "rb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the thread

    def read() -> None:
        # The program may end while a line is on its way; the input may be none.
        with contextlib.suppress(RuntimeError, OSError, concurrent.futures.CancelledError):
            while line := source.readline(_LONGEST_LINE):
                text = line.decode(errors="replace")
                asyncio.run_coroutine_threadsafe(lines.put(text), loop).result()

    threading.Thread(target=read, name="commands", daemon=True).start()


async def _narrate(kubelet: EmbeddedKubelet) -> None:
    """Says what plugins do."""
    told = 0
    before: Mapping[str, ResourceStatus] = {}
    while True:
        registrations = [record for record in kubelet.registrations if record.number > told]
        after = kubelet.resources()
        for line in (*map(describe_registration, registrations), *describe_changes(before, after)):
            _say(line)
        told = registrations[-1].number if registrations else told
        before = after
        await kubelet.until(_differs(told, before), timeout=None)


def _differs(told: int, before: Mapping[str, ResourceStatus]) -> Callable[[EmbeddedKubelet], bool]:
    def differs(kubelet: EmbeddedKubelet) -> bool:
        latest = kubelet.registrations[-1].number if kubelet.registrations else 0
        return latest > told or kubelet.resources() != before

    return differs


async def _obey(kubelet: EmbeddedKubelet, lines: asyncio.Queue[str], ended: asyncio.Event) -> None:
    """Carries out commands, one after the other."""
    commands: dict[str, Callable[[Sequence[str]], Awaitable[str]]] = {
        "pod": lambda words: _pod(kubelet, words),
        "delete": lambda words: _delete(kubelet, words),
        "status": lambda words: _status(kubelet, words),
        "restart": lambda words: _restart(kubelet, words),
        "help": _help,
    }
    while True:
        words = (await lines.get()).split()
        if not words:
            continue
        name, *arguments = words
        if name == "quit":
            ended.set()
            return
        if name not in commands:
            _say(f"no command {name[:40]!r}, expected one of {', '.join((*commands, 'quit'))}")
            continue
        try:
            _say(await commands[name](arguments))
        except (CommandError, AdmissionError, ContainerStartError, KubeletError, NoSuchPod) as error:
            _say(str(error))


async def _pod(kubelet: EmbeddedKubelet, words: Sequence[str]) -> str:
    pod = parse_pod(words)
    if any((running.namespace, running.name) == (pod.namespace, pod.name) for running in kubelet.pods()):
        raise CommandError(f"pod {pod.name} runs already; 'delete {pod.name}' ends it")
    running = await kubelet.run_pod(pod)
    lines = [f"pod {pod.name} admitted"]
    for name, container in running.containers.items():
        lines.extend(describe_container(container))
        lines.extend(
            f"  {resource}: no plugin has ever registered it, the container runs without"
            for resource in sorted(pod.containers[name].keys() - container.device_ids.keys())
        )
    return "\n".join(lines)


async def _delete(kubelet: EmbeddedKubelet, words: Sequence[str]) -> str:
    if len(words) != 1:
        raise CommandError("expected: delete NAME")
    kubelet.delete_pod(words[0])
    return f"pod {words[0]} deleted"


async def _status(kubelet: EmbeddedKubelet, _words: Sequence[str]) -> str:
    return kubelet.describe()


async def _restart(kubelet: EmbeddedKubelet, _words: Sequence[str]) -> str:
    await kubelet.restart()
    return "kubelet restarted"


async def _help(_words: Sequence[str]) -> str:
    return _HELP


def parse_pod(words: Sequence[str]) -> Pod:
    """`NAME RESOURCE=N [RESOURCE=N...]` as a pod of one container. Raises `CommandError`."""
    usage = "expected: pod NAME RESOURCE=N [RESOURCE=N...], as in: pod demo gpu.intel.com/i915=1"
    if len(words) < 2:
        raise CommandError(usage)
    wants: dict[str, int] = {}
    for word in words[1:]:
        resource, _, count = word.rpartition("=")
        if not resource or not count.isascii() or not count.isdigit() or len(count) > 9 or int(count) == 0:
            raise CommandError(f"{word!r} is not RESOURCE=N with N of 1 or more; {usage}")
        wants[resource] = int(count)
    return Pod(words[0], containers={"main": wants})


def describe_registration(record: Registration) -> str:
    """One line."""
    if not record.accepted:
        return f"registration of {record.resource} at {record.endpoint} refused: {record.outcome}"
    options = record.options._asdict() if record.options else {}
    wishes = ", ".join(name for name, value in options.items() if value) or "no options"
    return f"registered {record.resource} at {record.endpoint} ({wishes})"


def describe_changes(before: Mapping[str, ResourceStatus], after: Mapping[str, ResourceStatus]) -> Iterator[str]:
    """What differs between two looks at the resources, a line for each resource and each device."""
    for name in sorted(before.keys() | after.keys()):
        old = before.get(name, ResourceStatus(0, 0, {}))
        new = after.get(name, ResourceStatus(0, 0, {}))
        if (old.capacity, old.allocatable, old.devices) == (new.capacity, new.allocatable, new.devices):
            if name not in before:
                yield f"{name}: capacity 0, allocatable 0"
            continue
        yield f"{name}: capacity {new.capacity}, allocatable {new.allocatable}"
        for key in old.devices.keys() - new.devices.keys():
            yield f"  - {key}"
        for key, device in new.devices.items():
            if device != old.devices.get(key):
                sign = "~" if key in old.devices else "+"
                nodes = f" on NUMA node {','.join(map(str, device.nodes))}" if device.nodes else ""
                yield f"  {sign} {key} {device.health}{nodes}"


def describe_container(container: RunningContainer) -> Iterator[str]:
    """What the runtime would give to a container, a line for each thing."""
    for resource, ids in container.device_ids.items():
        yield f"  {resource}: {' '.join(ids)}"
    for device in container.devices:
        yield f"  device {device.host_path} as {device.container_path} ({device.permissions})"
    for mount in container.mounts:
        yield f"  mount {mount.host_path} at {mount.container_path} ({'ro' if mount.read_only else 'rw'})"
    for key, value in sorted(container.envs.items()):
        yield f"  env {key}={value}"
    for key, value in sorted(container.annotations.items()):
        yield f"  annotation {key}={value}"
    for name in container.cdi_devices:
        yield f"  CDI {name}"


def _say(text: str) -> None:
    # What plugins send is not to be trusted with the terminal.
    shown = "\n".join(
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line) for line in text.split("\n")
    )
    try:
        sys.stdout.write(f"{shown}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads any more, but plugins go on.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
