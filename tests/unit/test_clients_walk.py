"""Walks over trees of procfs."""

import os
from collections.abc import Collection
from pathlib import Path

from drmclients import BDF, ID, OTHER_POD, POD, i915, process
from trees import write

from accelplane.gpuclients.usage import Container, Walk
from accelplane.gpuclients.walk import ContainerNames, Limits, Pass, order_of

PLENTY = Limits(cpu=60.0)


def walked(
    proc: Path, pods: Collection[str] = (POD,), *, limits: Limits = PLENTY, first: Collection[int] = (), after: int = 0
) -> tuple[Walk, Pass]:
    instance = Pass(str(proc), limits, ContainerNames())
    instance.run(frozenset(pods), first, after, ())
    return instance.result(), instance


def test_gpu_files_of_requested_pods_are_found(tmp_path: Path) -> None:
    process(tmp_path, 10, i915(1), i915(2))
    process(tmp_path, 11, i915(3), pod=OTHER_POD)
    write(tmp_path / "12/cgroup", "0::/system.slice/x.service\n")
    write(tmp_path / "12/fdinfo/3", i915(4))
    write(tmp_path / "self/cgroup", "0::/\n")
    found, _ = walked(tmp_path)
    assert [(each.container, each.pid, each.client.bdf, each.client.id) for each in found.found] == [
        (Container(POD, "main"), 10, BDF, 1),
        (Container(POD, "main"), 10, BDF, 2),
    ]
    assert found.complete
    assert found.present == found.visited == {10, 11, 12}


def test_a_container_without_a_known_name_has_its_id(tmp_path: Path) -> None:
    process(tmp_path, 10, i915(1))
    write(tmp_path / "10/mountinfo", "1 2 3\n")
    found, _ = walked(tmp_path)
    assert [each.container for each in found.found] == [Container(POD, "", ID)]


def test_processes_that_end_during_the_walk_and_broken_files_are_skipped(tmp_path: Path) -> None:
    process(tmp_path, 10, i915(1))
    write(tmp_path / "11/cgroup", (tmp_path / "10/cgroup").read_text())  # without fdinfo
    (tmp_path / "13").mkdir()
    broken = process(tmp_path, 14, "drm-driver:\txe\0\xff", "", i915(2))
    (broken / "fdinfo/9").mkdir()
    (broken / "fdinfo/11").symlink_to("missing")
    found, _ = walked(tmp_path)
    assert [each.client.id for each in found.found] == [1, 2]
    assert found.complete


def test_a_walk_stops_at_the_number_of_processes_and_the_next_one_continues_there(tmp_path: Path) -> None:
    for pid in range(10, 16):
        process(tmp_path, pid, i915(pid))
    limits = Limits(processes=4, cpu=60.0)
    found, instance = walked(tmp_path, limits=limits)
    assert [each.pid for each in found.found] == [10, 11, 12, 13]
    assert not found.complete
    found, _ = walked(tmp_path, limits=limits, first=(10,), after=instance.last)
    assert [each.pid for each in found.found] == [10, 14, 15, 11]


def test_a_walk_stops_at_its_processor_time(tmp_path: Path) -> None:
    for pid in range(10, 16):
        process(tmp_path, pid, i915(pid))
    found, _ = walked(tmp_path, limits=Limits(cpu=-1.0))
    assert (found.found, found.complete, found.visited) == ([], False, frozenset())


def test_the_files_of_a_process_are_limited(tmp_path: Path) -> None:
    process(tmp_path, 10, *(i915(number) for number in range(8)))
    process(tmp_path, 11, i915(100))
    found, _ = walked(tmp_path, limits=Limits(files=4, cpu=60.0))
    assert [each.client.id for each in found.found] == [0, 1, 2, 3, 100]
    assert (found.complete, found.visited) == (False, {11})
    found, _ = walked(tmp_path, limits=Limits(descriptors=3, cpu=60.0))
    assert [each.client.id for each in found.found] == [0, 1, 100]  # and descriptor 0
    assert not found.complete


def test_processes_that_block_a_reader_are_skipped(tmp_path: Path) -> None:
    process(tmp_path, 10, i915(1))
    process(tmp_path, 11, i915(2))
    instance = Pass(str(tmp_path), PLENTY, ContainerNames())
    instance.run({POD}, (), 0, {10})
    assert [each.pid for each in instance.result().found] == [11]
    assert (instance.result().complete, instance.result().visited) == (False, {11})


def test_the_order_of_a_walk_has_each_process_once() -> None:
    assert list(order_of([1, 2, 3, 4, 5], {4, 9}, 2)) == [4, 3, 5, 1, 2]


def test_this_process_is_listed_from_the_real_procfs() -> None:
    found, instance = walked(Path("/proc"))
    assert os.getpid() in found.present
    assert (found.found, instance.denied) == ([], 0)
