"""The directory for the temporary files of `make test`."""

import os
import tempfile

import pytest
from temporary_directory import directory

GIBIBYTES = 2**30 // 4096


@pytest.mark.parametrize(
    ("variables", "blocks", "flags", "memory"),
    [
        ({}, 4 * GIBIBYTES, 0, True),
        ({"TMPDIR": "/var/tmp"}, 4 * GIBIBYTES, 0, False),
        ({}, 16384, 0, False),
        ({}, 4 * GIBIBYTES, os.ST_NOEXEC | os.ST_NOSUID, False),
        ({}, 4 * GIBIBYTES, os.ST_NODEV, False),
    ],
)
def test_files_are_in_memory_if_there_is_room_for_all_kinds_of_files(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], blocks: int, flags: int, memory: bool
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status = os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, flags, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    assert directory() == ("/dev/shm" if memory else tempfile.gettempdir())


def test_without_shared_memory_files_are_in_the_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> os.statvfs_result:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(os, "statvfs", fail)
    assert directory() == tempfile.gettempdir()
