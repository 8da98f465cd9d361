"""Directories that are opened with openat2(2), and the way without it."""

import os
from pathlib import Path

import pytest

from accelplane.host import Host
from accelplane.host.openat2 import open_directory


@pytest.fixture
def root(tmp_path: Path) -> int:
    (tmp_path / "root/a/b").mkdir(parents=True)
    (tmp_path / "root/file").write_text("")
    (tmp_path / "outside").mkdir()
    (tmp_path / "root/link").symlink_to("a")
    (tmp_path / "root/a/escape").symlink_to("../../outside")
    return os.open(tmp_path / "root", os.O_PATH)


def test_a_directory_of_any_depth_is_opened(root: int, tmp_path: Path) -> None:
    descriptor = open_directory(root, "a/b")
    try:
        assert os.path.samestat(os.fstat(descriptor), (tmp_path / "root/a/b").stat())
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
        os.close(root)


@pytest.mark.parametrize(
    "path", ["none", "file", "link", "link/b", "a/escape", "..", "a/../../outside", "/", "a\0b", "a/" * 3000]
)
def test_links_and_paths_that_lead_out_are_not_opened(root: int, path: str) -> None:
    try:
        assert open_directory(root, path) == -1
    finally:
        os.close(root)


def test_a_file_is_read_where_openat2_cannot_open_its_directory(tmp_path: Path) -> None:
    part, depth = "x" * 200, 30  # together longer than a path may be
    directory = os.open(tmp_path, os.O_PATH)
    for _ in range(depth):
        os.mkdir(part, dir_fd=directory)
        above, directory = directory, os.open(part, os.O_PATH, dir_fd=directory)
        os.close(above)
    with os.fdopen(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=directory), "w") as file:
        file.write("text")
    os.close(directory)
    host, path = Host(tmp_path), f"/{part}" * depth
    assert [host.read_once(f"{path}/file", 100) for _ in range(2)] == [b"text"] * 2
    host.close_directories()
