"""The directory for files of a test run."""

import os
import tempfile
import time
from pathlib import Path

import memorydirectory
import pytest

GIBIBYTES = 2**30 // 4096


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a process without a directory."""
    monkeypatch.delenv(memorydirectory.VARIABLE)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    if not memorydirectory.is_suitable(os.statvfs(tmp_path)):
        pytest.skip("no room")
    return tmp_path


@pytest.mark.parametrize(
    ("blocks", "flags", "suitable"),
    [
        (2 * GIBIBYTES, 0, True),
        (16384, 0, False),
        (2 * GIBIBYTES, os.ST_RDONLY, False),
        (2 * GIBIBYTES, os.ST_NOEXEC | os.ST_NOSUID, False),
        (2 * GIBIBYTES, os.ST_NODEV, False),
    ],
)
def test_a_filesystem_needs_room_for_all_kinds_of_files(blocks: int, flags: int, suitable: bool) -> None:
    status = os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, flags, 255))
    assert memorydirectory.is_suitable(status) is suitable


def test_without_a_filesystem_in_memory_the_default_directory_is_used(tmp_path: Path) -> None:
    remove = memorydirectory.create(tmp_path / "missing")
    directory = memorydirectory.path()
    assert directory.parent == Path(tempfile.gettempdir())
    assert not memorydirectory.in_memory()
    remove()
    assert not directory.exists()


def test_a_child_uses_the_directory_of_its_parent(parent: Path) -> None:
    remove = memorydirectory.create(parent)
    directory = memorydirectory.path()
    memorydirectory.create(parent)()
    assert memorydirectory.path() == directory
    assert directory.exists()
    remove()


def test_a_directory_is_built_once_and_again_after_a_failure(parent: Path) -> None:
    remove = memorydirectory.create(parent)
    calls: list[Path] = []

    def build(directory: Path) -> None:
        calls.append(directory)
        (directory / f"file-{len(calls)}").touch()
        if len(calls) == 1:
            raise ValueError("the first call fails")

    with pytest.raises(ValueError, match="first call"):
        memorydirectory.build_once("things", build)
    built = memorydirectory.build_once("things", build)
    assert memorydirectory.build_once("things", build) == built
    assert [file.name for file in built.iterdir()] == ["file-2"]
    remove()
    assert not built.exists()


def test_files_of_failed_tests_are_kept_for_a_day(parent: Path) -> None:
    remove = memorydirectory.create(parent)
    directory = memorydirectory.path()
    (directory / "file").touch()
    remove()
    memorydirectory.create(parent)()
    assert (directory / "file").exists()
    old = time.time() - 25 * 3600
    os.utime(directory, (old, old))
    memorydirectory.create(parent)()
    assert not directory.exists()
