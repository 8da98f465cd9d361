"""Reading small files within a limit, and closing descriptors."""

import os
from pathlib import Path

import pytest

from accelplane.descriptors import closing, read_limited


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_regular_file_of_the_maximum_size_is_read(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"12345678")
    link.symlink_to(path)
    assert read_limited(path, 8) == read_limited(str(link), 8) == b"12345678"


def test_unusable_files_raise_an_error_with_the_reason_and_leave_no_descriptor_open(tmp_path: Path) -> None:
    large, fifo, link = tmp_path / "large", tmp_path / "fifo", tmp_path / "link"
    large.write_bytes(b"123456789")
    os.mkfifo(fifo)
    link.symlink_to(large)
    before = open_descriptors()
    for path, follow, reason in (
        (large, True, "more than 8 bytes"),
        (fifo, True, "not a regular file"),
        (Path("/dev/zero"), True, "not a regular file"),
        (tmp_path, True, "Is a directory"),
        (tmp_path / "none", True, "No such file or directory"),
        (Path("a\0b"), True, "embedded null byte"),
        (link, False, "Too many levels of symbolic links"),
    ):
        with pytest.raises(OSError, match=reason):
            read_limited(path, 8, follow=follow)
    assert open_descriptors() == before


def test_a_pipe_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    assert read_limited(path, 8, regular=False) == b""
    with closing(os.open(path, os.O_RDWR)) as writer:
        assert read_limited(path, 8, regular=False) == b""
        os.write(writer, b"12345678")
        assert read_limited(path, 8, regular=False) == b"12345678"
        os.write(writer, b"123456789")
        with pytest.raises(OSError, match="more than 8 bytes"):
            read_limited(path, 8, regular=False)


def test_a_block_closes_its_descriptor_also_after_an_error() -> None:
    before = open_descriptors()
    with pytest.raises(ValueError, match="within the block"), closing(os.open("/dev/null", os.O_RDONLY)):
        raise ValueError("within the block")
    assert open_descriptors() == before
