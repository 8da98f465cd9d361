"""Quantities of bytes as text."""

import pytest

from accelplane.kube.quantities import binary_text, number_of


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (1, "1"), (1023, "1023"), (1024, "1Ki"), (1025, "1025"), (-2048, "-2Ki")]
)
def test_bytes_have_the_largest_suffix_that_leaves_a_whole_number(number: int, text: str) -> None:
    assert binary_text(number) == text


@pytest.mark.parametrize(
    ("suffix", "power"),
    [("n", -9), ("u", -6), ("m", -3), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)],
)
def test_decimal_suffixes_are_powers_of_ten(suffix: str, power: int) -> None:
    assert number_of(f"2{suffix}") == number_of(f"2e{power}")


@pytest.mark.parametrize(("suffix", "power"), [("Ki", 1), ("Mi", 2), ("Gi", 3), ("Ti", 4), ("Pi", 5), ("Ei", 6)])
def test_binary_suffixes_are_powers_of_1024(suffix: str, power: int) -> None:
    assert number_of(f"2{suffix}") == 2 * 1024**power
