"""Choosing devices for a container: required devices, the plugin's choice, and its use."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.kubelet.embedded.device_choice import NotEnough, Plan, complete, plan
from accelplane.kubelet.embedded.model import DeviceStatus

LISTED = {
    "a": DeviceStatus("Healthy", (0,)),
    "b": DeviceStatus("Healthy", (0,)),
    "c": DeviceStatus("Healthy", (1,)),
    "d": DeviceStatus("Healthy", (0, 1)),
    "s": DeviceStatus("Healthy"),
    "x": DeviceStatus("Unhealthy", (0,)),
}


def plan_choice(size: int, *, reusable: str = "", in_use: str = "", affinity: int | None = None) -> Plan:
    return plan(LISTED, size, reusable=reusable, in_use=in_use, affinity=affinity, shuffled=in_order)


def in_order(ids: Iterable[str]) -> list[str]:
    return sorted(ids)


@pytest.mark.parametrize(
    ("drafted", "selected", "choice"),
    [
        (plan_choice(1), "", "abcds"),
        (plan_choice(5), "", "abcds"),
        (plan_choice(1, in_use="ab"), "", "cds"),
        (plan_choice(1, affinity=0b01), "", "abd"),
        (plan_choice(3, affinity=0b01), "abd", ""),
        (plan_choice(4, affinity=0b01), "abd", "cs"),
        (plan_choice(2, affinity=0b10, in_use="d"), "c", "abs"),
        (plan_choice(2, reusable="ac", in_use="ac"), "ac", ""),
        (plan_choice(1, reusable="ac", in_use="ac"), "a", ""),
        (plan_choice(3, reusable="ac", in_use="ac"), "ac", "bds"),
        # Devices of init containers are used even if they are unhealthy.
        (plan_choice(1, reusable="x", in_use="x"), "x", ""),
    ],
)
def test_reusable_devices_come_first_then_aligned_ones_and_the_plugin_chooses_the_rest(
    drafted: Plan, selected: str, choice: str
) -> None:
    assert ("".join(drafted.selected), "".join(drafted.choice)) == (selected, choice)
    assert drafted.is_complete == (not choice)


def test_too_few_devices_are_counted_without_the_reusable_ones() -> None:
    with pytest.raises(NotEnough, match="Requested: 6, Available: 4"):
        plan_choice(7, reusable="a", in_use="a")


def test_gaps_are_filled_with_devices_on_other_nodes_before_those_on_none() -> None:
    assert complete(plan_choice(4, affinity=0b01), ()) == ("a", "b", "d", "c")


@given(st.integers(1, 5), st.lists(st.sampled_from("abcdsxyz")), st.sampled_from([None, 0b01, 0b10, 0b11]))
def test_any_preferred_allocation_results_in_a_complete_choice_of_offered_devices(
    size: int, preferred: list[str], affinity: int | None
) -> None:
    chosen = complete(plan_choice(size, affinity=affinity), preferred)
    assert len(chosen) == len(set(chosen)) == size
    assert set(chosen) <= set("abcds")
