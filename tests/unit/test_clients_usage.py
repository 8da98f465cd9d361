"""Sums of the use of GPUs by containers, over several walks."""

from collections.abc import Collection, Mapping

import pytest
from drmclients import BDF, OTHER_POD, POD, i915, xe
from hypothesis import given
from hypothesis import strategies as st

from accelplane.gpuclients.fdinfo import DrmClient, parse_fdinfo
from accelplane.gpuclients.usage import Container, Found, Usage, Walk

MAIN = Container(POD, "main")
SIDE = Container(POD, "side")


def client(text: str) -> DrmClient:
    parsed = parse_fdinfo(text)
    assert parsed is not None
    return parsed


def found(text: str, at: float = 0.0, *, container: Container = MAIN, pid: int = 100) -> Found:
    return Found(container, pid, client(text), at)


def walk(*clients: Found, present: Collection[int] = (100, 101), visited: Collection[int] | None = None) -> Walk:
    return Walk(found=clients, present=present, visited=present if visited is None else visited)


def busy(usage: Usage, container: Container = MAIN) -> Mapping[str, float]:
    report = usage.report({POD, OTHER_POD}, incomplete=False, processes=0)
    found = {
        (use.pod, use.name): {device.bdf: device.busy_seconds for device in use.devices} for use in report.containers
    }
    return found.get((container.pod, container.name), {}).get(BDF, {})


def memory(usage: Usage) -> Mapping[str, Mapping[str, int]]:
    [use] = usage.report({POD}, incomplete=False, processes=0).containers
    return use.devices[0].memory_bytes


def test_busy_time_of_i915_is_the_sum_over_clients() -> None:
    usage = Usage()
    usage.update(walk(found(i915(1, render=2_000_000_000)), found(i915(2, render=500_000_000, copy=10**9))))
    assert busy(usage) == pytest.approx({"render": 2.5, "copy": 1.0, "video": 0.0})
    usage.update(walk(found(i915(1, render=3_000_000_000)), found(i915(2, render=500_000_000, copy=10**9))))
    assert busy(usage) == pytest.approx({"render": 3.5, "copy": 1.0, "video": 0.0})


def test_duplicated_descriptors_are_counted_once() -> None:
    usage = Usage()
    usage.update(walk(*(found(i915(1, render=10**9, memory=4), pid=pid) for pid in (100, 100, 101))))
    assert busy(usage)["render"] == 1.0
    assert memory(usage)["local0"]["resident"] == 4096


def test_the_same_client_id_of_two_devices_is_two_clients() -> None:
    usage = Usage()
    usage.update(walk(found(i915(1, render=10**9)), found(i915(1, bdf="0000:04:00.0", render=10**9))))
    [use] = usage.report({POD}, incomplete=False, processes=0).containers
    assert [device.busy_seconds["render"] for device in use.devices] == [1.0, 1.0]


def test_a_decreasing_counter_keeps_its_last_value() -> None:
    usage = Usage()
    for render, expected in ((2 * 10**9, 2.0), (10**9, 2.0), (2 * 10**9, 2.0), (3 * 10**9, 3.0)):
        usage.update(walk(found(i915(1, render=render))))
        assert busy(usage)["render"] == pytest.approx(expected)


def test_the_time_of_an_ended_client_is_kept_and_its_memory_is_not() -> None:
    usage = Usage()
    usage.update(walk(found(i915(1, render=2 * 10**9, memory=4)), found(i915(2, render=10**9, memory=1))))
    usage.update(walk(found(i915(2, render=10**9, memory=1))))
    assert busy(usage)["render"] == pytest.approx(3.0)
    assert memory(usage)["local0"]["resident"] == 1024
    usage.update(walk())
    assert busy(usage)["render"] == pytest.approx(3.0)
    # an identifier is not used twice: this one is new
    usage.update(walk(found(i915(3, render=10**9))))
    assert busy(usage)["render"] == pytest.approx(4.0)


