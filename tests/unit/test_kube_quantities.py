"""Quantities of bytes as text."""

import pytest

from accelplane.kube.quantities import binary_text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (1, "1"), (1023, "1023"), (1024, "1Ki"), (1025, "1025"), (-2048, "-2Ki")]
)
def test_bytes_have_the_largest_suffix_that_leaves_a_whole_number(number: int, text: str) -> None:
    assert binary_text(number) == text
