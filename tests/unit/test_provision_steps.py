"""The engine of provisioning: outcomes of devices whose steps succeed, fail, or have no effect."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from trees import write

from accelplane.host import Host, HostError, WriteError
from accelplane.provision.steps import Outcome, Plan, Planner, Step, apply, preview

A, B = "/sys/a", "/sys/b"


class Files(Host):
    """Attributes that accept writes, except for those that reject or ignore them; `writes` has all writes."""

    def __init__(self, root: str, refuse: dict[tuple[str, str], int], ignore: set[str], writes: list[str]) -> None:
        super().__init__(root)
        self._refuse = refuse
        self._ignore = ignore
        self._writes = writes

    def write(self, path: str, text: str) -> None:
        if number := self._refuse.get((path, text)):
            raise WriteError(path, "no", number)
        self._writes.append(f"{path}={text}")
        if path not in self._ignore:
            super().write(path, text)


class Device:
    """A device with two attributes, which are 0 and desired to be 1."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refuse: dict[tuple[str, str], int] = {}
        self.ignore: set[str] = set()
        self.writes: list[str] = []
        for path in (A, B):
            write(root / path[1:], "0")

    def host(self, root: str) -> Host:
        return Files(root, self.refuse, self.ignore, self.writes)

    def apply(self, planner: Planner) -> Outcome:
        (outcome,) = apply(str(self.root), [planner], timeout=0, host=self.host)
        return outcome

    def values(self) -> tuple[str, str]:
        host = Host(self.root)
        return host.text(A), host.text(B)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


def both(**more: object) -> Planner:
    """Plans the second attribute once the first one has its desired value."""

    def planner(host: Host) -> Plan:
        values = {"a": host.text(A), "b": host.text(B)}
        first = [step(A, **more)] if values["a"] != "1" else []
        second = [step(B, **more)] if not first and values["b"] != "1" else []
        return Plan(device="d", now=values, steps=[*first, *second], later=["b"] if first else [])

    return planner


def step(path: str, **more: object) -> Step:
    fields = {"what": path[-1], "path": path, "text": "1", "undo": (path, "0"), **more}
    return Step(**fields)  # pyright: ignore[reportArgumentType]


def test_steps_are_planned_and_written_until_none_is_left(device: Device) -> None:
    outcome = device.apply(both())
    assert outcome == Outcome(device="d", state="applied", steps=["a", "b"], now={"a": "1", "b": "1"})
    assert device.writes == [f"{A}=1", f"{B}=1"]


def test_a_second_run_writes_nothing(device: Device) -> None:
    device.apply(both())
    device.writes.clear()
    assert device.apply(both()).state == "unchanged"
    assert device.writes == []


def test_a_preview_includes_later_steps_and_writes_nothing(device: Device) -> None:
    (outcome,) = preview(str(device.root), [both()], host=device.host)
    assert outcome == Outcome(device="d", state="pending", steps=["a", "b"], now={"a": "0", "b": "0"})
    assert device.writes == []


def explain(_host: Host, _error: HostError) -> str:
    return "it is raining"


class FailingWrites(NamedTuple):
    """Rejected and ignored writes, and the expected outcome."""

    refuse: dict[tuple[str, str], int]
    state: str
    reason: str
    values: tuple[str, str] = ("0", "0")
    ignore: tuple[str, ...] = ()
    more: dict[str, object] | None = None


@pytest.mark.parametrize(
    "trouble",
    [
        FailingWrites({(B, "1"): errno.EIO}, "rolled back", "b: /sys/b: no"),
        FailingWrites({(A, "1"): errno.EIO}, "failed", "a: /sys/a: no"),
        FailingWrites({(A, "1"): errno.EBUSY}, "skipped", "in use: a: /sys/a: no"),
        FailingWrites({(A, "1"): errno.EROFS}, "skipped", "a: /sys/a: no", more={"skip_on": (errno.EROFS,)}),
        FailingWrites({(B, "1"): errno.EBUSY}, "rolled back", "b: /sys/b: no"),
        FailingWrites({(A, "1"): errno.EIO}, "failed", "it is raining", more={"explain": explain}),
        FailingWrites({}, "rolled back", "/sys/b: writing '1' had no effect", ignore=(B,)),
        FailingWrites({(B, "1"): 5, (A, "0"): 5}, "failed", "rollback failed: /sys/a: no", values=("1", "0")),
        FailingWrites({(B, "1"): errno.EIO}, "failed", "not rolled back: a", values=("1", "0"), more={"undo": None}),
    ],
    ids=lambda trouble: trouble.reason,
)
def test_a_failed_device_is_rolled_back_with_the_reason(device: Device, trouble: FailingWrites) -> None:
    device.refuse, device.ignore = trouble.refuse, set(trouble.ignore)
    outcome = device.apply(both(**(trouble.more or {})))
    assert (outcome.state, device.values()) == (trouble.state, trouble.values)
    assert trouble.reason in outcome.reason
    assert outcome.failed == (trouble.state != "skipped")
    assert outcome.now == dict(zip("ab", trouble.values, strict=True))


