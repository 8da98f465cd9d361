"""`accelplane kubelet`: runs the embedded kubelet, to develop a plugin without a cluster.

It prints registrations and device lists of plugins, and reads one command per line from standard input. A failing
command prints a message and never ends the program.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from accelplane.cli.untilsignal import until_signal
from accelplane.kubelet import embedded
from accelplane.kubelet.embedded import EmbeddedKubelet, Pod, Registration, ResourceStatus, RunningContainer

_HELP = """\
pod NAME RESOURCE=N [RESOURCE=N...]   admit a pod with one container and print the allocation of the container
delete NAME                           delete a pod
status                                print resources, devices and allocations
restart                               restart the kubelet: it deletes all sockets, plugins must register again
help                                  print this text
quit                                  exit"""


_MAX_LINE_LENGTH = 4096
_KUBELET_ERRORS = (embedded.AdmissionError, embedded.ContainerStartError, embedded.KubeletError, embedded.NoSuchPod)


# What the kubelet of a node makes in its directory, and this one does not.
_NODE_KUBELET_FILES = ("cpu_manager_state", "memory_manager_state", "pki")


class CommandError(Exception):
    """An invalid command. The message has the expected syntax."""


def run(kubelet_dir: str, topology_policy: str, numa_nodes: int, behaviour: str) -> int:
    """Runs until `quit`, SIGTERM or SIGINT, also after the end of the input. Returns the exit code."""
    # It would remove the sockets of the node's plugins and replace the checkpoint, also while that kubelet is stopped.
    found = next((name for name in _NODE_KUBELET_FILES if os.path.lexists(os.path.join(kubelet_dir, name))), "")
    if found:
        sys.stderr.write(
            f"accelplane kubelet: --kubelet-dir {kubelet_dir}: found {found} of a node's kubelet, expected a directory "
            "for tests; use another directory\n"
        )
        return 1
    try:
        kubelet = EmbeddedKubelet(
            kubelet_dir, topology_policy=topology_policy, numa_nodes=numa_nodes, behaviour=behaviour
        )
        return asyncio.run(_run(kubelet))
    except (embedded.KubeletError, ValueError) as error:
        sys.stderr.write(f"accelplane kubelet: {error}\n")
        return 1


async def _run(kubelet: EmbeddedKubelet) -> int:
    lines: asyncio.Queue[str] = asyncio.Queue(maxsize=16)
    async with kubelet:
        _print(f"kubelet started; plugins register at {kubelet.plugin_directory}/kubelet.sock ('help' lists commands)")
        if sys.__stdin__ is not None:
            _read_lines(sys.__stdin__.fileno(), asyncio.get_running_loop(), lines)
        await until_signal(_print_events(kubelet), _run_commands(kubelet, lines))
    return 0


def _read_lines(descriptor: int, loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str]) -> None:
    """Puts input lines into the queue, from a thread: only blocking reads work for every kind of standard input."""
    # Unbuffered: a thread that blocks in a buffered read would hold the buffer's lock at interpreter shutdown.
    source = open(descriptor, "rb", buffering=0, closefd=False)  # noqa: SIM115 - the thread owns it

    def read() -> None:
        # The loop may be closed while a line is being passed, and the input may not be readable.
        with contextlib.suppress(RuntimeError, OSError, concurrent.futures.CancelledError):
            while line := source.readline(_MAX_LINE_LENGTH):
                text = line.decode(errors="replace")
                asyncio.run_coroutine_threadsafe(lines.put(text), loop).result()

    threading.Thread(target=read, name="commands", daemon=True).start()


async def _print_events(kubelet: EmbeddedKubelet) -> None:
    printed = 0
    before: Mapping[str, ResourceStatus] = {}
    while True:
        registrations = [record for record in kubelet.registrations if record.number > printed]
        after = kubelet.resources()
        for line in (*map(describe_registration, registrations), *describe_changes(before, after)):
            _print(line)
        printed = registrations[-1].number if registrations else printed
        before = after
        await kubelet.until(partial(_differs, printed, before), timeout=None)


def _differs(printed: int, before: Mapping[str, ResourceStatus], kubelet: EmbeddedKubelet) -> bool:
    latest = kubelet.registrations[-1].number if kubelet.registrations else 0
    return latest > printed or kubelet.resources() != before


async def _run_commands(kubelet: EmbeddedKubelet, lines: asyncio.Queue[str]) -> None:
    """Runs commands one after another until `quit`."""
    while True:
        words = (await lines.get()).split()
        if not words:
            continue
        if words[0] == "quit":
            return
        try:
            _print(await _execute(kubelet, words))
        except (CommandError, *_KUBELET_ERRORS) as error:
            _print(str(error))


async def _execute(kubelet: EmbeddedKubelet, words: Sequence[str]) -> str:
    """Runs one command and returns its output. Raises `CommandError` and the errors of the kubelet."""
    match words:
        case ["pod", *arguments]:
            return await _pod(kubelet, arguments)
        case ["delete", name]:
            kubelet.delete_pod(name)
            return f"pod {name} deleted"
        case ["delete", *_]:
            raise CommandError("expected: delete NAME")
        case ["status", *_]:
            return kubelet.describe()
        case ["restart", *_]:
            await kubelet.restart()
            return "kubelet restarted"
        case ["help", *_]:
            return _HELP
        case _:
            names = "pod, delete, status, restart, help, quit"
            raise CommandError(f"unknown command {words[0][:40]!r}, expected one of {names}")


async def _pod(kubelet: EmbeddedKubelet, words: Sequence[str]) -> str:
    pod = parse_pod(words)
    if any((running.namespace, running.name) == (pod.namespace, pod.name) for running in kubelet.pods()):
        raise CommandError(f"pod {pod.name} already exists; delete it with 'delete {pod.name}'")
    running = await kubelet.run_pod(pod)
    lines = [f"pod {pod.name} admitted"]
    for name, container in running.containers.items():
        lines.extend(describe_container(container))
        lines.extend(
            f"  {resource}: never registered, the container runs without it"
            for resource in sorted(pod.containers[name].keys() - container.device_ids.keys())
        )
    return "\n".join(lines)


def parse_pod(words: Sequence[str]) -> Pod:
    """Parses `NAME RESOURCE=N [RESOURCE=N...]` to a pod with one container. Raises `CommandError`."""
    usage = "expected: pod NAME RESOURCE=N [RESOURCE=N...], for example: pod demo gpu.intel.com/i915=1"
    if len(words) < 2:
        raise CommandError(usage)
    requests: dict[str, int] = {}
    for word in words[1:]:
        resource, _, count = word.rpartition("=")
        if not resource or not count.isascii() or not count.isdigit() or len(count) > 9 or int(count) == 0:
            raise CommandError(f"found {word!r}, expected RESOURCE=N with N of at least 1; {usage}")
        requests[resource] = int(count)
    return Pod(words[0], containers={"main": requests})


def describe_registration(record: Registration) -> str:
    if not record.accepted:
        return f"rejected registration of {record.resource} at {record.endpoint}: {record.outcome}"
    options = record.options._asdict() if record.options else {}
    enabled = ", ".join(name for name, value in options.items() if value) or "no options"
    return f"registered {record.resource} at {record.endpoint} ({enabled})"


def describe_changes(before: Mapping[str, ResourceStatus], after: Mapping[str, ResourceStatus]) -> Iterator[str]:
    """Yields one line per changed resource and per changed device."""
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
    """Yields one line per item that the runtime would pass to the container."""
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


def _print(text: str) -> None:
    # Plugins could send terminal escape sequences.
    shown = "\n".join(
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line) for line in text.split("\n")
    )
    try:
        sys.stdout.write(f"{shown}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The output is closed, but plugins still use the kubelet.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
