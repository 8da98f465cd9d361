"""Allocation policies: the choice for one request, and the spread over many requests as the kubelet sends them."""

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from thoroughness import examples

from accelplane.devices import UNHEALTHY, Device, natural
from accelplane.kubelet.server import AllocationError
from accelplane.node.allocations import AllocationReader, CallRecord
from accelplane.node.allocator import ResourceAllocator
from accelplane.node.context import PluginContext
from accelplane.node.publishers.cdi import CdiPublisher
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.plugins.idxd import DsaPlugin, IaaPlugin
from accelplane.plugins.npu import NpuConfig, NpuPlugin
from accelplane.plugins.policies import POLICIES, preferred_ids
from accelplane.plugins.qat import QatConfig, QatPlugin


def devices(*ids: str, numa: dict[str, int] | None = None) -> list[Device]:
    return [
        Device(
            resource="i915",
            id=key,
            unit=(unit := key.partition("-")[0]),
            topology=(numa[unit],) if numa and unit in numa else None,
        )
        for key in ids
    ]


def shares(counts: dict[str, int]) -> list[str]:
    return [f"{card}-{number}" for card, count in counts.items() for number in range(count)]


# One request


@pytest.mark.parametrize(
    ("policy", "available", "size", "expected"),
    [
        ("none", {"card0": 2, "card1": 2}, 2, ["card0-0", "card1-0"]),
        ("none", {"card0": 2, "card1": 2}, 3, ["card0-0", "card1-0", "card0-1"]),
        ("none", {"card0": 3, "card1": 3}, 4, ["card0-0", "card1-0", "card0-1", "card1-1"]),
        ("none", {"card2": 1, "card10": 1}, 1, ["card2-0"]),
        ("none", {"card0": 3}, 3, ["card0-0", "card0-1", "card0-2"]),
        ("balanced", {"card0": 1, "card1": 3, "card2": 2}, 1, ["card1-0"]),
        ("balanced", {"card0": 1, "card1": 3, "card2": 2}, 3, ["card1-0", "card1-1", "card2-0"]),
        ("balanced", {"card10": 2, "card2": 2}, 1, ["card2-0"]),
        ("packed", {"card0": 1, "card1": 3}, 3, ["card0-0", "card1-0", "card1-1"]),
        ("packed", {"card2": 11, "card10": 1}, 12, [*shares({"card2": 11}), "card10-0"]),
        ("none", {"card0": 1}, 0, []),
    ],
)
def test_pull_policy_is_always_or_if_not_present(
    policy: str, available: dict[str, int], size: int, expected: list[str]
) -> None:
    assert preferred_ids(policy, devices(*shares(available)), [], size, {}) == expected


@pytest.mark.parametrize(
    ("policy", "in_use", "size", "expected"),
    [
        ("none", {"card0": 2, "card1": 1, "card2": 2}, 1, ["card1-0"]),
        ("none", {"card0": 2, "card1": 1, "card2": 0}, 2, ["card2-0", "card1-0"]),
        ("none", {"card0": 1, "card1": 2}, 4, ["card2-0", "card0-0", "card1-0", "card2-1"]),
        ("balanced", {"card0": 1, "card1": 0}, 1, ["card0-0"]),
        ("packed", {"card0": 1, "card1": 0}, 2, ["card0-0", "card0-1"]),
    ],
)
def test_policy_none_prefers_units_that_are_least_in_use(
    policy: str, in_use: dict[str, int], size: int, expected: list[str]
) -> None:
    available = devices(*shares({"card0": 3, "card1": 3, "card2": 3}))
    assert preferred_ids(policy, available, [], size, in_use) == expected


