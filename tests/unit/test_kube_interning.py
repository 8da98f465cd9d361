"""The string pool shares equal strings and is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from accelplane.kube.interning import StringPool


def copy_text(text: str) -> str:
    return "".join(list(text))


def test_equal_strings_are_shared() -> None:
    pool = StringPool()
    first = pool(copy_text("node-1"))
    assert pool(copy_text("node-1")) is first


def test_a_hundred_thousand_names_are_not_kept_in_memory() -> None:
    pool = StringPool(limit=1000)
    for number in range(100_000):
        pool(f"node-{number}")
    assert len(pool) <= 2000


def test_strings_in_use_stay_shared_while_others_pass() -> None:
    pool = StringPool(limit=10)
    used = pool(copy_text("used"))
    for number in range(1000):
        pool(f"node-{number}")
        if number % 10 == 0:
            assert pool(copy_text("used")) is used


@given(st.lists(st.text(max_size=3), max_size=60), st.integers(1, 5))
def test_the_result_equals_the_argument(texts: list[str], limit: int) -> None:
    pool = StringPool(limit)
    assert [pool(copy_text(text)) for text in texts] == texts
    assert len(pool) <= 2 * limit
