"""Which ids a container gets best."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.devices import Device, natural
from accelplane.plugins.policies import POLICIES, preferred


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


@pytest.mark.parametrize(
    ("policy", "free", "size", "expected"),
    [
        ("none", {"card0": 2, "card1": 2}, 2, ["card0-0", "card1-0"]),
        ("none", {"card0": 2, "card1": 2}, 3, ["card0-0", "card1-0", "card0-1"]),
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
def test_policy(policy: str, free: dict[str, int], size: int, expected: list[str]) -> None:
    assert preferred(policy, devices(*shares(free)), [], size) == expected


@pytest.mark.parametrize(
    ("policy", "must", "size", "expected"),
    [
        ("none", ["card1-1"], 3, ["card1-1", "card0-0", "card2-0"]),
        ("balanced", ["card0-0"], 2, ["card0-0", "card1-0"]),
        ("packed", ["card1-1"], 3, ["card1-1", "card1-0", "card1-2"]),
        ("packed", ["card1-1", "card0-2"], 1, ["card1-1", "card0-2"]),
    ],
)
def test_what_must_be_included_comes_first_and_counts_as_taken(
    policy: str, must: list[str], size: int, expected: list[str]
) -> None:
    free = devices(*shares({"card0": 3, "card1": 3, "card2": 3}))
    assert preferred(policy, free, devices(*must), size) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_of_equal_cards_the_one_on_the_same_numa_node_is_better(policy: str) -> None:
    numa = {"card0": 0, "card1": 1, "card2": 0, "card3": 1}
    free = devices("card1-0", "card2-0", "card3-0", numa=numa)
    assert preferred(policy, [*devices("card0-0", numa=numa), *free], devices("card0-0", numa=numa), 2) == [
        "card0-0",
        "card2-0",
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_more_than_there_is_cannot_be_preferred(policy: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 the whole text is compared
        preferred(policy, devices("card0-0", "card1-0"), [], 3)
    assert str(refusal.value) == "AllocationSize (3) is greater than the number of available device IDs (2)"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_monitoring_device_is_preferred_to_nothing(policy: str) -> None:
    assert preferred(policy, [Device(resource="monitoring", id="all", topology=None)], [], 1) == ["all"]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_id_that_is_offered_twice_is_preferred_once(policy: str) -> None:
    assert preferred(policy, devices("card0-0", "card0-0"), [], 2) == ["card0-0"]


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, list[Device], list[Device], int]:
    cards = draw(st.dictionaries(st.integers(0, 20).map("card{}".format), st.integers(1, 12), min_size=1, max_size=6))
    numa = {card: draw(st.integers(0, 2)) for card in cards}
    free = devices(*shares(cards), numa=numa)
    must = draw(st.lists(st.sampled_from(free), unique_by=lambda device: device.id, max_size=3))
    size = draw(st.integers(len(must), len(free)))
    return draw(st.sampled_from(POLICIES)), free, must, size


def spread(ids: Iterable[str]) -> int:
    return len({key.partition("-")[0] for key in ids})


@given(questions())
def test_any_answer_is_complete_legal_and_repeatable(question: tuple[str, list[Device], list[Device], int]) -> None:
    policy, free, must, size = question
    answer = preferred(policy, free, must, size)
    assert len(set(answer)) == len(answer) == size
    assert set(answer) <= {device.id for device in free}
    assert answer[: len(must)] == [device.id for device in must]
    assert answer == preferred(policy, free[::-1], must, size)
    assert answer == preferred(policy, sorted(free, key=lambda device: natural(device.id)), must, size)


@given(questions())
def test_none_spreads_at_least_as_far_as_any_other_policy(
    question: tuple[str, list[Device], list[Device], int],
) -> None:
    _policy, free, must, size = question
    widths = {policy: spread(preferred(policy, free, must, size)) for policy in POLICIES}
    assert widths["none"] == max(widths.values())