@pytest.mark.parametrize(
    ("policy", "must", "size", "expected"),
    [
        ("none", ["card1-1"], 3, ["card1-1", "card0-0", "card2-0"]),
        ("balanced", ["card0-0"], 2, ["card0-0", "card1-0"]),
        ("packed", ["card1-1"], 3, ["card1-1", "card1-0", "card1-2"]),
        ("packed", ["card1-1", "card0-2"], 1, ["card1-1", "card0-2"]),
    ],
)
def test_required_ids_come_first_and_count_as_chosen(
    policy: str, must: list[str], size: int, expected: list[str]
) -> None:
    available = devices(*shares({"card0": 3, "card1": 3, "card2": 3}))
    assert preferred_ids(policy, available, devices(*must), size, {}) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_units_on_a_chosen_numa_node_are_preferred(policy: str) -> None:
    numa = {"card0": 0, "card1": 1, "card2": 0, "card3": 1}
    available = devices("card0-0", "card1-0", "card2-0", "card3-0", numa=numa)
    assert preferred_ids(policy, available, devices("card0-0", numa=numa), 2, {}) == ["card0-0", "card2-0"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_for_more_than_the_available_ids_fails(policy: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 the whole text is compared
        preferred_ids(policy, devices("card0-0", "card1-0"), [], 3, {})
    assert str(refusal.value) == "AllocationSize (3) is greater than the number of available device IDs (2)"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_monitoring_device_is_chosen(policy: str) -> None:
    assert preferred_ids(policy, [Device(resource="monitoring", id="all", topology=None)], [], 1, {}) == ["all"]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_id_offered_twice_is_chosen_once(policy: str) -> None:
    assert preferred_ids(policy, devices("card0-0", "card0-0"), [], 2, {}) == ["card0-0"]


Request = tuple[str, list[Device], list[Device], int, dict[str, int]]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    cards = draw(st.dictionaries(st.integers(0, 20).map("card{}".format), st.integers(1, 12), min_size=1, max_size=6))
    numa = {card: draw(st.integers(0, 2)) for card in cards}
    available = devices(*shares(cards), numa=numa)
    must = draw(st.lists(st.sampled_from(available), unique_by=lambda device: device.id, max_size=3))
    size = draw(st.integers(len(must), len(available)))
    in_use = draw(st.dictionaries(st.sampled_from([*cards, "card99"]), st.integers(1, 12)))
    return draw(st.sampled_from(POLICIES)), available, must, size, in_use


def width(ids: Iterable[str]) -> int:
    return len({key.partition("-")[0] for key in ids})


@given(requests(), st.randoms(use_true_random=False))
def test_a_preferred_allocation_is_valid_and_independent_of_the_order_of_the_offer(
    request: Request, order: random.Random
) -> None:
    policy, available, must, size, in_use = request
    answer = preferred_ids(policy, available, must, size, in_use)
    assert len(set(answer)) == len(answer) == size
    assert set(answer) <= {device.id for device in available}
    assert answer[: len(must)] == [device.id for device in must]
    shuffled = order.sample(available, len(available))
    assert answer == preferred_ids(policy, shuffled, must, size, in_use)
    assert answer == preferred_ids(policy, sorted(available, key=lambda device: natural(device.id)), must, size, in_use)


@given(requests())
def test_policy_none_uses_at_least_as_many_units_as_any_other_policy(request: Request) -> None:
    _policy, available, must, size, in_use = request
    widths = {policy: width(preferred_ids(policy, available, must, size, in_use)) for policy in POLICIES}
    assert widths["none"] == max(widths.values())


# Many requests through the allocator, offered in random order as the kubelet does


class Node:
    """A resource whose IDs are offered in random order; counts the allocated IDs of each unit."""

    def __init__(self, plugin: Plugin[Any], listed: Iterable[Device], order: random.Random) -> None:
        settings = Settings(kubelet_dir="/nonexistent", cdi_dir="/nonexistent")
        context = PluginContext("gadgets", plugin, settings)
        cdi = CdiPublisher(context, AllocationReader(settings))
        self.devices = {device.id: device for device in sorted(listed, key=lambda device: natural(device.id))}
        self.allocator = ResourceAllocator("example.com/gadget", context, cdi, CallRecord(), lambda: self.devices)
        self.allocated: set[str] = set()
        self._order = order

    @property
    def offer(self) -> list[str]:
        free = [key for key, device in self.devices.items() if device.healthy and key not in self.allocated]
        return self._order.sample(free, len(free))

    @property
    def use(self) -> dict[str, int]:
        counts = Counter(self.devices[key].unit for key in self.allocated)
        return {unit: counts[unit] for unit in dict.fromkeys(device.unit for device in self.devices.values())}

    async def admit(self, size: int = 1, must: Iterable[str] = ()) -> list[str]:
        answer = list(await self.allocator.preferred_allocation(self.offer, list(must), size))
        assert len(answer) == size
        self.allocated.update(answer)
        return answer


def seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - an order that a failed test repeats


def shared(resource: str, units: Iterable[str], count: int) -> list[Device]:
    return [device for unit in units for device in Device(resource=resource, id=unit, topology=None).shared(count)]


CARDS = shared("i915", ("card0", "card1", "card2", "card3"), 10)
NPUS = shared("accel", ("accel0", "accel1", "accel2", "accel3"), 10)
QUEUES = [
    Device(resource="wq-user-shared", id=f"wq-user-shared-{queue}-{number}", unit=queue)
    for queue in ("wq0.0", "wq0.1", "wq0.2", "wq0.3")
    for number in range(10)
]
VFS = [
    Device(resource="cy", id=f"0000:{bus}:00.{function}", unit=f"0000:{bus}:00.0")
    for bus in ("6b", "70", "75", "7a")
    for function in range(1, 8)
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("plugin", "listed", "containers", "expected"),
    [
        (GpuPlugin(), CARDS, 8, [2, 2, 2, 2]),
        (GpuPlugin(GpuConfig(allocation_policy="balanced")), CARDS, 8, [2, 2, 2, 2]),
        (GpuPlugin(GpuConfig(allocation_policy="packed")), CARDS, 12, [10, 2, 0, 0]),
        (NpuPlugin(), NPUS, 10, [3, 3, 2, 2]),
        (NpuPlugin(NpuConfig(allocation_policy="packed")), NPUS, 12, [10, 2, 0, 0]),
        (QatPlugin(), VFS, 16, [4, 4, 4, 4]),
        (QatPlugin(QatConfig(allocation_policy="balanced")), VFS, 16, [4, 4, 4, 4]),
        (QatPlugin(QatConfig(allocation_policy="packed")), VFS, 16, [7, 7, 2, 0]),
        (DsaPlugin(), QUEUES, 10, [3, 3, 2, 2]),
        (IaaPlugin(), QUEUES, 10, [3, 3, 2, 2]),
    ],
)
async def test_containers_that_request_one_device_are_spread_by_the_policy(
    plugin: Plugin[Any], listed: list[Device], containers: int, expected: list[int], seed: int
) -> None:
    node = Node(plugin, listed, seeded(seed))
    for _ in range(containers):
        await node.admit()
    assert list(node.use.values()) == expected


@pytest.mark.parametrize("plugin", [DsaPlugin(), IaaPlugin()])
async def test_dedicated_queues_are_taken_from_different_devices(plugin: Plugin[Any]) -> None:
    queues = [f"wq{device}.{queue}" for device in range(4) for queue in range(4)]
    listed = [Device(resource="wq-user-dedicated", id=f"wq-user-dedicated-{key}-0", unit=key) for key in queues]
    node = Node(plugin, listed, seeded(1))
    order = [(await node.admit())[0].split("-")[3] for _ in queues]
    for start in range(0, len(order), 4):
        assert {queue.partition(".")[0] for queue in order[start : start + 4]} == {"wq0", "wq1", "wq2", "wq3"}


async def test_ids_of_unhealthy_devices_do_not_count_as_in_use() -> None:
    unhealthy = [Device(resource="i915", id=f"card0-{number}", unit="card0", health=UNHEALTHY) for number in range(5)]
    node = Node(GpuPlugin(), [*unhealthy, *devices(*shares({"card1": 5, "card2": 5}))], seeded(1))
    for _ in range(4):
        await node.admit()
    assert node.use == {"card0": 0, "card1": 2, "card2": 2}


async def test_released_devices_are_used_again_first() -> None:
    node = Node(GpuPlugin(), CARDS, seeded(1))
    for _ in range(8):
        await node.admit()
    node.allocated -= {key for key in node.allocated if key.startswith("card2-")}
    assert [(await node.admit())[0].partition("-")[0] for _ in range(2)] == ["card2", "card2"]


class Histories(RuleBasedStateMachine):
    """Containers of any size start and end on units of different sizes."""

    @initialize(
        counts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
        policy=st.sampled_from(POLICIES),
        order=st.randoms(use_true_random=False),
    )
    def start(self, counts: list[int], policy: str, order: random.Random) -> None:
        listed = devices(*shares({f"card{number}": count for number, count in enumerate(counts)}))
        self.node = Node(GpuPlugin(GpuConfig(allocation_policy=policy)), listed, order)
        self.policy = policy
        self.equal = len(set(counts)) == 1
        self.only_single = True

    def admitted(self, size: int, must: list[str]) -> list[str]:
        offer = set(self.node.offer)
        before = self.node.use
        answer = run(self.node.admit(size, must))
        assert set(answer) <= offer
        assert set(must) <= set(answer)
        assert len(set(answer)) == size
        if size == 1 and not must and self.policy == "none":
            free = {key.partition("-")[0] for key in offer}
            assert before[answer[0].partition("-")[0]] == min(before[unit] for unit in free)
        return answer

    @precondition(lambda self: self.node.offer)
    @rule()
    def admit_one(self) -> None:
        self.admitted(1, [])
        if self.policy != "packed" and self.equal and self.only_single:
            use = self.node.use.values()
            assert max(use) - min(use) <= 1

    @precondition(lambda self: self.node.offer)
    @rule(data=st.data())
    def admit_several(self, data: st.DataObject) -> None:
        self.only_single = False
        offer = sorted(self.node.offer)
        must = data.draw(st.lists(st.sampled_from(offer), unique=True, max_size=2))
        self.admitted(data.draw(st.integers(max(1, len(must)), len(offer))), must)

    @precondition(lambda self: self.node.allocated)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.only_single = False
        self.node.allocated.remove(data.draw(st.sampled_from(sorted(self.node.allocated))))

    @rule(excess=st.integers(1, 3))
    def request_too_many(self, excess: int) -> None:
        with pytest.raises(AllocationError, match="AllocationSize"):
            run(self.node.admit(len(self.node.offer) + excess))


def run(coroutine: Any) -> Any:
    """Runs a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
