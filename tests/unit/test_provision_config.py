"""Configuration files of provisioning: priority and errors."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.provision.config import CONFIG_LIMIT, ConfigError, ConfigFile, find, quote, read


@pytest.mark.parametrize(
    ("existing", "node_name", "counts"),
    [
        ([], "node1", None),
        (["qat.conf"], "", "qat.conf"),
        (["qat.conf"], "node1", "qat.conf"),
        (["qat.conf", "qat-node1.conf"], "node1", "qat-node1.conf"),
        (["qat.conf", "qat-node1.conf"], "node2", "qat.conf"),
        (["qat-node1.conf"], "", None),
        (["dlb.conf"], "node1", None),
    ],
)
def test_the_file_of_the_node_has_priority(
    tmp_path: Path, existing: list[str], node_name: str, counts: str | None
) -> None:
    for name in existing:
        (tmp_path / name).write_text(name)
    found = find(str(tmp_path), "qat", node_name)
    assert found == (ConfigFile(str(tmp_path / counts), counts) if counts else None)


def test_a_missing_directory_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert find(str(tmp_path / "nothing"), "qat", "node1") is None
    assert find(str(tmp_path / "file"), "qat", "node1") is None


def test_file_names_are_escaped_for_terminals(tmp_path: Path) -> None:
    (tmp_path / "qat-\x1b[2J.conf").mkdir()
    with pytest.raises(ConfigError) as raised:
        find(str(tmp_path), "qat", "\x1b[2J")
    assert str(raised.value).isprintable()


def test_a_node_name_too_long_for_a_file_name_has_no_own_file(tmp_path: Path) -> None:
    (tmp_path / "qat.conf").write_text("dc")
    assert find(str(tmp_path), "qat", "n" * 253) == ConfigFile(f"{tmp_path}/qat.conf", "dc")


@pytest.mark.parametrize("node_name", ["../etc/passwd", "a/b", "a\0b", "n" * 254])
def test_a_node_name_never_resolves_outside_the_directory(tmp_path: Path, node_name: str) -> None:
    with pytest.raises(ConfigError, match=r"^NODE_NAME: found .*, expected the name of a Kubernetes node$"):
        find(str(tmp_path), "qat", node_name)


def directory(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def make_large_file(path: Path) -> None:
    path.write_bytes(b"#" * (CONFIG_LIMIT + 1))


def no_text(path: Path) -> None:
    path.write_bytes(b"ServicesEnabled=dc\n\xff\xfe")


def make_link_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "line", "found"),
    [
        (directory, 0, "Is a directory"),
        (fifo, 0, "not a regular file"),
        (make_large_file, 0, "more than 1048576 bytes"),
        (no_text, 2, "ff fe"),
        (make_link_loop, 0, "symbolic links"),
    ],
)
def test_errors_have_file_and_line(tmp_path: Path, make: object, line: int, found: str) -> None:
    path = tmp_path / "qat.conf"
    make(path)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]
    with pytest.raises(ConfigError) as problem:
        read(str(path))
    assert (problem.value.file, problem.value.line) == (str(path), line)
    assert found in problem.value.found


def test_a_file_of_a_mounted_configmap_is_read_through_its_links(tmp_path: Path) -> None:
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "qat.conf").write_text("dc")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "qat.conf").symlink_to("..data/qat.conf")
    assert read(f"{tmp_path}/qat.conf") == ConfigFile(f"{tmp_path}/qat.conf", "dc")


@given(st.text())
def test_quoted_texts_are_short_and_printable(text: str) -> None:
    assert len(quote(text)) <= 81 * 10 + 2
    assert quote(text).isprintable()


def test_a_byte_order_mark_is_named(tmp_path: Path) -> None:
    file = tmp_path / "dsa.conf"
    file.write_text("\ufeff[]")
    with pytest.raises(ConfigError, match=r"dsa\.conf:1: found a byte order mark, expected UTF-8 without one"):
        read(str(file))
