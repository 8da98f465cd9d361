"""inotify: events, and reports of lost events and ended watches."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from trees import link, rename_often, write

from accelplane.host.inotify import COME_OR_GONE, WRITTEN, Inotify, InotifyEvent

pytestmark = pytest.mark.memory


@pytest.fixture
def inotify() -> Iterator[Inotify]:
    instance = Inotify()
    yield instance
    instance.close()


def names(inotify: Inotify) -> list[str]:
    return [event.name for event in inotify.read()]


def test_created_and_removed_entries_cause_events(inotify: Inotify, tmp_path: Path) -> None:
    inotify.add(str(tmp_path))
    write(tmp_path / "a", "text")
    os.rename(tmp_path / "a", tmp_path / "b")
    os.unlink(tmp_path / "b")
    (tmp_path / "\udcff").mkdir()
    assert names(inotify) == ["a", "a", "b", "b", "\udcff"]
    assert names(inotify) == []


def test_writes_cause_events_only_if_requested(inotify: Inotify, tmp_path: Path) -> None:
    write(tmp_path / "file", "old")
    number = inotify.add(str(tmp_path))
    write(tmp_path / "file", "new")
    assert names(inotify) == []
    assert inotify.add(str(tmp_path), COME_OR_GONE | WRITTEN) == number
    write(tmp_path / "file", "newer")
    assert list(inotify.read()) == [InotifyEvent(number, "file", removed=False, written=True)]


def test_a_second_watch_for_fewer_events_does_not_narrow_the_first(inotify: Inotify, tmp_path: Path) -> None:
    write(tmp_path / "d/file", "")
    link(tmp_path / "link", "d")
    number = inotify.add(str(tmp_path / "d"), COME_OR_GONE | WRITTEN)
    assert inotify.add(str(tmp_path / "link")) == number
    write(tmp_path / "d/file", "new")
    assert names(inotify) == ["file"]


def test_removing_a_directory_ends_its_watch(inotify: Inotify, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    number = inotify.add(str(tmp_path / "d"))
    (tmp_path / "d").rmdir()
    events = list(inotify.read())
    assert [event.removed for event in events] == [False, True]
    assert {(event.watch, event.name) for event in events} == {(number, "")}
    inotify.remove(number)


@pytest.mark.parametrize(
    ("path", "code"),
    [("none", errno.ENOENT), ("file", errno.ENOTDIR), ("loop", errno.ELOOP), ("x" * 300, errno.ENAMETOOLONG),
     ("d\0x", errno.EINVAL)],
)  # fmt: skip
def test_a_path_that_is_not_a_directory_is_rejected_with_its_name(
    inotify: Inotify, tmp_path: Path, path: str, code: int
) -> None:
    write(tmp_path / "file", "")
    (tmp_path / "d").mkdir()
    link(tmp_path / "loop", "loop")
    with pytest.raises(OSError, match=re.escape(ascii(path)[1:-1])) as caught:
        inotify.add(f"{tmp_path}/{path}")
    assert caught.value.errno == code
    assert caught.value.filename == f"{tmp_path}/{path}"


def test_lost_events_are_reported(inotify: Inotify, tmp_path: Path) -> None:
    inotify.add(str(tmp_path))
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    rename_often(tmp_path, most // 2 + 10)
    events: list[InotifyEvent] = []
    while found := list(inotify.read()):
        events += found
    assert events[-1].watch == -1
