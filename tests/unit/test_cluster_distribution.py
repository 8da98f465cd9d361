"""The distribution of cluster tests over processes."""

from collections import Counter

from cluster import distribution
from manifests import REPOSITORY

FILES = sorted(str(file) for file in (REPOSITORY / "tests/cluster").glob("test_*.py"))


def test_requested_files_exist_and_are_in_one_group() -> None:
    named = Counter(name for files in distribution.GROUPS for name in files)
    assert set(named.values()) == {1}
    assert {f"{REPOSITORY}/tests/cluster/test_{name}.py" for name in named} <= set(FILES)


def test_files_of_a_group_are_run_one_after_the_other() -> None:
    order = [distribution.group(file) for file in sorted(FILES, key=distribution.position)]
    changes = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert len(changes) == len(set(changes))
    assert changes[: len(distribution.GROUPS)] == [files[0] for files in distribution.GROUPS]


def test_another_file_is_its_own_group() -> None:
    assert distribution.group("tests/cluster/test_of_something_new.py") == "of_something_new"


def test_two_turns_run_all_parameters_and_each_turn_all_functions() -> None:
    functions = ["a", "b", "a", "b", "a", "single"]
    first, second = (distribution.in_turn(functions, turn) for turn in (0, 1))
    assert first == [True, True, False, False, True, True]
    assert second == [False, False, True, True, False, True]
