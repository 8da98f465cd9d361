"""The allocator of `-resource-manager` without an agent: chosen devices, assignments, pods that cannot be listed."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import pytest
from podservers import I915, MASK, Object, gpu_pod

from accelplane.devices import UNHEALTHY, Device, DeviceNode
from accelplane.plugins.base import PodsError
from accelplane.plugins.gpu.podallocator import FractionalAllocator

T = TypeVar("T")


class Pods:
    """The pods of a node in memory."""

    def __init__(self, *pods: Object, holders: Mapping[tuple[str, str], int] | None = None) -> None:
        self.listed = list(pods)
        self.held = dict(holders or {(each["metadata"]["namespace"], each["metadata"]["name"]): 0 for each in pods})
        self.problem = ""
        self.hang = False
        self.before_answer: Callable[[], object] = lambda: None

    async def pods(self, project: Callable[[memoryview], T | None]) -> list[T]:
        if self.hang:
            await asyncio.Event().wait()
        if self.problem:
            raise PodsError(self.problem)
        found = [project(memoryview(msgspec.json.encode(each))) for each in self.listed]
        self.before_answer()
        return [each for each in found if each is not None]

    async def holders(self, resources: Collection[str]) -> Mapping[tuple[str, str], int]:
        assert I915 in resources
        return self.held


def listed_pod(*ids: str, **fields: Any) -> Callable[[], Mapping[str, Device]]:
    devices = {id_: Device(resource="i915", id=id_, nodes=[DeviceNode(f"/dev/dri/{id_}")], **fields) for id_ in ids}
    return lambda: devices


def allocator(pods: Pods, **options: float) -> FractionalAllocator:
    return FractionalAllocator(pods, lambda: 2, **options)


ANNOTATED = {"gas_container_cards": "card1", "gas_container_tiles": "card1:gt1"}
OFFER = ("card0-0", "card1-0")


async def test_the_mask_is_that_of_the_preferred_allocation(caplog: pytest.LogCaptureFixture) -> None:
    one = allocator(Pods(gpu_pod("a", **ANNOTATED)))
    assert await one.preferred_allocation(OFFER, (), 1) == ["card1-0"]
    allocation = await one.allocate(["card1-0"], listed_pod(*OFFER, health=UNHEALTHY, envs={"OTHER": "1"}))
    assert allocation is not None
    assert allocation.envs == {"OTHER": "1", MASK: "1"}
    assert "other devices" not in caplog.text
    allocation = await one.allocate(["card0-0"], listed_pod(*OFFER))
    assert allocation is not None
    assert allocation.envs == {MASK: "1"}
    assert "pod default/a: the kubelet gives other devices than those chosen" in caplog.text


async def test_devices_that_are_not_listed_get_the_default_method() -> None:
    one = allocator(Pods(gpu_pod("a", **ANNOTATED)))
    await one.preferred_allocation(OFFER, (), 1)
    assert await one.allocate(["card1-0"], listed_pod("card0-0")) is None


async def test_after_a_restart_of_the_plugin_the_default_method_applies(caplog: pytest.LogCaptureFixture) -> None:
    pods = Pods(gpu_pod("a", **ANNOTATED))
    await allocator(pods).preferred_allocation(OFFER, (), 1)
    assert await allocator(pods).allocate(["card1-0"], listed_pod(*OFFER)) is None
    assert "no devices were chosen for container 0, using the default method" in caplog.text


async def test_a_new_pod_of_the_same_name_does_not_inherit_an_assignment() -> None:
    pods = Pods(gpu_pod("a", **ANNOTATED))
    one = allocator(pods)
    await one.preferred_allocation(OFFER, (), 1)
    pods.listed = [gpu_pod("a", uid="another", **ANNOTATED)]
    assert await one.allocate(["card1-0"], listed_pod(*OFFER)) is None


async def test_an_annotation_that_changes_between_the_calls_has_no_effect() -> None:
    pods = Pods(gpu_pod("a", **ANNOTATED))
    one = allocator(pods)
    await one.preferred_allocation(OFFER, (), 1)
    pods.listed = [gpu_pod("a", gas_container_cards="card0", gas_container_tiles="card0:gt0")]
    allocation = await one.allocate(["card1-0"], listed_pod(*OFFER))
    assert allocation is not None
    assert allocation.envs == {MASK: "1"}


async def test_concurrent_calls_are_answered_for_the_same_container() -> None:
    """The kubelet admits one pod at a time; a call names no pod."""
    pods = Pods(gpu_pod("a", gas_ts="1", **ANNOTATED), gpu_pod("b", gas_ts="2", gas_container_cards="card0"))
    one = allocator(pods)
    assert await asyncio.gather(*(one.preferred_allocation(OFFER, (), 1) for _ in range(2))) == [
        ["card1-0"],
        ["card1-0"],
    ]
    first, second = await asyncio.gather(*(one.allocate(["card1-0"], listed_pod(*OFFER)) for _ in range(2)))
    assert first == second is not None
    pods.held["default", "a"] = 1
    assert await one.preferred_allocation(OFFER, (), 1) == ["card0-0"]


async def test_a_source_that_does_not_answer_does_not_delay_a_call_beyond_its_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pods = Pods(gpu_pod("a", **ANNOTATED))
    pods.hang = True
    one = allocator(pods, deadline=0.05)
    assert await one.preferred_allocation(OFFER, (), 1) == ()
    assert await one.allocate(["card1-0"], listed_pod(*OFFER)) is None
    assert "no answer of the kubelet and the API server within 0.05 s" in caplog.text


async def test_a_source_that_fails_leaves_the_default_method(caplog: pytest.LogCaptureFixture) -> None:
    pods = Pods(gpu_pod("a", **ANNOTATED))
    pods.problem = "GET /api/v1/pods: forbidden"
    one = allocator(pods)
    assert await one.preferred_allocation(OFFER, (), 1) == ()
    assert await one.allocate(["card1-0"], listed_pod(*OFFER)) is None
    assert "resource manager: GET /api/v1/pods: forbidden; using the default method" in caplog.text


async def test_assignments_are_forgotten_when_their_pods_have_ended() -> None:
    pods = Pods(gpu_pod("a", **ANNOTATED))
    one = allocator(pods)

    async def cached() -> bool:
        return await one.allocate(["card1-0"], listed_pod(*OFFER)) is not None

    await one.preferred_allocation(OFFER, (), 1)
    pods.problem = "unreadable"
    await one.forget_ended()
    pods.problem = ""
    assert await cached()
    pods.listed = [gpu_pod("a", phase="Running", **ANNOTATED)]
    await one.forget_ended()
    pods.listed = [gpu_pod("a", **ANNOTATED)]
    assert await cached()
    pods.listed = [gpu_pod("a", phase="Failed", **ANNOTATED)]
    await one.forget_ended()
    pods.listed = [gpu_pod("a", **ANNOTATED)]
    assert not await cached()


@pytest.mark.untraced
async def test_the_number_of_assignments_is_limited() -> None:
    pods = Pods(gpu_pod("a", **ANNOTATED))
    one = allocator(pods)
    await one.preferred_allocation(OFFER, (), 1)
    for number in range(4096):
        pods.listed = [gpu_pod("a", uid=f"uid {number}", **ANNOTATED)]
        await one.preferred_allocation(OFFER, (), 1)
    assert await one.allocate(["card1-0"], listed_pod(*OFFER)) is not None
    pods.listed = [gpu_pod("a", **ANNOTATED)]
    assert await one.allocate(["card1-0"], listed_pod(*OFFER)) is None


async def test_an_assignment_that_is_made_during_the_cleanup_stays() -> None:
    pods = Pods(gpu_pod("a", **ANNOTATED))
    one = allocator(pods)
    listed_now, pods.listed = pods.listed, []

    def bind() -> None:
        """The pod arrives after the cleanup has read the pods."""
        pods.listed, pods.before_answer = listed_now, lambda: None
        calls.append(asyncio.create_task(one.preferred_allocation(OFFER, (), 1)))

    calls: list[asyncio.Task[Sequence[str]]] = []
    pods.before_answer = bind
    await one.forget_ended()
    assert [await call for call in calls] == [["card1-0"]]
    assert await one.allocate(["card1-0"], listed_pod(*OFFER)) is not None
