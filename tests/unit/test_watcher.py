"""The watcher in an event loop: notifications, also for created, removed and replaced directories."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from trees import link, rename_often, write
from waiting import until

from accelplane.node.watcher import Watcher

pytestmark = pytest.mark.memory


@pytest.fixture
async def watcher() -> AsyncIterator[Watcher]:
    instance = Watcher()
    instance.start()
    yield instance
    instance.close()


class Subscriber:
    """Counts its notifications."""

    def __init__(self, watcher: Watcher, name: str, *directories: Path, written: bool = False) -> None:
        self.watcher, self.name, self.notified = watcher, name, 0
        self.watch(*directories, written=written)

    def watch(self, *directories: Path, written: bool = False) -> None:
        self.watcher.directories(self.name, map(str, directories), self.notify, written=written)

    def notify(self) -> None:
        self.notified += 1

    async def wait_notified(self) -> None:
        """Waits until it is notified of earlier changes, and resets the count."""
        await until(lambda: self.notified > 0)
        self.notified = 0


@pytest.fixture
async def sentry(watcher: Watcher, tmp_path_factory: pytest.TempPathFactory) -> "Sentry":
    return Sentry(watcher, tmp_path_factory.mktemp("sentry"))


class Sentry(Subscriber):
    """A separate directory: when its event arrives, all earlier events have arrived, too."""

    def __init__(self, watcher: Watcher, directory: Path) -> None:
        super().__init__(watcher, "sentry", directory)
        self.directory, self.count = directory, 0

    async def wait_all_notified(self) -> None:
        self.count += 1
        write(self.directory / str(self.count), "")
        await self.wait_notified()


async def test_created_and_removed_entries_cause_events(watcher: Watcher, tmp_path: Path) -> None:
    subscriber = Subscriber(watcher, "a", tmp_path)
    write(tmp_path / "file", "")
    await subscriber.wait_notified()
    os.rename(tmp_path / "file", tmp_path / "other")
    await subscriber.wait_notified()
    os.unlink(tmp_path / "other")
    await subscriber.wait_notified()


async def test_many_simultaneous_events_cause_one_notification(
    watcher: Watcher, sentry: Sentry, tmp_path: Path
) -> None:
    subscriber = Subscriber(watcher, "a", tmp_path)
    for number in range(100):
        (tmp_path / f"{number}").mkdir()
    await sentry.wait_all_notified()
    assert subscriber.notified == 1


async def test_rewritten_files_notify_subscribers_of_writes(watcher: Watcher, sentry: Sentry, tmp_path: Path) -> None:
    write(tmp_path / "file", "old")
    entries_only = Subscriber(watcher, "entries", tmp_path)
    with_writes = Subscriber(watcher, "writes", tmp_path, written=True)
    late = Subscriber(watcher, "late", tmp_path)
    write(tmp_path / "file", "new")
    await sentry.wait_all_notified()
    assert (entries_only.notified, with_writes.notified, late.notified) == (0, 1, 0)
    late.watch(tmp_path, written=True)
    write(tmp_path / "file", "newer")
    await sentry.wait_all_notified()
    assert (entries_only.notified, with_writes.notified, late.notified) == (0, 2, 1)


async def test_each_parent_of_a_missing_directory_is_watched(watcher: Watcher, sentry: Sentry, tmp_path: Path) -> None:
    subscriber = Subscriber(watcher, "a", tmp_path / "x/y/z")
    write(tmp_path / "other", "")
    await sentry.wait_all_notified()
    assert subscriber.notified == 0, "no parent directory has changed"
    for path in ("x", "x/y", "x/y/z", "x/y/z/card0"):
        (tmp_path / path).mkdir()
        await subscriber.wait_notified()
    write(tmp_path / "x/other", "")
    await sentry.wait_all_notified()
    assert subscriber.notified == 0, "parent directories are no longer watched"


async def test_a_directory_created_with_content_causes_an_event(watcher: Watcher, tmp_path: Path) -> None:
    subscriber = Subscriber(watcher, "a", tmp_path / "x/y/z")
    os.makedirs(tmp_path / "x/y/z/w")
    await subscriber.wait_notified()
    write(tmp_path / "x/y/z/file", "")
    await subscriber.wait_notified()


@pytest.mark.parametrize("rounds", [3])
async def test_a_recreated_directory_is_watched(watcher: Watcher, tmp_path: Path, rounds: int) -> None:
    directory = tmp_path / "dev/dri"
    directory.mkdir(parents=True)
    subscriber = Subscriber(watcher, "a", directory)
    for _ in range(rounds):
        shutil.rmtree(tmp_path / "dev")
        await subscriber.wait_notified()
        directory.mkdir(parents=True)
        await subscriber.wait_notified()
        write(directory / "card0", "")
        await subscriber.wait_notified()


async def test_a_directory_replaced_before_the_first_scan_is_watched(watcher: Watcher, tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    subscriber = Subscriber(watcher, "a", directory)
    directory.rmdir()
    directory.mkdir()
    await subscriber.wait_notified()
    write(directory / "file", "")
    await subscriber.wait_notified()


async def test_a_renamed_directory_is_another_one(watcher: Watcher, sentry: Sentry, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    subscriber = Subscriber(watcher, "a", tmp_path / "d")
    os.rename(tmp_path / "d", tmp_path / "e")
    await subscriber.wait_notified()
    write(tmp_path / "e/file", "")
    await sentry.wait_all_notified()
    assert subscriber.notified == 0
    (tmp_path / "d").mkdir()
    await subscriber.wait_notified()
    write(tmp_path / "d/file", "")
    await subscriber.wait_notified()


async def test_two_subscribers_of_one_directory_are_independent(
    watcher: Watcher, sentry: Sentry, tmp_path: Path
) -> None:
    one, other = Subscriber(watcher, "one", tmp_path), Subscriber(watcher, "other", tmp_path)
    write(tmp_path / "first", "")
    await sentry.wait_all_notified()
    assert (one.notified, other.notified) == (1, 1)
    watcher.forget("one")
    write(tmp_path / "second", "")
    await sentry.wait_all_notified()
    assert (one.notified, other.notified) == (1, 2)


async def test_one_directory_under_two_paths_is_watched_under_both(
    watcher: Watcher, sentry: Sentry, tmp_path: Path
) -> None:
    (tmp_path / "run/cdi").mkdir(parents=True)
    link(tmp_path / "var/run", tmp_path / "run")
    one = Subscriber(watcher, "one", tmp_path / "run/cdi")
    other = Subscriber(watcher, "other", tmp_path / "var/run/cdi")
    write(tmp_path / "run/cdi/first", "")
    await sentry.wait_all_notified()
    assert (one.notified, other.notified) == (1, 1)
    watcher.forget("other")
    write(tmp_path / "run/cdi/second", "")
    await sentry.wait_all_notified()
    assert (one.notified, other.notified) == (2, 1)
    shutil.rmtree(tmp_path / "run/cdi")
    await one.wait_notified()


async def test_a_subscriber_replaces_what_it_watches(watcher: Watcher, sentry: Sentry, tmp_path: Path) -> None:
    for name in ("old", "kept", "new"):
        (tmp_path / name).mkdir()
    subscriber = Subscriber(watcher, "a", tmp_path / "old", tmp_path / "kept")
    subscriber.watch(tmp_path / "kept", tmp_path / "new", tmp_path / "old/none")
    write(tmp_path / "old/file", "")
    await sentry.wait_all_notified()
    assert subscriber.notified == 0
    for name in ("kept", "new", "old/none"):
        write(tmp_path / name / "file", "")
        await subscriber.wait_notified()


async def test_unsubscribed_callbacks_are_not_called(watcher: Watcher, sentry: Sentry, tmp_path: Path) -> None:
    subscriber = Subscriber(watcher, "a", tmp_path, tmp_path / "none/deeper")
    watcher.forget("a")
    watcher.forget("never known")
    (tmp_path / "none").mkdir()
    await sentry.wait_all_notified()
    assert subscriber.notified == 0


async def test_a_subscriber_can_unsubscribe_during_notification(
    watcher: Watcher, sentry: Sentry, tmp_path: Path
) -> None:
    notified: list[str] = []

    def once(name: str) -> None:
        notified.append(name)
        watcher.forget("a")
        watcher.forget("b")

    watcher.directories("a", [str(tmp_path)], lambda: once("a"))
    watcher.directories("b", [str(tmp_path)], lambda: once("b"))
    write(tmp_path / "file", "")
    await sentry.wait_all_notified()
    write(tmp_path / "other", "")
    await sentry.wait_all_notified()
    assert len(notified) == 1


@pytest.mark.parametrize("path", ["file", "file/below", "loop", "loop/below", "x" * 300, "a\0b", "d/../none"])
async def test_paths_that_cannot_be_watched_are_ignored(watcher: Watcher, tmp_path: Path, path: str) -> None:
    write(tmp_path / "w/file", "")
    link(tmp_path / "w/loop", "loop")
    (tmp_path / "d").mkdir()
    subscriber = Subscriber(watcher, "a", tmp_path / "w" / path, tmp_path / "d")
    write(tmp_path / "d/file", "")
    await subscriber.wait_notified()


async def test_a_file_at_the_path_of_a_directory_is_watched_until_it_is_a_directory(
    watcher: Watcher, tmp_path: Path
) -> None:
    write(tmp_path / "d", "")
    subscriber = Subscriber(watcher, "a", tmp_path / "d")
    os.unlink(tmp_path / "d")
    await subscriber.wait_notified()
    (tmp_path / "d").mkdir()
    await subscriber.wait_notified()
    write(tmp_path / "d/file", "")
    await subscriber.wait_notified()


async def test_a_directory_replaced_while_events_were_lost_is_watched(watcher: Watcher, tmp_path: Path) -> None:
    (tmp_path / "noise").mkdir()
    (tmp_path / "d").mkdir()
    subscriber = Subscriber(watcher, "a", tmp_path / "d")
    noise = Subscriber(watcher, "noise", tmp_path / "noise")
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    rename_often(tmp_path / "noise", most // 2 + 10)
    (tmp_path / "d").rmdir()
    (tmp_path / "d").mkdir()
    await noise.wait_notified()
    await subscriber.wait_notified()
    write(tmp_path / "d/file", "")
    await subscriber.wait_notified()


async def test_a_closed_watcher_sends_no_notifications(tmp_path: Path) -> None:
    watcher = Watcher()
    watcher.start()
    subscriber = Subscriber(watcher, "a", tmp_path)
    watcher.close()
    write(tmp_path / "file", "")
    await asyncio.sleep(0)
    Subscriber(watcher, "b", tmp_path)
    assert subscriber.notified == 0


async def test_all_inotify_watches_are_removed(watcher: Watcher, tmp_path: Path) -> None:
    def watches() -> int:
        links = {
            entry: os.readlink(f"/proc/self/fd/{entry}")
            for entry in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{entry}")
        }
        return sum(
            Path(f"/proc/self/fdinfo/{entry}").read_text().count("inotify wd:")
            for entry, target in links.items()
            if target == "anon_inode:inotify"
        )

    before = watches()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Subscriber(watcher, name, tmp_path, tmp_path / name, tmp_path / "none")
    assert watches() == before + 3
    watcher.forget("a")
    watcher.forget("b")
    assert watches() == before
