"""What the contract tests ask of a kubelet, so that the same tests can run against more than one."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import pytest

from accelplane.kubelet.embedded import AdmissionError, ContainerStartError, EmbeddedKubelet, Pod, RunningContainer


class Counts(NamedTuple):
    """A resource in the node's status."""

    capacity: int
    allocatable: int


class PodRefused(Exception):
    """A pod was not admitted, or its container does not start; the text is the reason and the kubelet's sentence."""


class Kubelet(Protocol):
    """A kubelet whose device plugin directory is `<directory>/device-plugins`."""

    directory: str

    async def start(self) -> None:
        """Comes up as at a boot, or after `kill`."""
        ...

    async def kill(self) -> None:
        """Ends without a chance to clean up."""
        ...

    async def restart(self) -> None: ...

    def resources(self) -> Mapping[str, Counts]:
        """What the node's status shows, without resources that have fallen to 0 of 0."""
        ...

    async def until(self, condition: Callable[[Mapping[str, Counts]], bool], seconds: float = 10) -> None:
        """Returns when the condition holds for `resources()`. Raises `TimeoutError`."""
        ...

    async def run_pod(self, name: str, wants: Mapping[str, int]) -> RunningContainer:
        """Runs a pod of one container that asks for that. Raises `PodRefused`."""
        ...

    async def delete_pod(self, name: str) -> None: ...


def embedded_only(reason: str) -> pytest.MarkDecorator:
    """For a test that cannot be had from a real kubelet; `reason` says why."""
    assert reason
    return pytest.mark.parametrize("idle_kubelet", ["embedded"], indirect=True)


class Embedded:
    """The embedded kubelet."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.inner = EmbeddedKubelet(directory, connect_timeout=2.0, call_timeout=5.0, seed=1)

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
            raise PodRefused(f"{error.reason}: {error.message}") from error
        except ContainerStartError as error:
            raise PodRefused(str(error)) from error
        return pod.containers["main"]

    async def delete_pod(self, name: str) -> None:
        self.inner.delete_pod(name)
