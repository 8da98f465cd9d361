"""The backoff of repeated corrections."""

import pytest

from accelplane.kube.differences import Difference
from accelplane.kube.driftbackoff import ABSENT, CONFLICT, PRESENT, DriftBackoff
from accelplane.kube.objects import Request
from accelplane.kube.writebudget import BURST, INTERVAL, WriteBudget

KEY = Request("a", "n")
IMAGE = Difference(("spec", "image"), found="x", expected="y")
ARGS = Difference(("spec", "args"), found="x", expected="y")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backoff(clock: Clock) -> DriftBackoff:
    return DriftBackoff(first_delay=1, max_delay=20, period=100, clock=clock)


def correct(backoff: DriftBackoff, *found: Difference, field: str = "hash") -> None:
    backoff.record_write(KEY)
    backoff.record_correction(KEY, field, found, lambda _: ("kubectl",))


def test_delays_double_up_to_the_maximum(backoff: DriftBackoff, clock: Clock) -> None:
    delays: list[float] = []
    for _ in range(7):
        delays.append(backoff.delay(KEY, "hash", IMAGE))
        clock.now += delays[-1]
        correct(backoff, IMAGE)
    assert delays == [0, 1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize("desired", ["hash", "new hash"])
def test_an_object_has_few_writes_in_a_minute_whatever_differs(
    backoff: DriftBackoff, clock: Clock, desired: str
) -> None:
    for index in range(BURST):
        difference = Difference(("spec", str(index)), found="x", expected="y")
        assert backoff.delay(KEY, "hash", difference) == 0
        correct(backoff, difference)
    assert backoff.postponed(KEY, desired, [IMAGE, ARGS]) == ((IMAGE, ARGS), INTERVAL)
    clock.now += INTERVAL
    assert backoff.postponed(KEY, desired, [IMAGE, ARGS]) == ((), 0)


def test_pairs_of_writes_are_at_most_ten_in_any_minute(clock: Clock) -> None:
    budget, written = WriteBudget(clock=clock), list[float]()
    for _ in range(500):
        if not budget.delay(KEY):
            for _ in range(2):
                budget.record(KEY)
                written.append(clock.now)
        clock.now += 0.5
    for start in written:
        assert sum(1 for each in written if start <= each < start + 60) <= 10
    assert budget.delay("another") == 0
    clock.now += 100
    assert budget.longest_delay() == 0


def test_elapsed_time_reduces_the_delay(backoff: DriftBackoff, clock: Clock) -> None:
    for _ in range(3):
        correct(backoff, IMAGE)
    clock.now += 3
    assert backoff.delay(KEY, "hash", IMAGE) == 1
    assert backoff.postponed(KEY, "hash", [IMAGE, ARGS]) == ((IMAGE,), 1)
    clock.now += 30
    assert backoff.delay(KEY, "hash", IMAGE) == 0


def test_corrections_of_other_fields_objects_and_values_are_not_delayed(backoff: DriftBackoff) -> None:
    correct(backoff, IMAGE)
    assert backoff.delay(KEY, "hash", ARGS) == 0
    assert backoff.delay(Request("b", "n"), "hash", IMAGE) == 0
    assert backoff.delay(KEY, "new hash", IMAGE) == 0
    correct(backoff, IMAGE, field="new hash")
    assert backoff.delay(KEY, "new hash", IMAGE) == 1


def test_a_repeatedly_corrected_field_is_a_conflict_until_its_other_writer_stops(
    backoff: DriftBackoff, clock: Clock
) -> None:
    for _ in range(CONFLICT - 1):
        correct(backoff, IMAGE)
    assert (backoff.conflicts(KEY), backoff.expiry(KEY)) == ((), 0)
    correct(backoff, IMAGE, ARGS)
    (conflict,) = backoff.conflicts(KEY)
    assert str(conflict) == (
        'spec.image: found "x", expected "y": changed by kubectl after 3 corrections; '
        "remove the field from the configuration of the other program"
    )
    assert backoff.expiry(KEY) == 100
    clock.now += 101
    assert (backoff.conflicts(KEY), backoff.expiry(KEY)) == ((), 0)
    assert backoff.delay(KEY, "hash", IMAGE) == 0


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (ABSENT, "deleted by another program after 3 creations; stop the other program"),
        (PRESENT, "created by another program after 3 deletions; stop the other program"),
    ],
)
def test_repeated_creation_or_deletion_is_a_conflict(backoff: DriftBackoff, difference: Difference, text: str) -> None:
    for _ in range(CONFLICT):
        correct(backoff, difference)
    (conflict,) = backoff.conflicts(KEY)
    assert (conflict.reason, str(conflict)) == ("ObjectConflict", text)


def test_differences_that_the_api_server_keeps_are_remembered_for_a_while(backoff: DriftBackoff, clock: Clock) -> None:
    backoff.record_persistent(KEY, "hash", [IMAGE])
    assert backoff.is_persistent(KEY, "hash", [IMAGE])
    assert not backoff.is_persistent(KEY, "hash", [IMAGE, ARGS])
    assert not backoff.is_persistent(KEY, "new hash", [IMAGE])
    assert not backoff.is_persistent(Request("b"), "hash", [IMAGE])
    clock.now += 100
    assert not backoff.is_persistent(KEY, "hash", [IMAGE])
