"""Which events of the DRA driver are recorded."""

from accelplane.dra.events import INTERVAL, MAX_TEXTS, EventLimit


def test_the_same_event_is_recorded_again_after_ten_minutes() -> None:
    limit = EventLimit()
    times = (0.0, 1.0, INTERVAL - 1, INTERVAL, INTERVAL + 1)
    assert [limit.allows("uid", "PrepareFailed", "text", now) for now in times] == [True, False, False, True, False]


def test_other_objects_reasons_and_texts_are_other_events() -> None:
    limit = EventLimit()
    events = [
        ("a", "PrepareFailed", "x"),
        ("b", "PrepareFailed", "x"),
        ("a", "Other", "x"),
        ("a", "PrepareFailed", "y"),
    ]
    assert all(limit.allows(*event, 0.0) for event in events)
    assert not any(limit.allows(*event, 1.0) for event in events)


def test_texts_of_one_object_that_change_all_the_time_are_limited() -> None:
    limit = EventLimit()
    allowed = [limit.allows("uid", "PrepareFailed", f"{number} s so far", number) for number in range(100)]
    assert allowed == [True] * MAX_TEXTS + [False] * (100 - MAX_TEXTS)
    assert limit.allows("uid", "PrepareFailed", "another", INTERVAL)


def test_the_oldest_of_many_objects_is_forgotten() -> None:
    limit = EventLimit()
    for number in range(10_000):
        assert limit.allows(f"uid-{number}", "PrepareFailed", "x", 0.0)
    assert limit.allows("uid-0", "PrepareFailed", "x", 1.0)
    assert not limit.allows("uid-9999", "PrepareFailed", "x", 1.0)
