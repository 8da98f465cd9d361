"""Node labels: values split and joined again, and the file that NFD reads."""

import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import write

from accelplane.node.nfd import LabelFile, joined_value, numbered, split_value


@pytest.mark.parametrize(
    ("text", "limit", "marker", "pieces"),
    [
        ("", 63, "Z", [""]),
        ("short", 63, "Z", ["short"]),
        ("x" * 63, 63, "Z", ["x" * 63]),
        ("x" * 64, 63, "Z", ["x" * 63, "Zx"]),
        ("x" * 126, 63, "Z", ["x" * 63, "Z" + "x" * 62, "Zx"]),
        # cut right after the last letter or digit, never before the marker has its room
        ("ab.cd", 3, "Z", ["ab", "Z.c", "Zd"]),
        ("0-1.2_3", 4, "Z", ["0-1", "Z.2", "Z_3"]),
        ("ab.", 2, "Z", ["ab", "Z."]),
        ("abc", 3, "", ["abc"]),
        ("abcd", 2, "", ["ab", "cd"]),
        ("abcdefg", 4, "ZZ", ["abcd", "ZZef", "ZZg"]),
        ("aé", 1, "", ["a", "é"]),
    ],
)
def test_long_values_are_cut_after_letters_and_digits(text: str, limit: int, marker: str, pieces: list[str]) -> None:
    assert split_value(text, limit, marker) == pieces
    assert joined_value(pieces, marker) == text


@pytest.mark.parametrize(
    ("text", "limit", "marker", "why"),
    [
        ("text", 1, "Z", "leave no room behind the marker 'Z'"),
        ("text", 0, "", "leave no room"),
        ("....", 3, "Z", "no letter or digit to be split after"),
        ("abc....", 3, "Z", "'..' has no letter or digit"),
        ("éééé", 3, "Z", "no letter or digit"),
    ],
)
def test_values_that_cannot_be_cut_are_refused(text: str, limit: int, marker: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        split_value(text, limit, marker)


@given(st.text(max_size=300), st.integers(1, 70), st.sampled_from(["", "Z", "ZZ"]))
def test_pieces_fit_end_well_and_join_to_the_value(text: str, limit: int, marker: str) -> None:
    try:
        pieces = split_value(text, limit, marker)
    except ValueError:
        return
    assert all(len(piece) <= limit for piece in pieces)
    assert all(piece[-1].isascii() and piece[-1].isalnum() for piece in pieces[:-1])
    assert joined_value(pieces, marker) == text


@given(st.text("0123456789._-", max_size=400))
def test_lists_of_numbers_become_numbered_labels(text: str) -> None:
    try:
        labels = numbered("gpu.intel.com/gpu-numbers", text)
    except ValueError:
        return
    names = list(labels)
    assert names == [f"gpu.intel.com/gpu-numbers{number if number > 1 else ''}" for number in range(1, len(names) + 1)]
    assert joined_value(list(labels.values())) == text


def test_a_piece_without_its_marker_is_taken_as_it_is() -> None:
    assert joined_value(["ab", "cd", "Zef"]) == "abcdef"
    assert joined_value([]) == ""


class TestLabelFile:
    def test_holds_a_line_for_each_label(self, tmp_path: Path) -> None:
        file = LabelFile(str(tmp_path / "labels.txt"))
        assert file.write({"b": "2", "a": "ü"})
        assert (tmp_path / "labels.txt").read_bytes() == "a=ü\nb=2\n".encode()
        assert stat.S_IMODE((tmp_path / "labels.txt").stat().st_mode) == 0o644
        assert os.listdir(tmp_path) == ["labels.txt"]

    def test_is_replaced_only_when_labels_differ(self, tmp_path: Path) -> None:
        file = LabelFile(str(tmp_path / "labels.txt"))
        file.write({"a": "1", "b": "2"})
        inode = (tmp_path / "labels.txt").stat().st_ino
        assert not LabelFile(str(tmp_path / "labels.txt")).write({"b": "2", "a": "1"})
        assert (tmp_path / "labels.txt").stat().st_ino == inode
        for labels in ({"a": "1"}, {"a": "1", "b": "2", "c": "3"}):
            assert file.write(labels)

    def test_goes_when_there_are_no_labels(self, tmp_path: Path) -> None:
        file = LabelFile(str(tmp_path / "labels.txt"))
        assert not file.write({})
        file.write({"a": "1"})
        assert file.write({})
        assert not file.remove()
        assert os.listdir(tmp_path) == []

    def test_is_never_seen_half_written(self, tmp_path: Path) -> None:
        """A reader beside a writer sees one set of labels or the other, and only names that NFD skips beside them."""
        path = tmp_path / "labels.txt"
        sets = [{f"label-{name}-{number}": name * 40 for number in range(50)} for name in "ab"]
        file = LabelFile(str(path))
        file.write(sets[0])
        whole = {path.read_bytes()}
        file.write(sets[1])
        whole.add(path.read_bytes())
        done = threading.Event()
        seen: set[bytes] = set()
        beside: set[str] = set()

        def read() -> None:
            while not done.is_set():
                seen.add(path.read_bytes())
                beside.update(os.listdir(tmp_path))

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(200):
            file.write(sets[number % 2])
        done.set()
        reader.join()
        assert seen <= whole
        assert all(name == "labels.txt" or name.startswith(".") for name in beside)

    def test_replaces_whatever_lies_in_its_place(self, tmp_path: Path) -> None:
        path = tmp_path / "labels.txt"
        file = LabelFile(str(path))
        os.mkfifo(path)
        assert file.write({"a": "1"})
        path.unlink()
        write(tmp_path / "target", "a=1\n")
        path.symlink_to("target")
        assert file.write({"a": "2"})
        assert (tmp_path / "target").read_text() == "a=1\n"
        assert path.read_text() == "a=2\n"

    def test_that_cannot_be_written_leaves_nothing_behind(self, tmp_path: Path) -> None:
        (tmp_path / "labels.txt").mkdir()
        with pytest.raises(IsADirectoryError):
            LabelFile(str(tmp_path / "labels.txt")).write({"a": "1"})
        with pytest.raises(FileNotFoundError):
            LabelFile(str(tmp_path / "none/labels.txt")).write({"a": "1"})
        assert os.listdir(tmp_path) == ["labels.txt"]
