"""The ID of the container of this process: from the status of the own pod, or from the own cgroup.

The status is the first choice: it also says when the container has started, so that the runtime executes commands in
it. The cgroup needs no permission at the API server, but has the ID only with cgroups of version 1 or with the cgroup
namespace of the host. Formats: cgroups(7), and the cgroup drivers of containerd and CRI-O.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable
from datetime import datetime

import msgspec

from accelplane.apiserver import ApiError, ApiServer
from accelplane.host import Host, HostError
from accelplane.onloadworker.configuration import Configuration, WorkerError, split_container_id

log = logging.getLogger(__name__)

DEADLINE = 5.0
RUNTIMES = ("cri-o", "containerd")
CGROUP = "/proc/self/cgroup"

_FIRST_DELAY, _LAST_DELAY = 0.1, 1.0
_TOLERANCE = 2.0  # times in a status have a resolution of one second
# The last component: 64 digits, cri-containerd-ID.scope, crio-ID.scope, or kubepods-…:cri-containerd:ID.
_COMPONENT = re.compile(r"(?:.*[-:])?([0-9a-f]{64})(?:\.scope)?")


class _Running(msgspec.Struct, frozen=True, rename="camel"):
    """Exists while the container runs."""

    started_at: str | None = None


class _State(msgspec.Struct, frozen=True):
    running: _Running | None = None


class _ContainerStatus(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    ready: bool = False
    started: bool | None = None
    state: _State | None = None
    container_id: str = msgspec.field(name="containerID", default="")


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    container_statuses: tuple[_ContainerStatus, ...] | None = None


class Pod(msgspec.Struct, frozen=True):
    """The part of a Pod that the worker reads."""

    status: _PodStatus | None = None


def started_container(pod: Pod, name: str, since: float = 0.0) -> str:
    """Returns the `containerID` of the container if it is ready, started and running, or an empty text.

    A container that was started before `since` (Unix time) is a former one: the status is outdated.
    """
    for status in (pod.status and pod.status.container_statuses) or ():
        running = status.state.running if status.state is not None else None
        if status.name != name or not status.ready or not status.started or running is None:
            continue
        try:
            started = datetime.fromisoformat(running.started_at or "").timestamp()
        except (ValueError, OverflowError):
            return status.container_id
        return "" if started < since - _TOLERANCE else status.container_id
    return ""


def process_start(host: Host) -> float:
    """Returns the Unix time at which this process started, 0 if it is unknown. Facts: proc(5)."""
    try:
        ticks = int(host.text("/proc/self/stat").rpartition(")")[2].split()[19])
        uptime = float(host.text("/proc/uptime").split()[0])
    except (HostError, ValueError, IndexError):
        return 0.0
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def id_in_cgroup(text: str) -> str:
    """Returns the ID in the content of `/proc/self/cgroup`, or an empty text if it has none or several."""
    found: set[str] = set()
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        if match := _COMPONENT.fullmatch(path.rstrip("/").rpartition("/")[2]):
            found.add(match[1])
    return found.pop() if len(found) == 1 else ""


async def find_container_id(
    configuration: Configuration, host: Host, connect: Callable[[], ApiServer], *, deadline: float = DEADLINE
) -> str:
    """Returns the ID of the own container. `connect` may raise `ApiError`. Raises `WorkerError`."""
    try:
        runtime, id_ = split_container_id(await _wait_started(configuration, connect(), process_start(host), deadline))
    except ApiError as error:
        id_ = _own_cgroup(host)
        if not id_:
            raise WorkerError(
                f"ID of this container unknown: {error}; {CGROUP} has no container ID either. "
                "Permit the service account to get pods"
            ) from None
        log.warning("container ID %s is from %s: %s", id_, CGROUP, error)
        return id_
    if runtime not in RUNTIMES:
        log.warning("container runtime %s is untested, expected one of %s", ascii(runtime[:40]), ", ".join(RUNTIMES))
    return id_


async def _wait_started(configuration: Configuration, api: ApiServer, since: float, deadline: float) -> str:
    """Returns the `containerID`. Raises `ApiError` at the first failed request, and `WorkerError`."""
    path = f"/api/v1/namespaces/{configuration.namespace}/pods/{configuration.pod}"
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    delay = _FIRST_DELAY
    while True:
        pod = await api.get(path, Pod, deadline=deadline)
        if id_ := started_container(pod, configuration.container, since):
            return id_
        if loop.time() + delay >= end:
            raise WorkerError(
                f"pod {configuration.namespace}/{configuration.pod}: deadline exceeded: container "
                f"{configuration.container} is not ready, started and running within {deadline:g} s"
            )
        await asyncio.sleep(delay)
        delay = min(2 * delay, _LAST_DELAY)


def _own_cgroup(host: Host) -> str:
    try:
        return id_in_cgroup(host.text(CGROUP))
    except HostError as error:
        log.warning("%s", error)
        return ""
