"""The CDI directory: its files match the devices, with any files of other programs."""

import contextlib
import logging
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from trees import link, write

from accelplane.devices import CdiDevice, CdiNode
from accelplane.node.publishers.cdi_directory import CdiDirectory, CdiWriteError

pytestmark = pytest.mark.memory

CARD = CdiDevice(kind="a.com/gpu", name="card0", nodes=[CdiNode("/dev/dri/card0", "/dev/dri/card0")])
OTHER = replace(CARD, name="card1")
FOREIGN = "---\ncdiVersion: 0.6.0\nkind: a.com/gpu\nannotations: {x: y}\ndevices: [{name: card0, containerEdits: {}}]\n"


@pytest.fixture
def directory(tmp_path: Path) -> CdiDirectory:
    return CdiDirectory(str(tmp_path / "cdi"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cdi"


def names(place: Path) -> list[str]:
    return sorted(entry.name for entry in place.iterdir())


class TestPublish:
    def test_each_device_has_a_world_readable_file(self, directory: CdiDirectory, place: Path) -> None:
        directory.publish([CARD, OTHER])
        assert names(place) == ["a.com-gpu-card0.yaml", "a.com-gpu-card1.yaml"]
        assert {stat.S_IMODE(entry.stat().st_mode) for entry in place.iterdir()} == {0o644}
        assert stat.S_IMODE(place.stat().st_mode) == 0o755
        assert (directory.writes, directory.write_failures) == (2, 0)

    def test_publishing_no_devices_creates_no_files(self, directory: CdiDirectory, place: Path) -> None:
        directory.publish([])
        assert not place.exists()

    def test_correct_files_are_not_rewritten(self, directory: CdiDirectory, place: Path) -> None:
        directory.publish([CARD])
        before = (place / CARD.file_name).stat()
        directory.publish([CARD])
        CdiDirectory(str(place)).publish([CARD])
        assert (place / CARD.file_name).stat() == before
        assert directory.writes == 1

    @pytest.mark.parametrize("content", ["", "junk", "\0\xff", FOREIGN])
    def test_wrong_files_are_rewritten(self, directory: CdiDirectory, place: Path, content: str) -> None:
        directory.publish([CARD])
        right = (place / CARD.file_name).read_bytes()
        write(place / CARD.file_name, content)
        directory.publish([CARD])
        assert (place / CARD.file_name).read_bytes() == right

    def test_the_file_of_a_changed_device_is_rewritten(self, directory: CdiDirectory, place: Path) -> None:
        directory.publish([CARD])
        changed = replace(CARD, env=["A=b"])
        assert not directory.is_current(changed)
        directory.publish([changed])
        assert "- A=b" in (place / CARD.file_name).read_text()
        assert directory.is_current(changed)
        assert not directory.is_current(CARD)

    def test_no_temporary_files_remain(self, directory: CdiDirectory, place: Path) -> None:
        (place / CARD.file_name / "in the way").mkdir(parents=True)
        directory.publish([CARD, OTHER])
        assert names(place) == [CARD.file_name, OTHER.file_name]
        assert directory.write_failures == 1

    def test_each_cause_is_logged_once(
        self, directory: CdiDirectory, place: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (place / CARD.file_name / "in the way").mkdir(parents=True)
        directory.publish([CARD])
        directory.publish([CARD])
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert caplog.messages == [f"cannot write {place}/{CARD.file_name}: Is a directory"]

    def test_a_directory_that_cannot_be_created_is_reported(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write(tmp_path / "cdi", "a file")
        CdiDirectory(str(tmp_path / "cdi")).publish([CARD])
        assert caplog.messages == [f"cannot write {tmp_path}/cdi/{CARD.file_name}: File exists"]


class TestForeignFiles:
    @pytest.mark.parametrize("name", ["vendor.yaml", "vendor.json", ".hidden.yaml"])
    def test_names_in_foreign_files_are_not_published(
        self, directory: CdiDirectory, place: Path, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        write(
            place / name, FOREIGN if name.endswith("yaml") else '{"kind": "a.com/gpu", "devices": [{"name": "card0"}]}'
        )
        directory.publish([CARD, OTHER])
        assert names(place) == sorted([name, OTHER.file_name])
        assert caplog.messages == [
            f"CDI device a.com/gpu=card0 is already defined in {place}/{name}; that file is used"
        ]
        directory.ensure(CARD)
        assert names(place) == sorted([name, OTHER.file_name])

    def test_a_name_in_a_later_foreign_file_is_not_published(self, directory: CdiDirectory, place: Path) -> None:
        directory.publish([CARD])
        write(place / "vendor.yaml", FOREIGN)
        directory.publish([CARD])
        assert names(place) == ["vendor.yaml"]
        (place / "vendor.yaml").unlink()
        directory.publish([CARD])
        assert names(place) == [CARD.file_name]

    def test_changed_foreign_files_are_read_again(self, directory: CdiDirectory, place: Path) -> None:
        write(place / "vendor.yaml", FOREIGN)
        directory.publish([CARD])
        write(place / "vendor.yaml", FOREIGN.replace("card0", "card77"))
        directory.publish([CARD])
        assert names(place) == [CARD.file_name, "vendor.yaml"]

    def test_foreign_files_behind_links_count_as_for_runtimes(
        self, directory: CdiDirectory, place: Path, tmp_path: Path
    ) -> None:
        write(tmp_path / "store/vendor.yaml", FOREIGN)
        link(place / "vendor.yaml", tmp_path / "store/vendor.yaml")
        directory.publish([CARD])
        assert names(place) == ["vendor.yaml"]

    @pytest.mark.parametrize(
        "content",
        [
            b"", b"\xff\xfe\0", b"kind: a.com/gpu", b"kind: a.com/gpu\ndevices: 7", b"[]", b"- a\n- b: [",
            b"kind: 7\ndevices: [{name: card0}]", b"!!int ''", b"!!bool x", b"!!timestamp x", b"&a [*a]",
            b"[" * 300_000, b"- " * 300_000, b"{a: " * 200_000, b"? " * 200_000,
            b"a1: &a1 {x: 1}\n" + b"".join(b"a%d: &a%d {<<: [%s]}\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 50))
                                           for n in range(2, 20)),
            b"kind: a.com/gpu\ndevices: [{name: card0}]\n#" + b"x" * 1024 * 1024,
        ],
        ids=lambda content: str(content[:25]),
    )  # fmt: skip
    def test_invalid_foreign_files_do_not_prevent_publishing(
        self, directory: CdiDirectory, place: Path, content: bytes
    ) -> None:
        write(place / "vendor.yaml", content)
        directory.publish([CARD])
        assert names(place) == [CARD.file_name, "vendor.yaml"]

    @given(
        st.binary(max_size=200) | st.text(st.sampled_from("kind: devics[]{}&*!<>\n-'\"a0"), max_size=80).map(str.encode)
    )
    def test_foreign_files_of_any_content_do_not_prevent_publishing(self, tmp_path: Path, content: bytes) -> None:
        place = Path(tempfile.mkdtemp(dir=tmp_path))
        write(place / "vendor.yaml", content)
        CdiDirectory(str(place)).publish([CARD])
        assert names(place) == [CARD.file_name, "vendor.yaml"]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def fifo_with_a_writer(path: Path) -> None:
    os.mkfifo(path)
    os.open(path, os.O_RDWR)  # a writer that writes nothing until the process ends


def make_directory(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to("nowhere.yaml")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def open_files() -> Counter[str]:
    """The open files of this process. Those of other tests may be closed at any time: compare only new ones."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")] += 1
    return found


@pytest.mark.parametrize("make", [fifo, fifo_with_a_writer, make_directory, dangling, loop, link_to_a_device, huge])
class TestOddThings:
    def test_other_file_types_in_the_directory_are_ignored_without_blocking(
        self, directory: CdiDirectory, place: Path, make: Callable[[Path], None]
    ) -> None:
        place.mkdir()
        make(place / "vendor.yaml")
        make(place / "a.com-gpu-card7.yaml")
        before = open_files()
        for _ in range(3):
            directory.publish([CARD])
            directory.ensure(OTHER)
            assert directory.stale(["a.com/gpu"], []).keys() == {"a.com/gpu=card0", "a.com/gpu=card1"}
        assert not open_files() - before

    def test_other_file_types_at_the_path_of_a_file_are_replaced_or_reported(
        self, directory: CdiDirectory, place: Path, make: Callable[[Path], None]
    ) -> None:
        place.mkdir()
        make(place / CARD.file_name)
        before = open_files()
        directory.publish([CARD])
        assert not open_files() - before
        if make is make_directory:
            with pytest.raises(CdiWriteError, match="Is a directory"):
                directory.ensure(CARD)
        else:
            assert stat.S_ISREG((place / CARD.file_name).lstat().st_mode)
            assert directory.is_current(CARD)

    def test_other_file_types_at_the_path_of_a_stale_file_are_removed_or_reported(
        self, directory: CdiDirectory, place: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        directory.publish([CARD])
        (place / CARD.file_name).unlink()
        make(place / CARD.file_name)
        write(place / "vendor.yaml", FOREIGN)
        directory.publish([CARD])
        directory.remove({CARD.qualified_name: CARD.file_name})
        assert (place / CARD.file_name).is_dir() == (make is make_directory)
        assert any("cannot remove" in message for message in caplog.messages) == (make is make_directory)


class TestEnsure:
    def test_missing_or_different_content_is_written(self, directory: CdiDirectory, place: Path) -> None:
        directory.ensure(CARD)
        (place / CARD.file_name).unlink()
        assert not directory.is_current(CARD)
        directory.ensure(CARD)
        write(place / CARD.file_name, "junk")
        directory.ensure(CARD)
        assert directory.is_current(CARD)
        assert directory.writes == 3

    def test_errors_of_writes_are_raised(self, tmp_path: Path) -> None:
        write(tmp_path / "file", "")
        directory = CdiDirectory(str(tmp_path / "file/cdi"))
        with pytest.raises(CdiWriteError, match=f"cannot write {tmp_path}/file/cdi/{CARD.file_name}: Not a directory"):
            directory.ensure(CARD)
        with pytest.raises(CdiWriteError, match="has no container edits"):
            directory.ensure(CdiDevice(kind="a/b", name="c"))
        assert directory.write_failures == 2


class TestStale:
    def test_stale_files_are_those_of_our_kinds_without_a_device(self, directory: CdiDirectory, place: Path) -> None:
        nic = replace(CARD, kind="a.com/nic")
        directory.publish([CARD, OTHER, nic])
        write(place / "a.com-gpu-other.yaml", FOREIGN)
        write(place / "a.com-gpu-junk.yaml", "junk")
        write(place / "a.com-gpu-card5.json", FOREIGN.replace("card0", "card5"))
        assert directory.stale(["a.com/gpu"], [OTHER.qualified_name]) == {CARD.qualified_name: CARD.file_name}
        assert directory.stale(["a.com/gpu", "a.com/nic"], [CARD.qualified_name, OTHER.qualified_name]) == {
            nic.qualified_name: nic.file_name
        }
        assert directory.stale([], []) == {}

    def test_files_of_others_with_similar_names_are_not_stale(self, directory: CdiDirectory, place: Path) -> None:
        write(place / "a.com-gpu-card0.yaml", FOREIGN.replace("a.com/gpu", "b.org/nic"))
        assert directory.stale(["a.com/gpu", "b.org/nic"], []) == {}

    def test_stale_files_are_removed(
        self, directory: CdiDirectory, place: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        directory.publish([CARD])
        directory.remove({CARD.qualified_name: CARD.file_name})
        directory.remove({CARD.qualified_name: CARD.file_name})
        assert names(place) == []
        assert not directory.is_current(CARD)
        assert caplog.messages == [f"removed {place}/{CARD.file_name} of a removed device"]

    def test_a_missing_directory_has_no_stale_files(self, directory: CdiDirectory) -> None:
        assert directory.stale(["a.com/gpu"], []) == {}


class TestGroups:
    """Groups of device nodes, which only root can set: the tests read those of the host's files by a fake stat."""

    @pytest.fixture
    def groups(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
        groups = {f"{tmp_path}/dev/dri/card0": 0}
        real = os.stat

        def fake(path: str, **options: bool) -> os.stat_result:
            if path in groups:
                return os.stat_result((0o20660, 0, 0, 1, 0, groups[path], 0, 0, 0, 0))
            return real(path, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "stat", fake)
        return groups

    def test_containers_get_the_groups_of_nodes_once_udev_has_set_them(
        self, groups: dict[str, int], tmp_path: Path, place: Path
    ) -> None:
        directory = CdiDirectory(str(place), groups_below=str(tmp_path))
        file = place / CARD.file_name
        directory.publish([CARD])
        assert "additionalGids" not in file.read_text()
        assert "cdiVersion: 0.5.0" in file.read_text()
        groups[f"{tmp_path}/dev/dri/card0"] = 105
        assert not directory.is_current(CARD)
        directory.ensure(CARD)
        assert "additionalGids:\n    - 105\n" in file.read_text()
        assert "cdiVersion: 0.7.0" in file.read_text()
        assert directory.is_current(CARD)

    def test_files_have_no_groups_without_the_option(self, groups: dict[str, int], tmp_path: Path, place: Path) -> None:
        groups[f"{tmp_path}/dev/dri/card0"] = 105
        CdiDirectory(str(place)).publish([CARD])
        assert "additionalGids" not in (place / CARD.file_name).read_text()