def test_a_client_of_an_unvisited_process_is_kept() -> None:
    usage = Usage()
    usage.update(walk(found(i915(1, render=2 * 10**9, memory=4)), present=(100,)))
    usage.update(walk(present=(100, 101), visited=(101,)))
    assert memory(usage)["local0"]["resident"] == 4096
    usage.update(walk(found(i915(1, render=3 * 10**9, memory=4)), present=(100,)))
    assert busy(usage)["render"] == pytest.approx(3.0)


def test_a_client_of_an_ended_process_is_removed_even_if_the_walk_was_incomplete() -> None:
    usage = Usage()
    usage.update(walk(found(i915(1, render=2 * 10**9, memory=4)), present=(100,)))
    usage.update(walk(present=(101,), visited=()))
    assert memory(usage) == {}


def test_busy_time_of_xe_is_the_share_of_cycles_in_the_time_between_two_readings() -> None:
    usage = Usage()
    usage.update(walk(found(xe(1, used=5000, total=100_000), 10.0)))
    assert busy(usage) == {"ccs": 0.0}  # how long the client exists is not known
    usage.update(walk(found(xe(1, used=6000, total=104_000), 14.0)))
    assert busy(usage) == pytest.approx({"ccs": 1.0})
    usage.update(walk(found(xe(1, used=6000, total=104_000), 15.0)))  # the GPU was suspended
    assert busy(usage) == pytest.approx({"ccs": 1.0})


def test_the_share_of_xe_is_at_most_the_number_of_engines() -> None:
    for capacity, expected in ((1, 4.0), (4, 12.0)):
        usage = Usage()
        usage.update(walk(found(xe(1, used=0, total=0, capacity=capacity), 10.0)))
        usage.update(walk(found(xe(1, used=3000, total=1000, capacity=capacity), 14.0)))
        assert busy(usage) == pytest.approx({"ccs": expected})


def test_decreasing_cycles_of_xe_keep_their_last_value() -> None:
    usage = Usage()
    for at, (used, total) in enumerate(((1000, 1000), (500, 2000), (1000, 3000))):
        usage.update(walk(found(xe(1, used=used, total=total), float(at))))
    assert busy(usage) == {"ccs": 0.0}
    usage.update(walk(found(xe(1, used=1500, total=4000), 3.0)))
    assert busy(usage) == pytest.approx({"ccs": 0.5})
    usage.update(walk(found(xe(1, used=1600, total=10), 4.0)))  # total cycles began again
    assert busy(usage) == pytest.approx({"ccs": 0.5})


def test_a_file_open_in_two_containers_counts_for_the_first() -> None:
    usage = Usage()
    usage.update(walk(found(i915(1, render=10**9))))
    usage.update(walk(found(i915(1, render=2 * 10**9), container=SIDE, pid=101)))
    assert busy(usage)["render"] == pytest.approx(2.0)
    assert busy(usage, SIDE) == {}


def test_only_requested_pods_are_reported_and_a_forgotten_one_begins_again() -> None:
    usage = Usage()
    other = Container(OTHER_POD, "main")
    usage.update(walk(found(i915(1, render=10**9)), found(i915(2, render=10**9), container=other)))
    assert [use.pod for use in usage.report({OTHER_POD}, incomplete=False, processes=0).containers] == [OTHER_POD]
    usage.forget({POD})
    assert busy(usage) == {}
    assert busy(usage, other)["render"] == pytest.approx(1.0)


_VALUES = st.lists(st.integers(0, 2**64), min_size=1, max_size=8)


@given(_VALUES, _VALUES)
def test_counters_never_decrease(nanoseconds: list[int], cycles: list[int]) -> None:
    usage = Usage()
    last: Mapping[str, float] = {}
    for at, (render, used) in enumerate(zip(nanoseconds, cycles, strict=False)):
        walked = [found(i915(1, render=render), float(at)), found(xe(2, used=used, total=2 * used), float(at))]
        usage.update(walk(*(walked if render % 3 else walked[:1])))
        now = dict(busy(usage))
        assert all(now[engine] >= value for engine, value in last.items())
        last = now
