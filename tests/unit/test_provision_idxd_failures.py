"""Provisioning of DSA and IAA with the emulated kernel: failures at any write."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from idxdnodes import BUS, MakeNode, Node, configured, only, writes
from kernelhost import KernelHost

from accelplane.host import WriteError
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import DsaSpec, QueueSpec
from accelplane.simulate.specs import NodeSpec


@pytest.fixture
def node(tmp_path: Path) -> MakeNode:
    def make(*dsas: DsaSpec, **spec: object) -> Node:
        return Node(Kernel(NodeSpec(dsas=dsas, **spec)), tmp_path)  # type: ignore[arg-type] # the other fields, as they are

    return make


SMALL = """[{"dev": "dsaX", "read_buffer_limit": 9, "groups": [
    {"dev": "groupX.0", "read_buffers_reserved": 1, "read_buffers_allowed": 5, "use_read_buffer_limit": 1,
     "grouped_workqueues": [
        {"dev": "wqX.0", "mode": "shared", "type": "user", "size": 60, "threshold": 20, "name": "sharedX",
         "priority": 4, "max_batch_size": 64, "max_transfer_size": 65536, "ats_disable": 1, "op_config": "1"}],
     "grouped_engines": [{"dev": "engineX.0"}, {"dev": "engineX.1"}]},
    {"dev": "groupX.1", "grouped_workqueues": [
        {"dev": "wqX.1", "mode": "dedicated", "type": "user", "size": 68, "name": "appX", "block_on_fault": 1}]}]}]"""


def small(*queues: QueueSpec, model: str = "0b25") -> DsaSpec:
    return DsaSpec(index=0, queues=queues, max_queues=3, max_groups=2, max_engines=2, model=model)  # type: ignore[arg-type] # the tests' words


CASES = {
    "blank": (small(), errno.EIO),
    "dedicated": (small(QueueSpec(name="one", size=50), QueueSpec(name="two", size=50)), errno.EBUSY),
    "shared": (small(QueueSpec(mode="shared", size=80), QueueSpec(mode="shared", size=48)), errno.EIO),
    "for the kernel": (small(*[QueueSpec(type="kernel")] * 3, model="1212"), errno.EIO),
    "not enabled": (small(QueueSpec(enabled=False), QueueSpec(enabled=False, mode="shared")), errno.EIO),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.untraced
def test_after_a_failed_write_the_device_is_unchanged(node: MakeNode, case: str) -> None:
    spec, number = CASES[case]
    machine = node(spec)
    machine.configure("dsa.conf", SMALL)
    sequence = writes(machine)
    assert len(sequence) >= 20
    machine = node(spec)
    before = machine.all_text()
    for place, (path, text) in enumerate(sequence):
        machine.kernel.fail(path, number, text=text, times=1)
        outcome = only(machine.apply())
        in_use = number == errno.EBUSY and place == 0
        assert outcome.state == ("skipped" if in_use else "rolled back" if place else "failed"), (path, outcome)
        assert os.strerror(number) in outcome.reason
        assert machine.all_text() == before, (path, text)
    assert only(machine.apply()).state == "applied"


@pytest.mark.untraced
def test_after_permanently_failing_writes_a_blank_device_is_unchanged(node: MakeNode) -> None:
    machine = node(small())
    machine.configure("dsa.conf", SMALL)
    sequence = writes(machine)
    machine = node(small())
    before = machine.all_text()
    for place, (path, text) in enumerate(sequence):
        machine.kernel.fail(path, errno.EIO)
        outcome = only(machine.apply())
        assert outcome.state == ("rolled back" if place else "failed"), (path, text, outcome)
        machine.kernel.clear_faults()
        assert machine.all_text() == before, (path, text)


class FailingHost(KernelHost):
    """A host on which the write with this number fails once."""

    def __init__(self, kernel: Kernel, fails: int) -> None:
        super().__init__(kernel, [])
        self.left = fails

    def write(self, path: str, text: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise WriteError(path, "Input/output error", errno.EIO)
        super().write(path, text)


def optional_values(name: str, values: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.just({}) | values.map(lambda value: {name: value})


@st.composite
def queues_of(draw: st.DrawFn, number: int) -> dict[str, object]:
    size = draw(st.integers(1, 42))
    document: dict[str, object] = {
        "dev": f"wqX.{number}",
        "size": size,
        "name": draw(st.sampled_from(["a", "bX", "c d"])),
    }
    document["type"] = draw(st.sampled_from(["user", "kernel"]))
    document |= draw(st.sampled_from([{"mode": "dedicated"}, {"mode": "shared", "threshold": (size + 1) // 2}]))
    for one in (
        optional_values("priority", st.integers(1, 15)),
        optional_values("group_id", st.integers(0, 1)),
        optional_values("max_batch_size", st.integers(1, 1024)),
        optional_values("max_transfer_size", st.sampled_from([1, 4096, 5000])),
        optional_values("ats_disable", st.integers(0, 1)),
        st.sampled_from([{}, {"prs_disable": 1}, {"prs_disable": 0, "block_on_fault": 1}]),
        optional_values("op_config", st.sampled_from(["1", "0,ff"])),
    ):
        document |= draw(one)
    return document


@st.composite
def templates(draw: st.DrawFn) -> str:
    """Templates that a small device of the third version supports."""
    queues = draw(st.lists(st.integers(0, 2), unique=True, min_size=1))
    engines = draw(st.lists(st.integers(0, 1), unique=True, min_size=1))
    groups: list[dict[str, object]] = []
    for number in range(2):
        group: dict[str, object] = {"dev": f"groupX.{number}"}
        for one in (
            optional_values("read_buffers_reserved", st.integers(0, 9)),
            optional_values("read_buffers_allowed", st.integers(8, 80)),
            optional_values("use_read_buffer_limit", st.integers(0, 1)),
            optional_values("desc_progress_limit", st.integers(0, 3)),
        ):
            group |= draw(one)
        group["grouped_workqueues"] = [draw(queues_of(one)) for one in queues if one % 2 == number]
        group["grouped_engines"] = [{"dev": f"engineX.{one}"} for one in engines if one == number]
        groups.append(group)
    device = {"dev": "dsaX"} | draw(optional_values("read_buffer_limit", st.integers(0, 90)))
    return json.dumps([device | {"groups": groups}])


@given(templates(), templates(), st.integers(1, 60))
def test_any_device_reaches_the_desired_state_or_is_unchanged(
    node: MakeNode, before: str, after: str, fails: int
) -> None:
    machine = node(small(model="1212"))
    machine.configure("dsa.conf", before)
    assert only(machine.apply()).state == "applied"
    machine.configure("dsa.conf", after)
    picture = machine.text_without_numbers()
    machine.host = FailingHost(machine.kernel, fails)
    outcome = only(machine.apply())
    if outcome.state in ("rolled back", "failed"):
        assert machine.text_without_numbers() == picture
        outcome = only(machine.apply())
    assert outcome.state in ("applied", "unchanged"), outcome
    assert only(machine.apply()).state == "unchanged"


def test_a_failed_rollback_is_reported(node: MakeNode) -> None:
    machine = node(configured("one"))
    machine.kernel.fail(f"{BUS}/drivers/idxd/bind", errno.EIO)
    outcome = only(machine.apply())
    assert outcome.state == "failed"
    assert "rollback failed: /sys/bus/dsa/drivers/idxd/bind" in outcome.reason
    machine.kernel.clear_faults()
    assert only(machine.apply()).state == "applied"


def test_a_write_without_effect_is_detected_before_the_device_is_enabled(node: MakeNode) -> None:
    machine = node(DsaSpec())
    machine.kernel.set_content(f"{BUS}/devices/wq0.1/priority", b"3\n")
    outcome = only(machine.apply())
    assert outcome.failed
    assert "wq0.1/priority: writing '10' had no effect" in outcome.reason
    assert machine.read("dsa0/state") == "disabled"


@pytest.mark.parametrize("attribute", ["state", "size", "mode", "name", "group_id", "threshold", "driver_name"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"x" * 4096, b"-9" * 3000, b"9" * 30])
@pytest.mark.untraced
def test_invalid_attributes_affect_only_their_device(node: MakeNode, attribute: str, content: bytes) -> None:
    machine = node(configured("one"), DsaSpec())
    machine.kernel.set_content(f"{BUS}/devices/wq0.0/{attribute}", content)
    outcomes = machine.preview()
    assert [outcome.device for outcome in outcomes] == ["dsa0", "dsa1"]
    assert outcomes[1].state == "pending"


@pytest.mark.parametrize("place", ["wq0.0/size", "dsa0/read_buffer_limit"])
@pytest.mark.untraced
def test_rollback_does_not_write_invalid_attributes(node: MakeNode, place: str) -> None:
    machine = node(configured("one"), DsaSpec())
    machine.kernel.set_content(f"{BUS}/devices/{place}", b"")
    outcomes = machine.apply()
    assert outcomes[0].failed
    assert f"{place}: writing" in outcomes[0].reason
    assert outcomes[1].state == "applied"


@pytest.mark.parametrize("limit", ["configurable", "max_work_queues_size", "max_groups", "version", "state"])
@pytest.mark.parametrize("content", [b"junk", b"\xff", b"9" * 5000])
@pytest.mark.untraced
def test_invalid_limits_of_the_device_are_reported(node: MakeNode, limit: str, content: bytes) -> None:
    machine = node(DsaSpec())
    machine.kernel.set_content(f"{BUS}/devices/dsa0/{limit}", content)
    outcome = only(machine.apply())
    assert outcome.failed
    assert limit in outcome.reason or "state" in outcome.reason


def test_an_unreadable_attribute_is_reported(node: MakeNode) -> None:
    machine = node(DsaSpec())
    machine.kernel.fail(f"{BUS}/devices/wq0.2/priority", errno.EIO, on="read")
    outcome = only(machine.apply())
    assert outcome.failed
    assert "wq0.2/priority: Input/output error" in outcome.reason