def two_parts(host: Host) -> Plan:
    return Plan(device="d", steps=[step(path, part=path, what="x") for path in (A, B) if host.text(path) != "1"])


def test_a_failed_part_does_not_affect_the_others(device: Device) -> None:
    device.refuse = {(A, "1"): errno.EBUSY}
    outcome = device.apply(two_parts)
    assert (outcome.state, outcome.steps, device.values()) == ("failed", ["x"], ("0", "1"))
    assert "/sys/a: no" in outcome.reason


def test_a_step_completed_by_another_process_is_not_a_failure(device: Device) -> None:
    class InterruptedWrites(Files):
        def write(self, path: str, text: str) -> None:
            if path == B:
                Host(device.root).write(B, "1")
                raise WriteError(path, "no such device", errno.ENODEV)
            super().write(path, text)

    def host(root: str) -> Host:
        return InterruptedWrites(root, {}, set(), device.writes)

    (outcome,) = apply(str(device.root), [both(part="p")], timeout=0, host=host)
    assert outcome == Outcome(device="d", state="applied", steps=["a"], now={"a": "1", "b": "1"})


def test_equal_failures_of_parts_are_reported_once(device: Device) -> None:
    device.refuse = {(A, "1"): errno.EIO, (B, "1"): errno.EIO}
    assert device.apply(two_parts).reason == "x: /sys/a: no; and 1 more like it"


@pytest.mark.parametrize(
    ("plan", "state", "reason"),
    [
        (Plan(device="d", skip_reason="somebody has it", steps=[step(A)]), "skipped", "somebody has it"),
        (Plan(device="d", failure="it is broken", steps=[step(A)]), "failed", "it is broken"),
        (Plan(device="d", notes=["fewer than wanted"]), "skipped", ""),
        (Plan(device="d"), "unchanged", ""),
    ],
)
def test_nothing_is_written_to_skipped_failed_or_unchanged_devices(
    device: Device, plan: Plan, state: str, reason: str
) -> None:
    outcome = device.apply(lambda _host: plan)
    assert (outcome.state, outcome.reason, outcome.notes) == (state, reason, plan.notes)
    assert device.writes == []


def test_the_rollback_may_be_planned_too(device: Device) -> None:
    device.refuse = {(B, "1"): errno.EIO}

    def back(host: Host) -> Plan:
        wrong = host.text(A) != "0"
        return Plan(device="d", steps=[Step(what="a", path=A, text="0")] if wrong else [])

    def forth(host: Host) -> Plan:
        return Plan(device="d", steps=[step(A, undo=None), step(B)] if host.text(B) != "1" else [], rollback=back)

    assert device.apply(forth).state == "rolled back"
    assert device.values() == ("0", "0")


def test_a_device_whose_plan_does_not_converge_fails(device: Device) -> None:
    def planner(host: Host) -> Plan:
        number = str(int(host.text(A)) + 1)
        return Plan(device="d", steps=[Step(what="a", path=A, text=number, undo=(A, "0"))])

    outcome = device.apply(planner)
    assert outcome.state == "rolled back"
    assert "desired state not reached after 10 rounds" in outcome.reason


def test_a_failing_device_does_not_affect_the_next_one(device: Device) -> None:
    broken: Callable[[Host], Plan] = lambda _host: Plan(device="broken", failure="it is broken")  # noqa: E731
    outcomes = apply(str(device.root), [broken, both()], timeout=0, host=device.host)
    assert [outcome.state for outcome in outcomes] == ["failed", "applied"]
