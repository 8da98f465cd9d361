"""The label file that node-feature-discovery reads."""

import os
import stat
import threading
from pathlib import Path

import pytest
from trees import write

from accelplane.node.publishers.labels import LabelFile


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
