"""The interface of contract tests to a kubelet, so that the same tests run against several kubelets."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import pytest

from accelplane.kubelet.embedded import (
    BEHAVIOURS,
    AdmissionError,
    ContainerStartError,
    EmbeddedKubelet,
    Pod,
    RunningContainer,
)


class Counts(NamedTuple):
    """A resource in the node's status."""

    capacity: int
    allocatable: int


class PodRejected(Exception):
    """A pod was not admitted, or its container does not start; the message has reason and message of the kubelet."""


class Kubelet(Protocol):
    """A kubelet whose device plugin directory is `<directory>/device-plugins`. `behaviour` is one of `BEHAVIOURS`.

    `deletes_files`: at its start it deletes all files of that directory, not only sockets.
    """

    directory: str
    behaviour: str
    deletes_files: bool

    async def start(self) -> None:
        """Starts, also after `kill`."""
        ...

    async def kill(self) -> None:
        """Ends without cleanup."""
        ...

    async def restart(self) -> None: ...

    def resources(self) -> Mapping[str, Counts]:
        """The resources in the node's status, without those of capacity 0."""
        ...

    async def until(self, condition: Callable[[Mapping[str, Counts]], bool], seconds: float = 10) -> None:
        """Returns when the condition holds for `resources()`. Raises `TimeoutError`."""
        ...

    async def run_pod(self, name: str, wants: Mapping[str, int]) -> RunningContainer:
        """Runs a pod of one container with these requests. Raises `PodRejected`."""
        ...

    async def delete_pod(self, name: str) -> None: ...


EMBEDDED = tuple(f"embedded-{behaviour}" for behaviour in BEHAVIOURS)


def embedded_only(reason: str) -> pytest.MarkDecorator:
    """Marks a test that cannot run with a real kubelet because of `reason`."""
    assert reason
    return pytest.mark.parametrize("idle_kubelet", EMBEDDED[-1:], indirect=True)


class Embedded:
    """The embedded kubelet."""

    def __init__(self, directory: str, behaviour: str = BEHAVIOURS[-1]) -> None:
        self.directory = directory
        self.behaviour = behaviour
        self.deletes_files = False
        self.inner = EmbeddedKubelet(directory, connect_timeout=2.0, call_timeout=5.0, seed=1, behaviour=behaviour)

    async def start(self) -> None:
        await self.inner.start()

    async def kill(self) -> None:
        await self.inner.stop()

    async def restart(self) -> None:
        await self.inner.restart()

    def resources(self) -> Mapping[str, Counts]:
        return {
            name: Counts(status.capacity, status.allocatable)
            for name, status in self.inner.resources().items()
            if status.capacity
        }

    async def until(self, condition: Callable[[Mapping[str, Counts]], bool], seconds: float = 10) -> None:
        await self.inner.until(lambda _: condition(self.resources()), seconds)

    async def run_pod(self, name: str, wants: Mapping[str, int]) -> RunningContainer:
        try:
            pod = await self.inner.run_pod(Pod(name, containers={"main": wants}))
        except AdmissionError as error:
            raise PodRejected(f"{error.reason}: {error.message}") from error
        except ContainerStartError as error:
            raise PodRejected(str(error)) from error
        return pod.containers["main"]

    async def delete_pod(self, name: str) -> None:
        self.inner.delete_pod(name)
