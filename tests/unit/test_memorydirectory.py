"""The directory in memory for the files of tests."""

import os
import time
from pathlib import Path

import pytest
from memorydirectory import is_suitable, memory_directory

GIBIBYTES = 2**30 // 4096


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
    assert is_suitable(status) is suitable


def test_without_a_filesystem_in_memory_there_is_no_directory(tmp_path: Path) -> None:
    with memory_directory(tmp_path / "missing") as directory:
        assert directory is None


def test_files_of_failed_tests_are_kept_for_a_day(tmp_path: Path) -> None:
    if not is_suitable(os.statvfs(tmp_path)):
        pytest.skip("no room")
    with memory_directory(tmp_path) as directory:
        assert directory is not None
    assert not directory.exists(), "empty"
    with memory_directory(tmp_path) as directory:
        assert directory is not None
        (directory / "file").touch()
    with memory_directory(tmp_path):
        assert (directory / "file").exists()
    old = time.time() - 25 * 3600
    os.utime(directory, (old, old))
    with memory_directory(tmp_path):
        assert not directory.exists()
