"""Topology hints from the NUMA nodes of devices, and admission from hints."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.kubelet.embedded.model import DeviceStatus
from accelplane.kubelet.embedded.topology import ANYWHERE, Hint, decide, has_topology, resource_hints

NODE0, NODE1, BOTH = 0b01, 0b10, 0b11


def devices(**nodes: tuple[int, ...]) -> dict[str, DeviceStatus]:
    return {name: DeviceStatus("Healthy", numbers) for name, numbers in nodes.items()}


FOUR = devices(a=(0,), b=(0,), c=(1,), d=(1,))


@pytest.mark.parametrize(
    ("listed", "size", "available", "reusable", "expected"),
    [
        (FOUR, 1, "abcd", "", [(NODE0, True), (NODE1, True), (BOTH, False)]),
        (FOUR, 1, "cd", "", [(NODE1, True), (BOTH, False)]),
        (FOUR, 3, "abcd", "", [(BOTH, True)]),
        # One node would do if the others were free: the wider set is not preferred.
        (FOUR, 2, "ac", "", [(BOTH, False)]),
        (FOUR, 5, "abcd", "", []),
        (FOUR, 1, "", "", []),
        # Reusable devices must be included.
        (FOUR, 2, "bcd", "a", [(NODE0, True), (BOTH, False)]),
        (FOUR, 2, "d", "ac", [(BOTH, False)]),
        # A device of several nodes is on each of them.
        (devices(a=(0, 1)), 1, "a", "", [(NODE0, True), (NODE1, True), (BOTH, False)]),
        # Devices without NUMA nodes, or with nodes that the machine does not have, are on none.
        (devices(a=(0,), x=()), 2, "ax", "", []),
        (devices(a=(7,), b=(-3,), c=(2**62,)), 1, "abc", "", []),
    ],
)
def test_hints_are_the_sets_of_nodes_that_can_meet_a_request(
    listed: dict[str, DeviceStatus], size: int, available: str, reusable: str, expected: list[tuple[int, bool]]
) -> None:
    assert resource_hints(listed, size, available=available, reusable=reusable, numa_nodes=2) == expected


def test_a_resource_has_hints_if_any_device_has_a_numa_node() -> None:
    assert has_topology(devices(a=(), b=(1,)))
    assert not has_topology(devices(a=(), b=()))


EITHER = [Hint(NODE0, True), Hint(NODE1, True), Hint(BOTH, False)]
ONLY_0 = [Hint(NODE0, True), Hint(BOTH, False)]
ONLY_1 = [Hint(NODE1, True), Hint(BOTH, False)]
SPREAD = [Hint(BOTH, True)]
SQUEEZED = [Hint(BOTH, False)]


@pytest.mark.parametrize(
    ("wishes", "affinity", "best_effort", "restricted", "single"),
    [
        # hints of each resource, nodes under best-effort, then the policies that admit
        ([], BOTH, True, True, True),
        ([None], BOTH, True, True, True),
        ([EITHER], NODE0, True, True, True),
        ([ONLY_1], NODE1, True, True, True),
        ([EITHER, ONLY_1], NODE1, True, True, True),
        ([EITHER, None], NODE0, True, True, True),
        ([ONLY_0, ONLY_1], NODE0, True, False, False),
        ([SPREAD], BOTH, True, True, False),
        ([SQUEEZED], BOTH, True, False, False),
        ([SPREAD, EITHER], BOTH, True, False, False),
        ([[]], BOTH, True, False, False),
        ([[], EITHER], NODE0, True, False, False),
    ],
)
def test_topology_policies_admit_according_to_their_definition(
    wishes: list[list[Hint] | None], affinity: int, best_effort: bool, restricted: bool, single: bool
) -> None:
    assert decide("none", wishes, 2) == (None, True)
    assert decide("best-effort", wishes, 2) == (affinity, best_effort)
    assert decide("restricted", wishes, 2)[1] == restricted
    assert decide("single-numa-node", wishes, 2)[1] == single


def test_a_single_node_machine_has_no_affinity_under_single_numa_node() -> None:
    assert decide("single-numa-node", [[Hint(1, True)]], 1) == (None, True)


def test_an_unpreferred_set_is_as_wide_as_the_largest_resource_hint() -> None:
    three = [Hint(0b0111, False), Hint(0b1111, False)]
    one = [Hint(0b0001, False), Hint(0b0011, False), Hint(0b1111, False)]
    assert decide("best-effort", [three, one], 4)[0] == 0b0111


HINTS = st.lists(st.builds(Hint, st.integers(1, 15), st.booleans()), min_size=1, max_size=5)


@given(st.lists(HINTS, min_size=1, max_size=4))
def test_merging_resource_by_resource_finds_the_best_of_all_combinations(wishes: list[list[Hint]]) -> None:
    combinations = []
    for hints in itertools.product(*wishes):
        mask = 15
        for hint in hints:
            mask &= hint.affinity or 0
        same = len({hint.affinity for hint in hints}) == 1
        combinations.append((mask, same and all(hint.preferred for hint in hints)))
    affinity, preferred = decide("restricted", wishes, 4)
    possible = [one for one in combinations if one[0]]
    assert preferred == any(good for _, good in possible)
    if not possible:
        assert affinity == 15
        return
    assert (affinity, preferred) in possible
    if preferred:
        assert affinity == min((mask for mask, good in possible if good), key=lambda mask: (mask.bit_count(), mask))


def test_eight_nodes_and_many_resources_are_decided_without_trying_every_combination() -> None:
    everywhere = [Hint(mask, mask.bit_count() == 1) for mask in range(1, 256)]
    assert decide("restricted", [everywhere] * 12, 8) == (1, True)


def test_no_hint_means_any_node() -> None:
    assert Hint(None, True) == ANYWHERE
